"""Steps from a Case to simpler ones, to shrink a failure until a person can read it at a glance.

Hypothesis shrinks the choices behind a Case; removing one choice shifts all later ones, so that ragged batches get stuck (for
example at four sequences, 65 x 64 tokens, where 2 x 1 fails as well). A Case is plain data, so its parts are simplified instead,
and a stored Case can be shrunk further without the choices that led to it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from attnfuzz.kernels.contract import Capabilities, Config, Shape, shape_fields
from attnfuzz.kernels.expressions.tree import parse, to_data
from attnfuzz.kernels.problem import LAYOUTS, BadArgument, Layout, Problem
from attnfuzz.strategies.case import DEFAULT_TILE, PATTERNS, RELATIONS, SINK_VALUES, Case, Recipe, with_check, with_problem
from attnfuzz.strategies.modifiers import Chosen, chosen
from attnfuzz.strategies.shrink_trees import simpler_trees
from attnfuzz.strategies.variants import Variant

__all__ = [
    "PLAIN",
    "all_shorter",
    "change",
    "fewer_heads",
    "fewer_sequences",
    "larger",
    "simpler",
    "smaller_shapes",
    "with_changes",
]

_CONTIGUOUS: dict[str, object] = dict.fromkeys(LAYOUTS, Layout())
PLAIN: dict[str, object] = {"softmax_scale": None, "slack_q": 0, "slack_k": 0, **_CONTIGUOUS}
"""Parts of a Problem that are made plain together with the values."""
_PLAINER: tuple[tuple[str, object], ...] = (
    ("order", None),
    ("expanded_heads", False),
    ("expanded", False),
    ("packed", False),
    ("pitch", 0),
    ("offset", 0),
    ("pitch", 1),
    ("offset", 1),
)
_KEY_PARTS = ("dtype", "causal", "dims", "config")
_VARIANT_PARTS = (*_KEY_PARTS, "modifiers")
_SEEDS = (0, 1, 2, 3)
_LEAST_TILE = 16
"""Smaller numbers of a Config are no tiles: stages, warps, parts."""
_LONG = 64
"""Tokens from which a length is cut by a quarter and by an eighth too."""
_FEW_TILES = 2
"""Tiles of tokens, over all sequences, that a minimal Case may have without a look at Configs with smaller ones."""


_ANY: Final = Capabilities(unequal=True)


def simpler(case: Case, variants: Sequence[Variant], can: Capabilities = _ANY) -> Iterator[Case]:
    """Yield Cases with one part of `case` simplified, or fewer or simpler Cases before it, largest steps first.

    Every step lowers one part and raises none, so that shrinking ends. Variants stay within `variants` (simplest first), whose
    code is compiled already; lengths go by the multiples, shapes to others of the pool, that `can` declares. A Case may be
    outside the kernel's capabilities: check `supports`.
    """
    if not case.after:
        yield from _simpler(case, variants, can)
        return
    yield from _fewer_earlier(case)
    for each in _simpler(case.alone, variants, can):
        # What the Cases have in common is often why one fails after the other: the key of a cache, the size of a workspace.
        if (alike := tuple(_likewise(earlier, case, each) for earlier in case.after)) != case.after:
            yield replace(each, after=alike)
        yield replace(each, after=case.after)
    for number, earlier in enumerate(case.after):
        for each in _simpler(earlier, variants, can):
            yield replace(case, after=(*case.after[:number], each, *case.after[number + 1 :]))


def larger(case: Case) -> Iterator[Case]:
    """Yield Cases that do what `case` does several times, which may show more often what chance decides.

    They have more sequences, heads or tokens, then more of each. A Case may be outside the kernel's capabilities.
    """
    p = case.problem
    for sequences, heads, tokens in ((4, 1, 1), (1, 4, 1), (1, 1, 4), (1, 1, 64), (4, 4, 4), (2, 2, 64)):
        lengths = {
            "seqlens_q": tuple(tokens * n for n in p.seqlens_q) * sequences,
            "seqlens_k": tuple(tokens * n for n in p.seqlens_k) * sequences,
        }
        yield from with_changes(case, **lengths, heads=heads * p.heads, kv_heads=heads * p.kv_heads)


def change(before: Case, after: Case) -> frozenset[tuple[str, object]]:
    """Return what a step changes: each part that differs, with its new value."""
    pairs = ((before, after), (before.problem, after.problem), (before.recipe, after.recipe))
    return frozenset(
        (name, getattr(new, name))
        for old, new in pairs
        for name in new.__struct_fields__
        if name not in ("problem", "recipe") and getattr(new, name) != getattr(old, name)
    )


def _fewer_earlier(case: Case) -> Iterator[Case]:
    """Leave out parts of the Cases that run first, halves first; one stays."""
    size = len(case.after) // 2
    while size:
        for start in range(0, len(case.after), size):
            yield replace(case, after=case.after[:start] + case.after[start + size :])
        size //= 2


def _likewise(earlier: Case, before: Case, now: Case) -> Case:
    """Return an earlier Case with the change from `before` to `now`, in each part where it was as `before`."""
    changed = {}
    for part in ("problem", "recipe"):
        old, new, own = getattr(before, part), getattr(now, part), getattr(earlier, part)
        names = [name for name in own.__struct_fields__ if getattr(own, name) == getattr(old, name) != getattr(new, name)]
        changed[part] = {name: getattr(new, name) for name in names}
    config = now.config if earlier.config == before.config else earlier.config
    try:
        problem = replace(earlier.problem, **changed["problem"])
    except BadArgument:
        return earlier
    return with_problem(replace(earlier, recipe=replace(earlier.recipe, **changed["recipe"]), config=config), problem)


def _simpler(case: Case, variants: Sequence[Variant], can: Capabilities) -> Iterator[Case]:
    """Yield Cases with one part of one that runs alone simplified."""
    if case.check != "oracle":
        yield with_check(case, "oracle")
    yield from _shorter_schedules(case.schedule, case)
    if can.shapes:
        yield from smaller_shapes(case, can.shapes)
    else:
        yield from fewer_sequences(case)
        yield from fewer_heads(case)
    yield from _all_plainer(case)
    if not can.shapes:
        yield from all_shorter(case, can.multiples)
    yield from _plainer_layouts(case)
    yield from _plainer_values(case)
    yield from _plainer_problem(case, can.window_multiple)
    yield from _simpler_trees(case)
    yield from _simpler_variants(case, variants)
    if not can.shapes:
        yield from _shorter(case, can.multiples)
        yield from _smaller_tiles(case, variants, can.multiples)


def _shorter_schedules(schedule: tuple[int, ...], case: Case) -> Iterator[Case]:
    """Take no choice at all, no role that is held back, fewer choices, then others as late as allowed, then lower numbers."""
    if not schedule:
        return
    yield replace(case, schedule=())
    if schedule[0] < 0:
        held, schedule = schedule[:1], schedule[1:]
        yield replace(case, schedule=schedule)
        yield from (replace(case, schedule=(*held, *each.schedule)) for each in _shorter_schedules(schedule, case))
        if held != (-1,):
            yield replace(case, schedule=(-1, *schedule))
            yield replace(case, schedule=(held[0] + 1, *schedule))
        return
    size = len(schedule) // 2
    while size:
        yield replace(case, schedule=schedule[:-size])
        for start in range(0, len(schedule) - size, size):
            if any(schedule[start : start + size]):
                yield replace(case, schedule=(*schedule[:start], *(0,) * size, *schedule[start + size :]))
        size //= 2
    for number, choice in enumerate(schedule):
        for lower in sorted({1, choice // 2, choice - 1}) if choice > 1 else ():
            yield replace(case, schedule=(*schedule[:number], lower, *schedule[number + 1 :]))


def with_changes(case: Case, **changes: object) -> Iterator[Case]:
    """Yield `case` with changes to its Problem, contiguous if its layouts no longer fit.

    Yields nothing if the Problem is invalid: with shorter lengths or fewer heads an index of a tree may be out of bounds.
    """
    for more in ({}, _CONTIGUOUS):
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


def _all_plainer(case: Case) -> Iterator[Case]:
    """Make values, layouts, scale and slack rows plain at once, or the values alone, which show less where tokens are fewer."""
    if case.recipe != Recipe():
        plainer = replace(case, recipe=Recipe())
        if any(getattr(case.problem, name) != value for name, value in PLAIN.items()):
            yield from with_changes(plainer, **PLAIN)
        yield plainer


def _plainer_layouts(case: Case) -> Iterator[Case]:
    """Make all tensors contiguous, then each (packed ones together), then simplify each part of each layout."""
    p = case.problem
    now: dict[str, Layout] = {name: getattr(p, name) for name in LAYOUTS if getattr(p, name) != Layout()}
    if not now:
        return
    yield from with_changes(case, **_CONTIGUOUS)
    if p.layout_q.packed:
        yield from with_changes(case, layout_q=Layout())
    packed = [name for name in now if now[name].packed]
    for names in [*([packed] if packed else []), *([name] for name in now if name not in packed)]:
        yield from with_changes(case, **dict.fromkeys(names, Layout()))
        for layout in _plainer(now[names[0]]):
            yield from with_changes(case, **dict.fromkeys(names, layout))


def _plainer(layout: Layout) -> Iterator[Layout]:
    """Yield `layout` with one part left out or minimal."""
    for part, plain in _PLAINER:
        now = getattr(layout, part)
        if now != plain and (plain != 1 or now > 1):
            yield replace(layout, **{part: plain})


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
        for seed in _SEEDS:
            if seed != case.recipe.seed:
                yield replace(case, recipe=replace(case.recipe, seed=seed))


def _plainer_values(case: Case) -> Iterator[Case]:
    recipe, plain = case.recipe, Recipe()
    if recipe == plain:
        return
    yield replace(case, recipe=plain)
    for pattern in PATTERNS[: PATTERNS.index(recipe.pattern)]:
        yield replace(case, recipe=replace(recipe, pattern=pattern))
    for sinks in SINK_VALUES[: SINK_VALUES.index(recipe.sinks)]:
        yield replace(case, recipe=replace(recipe, sinks=sinks))
    for name in ("q_scale", "k_scale", "v_scale", "do_scale"):
        if getattr(recipe, name) != 1.0:
            yield replace(case, recipe=replace(recipe, **{name: 1.0}))
    for seed in _SEEDS:
        if seed < recipe.seed:
            yield replace(case, recipe=replace(recipe, seed=seed))


def _plainer_problem(case: Case, window_step: int) -> Iterator[Case]:
    p = case.problem
    if p.slack_q and p.slack_k:
        yield from with_changes(case, slack_q=0, slack_k=0)
    plainest = (("window", None), ("softcap", 0.0), ("sinks", False), ("score_mod", None), ("mask_mod", None))
    for name, plain in (("softmax_scale", None), ("slack_q", 0), ("slack_k", 0), *plainest):
        if getattr(p, name) != plain:
            yield from with_changes(case, **{name: plain})
    for size in (0, 1, 2, 4, 8, 16, 32, 64, 128):
        if size < p.page_size:
            yield from with_changes(case, page_size=size)
    for window in _plainer_windows(p.window, window_step):
        yield from with_changes(case, window=window)
    if p.needs.dlse:
        yield from with_changes(case, needs=replace(p.needs, dlse=False))
    if p.packing == "dense":
        yield from with_changes(case, packing="ragged")


def _plainer_windows(window: tuple[int | None, int | None] | None, step: int) -> Iterator[tuple[int | None, int | None]]:
    """Yield windows with one side without limit, which counts as the simplest, or narrower by multiples of `step`.

    Both sides of one limit get narrower together too: a kernel may take only such windows.
    """
    left, right = window or (None, None)
    if left == right:
        yield from ((less, less) for less in _narrower(left, step))
    if left is not None:
        yield from ((less, right) for less in (None, *_narrower(left, step)))
    if right is not None:
        yield from ((left, less) for less in (None, *_narrower(right, step)))


def _narrower(side: int | None, step: int) -> tuple[int, ...]:
    if side is None:
        return ()
    return tuple(less for less in dict.fromkeys((0, step, side // 2 // step * step, side - step)) if 0 <= less < side)


def _simpler_trees(case: Case) -> Iterator[Case]:
    """Yield `case` with smaller trees for score_mod and mask_mod, the smallest first, then with plainer numbers in them."""
    for name in ("score_mod", "mask_mod"):
        data = getattr(case.problem, name)
        if data is not None:
            for each in simpler_trees(parse(data)):
                yield from with_changes(case, **{name: to_data(each)})


def _modifiers(p: Problem) -> Chosen:
    """Return a Problem's modifiers as a Variant has them."""
    return chosen({"score_mod": p.score_mod, "mask_mod": p.mask_mod, "softcap": p.softcap or None, "window": p.window})


