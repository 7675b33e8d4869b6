"""One kernel's Cases in one process, with the parts of the stages kernel and oracle timed: `python -P detail.py REQUEST`.

REQUEST is JSON: kernel, device, seed, seconds. Prints {"kernel": {part: seconds}, "oracle": {part: seconds}}. The process waits
for the device before and after each part, which a campaign does not.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec

from attnfuzz.harness.campaign.context import CampaignContext
from attnfuzz.harness.campaign.kernel_run import KernelRun
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.core import environment
from attnfuzz.harness.isolation.executors import InProcess
from attnfuzz.harness.judge import truth
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.bench import Bench
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Built, Device
from attnfuzz.kernels.problem import Problem

WARM = 5
"""Cases that do not count: their process is new."""
ORACLE = {"reference": "_reference", "budgets": "budgets"}
"""Functions of harness/judge/truth.py by what they compute."""


class Parts:
    """Seconds by stage and part."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def timed(self, stage: str, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return `work` with its time, the device's included, counted as `part` of `stage`."""

        def call(*arguments: Any, **named: Any) -> Any:
            environment.synchronise(self.device)
            start = time.perf_counter()
            try:
                result = work(*arguments, **named)
                environment.synchronise(self.device)
                return result
            finally:
                self.seconds[stage][part] += time.perf_counter() - start

        return call

    def result(self, stages: dict[str, float]) -> dict[str, dict[str, float]]:
        """Return the parts, with what is left of each stage."""
        left = {"kernel": "poison, copies, checks", "oracle": "the rest"}
        return {
            stage: {**parts, left[stage]: max(0.0, stages.get(stage, 0.0) - sum(parts.values()))}
            for stage, parts in self.seconds.items()
        }


class TimedBuilt:
    """A compiled kernel whose directions are timed."""

    def __init__(self, ready: Built, parts: Parts) -> None:
        self.forward = parts.timed("kernel", "forward", ready.forward)
        self.backward = parts.timed("kernel", "backward", ready.backward)
        self._ready = ready

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ready, name)


class TimedTrials(InProcess):
    """Trials in this process, with the parts of their stages timed from the sixth on."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.parts = Parts(device)
        self.stages: dict[str, float] = defaultdict(float)
        self._trials = 0

    def finish(self) -> Verdict:
        """Run the Trial."""
        assert self.case is not None
        parts = self.parts

        class TimedBench(Bench):
            def ready(self, problem: Problem | None = None) -> Built:
                return TimedBuilt(super().ready(problem), parts)

        self._trials += 1
        if self._trials <= WARM:
            parts.seconds.clear()
            self.stages.clear()
        with self.memory_checked():
            verdict = run_trial(self.case, self.device, bench=TimedBench)
        for stage, seconds in verdict.seconds.items():
            self.stages[stage] += seconds
        return verdict


def main(request: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Run the Cases that a campaign with this seed draws, and return the seconds of the parts."""
    device: Device = request["device"]
    executor = TimedTrials(device)
    for part, name in ORACLE.items():
        setattr(truth, name, executor.parts.timed("oracle", part, getattr(truth, name)))
    settings = Settings(device=device, budget=request["seconds"], seed=request["seed"], out=None)
    KernelRun(registry.get(request["kernel"]), CampaignContext(settings, executor, seconds=request["seconds"])).run()
    return executor.parts.result(executor.stages)


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(main(msgspec.json.decode(sys.argv[1]))).decode())
