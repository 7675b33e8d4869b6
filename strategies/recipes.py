"""Recipes: patterns of values, magnitudes and seeds; and the scales that fit a pattern."""

from __future__ import annotations

import functools

from hypothesis import strategies as st

from attnfuzz.kernels.contract import Capabilities
from attnfuzz.kernels.problem import Dtype
from attnfuzz.strategies.case import PATTERNS, Pattern, Recipe

__all__ = ["recipes", "scales"]

_SEEDS = st.integers(0, 2**16 - 1)
# The plain case finds most bugs, and is the simplest. Scores far below 0 found many.
_WEIGHTS: dict[Pattern, int] = {"normal": 14, "negative": 3, "below_sentinels": 6, "large_products": 4}
# In float16 dS often overflows with these two, so that dQ and dK are not judged.
_WEIGHTS_HALF: dict[Pattern, int] = {**_WEIGHTS, "near_overflow": 1, "huge_logits": 1}
# A key that should be hidden, and is not or counts as a score of 0, shows most beside scores far below 0.
_WEIGHTS_MASKED: dict[Pattern, int] = {"negative": 8, "below_sentinels": 8}
_MODERATE = st.sampled_from((1.0, 1.0, 1.0, 1.0, 0.25, 0.5, 2.0, 4.0))
_LARGE = st.sampled_from((1.0, 1.0, 1.0, 0.0625, 4.0, 16.0))
_GRADIENT = st.sampled_from((1.0, 1.0, 1.0, 0.00390625, 0.25, 4.0, 16.0))
_PLAIN = st.just(1.0)
_POSITIVE = (None, None, None, 1.0, 0.25, 0.1, 0.0078125)
_SCALES: st.SearchStrategy[float | None] = st.sampled_from(_POSITIVE)
_TINY_SCALES: st.SearchStrategy[float | None] = st.sampled_from((2.0**-16, 1e-5, 2.0**-18))
_DEFAULT_SCALE: st.SearchStrategy[float | None] = st.none()
_ANY_SCALES: st.SearchStrategy[float | None] = st.sampled_from((*_POSITIVE, -0.125, 0.0))


@functools.cache
def recipes(dtype: Dtype, *, masked: bool = False) -> st.SearchStrategy[Recipe]:
    """Return the strategy of Recipes for `dtype`, simplest first, with magnitudes for which scores and gradients fit it.

    `masked`: for Cases with a causal mask.
    """
    return _recipes(dtype, masked)


@st.composite
def _recipes(draw: st.DrawFn, dtype: Dtype, masked: bool) -> Recipe:
    half = dtype == "float16"
    pattern = draw(_patterns(half, masked))
    # A larger scale would clamp all of V to the dtype's largest number.
    at_the_limit = half and pattern == "near_overflow"
    products = _PLAIN if pattern in ("below_sentinels", "large_products") else _MODERATE
    return Recipe(
        pattern=pattern,
        q_scale=draw(products),
        k_scale=draw(products),
        v_scale=draw(_PLAIN if at_the_limit else _LARGE),
        do_scale=draw(_PLAIN if at_the_limit else _MODERATE if half else _GRADIENT),
        seed=draw(_SEEDS),
    )


@functools.cache
def _patterns(half: bool, masked: bool) -> st.SearchStrategy[Pattern]:
    weights = (_WEIGHTS_HALF if half else _WEIGHTS) | (_WEIGHTS_MASKED if masked else {})
    return st.sampled_from([each for each in PATTERNS for _ in range(weights.get(each, 2))])


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
