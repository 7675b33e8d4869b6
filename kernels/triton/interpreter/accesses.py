"""Rules for an access: it must stay within its own tensors, and not conflict with other programs of the launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from attnfuzz.kernels.support.absent import Absent
from attnfuzz.kernels.support.memory import MemoryKind, Operation
from attnfuzz.kernels.triton.interpreter import sites
from attnfuzz.kernels.triton.interpreter.launches import now, refuse
from attnfuzz.kernels.triton.interpreter.shadow import live_of
from attnfuzz.kernels.triton.interpreter.views import View

try:
    import numpy as np
except ImportError:
    np = Absent("numpy")  # type: ignore[assignment]

__all__ = [
    "accessed",
    "elements",
    "note_load",
    "note_site",
    "note_store",
    "order",
    "refuse_duplicates",
    "refuse_unwritten",
    "views_of",
]

Array = np.ndarray[Any, np.dtype[Any]]

_MOST_PENDING = 64 << 20
"""Bytes of load addresses that a launch may keep before it processes them."""
_VERBS: dict[Operation, str] = {"load": "reads", "store": "writes", "atomic": "changes"}


def views_of(kind: Any) -> tuple[View, ...]:
    """The tensors that pointers of type `kind` may be used for: all tensors where nothing is known."""
    view = getattr(kind, "view", None)
    if isinstance(view, View):
        return (view,)
    return view or tuple(now().views)


def accessed(operation: Operation, ptrs: Any, kept: Array) -> Sequence[tuple[View, int, Array | None]]:
    """The tensors that an access reaches, each with its addresses (None: all under the mask); refuses any other access."""
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
    reached, left = [], live
    for view in views_of(kind):
        if left.size:
            inside = view.holds(left, width)
            if inside.any():
                reached.append((view, width, left[inside]))
                left = left[~inside]
    if left.size:
        what = (
            f"{_VERBS[operation]} address {int(left[0]):#x}, which is in no tensor of the launch ({elements(left.size)} in all)"
        )
        refuse("out-of-bounds", operation, what)
    return reached


def elements(count: int) -> str:
    """Return a count of elements in words: "1 element", "2 elements"."""
    return f"{count} element{'s' * (count != 1)}"


def _outside(operation: Operation, view: View, width: int, live: Array, inside: Array) -> NoReturn:
    wrong = live[~inside]
    within = (wrong >= view.begin) & (wrong <= view.end - width)
    beyond = wrong[~within]
    kind: MemoryKind = "out-of-bounds" if beyond.size else "outside-view"
    first = int((beyond if beyond.size else wrong)[0])
    if kind == "outside-view":
        number = (first - view.begin) // view.width
        where = f"memory between elements of {sites.title(view)}, {elements(number)} after its first"
    elif first >= view.end - width:
        where = f"element {(first - view.end) // view.width + 1} past the end of {sites.title(view)}"
    else:
        where = f"element {-((first - view.begin) // view.width)} before the start of {sites.title(view)}"
    refuse(kind, operation, f"{_VERBS[operation]} {where} ({elements(wrong.size)} in all)")


def refuse_duplicates(view: View, live: Array) -> None:
    """Refuse a store that reaches one element twice."""
    if live.size < 2 or (live[1:] > live[:-1]).all():
        return
    ordered = np.sort(live)
    same = ordered[1:] == ordered[:-1]
    if same.any():
        element = view.element(int(ordered[1:][same][0]))
        count = int(np.count_nonzero(same))
        what = (
            f"writes {element} of {sites.title(view)} more than once, so that either value may stay ({elements(count)} too many)"
        )
        refuse("duplicate-store", "store", what)


def note_load(view: View, width: int, data: Array, kept: Array | None, live: Array | None) -> None:
    """Keep the addresses of a load, and compare them with the stores of other programs."""
    launch, shadow = now(), view.shadow
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


def note_store(operation: Operation, view: View, width: int, live: Array, *, atomic: bool) -> None:
    """Note that this program writes the addresses `live`, and compare them with loads and stores of other programs."""
    launch, shadow = now(), view.shadow
    if not live.size:
        return
    clash = shadow.store(shadow.units(live, width), launch.stamp, launch.base, launch.before(), atomic=atomic)
    if clash is not None:
        _race(operation, view, int(live[clash[0]]), "changed" if atomic else "written", clash[1], clash[2])


def note_site(ptrs: Any) -> None:
    """Note which statement stores to a tensor, even where its mask hides everything."""
    watch, view = now().watch, getattr(ptrs.dtype, "view", None)
    if watch is not None and type(view) is View:
        watch.stores.setdefault(view.storage, {}).setdefault(sites.site())


def _race(operation: Operation, view: View, address: int, done: str, stamp: int, other: str) -> NoReturn:
    launch = now()
    element, by = f"{view.element(address)} of {sites.title(view)}", launch.named(stamp)
    what = f"{element} is {done} here and was {other} by {by} of the same launch, in no order"
    refuse("race", operation, what)


def order(view: View, live: Array, ptrs: Any, *, relaxed: bool) -> None:
    """Order programs by an atomic on one integer (lock or counter): earlier holders come first. Sums of floats order nothing."""
    if relaxed or live.size != 1 or not ptrs.dtype.element_ty.is_int():
        return
    launch = now()
    holders = launch.released.setdefault((view.storage, int(live[0])), set())
    mine = launch.ordered.setdefault(launch.stamp, set())
    for each in holders:
        mine |= {each, *launch.ordered.get(each, ())}
    mine.discard(launch.stamp)
    holders.add(launch.stamp)


def refuse_unwritten(operation: Operation, ptrs: Any, kept: Array, result: Any) -> None:
    """Refuse values from memory that was never written, where the harness knows such memory."""
    view = getattr(ptrs.dtype, "view", None)
    if now().watch is None or (type(view) is View and view.shadow.fresh is None):
        return
    live = live_of(ptrs.data, kept)
    values = live_of(np.broadcast_to(result.data, ptrs.data.shape), kept)
    for each in (view,) if type(view) is View else views_of(ptrs.dtype):
        width = max(1, ptrs.dtype.element_ty.primitive_bitwidth // 8)
        mine = each.holds(live, width) if each is not view else np.ones(live.shape, np.bool_)
        unwritten = each.shadow.unwritten(live[mine], values[mine], width)
        if unwritten is not None:
            element = each.element(int(live[mine][unwritten][0]))
            count = int(np.count_nonzero(unwritten))
            what = f"reads {element} of {sites.title(each)}, which was never written ({elements(count)} in all)"
            refuse("uninitialised", operation, what)
