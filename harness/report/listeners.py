"""Several listeners of a campaign as one."""

from __future__ import annotations

from attnfuzz.harness.campaign.events import Event, Listener

__all__ = ["to_all"]


def to_all(*listeners: Listener) -> Listener:
    """One listener that calls each of `listeners`, in their order."""

    def call_all(event: Event) -> None:
        for each in listeners:
            each(event)

    return call_all
