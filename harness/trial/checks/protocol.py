"""One call as warp roles: executed on the CPU under the Case's schedule, with what orders the roles checked, and then judged."""

from __future__ import annotations

from attnfuzz.harness.judge.together import Launched
from attnfuzz.harness.trial.bench import Bench, Steps
from attnfuzz.harness.trial.unwritten import name_unwritten

__all__ = ["by_roles"]


def by_roles(bench: Bench) -> Steps:
    """Run one launch as roles, and compare it with the float64 oracle: numbers show what no rule of the protocol does."""
    ready, inputs = bench.by_roles(), bench.inputs()
    outputs = bench.launch(ready, inputs)
    judged = yield Launched(bench.case.kernel, inputs, outputs, bench.case.config)
    return name_unwritten(bench, ready, inputs, outputs, judged.verdict)
