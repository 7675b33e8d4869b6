"""Arithmetic of GPU kernels in torch on the CPU: roundings to half, and products accumulated as tensor cores do it.

Operands are float32 tensors that hold values of the input dtype, so that products of half values are exact.
"""

from __future__ import annotations

from typing import Literal

import torch

Accumulation = Literal["f32", "fma", "rz", "tc", "half", "tf32", "tf32x3"]
"""f32: torch's own. fma: one product at a time, by one rounding, as without tensor cores. rz: exact blocks of 16, added toward
zero. tc: blocks of 16 aligned to the largest term and cut two bits below float32's last, as measured of Hopper's tensor
cores (Fasi et al. 2021; Khattak and Mikaitis 2025). half: blocks of 16 added in the input dtype, which is a fault. tf32: f32 of
operands cut to 10 bits, as a tensor core takes float32. tf32x3: of each 8 terms low times high halves, high times low and high
times high, as CUTLASS' OpMultiplyAddFastF32 takes them, each by tc in blocks of 4."""

Float32 = Literal["f32", "fma", "tf32", "tf32x3"]
"""Of these, how a kernel computes float32 products."""
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_BLOCK, _TF32_STEP, _TF32_BLOCK = 16, 8, 4
_TC_BITS = 25
"""Bits below the largest term's leading one that a tensor core keeps: 23 of float32 and 2 more."""
_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 -> `dtype` to nearest even, as float32."""
    return x.to(dtype).float()


def truncated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 -> `dtype` toward zero, as float32."""
    return toward_zero(x, dtype).float()


def toward_zero(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 or float32 -> `dtype` toward zero: where the nearest is too large in size, the value below it."""
    y = x.to(dtype)
    over = y.double().abs() > x.double().abs()
    bits = _BITS[dtype]
    return (y.view(bits) - over.to(bits)).view(dtype)


def cut_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 with the last 13 of 23 mantissa bits zero."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def halves_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The high half of float32, cut to tf32, and the rest, rounded to it: half a unit is added to what is cut."""
    high = cut_to_tf32(x)
    rest = (x - high).contiguous()
    return high, cut_to_tf32((rest.view(torch.int32) + 0x1000).view(torch.float32))


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    accumulation: Accumulation = "f32",
    start: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """start + a @ b, float32: `a (..., n, k)`, `b (..., k, m)`, accumulated over k in blocks.

    Args:
        a: left operand, float32.
        b: right operand, float32.
        accumulation: how blocks are added.
        start: float32 accumulator to begin with; None: 0.
        dtype: of the accumulator where accumulation is "half".
    """
    if accumulation == "tf32":
        a, b = cut_to_tf32(a), cut_to_tf32(b)
    if accumulation in ("f32", "tf32"):
        whole = torch.matmul(a, b)
        return whole if start is None else start + whole
    if accumulation == "tf32x3":
        return _of_halves(a, b, start)
    left, right, block = a.double(), b.double(), 1 if accumulation == "fma" else _BLOCK
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    total = a.new_zeros((*batch, a.shape[-2], b.shape[-1]), dtype=torch.float64) if start is None else start.double()
    for at in range(0, a.shape[-1], block):
        x, y = left[..., at : at + block], right[..., at : at + block, :]
        if accumulation == "tc":
            total = toward_zero(_aligned_sum(x, y, total), torch.float32).double()
        elif accumulation == "rz":
            total = toward_zero(total + x @ y, torch.float32).double()
        else:
            total = (total + x @ y).float().to(dtype).double()
    return total.float()


def _of_halves(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor | None) -> torch.Tensor:
    (high_a, low_a), (high_b, low_b) = ([half.double() for half in halves_of(x)] for x in (a, b))
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    total = a.new_zeros((*batch, a.shape[-2], b.shape[-1])).double() if start is None else start.double()
    for step in range(0, a.shape[-1], _TF32_STEP):
        for left, right in ((low_a, high_b), (high_a, low_b), (high_a, high_b)):
            for at in range(step, min(step + _TF32_STEP, a.shape[-1]), _TF32_BLOCK):
                block = slice(at, at + _TF32_BLOCK)
                total = toward_zero(_aligned_sum(left[..., block], right[..., block, :], total), torch.float32).double()
    return total.float()


def _aligned_sum(x: torch.Tensor, y: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """total + x @ y of one block, every term cut at the same bit before the exact sum; float64."""
    terms = x.unsqueeze(-1) * y.unsqueeze(-3)
    largest = torch.maximum(terms.abs().amax(-2), total.abs())
    exponent = torch.frexp(largest)[1].double() - 1
    unit = torch.exp2(torch.where(largest > 0, exponent, 0.0) - _TC_BITS)
    return (torch.trunc(terms / unit.unsqueeze(-2)).sum(-2) + torch.trunc(total / unit)) * unit
