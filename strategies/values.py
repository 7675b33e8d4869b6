"""Recipes: patterns of values, magnitudes and seeds."""

from __future__ import annotations

from hypothesis import strategies as st

from attnfuzz.kernels.problem import Dtype
from attnfuzz.strategies.case import PATTERNS, Recipe

__all__ = ["recipes"]

_SEEDS = st.integers(0, 2**16 - 1)
# "normal" thrice: the plain case is the sharpest probe of most bugs, and the simplest.
_PATTERNS = st.sampled_from(("normal", "normal", "normal", *PATTERNS, "negative"))
_MODERATE = st.sampled_from((1.0, 1.0, 1.0, 1.0, 0.25, 0.5, 2.0, 4.0))
_LARGE = st.sampled_from((1.0, 1.0, 1.0, 0.0625, 4.0, 16.0))
_GRADIENT = st.sampled_from((1.0, 1.0, 1.0, 0.00390625, 0.25, 4.0, 16.0))


def recipes(dtype: Dtype) -> st.SearchStrategy[Recipe]:
    """Recipes for `dtype`, the plainest first; magnitudes stay where scores and gradients fit the dtype."""
    gradient = _GRADIENT if dtype != "float16" else _MODERATE
    return st.builds(
        Recipe, pattern=_PATTERNS, q_scale=_MODERATE, k_scale=_MODERATE, v_scale=_LARGE, do_scale=gradient, seed=_SEEDS
    )
