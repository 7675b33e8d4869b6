"""The variants that a run compiles: a pool of few that differ most, and the order in which they are compiled."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile

from attnfuzz.strategies.compiled_modifiers import kinds_of
from attnfuzz.strategies.variants import WIDE, Variant, scores_of_tile, uneven, wide

__all__ = ["compile_order", "covering", "pool"]

_KEY = ("dtype", "causal", "dims", "config")
"""Parts that a compile key may have forgotten."""
_WITH_NEIGHBOURS = 8
_USUAL_DIMS = (128, 128)
"""Dims that most models have beside (64, 64), which declarations mostly begin with."""
_SMALL = 64 * 64
"""Scores of a small tile."""
_SECOND, _THIRD, _FOURTH = 1, 2, 3
"""Places, from 0, at which a mask, rare dims, and a score_mod of the sequence are compiled at the latest."""
_STEP = 32
"""Columns that kernels often take at once."""


def pool(variants: Sequence[Variant], count: int, seed: int) -> tuple[Variant, ...]:
    """Return `count` variants chosen by `seed`, simplest first: the simplest one, then those with most values not yet covered.

    Where there are 8 or more, one of four (four at most) differs from the simplest in one part alone, the mask where it can, then
    parts selected by `seed`, so that a compile key that forgets that part gives one of them the other's code; and one
    at least has `_USUAL_DIMS`, if any of `variants` has.
    """
    # A declaration may repeat a value.
    variants = tuple(dict.fromkeys(variants))
    if count >= len(variants):
        return variants
    near = _neighbours(variants, seed)[: count // 4 if count >= _WITH_NEIGHBOURS else 0]
    values = _values_of_few if count < _WITH_NEIGHBOURS else _values_and_widths
    chosen = [each for each, _ in islice(_spread(variants, seed, values, near), count)]
    usual = [each for each in variants if each.dims == _USUAL_DIMS]
    if count >= _WITH_NEIGHBOURS and usual and not any(each.dims == _USUAL_DIMS for each in chosen):
        # In place of the last, which adds the fewest values to those of the others.
        first, *others = chosen[:-1]
        chosen = [each for each, _ in islice(_spread([first, *others, *usual], seed, values, others), count)]
    members = set(chosen)
    return tuple(each for each in variants if each in members)


def compile_order(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Return the variants, the first in its place, in an order in which each covers most values that those before it do not.

    For compiles: trials begin with what is compiled first, and what all of it has in common, such as equal dims, stays untried.
    Variants with uneven dims, a wide V or a score_mod of the sequence are few, and bugs of these show with nothing else: they are
    among the first, as is a mask.
    """
    order = [each for each, _ in _spread(variants, 0, _values_and_modifiers)] if variants else []
    for rare, place in ((_of_sequence, _FOURTH), (_masked, _SECOND), (uneven, _THIRD), (wide, _THIRD)):
        late = next(filter(rare, order), None)
        if late is not None and order.index(late) > place:
            order.remove(late)
            order.insert(place, late)
    return tuple(order)


def _masked(variant: Variant) -> bool:
    return variant.causal is not None


def _of_sequence(variant: Variant) -> bool:
    return ("score_mod", "b") in kinds_of(variant.modifiers or ())


def covering(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Return nearly the fewest variants that cover every dtype with each of its masks, dims and Configs: chosen as by `pool`."""
    chosen = {each for each, _ in takewhile(lambda pair: pair[1] > 0, _spread(variants, 0, _pairs))}
    return tuple(each for each in variants if each in chosen)


def _neighbours(variants: Sequence[Variant], seed: int) -> list[Variant]:
    """Return variants that differ from the first in one part alone, one for each part of `_KEY` where there is any.

    The mask comes first: without such a variant hardly a call with another mask can come before a Case. `seed` orders the others.
    Where no Config of the first takes another mask, there is none.
    """
    first, numbers = variants[0], random.Random(f"neighbours:{seed}")
    neighbours: list[Variant] = []
    others = [part for part in _KEY if part != "causal"]
    for part in ("causal", *numbers.sample(others, len(others))):
        same = [name for name in _KEY if name != part]
        near = [each for each in variants[1:] if all(getattr(each, name) == getattr(first, name) for name in same)]
        neighbours += numbers.sample(near, min(1, len(near)))
    return neighbours


def _spread(
    variants: Sequence[Variant], seed: int, values: Callable[[Variant], Iterable[object]], then: Sequence[Variant] = ()
) -> Iterator[tuple[Variant, int]]:
    """Yield all variants with the number of values that each is the first to cover: the first, `then`, then most first."""
    left = dict.fromkeys([variants[0], *random.Random(f"pool:{seed}").sample(list(variants), len(variants))])
    # By identity: to hash a variant, and to make its values, takes longer than to compare them.
    values_of = {id(each): frozenset(values(each)) for each in left}
    best, covered, waiting = variants[0], set[object](), list(then)
    while True:
        new = frozenset(values(best)) - covered
        yield best, len(new)
        del left[best]
        if not left:
            return
        covered |= new
        best = waiting.pop(0) if waiting else max(left, key=lambda each: len(values_of[id(each)] - covered))


def _values(variant: Variant) -> Iterable[tuple[str, object]]:
    yield "dtype", variant.dtype
    yield "causal", variant.causal
    yield "dims", variant.dims
    yield "config", variant.config
    yield "dtype and causal", (variant.dtype, variant.causal)
    # Which dim, and which side of the tile, is the longer one; dims that steps of columns do not divide.
    dim_qk, dim_v = variant.dims
    yield "longer dim", _sign(dim_qk - dim_v)
    yield "dims in steps", (dim_qk % _STEP == 0, dim_v % _STEP == 0)
    yield "longer side", _sign(variant.config.tile("tile_m", 0) - variant.config.tile("tile_n", 0))


def _values_of_few(variant: Variant) -> Iterable[tuple[str, object]]:
    yield from _values(variant)
    # Most Cases of a CPU have small tiles, and room for several of them only there.
    if scores_of_tile(variant) <= _SMALL:
        yield "mask of small tiles", variant.causal


def _values_and_widths(variant: Variant) -> Iterable[tuple[str, object]]:
    yield from _values(variant)
    # Kernels often take wide rows by parts. Few variants are better spent otherwise.
    yield "wide dims", tuple(dim > WIDE for dim in variant.dims)
    # Parts of keys that are merged afterwards: under a mask many have nothing to do.
    yield "parts and mask", (variant.config.tile("split", 1) > 1, variant.causal is None)


def _values_and_modifiers(variant: Variant) -> Iterable[tuple[str, object]]:
    yield from _values_and_widths(variant)
    if variant.modifiers is not None:
        yield from (("modifiers", kind) for kind in kinds_of(variant.modifiers))


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def _pairs(variant: Variant) -> Iterable[tuple[str, object]]:
    yield from _values(variant)
    yield "dtype and dims", (variant.dtype, variant.dims)
    yield "dtype and config", (variant.dtype, variant.config)
