"""Pairs of features: how many Cases had both, and which pairs no Case had although one could.

A pair is possible if a Case with both can be built and run: parts of drawn Cases are exchanged until the kernel takes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TypeVar

from msgspec.structs import replace

from attnfuzz.harness.campaign.coverage import drawn_values, features
from attnfuzz.harness.trial.supports import why_not_case
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import LAYOUTS
from attnfuzz.strategies.case import CALLS, Case, with_problem
from attnfuzz.strategies.variants import Variant

__all__ = ["Feature", "Pair", "PairCoverage", "Pairs", "paired_features"]

_T = TypeVar("_T")
Feature = tuple[str, str]
"""Name and value: ("dtype", "float16")."""
Pair = tuple[Feature, Feature]
_DONORS = 8
"""Cases kept of each feature, whose parts are exchanged."""
_LENGTHS = ("seqlens_q", "seqlens_k")
_PARTS: dict[str, tuple[str, ...]] = {
    "dtype": ("dtype",),
    "causal": ("causal",),
    "dim_qk x dim_v": ("dim_qk", "dim_v"),
    "Config": (),
    "packing": ("packing",),
    "groups": ("heads", "kv_heads"),
    "queries : keys": _LENGTHS,
    "empty queries": _LENGTHS,
    "empty keys": _LENGTHS,
    "window": ("window",),
    "softcap": ("softcap",),
    "sinks": ("sinks",),
    "score_mod": ("score_mod",),
    "mask_mod": ("mask_mod",),
    "softmax_scale": ("softmax_scale",),
    "gradient of LSE": ("needs",),
    "slack rows": ("slack_q", "slack_k"),
    "layout": LAYOUTS,
    "values": (),
    "check": (),
}
"""The names of features of which pairs are counted, each with the fields of a Problem that hold it."""
_OF_VARIANT: dict[str, Callable[[Variant], str]] = {
    "dtype": lambda variant: variant.dtype,
    "causal": lambda variant: variant.causal or "no",
    "dim_qk x dim_v": lambda variant: f"{variant.dims[0]} x {variant.dims[1]}",
    "Config": lambda variant: str(variant.config) or "none",
}
_UNLISTED = "not listed"
_UNDECLARED = frozenset({"values", "check"})
"""Features that are no ability of a kernel: all kernels have them."""
_CHECKS = frozenset({"oracle", *CALLS})
"""Relations take plain Cases alone: pairs with them are not counted."""


@dataclass(frozen=True, slots=True)
class PairCoverage:
    """Counts of pairs of features, and the pairs that no Case had although one could, each with such a Case."""

    counts: Mapping[Pair, int]
    missing: Mapping[Pair, Case]

    def declared(self) -> PairCoverage:
        """Return the part whose features are both abilities that the kernel declares: without values and checks."""

        def chosen(pairs: Mapping[Pair, _T]) -> dict[Pair, _T]:
            return {pair: each for pair, each in pairs.items() if not {name for name, _ in pair} & _UNDECLARED}

        return PairCoverage(chosen(self.counts), chosen(self.missing))

    @property
    def possible(self) -> int:
        """Number of pairs that Cases can have."""
        return len(self.counts) + len(self.missing)

    @property
    def share(self) -> float:
        """Share of the possible pairs that were reached; 1 where there is no pair."""
        return len(self.counts) / self.possible if self.possible else 1.0


def paired_features(case: Case, dims: frozenset[str]) -> Iterator[Feature]:
    """Yield the features of a Case that are paired, each once; `dims`: those that the kernel lists."""
    seen = dict.fromkeys(drawn_values(case))
    coarse = dict.fromkeys(each for name, value in seen for each in _coarse(case, name, value, dims) if name in _PARTS)
    yield from coarse
    yield "slack rows", "yes" if "slack rows" in features(case) else "no"
    if not case.problem.sinks:
        yield "sinks", "no"
    for name in ("empty queries", "empty keys"):
        if not any(each == name for each, _ in coarse):
            yield name, "no"


def _coarse(case: Case, name: str, value: str, dims: frozenset[str]) -> Iterator[Feature]:
    """Yield the classes that count in pairs for one value that was drawn."""
    match name:
        case "dim_qk x dim_v":
            yield name, value if value in dims else _UNLISTED
        case "groups":
            yield name, _groups(case.problem.groups, case.problem.kv_heads)
        case "score_mod" | "mask_mod":
            yield name, "none" if value == "none" else "yes"
        case "queries : keys":
            # Empty ones are features of their own.
            if value[0] in "<=>":
                yield name, value[0]
        case "empty queries" | "empty keys" | "sinks":
            yield name, "yes"
        case "layout":
            for part in value.split(" + "):
                yield name, f"packed {'q, k, v' if case.problem.layout_q.packed else 'k, v'}" if part == "packed" else part
        case "check":
            if value in _CHECKS:
                yield name, value
        case _:
            yield name, value


def _groups(groups: int, kv_heads: int) -> str:
    if groups == 1:
        return "1"
    return f"{'a power of two' if groups & (groups - 1) == 0 else 'others'}, {'one kv head' if kv_heads == 1 else 'several'}"


@dataclass(slots=True)
class Pairs:
    """Counts the pairs of features over Cases of one kernel.

    Args:
        kernel: what the Cases are of.
        device: where they would run.
        variants: what they are drawn from.
    """

    kernel: Kernel
    device: Device
    variants: Sequence[Variant]
    _counts: dict[Pair, int] = field(default_factory=dict)
    _donors: dict[Feature, list[Case]] = field(default_factory=dict)
    _dims: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._dims = frozenset(f"{dim_qk} x {dim_v}" for dim_qk, dim_v in self.kernel.capabilities.dims)

    def add(self, case: Case) -> None:
        """Count the pairs of a Case."""
        present = sorted(paired_features(case, self._dims))
        for each in present:
            donors = self._donors.setdefault(each, [])
            if len(donors) < _DONORS:
                donors.append(case)
        for pair in combinations(present, 2):
            if pair[0][0] != pair[1][0]:
                self._counts[pair] = self._counts.get(pair, 0) + 1

    def result(self, examined: Callable[[int, int], None] = lambda *_: None) -> PairCoverage:
        """Return the counts, and look for a Case of each pair that none had; `examined` gets how far that has come."""
        names = {name for name, _ in self._donors}
        varied = {each for each in names if sum(name == each for name, _ in self._donors) > 1}
        every = [pair for pair in combinations(sorted(self._donors), 2) if pair[0][0] != pair[1][0]]
        every = [pair for pair in every if {pair[0][0], pair[1][0]} <= varied]
        unmet = [pair for pair in every if pair not in self._counts]
        missing: dict[Pair, Case] = {}
        for number, pair in enumerate(unmet):
            if (case := self._with_both(*pair)) is not None:
                missing[pair] = case
            examined(number + 1, len(unmet))
        counts = {pair: self._counts[pair] for pair in every if pair in self._counts}
        return PairCoverage(counts, missing)

    def _with_both(self, one: Feature, other: Feature) -> Case | None:
        """Return a Case that the kernel takes and that has both features; None: none was built."""
        if {one[0], other[0]} <= _OF_VARIANT.keys():
            return self._of_a_variant(one, other)
        for first, second in ((one, other), (other, one)):
            for case in self._donors[first]:
                for donor in self._donors[second]:
                    if (built := _exchanged(case, donor, second[0])) is not None and self._has(built, one, other):
                        return built
        return None

    def _of_a_variant(self, one: Feature, other: Feature) -> Case | None:
        for each in self.variants:
            dims = _OF_VARIANT["dim_qk x dim_v"](each)
            values = {name: value(each) for name, value in _OF_VARIANT.items()}
            values["dim_qk x dim_v"] = dims if dims in self._dims else _UNLISTED
            if values[one[0]] == one[1] and values[other[0]] == other[1]:
                problem = each.problem(self.kernel.capabilities)
                return Case(kernel=self.kernel.name, problem=problem, config=each.config)
        return None

    def _has(self, case: Case, *wanted: Feature) -> bool:
        present = set(paired_features(case, self._dims))
        return present.issuperset(wanted) and why_not_case(self.kernel, case, self.device) is None


def _exchanged(case: Case, donor: Case, name: str) -> Case | None:
    """Return `case` with the donor's part `name`; None where that gives no valid Problem."""
    match name:
        case "Config":
            return replace(case, config=donor.config)
        case "values":
            return with_problem(replace(case, recipe=donor.recipe), case.problem)
        case "check":
            return replace(case, check=donor.check, schedule=donor.schedule)
        case _:
            try:
                problem = replace(case.problem, **{each: getattr(donor.problem, each) for each in _PARTS[name]})
            except BadArgument:
                return None
            return with_problem(case, problem)