def _variant_of(case: Case, variants: Sequence[Variant]) -> Variant:
    """Return the variant of a Case; if variants have modifiers, with those of the one whose code most likely serves it.

    A Case's window need not be its variant's, where the same code serves others.
    """
    p = case.problem
    now = Variant(p.dtype, p.causal, (p.dim_qk, p.dim_v), case.config)
    if all(each.modifiers is None for each in variants):
        return now
    own = _modifiers(p)

    def unlike(each: Variant) -> tuple[bool, bool, bool, bool]:
        modifiers, others = each.modifiers or (), dataclasses.replace(each, modifiers=None) != now
        # The code for a causal mask may serve a window.
        serves = _any_window(modifiers) == _any_window(own) or each.causal is not None
        return others or modifiers != own, not serves, others, modifiers != own

    alike = [each for each in variants if _but_window(each.modifiers or ()) == _but_window(own)]
    nearest = min(alike, key=unlike, default=None)
    return dataclasses.replace(now, modifiers=own if nearest is None else nearest.modifiers)


def _but_window(of: Chosen) -> Chosen:
    return tuple(pair for pair in of if pair[0] != "window")


def _any_window(of: Chosen) -> Chosen:
    """Return modifiers whose window, if it has a limit, is any: which limits it has may be no matter to the code."""
    return tuple(("window", "limited") if name == "window" and value != (None, None) else (name, value) for name, value in of)


