"""How long each stage of a Trial may take, learned from those before it."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping

from attnfuzz.strategies.case import Case

__all__ = ["DEADLINE", "Deadlines", "scores_of"]

DEADLINE = 60.0
"""Seconds that a stage of a Trial may take by default."""
_COMPILE_TIMES = 10.0
_FLOOR, _TIMES_USUAL, _ENOUGH, _REMEMBERED = 0.5, 20.0, 3, 50
"""A stage is suspected to hang after 20 times its usual time, and half a second at least."""
_TIMES_MEDIAN, _TIMES_LONGEST, _LATEST = 10.0, 4.0, 10
"""Where it is known to hang: after ten times the median, and four times the longest, of the latest Cases of no more scores."""
_LEAST_SHARED = 30.0
"""Seconds that a stage may take where processes share the GPU: what only seems to hang would end sharing for all of them. On one
H200, 10 s ended it for 16 workers after 87 s. What does hang costs one of the workers that time."""
_CODES = 4096
"""Codes that are remembered to have run, the latest: where Cases have modifiers, nearly each has a code of its own."""
_LARGER = 4
"""A Case of so many times the scores of any that has ended may take longer than they did: relations have 20,000 tokens."""


def scores_of(case: Case) -> int:
    """Return the number of a Case's scores, masked ones included."""
    problem = case.problem
    return problem.heads * sum(n_q * n_k for n_q, n_k in zip(problem.seqlens_q, problem.seqlens_k, strict=True))


class Deadlines:
    """How long each stage may take: all of the deadline at first, then a multiple of its usual time.

    Args:
        deadline: seconds that a stage may take; None: 60.
        compile_deadline: seconds that a compile may take; None: ten times the deadline.
    """

    def __init__(self, deadline: float | None, compile_deadline: float | None) -> None:
        deadline = DEADLINE if deadline is None else deadline
        self.full = {"start": 180.0, "compile": compile_deadline or _COMPILE_TIMES * deadline, "end": 30.0}
        """The deadline of each stage, in seconds."""
        self.full |= dict.fromkeys(("inputs", "kernel", "oracle", "judge"), deadline)
        self._usual: dict[tuple[str, str], deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        """The scores and seconds of the latest Cases."""
        self._finished: dict[int, None] = {}
        """Hashes of kernels with compile keys, which are long where there are modifiers."""
        self._most_scores: dict[str, int] = {}
        self._hangs: set[tuple[str, str]] = set()

    def of(self, kernel: str, compile_key: str, scores: int, times: int = 1) -> dict[str, float]:
        """Return a multiple of each stage's usual time, for so many Cases; the full deadline for what was not run yet.

        That is code, and a Case with many more `scores` than others: with a GPU that other processes use, it takes far longer.
        """
        deadlines = dict(self.full)
        seen = hash((kernel, compile_key)) in self._finished and scores <= _LARGER * self._most_scores.get(kernel, 0)
        for stage, full in self.full.items():
            usual = self._usual[kernel, stage]
            # A compile is quick where its code is loaded already, and slow again in every new child.
            steady = stage != "compile" and len(usual) >= _ENOUGH and seen
            if self.is_known_to_hang(kernel, stage) and usual:
                deadlines[stage] = min(full, times * max(_FLOOR, self._enough(kernel, stage, scores)))
            elif steady:
                deadlines[stage] = min(full, times * max(_FLOOR, _TIMES_USUAL * max(each for _, each in usual)))
        return deadlines

    def shared(self, deadlines: Mapping[str, float]) -> dict[str, float]:
        """Return those of a child that shares the GPU: half a minute at least, or the full deadline if that is less."""
        return {stage: min(self.full.get(stage, each), max(each, _LEAST_SHARED)) for stage, each in deadlines.items()}

    def _enough(self, kernel: str, stage: str, scores: int) -> float:
        """Return seconds after which a Case counts as hanging where others have hung.

        Too few can only cost a smaller Case: the final one runs with full deadlines. Shrinking has run Cases that are alike.
        """
        usual = self._usual[kernel, stage]
        most = max(scores, min(each for each, _ in usual))
        latest = [seconds for each, seconds in usual if each <= most][-_LATEST:]
        return max(_TIMES_MEDIAN * statistics.median(latest), _TIMES_LONGEST * max(latest))

    def learn(self, kernel: str, compile_key: str, seconds: dict[str, float], scores: int) -> None:
        """Remember how long each stage took of a Case with so many scores that has ended."""
        for stage, each in seconds.items():
            self._usual[kernel, stage].append((scores, each))
        code = hash((kernel, compile_key))
        self._finished.pop(code, None)
        self._finished[code] = None
        if len(self._finished) > _CODES:
            del self._finished[next(iter(self._finished))]
        self._most_scores[kernel] = max(scores, self._most_scores.get(kernel, 0))

    def note_hang(self, kernel: str, stage: str) -> None:
        """Remember that a kernel hangs in a stage: every other Case that does would cost two more processes."""
        self._hangs.add((kernel, stage))

    def is_known_to_hang(self, kernel: str, stage: str) -> bool:
        """Whether `note_hang` was called for it."""
        return (kernel, stage) in self._hangs
