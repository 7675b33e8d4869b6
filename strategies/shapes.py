"""Heads, groups, dims, dtypes, masks and Configs: the parts of a Case other than lengths and values."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from hypothesis import strategies as st

from attnfuzz.kernels.contract import Capabilities, Config, Device, Kernel, shape_fields
from attnfuzz.kernels.problem import BadArgument, Causal, Dtype, Needs, Problem
from attnfuzz.strategies.case import DEFAULT_TILE, Pattern
from attnfuzz.strategies.modifiers import Chosen, hides_first_keys, hiding_tile, kinds_of, pooled

__all__ = [
    "MODIFIED",
    "Variant",
    "all_variants",
    "compile_order",
    "covering",
    "heads",
    "modified",
    "one_variant",
    "other_dims",
    "pool",
    "scales",
]

_DTYPE_ORDER: tuple[Dtype, ...] = ("float16", "bfloat16", "float32")
_CAUSAL_ORDER: tuple[Causal | None, ...] = (None, "bottom_right", "top_left")
MODIFIED = 40
"""Least number of modified variants that a kernel with score_mods is compiled for."""
_GROUPS = (1, 2, 3, 4, 5, 6, 7, 8)
_PARTS = ("dtype", "causal", "dims", "config", "modifiers")
_KEY = _PARTS[:-1]
"""Parts that a compile key may have forgotten."""
_CONFIG_FIRST = ("config", *(part for part in _PARTS if part != "config"))
_BOOLEANS = st.booleans()
_POWERS = (16, 32, 64, 128, 256)
_ATTEMPTS = 40
"""Draws for each variant of other dims: few are of two rare kinds at once."""
_WITH_NEIGHBOURS = 8
_SMALL = 64 * 64
"""Scores of a small tile."""
_SECOND, _THIRD, _FOURTH = 1, 2, 3
"""Places, from 0, at which a mask, rare dims, and a score_mod of the sequence are compiled at the latest."""
_VECTOR = 8
"""Elements of half precision in 16 bytes, which code loads and stores at once."""
_STEP, _WIDE = 32, 128
"""Columns that kernels often take at once, and the most of them."""
_POSITIVE = (None, None, None, 1.0, 0.25, 0.1, 0.0078125)
_SCALES: st.SearchStrategy[float | None] = st.sampled_from(_POSITIVE)
_TINY_SCALES: st.SearchStrategy[float | None] = st.sampled_from((2.0**-16, 1e-5, 2.0**-18))
_DEFAULT_SCALE: st.SearchStrategy[float | None] = st.none()
_ANY_SCALES: st.SearchStrategy[float | None] = st.sampled_from((*_POSITIVE, -0.125, 0.0))


@dataclass(frozen=True, slots=True)
class Variant:
    """The parts of a Case that compiled code usually depends on."""

    dtype: Dtype
    causal: Causal | None
    dims: tuple[int, int]
    config: Config
    modifiers: Chosen | None = None
    """Softcap, window, score_mod and mask_mod that the code is compiled for; None: any, where they need no compile."""

    def problem(self, can: Capabilities) -> Problem:
        """Return the smallest Problem of this variant within `can`, as a compile needs it."""
        dim_qk, dim_v = self.dims
        return Problem(
            **shape_fields(can.least_shape),
            packing="ragged" if "ragged" in can.packings else "dense",
            dim_qk=dim_qk,
            dim_v=dim_v,
            dtype=self.dtype,
            causal=self.causal,
            needs=Needs(outputs=can.outputs),
            page_size=can.page_sizes[0],
            **dict(self.modifiers or ()),
        )


def all_variants(kernel: Kernel, device: Device) -> tuple[Variant, ...]:
    """Return every variant that `kernel` declares for `device`, simplest first.

    Raises:
        BadArgument: the capabilities leave nothing to draw, with the reason.
    """
    can = kernel.capabilities
    variants: list[Variant] = []
    reason: str | None = "capabilities declare no dtype, mask or dims"
    for dtype in sorted(can.dtypes_for(device), key=_DTYPE_ORDER.index):
        for causal in sorted(can.causal, key=_CAUSAL_ORDER.index):
            for dims in can.dims:
                probe = Variant(dtype, causal, dims, Config()).problem(can)
                configs = kernel.configs(probe)
                reason = reason if configs else f"configs(problem) is empty for {dtype}, {dims}"
                for config in configs:
                    refusal = kernel.supports(probe, config, device)
                    if refusal is None:
                        variants.append(Variant(dtype, causal, dims, config))
                    reason = refusal or reason
    if not variants:
        raise BadArgument(f"kernel={kernel.name!r}: nothing to draw on {device}: {reason}; correct its capabilities or configs")
    return tuple(variants)


def other_dims(kernel: Kernel, device: Device, seed: int, count: int) -> tuple[Variant, ...]:
    """Return up to `count` variants, chosen by `seed`, with dims that `kernel` takes but does not list: by its `dim_multiple`.

    Half of the dims are at a power of two or next to it. dtypes and masks are those that it declares, in turn. One variant at
    least has no dims that are multiples of 8, and one a V beyond 128 columns, if the kernel takes such: vectors of 16 bytes do
    not divide the rows of the one, and kernels often take those of the other by parts. A single variant is both.
    """
    can = kernel.capabilities
    if not can.dim_multiple or can.dim_max < can.dim_multiple:
        return ()
    lacking = {of for of, possible in ((_uneven, can.dim_multiple % _VECTOR), (_wide, can.dim_max > _WIDE)) if possible}
    others: list[Variant] = []
    spare: list[Variant] = []
    for variant in _of_other_dims(kernel, device, seed, count):
        if len(others) >= count:
            break
        met = {of for of in lacking if of(variant)}
        if variant in others or variant in spare:
            continue
        # Each of the variants after it can be of one kind that is lacking.
        if len(lacking - met) < count - len(others):
            others.append(variant)
            lacking -= met
        else:
            spare.append(variant)
    spare.sort(key=lambda each: sum(not of(each) for of in lacking))
    return (*others, *spare[: count - len(others)])


def _of_other_dims(kernel: Kernel, device: Device, seed: int, count: int) -> Iterator[Variant]:
    """Yield variants as `other_dims` draws them, `_ATTEMPTS` for each that is wanted at most."""
    can = kernel.capabilities
    step = can.dim_multiple
    assert step
    numbers = random.Random(f"dims:{seed}")
    near = sorted({at for power in _POWERS for at in (power - step, power, power + step) if step <= at <= can.dim_max})
    near = [each - each % step for each in near if each >= step] or [step]
    kinds = [(dtype, causal) for dtype in can.dtypes_for(device) for causal in can.causal]
    numbers.shuffle(kinds)
    for attempt in range(_ATTEMPTS * count if kinds else 0):
        # Two attempts each: the second with equal dims, as some kernels need them.
        dtype, causal = kinds[attempt // 2 % len(kinds)]
        dims = tuple(
            numbers.choice(near) if numbers.random() < 0.5 else step * numbers.randint(1, can.dim_max // step) for _ in range(2)
        )
        if attempt % 2:
            dims = (dims[0], dims[0])
        probe = Variant(dtype, causal, (dims[0], dims[1]), Config()).problem(can)
        configs = [] if dims in can.dims else kernel.configs(probe)
        for config in numbers.sample(list(configs), len(configs)):
            if kernel.supports(probe, config, device) is None:
                yield Variant(dtype, causal, (dims[0], dims[1]), config)
                break


def _uneven(variant: Variant) -> bool:
    return all(dim % _VECTOR for dim in variant.dims)


def _wide(variant: Variant) -> bool:
    return variant.dims[1] > _WIDE


def modified(variants: Sequence[Variant], kernel: Kernel, device: Device, seed: int, most: int = MODIFIED) -> tuple[Variant, ...]:
    """Return at least `most` of `variants`, each with its own modifiers, the first without; unchanged if `kernel` has none.

    Modifiers that a variant does not take, such as a mask with a Config for rows that always see a key, go to the next one that
    takes them, and are left out if none does. Those that hide the first keys hide a tile of their variant, one with the smallest
    tiles: of larger ones a Case may have room for one only. Of a variant whose Config has blocks of a mask, every other choice is
    drawn for such blocks. Variants left without modifiers are added at the end.
    """
    can = kernel.capabilities
    if not (can.score_mod or can.mask_mod or can.softcap or can.window):
        return tuple(variants)
    count = max(most if can.score_mod or can.mask_mod else 1, len(variants))
    anywhere = iter(pooled(can, count, seed))
    of_blocks = {block: iter(pooled(can, count, seed, block)[1:]) for block in {*map(_block, variants)} - {0}}
    compiled: list[Variant] = []
    used: set[Chosen] = set()
    for i in range(count):
        # With more modifiers than variants, a variant gets several.
        turn, start = divmod(i, len(variants))
        around, block = (*variants[start:], *variants[:start]), _block(variants[start])
        if for_blocks := block > 0 and i > 0 and (turn + start) % 2 > 0:
            around = tuple(each for each in around if _block(each) == block)
        chosen = next((each for each in (of_blocks[block] if for_blocks else anywhere) if each not in used), None)
        if chosen is None:
            continue
        used.add(chosen)
        if hides_first_keys(chosen):
            around = tuple(sorted(around, key=_scores_of_tile))
        offered = (replace(each, modifiers=hiding_tile(chosen, each.config.tile("tile_n", DEFAULT_TILE))) for each in around)
        taken = (each for each in offered if kernel.supports(each.problem(can), each.config, device) is None)
        compiled += islice((each for each in taken if each not in compiled), 1)
    with_modifiers = {replace(each, modifiers=None) for each in compiled}
    return (*compiled, *(replace(each, modifiers=()) for each in variants if each not in with_modifiers))


def _block(variant: Variant) -> int:
    return variant.config.tile("block", 0)


def _scores_of_tile(variant: Variant) -> int:
    return variant.config.tile("tile_m", DEFAULT_TILE) * variant.config.tile("tile_n", DEFAULT_TILE)


def pool(variants: Sequence[Variant], count: int, seed: int) -> tuple[Variant, ...]:
    """Return `count` variants chosen by `seed`, simplest first: the simplest one, then those with most values not yet covered.

    Where there are 8 or more, one of four (four at most) differs from the simplest in one part alone, the mask where it can, then
    parts selected by `seed`, so that a compile key that forgets that part gives one of them the other's code.
    """
    # A declaration may repeat a value.
    variants = tuple(dict.fromkeys(variants))
    if count >= len(variants):
        return variants
    near = _neighbours(variants, seed)[: count // 4 if count >= _WITH_NEIGHBOURS else 0]
    values = _values_of_few if count < _WITH_NEIGHBOURS else _values_and_widths
    chosen = {each for each, _ in islice(_spread(variants, seed, values, near), count)}
    return tuple(each for each in variants if each in chosen)


def compile_order(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Return the variants, the first in its place, in an order in which each covers most values that those before it do not.

    For compiles: trials begin with what is compiled first, and what all of it has in common, such as equal dims, stays untried.
    Variants with uneven dims, a wide V or a score_mod of the sequence are few, and bugs of these show with nothing else: they are
    among the first, as is a mask.
    """
    order = [each for each, _ in _spread(variants, 0, _values_and_modifiers)] if variants else []
    for rare, place in ((_of_sequence, _FOURTH), (_masked, _SECOND), (_uneven, _THIRD), (_wide, _THIRD)):
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
    if _scores_of_tile(variant) <= _SMALL:
        yield "mask of small tiles", variant.causal


