"""The repaired interpreter against torch: bfloat16 bit for bit, shortcuts against Triton's own way."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from support.triton_mode import loaded, marks

from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.triton import runtime

if TYPE_CHECKING:
    import numpy as np
    import torch
else:
    torch = pytest.importorskip("torch")
    np = pytest.importorskip("numpy")

pytestmark = marks()

triton = loaded()

import triton.language as tl  # noqa: E402 - after the mode is fixed

from attnfuzz.kernels.triton.interpreter.interpreter import bfloat16_to_float32, float32_to_bfloat16  # noqa: E402 - imports triton

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 1e-45, 3.4e38, -3.4e38, 2.0**-126, 2.0**-133, 2.0**-134]


def floats() -> torch.Tensor:
    """4096 float32 bit patterns of every exponent, all ties among them, and the special values."""
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=generator, dtype=torch.int64).to(torch.int32)
    bits[::2] = (bits[::2] & ~0xFFFF) | 0x8000
    values = bits.view(torch.float32)
    values[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return values


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bit patterns, every NaN as one."""
    return torch.where(tensor.isnan(), torch.tensor(0x7FC0, dtype=torch.int16), tensor.view(torch.int16))


@triton.jit
def cast_kernel(x, y, back, size: tl.constexpr):
    at = tl.arange(0, size)
    narrow = tl.load(x + at, mask=at < size, other=0.0).to(tl.bfloat16)
    tl.store(y + at, narrow, mask=at < size)
    tl.store(back + at, narrow.to(tl.float32), mask=at < size)


@triton.jit
def arithmetic_kernel(x, y, added, multiplied, negated, larger, less, size: tl.constexpr):
    at = tl.arange(0, size)
    a = tl.load(x + at)
    b = tl.load(y + at)
    tl.store(added + at, a + b)
    tl.store(multiplied + at, a * b)
    tl.store(negated + at, -a)
    tl.store(larger + at, tl.maximum(a, b))
    tl.store(less + at, ((a < b) & (b < 1.0)).to(tl.int32))


@triton.jit
def dot_kernel(x, y, z, total, size: tl.constexpr):
    at = tl.arange(0, size)
    square = at[:, None] * size + at[None, :]
    a = tl.load(x + square, mask=at[:, None] < size, other=0.0)
    b = tl.load(y + square, mask=at[:, None] < size, other=0.0)
    tl.store(z + square, tl.dot(a, tl.trans(b), input_precision="ieee"))
    tl.store(total + at, tl.sum(a, 1))


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def integer_kernel(x, wide, wrapped, chosen, factor, size: tl.constexpr):
    at = tl.arange(0, size)
    value = tl.load(x + at, mask=at < size - 1, other=-7)
    tl.store(wide + at, value.to(tl.int64) * factor + at)
    tl.store(wrapped + at, _twice(value) * factor - 1)
    tl.store(chosen + at, tl.where(at[None, :] <= at[:, None], 1, 0).sum(1) + tl.where(value > 0, value, -1))


def test_bfloat16_casts_round_to_nearest_even() -> None:
    values = floats()
    expected = values.to(torch.bfloat16)
    narrow, back = torch.empty(4096, dtype=torch.bfloat16), torch.empty(4096)
    cast_kernel[(1,)](values, narrow, back, size=4096)
    assert torch.equal(bits(expected), bits(narrow))
    assert torch.equal(expected.float().nan_to_num(12.5), back.nan_to_num(12.5))


def test_bfloat16_conversions_are_inverse() -> None:
    every = np.arange(2**16, dtype=np.uint16)
    widened = bfloat16_to_float32(every)
    kept = ~np.isnan(widened)
    assert np.array_equal(every[kept], float32_to_bfloat16(widened)[kept])
    assert (float32_to_bfloat16(widened)[~kept] == 0x7FC0).all()


def test_bfloat16_arithmetic_rounds_each_result_once() -> None:
    a = floats().to(torch.bfloat16)
    b = a.flip(0).roll(17)
    results = [torch.empty_like(a) for _ in range(4)]
    less = torch.empty(4096, dtype=torch.int32)
    arithmetic_kernel[(1,)](a, b, *results, less, size=4096)
    # Which NaN results does not matter; whether one does matters, except for maximum, which may drop one.
    for expected, got in zip((a + b, a * b), results[:2], strict=True):
        assert torch.equal(bits(expected), bits(got))
    # Triton 3.6 negates by subtracting from 0, so that the sign of a zero is lost.
    torch.testing.assert_close(results[2], -a, rtol=0, atol=0, equal_nan=True)
    numbers = ~(a.isnan() | b.isnan())
    assert torch.equal(torch.maximum(a, b)[numbers], results[3][numbers])
    assert torch.equal(((a < b) & (b < 1)).int(), less)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dot_accumulates_in_float32(dtype: str) -> None:
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(32, 32, generator=generator).to(getattr(torch, dtype)) for _ in range(2))
    z, total = torch.empty(32, 32), torch.empty(32, dtype=a.dtype)
    dot_kernel[(1,)](a, b, z, total, size=32)
    torch.testing.assert_close(z.double(), a.double() @ b.double().T, rtol=0, atol=1e-5)
    torch.testing.assert_close(total.double(), a.double().sum(1), rtol=2 * torch.finfo(a.dtype).eps, atol=1e-2)


def test_integers_promote_and_wrap_around() -> None:
    factor = 2**20
    x = torch.arange(-8, 24, dtype=torch.int32) * 4099
    wide, wrapped, chosen = (torch.empty(32, dtype=dtype) for dtype in (torch.int64, torch.int32, torch.int32))
    integer_kernel[(1,)](x, wide, wrapped, chosen, factor, size=32)
    read = x.clone()
    read[-1] = -7
    index = torch.arange(32)
    assert torch.equal(read.long() * factor + index, wide)
    assert torch.equal((2 * read.long() * factor - 1).to(torch.int32), wrapped)
    assert torch.equal((index + 1 + torch.where(read > 0, read, -1)).to(torch.int32), chosen)


def test_installing_again_changes_nothing() -> None:
    from attnfuzz.kernels.triton.interpreter import interpreter

    before = (tl.tensor.__add__, tl.load)
    interpreter.install()
    assert before == (tl.tensor.__add__, tl.load)
    assert runtime.load("cpu") is triton


def test_a_process_has_one_mode() -> None:
    assert runtime.mode() == "cpu"
    with pytest.raises(BadArgument, match=r"device='cuda': Triton was imported in its interpreted mode.*another process"):
        runtime.load("cuda")
    assert runtime.compile_counts() == {}


@triton.jit
def clamp_kernel(low, high, n, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(low + at, min(n - 1, at + 2))
    tl.store(high + at, max(3, at, n - 2))


def test_min_and_max_of_blocks_are_taken_element_by_element() -> None:
    low, high = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    clamp_kernel[(1,)](low, high, 6, size=8)
    at = torch.arange(8, dtype=torch.int32)
    assert low.equal((at + 2).clamp(max=5))
    assert high.equal(at.clamp(min=4))
    assert (min(2, 1), max([1, 2])) == (1, 2)
