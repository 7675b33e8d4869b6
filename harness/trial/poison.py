"""Poison, which shows wrong memory accesses while a kernel runs.

Memory from torch.empty is NaN (integers: a huge value), so that elements never written show. Every tensor, the kernel's own and
its inputs, lies between guard bands (bands.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from attnfuzz.harness.trial.bands import AROUND, Bands, Form, form_of, reach
from attnfuzz.harness.trial.guard_kernel import Pieces, doubled
from attnfuzz.harness.trial.memory_ops import (
    AS_STRIDED,
    NEW_EMPTY_STRIDED,
    OFFSET,
    Traits,
    contiguous,
    form_of_new,
    traits_of,
    written,
)
from attnfuzz.kernels.support.memory import Watch

__all__ = ["POISON", "PoisonEmpty"]

_OWN = "a tensor of the kernel's own,"
_DEVICES = ("cpu", "cuda")
_COPIES_KEPT = 1 << 28
"""Bytes of what COPIES make that is moved between bands in one launch: it is kept until the launch has ended."""

POISON = {
    torch.float16: (torch.int16, 0x7E5A),
    torch.bfloat16: (torch.int16, 0x7FD6),
    torch.float32: (torch.int32, 0x7FD1A3B7),
}
"""The NaN of uninitialised memory, by dtype: as which integers, and its bits. None is that of another dtype, converted."""


def _without_dynamo(function: FunctionType) -> bool:
    """Have Dynamo, wherever a kernel imports it, compile neither the function nor what that calls; return whether torch can."""
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    except (ImportError, AttributeError, TypeError):
        return False
    return True


class PoisonEmpty(TorchDispatchMode):  # type: ignore[misc]
    """Mode that places every new tensor between `bands`, and fills uninitialised ones with `fill` (integers: the largest value).

    An output or a workspace that a kernel leaves partly unwritten then shows, independent of the allocator's earlier contents.
    `watch` is notified of uninitialised memory, and of what torch writes. Tensors that are made in a context of
    `kernels.support.memory.allocating` are filled when it ends.
    """

    def __init__(self, bands: Bands, *, fill: float = math.nan, watch: Watch | None = None) -> None:
        super().__init__()
        self._bands, self._value = bands, fill
        self._watch = Watch() if watch is None else watch
        self._unfilled: dict[torch.device, Pieces] = {}
        self._room = _COPIES_KEPT

    def __enter__(self) -> PoisonEmpty:
        """Begin; what the kernel has promised of new tensors is known by `watch`."""
        self._watch.filled, self._watch.empty = self._fill_now, self._empty
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """End. The watch outlives the launch, whose memory it must not keep."""
        self._watch.filled, self._watch.empty = _nothing, None
        super().__exit__(*error)

    def _fill_now(self) -> None:
        """Fill what was left for later, by one launch."""
        while self._unfilled:
            self._unfilled.popitem()[1].launch()

    def _later(self) -> dict[torch.device, Pieces] | None:
        """Return what gets the filling of a new tensor, if nothing uses it yet."""
        return self._unfilled if self._watch.allocating else None

    def _takes_copy(self, tensor: torch.Tensor) -> bool:
        """Whether there is room for one more of the tensors that COPIES make."""
        self._room -= reach(tensor) * tensor.element_size() + AROUND
        return self._room >= 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return whether torch is to wrap `__torch_dispatch__`, which imports Dynamo at the first op, 900 modules."""
        own = cls.__dict__.get("__torch_dispatch__")
        return own is not None and not _without_dynamo(own)

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the op, and move its new tensor between bands."""
        if func is AS_STRIDED and len(args) > OFFSET and args[OFFSET] is not None:
            extent = 1 + sum((size - 1) * stride for size, stride in zip(args[1], args[2], strict=True))
            return func(*args[:OFFSET], self._bands.offset_here(args[0], args[OFFSET], extent))
        traits, kwargs = traits_of(func), kwargs or {}
        makes = traits.empty or traits.unfilled is not None
        if self._unfilled and not (makes or traits.view):
            # Whatever the kernel has promised.
            self._fill_now()
        if traits.plain:
            return func(*args, **kwargs)
        if makes and (form := _form(func, traits, args, kwargs)) is not None:
            return self._between_bands(form, zeros=traits.unfilled is not None)
        if traits.unfilled is not None and _strided(args, kwargs):
            unfilled = traits.unfilled(*args, **kwargs)
            if not _bandable(unfilled):
                return unfilled.zero_()
            return self._bands.like(form_of(unfilled), _OWN, 0, own_storage=_in_backward(), later=self._later())
        held = _held(args[0]) if traits.resizes else None
        result = func(*args, **kwargs)
        for tensor in written(traits.writes, args, kwargs):
            self._watch.written(tensor)
        if held is not None and _bandable(result) and (grown := _held(result) - held) > 0:
            _fill(result.as_strided((grown,), (1,), held), self._value)
        if not (traits.empty or traits.filled) or not _bandable(result):
            return result
        if traits.copies and not self._takes_copy(result):
            return result
        if traits.empty:
            return self._between_bands(form_of(result), own_storage=func is NEW_EMPTY_STRIDED)
        between = self._bands.like(form_of(result), _OWN, own_storage=traits.copies, later=self._later())
        return between.copy_(result)

    def _empty(self, *size: Any, **settings: Any) -> torch.Tensor:
        """Return what torch.empty returns in this mode, mostly without the way through torch's dispatcher, the longest part."""
        dtype, device = settings.get("dtype"), settings.get("device")
        plain = len(size) == 1 and isinstance(size[0], tuple) and len(settings) == 2
        if plain and isinstance(dtype, torch.dtype) and isinstance(device, torch.device) and device.type in _DEVICES:
            form = contiguous(size[0], dtype, device)
            if form is not None:
                with no_dispatch():
                    return self._between_bands(form)
        tensor: torch.Tensor = torch.empty(*size, **settings)
        return tensor

    def _between_bands(self, form: Form, *, zeros: bool = False, own_storage: bool = False) -> torch.Tensor:
        """Return a new tensor between bands: zeros, or filled with the value of memory that nothing has written."""
        pattern = 0 if zeros else self._pattern(form.dtype)
        between = self._bands.like(form, _OWN, pattern, own_storage=own_storage, later=self._later())
        filled = pattern is not None or _fill(between, self._value)
        if not zeros and filled and form.device.type == "cpu":
            self._watch.allocated(between)
        return between

    def _pattern(self, dtype: torch.dtype) -> int | None:
        """Return the 32 bits of a dtype's poison, if that is the value."""
        if dtype not in POISON or not math.isnan(self._value):
            return None
        words, bits = POISON[dtype]
        return bits if words is torch.int32 else doubled(bits)


