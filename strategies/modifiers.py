"""Modifiers: softcap, window, score_mod and mask_mod, by name and at random; they shrink to none at all.

Random score_mods are smooth in the score, since no budget spans a jump; they cap what they exponentiate, and index within bounds
by construction: b, h, q_idx, kv_idx and their offset are the only ones. Random masks hide rows, tiles, prefixes, or everything.
"""

from __future__ import annotations

from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from attnfuzz.kernels.contract import Capabilities
from attnfuzz.kernels.expressions import (
    KV,
    SEQLEN_K,
    B,
    Captured,
    Expression,
    H,
    Q,
    S,
    both,
    captured,
    const,
    either,
    exp,
    load,
    negated,
    sigmoid,
    tanh,
    to_data,
    to_float,
    truth,
    where,
    whole,
)  # fmt: skip
from attnfuzz.kernels.modifiers import (
    MASKS,
    SCORES,
    alibi,
    bias,
    causal,
    causal_top_left,
    dilated,
    documents,
    prefix,
    relative_bias,
    sliding_window,
    softcap,
)  # fmt: skip

__all__ = ["Chosen", "chosen", "masks", "modifiers", "pooled", "scores"]

Chosen = tuple[tuple[str, Any], ...]
"""What of a Problem is set: ("score_mod", data), ("softcap", 20.0) and so on; empty for none."""
_EDGES = (1, 2, 3, 7, 8, 16, 31, 32, 33, 64, 65, 128)
_FACTORS = (0.5, 2.0, -1.0, 0.25, 1.5, -0.5, 0.125)
_CAPS = (20.0, 50.0, 5.0, 1.0)


def modifiers(can: Capabilities) -> st.SearchStrategy[Chosen]:
    """What to set of a Problem, within `can`; nothing first, and about a quarter of the time."""
    parts: dict[str, st.SearchStrategy[Any]] = {}
    if can.score_mod:
        parts["score_mod"] = st.none() | scores(can.captured, can.captured_gradients).map(to_data)
    if can.mask_mod:
        parts["mask_mod"] = st.none() | masks(can.captured).map(to_data)
    if can.softcap:
        parts["softcap"] = st.sampled_from((None, None, None, None, *_CAPS))
    if can.window:
        side = st.none() | st.sampled_from((0, *_EDGES))
        parts["window"] = st.sampled_from((None, None, None)) | st.tuples(side, side)
    return st.fixed_dictionaries(parts).map(chosen)


def chosen(values: dict[str, Any]) -> Chosen:
    """What differs from nothing."""
    return tuple((name, value) for name, value in values.items() if value not in (None, (None, None), ("score",)))


def pooled(can: Capabilities, count: int, seed: int) -> tuple[Chosen, ...]:
    """`count` of them by `seed`, nothing at all first: for devices where each is a compile of its own."""
    found: dict[Chosen, None] = {(): None}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=20 * count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @hypothesis.given(modifiers(can))
    def collect(each: Chosen) -> None:
        if len(found) < count:
            found.setdefault(each)

    collect()
    return tuple(found)


def _captured(gradients: bool) -> st.SearchStrategy[Expression]:
    """A load of float32: of each head, key, query, batch, offset, or of all."""
    grad = st.booleans() if gradients else st.just(False)
    forms: tuple[tuple[str, tuple[str, ...], tuple[Expression, ...]], ...] = (
        ("of_head", ("heads",), (H,)),
        ("of_key", ("seqlen_k",), (KV,)),
        ("of_query", ("batch", "seqlen_q"), (B, Q)),
        ("of_offset", ("offsets",), (Q - KV + SEQLEN_K - 1,)),
        ("of_all", ("batch", "heads", "seqlen_q", "seqlen_k"), (B, H, Q, KV)),
    )

    def made(form: tuple[str, tuple[str, ...], tuple[Expression, ...]], gradient: bool) -> Expression:
        name, sizes, index = form
        # One name, one tensor: those with and without a gradient are two.
        return load(Captured(name if gradient else f"{name}_fixed", sizes, "normal", gradient), *index)

    return st.builds(made, st.sampled_from(forms), grad)


