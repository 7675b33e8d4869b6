"""Masks and score changes that models use, by name, each a tree."""

from __future__ import annotations

from attnfuzz.kernels.expressions.tree import (  # fmt: skip
    KV,
    SEQLEN_K,
    SEQLEN_Q,
    B,
    Captured,
    Expression,
    H,
    Q,
    S,
    absolute,
    load,
    tanh,
    to_float,
    where,
)

__all__ = [
    "MASKS", "SCORES", "alibi", "bias", "causal", "causal_top_left", "dilated", "documents", "prefix", "relative_bias",
    "sliding_window", "softcap",
]  # fmt: skip

_DIAGONAL = Q + SEQLEN_K - SEQLEN_Q


def causal() -> Expression:
    """The keys up to the diagonal that ends in the last query and the last key."""
    return KV <= _DIAGONAL


def causal_top_left() -> Expression:
    """The keys up to the query's own number."""
    return KV <= Q


def sliding_window(width: int) -> Expression:
    """Causal, the last `width` keys."""
    return causal() & (width > _DIAGONAL - KV)


def prefix(name: str = "prefix") -> Expression:
    """Prefix LM: causal, and every query sees its sequence's prefix, whose length is a captured number."""
    return causal() | (load(Captured(name, ("batch",), "lengths"), B) > KV)


def documents(name: str = "documents") -> Expression:
    """Tokens of one document see each other: ids of queries and keys are captured."""
    of_q = Captured(f"{name}_q", ("batch", "seqlen_q"), "documents_q")
    of_k = Captured(f"{name}_k", ("batch", "seqlen_k"), "documents_k")
    return load(of_q, B, Q).equals(load(of_k, B, KV))


def dilated(step: int) -> Expression:
    """Every `step`-th key, of the same remainder as the query."""
    return (Q % step).equals(KV % step)


def alibi(name: str = "slopes", *, gradient: bool = False) -> Expression:
    """ALiBi (Press et al., 2022): a captured slope of each head times the distance to the key."""
    slope = load(Captured(name, ("heads",), "slopes", gradient), H)
    return S - slope * to_float(absolute(_DIAGONAL - KV))


def relative_bias(name: str = "relative", *, gradient: bool = True) -> Expression:
    """A captured bias of each head and offset between query and key."""
    return S + load(Captured(name, ("heads", "offsets"), "normal", gradient), H, Q - KV + SEQLEN_K - 1)


def bias(name: str = "bias", *, gradient: bool = True) -> Expression:
    """A captured bias of each head, query and key."""
    return S + load(Captured(name, ("heads", "seqlen_q", "seqlen_k"), "normal", gradient), H, Q, KV)


def softcap(cap: float) -> Expression:
    """cap tanh(score / cap), as in Gemma 2."""
    return tanh(S * (1.0 / cap)) * cap


MASKS: dict[str, Expression] = {
    "causal": causal(),
    "causal_top_left": causal_top_left(),
    "sliding_window": sliding_window(64),
    "prefix": prefix(),
    "documents": documents(),
    "dilated": dilated(2),
    "documents and causal": documents() & causal(),
    "sliding_window or prefix": sliding_window(16) | prefix(),
}
SCORES: dict[str, Expression] = {
    "softcap": softcap(20.0),
    "alibi": alibi(),
    "relative_bias": relative_bias(),
    "bias": bias(),
    "scaled by distance": where(Q >= KV, S, S * 0.5),
}
