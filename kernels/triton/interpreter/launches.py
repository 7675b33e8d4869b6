"""The launch that is being interpreted: its tensors, what is noted of their memory, and the program that runs."""

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
        """Whether the load in progress has been given `other`."""
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
        _next_base = max(_next_base, self.last + 1)
        for view in self.views:
            view.shadow.pending.clear()

    def before(self) -> set[int]:
        """Stamps of programs that are ordered before this one."""
        return self.ordered.get(self.stamp, _NONE)

    def enter(self, indices: tuple[int, int, int], sizes: tuple[int, ...]) -> None:
        """Program `indices` of a grid of `sizes` begins."""
        self.program, self.sizes = indices, sizes
        self.stamp = self.base + 1 + (indices[0] * sizes[1] + indices[1]) * sizes[2] + indices[2]
        self.last = max(self.last, self.stamp)

    def named(self, stamp: int) -> str:
        """The program of a stamp, for people."""
        if stamp == self.base:
            return "several other programs"
        number, (_, ny, nz) = stamp - self.base - 1, self.sizes
        return f"program {(number // (ny * nz), number // nz % ny, number % nz)}"


def now() -> Launch:
    """The launch in progress; there is one."""
    assert current is not None
    return current


def bearing(kind: Any, view: View | tuple[View, ...] | None) -> Any:
    """A copy of pointer type `kind`, equal to it for Triton, that bears its View, or several where it may be of each of them."""
    made = copy.copy(kind)
    made.view = view
    made.width = max(1, made.element_ty.primitive_bitwidth // 8)
    return made


def refuse(kind: MemoryKind, operation: Operation, what: str) -> NoReturn:
    """End the launch with a MemoryFault, which the watch remembers should the kernel's own code catch it."""
    launch = now()
    told = f"{what}; program {launch.program} of {launch.name}"
    fault = MemoryFault(kind, operation, sites.site(), told, sites.callers())
    if launch.watch is not None and launch.watch.fault is None:
        launch.watch.fault = fault
    raise fault
