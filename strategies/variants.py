"""Variants: dtype, mask, dims, Config and modifiers of a Case, on which compiled code usually depends."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from hypothesis import strategies as st

from attnfuzz.kernels.contract import Capabilities, Config, Device, Kernel, shape_fields
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Causal, Dtype, Needs, Problem
from attnfuzz.strategies.case import DEFAULT_TILE
from attnfuzz.strategies.compiled_modifiers import hides_first_keys, hiding_tile, pooled
from attnfuzz.strategies.modifiers import Chosen

__all__ = [
    "MODIFIED",
    "WIDE",
    "Variant",
    "all_variants",
    "modified",
    "one_variant",
    "other_dims",
    "scores_of_tile",
    "uneven",
    "wide",
]

_DTYPE_ORDER: tuple[Dtype, ...] = ("float16", "bfloat16", "float32")
_CAUSAL_ORDER: tuple[Causal | None, ...] = (None, "bottom_right", "top_left")
MODIFIED = 40
"""Least number of modified variants that a kernel with score_mods is compiled for."""
WIDE = 128
"""Most columns that kernels often take at once."""
_PARTS = ("dtype", "causal", "dims", "config", "modifiers")
_CONFIG_FIRST = ("config", *(part for part in _PARTS if part != "config"))
_BOOLEANS = st.booleans()
_POWERS = (16, 32, 64, 128, 256)
_ATTEMPTS = 40
"""Draws for each variant of other dims: few are of two rare kinds at once."""
_VECTOR = 8
"""Elements of half precision in 16 bytes, which code loads and stores at once."""


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
    lacking = {of for of, possible in ((uneven, can.dim_multiple % _VECTOR), (wide, can.dim_max > WIDE)) if possible}
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


def uneven(variant: Variant) -> bool:
    """Whether 16 bytes divide the rows of neither K nor V in half precision."""
    return all(dim % _VECTOR for dim in variant.dims)


def wide(variant: Variant) -> bool:
    """Whether kernels often take the rows of V by parts."""
    return variant.dims[1] > WIDE


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
            around = tuple(sorted(around, key=scores_of_tile))
        offered = (replace(each, modifiers=hiding_tile(chosen, each.config.tile("tile_n", DEFAULT_TILE))) for each in around)
        taken = (each for each in offered if kernel.supports(each.problem(can), each.config, device) is None)
        compiled += islice((each for each in taken if each not in compiled), 1)
    with_modifiers = {replace(each, modifiers=None) for each in compiled}
    return (*compiled, *(replace(each, modifiers=()) for each in variants if each not in with_modifiers))


def _block(variant: Variant) -> int:
    return variant.config.tile("block", 0)


def scores_of_tile(variant: Variant) -> int:
    """Return the scores of a tile."""
    return variant.config.tile("tile_m", DEFAULT_TILE) * variant.config.tile("tile_n", DEFAULT_TILE)


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
