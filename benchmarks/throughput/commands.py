"""`attnfuzz run --json` as a user calls it: its result, when its first Case was judged, and what the GPU did meanwhile."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from throughput.campaigns import NotMeasured
from throughput.gpu import Gpu
from throughput.plan import Plan
from throughput.processes import Session

__all__ = ["Finished", "first_case", "run_command"]

_COMMAND = Path(__file__).with_name("first_case.py")
_PATIENCE = 1800.0
"""Seconds beyond the budget, for compiles and shrinking, after which a run counts as hanging."""


@dataclass(frozen=True, slots=True)
class Finished:
    """One run of the command: its JSON, its seconds until its first Verdict and until its end, and figures of the GPU."""

    result: dict[str, Any]
    first: float | None
    wall: float
    busy: float | None = None
    peak: float | None = None

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
        command = [sys.executable, "-P", str(_COMMAND), str(folder / "first"), "run", *kernels, "--json", *words, *plan.more]
        with Gpu(plan.device == "cuda") as gpu, Session(command, folder, caches) as session:
            session.wait(plan.seconds + _PATIENCE)
            end = session.ended or time.monotonic()
        first = first_case(folder / "first")
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
        )


def first_case(note: Path) -> float | None:
    """Return when the first Case was judged; None if none was."""
    return float(note.read_text(encoding="ascii")) if note.exists() else None
