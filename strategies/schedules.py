"""Schedules of warp roles: the choices that a Case with the check protocol has."""

from __future__ import annotations

from hypothesis import strategies as st

__all__ = ["SCHEDULES"]

_MOST_CHOICES = 96
"""A block of four tiles has up to 160 points at which several things may happen."""
_LARGEST_CHOICE = 5
_MOST_ROLES = 6
"""Of a block, that are held back; numbers count modulo the roles that there are."""


def _without_last_zeros(choices: list[int]) -> tuple[int, ...]:
    """Return equal schedules as equal tuples: behind its end a schedule takes the first choice."""
    while choices and not choices[-1]:
        choices = choices[:-1]
    return tuple(choices)


@st.composite
def _schedules(draw: st.DrawFn) -> tuple[int, ...]:
    # Choices alone hardly ever hold one role back for long.
    held = draw(st.integers(-_MOST_ROLES, _MOST_ROLES))
    length = draw(st.integers(0, _MOST_CHOICES))
    choices = _without_last_zeros(draw(st.lists(st.integers(0, _LARGEST_CHOICE), min_size=length, max_size=length)))
    return (held, *choices) if held < 0 else choices


SCHEDULES = _schedules()
"""Short ones first, about half of them with a role that is held back; choices count modulo the options that there are."""
