"""Query and key/value heads, and groups of them."""

from __future__ import annotations

import functools

from hypothesis import strategies as st

from attnfuzz.kernels.contract import Capabilities

__all__ = ["heads"]

_GROUPS = (1, 2, 3, 4, 5, 6, 7, 8)


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
