"""The command `attnfuzz`, which also notes how many Cases it has judged by when: `python -P judged.py FILE run ...`.

FILE then has lines of a time, as of `time.monotonic`, and the drawn Cases judged by then: the first Case, then each half second.
The journal would say when the first one was, but compiles are in it as well.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from attnfuzz.harness.campaign.events import CampaignFinished, Event, TrialFinished
from attnfuzz.harness.cli.main import main
from attnfuzz.harness.report.recorder import Recorder

_EVERY = 0.5


def note_judged(path: Path) -> None:
    """Write into `path` how many drawn Cases the recorders of this process have heard of."""
    original, count, written = Recorder.__call__, 0, -_EVERY

    def call(self: Recorder, event: Event) -> None:
        nonlocal count, written
        now, ended = time.monotonic(), isinstance(event, CampaignFinished)
        if isinstance(event, TrialFinished):
            count += event.phase == "generate"
        if count and (ended or now - written >= _EVERY):
            with path.open("a", encoding="ascii") as file:
                file.write(f"{now!r} {count}\n")
            written = now
        original(self, event)

    setattr(Recorder, "__call__", call)  # noqa: B010 - a method is replaced


if __name__ == "__main__":
    note_judged(Path(sys.argv.pop(1)))
    main()
