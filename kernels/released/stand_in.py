"""A GPU for wrappers of Triton kernels on a machine without one: the questions that they ask are answered as an H100 would.

A wrapper asks for the device's capability, its shared memory or its number of multiprocessors, to choose tiles; it selects a
device, and it measures candidates of an autotuner. The kernel itself is run by Triton's interpreter, on CPU tensors. Inside
`h100()` those questions have fixed answers, and an autotuner takes its first candidate, as all measure the same time.
Nothing of a package's own code is replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

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
_MILLISECONDS: Final = (1.0, 1.0, 1.0)
"""Time of every candidate, at the quantiles that an autotuner asks for."""


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

    def get_benchmarker(self) -> Any:
        return _same_time


def _same_time(*_args: Any, **_kwargs: Any) -> list[float]:
    """Return the time of a candidate without running it."""
    return list(_MILLISECONDS)


@contextlib.contextmanager
def h100() -> Iterator[None]:
    """Answer questions about the GPU as an H100 would, while a wrapper runs on CPU tensors.

    Needs Triton imported in its interpreted mode. `torch.cuda.is_available()` stays False. `Tensor.is_cuda` is True, since
    wrappers refuse other tensors; `Tensor.device` stays the CPU.
    """
    import torch
    import triton
    import triton.testing

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
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(lambda _self: True)))
        stack.enter_context(mock.patch.object(triton.testing, "do_bench", _same_time))
        stack.enter_context(mock.patch.object(driver, "_active", _Driver()))
        yield
