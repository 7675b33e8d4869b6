"""The hashed numbers of noise.py by one kernel of a GPU: bit for bit the same, for all requests at once."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from attnfuzz.oracles.fused import Handwritten

__all__ = ["KINDS", "Segment", "numbers_by_kernel", "takes"]

KINDS = ("noise", "heavy", "hashed")
"""Kinds of numbers; the first two are float32, the last is int64."""
_ARGUMENT = struct.Struct("=QQII")
_FIELDS = 4
_MOST = 1 << 30
"""Elements of one launch: the kernel counts them by 32-bit numbers."""
_TEXT = """
typedef unsigned long long word;
struct segment { long long start, first, second, kind; };
struct arguments { unsigned long long segments, out; index_t number, count; };

__device__ inline word mixed(word x) {
  x ^= x >> 32; x *= 0x9E3779B97F4A7C15ull;
  x ^= x >> 29; x *= 0xD6E8FEB86659FD93ull;
  x ^= x >> 32; x *= 0xD6E8FEB86659FD93ull;
  return x ^ (x >> 32);
}

__device__ inline word pairs(word x) {
  const word even = 0x7FFull | (0x7FFull << 22);
  return (x & even) + ((x >> 11) & even);
}

__device__ inline float noise(word one, word other) {
  const word both = pairs(one) + pairs(other);
  const int total = (int)((both & 0x3FFFFFull) + (both >> 22));
  return (float)(total - 8188) * 0.00048828125f;
}

__device__ inline float heavy(word bits) {
  int ones = (int)(bits & 0xFFF);
  ones = ones - ((ones >> 1) & 0x555);
  ones = (ones & 0x333) + ((ones >> 2) & 0x333);
  ones = (ones & 0xF) + ((ones >> 4) & 0xF) + (ones >> 8);
  const int mantissa = 256 + (int)((bits >> 12) & 255), sign = 1 - 2 * (int)((bits >> 20) & 1);
  return (float)(sign * mantissa * (1 << ones)) * 0.000030517578125f;
}

extern "C" __global__ void hashed_numbers(const arguments a) {
  const segment* table = (const segment*)a.segments;
  for (index_t i = blockIdx.x * blockDim.x + threadIdx.x; i < a.count; i += gridDim.x * blockDim.x) {
    index_t low = 0, high = a.number;
    while (high - low > 1) {
      const index_t middle = (low + high) / 2;
      if (table[middle].start <= (long long)i) low = middle; else high = middle;
    }
    const segment s = table[low];
    const word step = 2ull * (word)((long long)i - s.start), one = mixed((word)s.first + step);
    if (s.kind == 2) ((long long*)a.out)[i] = (long long)(one & 0xFFFFFFFFFFFFull);
    else ((float*)a.out)[i] = s.kind == 1 ? heavy(one) : noise(one, mixed((word)s.second + step));
  }
}
"""
_KERNEL = Handwritten("hashed_numbers", _TEXT)


class Segment(NamedTuple):
    """The numbers of one tensor: how many, of which of KINDS, and the first value of each word's counter."""

    size: int
    kind: int
    first: int
    second: int


def takes(device: torch.device, count: int) -> bool:
    """Whether `count` numbers on that device can be computed by the kernel."""
    return 0 < count < _MOST and _KERNEL.takes(device)


def numbers_by_kernel(segments: Sequence[Segment], device: torch.device) -> list[torch.Tensor]:
    """Return the numbers of each segment, as parts of one tensor for all; all are hashed integers, or none is."""
    table, count = [], 0
    for each in segments:
        table += [count, each.first, each.second, each.kind]
        count += each.size
    sent = torch.tensor(table, dtype=torch.int64).to(device, non_blocking=True)
    out = torch.empty(count, dtype=torch.int64 if segments[0].kind == KINDS.index("hashed") else torch.float32, device=device)
    _KERNEL(_ARGUMENT.pack(sent.data_ptr(), out.data_ptr(), len(table) // _FIELDS, count), count, out.device)
    return list(out.split([each.size for each in segments]))
