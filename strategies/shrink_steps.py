"""Steps from a Case to simpler ones, to shrink a failure until a person can read it at a glance.

Hypothesis shrinks the choices behind a Case; removing one choice shifts all later ones, so that ragged batches get stuck (for
example at four sequences, 65 x 64 tokens, where 2 x 1 fails as well). A Case is plain data, so its parts are simplified instead,
and a stored Case can be shrunk further without the choices that led to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from attnfuzz.kernels.contract import Capabilities
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.expressions.tree import parse, to_data
from attnfuzz.kernels.problem import LAYOUTS, Layout
from attnfuzz.strategies.case import PATTERNS, SINK_VALUES, Case, Recipe, with_check, with_problem
from attnfuzz.strategies.shrink_sizes import (
    CONTIGUOUS,
    SEEDS,
    all_shorter,
    fewer_heads,
    fewer_sequences,
    shorter_lengths,
    smaller_shapes,
    with_changes,
)
from attnfuzz.strategies.shrink_trees import simpler_trees
from attnfuzz.strategies.shrink_variants import simpler_variants, smaller_tiles
from attnfuzz.strategies.variants import Variant

__all__ = ["PLAIN", "change", "larger", "simpler"]

PLAIN: dict[str, object] = {"softmax_scale": None, "slack_q": 0, "slack_k": 0, **CONTIGUOUS}
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
    yield from simpler_variants(case, variants)
    if not can.shapes:
        yield from shorter_lengths(case, can.multiples)
        yield from smaller_tiles(case, variants, can.multiples)


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
    yield from with_changes(case, **CONTIGUOUS)
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
    for seed in SEEDS:
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
