"""Schedules of warp roles: the choices that a Case with the check protocol has."""

from __future__ import annotations

from hypothesis import strategies as st

__all__ = ["SCHEDULES"]

_MOST_CHOICES = 96
"""A block of four tiles has up to 160 points at which several things may happen."""
_LARGEST_CHOICE = 5


def _without_last_zeros(choices: list[int]) -> tuple[int, ...]:
    """Return equal schedules as equal tuples: behind its end a schedule takes the first choice."""
    while choices and not choices[-1]:
        choices = choices[:-1]
    return tuple(choices)


@st.composite
def _schedules(draw: st.DrawFn) -> tuple[int, ...]:
    length = draw(st.integers(0, _MOST_CHOICES))
    return _without_last_zeros(draw(st.lists(st.integers(0, _LARGEST_CHOICE), min_size=length, max_size=length)))


SCHEDULES = _schedules()
"""Short ones first; choices count modulo the options that there are."""
