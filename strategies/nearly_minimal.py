"""Cases in which nearly all parts of another are as simple as they get, for failures that take long to show."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from attnfuzz.kernels.contract import Capabilities
from attnfuzz.strategies.case import Case, Recipe, with_check
from attnfuzz.strategies.shrink_sizes import all_shorter, fewer_heads, fewer_sequences, smaller_shapes, with_changes
from attnfuzz.strategies.shrink_steps import PLAIN
from attnfuzz.strategies.variants import Variant

__all__ = ["nearly_minimal"]

_MOST_KEPT = 2
"""Parts that stay as they are, at most: of three there would be hundreds of Cases."""
_NO_TREES: dict[str, object] = {"score_mod": None, "mask_mod": None}
_NO_MODIFIERS: dict[str, object] = {"window": None, "softcap": 0.0, "sinks": False}


def nearly_minimal(case: Case, variants: Sequence[Variant], can: Capabilities) -> Iterator[Case]:
    """Yield Cases in which all parts of one that runs alone are as simple as they get, then all but one, then all but two.

    Of these most pass, which takes no time where a Case that fails takes seconds, as one that hangs does. The sequences are one
    of the parts: one alone is left, each in turn, or all of them stay. A Case may be outside the kernel's capabilities.
    """
    parts = _parts(variants, can)
    alone = () if can.shapes else tuple(fewer_sequences(case))[: case.problem.batch]
    yielded = {case}
    for kept in range(_MOST_KEPT + 1):
        for starts, others in ((alone, kept), ((case,), kept - bool(alone))):
            for stay in itertools.combinations(parts, max(others, 0)) if others >= 0 else ():
                for start in starts:
                    each = functools.reduce(lambda now, part: part(now), (part for part in parts if part not in stay), start)
                    if each not in yielded:
                        yielded.add(each)
                        yield each


def _parts(variants: Sequence[Variant], can: Capabilities) -> list[Callable[[Case], Case]]:
    """Return for each part of a Case a function that makes it as simple as it gets."""

    def first(steps: Callable[[Case], Iterator[Case]]) -> Callable[[Case], Case]:
        return lambda case: next(steps(case), case)

    if can.shapes:
        shape = [first(functools.partial(smaller_shapes, shapes=can.shapes))]
    else:
        shape = [first(functools.partial(all_shorter, multiples=can.multiples)), first(fewer_heads)]
    without = [functools.partial(_without, plain=plain) for plain in (_NO_TREES, _NO_MODIFIERS)]
    return [*shape, _with_plain_values, _with_plain_check, *without, functools.partial(_simplest, variants=variants)]


def _with_plain_values(case: Case) -> Case:
    plain = replace(case, recipe=Recipe())
    return next(with_changes(plain, **PLAIN), plain)


def _with_plain_check(case: Case) -> Case:
    return with_check(case, "oracle")


def _without(case: Case, plain: Mapping[str, object]) -> Case:
    return next(with_changes(case, **plain), case)


def _simplest(case: Case, variants: Sequence[Variant]) -> Case:
    """Return the Case of the simplest variant, with its modifiers if it has its own."""
    for each in variants[:1]:
        dims = {"dim_qk": each.dims[0], "dim_v": each.dims[1]}
        modifiers = {} if each.modifiers is None else {**_NO_TREES, **_NO_MODIFIERS, **dict(each.modifiers)}
        for changed in with_changes(case, dtype=each.dtype, causal=each.causal, **dims, **modifiers):
            return replace(changed, config=each.config)
    return case
