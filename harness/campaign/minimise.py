"""A failure made simple and explained: its Case is shrunk, then each part of the minimal Case is varied."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

from attnfuzz.harness.campaign.events import Finding
from attnfuzz.harness.campaign.explain import Explanation
from attnfuzz.harness.campaign.explainer import Explainer
from attnfuzz.harness.campaign.runner import TrialRunner
from attnfuzz.harness.campaign.shrink import Shrinker
from attnfuzz.harness.isolation.outcomes import OutOfTime
from attnfuzz.harness.trial.supports import why_not_case
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.cases import Limits
from attnfuzz.strategies.neighbours import in_room, neighbours
from attnfuzz.strategies.variants import Variant

__all__ = ["Minimiser"]


class Minimiser:
    """Shrinks and explains findings of one kernel.

    Args:
        kernel: the one that fails.
        device: where it runs.
        variants: to stay within, simplest first; where code is compiled, no other is compiled.
        limits: on the size of neighbours.
        runner: runs the Cases.
    """

    def __init__(self, kernel: Kernel, device: Device, variants: Sequence[Variant], limits: Limits, runner: TrialRunner) -> None:
        self._kernel, self._device, self._variants = kernel, device, variants
        self._limits, self._runner = limits, runner

    def minimise(self, finding: Finding, seconds: float, keep: Callable[[Finding], None]) -> None:
        """Shrink a finding for at most `seconds`, then explain it in what is left of them.

        `keep` is called with the shrunk and with the explained finding, as far as each has come also after an error or Ctrl-C.
        """
        end = time.monotonic() + seconds
        can, room = self._kernel.capabilities, functools.partial(in_room, limits=self._limits, of=finding.case)
        shrinker = Shrinker(finding, self._runner, self.supports, self._variants, can, room)
        try:
            # What ends it leaves the simplest Case so far.
            with contextlib.suppress(OutOfTime):
                shrinker.shrink(seconds)
        finally:
            keep(shrinker.finding)
        self.explain(shrinker.finding, end - time.monotonic(), seconds, keep)

    def explain(self, finding: Finding, seconds: float, most: float, keep: Callable[[Finding], None]) -> None:
        """Explain a finding, whose Case stays as it is, for at most `seconds` and for a share of `most`."""
        explainer = Explainer(finding, self._runner, self._neighbours(finding.case), self._allows(finding.case))
        try:
            explainer.explain(seconds, most)
        finally:
            explanation = explainer.explanation
            if explanation != Explanation():
                keep(dataclasses.replace(finding, explanation=explanation))

    def supports(self, case: Case) -> bool:
        """Whether the kernel takes a Case."""
        return why_not_case(self._kernel, case, self._device) is None

    def _neighbours(self, case: Case) -> dict[str, list[Case]]:
        return neighbours(self._kernel, case, self._device)

    def _allows(self, case: Case) -> Callable[[Case], bool]:
        """Return whether a neighbour of `case` can run, could be drawn, and needs no compile of its own."""
        keys = None
        if self._device in self._kernel.capabilities.compiles_on:
            can = self._kernel.capabilities
            keys = {self._kernel.compile_key(each.problem(can), each.config) for each in self._variants}
            keys.add(self._kernel.compile_key(case.problem, case.config))

        def allowed(other: Case) -> bool:
            if not (in_room(other, self._limits, case) and self.supports(other)):
                return False
            return keys is None or self._kernel.compile_key(other.problem, other.config) in keys

        return allowed
