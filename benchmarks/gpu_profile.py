"""What a GPU does while a function runs, by kind of operation, and what its host asks CUDA for: torch's profiler."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["Watch"]

_KINDS = {
    "generated": r"^run_fused_|^guarded_pieces|^hashed_numbers",
    "product": r"gemm|cutlass|xmma|gemv|dot_kernel",
    "sort": r"[sS]ort|searchsorted",
    "softmax": r"[sS]oft[mM]ax",
    "reduction": r"reduce",
    "index": r"index|gather|scatter",
    "concatenation": r"CatArray",
    "copy": r"Memcpy|Memset|copy",
    "elementwise": r"elementwise",
}
"""Kinds of operations by names of CUDA kernels, the first that is found."""


class Watch:
    """Counts what the device does while a function runs, and what the host asks CUDA for."""

    def __init__(self) -> None:
        self._operations, self._calls = _Spent(), _Spent()

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, watched."""
        from torch.profiler import ProfilerActivity, profile

        def watched(*arguments: Any) -> Any:
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                result = function(*arguments)
                torch.cuda.synchronize()
            self.count(profiled.events())
            return result

        return watched

    def count(self, events: Iterable[Any]) -> None:
        """Count the profiler's events; those of the host are of CUDA's runtime and driver, where they are not of torch."""
        from torch.autograd import DeviceType

        for event in events:
            if event.device_type == DeviceType.CUDA:
                kind = next((kind for kind, pattern in _KINDS.items() if re.search(pattern, event.name)), "other")
                self._operations.add(kind, event.time_range.elapsed_us())
            elif re.match(r"cu(da)?[A-Z]", event.name):
                self._calls.add(event.name, event.time_range.elapsed_us())

    def operations(self, cases: int) -> dict[str, tuple[float, float]]:
        """Return microseconds and number a Case of each kind of operation, the most expensive first."""
        return self._operations.of_case(cases)

    def calls(self, cases: int) -> dict[str, tuple[float, float]]:
        """Return microseconds of the host and number a Case of each function of CUDA, the most expensive first."""
        return self._calls.of_case(cases)


class _Spent:
    """Microseconds and numbers by name."""

    def __init__(self) -> None:
        self._us, self._number = Counter[str](), Counter[str]()

    def add(self, name: str, us: float) -> None:
        self._us[name] += us
        self._number[name] += 1

    def of_case(self, cases: int) -> dict[str, tuple[float, float]]:
        return {name: (us / cases, self._number[name] / cases) for name, us in self._us.most_common()}
