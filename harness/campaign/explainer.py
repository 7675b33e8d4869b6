"""Neighbours of a minimal Case, run to explain its failure: each part is varied on its own, for a bounded time.

A part is named as the cause because a neighbour passes. Before it is, that neighbour runs twice more: where one Case fails in one
run and passes in another, a pass says nothing, and no part is named.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from attnfuzz.harness.campaign.events import Finding
from attnfuzz.harness.campaign.explain import Explanation, Outcome, explanation_of, outcome_of
from attnfuzz.harness.campaign.runner import TrialRunner
from attnfuzz.harness.core.text import counted
from attnfuzz.harness.isolation.outcomes import OutOfTime
from attnfuzz.strategies.case import CALLS, Case
from attnfuzz.strategies.neighbours import LENGTHS, PARTS, differences, with_lengths

__all__ = ["Explainer"]

_MOST_TRIALS = 64
_CONFIRMATIONS = 2
_SHARE = 1 / 6
"""Part of the time for shrinking that an explanation may take, where shrinking has left it."""
_MOST_BISECTIONS = 10
_TIME_IS_UP = "the time for shrinking is over"


class _Ended(Exception):
    """Ends the trials; the text says why."""


class Explainer:
    """Runs neighbours of a finding's Case; `explanation` is what is known so far, also after an error or Ctrl-C.

    Args:
        finding: with its minimal Case.
        runner: runs the Cases; what shrinking has tried is in its memo.
        neighbours: of the Case, by part.
        allowed: whether a neighbour is a Case that can run, and that could be drawn.
    """

    def __init__(
        self, finding: Finding, runner: TrialRunner, neighbours: Mapping[str, Sequence[Case]], allowed: Callable[[Case], bool]
    ) -> None:
        self._finding, self._runner, self._allowed = finding, runner, allowed
        self._neighbours = {name: list(each) for name, each in neighbours.items()}
        self._outcomes: dict[str, dict[Case, Outcome]] = {}
        self._confirmed: set[str] = set()
        self._trials, self._end, self._ended = 0, 0.0, _TIME_IS_UP
        self._reliable = True

    @property
    def explanation(self) -> Explanation:
        """What is known so far."""
        known = {name: of for name, of in self._outcomes.items() if self._is_known(name)} if self._reliable else {}
        return explanation_of(self._finding.case, known, trials=self._trials, ended=self._ended)

    def explain(self, seconds: float, most: float) -> Explanation:
        """Vary each part of the Case, for at most `seconds`, and for a share of `most`, the time that shrinking may take."""
        self._end = time.monotonic() + min(seconds, _SHARE * most)
        try:
            self._explain()
            self._ended = ""
        except _Ended as why:
            self._ended = str(why)
        except OutOfTime:
            self._ended = _TIME_IS_UP
        except BaseException:
            self._ended = "it was interrupted"
            raise
        return self.explanation

    def _explain(self) -> None:
        if self._finding.rate is not None:
            failed, runs = self._finding.rate
            self._reliable = False
            untried, seldom = self._finding.untried, self._finding.seldom
            before = f"; {seldom}" * bool(seldom)
            before += f"; {counted(untried, 'Case')} that its process had run before could not be run again" * (untried > 0)
            raise _Ended(f"the failure shows in {failed} of {runs} runs, so that a neighbour that passes says nothing{before}")
        self._check_end()
        self._read_memo()
        # One neighbour of every part before the second of any: time may be over.
        for part, case in self._in_turn():
            self._try(part, case)
        for part in LENGTHS:
            self._bisect(part)
        if self._run(self._finding.case) != "fails":
            self._doubt()

    def _in_turn(self) -> Iterator[tuple[str, Case]]:
        rounds = max(map(len, self._neighbours.values()), default=0)
        for number in range(rounds):
            for part in PARTS:
                if number < len(self._neighbours.get(part, ())):
                    yield part, self._neighbours[part][number]

    def _read_memo(self) -> None:
        """Take the outcomes of neighbours that were drawn or tried by shrinking, after the same earlier Cases."""
        for case, verdict in list(self._runner.memo.items()):
            if (
                case.after == self._finding.case.after
                and len(parts := differences(self._finding.case, case)) == 1
                and case.kernel == self._finding.case.kernel
            ):
                self._outcomes.setdefault(parts[0], {})[case] = outcome_of(verdict, self._finding.identity)

    def _try(self, part: str, case: Case) -> Outcome | None:
        """Run a neighbour unless its outcome is known; the first that passes of each part is run again."""
        known = self._outcomes.get(part, {}).get(case)
        if known is None:
            if not self._allowed(case):
                return None
            known = self._run(case)
            self._outcomes.setdefault(part, {})[case] = known
        passing = next((each for each, outcome in self._outcomes[part].items() if outcome == "passes"), None)
        if passing is not None and part not in self._confirmed:
            for _ in range(_CONFIRMATIONS):
                if self._run(passing) != "passes":
                    self._doubt()
            self._confirmed.add(part)
        return known

    def _is_known(self, part: str) -> bool:
        """Whether no neighbour of the part passes, or one does for sure."""
        return part in self._confirmed or "passes" not in self._outcomes[part].values()

    def _doubt(self) -> None:
        self._reliable = False
        raise _Ended("one Case failed in one run and passed in another, so that a neighbour that passes says nothing")

    def _run(self, case: Case) -> Outcome:
        self._check_end()
        if self._trials >= _MOST_TRIALS:
            raise _Ended(f"{_MOST_TRIALS} trials are the limit")
        if case.check != self._finding.case.check or case.check in CALLS:
            # What earlier Cases left in the process must not stand for the calls that this one makes.
            self._runner.fresh()
        self._trials += 1
        return outcome_of(self._runner.run(case, "explain"), self._finding.identity)

    def _check_end(self) -> None:
        if time.monotonic() >= self._end:
            raise _Ended(_TIME_IS_UP)

    def _bisect(self, part: str) -> None:
        """Find the length at which the outcome changes, between two that were tried."""
        for _ in range(_MOST_BISECTIONS):
            if (length := self._between(part)) is None:
                return
            cases = [each for each in with_lengths(self._finding.case, part, 0, length) if self._allowed(each)]
            if not cases or self._try(part, cases[0]) not in ("fails", "passes"):
                return

    def _between(self, part: str) -> int | None:
        """Return the middle of the smallest gap between a length that fails and the next one, which passes, or None."""
        problem = self._finding.case.problem
        if problem.batch > 1 and problem.packing == "ragged":
            return None
        outcomes = {**self._outcomes.get(part, {}), self._finding.case: "fails"}
        lengths = sorted((_length(each, part), outcome) for each, outcome in outcomes.items() if outcome in ("fails", "passes"))
        changes = [(low, high) for (low, before), (high, after) in itertools.pairwise(lengths) if before != after]
        # One change is a bound; with several, tiles are the likely cause, and lengths around them were tried.
        if len(changes) != 1 or changes[0][1] - changes[0][0] < 2:
            return None
        return sum(changes[0]) // 2


def _length(case: Case, part: str) -> int:
    """Return the length of its first sequence; of both lengths the shorter one."""
    n_q, n_k = case.problem.seqlens_q[0], case.problem.seqlens_k[0]
    return n_q if part == "seqlen_q" else n_k if part == "seqlen_k" else min(n_q, n_k)
