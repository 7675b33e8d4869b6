"""The state of an execution of a block's roles: barriers, roles, asynchronous operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from attnfuzz.kernels.tilelang.roles.clocks import Clock
from attnfuzz.kernels.tilelang.roles.steps import BlockProgram, Mbarrier, Step

__all__ = ["Execution", "Operation", "Phases", "Runner", "Turn"]


@dataclass(slots=True)
class Phases:
    """The state of an mbarrier: the phase that runs has number `completed`."""

    barrier: Mbarrier
    pending: int
    current: Clock
    past: Clock
    """What those who have waited for a completed phase know."""
    bytes: int = 0
    completed: int = 0
    seen: dict[int, int] = field(default_factory=dict)
    """The phase that each role's last wait observed."""
    stale: set[int] = field(default_factory=set)
    """Roles whose last wait observed no phase that they had not observed before."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A choice: the role that goes on, or the operation that finishes, named by its role and place."""

    role: int
    place: int = -1
    """Place of the operation's first step; -1: the role itself."""


@dataclass(slots=True)
class Operation:
    """An asynchronous copy, product or commit that has been started."""

    number: int
    role: int
    step: Step
    known: Clock
    """What its role knew when it was started."""
    turn: Turn
    finished: bool = False


@dataclass(slots=True)
class Runner:
    """A role: its place, and what it knows."""

    steps: Sequence[Step]
    clock: Clock
    place: int = 0
    synced: bool = False
    """Whether it has arrived at the named barrier at which it waits."""


class Execution(Protocol):
    """A machine as a diagnosis needs it."""

    program: BlockProgram
    runners: list[Runner]
    phases: dict[tuple[int, int], Phases]
    operations: list[Operation]
    taken: list[Turn]

    def options(self) -> list[Turn]:
        """Return what may happen next."""

    def take(self, turn: Turn) -> None:
        """Let one thing happen."""

    def arrive(self, phases: Phases, count: int, clock: Clock) -> bool:
        """Count arrivals; False if the phase that runs has more than it counts."""

    def again(self) -> Execution:
        """Return another execution in the same state, without numbers."""