def _values_and_widths(variant: Variant) -> Iterable[tuple[str, object]]:
    yield from _values(variant)
    # Kernels often take wide rows by parts. Few variants are better spent otherwise.
    yield "wide dims", tuple(dim > _WIDE for dim in variant.dims)
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


class _Tree:
    """Variants by the values of their parts. Its repr is short.

    Hypothesis writes out the arguments of a strategy, and warns where these are thousands of lines.
    """

    __slots__ = ("_branches", "_count", "_depth", "_parts", "_variants")

    def __init__(self, variants: Sequence[Variant], parts: Sequence[str] = _PARTS, depth: int = 0) -> None:
        self._variants, self._parts, self._depth, self._count = variants, parts, depth, len(variants)
        self._branches: list[_Tree | Variant] = []
        """One for each value of the part at this depth."""

    def __repr__(self) -> str:
        return f"<{self._count} variants>"

    def _grow(self) -> None:
        """Make the branches, at the first draw: a run draws from few of those of a thousand variants."""
        by_value: dict[object, list[Variant]] = {}
        for each in self._variants:
            by_value.setdefault(getattr(each, self._parts[self._depth]), []).append(each)
        below = self._depth + 1
        ends = below == len(self._parts)
        self._branches = [each[0] if ends or len(each) == 1 else _Tree(each, self._parts, below) for each in by_value.values()]
        # A run of hours grows most branches.
        self._variants = ()

    def draw(self, draw: st.DrawFn) -> Variant:
        """Draw a value of each part in turn, among the variants that have the values before."""
        tree: _Tree | Variant = self
        while isinstance(tree, _Tree):
            if not tree._branches:
                tree._grow()
            tree = tree._branches[draw(_places(len(tree._branches)))]
        return tree


