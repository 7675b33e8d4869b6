"""Floats as expressions for the C target: bfloat16 values, which it does not have, and constants, which it prints short."""

from __future__ import annotations

import struct
from typing import Any

from attnfuzz.kernels.support.absent import Absent

try:
    import tilelang  # noqa: F401  (makes its own tvm importable)
    from tvm import ir, tirx
except ImportError:
    ir = tirx = Absent("tilelang")

__all__ = ["exactly", "rounded_to_bfloat16", "survives_printing"]


def rounded_to_bfloat16(value: Any) -> Any:
    """Round the float32 expression `value` to the nearest bfloat16, ties to even, as float32; inf and NaN stay.

    In float64, `2^45 x + x` keeps exactly the leading 8 bits of the 24-bit x; as 2^45 x ends in zeros, a tie goes to the even
    one. Below 2^-126 (2e-38 lies in the next binade, where both ways agree) bfloat16 values are multiples of 2^-133.
    """
    x = tirx.Cast("float64", value)
    big = x
    for _ in range(3):
        big = tirx.Mul(big, tirx.FloatImm("float64", 2.0**15))
    normal = tirx.Sub(_opaque(tirx.Add(big, x)), big)
    subnormal = _math("ldexp", _math("nearbyint", _math("ldexp", x, tirx.const(133, "int32"))), tirx.const(-133, "int32"))
    small, infinity = tirx.const(2e-38, "float32"), tirx.const(float("inf"), "float32")
    rounded = tirx.if_then_else(tirx.And(value < small, value > -small), subnormal, normal)
    return tirx.if_then_else(tirx.And(value < infinity, value > -infinity), tirx.Cast("float32", rounded), value)


def _math(name: str, *arguments: Any) -> Any:
    return tirx.Call(arguments[0].dtype, ir.Op.get(f"tirx.{name}"), list(arguments))


def _opaque(value: Any) -> Any:
    """Hide `value` from TVM, which simplifies float sums as if they were exact."""
    return _math("copysign", value, value)


def survives_printing(value: float) -> bool:
    """Whether the C target, which prints float32 constants with seven digits, prints this one exactly."""
    return value != value or value in (float("inf"), float("-inf")) or _float32(float(f"{value:.6e}")) == _float32(value)


def _float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def exactly(value: float) -> Any:
    """A float32 constant as the sum of its value as the C target prints it and the rest."""
    printed = _float32(float(f"{value:.6e}"))
    return tirx.Add(_opaque(tirx.FloatImm("float32", printed)), tirx.FloatImm("float32", _float32(value) - printed))
