"""What the failing Cases of a kernel have in common that its passing Cases have not, by Fisher's exact test.

Only drawn Cases count: those of shrinking are chosen for being like one that fails. Each property is tested, so that the level is
divided by their number: for fewer than 1 of 100 failures, chance alone is stated as something in common.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence

from attnfuzz.harness.campaign.coverage import Phase
from attnfuzz.harness.campaign.explain import Common
from attnfuzz.harness.core.statistics import fisher
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.problem import LAYOUTS, Layout
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.neighbours import tiles_of

__all__ = ["Contrast", "common_to", "properties"]

_LEVEL = 0.01
_LEAST = 2
_MOST = 3
_PASSING, _FAILING, _IDENTITIES = 1500, 500, 64
"""Cases that are kept, and failures for which they are."""
_TEXT = 300


class Contrast:
    """Keeps what can be said of Cases of one kernel: of those that pass, a sample where there are many, and of those that fail.

    Of each Case the numbers of its properties: a Case itself has ten times their memory.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        """Of each property that a Case had."""
        self._passing: list[tuple[array[int], tuple[str, ...]]] = []
        """Each with the outputs that were not judged."""
        self._failing: dict[Identity, list[array[int]]] = {}
        self._seen = 0
        self._random = random.Random(0)

    def add(self, phase: Phase, case: Case, verdict: Verdict) -> None:
        """Keep a Case that was drawn."""
        if phase != "generate":
            return
        for identity in {each.identity for each in verdict.failures}:
            if identity in self._failing or len(self._failing) < _IDENTITIES:
                kept = self._failing.setdefault(identity, [])
                if len(kept) < _FAILING:
                    kept.append(self._numbered(case))
        if not verdict.failures:
            self._keep(case, tuple(name for name, figures in verdict.figures.items() if figures.unjudged))

    def _keep(self, case: Case, unjudged: tuple[str, ...]) -> None:
        """Keep a Case that passes with the same chance as every other one."""
        self._seen += 1
        if len(self._passing) < _PASSING:
            self._passing.append((self._numbered(case), unjudged))
        elif (at := self._random.randrange(self._seen)) < _PASSING:
            self._passing[at] = self._numbered(case), unjudged

    def _numbered(self, case: Case) -> array[int]:
        return array("I", [self._numbers.setdefault(each, len(self._numbers)) for each in properties(case)])

    def common(self, identity: Identity) -> tuple[Common, ...]:
        """Return what the Cases that fail with `identity` have in common, the strongest first."""
        failing = self._failing.get(identity, [])
        passing = [kept for kept, unjudged in self._passing if identity.output not in unjudged]
        if len(failing) < _LEAST or not passing:
            return ()
        names = list(self._numbers)
        return common_to([{names[at] for at in kept} for kept in failing], [{names[at] for at in kept} for kept in passing])


def common_to(failing: Sequence[set[str]], passing: Sequence[set[str]]) -> tuple[Common, ...]:
    """Return properties that failing Cases have more often than chance allows, each among the Cases that have those before it.

    So a property that only goes along with an earlier one is left out. The counts are of all Cases; those "together" are of
    Cases that have the earlier ones too.
    """
    chosen: list[Common] = []
    names = sorted({name for each in (*failing, *passing) for name in each})
    left_failing, left_passing = list(failing), list(passing)
    while len(chosen) < _MOST and left_failing and left_passing:
        counts = [(name, _count(name, left_failing), _count(name, left_passing)) for name in names]
        tested = [each for each in counts if 0 < each[1] + each[2] < len(left_failing) + len(left_passing)]
        scored = [(fisher(n, len(left_failing), other, len(left_passing)), name) for name, n, other in tested]
        if not scored:
            break
        # By the share of failing Cases first where both are beyond doubt: what all have in common is a condition.
        p, name = min(scored, key=lambda each: (each[0], -_count(each[1], left_failing), len(each[1]), each[1]))
        corrected = p * len(tested) * _MOST
        if corrected >= _LEVEL:
            break
        left_failing = [each for each in left_failing if name in each]
        left_passing = [each for each in left_passing if name in each]
        chosen.append(
            Common(
                property=name,
                failing=_count(name, failing),
                of_failing=len(failing),
                passing=_count(name, passing),
                of_passing=len(passing),
                p=float(f"{corrected:.2g}"),
                failing_together=len(left_failing) if chosen else None,
                passing_together=len(left_passing) if chosen else None,
            )
        )
    return tuple(chosen)