def _size(of: Chosen) -> int:
    """Return how many nodes of trees, limits of a window and caps there are."""
    nodes = [len(list(parse(value).walk())) for name, value in of if name in ("score_mod", "mask_mod")]
    limits = [side is not None for name, value in of if name == "window" for side in value]
    return sum(nodes) + sum(limits) + any(name == "softcap" for name, _ in of)


def _same_code(one: Chosen | None, other: Chosen | None, *, any_window: bool) -> bool:
    return one == other or (any_window and _any_window(one or ()) == _any_window(other or ()))


def _simpler_variants(case: Case, variants: Sequence[Variant]) -> Iterator[Case]:
    """Yield `case` with each part alone replaced by simpler values that some variant has, simplest first."""
    now, own = _variant_of(case, variants), _modifiers(case.problem)
    fixed = now.modifiers is not None
    any_window = fixed and now.modifiers != own
    order = {name: list(dict.fromkeys(getattr(each, name) for each in variants)) for name in _VARIANT_PARTS}
    for name in _VARIANT_PARTS:
        there = order[name]
        simplest = there[: there.index(getattr(now, name))] if getattr(now, name) in there else []
        if fixed and name == "modifiers":
            # Those of the nearest variant may be larger than the Case's own, to which other steps would lead back.
            simplest = [each for each in simplest if _size(each or ()) <= _size(own) - (own != now.modifiers)]
        for value in simplest:
            for each in variants:
                parts = [getattr(each, other) == getattr(now, other) for other in _KEY_PARTS if other != name]
                same = name == "modifiers" or _same_code(each.modifiers, now.modifiers, any_window=any_window)
                if getattr(each, name) == value and all(parts) and same:
                    plain = {"score_mod": None, "mask_mod": None, "softcap": 0.0, "window": None}
                    modifiers = {**plain, **dict(each.modifiers or ())} if fixed and name == "modifiers" else {}
                    dims = {"dim_qk": each.dims[0], "dim_v": each.dims[1]}
                    for changed in with_changes(case, dtype=each.dtype, causal=each.causal, **dims, **modifiers):
                        yield replace(changed, config=each.config)


