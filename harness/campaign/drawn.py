"""What a Case was drawn as, in the few words by which a report counts what a run has covered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from attnfuzz.kernels.expressions.tree import parse
from attnfuzz.kernels.problem import LAYOUTS, Layout
from attnfuzz.strategies.case import Case

__all__ = ["drawn_values"]

_LENGTHS = (0, 1, 16, 64, 128, 256, 512, 1024, 4096, 16384)


def drawn_values(case: Case) -> Iterator[tuple[str, str]]:
    """(what, value) of everything that a report counts; some occur more than once in a Case, and are told once each."""
    p = case.problem
    yield "dtype", p.dtype
    yield "causal", p.causal or "no"
    yield "packing", p.packing
    yield "dim_qk x dim_v", f"{p.dim_qk} x {p.dim_v}"
    yield "groups", str(p.groups)
    yield "heads", str(p.heads)
    yield "sequences", str(p.batch) if p.batch < 9 else "9 or more"
    yield "longest queries", _length(max(p.seqlens_q))
    yield "longest keys", _length(max(p.seqlens_k))
    yield "values", case.recipe.pattern
    yield "check", case.check
    yield "Config", str(case.config) or "none"
    yield "window", "no" if p.window is None else "yes"
    yield "softcap", "yes" if p.softcap else "no"
    yield "score_mod", "none" if p.score_mod is None else _shape(p.score_mod)
    yield "mask_mod", "none" if p.mask_mod is None else _shape(p.mask_mod)
    layouts = {_layout(getattr(p, name)) for name in LAYOUTS}
    for each in sorted(layouts - {"plain"}) or ["plain"]:
        yield "layout", each


def _length(n: int) -> str:
    """Its class: "0", "1", "2-16", "17-64", ..."""
    lower = 0
    for upper in _LENGTHS:
        if n <= upper:
            return str(upper) if upper <= 1 else f"{lower + 1}-{upper}"
        lower = upper
    return f"over {lower}"


def _layout(layout: Layout) -> str:
    return " + ".join(sorted(msgspec.to_builtins(layout))) or "plain"


def _shape(data: tuple[Any, ...]) -> str:
    """The outermost operation of a modifier: as many trees, as few kinds."""
    return f"{parse(data).op}(...)"
