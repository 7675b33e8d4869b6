"""Try many schedules on one block, and shorten the one that shows a fault."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from attnfuzz.kernels.support.protocol import ProtocolFault
from attnfuzz.kernels.tilelang.roles.machine import Machine
from attnfuzz.kernels.tilelang.roles.steps import BlockProgram

__all__ = ["Shown", "first_fault", "schedules"]

_LARGEST_CHOICE = 5


@dataclass(frozen=True, slots=True)
class Shown:
    """A fault, the number of schedules that were run until it showed, and the shortest schedule that shows it."""

    fault: ProtocolFault
    tried: int
    schedule: tuple[int, ...]


def schedules(program: BlockProgram, count: int, seed: int) -> Iterator[tuple[int, ...]]:
    """Yield `count` schedules for a block: the empty one, one that holds back each role, then random ones."""
    source = random.Random(seed)
    longest = sum(len(role.steps) for role in program.roles)
    yield ()
    held = range(1, len(program.roles) + 1)[: count - 1]
    yield from ((-role,) for role in held)
    for _ in range(count - 1 - len(held)):
        density = source.random()
        length = source.randint(1, longest)
        yield tuple(source.randint(1, _LARGEST_CHOICE) if source.random() < density else 0 for _ in range(length))


def first_fault(program: BlockProgram, count: int, seed: int) -> Shown | None:
    """Run up to `count` schedules until one shows a fault; None: none does."""
    for number, schedule in enumerate(schedules(program, count, seed), 1):
        if (fault := _fault(program, schedule)) is not None:
            return _shortest(program, schedule, fault, number)
    return None


def _fault(program: BlockProgram, schedule: tuple[int, ...]) -> ProtocolFault | None:
    try:
        Machine(program).run(schedule)
    except ProtocolFault as fault:
        return fault
    return None


def _shortest(program: BlockProgram, schedule: tuple[int, ...], fault: ProtocolFault, tried: int) -> Shown:
    """Shorten a schedule as long as one step leaves a fault of the same kind and check."""
    better = True
    while better:
        better = False
        for candidate in _simpler(schedule):
            other = _fault(program, candidate)
            if other is not None and (other.kind, other.check) == (fault.kind, fault.check):
                schedule, fault, better = candidate, other, True
                break
    return Shown(fault, tried, schedule)


def _simpler(schedule: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not schedule:
        return
    size = max(1, len(schedule) // 2)
    while size:
        yield _stripped(schedule[:-size])
        for start in range(0, len(schedule), size):
            if any(schedule[start : start + size]):
                yield _stripped((*schedule[:start], *(0,) * size, *schedule[start + size :])[: len(schedule)])
        size //= 2
    for number, choice in enumerate(schedule):
        if choice > 1:
            yield (*schedule[:number], choice - 1, *schedule[number + 1 :])


def _stripped(schedule: tuple[int, ...]) -> tuple[int, ...]:
    while schedule and not schedule[-1]:
        schedule = schedule[:-1]
    return schedule
