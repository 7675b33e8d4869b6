"""The strategy of whole Cases for one kernel: by construction within its capabilities, simplest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from attnfuzz.kernels.contract import Capabilities, Device, Kernel
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.layouts import layouts
from attnfuzz.strategies.lengths import Room, batches, long_enough
from attnfuzz.strategies.modifiers import modifiers
from attnfuzz.strategies.shapes import Variant, all_variants, drawn_variant, heads, scales
from attnfuzz.strategies.values import recipes

__all__ = ["Limits", "cases"]

_DEFAULT_TILE = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a drawn Case may be: what one trial may cost on the device at hand."""

    batch: int = 5
    heads: int = 6
    length: int = 200
    tiles: int = 16
    """Sum over heads and sequences of (query tiles x key tiles)."""

    def room(self, variant: Variant, heads: int, tiles: int | None = None) -> Room:
        """What is left for lengths with so many heads; `tiles`: in place of the limit's own."""
        return Room(
            batch=self.batch,
            length=self.length,
            tiles=self.tiles if tiles is None else tiles,
            heads=heads,
            tile_m=variant.config.tile("tile_m", _DEFAULT_TILE),
            tile_n=variant.config.tile("tile_n", _DEFAULT_TILE),
        )


def cases(
    kernel: Kernel, *, device: Device, limits: Limits | None = None, variants: Sequence[Variant] | None = None
) -> st.SearchStrategy[Case]:
    """Cases of `kernel` on `device`, drawn from `variants` (default: all it declares), no larger than `limits`.

    Raises:
        BadArgument: the kernel declares nothing that could be drawn.
    """
    chosen = tuple(variants) if variants is not None else all_variants(kernel, device)
    # A kernel may refuse what its capabilities cannot say: two lengths together, for one.
    drawn = _cases(kernel.name, kernel.capabilities, limits or Limits(), chosen)
    return drawn.filter(lambda case: kernel.supports(case.problem, case.config, device) is None)


@st.composite
def _cases(draw: st.DrawFn, name: str, can: Capabilities, limits: Limits, variants: tuple[Variant, ...]) -> Case:
    variant = draw(drawn_variant(variants))
    # Early: the last choices of a draw are the ones that Hypothesis leaves simplest most often.
    recipe = draw(recipes(variant.dtype))
    packing = draw(st.sampled_from(can.packings))
    laid_out: dict[str, Any] = draw(layouts(can, packing, variant.dtype))
    packed = "layout_q" in laid_out and laid_out["layout_q"].packed
    most = draw(st.sampled_from((1, 2, limits.heads, limits.heads)))
    heads_q, kv_heads = draw(heads(can, min(most, limits.heads, limits.tiles)))
    room = limits.room(variant, heads_q)
    pairs = draw(batches(replace(can, unequal=can.unequal and not packed), room, dense=packing == "dense"))
    pairs = long_enough(pairs, can)
    changed = draw(modifiers(can)) if variant.modifiers is None else variant.modifiers
    dlse = draw(st.sampled_from((False, False, True))) if can.dlse else False
    slack = st.sampled_from((0, 0, 0, 1, 3, room.tile_m)) if can.slack else st.just(0)
    slack_q = draw(slack)
    problem = replace(
        variant.problem(can),
        seqlens_q=tuple(pair[0] for pair in pairs),
        seqlens_k=tuple(pair[1] for pair in pairs),
        packing=packing,
        heads=heads_q,
        kv_heads=kv_heads,
        softmax_scale=draw(scales(can)),
        slack_q=slack_q,
        slack_k=slack_q if packed else draw(slack),
        **laid_out,
        **dict(changed),
    )
    if dlse:
        problem = replace(problem, needs=replace(problem.needs, dlse=True))
    return Case(kernel=name, problem=problem, recipe=recipe, config=variant.config)
