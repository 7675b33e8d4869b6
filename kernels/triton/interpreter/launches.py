"""The launch in progress: its tensors, the notes on their memory, and the running program."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

from attnfuzz.kernels.support import memory
from attnfuzz.kernels.support.memory import MemoryFault, MemoryKind, Operation
from attnfuzz.kernels.triton.interpreter import sites
from attnfuzz.kernels.triton.interpreter.shadow import Shadow
from attnfuzz.kernels.triton.interpreter.views import View

__all__ = ["Launch", "bearing", "current", "now", "refuse"]

current: Launch | None = None
"""The launch in progress, if it is checked."""
_next_base = 1
_NONE: set[int] = set()


class Launch:
    """One launch: its tensors, the notes on their storages, and which program runs."""

    def __init__(self, name: str) -> None:
        self.name, self.base = name, _next_base
        self.stamp, self.last = self.base + 1, self.base + 1
        self.program: tuple[int, ...] = (0, 0, 0)
        self.sizes: tuple[int, ...] = (1, 1, 1)
        self.views: list[View] = []
        self.atomic = False
        """Whether loads and stores are parts of an atomic operation."""
        self.other = False
        """Whether the load in progress has an `other`."""
        self.pending = 0
        self.ordered: dict[int, set[int]] = {}
        """Programs that are ordered before each one, by stamp."""
        self.released: dict[tuple[int, int], set[int]] = {}
        self.watch = memory.current()
        self.shadows: dict[int, Shadow] = {} if self.watch is None else self.watch.shadows
        if self.watch is not None:
            self.watch.launches.append(name)

    def view(self, tensor: Any) -> View:
        """Make the View of a tensor argument."""
        view = View(tensor)
        shadow = self.shadows.get(view.storage)
        if shadow is None or shadow.size != view.size:
            fresh = None if self.watch is None else self.watch.fresh.get(view.storage)
            shadow = self.shadows[view.storage] = Shadow(view.storage, view.size, view.width, fresh)
        view.shadow = shadow
        self.views.append(view)
        return view

    def end(self) -> None:
        """End the launch: drop pending loads, which do not matter to the next one."""
        global _next_base
        _next_base = max(_next_base, self.last + 1)
        for view in self.views:
            view.shadow.pending.clear()

    def before(self) -> set[int]:
        """Stamps of programs that are ordered before this one."""
        return self.ordered.get(self.stamp, _NONE)

    def enter(self, indices: tuple[int, int, int], sizes: tuple[int, ...]) -> None:
        """Begin program `indices` of a grid of `sizes`."""
        self.program, self.sizes = indices, sizes
        self.stamp = self.base + 1 + (indices[0] * sizes[1] + indices[1]) * sizes[2] + indices[2]
        self.last = max(self.last, self.stamp)

    def named(self, stamp: int) -> str:
        """Format the program of a stamp."""
        if stamp == self.base:
            return "several other programs"
        number, (_, ny, nz) = stamp - self.base - 1, self.sizes
        return f"program {(number // (ny * nz), number // nz % ny, number % nz)}"


def now() -> Launch:
    """The launch in progress, which must exist."""
    assert current is not None
    return current


def bearing(kind: Any, view: View | tuple[View, ...] | None) -> Any:
    """Copy pointer type `kind`, equal for Triton, with its View attached, or several where the pointer may be of each of them."""
    attached = copy.copy(kind)
    attached.view = view
    attached.width = max(1, attached.element_ty.primitive_bitwidth // 8)
    return attached


def refuse(kind: MemoryKind, operation: Operation, what: str) -> NoReturn:
    """End the launch with a MemoryFault; the watch keeps it in case the kernel's own code catches it."""
    launch = now()
    message = f"{what}; program {launch.program} of {launch.name}"
    fault = MemoryFault(kind, operation, sites.site(), message, sites.callers())
    if launch.watch is not None and launch.watch.fault is None:
        launch.watch.fault = fault
    raise fault
