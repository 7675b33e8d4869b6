"""Operations that the code of this repository asks of a device, by stage and by line: for benchmarks/batch.py.

Counted are operations of torch that make or change elements, views are not, and launches of the kernels of oracles/fused. What
the kernel under test launches is not seen, unless it is torch's. One of torch's may be several on a GPU: logsumexp is nine.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnfuzz import harness
from attnfuzz.oracles.fused.launch import Fused, Handwritten

__all__ = ["Requests"]

_ROOT = Path(harness.__file__).resolve().parent.parent
"""The package, which may be installed elsewhere than in this repository."""
_OURS = tuple(str(_ROOT / name) for name in ("harness", "kernels", "oracles", "strategies"))
_ASIDE = str(_ROOT / "oracles" / "fused")
_NOTHING = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "detach", "empty", "empty_like", "empty_permuted",
        "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "unbind",
    )
)  # fmt: skip
"""Operations that launch nothing, besides views."""


class Requests(TorchDispatchMode):  # type: ignore[misc]
    """Counts requests while it is active; `enter` names the stage, as `run_batch` does.

    Args:
        device: only of tensors there; on a CPU also those that a GPU leaves to the host.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device, self._stage, self._within = device, "", 0
        self.counts = Counter[tuple[str, str]]()
        """By stage and line."""

    def enter(self, stage: str) -> None:
        """Note that a stage begins."""
        self._stage = stage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run an operation, and count it."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func._schema.name not in _NOTHING:
            tensors = [x for x in (*_flat(result), *_flat(args)) if isinstance(x, torch.Tensor)]
            if any(x.device.type == self._device and x.numel() for x in tensors):
                self._count()
        return result

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count, also launches of generated kernels, each of which is one request wherever it is run."""
        plain: Callable[..., Any] = Fused.__call__
        written: Callable[..., Any] = Handwritten.__call__

        def fused(function: Any, *args: Any, **kwargs: Any) -> Any:
            if any(isinstance(x, torch.Tensor) and x.device.type == self._device for x in (*args, *kwargs.values())):
                self._count()
            self._within += 1
            try:
                return plain(function, *args, **kwargs)
            finally:
                self._within -= 1

        def handwritten(kernel: Any, *args: Any) -> None:
            self._count()
            written(kernel, *args)

        Fused.__call__, Handwritten.__call__ = fused, handwritten  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            Fused.__call__, Handwritten.__call__ = plain, written  # type: ignore[method-assign]

    def _count(self) -> None:
        if not self._within:
            self.counts[self._stage, _line()] += 1

    def by_stage(self, cases: int) -> dict[str, float]:
        """Return the requests a Case by stage, most first."""
        stages = Counter[str]()
        for (stage, _), number in self.counts.items():
            stages[stage] += number
        return {stage: number / cases for stage, number in stages.most_common()}

    def by_line(self, cases: int) -> dict[str, float]:
        """Return the requests a Case by stage and line, most first."""
        return {f"{stage}: {line}": number / cases for (stage, line), number in self.counts.most_common()}


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, list | tuple):
        for each in x:
            yield from _flat(each)
    else:
        yield x


def _line() -> str:
    """Return the line of the repository that asks, outside of what serves all."""
    frame = sys._getframe(2)
    while frame is not None:
        file = str(Path(frame.f_code.co_filename).resolve())
        if file.startswith(_OURS) and not file.startswith(_ASIDE):
            return f"{file[len(str(_ROOT)) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"
