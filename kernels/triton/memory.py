"""The exact memory checker: every load, store and atomic of every interpreted launch, against the tensors that it was given.

The pointer type of each tensor argument bears its View, and Triton's own operations hand that on: a pointer may be used for
elements of its own tensor alone, whatever lies beside them. A pointer that was a number in between may be used for all tensors
of the launch.
"""

from __future__ import annotations

import copy
import functools
import inspect
import linecache
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

from attnfuzz.kernels import memory
from attnfuzz.kernels.absent import Absent
from attnfuzz.kernels.memory import MemoryFault, MemoryKind, Operation, Site
from attnfuzz.kernels.triton.shadow import Shadow, live_of
from attnfuzz.kernels.triton.views import View

try:
    import numpy as np
    import triton
    import triton.language as tl
    import triton.runtime.interpreter as shipped
except ImportError:
    np = triton = tl = shipped = Absent("triton")  # type: ignore[assignment]

__all__ = ["install"]

Array = np.ndarray[Any, np.dtype[Any]]

_MOST_PENDING = 64 << 20
"""Bytes of addresses of loads that a launch may keep before it looks at them."""
_Builder: Any = shipped.InterpreterBuilder
_Handle: Any = shipped.TensorHandle
_launch: _Launch | None = None
_next_base = 1


class _Launch:
    """One launch: its tensors, the notes on their storages, and which program runs."""

    def __init__(self, name: str) -> None:
        self.name, self.base = name, _next_base
        self.stamp, self.last = self.base + 1, self.base + 1
        self.program: tuple[int, ...] = (0, 0, 0)
        self.views: list[View] = []
        self.atomic = False
        self.pending = 0
        self.ordered: dict[int, set[int]] = {}
        """Programs that an earlier one is known to have ended its work for, by stamp."""
        self.released: dict[tuple[int, int], set[int]] = {}
        self.watch = memory.current()
        self.shadows: dict[int, Shadow] = {} if self.watch is None else self.watch.shadows
        if self.watch is not None:
            self.watch.launches.append(name)

    def view(self, tensor: Any) -> View:
        """The View of a tensor argument."""
        made = View(tensor)
        shadow = self.shadows.get(made.storage)
        if shadow is None or shadow.size != made.size:
            fresh = None if self.watch is None else self.watch.fresh.get(made.storage)
            shadow = self.shadows[made.storage] = Shadow(made.storage, made.size, made.width, fresh)
        made.shadow = shadow
        self.views.append(made)
        return made

    def end(self) -> None:
        """What is only read in a launch is of no use to the next."""
        global _next_base
        _next_base = self.last + 1
        for view in self.views:
            view.shadow.pending.clear()

    def before(self) -> set[int]:
        """Stamps of programs that are ordered before this one."""
        return self.ordered.get(self.stamp, _NONE)


_NONE: set[int] = set()


def install() -> None:
    """Check every launch from now on, as long as `attnfuzz.kernels.memory.checking()`. Call it once, last of all repairs.

    Where Triton's interpreter is not as it is known, launches stay unchecked, and a RuntimeWarning says why.
    """
    if reason := _unfit():
        told = f"the memory checker does not know the interpreter of Triton {triton.__version__}: {reason}; launches are not checked"
        memory.leave_unchecked(told)
        warnings.warn(told, RuntimeWarning, stacklevel=2)
        return
    shipped._implicit_cvt = _converted(shipped._implicit_cvt)
    shipped.GridExecutor.__call__ = _launched(shipped.GridExecutor.__call__)
    _Builder.set_grid_idx = _entered(_Builder.set_grid_idx)
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
    """What of the interpreter is other than this module expects, or None."""
    for name, expected in _EXPECTED.items():
        found = getattr(_Builder, name, None)
        if found is None:
            return f"there is no InterpreterBuilder.{name}"
        parameters = tuple(inspect.signature(found).parameters)
        if parameters[: len(expected)] != expected:
            return f"InterpreterBuilder.{name} takes {', '.join(parameters)}"
    if not callable(getattr(shipped, "_implicit_cvt", None)):
        return "there is no _implicit_cvt"
    try:
        return _handed_on()
    except Exception as error:  # whatever another version raises
        return f"its pointers cannot be tried ({type(error).__name__}: {error})"


def _handed_on() -> str | None:
    """Which operation on pointers loses their type, or None."""
    kind = _bearing(tl.pointer_type(tl.float32), None)
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
    lost = [name for name, made in tried.items() if made.dtype is not kind]
    return f"{lost[0]} loses the type of a pointer" if lost else None


