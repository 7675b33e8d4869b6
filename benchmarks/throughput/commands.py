"""`attnfuzz run --json` as a user calls it: its result, when its Cases were judged, and what the GPU did meanwhile."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from throughput.campaigns import NotMeasured
from throughput.core import Core
from throughput.gpu import Gpu
from throughput.plan import Plan
from throughput.processes import Session

__all__ = ["Finished", "judged_cases", "run_command"]

_COMMAND = Path(__file__).with_name("judged.py")
_PATIENCE = 1800.0
"""Seconds beyond the budget, for compiles and shrinking, after which a run counts as hanging."""


@dataclass(frozen=True, slots=True)
class Finished:
    """One run of the command: its JSON, its seconds until its first drawn Case was judged and until its end, what its GPU did.

    Its folder of Cases is empty at first, so that all of its Cases are drawn ones. `core`: milliseconds that a piece of work took
    of a core, from the first Case on.
    """

    result: dict[str, Any]
    first: float | None
    wall: float
    busy: float | None = None
    peak: float | None = None
    core: float | None = None
    judged: tuple[tuple[float, int], ...] = ()
    """Seconds since the start, and drawn Cases judged by then, some times a second from the first one to the last."""

    def later_rate(self) -> float | None:
        """Return Cases a second in the second half of the time in which Cases were judged; None where there is no such time."""
        if len(self.judged) < 3:
            return None
        (first, _), (last, all_) = self.judged[0], self.judged[-1]
        begin, count = min(self.judged, key=lambda each: abs(each[0] - (first + last) / 2))
        return (all_ - count) / (last - begin)

    def total(self, name: str) -> float:
        """Return the sum of a number over the kernels."""
        return sum(each[name] for each in self.result["kernels"])


def run_command(plan: Plan, kernels: tuple[str, ...], workers: str, seed: int) -> Finished:
    """Run the command once.

    Raises:
        NotMeasured: it printed no result.
    """
    with plan.folder() as (folder, caches):
        options = plan.options(workers, budget=f"{plan.seconds}s", seed=str(seed), device=plan.device, out=str(folder / "out"))
        words = [word for name, text in options.items() for word in (f"--{name}", text)]
        command = [sys.executable, "-P", str(_COMMAND), str(folder / "judged"), "run", *kernels, "--json", *words, *plan.more]
        with Core() as core, Gpu(plan.device == "cuda") as gpu, Session(command, folder, caches) as session:
            session.wait(plan.seconds + _PATIENCE)
            end = session.ended or time.monotonic()
        judged = judged_cases(folder / "judged")
        first = judged[0][0] if judged else None
        try:
            result = json.loads(session.text("stdout"))
        except json.JSONDecodeError:
            raise NotMeasured(f"attnfuzz run {' '.join(kernels)}: no result: {session.text('stderr')[-2000:]}") from None
        return Finished(
            result,
            first=None if first is None else first - session.started,
            wall=end - session.started,
            busy=None if first is None else gpu.busy(first, end),
            peak=gpu.peak,
            core=None if first is None else core.between(first, end),
            judged=tuple((at - session.started, count) for at, count in judged),
        )


def judged_cases(note: Path) -> list[tuple[float, int]]:
    """Return the times that a run has noted, and how many Cases were judged by then; nothing where none was."""
    if not note.exists():
        return []
    lines = [line.split() for line in note.read_text(encoding="ascii").splitlines()]
    return [(float(at), int(count)) for at, count in lines]