def _nothing() -> None:
    """Fill nothing."""


def _in_backward() -> bool:
    """Whether autograd computes gradients: its own nodes take new tensors to begin where their storages do."""
    return bool(torch._C._current_graph_task_id() != -1)


def _form(func: Any, traits: Traits, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Form | None:
    """Return the form of a new tensor that lies between bands, where its op need not be run."""
    if traits.unfilled is not None and _in_backward():
        return None
    form = form_of_new(traits.unfilled or func, args, kwargs)
    return form if form is not None and form.device.type in _DEVICES else None


def _held(tensor: Any) -> int:
    """Return the number of elements its storage has room for."""
    return int(tensor.untyped_storage().nbytes() // tensor.element_size())


def _strided(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op makes a tensor of rows and columns, by its keywords and the tensor that it is like."""
    layouts = {kwargs.get("layout"), *(each.layout for each in args if isinstance(each, torch.Tensor))}
    return layouts <= {None, torch.strided}


def _bandable(tensor: Any) -> bool:
    strided = tensor.layout is torch.strided and not tensor.is_nested
    plain = strided and tensor.device.type in _DEVICES and not tensor.is_quantized
    return bool(plain and tensor.numel() and all(stride >= 0 for stride in tensor.stride()))


def _fill(tensor: torch.Tensor, value: float) -> bool:
    """Fill it, if its dtype has a conspicuous value; return whether it has."""
    if tensor.dtype in POISON and math.isnan(value):
        words, bits = POISON[tensor.dtype]
        tensor.view(words).fill_(bits)
    elif tensor.is_floating_point():
        tensor.fill_(value)
    elif tensor.dtype is not torch.bool and not tensor.is_complex():
        tensor.fill_(torch.iinfo(tensor.dtype).max)
    else:
        return False
    return True