def _bearing(kind: Any, view: View | tuple[View, ...] | None) -> Any:
    """A copy of pointer type `kind`, equal to it for Triton, that bears its View, or several where it may be of each of them."""
    made = copy.copy(kind)
    made.view = view
    made.width = max(1, made.element_ty.primitive_bitwidth // 8)
    return made


def _converted(shipped_convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def convert(argument: Any) -> Any:
        made = shipped_convert(argument)
        if _launch is not None and hasattr(argument, "data_ptr"):
            wrapper = isinstance(argument, triton.runtime.jit.TensorWrapper)
            made.handle.dtype = _bearing(made.handle.dtype, _launch.view(argument.base if wrapper else argument))
        return made

    return convert


def _launched(shipped_launch: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(shipped_launch)
    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        global _launch
        if not memory.checking():
            shipped_launch(self, *args, **kwargs)
            return
        before, _launch = _launch, _Launch(self.fn.__name__)
        try:
            shipped_launch(self, *args, **kwargs)
        finally:
            _launch.end()
            _launch = before

    return launch


def _entered(shipped_enter: Callable[..., None]) -> Callable[..., None]:
    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        shipped_enter(self, x, y, z)
        if _launch is not None:
            _, ny, nz = self.grid_dim
            _launch.stamp = _launch.base + 1 + (x * ny + y) * nz + z
            _launch.last = max(_launch.last, _launch.stamp)
            _launch.program = (x, y, z)

    return set_grid_idx


def _load(shipped_load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(shipped_load)
    def create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *hints: Any, **named: Any) -> Any:
        if _launch is None:
            return shipped_load(self, ptrs, mask, other, *hints, **named)
        data, kept = ptrs.data, mask.data
        if other is None and not _launch.atomic and not kept.all():
            hidden = int(kept.size - np.count_nonzero(kept))
            _raise("masked-load", "load", f"{hidden} of {kept.size} elements are hidden and there is no other=: they hold anything")
        for view, width, live in _accessed("load", ptrs, kept):
            _note_load(view, width, data, kept, live)
        made = shipped_load(self, ptrs, mask, other, *hints, **named)
        _refuse_unwritten("load", ptrs, kept, made)
        return made

    return create_masked_load


def _note_load(view: View, width: int, data: Array, kept: Array | None, live: Array | None) -> None:
    """Keep the addresses of a load, and compare them with what other programs have stored."""
    launch, shadow = _now(), view.shadow
    if live is not None:
        data, kept = live, None
    if shadow.stored == launch.base:
        addresses = live_of(data, kept)
        if addresses.size:
            clash = shadow.loaded(shadow.units(addresses, width), launch.stamp, launch.base, launch.before())
            if clash is not None:
                _race("load", view, int(addresses[clash[0]]), "read", clash[1], "written")
    if launch.atomic:
        return
    shadow.pending.append((launch.stamp, data, kept, width))
    launch.pending += data.nbytes
    if launch.pending > _MOST_PENDING:
        for each in launch.views:
            each.shadow.settle(launch.base)
        launch.pending = 0


def _store(shipped_store: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(shipped_store)
    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *hints: Any, **named: Any) -> Any:
        if _launch is not None:
            for view, width, live in _accessed("store", ptrs, mask.data):
                addresses = live_of(ptrs.data, mask.data) if live is None else live
                _refuse_duplicates(view, addresses)
                _note_store("store", view, width, addresses, atomic=_launch.atomic)
        return shipped_store(self, ptrs, value, mask, *hints, **named)

    return create_masked_store


def _atomic(shipped_atomic: Callable[..., Any], *, pointers: int, mask: int | None) -> Callable[..., Any]:
    @functools.wraps(shipped_atomic)
    def create_atomic(self: Any, *args: Any) -> Any:
        if _launch is None:
            return shipped_atomic(self, *args)
        ptrs = args[pointers]
        kept = np.ones(ptrs.data.shape, np.bool_) if mask is None else args[mask].data
        accessed = [
            (view, width, live_of(ptrs.data, kept) if live is None else live)
            for view, width, live in _accessed("atomic", ptrs, kept)
        ]
        for view, width, live in accessed:
            _order(view, width, live, ptrs, relaxed=getattr(args[-2], "name", "") == "RELAXED")
        made = shipped_atomic(self, *args)
        if getattr(args[0], "name", "") != "XCHG":
            _refuse_unwritten("atomic", ptrs, kept, made)
        for view, width, live in accessed:
            _note_store("atomic", view, width, live, atomic=True)
        return made

    return create_atomic


def _as_atomic(shipped_access: Callable[..., Any]) -> Callable[..., Any]:
    """Loads and stores within are atomic."""

    @functools.wraps(shipped_access)
    def access(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _launch is None:
            return shipped_access(self, *args, **kwargs)
        _launch.atomic = True
        try:
            return shipped_access(self, *args, **kwargs)
        finally:
            if _launch is not None:
                _launch.atomic = False

    return access


def _merged(shipped_operation: Callable[..., Any]) -> Callable[..., Any]:
    """A pointer that is one of several may be used for any of their tensors; one of another element type, for its own."""

    @functools.wraps(shipped_operation)
    def operation(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = shipped_operation(self, *args, **kwargs)
        if _launch is not None and isinstance(getattr(made, "dtype", None), tl.pointer_type):
            found: list[View] = []
            for each in args:
                kind = getattr(each, "dtype", None)
                if isinstance(each, _Handle) and isinstance(kind, tl.pointer_type):
                    found += [view for view in _views_of(kind) if view not in found]
            made.dtype = _bearing(made.dtype, found[0] if len(found) == 1 else tuple(found))
        return made

    return operation


def _now() -> _Launch:
    assert _launch is not None
    return _launch


def _views_of(kind: Any) -> tuple[View, ...]:
    """The tensors that pointers of type `kind` may be used for: all, where nothing is known."""
    view = getattr(kind, "view", None)
    if isinstance(view, View):
        return (view,)
    return view or tuple(_now().views)


def _accessed(operation: Operation, ptrs: Any, kept: Array) -> Sequence[tuple[View, int, Array | None]]:
    """The tensors that an access reaches, each with the addresses in it; None: all under the mask. Others are refused."""
    kind, data = ptrs.dtype, ptrs.data
    view = getattr(kind, "view", None)
    if type(view) is View:
        width = kind.width
        if width == view.width and view.dense and view.covers(data):
            return ((view, width, None),)
    else:
        width = max(1, kind.element_ty.primitive_bitwidth // 8)
    live = live_of(data, kept)
    if not live.size:
        return ()
    if type(view) is View:
        if not (width == view.width and view.dense and view.covers(live)):
            inside = view.holds(live, width)
            if not inside.all():
                _outside(operation, view, width, live, inside)
        return ((view, width, live),)
    return _of_several(operation, kind, width, live)


def _of_several(operation: Operation, kind: Any, width: int, live: Array) -> list[tuple[View, int, Array]]:
    found, left = [], live
    for view in _views_of(kind):
        if left.size:
            inside = view.holds(left, width)
            if inside.any():
                found.append((view, width, left[inside]))
                left = left[~inside]
    if left.size:
        what = f"{_verb(operation)} address {int(left[0]):#x}, which is in no tensor of the launch ({left.size} elements in all)"
        _raise("out-of-bounds", operation, what)
    return found


def _verb(operation: Operation) -> str:
    return {"load": "reads", "store": "writes", "atomic": "changes"}[operation]


def _outside(operation: Operation, view: View, width: int, live: Array, inside: Array) -> NoReturn:
    wrong = live[~inside]
    within = (wrong >= view.begin) & (wrong <= view.end - width)
    beyond = wrong[~within]
    kind: MemoryKind = "out-of-bounds" if beyond.size else "outside-view"
    first = int((beyond if beyond.size else wrong)[0])
    if kind == "outside-view":
        number = (first - view.begin) // view.width
        where = f"memory between elements of {_title(view)}, {number} elements after its first"
    elif first >= view.end - width:
        where = f"element {(first - view.end) // view.width + 1} past the end of {_title(view)}"
    else:
        where = f"element {-((first - view.begin) // view.width)} before the start of {_title(view)}"
    _raise(kind, operation, f"{_verb(operation)} {where} ({wrong.size} elements in all)")


def _refuse_duplicates(view: View, live: Array) -> None:
    if live.size < 2 or (live[1:] > live[:-1]).all():
        return
    ordered = np.sort(live)
    same = ordered[1:] == ordered[:-1]
    if same.any():
        element = view.element(int(ordered[1:][same][0]))
        count = int(np.count_nonzero(same))
        what = f"writes {element} of {_title(view)} more than once: which value stays is not defined ({count} elements too many)"
        _raise("duplicate-store", "store", what)


def _note_store(operation: Operation, view: View, width: int, live: Array, *, atomic: bool) -> None:
    launch, shadow = _now(), view.shadow
    if not live.size:
        return
    clash = shadow.store(shadow.units(live, width), launch.stamp, launch.base, launch.before(), atomic=atomic)
    if clash is not None:
        _race(operation, view, int(live[clash[0]]), "changed" if atomic else "written", clash[1], clash[2])
    if launch.watch is not None:
        launch.watch.stores.setdefault(view.storage, {}).setdefault(_site())


def _race(operation: Operation, view: View, address: int, done: str, stamp: int, other: str) -> NoReturn:
    launch = _now()
    by = "several other programs" if stamp == launch.base else f"program {_program(stamp)}"
    what = f"{view.element(address)} of {_title(view)} is {done} here and was {other} by {by} of the same launch, in no order"
    _raise("race", operation, what)


def _order(view: View, width: int, live: Array, ptrs: Any, *, relaxed: bool) -> None:
    """A lock or a counter is one integer: who takes it over comes after those who have had it. Sums of floats order nothing."""
    if relaxed or live.size != 1 or not ptrs.dtype.element_ty.is_int():
        return
    launch = _now()
    holders = launch.released.setdefault((view.storage, int(live[0])), set())
    mine = launch.ordered.setdefault(launch.stamp, set())
    for each in holders:
        mine |= {each, *launch.ordered.get(each, ())}
    mine.discard(launch.stamp)
    holders.add(launch.stamp)


def _refuse_unwritten(operation: Operation, ptrs: Any, kept: Array, made: Any) -> None:
    """Refuse to go on with values of memory that nobody has written, where the harness knows such memory."""
    view = getattr(ptrs.dtype, "view", None)
    if _now().watch is None or (type(view) is View and view.shadow.fresh is None):
        return
    live = live_of(ptrs.data, kept)
    values = live_of(np.broadcast_to(made.data, ptrs.data.shape), kept)
    for each in (view,) if type(view) is View else _views_of(ptrs.dtype):
        width = max(1, ptrs.dtype.element_ty.primitive_bitwidth // 8)
        mine = each.holds(live, width) if each is not view else np.ones(live.shape, np.bool_)
        unwritten = each.shadow.unwritten(live[mine], values[mine], width)
        if unwritten is not None:
            element = each.element(int(live[mine][unwritten][0]))
            count = int(np.count_nonzero(unwritten))
            what = f"reads {element} of {_title(each)}, which nobody has written ({count} elements in all)"
            _raise("uninitialised", operation, what)


def _program(stamp: int) -> tuple[int, ...]:
    _, ny, nz = shipped.interpreter_builder.grid_dim
    number = stamp - _now().base - 1
    return (number // (ny * nz), number // nz % ny, number % nz)


def _raise(kind: MemoryKind, operation: Operation, what: str) -> NoReturn:
    launch = _now()
    fault = MemoryFault(kind, operation, _site(), f"{what}; program {launch.program} of {launch.name}")
    if launch.watch is not None and launch.watch.fault is None:
        launch.watch.fault = fault
    raise fault


_HERE = os.path.dirname(__file__) + os.sep
_OWN = frozenset(_HERE + name for name in ("memory.py", "shadow.py", "views.py", "interpreter.py", "shortcuts.py"))
_TRITON = os.path.dirname(getattr(triton, "__file__", "") or "/absent/") + os.sep


def _device_frames() -> Iterator[FrameType]:
    """Frames of device code, the innermost first, up to the launch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name not in _OWN:
            if not name.startswith(_TRITON):
                yield frame
        elif frame.f_code.co_name == "launch":
            return
        frame = frame.f_back


def _site() -> Site:
    """The statement of device code that is being executed."""
    frame = next(_device_frames(), None)
    if frame is None:
        return Site("?", 0, "", "?")
    name, line = frame.f_code.co_filename, frame.f_lineno
    return Site(os.path.basename(name), line, linecache.getline(name, line).strip(), frame.f_code.co_name)


def _title(view: View) -> str:
    """A tensor by the name of the launch's argument, with shape and dtype."""
    frames = list(_device_frames())
    named = frames[-1].f_locals if frames else {}
    for name, value in named.items():
        if (found := _part(value, view)) is not None:
            return f"{name}{found} {view}"
    return f"a tensor {view}"


def _part(value: Any, view: View) -> str | None:
    """How `view` is reached from an argument: "", "[1]" for part of a tuple; None: not at all."""
    if isinstance(value, tuple | tl.tuple):
        for index, each in enumerate(value):
            if (found := _part(each, view)) is not None:
                return f"[{index}]{found}"
        return None
    kind = getattr(getattr(value, "handle", None), "dtype", None)
    return "" if getattr(kind, "view", None) is view else None
