"""Floating-point formats: units in the last place, one correct rounding, and what a rounding may do to a value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnfuzz.kernels.problem import Dtype

__all__ = ["EPS", "TF32", "TINY", "Format", "half_ulp", "rounded"]

EPS = 2.0**-24
"""Unit roundoff of float32, in which kernels accumulate."""
TINY = 2.0**-126
"""The smallest normal float32: hardware may flush what is below it, operand, product or sum, to zero."""
TF32 = 2.01 * 2.0**-10
"""Relative error of a product of two operands truncated to tf32's 10 mantissa bits."""


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
        """The format of a Problem's dtype."""
        return _FORMATS[dtype]


_FORMATS: dict[Dtype, Format] = {
    "float16": Format(2.0**-11, -14, 65504.0),
    "bfloat16": Format(2.0**-8, -126, float(torch.finfo(torch.bfloat16).max)),
    "float32": Format(2.0**-24, -126, float(torch.finfo(torch.float32).max)),
}


_EXPONENT = 0x7FF0000000000000
"""The bits of a float64's exponent: what they leave of a positive normal number is the power of two at or below it."""


def half_ulp(x: torch.Tensor, form: Format) -> torch.Tensor:
    """Half a unit in the last place of `form` at |x|, at least half the smallest subnormal; float64."""
    # What is below the smallest normal has its spacing.
    power = x.abs().clamp_(min=2.0**form.min_exponent).view(torch.int64).bitwise_and_(_EXPONENT)
    return power.view(torch.float64).mul_(form.u)


def rounded(x: torch.Tensor, form: Format) -> torch.Tensor:
    """float64 -> `form` by one rounding to nearest even, overflow to infinity, kept in float64."""
    unit = 2 * half_ulp(x, form)
    y = torch.where(torch.isfinite(x), torch.round(x / unit) * unit, x)
    return torch.where(y.abs() > form.largest, torch.sign(y) * torch.inf, y)
