"""Events of a campaign as lines of JSON, each written at once: a program sees the first failure before the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from attnfuzz.harness.campaign import events
from attnfuzz.harness.core.text import dumps
from attnfuzz.harness.report.machine import campaign_object, finding_object, summary_object

__all__ = ["EventLines"]

_EVERY = 1.0
"""Seconds between two lines of progress."""


class EventLines:
    """Listens to a campaign, and passes each event on as one line of JSON.

    Args:
        write: takes a line, with its end.
        version: of the form, in each line.
    """

    def __init__(self, write: Callable[[str], object], version: int) -> None:
        self._write, self._version = write, version
        self._cases = self._failures = 0
        self._start = self._shown = time.monotonic()

    def __call__(self, event: events.Event) -> None:
        """Write the line of one event, if it has one."""
        match event:
            case events.CampaignStarted():
                content = {"kernels": list(event.kernels), "seconds": event.seconds, "environment": event.environment}
                self._line("started", content)
            case events.TrialFinished():
                self._cases += event.phase in ("replay", "generate")
                if (now := time.monotonic()) - self._shown >= _EVERY:
                    self._shown = now
                    self._line("progress", {"cases": self._cases, "failures": self._failures})
            case events.FailureFound():
                self._failures += 1
                self._line("failure", finding_object(event.finding))
            case events.Shrunk():
                self._line("shrunk", {**finding_object(event.finding), "before": event.before.key})
            case events.WorkerDied():
                self._line("worker", asdict(event))
            case events.KernelFinished():
                self._line("kernel", summary_object(event.summary))
            case events.CampaignFinished():
                self._line("finished", campaign_object(event))

    def stop(self) -> None:
        """Write no more lines."""
        self._write = lambda _: None

    def _line(self, kind: str, content: dict[str, Any]) -> None:
        after = round(time.monotonic() - self._start, 3)
        strict = json.loads(dumps({"format": self._version, "event": kind, "after": after, **content}))
        self._write(json.dumps(strict, ensure_ascii=False, sort_keys=True) + "\n")
