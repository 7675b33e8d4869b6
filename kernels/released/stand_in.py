"""A GPU for wrappers of Triton kernels on a machine without one: the questions that they ask are answered as an H100 would.

A wrapper asks for the device's capability, its shared memory or its number of multiprocessors, to choose tiles; it selects a
device, and it measures candidates of an autotuner. The kernel itself is run by Triton's interpreter, on CPU tensors. Inside
`h100()` those questions have fixed answers, and an autotuner takes its first candidate that compiles.
Nothing of a package's own code is replaced.

Some packages launch by way of their own caches of compiled kernels: an interpreted function then also looks like a compiled one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

from attnfuzz.kernels.released.tuning import FirstCandidate

__all__ = ["NAME", "h100"]

NAME: Final = "NVIDIA H100 80GB HBM3"
_CAPABILITY: Final = (9, 0)
_MULTIPROCESSORS: Final = 132
_SHARED_MEMORY: Final = 232448
"""Bytes a block may have."""
_PROPERTIES: Final = SimpleNamespace(
    name=NAME,
    major=9,
    minor=0,
    multi_processor_count=_MULTIPROCESSORS,
    warp_size=32,
    total_memory=80 << 30,
    L2_cache_size=50 << 20,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=_SHARED_MEMORY,
    shared_memory_per_multiprocessor=233472,
)
_TRITON_PROPERTIES: Final = {
    "max_shared_mem": _SHARED_MEMORY,
    "max_num_regs": 65536,
    "multiprocessor_count": _MULTIPROCESSORS,
    "warpSize": 32,
}
_one_program: list[bool] = []
"""Not empty while a candidate is tried: a launch is only its first program."""


class _Driver:
    """Stand-in for Triton's active driver."""

    utils = SimpleNamespace(get_device_properties=lambda _device=0: dict(_TRITON_PROPERTIES))

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        """Do nothing: there is one device."""

    def get_current_stream(self, device: int | None = None) -> int:  # noqa: ARG002 - the driver's signature
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda

    def __init__(self, benchmark: _Benchmark) -> None:
        self._benchmark = benchmark

    def get_benchmarker(self) -> _Benchmark:
        return self._benchmark


class _Benchmark(FirstCandidate):
    """The benchmark of interpreted functions: of a candidate one program is run.

    That shows whether its static assertions hold; where they do not, it takes forever, as one that does not compile.
    """

    def runs(self, launch: Callable[[], Any]) -> bool:
        """Run a candidate's first program; returns False where a static assertion fails."""
        from triton.runtime.errors import InterpreterError

        _one_program.append(True)
        try:
            launch()
        except InterpreterError as error:
            if not isinstance(error.__cause__, AssertionError):
                raise
            return False
        finally:
            _one_program.pop()
        return True


class _CompiledKernel:
    """Stand-in for what a launch of a compiled function returns: it can be launched again, with other arguments."""

    def __init__(self, function: Any, arguments: dict[str, Any]) -> None:
        self._function, self._arguments = function, arguments

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """Launch over `grid`, by position: all parameters, or those that are no constants of the compilation."""
        parameters = self._function.params

        def launch(*arguments: Any) -> None:
            passed = [each for each in parameters if len(arguments) == len(parameters) or not each.is_constexpr]
            named = {each.name: value for each, value in zip(passed, arguments, strict=True)}
            self._function.run(grid=grid, warmup=False, **{**self._arguments, **named})

        return launch


@functools.cache
def _interpreted_function() -> type:
    """Return Triton's InterpretedFunction with the members of a compiled function that it lacks, and a result of `run`."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction, KernelParam

    class Function(InterpretedFunction):  # type: ignore[misc]
        # By this `isinstance(function, JITFunction)` holds.
        __class__ = property(lambda _self: JITFunction)

        @property
        def signature(self) -> inspect.Signature:
            return inspect.signature(self.fn)

        @property
        def params(self) -> list[Any]:
            unspecialised = self.kwargs.get("do_not_specialize") or ()
            unaligned = self.kwargs.get("do_not_specialize_on_alignment") or ()
            return [
                KernelParam(number, each, number in unspecialised or each.name in unspecialised, each.name in unaligned)
                for number, each in enumerate(self.signature.parameters.values())
            ]

        @property
        def cache_key(self) -> str:
            return hashlib.sha256(inspect.getsource(self.fn).encode()).hexdigest()

        def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> _CompiledKernel:
            InterpretedFunction.run(self, *args, grid=(1,) if _one_program else grid, warmup=warmup, **kwargs)
            return _CompiledKernel(self, {**dict(zip(self.arg_names, args, strict=False)), **kwargs})

    return Function


def _tanh(x: Any) -> Any:
    """Return tanh of a tensor of the interpreter: CUDA's own function cannot be called there."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return tl.tensor(TensorHandle(np.tanh(x.handle.data), x.handle.dtype), x.type)


@contextlib.contextmanager
def h100() -> Iterator[None]:
    """Answer questions about the GPU as an H100 would, while a wrapper runs on CPU tensors.

    Needs Triton imported in its interpreted mode. `torch.cuda.is_available()` stays False. `Tensor.is_cuda` is True, since
    wrappers refuse other tensors; `Tensor.device` stays the CPU.
    """
    import torch
    import triton
    import triton.runtime.interpreter
    import triton.testing
    from triton.language.extra import cuda, libdevice

    driver = triton.runtime.driver
    answers: dict[str, Any] = {
        "current_device": lambda: 0,
        "device": lambda _device=None: contextlib.nullcontext(),
        "device_count": lambda: 1,
        "get_device_capability": lambda _device=None: _CAPABILITY,
        "get_device_name": lambda _device=None: NAME,
        "get_device_properties": lambda _device=None: _PROPERTIES,
        "synchronize": lambda _device=None: None,
    }
    benchmark = _Benchmark()
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(lambda _self: True)))
        stack.enter_context(mock.patch.object(triton.testing, "do_bench", benchmark))
        stack.enter_context(mock.patch.object(driver, "_active", _Driver(benchmark)))
        for module in (libdevice, cuda.libdevice):
            stack.enter_context(mock.patch.object(module, "tanh", _tanh))
        stack.enter_context(mock.patch.object(triton.runtime.interpreter, "InterpretedFunction", _interpreted_function()))
        yield
