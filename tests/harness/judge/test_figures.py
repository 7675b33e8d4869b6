"""Figures: four digits, on the same side of the limit."""

from __future__ import annotations

import math

import pytest

from attnfuzz.harness.judge.verdict import four_digits


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (0.0, 0.0), (0.123456, 0.1235), (12.34567, 12.35), (123456.0, 123500.0), (5.76e-6, 0.0), (0.99999, 1.0), (1.0, 1.0),
        (1.000001, 1.001), (1.0004, 1.001), (1.00051, 1.001), (1.0016, 1.002), (math.inf, math.inf),
    ],
)  # fmt: skip
def test_a_figure_has_four_digits(x: float, expected: float) -> None:
    assert four_digits(x) == expected


def test_a_figure_stays_on_its_side_of_the_limit_and_is_rounded_once() -> None:
    for step in range(-3000, 3000):
        x = 1 + step * 1e-6
        assert (four_digits(x) > 1) == (x > 1)
        assert four_digits(four_digits(x)) == four_digits(x)
    assert math.isnan(four_digits(math.nan))


def test_the_last_bits_of_a_sum_are_no_part_of_a_figure() -> None:
    assert {four_digits(sum(values)) for values in ([0.1] * 9, [0.3, 0.3, 0.3], [0.1, 0.8])} == {0.9}
