"""Floating-point formats: units in the last place, and one correct rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnfuzz.kernels.problem import Dtype
from attnfuzz.oracles.fused import fused

__all__ = [
    "CUT_OF_TF32X3",
    "EPS",
    "LAST_BITS",
    "OF_TF32X3",
    "TF32",
    "TINY",
    "Format",
    "half_ulp",
    "half_ulp_of_sum",
    "on_grid",
    "rounded",
]

EPS = 2.0**-24
"""Unit roundoff of float32, in which kernels accumulate."""
TINY = 2.0**-126
"""The smallest normal float32: hardware may flush operands, products and sums below it to zero."""
TF32 = 2.01 * 2.0**-10
"""Relative error of a product of two operands truncated to tf32's 10 mantissa bits."""
OF_TF32X3 = 24
"""Error of a float32 product by tf32x3 (low x high, high x low, high x high halves) in eps of it: the product of low halves is
left out, each less than 2^-10 of its operand, 16 eps; of the 13 bits of a low half 11 are kept, 4 eps for each operand."""
CUT_OF_TF32X3 = 21 / 16
"""Mean error toward zero of a sum of float32 products by tf32x3, in eps of the sum, for each of its terms.

Each 8 terms are three products of halves, and a tensor core adds each to the sum so far in blocks of 4 (or of 8: that is less).
It cuts the 4 terms at a quarter of the last bit of the largest, then their sum at its last bit: up to 4 / 4 + 3 / 4 of that bit,
half of it on average, and a bit is at most 2 eps of the sum: 3 * 2 blocks * 7 / 8 * 2 eps. What is cut varies with the terms: a
block deviates from this by 0.31 of a bit, n terms by 0.54 sqrt(n) eps.
"""
LAST_BITS = 2.0**-30
"""Relative difference within which two float64 sums count as equal: beyond their errors, and far below float32's."""


@dataclass(frozen=True, slots=True)
class Format:
    """A floating-point dtype: u = 2**-(mantissa bits + 1), the exponent of its smallest normal, its largest finite value."""

    u: float
    min_exponent: int
    largest: float

    @property
    def eta(self) -> float:
        """Half the smallest subnormal."""
        return 2.0**self.min_exponent * self.u

    @staticmethod
    def of(dtype: Dtype) -> Format:
        """Return the format of a Problem's dtype."""
        return _FORMATS[dtype]


_FORMATS: dict[Dtype, Format] = {
    "float16": Format(2.0**-11, -14, 65504.0),
    "bfloat16": Format(2.0**-8, -126, float(torch.finfo(torch.bfloat16).max)),
    "float32": Format(2.0**-24, -126, float(torch.finfo(torch.float32).max)),
}


_EXPONENT = 0x7FF0000000000000
"""Exponent bits of a float64: masking a positive normal number with them gives the power of two at or below it."""


@fused
def half_ulp(x: torch.Tensor, form: Format) -> torch.Tensor:
    """Return half a unit in the last place of `form` at |x|, at least half the smallest subnormal; float64."""
    # Numbers below the smallest normal have its spacing.
    power = x.abs().clamp_(min=2.0**form.min_exponent).view(torch.int64).bitwise_and_(_EXPONENT)
    return power.view(torch.float64).mul_(form.u)


@fused
def half_ulp_of_sum(x: torch.Tensor, form: Format) -> torch.Tensor:
    """Return `half_ulp` of a float64 sum, that of the power of two above where only the last bits are missing to it."""
    return half_ulp(x * (1 + LAST_BITS), form)


_TO_GRID = 1.5 * 2.0**36
"""Times a power of two: float64's spacing around it is 2**-16 of that power."""
_LARGEST = 1e150
_TO_UNIT = 3 * 2.0**52
"""Times half a unit of a format: float64's spacing around it is that unit."""


@fused
def on_grid(x: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Round x to a multiple of 2**-16 of `error`, a bound on the error of x in float32 (its power of two).

    float64's own error has the same bound times 2**-29, and depends on the order of additions: on the width of a frame. Values
    that are 0, a power of two or halfway between two half-precision numbers in exact arithmetic are exactly that on the grid, so
    that no comparison turns on their last bits. Where `error` is 0, x is not changed.
    """
    power = error.clamp(max=_LARGEST).view(torch.int64).bitwise_and_(_EXPONENT).view(torch.float64).mul_(_TO_GRID)
    return (x + power).sub_(power)


@fused
def rounded(x: torch.Tensor, form: Format) -> torch.Tensor:
    """Round float64 to `form` once, to nearest even, overflow to infinity; the result stays float64."""
    # Beyond the largest finite value all are alike, and infinity has no unit.
    x = x.clamp(min=-4 * form.largest, max=4 * form.largest)
    around = half_ulp(x, form) * _TO_UNIT
    y = (x + around).sub_(around)
    return torch.where(y.abs() > form.largest, y * torch.inf, y)
