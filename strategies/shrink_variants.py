"""Steps of shrinking that move a Case to a simpler variant: dtype, mask, dims, modifiers, Config."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.expressions.tree import parse
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import DEFAULT_TILE, Case
from attnfuzz.strategies.modifiers import Chosen, chosen
from attnfuzz.strategies.shrink_sizes import with_changes
from attnfuzz.strategies.variants import Variant

__all__ = ["simpler_variants", "smaller_tiles"]

_KEY_PARTS = ("dtype", "causal", "dims", "config")
_VARIANT_PARTS = (*_KEY_PARTS, "modifiers")
_LEAST_TILE = 16
"""Smaller numbers of a Config are no tiles: stages, warps, parts."""
_FEW_TILES = 2
"""Tiles of tokens, over all sequences, that a minimal Case may have without a look at Configs with smaller ones."""


def simpler_variants(case: Case, variants: Sequence[Variant]) -> Iterator[Case]:
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


def smaller_tiles(case: Case, variants: Sequence[Variant], multiples: tuple[int, int]) -> Iterator[Case]:
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
