"""What the kernels of one campaign share, and what those of one worker share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from attnfuzz.harness.campaign.corpus import Corpus
from attnfuzz.harness.campaign.events import Listener
from attnfuzz.harness.campaign.journal import Journal
from attnfuzz.harness.campaign.maps import MapWriter
from attnfuzz.harness.campaign.replays import ReplayRecord
from attnfuzz.harness.campaign.settings import PROFILES, Settings
from attnfuzz.harness.campaign.shared_failures import SharedFailures
from attnfuzz.harness.isolation.executors import Executor
from attnfuzz.kernels.contract import Device
from attnfuzz.strategies.case import Case

__all__ = ["Batch", "CampaignContext", "WorkerContext", "batch_for", "worker_context"]


_AROUND = 256
"""Scores that count for a row of q or k: its own elements and the budgets of them."""


@dataclass(frozen=True, slots=True)
class CampaignContext:
    """Settings, who listens, what is kept on disk, and when the time of the campaign is over (time.monotonic)."""

    settings: Settings
    listener: Listener = lambda _: None
    corpus: Corpus | None = None
    end: float | None = None
    replays: ReplayRecord | None = None
    """Which stored Cases earlier runs have replayed."""
    shared: SharedFailures | None = None
    """What it shares with other shards; None: it has no others, or shares nothing."""

    @property
    def shrink_seconds(self) -> float:
        """How long a failure that is seen now may be shrunk."""
        return shrink_seconds(self.settings, self.end)


@dataclass(frozen=True, slots=True)
class Batch:
    """How many Cases are taken at once: at most `most`, whose weights add up to at most `room`.

    `together`: they run and are judged together; else one after the other, and only their entry in the journal is one.
    """

    together: bool = False
    most: int = 1
    room: float = 0.0
    weight: Callable[[Case], float] = lambda _: 0.0


def _scores(case: Case) -> float:
    p = case.problem
    return p.heads * sum(n_q * n_k for n_q, n_k in zip(p.seqlens_q, p.seqlens_k, strict=True)) + _AROUND * (
        p.total_q * p.heads + p.total_k * p.kv_heads
    )


_BATCHES: dict[Device, Batch] = {
    "cpu": Batch(most=16),
    "cuda": Batch(True, 96, float(1 << 26), _scores),
}
"""On a GPU the launches of one judgement cost more than the Cases; scores of a batch take 0.5 GiB each time they are held.
Numbers of Cases other than 96 have not been measured beside it."""


def batch_for(settings: Settings) -> Batch:
    """Return how many Cases of a run go together."""
    batch = _BATCHES[settings.device]
    return batch if settings.batch is None or not batch.together else replace(batch, most=min(batch.most, settings.batch))


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Settings, where a worker's trials run, what it keeps on disk, and when the time of the campaign is over."""

    settings: Settings
    executor: Executor
    journal: Journal | None = None
    maps: MapWriter | None = None
    end: float | None = None
    batch: Batch = Batch()

    @property
    def shrink_end(self) -> float | None:
        """Return when trials of shrinking end (time.monotonic), after the grace of the settings; None: no such time."""
        return None if self.end is None else self.end + self.settings.grace

    @property
    def shrink_seconds(self) -> float:
        """How long a failure that is seen now may be shrunk."""
        return shrink_seconds(self.settings, self.end)


def shrink_seconds(settings: Settings, end: float | None) -> float:
    """Return how long one failure may be shrunk: as the profile says, and after the end only for the grace of the settings."""
    most = PROFILES[settings.profile].shrink if settings.shrink is None else settings.shrink
    return most if end is None else min(most, max(0.0, end + settings.grace - time.monotonic()))


def worker_context(settings: Settings, executor: Executor, end: float | None) -> WorkerContext:
    """Return what the kernels of one worker share; its journal is its own."""
    return WorkerContext(
        settings=settings,
        executor=executor,
        journal=Journal(settings.out) if settings.out else None,
        maps=MapWriter(settings.out) if settings.out and settings.maps else None,
        end=end,
        batch=batch_for(settings),
    )
