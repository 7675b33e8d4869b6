"""Uninitialised memory made visible: while a kernel runs, what torch.empty gives is NaN (integers: a huge value)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["PoisonEmpty"]

_aten = torch.ops.aten
_EMPTY = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)


class PoisonEmpty(TorchDispatchMode):  # type: ignore[misc]
    """Within it every new uninitialised tensor is filled: NaN for floating point, the largest value for integers.

    A kernel that leaves part of an output or a workspace unwritten then shows it, whatever the allocator had there before.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the op; fill what it left uninitialised."""
        made = func(*args, **(kwargs or {}))
        if func in _EMPTY and made.numel() and made.device.type != "meta":
            _fill(made)
        return made


def _fill(tensor: torch.Tensor) -> None:
    fill: Callable[[Any], Any] = tensor.fill_
    if tensor.is_floating_point():
        fill(torch.nan)
    elif tensor.dtype is not torch.bool and not tensor.is_complex():
        fill(torch.iinfo(tensor.dtype).max)
