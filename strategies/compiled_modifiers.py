"""Modifiers for devices where each is a compile: few that differ most, and what a choice of them has."""

from __future__ import annotations

from collections import Counter
from typing import Any

from attnfuzz.kernels.contract import Capabilities
from attnfuzz.kernels.expressions.derivative import by_score
from attnfuzz.kernels.expressions.tree import KV, captured, const, parse, to_data, whole
from attnfuzz.strategies.draw import draw_values
from attnfuzz.strategies.modifiers import HIDING, HIDING_TILES, Blocks, Chosen, modifiers

__all__ = ["hides_first_keys", "hiding_tile", "kinds_of", "pooled"]


def pooled(can: Capabilities, count: int, seed: int, block: int = 0) -> tuple[Chosen, ...]:
    """Choose `count` of four times as many that are drawn by `seed`, none first: for devices where each needs its own compile.

    Every other one is the next that was drawn, the others those whose kinds (`kinds_of`) the ones before have least. With `block`
    they are for masks in blocks of so many queries and keys, of sequences with two by two of them.
    """
    offered: dict[Chosen, None] = {(): None}

    def collect(chosen: Chosen) -> bool:
        offered.setdefault(chosen)
        return len(offered) > 4 * count

    blocks = Blocks(block, 2 * block, 2 * block, 0) if block else None
    draw_values(modifiers(can, blocks), collect, seed=seed, examples=20 * count)
    all_kinds = {each: kinds_of(each) for each in offered}
    left, met, pool = list(offered)[1:], Counter[object](), list[Chosen](((),))
    while left and len(pool) < count:
        rare = max(left, key=lambda each: sum(1 / (1 + met[kind]) for kind in all_kinds[each]) / len(all_kinds[each]))
        best = rare if len(pool) % 2 else left[0]
        left.remove(best)
        pool.append(best)
        met.update(all_kinds[best])
    return tuple(pool)


def kinds_of(chosen: Chosen) -> list[object]:
    """Return what a choice of modifiers has: fields, what these read, one alone, limited sides of a window, hidden first keys,
    gradients of captured tensors.
    """
    kinds: list[object] = [name for name, _ in chosen]
    if len(chosen) == 1:
        kinds.append(("alone", chosen[0][0]))
    for name, value in chosen:
        if name == "window":
            kinds += [(side, None if width is None else width > 0) for side, width in zip(("left", "right"), value, strict=True)]
        elif name in ("score_mod", "mask_mod"):
            kinds += [(name, read) for read in _reads(value)]
        if name == "score_mod":
            kinds += _gradients(value)
            kinds += ["first keys"] * (_first_keys(value, HIDING_TILES[:1]) > 0)
    return kinds


def _gradients(score_mod: Any) -> tuple[str, ...]:
    """Return whether captured tensors have gradients, and whether these depend on the slope: one of 1 hides what it is for."""
    tree = parse(score_mod)
    if not any(each.gradient for each in captured(tree)):
        return ()
    return ("gradient",) if by_score(tree) == const(1.0) else ("gradient", "gradient under a slope")


def _reads(data: Any) -> tuple[str, ...]:
    """Return what a score's modifier depends on, of its sequence, its head and captured tensors."""
    ops = {each.op for each in parse(data).walk()}
    return tuple(each for each in ("b", "h", "load") if each in ops)


def hides_first_keys(chosen: Chosen) -> bool:
    """Whether a choice of modifiers hides the first keys by an added number."""
    return any(name == "score_mod" and _first_keys(value) > 0 for name, value in chosen)


def hiding_tile(chosen: Chosen, tile: int) -> Chosen:
    """Return the modifiers: first keys that an added number hides become a tile of so many keys, or one more."""
    return tuple((name, _of_tile(value, tile) if name == "score_mod" else value) for name, value in chosen)


def _of_tile(score_mod: Any, tile: int) -> Any:
    if not (hidden := _first_keys(score_mod)):
        return score_mod
    return (score_mod[0], to_data(whole(tile + hidden % 2) <= KV), *score_mod[2:])


def _first_keys(score_mod: Any, numbers: tuple[float, ...] = HIDING) -> int:
    """Return how many first keys a score_mod hides by adding one of `numbers`; 0: it does not."""
    match score_mod:
        case ("where", ("le", ("int", int(first)), ("kv_idx",)), ("score",), ("add", ("score",), ("const", number))):
            return first if number in numbers else 0
    return 0
