"""Expression trees of score_mod and mask_mod: build, check, differentiate, evaluate, trace. Public are the names below."""

from attnfuzz.kernels.expressions.named import (
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
)
from attnfuzz.kernels.expressions.tracing import traced
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
    const,
    exp,
    load,
    maximum,
    minimum,
    sigmoid,
    tanh,
    to_data,
    to_float,
    where,
)

__all__ = [
    "KV", "SEQLEN_K", "SEQLEN_Q", "B", "Captured", "Expression", "H", "Q", "S", "absolute", "alibi", "bias", "causal",
    "causal_top_left", "const", "dilated", "documents", "exp", "load", "maximum", "minimum", "prefix", "relative_bias", "sigmoid",
    "sliding_window", "softcap", "tanh", "to_data", "to_float", "traced", "where",
]  # fmt: skip
