"""What is known to have happened: the happens-before relation among roles and asynchronous operations."""

from __future__ import annotations

from attnfuzz.kernels.tilelang.roles.regions import Box, Part, covers, overlap
from attnfuzz.kernels.tilelang.roles.steps import Step

__all__ = ["Access", "Clock", "History"]


class Clock:
    """A vector clock: for each role the number of its steps that are known, and the set of finished operations as bits."""

    __slots__ = ("done", "steps")

    def __init__(self, steps: list[int], done: int = 0) -> None:
        self.steps = steps
        self.done = done

    def copy(self) -> Clock:
        """Return another clock with the same knowledge."""
        return Clock(list(self.steps), self.done)

    def join(self, other: Clock) -> None:
        """Learn what `other` knows."""
        self.steps = [max(pair) for pair in zip(self.steps, other.steps, strict=True)]
        self.done |= other.done


class Access:
    """One access to a buffer: by a role at one of its steps, or by an asynchronous operation."""

    __slots__ = ("accumulator", "box", "number", "operation", "part", "role", "step", "stream", "write")

    def __init__(self, part: Part, step: Step, role: int, number: int, *, write: bool, operation: int = -1) -> None:
        self.part, self.box, self.step = part, part.box, step
        self.role, self.number, self.operation, self.write = role, number, operation, write
        self.stream = step.stream
        self.accumulator = bool(step.stream) and any(each is part for each in step.writes)
        """Whether it is a product's access to the result that it adds to."""

    def before(self, clock: Clock) -> bool:
        """Whether `clock` knows that this access has happened."""
        if self.operation >= 0:
            return bool(clock.done >> self.operation & 1)
        return self.number <= clock.steps[self.role]


class History:
    """The accesses to one buffer that later ones may conflict with."""

    __slots__ = ("accesses", "written")

    def __init__(self) -> None:
        self.accesses: list[Access] = []
        self.written: list[Box] = []
        """Boxes that some write before has covered."""

    def conflict(self, access: Access, clock: Clock) -> Access | None:
        """Return an earlier access of which nothing says that it has happened before `access`, and one of both writes."""
        for each in self.accesses:
            if not (access.write or each.write) or not overlap(each.box, access.box) or each.before(clock):
                continue
            if not _pipelined(access, each):
                return each
        return None

    def add(self, access: Access) -> None:
        """Keep `access`; a write replaces what it covers, which has happened before it."""
        if access.write:
            self.accesses = [each for each in self.accesses if not covers(access.box, each.box)]
            if not any(covers(each, access.box) for each in self.written):
                self.written = [each for each in self.written if not covers(access.box, each)] + [access.box]
        elif any(
            each.role == access.role and each.operation == access.operation and not each.write and each.box == access.box
            for each in self.accesses
        ):
            # the later read of the same elements by the same role stands for the earlier one
            self.accesses = [
                each
                for each in self.accesses
                if each.write or each.role != access.role or each.operation != access.operation or each.box != access.box
            ]
        self.accesses.append(access)

    def is_written(self, box: Box) -> bool:
        """Whether each element of `box` has been written."""
        if any(covers(each, box) for each in self.written):
            return True
        left = [box]
        for each in self.written:
            left = [piece for part in left for piece in _without(part, each)]
        return not left


def _pipelined(one: Access, other: Access) -> bool:
    """Whether both are products of one stream that add to the same result: these run in order without a wait.

    PTX ISA, "Pipelined tcgen05 Instructions", and for wgmma "Asynchronous warpgroup level matrix instructions".
    """
    return bool(one.stream) and one.stream == other.stream and one.accumulator and other.accumulator and one.box == other.box


def _without(box: Box, hole: Box) -> list[Box]:
    """Return `box` without `hole` as disjoint boxes."""
    if not overlap(box, hole):
        return [box]
    pieces, rest = [], list(box)
    for axis, ((low, high), (hole_low, hole_high)) in enumerate(zip(box, hole, strict=True)):
        if low < hole_low:
            pieces.append((*rest[:axis], (low, hole_low), *rest[axis + 1 :]))
        if hole_high < high:
            pieces.append((*rest[:axis], (hole_high, high), *rest[axis + 1 :]))
        rest[axis] = (max(low, hole_low), min(high, hole_high))
    return pieces
