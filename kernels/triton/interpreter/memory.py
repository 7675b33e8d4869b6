"""The exact memory checker: checks every load, store and atomic of every interpreted launch against the launch's tensors.

The pointer type of each tensor argument has its View attached, and Triton's own operations pass it on: a pointer may only be used
for elements of its own tensor. A pointer that was a number in between may be used for all tensors of the launch.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from attnfuzz.kernels.support import memory
from attnfuzz.kernels.support.absent import Absent
from attnfuzz.kernels.triton.interpreter import launches
from attnfuzz.kernels.triton.interpreter.accesses import (
    accessed,
    elements,
    note_load,
    note_site,
    note_store,
    order,
    refuse_duplicates,
    refuse_unwritten,
    views_of,
)
from attnfuzz.kernels.triton.interpreter.launches import bearing, refuse
from attnfuzz.kernels.triton.interpreter.shadow import live_of
from attnfuzz.kernels.triton.interpreter.views import View

try:
    import numpy as np
    import triton
    import triton.language as tl
    import triton.runtime.interpreter as shipped
except ImportError:
    np = triton = tl = shipped = Absent("triton")  # type: ignore[assignment]

__all__ = ["install"]

_Builder: Any = shipped.InterpreterBuilder
_Handle: Any = shipped.TensorHandle
_BFLOAT16_NAN = 0x7FC0
"""The interpreter keeps a bfloat16 as its bits."""


def install() -> None:
    """Check every launch from now on, as long as `attnfuzz.kernels.support.memory.checking()`. Call it once, after all repairs.

    Where Triton's interpreter has another form than expected, launches stay unchecked, and a RuntimeWarning says why.
    """
    if reason := _unfit():
        text = (
            f"the memory checker does not know the interpreter of Triton {triton.__version__}: {reason}; launches are not checked"
        )
        memory.leave_unchecked(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return
    shipped._implicit_cvt = _converted(shipped._implicit_cvt)
    shipped.GridExecutor.__call__ = _launched(shipped.GridExecutor.__call__)
    _Builder.set_grid_idx = _entered(_Builder.set_grid_idx)
    tl.load = tl.core.load = _language_load(tl.load)
    _Builder.create_masked_load = _load(_Builder.create_masked_load)
    _Builder.create_masked_store = _store(_Builder.create_masked_store)
    _Builder.create_atomic_rmw = _atomic(_Builder.create_atomic_rmw, pointers=1, mask=3)
    _Builder.create_atomic_cas = _atomic(_Builder.create_atomic_cas, pointers=0, mask=None)
    for name in ("create_atomic_load", "create_atomic_store", "create_atomic_poll"):
        if hasattr(_Builder, name):
            setattr(_Builder, name, _as_atomic(getattr(_Builder, name)))
    for name in ("create_select", "create_cat", "create_join", "create_bitcast", "create_int_to_ptr"):
        if hasattr(_Builder, name):
            setattr(_Builder, name, _merged(getattr(_Builder, name)))


_EXPECTED = {
    "create_masked_load": ("self", "ptrs", "mask", "other"),
    "create_masked_store": ("self", "ptrs", "value", "mask"),
    "create_atomic_rmw": ("self", "rmwOp", "ptr", "val", "mask"),
    "create_atomic_cas": ("self", "ptr", "cmp", "val"),
    "set_grid_idx": ("self", "x", "y", "z"),
}


def _unfit() -> str | None:
    """The difference of the interpreter from what this module expects, or None."""
    for name, expected in _EXPECTED.items():
        method = getattr(_Builder, name, None)
        if method is None:
            return f"there is no InterpreterBuilder.{name}"
        parameters = tuple(inspect.signature(method).parameters)
        if parameters[: len(expected)] != expected:
            return f"InterpreterBuilder.{name} takes {', '.join(parameters)}"
    if not callable(getattr(shipped, "_implicit_cvt", None)):
        return "there is no _implicit_cvt"
    try:
        return _handed_on()
    except Exception as error:  # another version may raise anything
        return f"its pointers cannot be tried ({type(error).__name__}: {error})"


def _handed_on() -> str | None:
    """Why pointers lose their type in some operation, or None."""
    kind = bearing(tl.pointer_type(tl.float32), None)
    builder = shipped.interpreter_builder
    start = _Handle(np.array([64], np.uint64), kind)
    block = builder.create_addptr(
        builder.create_splat(tl.block_type(kind, [2]), start), _Handle(np.arange(2, dtype=np.int32), tl.int32)
    )
    wide = builder.create_expand_dims(block, 1)
    tried = {
        "create_addptr": block,
        "create_expand_dims": wide,
        "create_broadcast": builder.create_broadcast(wide, [2, 4]),
        "create_reshape": builder.create_reshape(wide, [1, 2], False),
        "create_trans": builder.create_trans(wide, [1, 0]),
    }
    lost = [name for name, result in tried.items() if result.dtype is not kind]
    return f"{lost[0]} loses the type of a pointer" if lost else None


def _converted(shipped_convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def convert(argument: Any) -> Any:
        tensor = shipped_convert(argument)
        if launches.current is not None and hasattr(argument, "data_ptr"):
            wrapper = isinstance(argument, triton.runtime.jit.TensorWrapper)
            tensor.handle.dtype = bearing(tensor.handle.dtype, launches.current.view(argument.base if wrapper else argument))
        return tensor

    return convert


def _launched(shipped_launch: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(shipped_launch)
    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        if not memory.checking():
            shipped_launch(self, *args, **kwargs)
            return
        before, launches.current = launches.current, launches.Launch(self.fn.__name__)
        try:
            shipped_launch(self, *args, **kwargs)
        finally:
            launches.now().end()
            launches.current = before

    return launch


def _entered(shipped_enter: Callable[..., None]) -> Callable[..., None]:
    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        shipped_enter(self, x, y, z)
        if launches.current is not None:
            launches.current.enter((x, y, z), self.grid_dim)

    return set_grid_idx


def _language_load(shipped_load: Callable[..., Any]) -> Callable[..., Any]:
    """Note that there is an `other`: the interpreter drops one that is a single 0."""

    @functools.wraps(shipped_load)
    def load(pointer: Any, mask: Any = None, other: Any = None, *args: Any, **kwargs: Any) -> Any:
        if launches.current is None or other is None:
            return shipped_load(pointer, mask, other, *args, **kwargs)
        launches.current.other = True
        try:
            return shipped_load(pointer, mask, other, *args, **kwargs)
        finally:
            launches.current.other = False

    return load


def _load(shipped_load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(shipped_load)
    def create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *hints: Any, **named: Any) -> Any:
        if launches.current is None:
            return shipped_load(self, ptrs, mask, other, *hints, **named)
        data, kept = ptrs.data, _kept(mask)
        undefined = other is None and not (launches.current.other or launches.current.atomic or kept.all())
        if undefined and memory.masked() == "refused":
            hidden = int(kept.size - np.count_nonzero(kept))
            refuse(
                "masked-load",
                "load",
                f"{hidden} of {elements(kept.size)} {'is' if hidden == 1 else 'are'} masked "
                f"and there is no other=: {'it holds' if hidden == 1 else 'they hold'} anything",
            )
        for view, width, live in accessed("load", ptrs, kept):
            note_load(view, width, data, kept, live)
        result = shipped_load(self, ptrs, mask, other, *hints, **named)
        refuse_unwritten("load", ptrs, kept, result)
        return _with_anything(result, kept) if undefined and memory.masked() == "anything" else result

    return create_masked_load


def _kept(mask: Any) -> Any:
    """Return which elements a mask keeps; that of a block pointer (before Triton 3.9) is an array, others hold one."""
    return mask if isinstance(mask, np.ndarray) else mask.data


def _with_anything(result: Any, kept: Any) -> Any:
    """Return the loaded `result` with values in its masked elements that no kernel may rely on."""
    data = np.array(np.broadcast_to(result.data, kept.shape))
    if np.issubdtype(data.dtype, np.floating):
        data[~kept] = np.nan
    else:
        data[~kept] = _BFLOAT16_NAN if result.dtype.scalar == tl.bfloat16 else np.iinfo(data.dtype).max
    return _Handle(data, result.dtype)


def _store(shipped_store: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(shipped_store)
    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *hints: Any, **named: Any) -> Any:
        if launches.current is not None:
            note_site(ptrs)
            kept = _kept(mask)
            for view, width, live in accessed("store", ptrs, kept):
                addresses = live_of(ptrs.data, kept) if live is None else live
                refuse_duplicates(view, addresses)
                note_store("store", view, width, addresses, atomic=launches.current.atomic)
        return shipped_store(self, ptrs, value, mask, *hints, **named)

    return create_masked_store


def _atomic(shipped_atomic: Callable[..., Any], *, pointers: int, mask: int | None) -> Callable[..., Any]:
    @functools.wraps(shipped_atomic)
    def create_atomic(self: Any, *args: Any) -> Any:
        if launches.current is None:
            return shipped_atomic(self, *args)
        ptrs = args[pointers]
        kept = np.ones(ptrs.data.shape, np.bool_) if mask is None else args[mask].data
        note_site(ptrs)
        reached = [
            (view, width, live_of(ptrs.data, kept) if live is None else live)
            for view, width, live in accessed("atomic", ptrs, kept)
        ]
        for view, _, live in reached:
            order(view, live, ptrs, relaxed=getattr(args[-2], "name", "") == "RELAXED")
        result = shipped_atomic(self, *args)
        if getattr(args[0], "name", "") != "XCHG":
            refuse_unwritten("atomic", ptrs, kept, result)
        for view, width, live in reached:
            note_store("atomic", view, width, live, atomic=True)
        return result

    return create_atomic


def _as_atomic(shipped_access: Callable[..., Any]) -> Callable[..., Any]:
    """Treat the loads and stores within an operation as atomic."""

    @functools.wraps(shipped_access)
    def access(self: Any, *args: Any, **kwargs: Any) -> Any:
        if launches.current is None:
            return shipped_access(self, *args, **kwargs)
        launches.current.atomic = True
        try:
            return shipped_access(self, *args, **kwargs)
        finally:
            if launches.current is not None:
                launches.current.atomic = False

    return access


def _merged(shipped_operation: Callable[..., Any]) -> Callable[..., Any]:
    """Allow a pointer that is one of several to be used for any of their tensors; after a bitcast, for its own."""

    @functools.wraps(shipped_operation)
    def operation(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = shipped_operation(self, *args, **kwargs)
        if launches.current is not None and isinstance(getattr(result, "dtype", None), tl.pointer_type):
            views: list[View] = []
            for each in args:
                kind = getattr(each, "dtype", None)
                if isinstance(each, _Handle) and isinstance(kind, tl.pointer_type):
                    views += [view for view in views_of(kind) if view not in views]
            result.dtype = bearing(result.dtype, views[0] if len(views) == 1 else tuple(views))
        return result

    return operation