@functools.cache
def _places(count: int) -> st.SearchStrategy[int]:
    """Return the strategy of the places in a list, shared by all lists of that length: one of each list's own has kilobytes."""
    return st.sampled_from(range(count))


def one_variant(variants: Sequence[Variant]) -> st.SearchStrategy[Variant]:
    """Return the strategy of `variants`, value by value, so that each value shrinks on its own as far as the pool allows.

    Half of them begin with the Config: one that fits few dtypes and dims would be rare otherwise. To build the strategy costs
    more than to draw from it: keep it.
    """
    return _one_variant(_Tree(variants), _Tree(variants, _CONFIG_FIRST))


@st.composite
def _one_variant(draw: st.DrawFn, tree: _Tree, by_config: _Tree) -> Variant:
    return (by_config if draw(_BOOLEANS) else tree).draw(draw)


def heads(can: Capabilities, most: int, most_grouped: int = 0) -> st.SearchStrategy[tuple[int, int]]:
    """Return a strategy of (heads, kv_heads) with up to `most` query heads: MHA, MQA and GQA equally often, fewest first.

    MQA and GQA have up to `most_grouped` where that is more: the fewest heads of several groups of three are six. Groups that are
    no power of two are drawn twice as often there, since code for packed heads depends on that.
    """
    most, most_grouped = (each if can.heads_max is None else min(each, can.heads_max) for each in (most, most_grouped))
    return _heads(can.groups or _GROUPS, most, most_grouped)


