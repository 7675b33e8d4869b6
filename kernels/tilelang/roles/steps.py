"""The steps of a role: what it does between and at barriers, recorded once and executed under any schedule."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from attnfuzz.kernels.tilelang.roles.memory import Memory
from attnfuzz.kernels.tilelang.roles.regions import Buffer, Part

__all__ = ["BlockProgram", "Effect", "Kind", "Mbarrier", "Role", "Step"]

Effect = Callable[[Memory], None]


class Kind(enum.Enum):
    """What a step does."""

    COMPUTE = "compute"
    """Read and write buffers at once."""
    WAIT = "wait"
    """Wait until a barrier's last completed phase has a parity."""
    ARRIVE = "arrive"
    EXPECT = "expect"
    """Add bytes to those that a barrier's current phase waits for."""
    COPY = "copy"
    """Start an asynchronous copy, which ends by delivering its bytes to a barrier."""
    PRODUCT = "product"
    """Start an asynchronous product."""
    COMMIT = "commit"
    """Let a barrier have an arrival once the products started so far have finished."""
    DRAIN = "drain"
    """Wait until all but the last `count` products that this role started have finished."""
    SYNC = "sync"
    """Arrive at a named barrier, and wait for `count` threads there."""
    SIGNAL = "signal"
    """Arrive at a named barrier without waiting."""


@dataclass(frozen=True, slots=True)
class Mbarrier:
    """One element of an array of mbarriers: the number of arrivals that complete its phase."""

    name: str
    index: int
    arrivals: int
    alone: bool
    slot: int

    @property
    def text(self) -> str:
        """Name, and index where there are several."""
        return self.name if self.alone else f"{self.name}[{self.index}]"


@dataclass(slots=True, eq=False)
class Step:
    """One step; which fields it has depends on its kind."""

    kind: Kind
    text: str
    loops: tuple[tuple[str, int], ...]
    """The loops around it with their values, the outermost first."""
    reads: tuple[Part, ...] = ()
    writes: tuple[Part, ...] = ()
    effect: Effect | None = None
    barrier: Mbarrier | None = None
    parity: int = 0
    count: int = 1
    """Arrivals, bytes, products left running, or threads at a named barrier."""
    threads: int = 1
    """Threads that arrive at a named barrier."""
    stream: str = ""
    """Products of one stream finish in order, but only those that add to the same result may count on it without a wait."""
    iteration: int = 0
    """Iteration of its role's pipeline."""


@dataclass(slots=True, eq=False)
class Role:
    """Warps that execute the same steps: a coroutine, whose state is its place in `steps`."""

    name: str
    threads: tuple[int, int]
    """First thread and the one behind the last."""
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class BlockProgram:
    """All roles of one block, its barriers and its buffers."""

    name: str
    block: tuple[int, int, int]
    roles: tuple[Role, ...]
    barriers: tuple[Mbarrier, ...]
    buffers: tuple[Buffer, ...]
    tensors: dict[int, Any]
    """Arrays of global buffers by slot."""
    own: frozenset[int]
    """Buffers that one role alone uses, and none of its asynchronous operations."""
