"""Counts of one supervisor: tasks, children, and what the machine did to them."""

from __future__ import annotations

from dataclasses import dataclass, field

from attnfuzz.harness.isolation.disturbances import Disturbance, Disturbances

__all__ = ["Statistics"]


@dataclass(slots=True)
class Statistics:
    """Tasks done, children started and replaced, and seconds from each death to the next reply."""

    tasks: int = 0
    children: int = 0
    start_seconds: float = 0.0
    """Seconds in which a task waited for a new child."""
    replaced: int = 0
    recoveries: list[float] = field(default_factory=list)
    batches_lost: int = 0
    lost: list[str] = field(default_factory=list)
    """Why the Cases of batches had to run again: the first of `batches_lost`."""
    disturbances: Disturbances = field(default_factory=Disturbances)

    def disturbed(self, what: Disturbance) -> None:
        """Count an event of the machine."""
        self.disturbances = self.disturbances.plus(what)
