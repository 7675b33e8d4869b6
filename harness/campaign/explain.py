"""An explanation of a failure: which parts of its minimal Case matter, from the outcomes of neighbours. No kernel is run here.

A part matters if the Case passes with another value of it; it does not matter if the Case fails alike with every value tried.
Rules for lengths and Configs ("seqlen_k not a multiple of tile_n=32") are stated only if they agree with every outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.neighbours import LENGTHS, PARTS, tiles_for, value_of

__all__ = ["Common", "Explanation", "Outcome", "Part", "explanation_of", "outcome_of"]

Outcome = Literal["fails", "passes", "otherwise", "unjudged"]
"""How a neighbour ended: it fails alike, passes, fails with other identities only, or its output was not judged."""
Text = Annotated[str, msgspec.Meta(max_length=500)]
_Values = Annotated[tuple[Text, ...], msgspec.Meta(max_length=100)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_LEAST = 2
"""Outcomes of each kind that a rule must agree with: with fewer, many rules agree by chance."""
_MOST_RULES = 2


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One part of the minimal Case and its `value`; the other values with which the Case fails alike, passes, fails otherwise.

    `rules`: statements that agree with every outcome, such as "seqlen_k > tile_n=32"; each holds for the Case itself.
    """

    part: Text
    value: Text
    fails: _Values = ()
    passes: _Values = ()
    otherwise: _Values = ()
    rules: _Values = ()


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """A property of drawn Cases that failing ones have more often than chance allows: counts, and the corrected p-value.

    `failing_together`, `passing_together`: Cases with this property and all those listed before it; None for the first one.
    """

    property: Text
    failing: _Count
    of_failing: _Count
    passing: _Count
    of_passing: _Count
    p: float
    failing_together: _Count | None = None
    passing_together: _Count | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What matters of a minimal Case (`parts`), and what failing Cases of the run have in common.

    `trials`: that it took; `ended`: why parts are missing or nothing is said of them, "" where all parts were varied.
    """

    parts: Annotated[tuple[Part, ...], msgspec.Meta(max_length=100)] = ()
    common: Annotated[tuple[Common, ...], msgspec.Meta(max_length=100)] = ()
    trials: _Count = 0
    ended: Text = ""


def outcome_of(verdict: Verdict, identity: Identity) -> Outcome:
    """Return what a neighbour's Verdict says of the failure `identity`."""
    if any(each.identity == identity for each in verdict.failures):
        return "fails"
    if verdict.failures:
        return "otherwise"
    figures = None if identity.output is None else verdict.figures.get(identity.output)
    if figures is not None and (figures.unjudged or not figures.elements or (identity.kind == "aggregate" and figures.r is None)):
        return "unjudged"
    return "passes"


def explanation_of(
    case: Case, outcomes: Mapping[str, Mapping[Case, Outcome]], *, trials: int = 0, ended: str = ""
) -> Explanation:
    """Return what the neighbours' outcomes say: by part, of each neighbour how it ended. `case` itself fails."""
    lengths = {each: outcome for name in LENGTHS for each, outcome in outcomes.get(name, {}).items()}
    parts = (_part(case, name, outcomes[name], lengths) for name in PARTS if name in outcomes)
    return Explanation(parts=tuple(each for each in parts if each is not None), trials=trials, ended=ended)


def _part(case: Case, name: str, outcomes: Mapping[Case, Outcome], lengths: Mapping[Case, Outcome]) -> Part | None:
    decided = {each: outcome for each, outcome in outcomes.items() if outcome != "unjudged"}
    if not decided:
        return None
    order: Sequence[Case] = list(decided)
    if name in LENGTHS:
        order = sorted(decided, key=lambda each: (each.problem.seqlens_q, each.problem.seqlens_k))

    def values(outcome: Outcome) -> tuple[str, ...]:
        return tuple(_shown(case, each, name) for each in order if decided[each] == outcome)

    rules: Iterator[str] = iter(())
    if name in LENGTHS:
        rules = _length_rules(case, name, decided, lengths)
    elif name == "config":
        rules = _config_rules(case, decided)
    return Part(
        part=name,
        value=_short(value_of(case, name)),
        fails=values("fails"),
        passes=values("passes"),
        otherwise=values("otherwise"),
        rules=tuple(rules),
    )


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."


def _shown(case: Case, other: Case, name: str) -> str:
    """Return the value of a part in a neighbour: of a Config only the choices that differ."""
    if name == "config":
        return _short(" ".join(f"{key}={value}" for key, value in other.config.items() if case.config.get(key) != value))
    return _short(value_of(other, name))


def _config_rules(case: Case, outcomes: Mapping[Case, Outcome]) -> Iterator[str]:
    """Yield each choice of the Config on which the outcome depends: it fails with this value, and passes with all others tried.

    Where a Config passes that differs in one choice alone, only such choices are named.
    """
    own = case.config
    decided = {each.config: outcome == "fails" for each, outcome in outcomes.items() if outcome != "otherwise"}
    agreeing = [name for name in own if all((each.get(name) == own[name]) == fails for each, fails in decided.items())]
    if not any(not fails for fails in decided.values()):
        return
    alone = {name for name in agreeing for each in decided if [key for key in own if each.get(key) != own[key]] == [name]}
    names = [name for name in agreeing if name in alone] or agreeing
    if names:
        joined = " or ".join(f"{name}={own[name]}" for name in names)
        yield joined if len(names) == 1 else f"{joined} (changed together in each Config tried)"