def scores(reads: bool, gradients: bool) -> st.SearchStrategy[Expression]:
    """Score_mods, the plainest first; `reads`: they may read captured tensors, `gradients`: which may take one."""
    named = st.sampled_from([each for name, each in SCORES.items() if gradients or name in ("softcap", "scaled by distance")])
    given = (
        st.sampled_from(_CAPS).map(softcap),
        *((st.just(alibi(gradient=False)),) if reads else ()),
        *((st.booleans().map(lambda of: relative_bias(gradient=of)), st.just(bias(gradient=True))) if gradients else ()),
    )
    return st.one_of(st.sampled_from(_FACTORS).map(lambda factor: S * factor), named, *given, _random(reads, gradients))


def _random(reads: bool, gradients: bool) -> st.SearchStrategy[Expression]:
    number = st.sampled_from(_FACTORS).map(const)
    loads = (_captured(gradients),) if reads else ()
    distance = st.sampled_from((0.03125, -0.03125, 0.5)).map(lambda by: to_float(Q - KV) * by)
    flat = st.one_of(number, *loads, distance, st.just(to_float(H)))
    leaf = st.just(S) | flat.map(lambda x: S + x)

    def grown(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
        tame = st.one_of(
            st.builds(lambda x, c: tanh(x * (1.0 / c)) * c, inner, st.sampled_from(_CAPS)),
            inner.map(sigmoid),
            st.builds(lambda x, c: exp(tanh(x) * c), inner, st.sampled_from((0.5, 1.0, 2.0))),
        )
        return st.one_of(
            st.builds(lambda x, y: x * y, inner, number),
            st.builds(lambda x, y: x + y, inner, flat),
            tame,
            st.builds(lambda x, y: x + y, inner, inner),
            st.builds(lambda x, y: x - y, inner, tame),
            *(st.builds(lambda x, y: x * y, tame, each) for each in loads),
            st.builds(where, masks(reads, depth=1), inner, inner),
            inner.map(lambda x: -x),
        )

    return st.recursive(leaf, grown, max_leaves=5)


def masks(reads: bool, depth: int = 3) -> st.SearchStrategy[Expression]:
    """Mask_mods, the plainest first; `reads`: they may read captured tensors."""
    edge = st.sampled_from(_EDGES)
    comparison = st.builds(
        lambda left, op, right: getattr(left, op)(right),
        st.sampled_from((KV, Q, Q - KV, KV + H, Q + B)),
        st.sampled_from(("__le__", "__lt__", "__ge__", "__gt__")),
        st.one_of(edge.map(whole), st.sampled_from((KV, Q, H, SEQLEN_K - 1))),
    )
    of_numbers = load(Captured("levels", ("heads", "seqlen_k"), "numbers"), H, KV)
    leaf = st.one_of(
        st.sampled_from((causal(), causal_top_left())),
        comparison,
        edge.map(sliding_window),
        st.sampled_from((1, 2, 3, 5)).map(dilated),
        *((st.sampled_from((prefix(), documents(), of_numbers >= 2)),) if reads else ()),
        st.builds(lambda n, at: ((KV + H) % n).differs(at % n), st.sampled_from((2, 3, 16)), st.integers(0, 3)),
        st.sampled_from((truth(True), truth(False))),
    )
    if depth <= 1:
        return leaf
    pair = st.builds(lambda op, x, y: op(x, y), st.sampled_from((both, either)), masks(reads, depth - 1), masks(reads, depth - 1))
    named = [each for each in MASKS.values() if reads or not captured(each)]
    return st.one_of(leaf, st.sampled_from(named), pair, masks(reads, depth - 1).map(negated))