def _smaller_tiles(case: Case, variants: Sequence[Variant], multiples: tuple[int, int]) -> Iterator[Case]:
    """Yield a Case of several tiles in a Config with smaller ones, all of its lengths cut as much: neither alone shows it."""
    p = case.problem
    if _tiles_of_tokens(case) <= _FEW_TILES:
        return
    now = _variant_of(case, variants)
    any_window = now.modifiers is not None and now.modifiers != _modifiers(p)
    for each in variants:
        parts = dataclasses.replace(each, config=now.config, modifiers=now.modifiers) == now
        if not parts or not _same_code(each.modifiers, now.modifiers, any_window=any_window):
            continue
        for small, large in _smaller_numbers(each.config, case.config):
            cut = [
                tuple(-(-n * small // (large * step)) * step for n in lengths)
                for lengths, step in zip((p.seqlens_q, p.seqlens_k), multiples, strict=True)
            ]
            if sum(map(sum, cut)) < p.total_q + p.total_k:
                for shorter in with_changes(case, seqlens_q=cut[0], seqlens_k=cut[1]):
                    yield replace(shorter, config=each.config)


def _tiles_of_tokens(case: Case) -> int:
    """Return the tiles of queries over all sequences, or those of keys if they are more."""
    p = case.problem
    sides = ((p.seqlens_q, case.config.tile("tile_m", DEFAULT_TILE)), (p.seqlens_k, case.config.tile("tile_n", DEFAULT_TILE)))
    return max(sum(-(-length // tile) for length in lengths) for lengths, tile in sides)


def _smaller_numbers(small: Config, large: Config) -> list[tuple[int, int]]:
    """Return the pairs of a tile that is smaller in the first Config and that tile in the second one, each ratio once."""
    pairs = [(small[name], large[name]) for name in small if name in large]
    tiles = [(a, b) for a, b in pairs if isinstance(a, int) and isinstance(b, int) and _LEAST_TILE <= a < b]
    return list({a / b: (a, b) for a, b in tiles}.values())


def _shorter(case: Case, multiples: tuple[int, int] = (1, 1)) -> Iterator[Case]:
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
