"""Steps of shrinking that make a Case's sizes smaller: sequences, heads, lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from attnfuzz.kernels.contract import Shape, shape_fields
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import LAYOUTS, Layout, Problem
from attnfuzz.strategies.case import RELATIONS, Case, with_problem

__all__ = [
    "CONTIGUOUS",
    "SEEDS",
    "all_shorter",
    "fewer_heads",
    "fewer_sequences",
    "shorter_lengths",
    "smaller_shapes",
    "with_changes",
]

CONTIGUOUS: dict[str, object] = dict.fromkeys(LAYOUTS, Layout())
"""Layouts of all tensors, contiguous."""
SEEDS = (0, 1, 2, 3)
"""Of values and relations, that are tried instead of a larger one."""
_LONG = 64
"""Tokens from which a length is cut by a quarter and by an eighth too."""


def with_changes(case: Case, **changes: object) -> Iterator[Case]:
    """Yield `case` with changes to its Problem, contiguous if its layouts no longer fit.

    Yields nothing if the Problem is invalid: with shorter lengths or fewer heads an index of a tree may be out of bounds.
    """
    for more in ({}, CONTIGUOUS):
        try:
            yield with_problem(case, replace(case.problem, **(more | changes)))
        except BadArgument:
            continue
        return


def all_shorter(case: Case, multiples: tuple[int, int]) -> Iterator[Case]:
    """Cut all lengths at once, to the smallest or by half: a Case of few tokens takes a tenth of the time in all later steps."""
    p = case.problem
    for keep in (0, 2):
        cut = [
            tuple(min(n, max(step, n // keep // step * step if keep else step)) for n in lengths)
            for lengths, step in zip((p.seqlens_q, p.seqlens_k), multiples, strict=True)
        ]
        if cut != [p.seqlens_q, p.seqlens_k]:
            yield from with_changes(case, seqlens_q=cut[0], seqlens_k=cut[1])


def smaller_shapes(case: Case, shapes: Sequence[Shape]) -> Iterator[Case]:
    """Move to other shapes of the kernel's pool that are nowhere larger, those with the fewest numbers first."""
    p = case.problem
    now = (p.batch, p.heads, p.kv_heads, max(p.seqlens_q), max(p.seqlens_k))
    smaller = [each for each in shapes if each != now and all(one <= other for one, other in zip(each, now, strict=True))]
    for shape in sorted(smaller, key=lambda each: (math.prod(each), each)):
        yield from with_changes(case, **shape_fields(shape))


def fewer_sequences(case: Case) -> Iterator[Case]:
    """Leave one sequence, each in turn, then all but one."""
    p = case.problem
    if p.batch == 1:
        return
    everything = range(p.batch)
    for kept in [*((i,) for i in everything), *(tuple(j for j in everything if j != i) for i in everything)]:
        if len(kept) < p.batch:
            yield from with_changes(
                case, seqlens_q=tuple(p.seqlens_q[i] for i in kept), seqlens_k=tuple(p.seqlens_k[i] for i in kept)
            )


def fewer_heads(case: Case) -> Iterator[Case]:
    """Yield Cases with fewer heads, or fewer key/value heads, but no larger groups; the fewest first."""
    p = case.problem
    for heads in range(1, p.heads + 1):
        for kv_heads in (kv for kv in range(1, p.kv_heads + 1) if heads % kv == 0):
            groups = heads // kv_heads
            if (heads, kv_heads) != (p.heads, p.kv_heads) and groups <= p.groups:
                for each in with_changes(case, heads=heads, kv_heads=kv_heads):
                    yield each
                    yield from _with_other_seeds(each)


def _with_other_seeds(case: Case) -> Iterator[Case]:
    """Yield the Case of a relation with the first seeds: they select what it leaves open, such as a tensor or where to cut."""
    if case.check in RELATIONS:
        for seed in SEEDS:
            if seed != case.recipe.seed:
                yield replace(case, recipe=replace(case.recipe, seed=seed))


def shorter_lengths(case: Case, multiples: tuple[int, int] = (1, 1)) -> Iterator[Case]:
    """Shorten both sides of a sequence at once, then each side. 1 counts as simpler than 0, so 0 becomes 1 too.

    `multiples`: of lengths of queries and of keys; the smallest lengths are these instead of 1.
    """
    p, (step_q, step_k), both = case.problem, multiples, math.lcm(*multiples)
    tiles = (case.config.tile("tile_m", 1), case.config.tile("tile_n", 1))
    for i in range(p.batch):
        n_q, n_k = p.seqlens_q[i], p.seqlens_k[i]
        if n_q == n_k == 0:
            yield from _lengths(case, p, i, step_q, step_k)
        shorter = min(n_q, n_k)
        cuts = dict.fromkeys((shorter - length) // both * both for length in sorted(_steps(shorter, tiles)) if n_q and n_k)
        for cut in filter(None, cuts):
            yield from _lengths(case, p, i, n_q - cut, n_k - cut)
        for length in _steps_of_side(n_q, tiles, step_q):
            yield from _lengths(case, p, i, length, n_k)
        for length in _steps_of_side(n_k, tiles, step_k):
            yield from _lengths(case, p, i, n_q, length)


def _steps(length: int, tiles: tuple[int, int], multiple: int = 1) -> set[int]:
    """Return lengths to try instead of `length`: the smallest, around the tiles, half, one tile less, one less.

    Each is rounded down to a multiple of `multiple`.
    """
    if length == 0:
        return {multiple}
    near = (tile + d for tile in tiles for d in (-1, 0, 1))
    tries = {1, 2, 3, length // 2, length - 1, *near, *(length - tile for tile in tiles)}
    tries |= {multiple, 2 * multiple, 3 * multiple, length - multiple}
    return {n // multiple * multiple for n in tries if multiple <= n < length}


def _steps_of_side(length: int, tiles: tuple[int, int], multiple: int) -> list[int]:
    """Return lengths of one side to try, ascending: also around two tiles, two tiles less, and long ones cut by parts.

    A fault may be in every second tile only. The shortest of many that fail is found by parts, not by one token at a time.
    """
    near = (2 * tile + d for tile in tiles for d in (-1, 0, 1))
    parts = (length - length // 4, length - length // 8) if length >= _LONG else ()
    tries = (*near, *(length - 2 * tile for tile in tiles), *parts)
    return sorted(_steps(length, tiles, multiple) | {n // multiple * multiple for n in tries if multiple <= n < length})


def _lengths(case: Case, p: Problem, i: int, n_q: int, n_k: int) -> Iterator[Case]:
    """Yield `case` with sequence `i` of n_q x n_k; a dense batch has one length for all."""
    if p.packing == "dense":
        yield from with_changes(case, seqlens_q=(n_q,) * p.batch, seqlens_k=(n_k,) * p.batch)
        return
    q, k = list(p.seqlens_q), list(p.seqlens_k)
    q[i], k[i] = n_q, n_k
    yield from with_changes(case, seqlens_q=tuple(q), seqlens_k=tuple(k))
