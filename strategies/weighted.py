"""A choice between strategies in proportion to weights."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import strategies as st

__all__ = ["weighted"]

_T = TypeVar("_T")


def weighted(*choices: tuple[int, st.SearchStrategy[_T]]) -> st.SearchStrategy[_T]:
    """Return a strategy of `choices` in proportion to their weights, the first the simplest.

    st.one_of flattens nested branches, so that a choice with many branches would be drawn more often.
    """
    strategies = [strategy for weight, strategy in choices for _ in range(weight)]
    return st.integers(0, len(strategies) - 1).flatmap(strategies.__getitem__)