@functools.cache
def _heads(of_kernel: tuple[int, ...], most: int, most_grouped: int) -> st.SearchStrategy[tuple[int, int]]:
    groups = [g for g in of_kernel if g <= most] or [min(of_kernel)]
    most = max(most, groups[0])
    pairs = sorted((g * kv, kv) for g in groups for kv in range(1, most // g + 1))
    grouped = sorted((g * kv, kv) for g in of_kernel if g > 1 for kv in range(1, max(most, most_grouped) // g + 1))
    grouped = [pair for pair in grouped for _ in range(2 if _odd(pair[0] // pair[1]) else 1)]
    kinds = (
        [pair for pair in pairs if pair[0] == pair[1]],
        [pair for pair in grouped if pair[1] == 1],
        [pair for pair in grouped if pair[1] > 1],
    )
    return st.one_of([st.sampled_from(kind) for kind in kinds if kind])


def _odd(groups: int) -> bool:
    """Whether a number of groups is no power of two."""
    return groups & (groups - 1) != 0


def scales(can: Capabilities, pattern: Pattern = "normal") -> st.SearchStrategy[float | None]:
    """Return a strategy of softmax_scale: often the default, then 1, small and odd ones; negative and 0 where supported.
    Always the default where the kernel takes no other.

    For large products it is always so small that their scores are plain.
    """
    if not can.scale_given:
        return _DEFAULT_SCALE
    if pattern == "large_products":
        return _TINY_SCALES
    return _ANY_SCALES if can.scale_any else _SCALES
