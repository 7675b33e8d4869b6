"""Compile Triton's device functions to machine code for any architecture, without a GPU."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from attnfuzz.kernels.contract import BuildError
from attnfuzz.kernels.lowering import MachineCode, Unit, capability, shared_limit
from attnfuzz.kernels.support.compiler_output import captured
from attnfuzz.kernels.triton.machine_code.descriptors import astray
from attnfuzz.kernels.triton.machine_code.races import overwritten

__all__ = ["Call", "cannot_lower", "compile_now", "units"]

_TALKS = "bytes spill stores"
_LAST_LINES = 3
"""Lines of source shown for an error, the last one being its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A launch as `JITFunction.warmup` takes it, with dtypes instead of tensors."""

    name: str
    function: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def compile(self) -> Any:
        """Compile for the active driver's device, or take the code from Triton's own cache."""
        return self.function.warmup(*self.arguments, grid=(1,), **self.constants)


def compile_now(calls: Iterable[Call]) -> None:
    """Compile for this machine's GPU.

    Raises:
        BuildError: with the compiler's text, or with Triton's error at a launch if no block can have so much shared memory.
    """
    try:
        for each in calls:
            _fits(each.compile())
    except Exception as error:  # Triton raises a dozen unrelated types
        raise BuildError(f"{type(error).__name__}: {error}") from error


def _fits(kernel: Any) -> None:
    driver = importlib.import_module("triton.runtime.driver").driver.active
    limit = _most_shared(driver.get_current_device())
    if kernel.metadata.shared > limit:
        raise _out_of_shared(kernel.metadata.shared, limit)


@functools.cache
def _most_shared(device: int) -> int:
    """Return the bytes of shared memory that a block can have; the driver takes milliseconds for a device's properties."""
    driver = importlib.import_module("triton.runtime.driver").driver.active
    return int(driver.utils.get_device_properties(device)["max_shared_mem"])


def _out_of_shared(shared: int, limit: int) -> Exception:
    """Triton's own error."""
    error: Exception = importlib.import_module("triton.runtime.errors").OutOfResources(shared, limit, "shared memory")
    return error


def cannot_lower() -> str | None:
    """The package that is missing, or None."""
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: pip install {package}"
    return None


def units(calls: Iterable[Call], arch: str) -> tuple[Unit, ...]:
    """Make one Unit per launch."""
    return tuple(_Unit(each, arch) for each in calls)


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    call: Call
    arch: str

    @property
    def function(self) -> str:
        return self.call.name

    def identity(self) -> str | None:
        """None: Triton's own cache is keyed by everything that matters."""
        return None

    def compile(self) -> MachineCode:
        knobs = importlib.import_module("triton.knobs")
        # Triton gets ptxas' figures anyway; this makes it print them.
        knobs.nvidia.dump_ptxas_log = True
        with captured() as printed, _target(capability(self.arch)), contextlib.redirect_stdout(io.StringIO()) as said:
            try:
                kernel = self.call.compile()
            except Exception as error:  # Triton raises a dozen unrelated types
                sys.stderr.flush()
                raise BuildError(_words(error, printed.read_text(errors="replace"))) from error
        shared, limit = int(kernel.metadata.shared), shared_limit(self.arch)
        refused = None
        if shared > limit:
            refused = str(_out_of_shared(shared, limit))
        log, hopper = said.getvalue(), capability(self.arch) // 10 == 9
        return MachineCode(
            cubin=kernel.asm["cubin"],
            log=lambda: log if _TALKS in log else _assembled(kernel, capability(self.arch)),
            dynamic_shared={kernel.metadata.name: shared},
            races=overwritten(kernel.asm["ttgir"]) if hopper else None,
            suspects=astray if hopper else None,
            refused=refused,
        )


@contextlib.contextmanager
def _target(number: int) -> Iterator[None]:
    """Make Triton take the active device for one of this compute capability."""
    targets = importlib.import_module("triton.backends.compiler")
    driver = importlib.import_module("triton.runtime.driver").driver
    before = driver._active
    driver.set_active(_Pretended(targets.GPUTarget("cuda", number, 32)))
    try:
        yield
    finally:
        driver._active = before


class _Pretended:
    """The part of a driver that a compile needs. Functions cache code by device: each capability is a device number."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002 - nothing is launched
        return 0


def _assembled(kernel: Any, number: int) -> str:
    """Output of ptxas for code from Triton's cache: Triton assembles it once more."""
    compiler = importlib.import_module("triton.backends.nvidia.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", number, 32)
    with captured(), contextlib.redirect_stdout(io.StringIO()) as said:
        compiler.CUDABackend(target).make_cubin(kernel.asm["ptx"], {}, kernel.metadata, number)
    return said.getvalue()


def _words(error: BaseException, printed: str) -> str:
    """Format type, message and place of an error, without the source of all functions around it."""
    while type(error).__name__ == "CompilationError" and error.__cause__ is not None:
        # Each caller wraps an error of the function that it called.
        error = error.__cause__
    node, source = getattr(error, "node", None), getattr(error, "src", None)
    if node is None or not isinstance(source, str):
        return f"{type(error).__name__}: {error}\n{printed}"
    line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
    lines = source.splitlines()[max(0, line - _LAST_LINES) : line]
    message = getattr(error, "error_message", None) or "the compiler does not say why"
    return "\n".join(
        (f"{type(error).__name__} at line {line} of the function:", *lines, " " * column + "^", str(message), printed)
    )
