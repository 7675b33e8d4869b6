"""What the kernels of one campaign share."""

from __future__ import annotations

from dataclasses import dataclass

from attnfuzz.harness.campaign.corpus import Corpus
from attnfuzz.harness.campaign.events import Listener
from attnfuzz.harness.campaign.journal import Journal
from attnfuzz.harness.campaign.maps import MapWriter
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.isolation.executors import Executor

__all__ = ["CampaignContext"]


@dataclass(frozen=True, slots=True)
class CampaignContext:
    """Settings, where trials run, who listens, and what is kept on disk. `seconds`: the budget of each kernel."""

    settings: Settings
    executor: Executor
    listener: Listener = lambda _: None
    corpus: Corpus | None = None
    journal: Journal | None = None
    maps: MapWriter | None = None
    seconds: float | None = None
