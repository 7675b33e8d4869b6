"""The Kernel around a function of a released package: as the adapters make it, imported at first use, and run on the CPU too."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from unittest import mock

from attnfuzz.kernels.adapters import dense, paged, varlen
from attnfuzz.kernels.adapters.adapted import Adapted
from attnfuzz.kernels.contract import Built, Config, Device, Gradients, Inputs
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support import memory

if TYPE_CHECKING:
    import torch

__all__ = ["EXTRA", "Package", "Released", "released"]

EXTRA: Final = "released"
"""The extra of attnfuzz that installs the packages."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package of the index: the name by which it is installed, and the name by which it is imported."""

    distribution: str
    module: str
    needs: tuple[str, ...] = ()
    """Further modules that its kernels import."""
    outside_extra: bool = False
    """It is not in the extra: its metadata asks for a server's packages, or pins others, or it needs a GPU."""
    options: str = "--no-deps"
    """Of pip, outside of the extra."""

    def missing(self) -> str | None:
        """Why it cannot be imported here, or None; it is not imported for that."""
        for module in (self.module, *self.needs):
            if importlib.util.find_spec(module) is None:
                if module != self.module:
                    return f"{module}, which {self.distribution} needs, is not installed: install it with pip"
                remedy = f"{self.options} {self.distribution}".strip() if self.outside_extra else f"'attnfuzz[{EXTRA}]'"
                return f"{self.distribution} is not installed: pip install {remedy}"
        return None

    def files(self, paths: Sequence[str]) -> list[str]:
        """Return those of `paths`, relative to the package's folder, that are installed here."""
        spec = importlib.util.find_spec(self.module)
        folders = [] if spec is None else spec.submodule_search_locations or []
        return [str(file) for folder in folders for path in paths if (file := Path(folder).absolute() / path).is_file()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Released(Adapted):
    """A Kernel; made by `released`."""

    package: Package
    refuses: Callable[[Problem], str | None]
    gpu_limits: Callable[[Problem], str | None]
    on_cpu: tuple[tuple[str, str, Any], ...]
    masked_loads: memory.Masked
    triton_before: tuple[int, int] | None
    compile_for: Callable[[Problem, Device], None] | None

    def unavailable(self, device: Device) -> str | None:
        """A missing package, what `Adapted` says, or a Triton that no longer has what the kernel uses."""
        return self.package.missing() or Adapted.unavailable(self, device) or self._too_new()

    def _too_new(self) -> str | None:
        if self.triton_before is None:
            return None
        installed = metadata.version("triton")
        major, minor = self.triton_before
        if tuple(int(each) for each in installed.split(".")[:2]) < self.triton_before:
            return None
        return f"triton {installed} lacks functions that {self.package.distribution} uses: pip install 'triton<{major}.{minor}'"

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        """Why not, or None: the capabilities, the parameters, the limits that no capability states, and those of a GPU."""
        reason = Adapted.supports(self, problem, config, device) or self.refuses(problem)
        return self.gpu_limits(problem) if reason is None and device == "cuda" else reason

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        """Compile nothing, unless `compile_for` does: functions compile at their first call; the package is imported then.

        Raises:
            BadArgument: `problem` is not supported.
        """
        built = Adapted.build(self, problem, config, device)
        if self.compile_for is not None and device == "cuda":
            self.compile_for(problem, device)
        return _Surrounded(self, built, device)


@dataclass(frozen=True, slots=True)
class _Surrounded:
    """A Built whose calls find the stand-in of a GPU on the CPU, and on a GPU autotuners that take their first candidate."""

    kernel: Released
    built: Built
    device: Device

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As of `Built`."""
        with self._surroundings():
            return self.built.forward(inputs)

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Gradients:
        """As of `Built`."""
        with self._surroundings():
            return self.built.backward(inputs, o, lse)

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.kernel.backend == "triton" and self.device == "cuda":
                from attnfuzz.kernels.released.tuning import first_candidates

                stack.enter_context(first_candidates())
            elif self.kernel.backend == "triton":
                from attnfuzz.kernels.released.stand_in import h100

                stack.enter_context(h100())
                stack.enter_context(memory.masked_loads(self.kernel.masked_loads))
                for module, name, value in self.kernel.on_cpu:
                    stack.enter_context(mock.patch.object(importlib.import_module(module), name, value))
            yield


def released(
    function: Callable[..., Any],
    *,
    name: str,
    package: Package,
    like: Literal["dense", "varlen", "paged"],
    files: Sequence[str],
    refuses: Callable[[Problem], str | None] = lambda _problem: None,
    gpu_limits: Callable[[Problem], str | None] = lambda _problem: None,
    on_cpu: Sequence[tuple[str, str, Any]] = (),
    masked_loads: memory.Masked = "refused",
    triton_before: tuple[int, int] | None = None,
    compile_for: Callable[[Problem, Device], None] | None = None,
    **declared: Any,
) -> Released:
    """Make a Kernel of `function`, a wrapper with flash-attention's signature that imports the package when it is called.

    Args:
        function: as for `attnfuzz.kernels.dense`, `varlen` or `paged`.
        name: the kernel's name, which begins with "released.".
        package: the package that holds the kernel.
        like: the adapter to use.
        files: sources of the kernel, relative to the package's folder.
        refuses: why the kernel does not take a Problem that its capabilities allow, by the package's own documentation, or None.
        gpu_limits: why compiled code does not take a Problem that the interpreter runs, or None: a tile that does not fit, say.
        on_cpu: module, name and value of what the package assumes of the device, during each call on the CPU.
        masked_loads: what its loads without `other` have in masked elements on the CPU (`kernels.support.memory.Masked`).
        triton_before: the first (major, minor) version of Triton that lacks a function which the kernel uses.
        compile_for: has the package compile what a Problem needs, on a GPU, where its first call takes longer than a launch may.
        declared: further arguments of the adapter; by default the kernel runs on "cpu" and "cuda", and is a Triton kernel.

    Raises:
        BadArgument: as the adapters do.
    """
    adapters: dict[str, Callable[..., Adapted]] = {"dense": dense, "varlen": varlen, "paged": paged}
    adapter = adapters[like]
    options = {"backend": "triton", "devices": ("cpu", "cuda"), **declared}
    adapted = adapter(function, name=name, files=package.files(files), **options)
    values = {each.name: getattr(adapted, each.name) for each in fields(adapted)}
    return Released(
        **values,
        package=package,
        refuses=refuses,
        gpu_limits=gpu_limits,
        on_cpu=tuple(on_cpu),
        masked_loads=masked_loads,
        triton_before=triton_before,
        compile_for=compile_for,
    )