def _count(name: str, cases: Sequence[set[str]]) -> int:
    return sum(name in each for each in cases)


def properties(case: Case) -> Iterator[str]:
    """Yield what can be said of a Case in words, true or false: "causal", "seqlen_k not a multiple of tile_n=32"."""
    p, recipe = case.problem, case.recipe
    yield f"dtype={p.dtype}"
    yield f"causal={p.causal}" if p.causal else "no causal mask"
    yield f"{p.packing} packing"
    yield f"dims {p.dim_qk} x {p.dim_v}"
    yield "dim_qk = dim_v" if p.dim_qk == p.dim_v else "dim_qk != dim_v"
    yield "one sequence" if p.batch == 1 else "several sequences"
    yield "one query head" if p.heads == 1 else "several query heads"
    yield "one key/value head" if p.kv_heads == 1 else "several key/value heads"
    yield "groups = 1" if p.groups == 1 else "groups > 1"
    yield f"values {recipe.pattern}"
    yield f"check {case.check}"
    for name in ("q_scale", "k_scale", "v_scale", "do_scale"):
        if getattr(recipe, name) != 1.0:
            yield f"{name} > 1" if getattr(recipe, name) > 1.0 else f"{name} < 1"
    yield from (text for text, holds in _OPTIONS.items() if holds(case))
    yield from _of_lengths(case)
    for key, value in case.config.items():
        yield f"{key}={value}"[:_TEXT]


_OPTIONS: Mapping[str, Callable[[Case], bool]] = {
    "a window": lambda case: case.problem.window is not None,
    "a softcap": lambda case: bool(case.problem.softcap),
    "a score_mod": lambda case: case.problem.score_mod is not None,
    "a mask_mod": lambda case: case.problem.mask_mod is not None,
    "a softmax_scale of its own": lambda case: case.problem.softmax_scale is not None,
    "slack rows": lambda case: bool(case.problem.slack_q or case.problem.slack_k),
    "a gradient of LSE": lambda case: case.problem.needs.dlse,
    "a tensor that is not contiguous": lambda case: any(getattr(case.problem, name) != Layout() for name in LAYOUTS),
    "packed tensors": lambda case: case.problem.layout_k.packed,
}


def _of_lengths(case: Case) -> Iterator[str]:
    """Yield properties of lengths; in a batch, those that some sequence has."""
    p = case.problem
    pairs = list(zip(p.seqlens_q, p.seqlens_k, strict=True))
    texts: dict[str, Callable[[int, int], bool]] = {
        "seqlen_q != seqlen_k": lambda q, k: q != k,
        "seqlen_q < seqlen_k": lambda q, k: q < k,
        "seqlen_q > seqlen_k": lambda q, k: q > k,
        "seqlen_q = 0": lambda q, _: q == 0,
        "seqlen_k = 0": lambda _, k: k == 0,
    }
    yield from (text for text, holds in texts.items() if any(holds(*pair) for pair in pairs))
    for name, letters, at in (("seqlen_q", ("_m", "_q"), 0), ("seqlen_k", ("_n", "_k"), 1)):
        lengths = [pair[at] for pair in pairs if pair[at]]
        for tile, size in tiles_of(case.config).items():
            # By name, since Cases have different Configs.
            if tile.lower().endswith(letters):
                yield from [f"{name} not a multiple of {tile}"] * any(n % size for n in lengths)
                yield from [f"{name} > {tile}"] * any(n > size for n in lengths)
        for bound in (2, 16, 32, 64, 128, 256, 512, 1024):
            if any(n > bound for n in lengths):
                yield f"{name} > {bound}"
