"""The command `attnfuzz`, which also notes when its first Case was judged: `python -P first_case.py FILE run ...`.

FILE then holds that time, as of `time.monotonic`. The journal would say it too, but compiles are in it as well.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from attnfuzz.harness.campaign.events import Event, TrialFinished
from attnfuzz.harness.cli.main import main
from attnfuzz.harness.report.recorder import Recorder


def note_first(path: Path) -> None:
    """Write the time of the first trial that a recorder hears of into `path`; from then on recorders are as they were."""
    original = Recorder.__call__

    def call(self: Recorder, event: Event) -> None:
        if isinstance(event, TrialFinished):
            path.write_text(repr(time.monotonic()), encoding="ascii")
            setattr(Recorder, "__call__", original)  # noqa: B010 - a method, replaced for a while
        original(self, event)

    setattr(Recorder, "__call__", call)  # noqa: B010


if __name__ == "__main__":
    note_first(Path(sys.argv.pop(1)))
    main()
