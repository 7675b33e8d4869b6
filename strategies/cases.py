"""The strategy of Cases for one kernel: built within its capabilities, simplest first."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from attnfuzz.kernels.contract import Capabilities, Config, Device, Kernel, WindowForm, window_of
from attnfuzz.kernels.problem import Causal, Problem
from attnfuzz.strategies.case import DEFAULT_TILE, SINK_VALUES, Case
from attnfuzz.strategies.draw import draw_values
from attnfuzz.strategies.heads import heads
from attnfuzz.strategies.kernel_limits import Room, shapes_in_room, within_limits
from attnfuzz.strategies.layouts import layouts, of_pages
from attnfuzz.strategies.lengths import batches, blocks_in_room, corners, fits, parts_of_keys, whole_blocks
from attnfuzz.strategies.modifiers import Blocks, Chosen, modifiers, windows
from attnfuzz.strategies.recipes import recipes, scales
from attnfuzz.strategies.variants import Variant, all_variants, one_variant
from attnfuzz.strategies.weighted import weighted

__all__ = ["Limits", "cases", "cases_by_compile_key"]

_Pairs = tuple[tuple[int, int], ...]
_SPLIT_TILES = 3
"""Tiles of a Case whose keys are divided into parts, as a multiple of the limit: several blocks of keys take that many."""
_SEVERAL_TILES = 6
"""The same where two sequences, each of few queries, have such keys."""
_GROUPED_TILES = 2
"""Heads of grouped queries, as a multiple of the limit on tiles."""
_TILES_OF_HEAD = 2
"""Tiles for each head of grouped queries in half of the Cases whose limit is less: of one sequence, not one each of several."""
_SINK_VALUES = st.sampled_from(("moderate", "moderate", *SINK_VALUES))
_OF_LENGTHS = st.sampled_from((None, None, (0, 0), (0, 0), (0, 1), (0, -1), (1, -2)))
"""Which length limits a side of a window, 0 for the keys and 1 for the queries, and how many tokens more; None: neither does."""
_DECODING = 4
"""Queries up to which a batch is one of decoding."""
_FEW_QUERIES = st.sampled_from((1, 1, 2, 4))
_LIMITS = (0, 1, 2, 16, 100)
"""Limits of windows, in multiples of the least, whose compile keys are compared: code may be for 0, 1 or multiples of 16."""
_SPLITS, _SEVERAL = st.sampled_from((False, True, True, True)), st.sampled_from((False, False, True))
"""Whether a Case whose Config divides the keys has several parts of them, and whether these are two sequences of few queries."""
_BOOLEANS, _DLSE, _FEW_HEADS = st.booleans(), st.sampled_from((False, False, True)), st.sampled_from((2, 4, 4))
_SINKS, _SINKS_OF_FIRST = st.sampled_from((False, False, False, True)), st.booleans()
"""Few, as Cases with sinks are judged one by one; many of the variant whose code for sinks is compiled early."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the size of a drawn Case, from the cost of one trial on the device."""

    batch: int = 5
    heads: int = 6
    length: int = 200
    tiles: int = 16
    """Sum over heads and sequences of (query tiles x key tiles)."""
    scores: int | None = None
    """Scores of all these tiles, where fewer of a Config's tiles have as many: what a Case costs on a CPU. None: no limit."""
    grouped: int = 0
    """Heads that grouped queries may have where there are fewer tiles, at most two for each tile: several groups of three are six
    heads. Half of these Cases have two tiles for each head, whatever the limit on tiles."""

    def tiles_of(self, config: Config) -> int:
        """Return the limit on tiles for this Config, at least 1."""
        size = config.tile("tile_m", DEFAULT_TILE) * config.tile("tile_n", DEFAULT_TILE)
        return self.tiles if self.scores is None else min(self.tiles, max(1, self.scores // size))

    def room(self, variant: Variant, heads: int, tiles: int | None = None) -> Room:
        """Return the room for lengths with so many heads; `tiles` replaces the limit's own."""
        return Room(
            batch=self.batch,
            length=self.length,
            tiles=self.tiles_of(variant.config) if tiles is None else tiles,
            heads=heads,
            tile_m=variant.config.tile("tile_m", DEFAULT_TILE),
            tile_n=variant.config.tile("tile_n", DEFAULT_TILE),
        )


def cases(
    kernel: Kernel, *, device: Device, limits: Limits | None = None, variants: Sequence[Variant] | None = None
) -> st.SearchStrategy[Case]:
    """Return the strategy of Cases of `kernel` on `device`, within `variants` (default: all it declares) and `limits`.

    Raises:
        BadArgument: the kernel declares nothing that can be drawn.
    """
    chosen = tuple(variants) if variants is not None else all_variants(kernel, device)
    # A kernel may refuse what capabilities cannot express, for example a pair of lengths.
    strategy = _cases(_Parts(kernel, device, limits or Limits(), chosen))
    return strategy.filter(lambda case: kernel.supports(case.problem, case.config, device) is None)


def cases_by_compile_key(
    kernel: Kernel, *, device: Device, limits: Limits, variants: Sequence[Variant], seed: int, draws: int = 400
) -> dict[str, Case]:
    """Return the first Case of each compile key among `draws` Cases of `variants`; layouts and lengths may be part of a key."""
    first: dict[str, Case] = {}

    def keep(case: Case) -> None:
        first.setdefault(kernel.compile_key(case.problem, case.config), case)

    draw_values(cases(kernel, device=device, limits=limits, variants=variants), keep, seed=seed, examples=draws)
    return first


class _Parts:
    """The strategies of the parts of a kernel's Cases, each built once. Its repr is short, since Hypothesis writes it out."""

    def __init__(self, kernel: Kernel, device: Device, limits: Limits, variants: tuple[Variant, ...]) -> None:
        self.kernel, self.device, self.can, self.limits = kernel, device, kernel.capabilities, limits
        self.first = variants[0] if device in self.can.compiles_on else None
        """The variant that is compiled first; None: nothing is compiled."""
        self._problems: dict[int, Problem] = {}
        self._forms: dict[int, tuple[WindowForm, ...]] = {}
        blocky = () if self.can.shapes else _with_room(variants, limits)
        self.has_blocks = bool(blocky)
        self.variant = one_variant(variants)
        self.of_blocks = one_variant(blocky)
        # A diagonal leaves few blocks full.
        self.of_full_blocks = one_variant(tuple(each for each in blocky if each.causal is None) or blocky)
        self.packing = st.sampled_from(self.can.packings)
        self.page_size = st.sampled_from(self.can.page_sizes)
        self.most_heads = st.sampled_from((1, 2, limits.heads, limits.heads))

    def __repr__(self) -> str:
        return f"<{self.kernel.name}>"

    def may_have_sinks(self, variant: Variant) -> bool:
        """Whether Cases of this variant may have sinks.

        Where that is compiled, the first one's, and every other one's, which then has both codes.
        """
        return self.can.sinks and not (self.first is not None and variant != self.first and _number(variant) % 2)

    def problem(self, variant: Variant) -> Problem:
        """Return the smallest Problem of one of the variants."""
        # By identity: to hash a variant takes longer than to check its Problem. The strategies keep the variants.
        if id(variant) not in self._problems:
            self._problems[id(variant)] = variant.problem(self.can)
        return self._problems[id(variant)]

    def modifiers(self, variant: Variant, blocks: Blocks | None) -> st.SearchStrategy[Chosen]:
        """Return the strategy of a Case's modifiers: those of its variant, if it has its own, but for its window.

        Where the limits of a window are no part of the compile key, the same code serves all: they are drawn for each Case. Where
        the code for a causal mask serves them as well, half of the Cases of a variant without a window have one.
        """
        if variant.modifiers is None:
            return modifiers(self.can, blocks)
        if not (forms := self._forms_of(variant)):
            return st.just(variant.modifiers)
        return _with_window(variant.modifiers, windows(self.can, forms, blocks))

    def takes_any_window(self, variant: Variant) -> bool:
        """Whether a Case of this variant may have windows of any width."""
        return variant.modifiers is None or bool(self._forms_of(variant))

    def _forms_of(self, variant: Variant) -> tuple[WindowForm, ...]:
        """Return the forms of windows of any width for which the code of a variant with its own modifiers serves."""
        if id(variant) not in self._forms:
            own = dict(variant.modifiers or ())
            unlimited, alone = own.get("window") == (None, None), "mask_mod" in own and "window" not in own
            # A mask_mod and a window hide each other's edges.
            forms = () if unlimited or alone or not self.can.window else self.can.window_forms
            self._forms[id(variant)] = tuple(form for form in forms if self._serves(variant, form))
        return self._forms[id(variant)]

    def _serves(self, variant: Variant, form: WindowForm) -> bool:
        problem, config, step = self.problem(variant), variant.config, self.can.window_multiple
        others = [replace(problem, window=window_of(form, n * step, n * step)) for n in _LIMITS]
        # A kernel may refuse a window beside a mask, and is asked for keys of what it takes only.
        if any(self.kernel.supports(each, config, self.device) is not None for each in others):
            return False
        return len({self.kernel.compile_key(each, config) for each in (problem, *others)}) == 1


def _with_window(own: Chosen, limited: st.SearchStrategy[tuple[int | None, int | None]]) -> st.SearchStrategy[Chosen]:
    """Return the strategy of a variant's modifiers with windows; without any, half of the time, if it has none."""
    rest, has_one = tuple(pair for pair in own if pair[0] != "window"), "window" in dict(own)
    changed = limited.map(lambda window: (*rest, ("window", window)))
    return changed if has_one else weighted((1, st.just(own)), (1, changed))


def _side_of_length(causal: Causal | None, window: tuple[int | None, int | None]) -> int | None:
    """Return the side of a window (0: left, 1: right) that hides something where it is as long as the keys, or longer.

    That takes more queries than keys, and to the left a diagonal from the top left: from the bottom right, the last query sees
    the first key by a side of n_k - 1. Under a causal mask the right side hides nothing.
    """
    side = {"top_left": 0, None: 1}.get(causal)
    return side if side is not None and window[side] is not None else None


def _with_more_queries(pairs: _Pairs, can: Capabilities, room: Room) -> _Pairs:
    """Give every sequence that has both more queries than keys; not those of decoding.

    Where keys are more, their numbers are exchanged if there is room; else, or where both are equal, half of the keys are left.
    """
    if not can.unequal or max(n_q for n_q, _ in pairs) <= _DECODING:
        return pairs
    exchanged = [(max(pair), min(pair)) if 0 not in pair else pair for pair in pairs]
    fewer = [(n_q, n_k if n_q > n_k else max(1, n_q // 2)) if n_q and n_k else (n_q, n_k) for n_q, n_k in pairs]
    halved = [(n_q, n_k // 2) if n_q == n_k > 1 else (n_q, n_k) for n_q, n_k in exchanged]
    return within_limits(halved if fits(within_limits(halved, can, room), room) else fewer, can, room)


def _with_length(window: tuple[int | None, int | None], side: int, length: int, can: Capabilities) -> tuple[int | None, ...]:
    """Limit a side of a window by a length, or by the next multiple that a kernel takes; both sides where they must be equal."""
    limit = -(-max(0, length) // can.window_multiple) * can.window_multiple
    alike = can.window_forms == ("equal",)
    return tuple(limit if number == side or alike else old for number, old in enumerate(window))


def _window_of_lengths(
    draw: st.DrawFn, can: Capabilities, room: Room, pairs: _Pairs, changed: Chosen, causal: Causal | None, *, fixed: bool
) -> tuple[_Pairs, Chosen]:
    """Draw lengths and modifiers again in which a side of the window is about as long as the keys of a sequence, or as queries.

    `fixed`: the lengths are not to be exchanged.
    """
    window = dict(changed).get("window", (None, None))
    side = _side_of_length(causal, window)
    if side is None or (of := draw(_OF_LENGTHS)) is None:
        return pairs, changed
    pairs = pairs if fixed else _with_more_queries(pairs, can, room)
    # The sequence with most queries beyond its keys.
    n_q, n_k = max(((q, k) for q, k in pairs if k), key=lambda pair: pair[0] - pair[1], default=(0, 0))
    if n_q <= n_k:
        return pairs, changed
    limited = _with_length(window, side, (n_k, n_q)[of[0]] + of[1], can)
    return pairs, tuple((name, limited if name == "window" else value) for name, value in changed)


def _number(variant: Variant) -> int:
    """Return a number that is the same in every process."""
    return zlib.crc32(f"{variant.dtype} {variant.causal} {variant.dims} {variant.config.canonical()}".encode())


@functools.cache
def _slack(tile: int | None) -> st.SearchStrategy[int]:
    return st.just(0) if tile is None else st.sampled_from((0, 0, 0, 1, 3, tile))


@st.composite
def _cases(draw: st.DrawFn, parts: _Parts) -> Case:
    can = parts.can
    variants = parts.variant
    # A mask's block is often larger than a tile, and few Cases are long enough for one: half of them are drawn so.
    of_blocks = parts.has_blocks and draw(_BOOLEANS)
    if of_blocks:
        variants = parts.of_full_blocks if draw(_BOOLEANS) else parts.of_blocks
    variant = draw(variants)
    # Early: the last choices of a draw are the ones that Hypothesis leaves simplest most often.
    recipe = draw(recipes(variant.dtype, masked=variant.causal is not None))
    if recipe.pattern == "large_products" and not can.scale_given:
        recipe = replace(recipe, pattern="large_logits")
    packing = draw(parts.packing)
    laid_out: dict[str, Any] = draw(layouts(can, packing, variant.dtype))
    page_size = draw(parts.page_size) if len(can.page_sizes) > 1 else can.page_sizes[0]
    if page_size:
        laid_out = of_pages(laid_out)
    packed = "layout_q" in laid_out and laid_out["layout_q"].packed
    if packed and can.shapes and not any(n_q == n_k for *_, n_q, n_k in can.shapes):
        laid_out, packed = {}, False
    splits = not of_blocks and not can.shapes and variant.config.tile("split") > 1 and "block" in variant.config
    split = splits and draw(_SPLITS)
    room, kv_heads, pairs = draw(
        _heads_and_lengths(parts, variant, dense=packing == "dense", packed=packed, of_blocks=of_blocks, split=split)
    )
    if page_size and can.unequal and not can.shapes and draw(_BOOLEANS):
        # Decoding: one or few queries against long keys.
        few = draw(_FEW_QUERIES)
        pairs = within_limits([(min(n_q, few), n_k) for n_q, n_k in pairs], can, room)
    blocks = _blocks(variant, pairs[0]) if of_blocks or split else None
    changed = draw(parts.modifiers(variant, blocks))
    if blocks is None and parts.takes_any_window(variant):
        fixed = packed or bool(can.shapes)
        pairs, changed = _window_of_lengths(draw, can, room, pairs, changed, variant.causal, fixed=fixed)
    dlse = draw(_DLSE) if can.dlse else False
    sinks = parts.may_have_sinks(variant) and draw(_SINKS_OF_FIRST if variant == parts.first else _SINKS)
    if sinks:
        recipe = replace(recipe, sinks=draw(_SINK_VALUES))
    slack = _slack(room.tile_m if can.slack else None)
    slack_q = draw(slack)
    smallest = parts.problem(variant)
    problem = replace(
        smallest,
        seqlens_q=tuple(pair[0] for pair in pairs),
        seqlens_k=tuple(pair[1] for pair in pairs),
        packing=packing,
        heads=room.heads,
        kv_heads=kv_heads,
        softmax_scale=draw(scales(can, recipe.pattern)),
        sinks=sinks,
        slack_q=slack_q,
        slack_k=slack_q if packed else 0 if page_size else draw(slack),
        page_size=page_size,
        needs=replace(smallest.needs, dlse=True) if dlse else smallest.needs,
        **laid_out,
        **dict(changed),
    )
    return Case(kernel=parts.kernel.name, problem=problem, recipe=recipe, config=variant.config)


@st.composite
def _heads_and_lengths(
    draw: st.DrawFn, parts: _Parts, variant: Variant, *, dense: bool, packed: bool, of_blocks: bool, split: bool
) -> tuple[Room, int, _Pairs]:
    """Draw the room for lengths, which has the heads, the key/value heads, and the lengths of each sequence."""
    can, limits = parts.can, parts.limits
    tiles = limits.tiles_of(variant.config) if not of_blocks else limits.tiles
    if can.shapes:
        batch, heads_q, kv_heads, n_q, n_k = draw(shapes_in_room(can.shapes, limits.room(variant, 1, tiles), packed=packed))
        return limits.room(variant, heads_q, tiles), kv_heads, ((n_q, n_k),) * batch
    several = split and can.unequal and not packed and limits.batch > 1 and draw(_SEVERAL)
    # Few heads leave room for several blocks of each.
    most = 2 if several else draw(_FEW_HEADS if of_blocks or split else parts.most_heads)
    grouped = min(limits.grouped, limits.heads, _GROUPED_TILES * tiles) if most == limits.heads else 0
    heads_q, kv_heads = draw(heads(can, min(most, limits.heads, tiles), grouped))
    room = limits.room(variant, heads_q, tiles * (_SEVERAL_TILES if several else _SPLIT_TILES if split else 1))
    if several:
        pairs = draw(parts_of_keys(room, variant.config.integer("block"), dense=dense))
    elif of_blocks or split:
        block, of_keys = variant.config.integer("block"), 2 if split else 1
        pairs = draw(whole_blocks(can, room, block, of_keys=of_keys, dense=dense, packed=packed))
    else:
        wanted = _TILES_OF_HEAD * heads_q
        of_one = limits.grouped > 0 and heads_q > kv_heads and room.tiles < wanted and draw(_BOOLEANS)
        if of_one:
            room = dataclasses.replace(room, batch=1, tiles=wanted)
        masked = of_one and variant.causal is not None
        pairs = draw(corners(can, room, packed=packed) if masked else batches(can, room, dense=dense, packed=packed))
    return room, kv_heads, within_limits(pairs, can, room, packed=packed)


def _blocks(variant: Variant, lengths: tuple[int, int]) -> Blocks:
    """Return the mask's blocks for a sequence of so many queries and keys."""
    n_q, n_k = lengths
    return Blocks(variant.config.integer("block"), n_q, n_k, 0 if variant.causal == "top_left" else n_k - n_q)


def _with_room(variants: tuple[Variant, ...], limits: Limits) -> tuple[Variant, ...]:
    """Return the variants whose mask blocks are so small that Cases with several are cheap."""
    blocks = ((each, each.config.tile("block", 0)) for each in variants)
    return tuple(each for each, block in blocks if block and blocks_in_room(limits.room(each, 1, limits.tiles), block))