def _length_rules(case: Case, name: str, outcomes: Mapping[Case, Outcome], every: Mapping[Case, Outcome]) -> Iterator[str]:
    """Yield rules that hold for the lengths that fail, the Case's own among them, and for none that passes.

    Where some agree with `every` length tried, of queries, of keys and of both, only those.
    """
    if case.problem.batch > 1 and case.problem.packing == "ragged":
        return
    lengths, others = _failing(case, outcomes), _failing(case, every)
    rules = [rule for rule in _candidates(case, name, lengths, others) if _agrees(rule[1], lengths)]
    best = [text for text, holds in rules if _agrees(holds, others)] or [text for text, _ in rules]
    yield from best[:_MOST_RULES]


_Lengths = Mapping[tuple[int, int], bool]
"""Whether the Case fails with (seqlen_q, seqlen_k)."""
_Rule = Callable[[int, int], bool]


def _failing(case: Case, outcomes: Mapping[Case, Outcome]) -> _Lengths:
    lengths = {_pair(each): outcome == "fails" for each, outcome in outcomes.items() if outcome in ("fails", "passes")}
    return {**lengths, _pair(case): True}


def _pair(case: Case) -> tuple[int, int]:
    return case.problem.seqlens_q[0], case.problem.seqlens_k[0]


def _agrees(holds: _Rule, lengths: _Lengths) -> bool:
    return all(holds(*pair) == fails for pair, fails in lengths.items())


def _many(lengths: _Lengths) -> bool:
    fails = sum(lengths.values())
    return min(fails, len(lengths) - fails) >= _LEAST


def _candidates(case: Case, name: str, lengths: _Lengths, every: _Lengths) -> Iterator[tuple[str, _Rule]]:
    """Yield rules for a pair of lengths, the most telling first; few outcomes agree with too many rules."""
    if _many(every):
        # With no queries or no keys it passes for another reason.
        yield "seqlen_q != seqlen_k", lambda q, k: q != k and bool(q and k)
        yield "seqlen_q < seqlen_k", lambda q, k: 0 < q < k
        yield "seqlen_q > seqlen_k", lambda q, k: q > k > 0
        yield "seqlen_q == seqlen_k", lambda q, k: q == k > 0
    for text, at in (("seqlen_q", 0), ("seqlen_k", 1)):
        if name in (text, "both lengths"):
            if _many(lengths):
                yield from _tile_rules(case, text, at)
            yield from _bounds(at, lengths)


def _tile_rules(case: Case, text: str, at: int) -> Iterator[tuple[str, _Rule]]:
    for tile, size in _tiles_for(case, text):
        yield f"{text} not a multiple of {tile}", lambda *pair, size=size: pair[at] % size != 0
        yield f"{text} a multiple of {tile}", lambda *pair, size=size: pair[at] % size == 0
        yield f"{text} > {tile}", lambda *pair, size=size: pair[at] > size
        yield f"{text} < {tile}", lambda *pair, size=size: pair[at] < size
        yield f"{text} >= {tile}", lambda *pair, size=size: pair[at] >= size
        yield f"{text} <= {tile}", lambda *pair, size=size: pair[at] <= size


def _tiles_for(case: Case, name: str) -> Iterator[tuple[str, int]]:
    """Yield the tiles that cut this side, with their sizes; equal sizes are one rule."""
    sizes: dict[int, list[str]] = {}
    for tile, size in tiles_for(case.config, name):
        sizes.setdefault(size, []).append(f"{tile}={size}")
    yield from ((" and ".join(names), size) for size, names in sizes.items())


def _bounds(at: int, lengths: _Lengths) -> Iterator[tuple[str, _Rule]]:
    """Yield "from N on", "up to N" or "exactly N" where both sides of the bound were tried, next to each other."""
    one, several = ("query", "queries") if at == 0 else ("key", "keys")
    fails = {pair[at] for pair, failing in lengths.items() if failing}
    passes = {pair[at] for pair, failing in lengths.items() if not failing}
    low, high = min(fails), max(fails)
    many = len(fails) >= _LEAST
    if low - 1 in passes and many:
        yield f"from {low} {one if low == 1 else several} on", lambda *pair: pair[at] >= low
    if high + 1 in passes and many:
        yield f"up to {high} {one if high == 1 else several}", lambda *pair: pair[at] <= high
    if {low - 1, high + 1} <= passes and many:
        yield f"from {low} to {high} {several}", lambda *pair: low <= pair[at] <= high
    if low == high and {low - 1, low + 1} <= passes:
        yield f"exactly {low} {one if low == 1 else several}", lambda *pair: pair[at] == low
