"""The failures of a command so far, for an interrupt that comes where no summary is printed any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnfuzz.harness.campaign.events import Event

__all__ = ["forget", "listen", "so_far"]

_failures: dict[str, str] = {}


def forget() -> None:
    """Begin a command."""
    _failures.clear()


def listen(event: Event) -> None:
    """Remember the failures of a campaign, each with its case file; a listener of campaigns."""
    from attnfuzz.harness.campaign.events import FailureFound, Shrunk

    if isinstance(event, Shrunk):
        _failures.pop(str(event.before), None)
    if isinstance(event, FailureFound | Shrunk):
        finding = event.finding
        _failures[str(finding.identity)] = f"{finding.identity}: {finding.path or 'in no file'}"


def so_far() -> tuple[str, ...]:
    """Return a line for each failure of the command that runs, or that has just been interrupted."""
    return tuple(_failures.values())
