"""What a worker asks of its campaign: turns, rounds, compiles, and which failures are new."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from attnfuzz.harness.campaign.account import Times
from attnfuzz.harness.campaign.compiles import KeyState
from attnfuzz.harness.campaign.coverage import Phase
from attnfuzz.harness.campaign.earlier import EarlierCase
from attnfuzz.harness.campaign.events import Event, Finding
from attnfuzz.harness.campaign.rounds import Round
from attnfuzz.harness.isolation.disturbances import Disturbances
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.strategies.case import Case

__all__ = ["Campaign", "Turn", "TurnEnd", "Turns"]


@dataclass(frozen=True, slots=True)
class Turn:
    """A worker's time on one kernel: until `until` (time.monotonic; None: until nothing is left), `earlier` Cases first.

    `only_earlier`: there are more of those, for this worker or another; nothing is drawn before.
    """

    kernel: str
    until: float | None = None
    earlier: tuple[EarlierCase, ...] = ()
    only_earlier: bool = False
    replay_seconds: float | None = None
    """Seconds of trials after which no other stored Case begins; None: no limit."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """How a turn ended: seconds of trials, Cases that can run or wait for a compiler, child processes replaced, recoveries."""

    seconds: float
    ready: int = 0
    waiting: int = 0
    full: bool = False
    """Whether so many wait that no more are drawn until code is compiled."""
    replaced: int = 0
    recoveries: tuple[float, ...] = ()
    """Seconds from the death of a child to the next verdict."""
    replay_seconds: float = 0.0
    """Those of trials of stored Cases."""
    not_tried: tuple[EarlierCase, ...] = ()
    """Earlier Cases that the turn had no time for."""
    times: Times = field(default_factory=Times)
    """Where the worker's time went since its last turn ended."""
    disturbances: Disturbances = field(default_factory=Disturbances)
    """What others than the kernel did to the worker's children."""


class Turns(Protocol):
    """Where a worker gets its work."""

    def turn(self) -> Turn | None:
        """Return the next turn, waiting for it where all kernels wait for a compiler; None: the campaign is over."""

    def end_turn(self, kernel: str, end: TurnEnd) -> None:
        """Report how a turn ended."""

    def broke(self, kernel: str, error: Exception) -> None:
        """Report an error that is not a finding, and that ends the trials of a kernel."""


class Campaign(Protocol):
    """What a worker asks and reports while it tries a kernel."""

    def round(self, kernel: str) -> Round | None:
        """Return the next round to draw; None: there is none, at least now."""

    def drawn(self, kernel: str, number: int, ids: Sequence[str]) -> list[int]:
        """Report the Cases that a round has drawn; returns the indices of those to try."""

    def end_round(self, kernel: str, number: int) -> None:
        """Report that all Cases of a round have been tried."""

    def want(self, kernel: str, cases: Mapping[str, Case]) -> dict[str, KeyState]:
        """Ask for compiles, by compile key; returns the state of each key."""

    def ready(self, kernel: str, keys: Collection[str]) -> set[str]:
        """Return those of `keys` that are compiled."""

    def over(self, kernel: str) -> bool:
        """Whether a kernel is not to be tried further: it has as many failures as are wanted."""

    def trial(self, kernel: str, phase: Phase, case: Case, verdict: Verdict) -> None:
        """Report a trial."""

    def pass_on(self, event: Event) -> None:
        """Pass an event on to the listener."""

    def open(self, kernel: str, finding: Finding) -> Finding | None:
        """Report a failure before it is shrunk; returns it with its case file, None where it is known or not wanted."""

    def update(self, kernel: str, before: Identity, finding: Finding) -> None:
        """Report what shrinking has made of an open finding, first seen as `before`."""

    def close(self, kernel: str, before: Identity) -> Finding:
        """End an open finding; returns it with the case file of its minimal Case."""

    def ignore(self, kernel: str, identities: set[Identity]) -> None:
        """Count failures as known without keeping them."""

    def not_kept(self, kernel: str, case: Case, error: OSError) -> None:
        """Report a Case that could not be written to disk."""
