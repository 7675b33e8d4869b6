"""Values of a pattern, scaled and brought to their dtype, in memory of any layout.

On a GPU one launch writes all tensors of a Case; on a CPU torch's operations do, one by one. The bits are the same.
"""

from __future__ import annotations

import math
import struct

import torch

from attnfuzz.harness.trial import guard_kernel
from attnfuzz.harness.trial.guard_kernel import Pieces, doubled
from attnfuzz.oracles.fused import Handwritten

__all__ = ["GAP", "Placement"]

GAP = 0xFFB5 - (1 << 16)
"""A 16-bit word that is NaN in float16, bfloat16 and (two of them) float32; signalling in the last two."""
_PART = struct.Struct("=QQ3q4q5I2f4x")
_REST = struct.Struct("=I4x")
_PARTS = 16
"""Tensors of one launch: the driver takes arguments of 4 KiB."""
_EACH, _BLOCK = 4, 256
"""Elements of the longest tensor that a thread writes; threads of a block."""
_KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.int32: 3}
_TEXT = """
typedef unsigned long long address;
struct part {
  address from, to;
  long long from_token, from_head, from_dim;
  long long to_batch, to_token, to_head, to_dim;
  unsigned tokens, rows, heads, dim, shape;
  float scale, largest;
};
struct arguments { part parts[16]; index_t number; };

__device__ inline unsigned bits_of(float x) { union { float value; unsigned bits; } both; both.value = x; return both.bits; }
__device__ inline float of_bits(unsigned x) { union { float value; unsigned bits; } both; both.bits = x; return both.value; }

__device__ inline unsigned short half_of(float x) {
  const unsigned sign = (bits_of(x) >> 16) & 0x8000u, size = bits_of(x) & 0x7FFFFFFFu;
  // Below the smallest normal number the sum's own rounding is that of the result.
  if (size < 0x38800000u) return (unsigned short)(sign | (bits_of(__fadd_rn(of_bits(size), 0.5f)) - 0x3F000000u));
  return (unsigned short)(sign | ((size + 0xFFFu + ((size >> 13) & 1u) - 0x38000000u) >> 13));
}

__device__ inline unsigned short bfloat_of(float x) {
  return (unsigned short)((bits_of(x) + 0x7FFFu + ((bits_of(x) >> 16) & 1u)) >> 16);
}

extern "C" __global__ void placed_values(const arguments a) {
  const index_t each = gridDim.x < a.number ? 1 : gridDim.x / a.number, step = each * blockDim.x;
  for (index_t block = blockIdx.x; block < a.number * each; block += gridDim.x) {
    const part p = a.parts[block % a.number];
    const unsigned kind = p.shape & 3u, count = (p.shape >> 2) * p.rows * p.heads * p.dim;
    for (index_t i = block / a.number * blockDim.x + threadIdx.x; i < count; i += step) {
      const unsigned dim = i % p.dim, head = i / p.dim % p.heads, row = i / p.dim / p.heads % p.rows;
      const unsigned batch = i / p.dim / p.heads / p.rows;
      const bool slack = row >= p.tokens;
      const long long from =
          ((long long)batch * p.tokens + row) * p.from_token + head * p.from_head + dim * p.from_dim;
      const long long to = batch * p.to_batch + row * p.to_token + head * p.to_head + dim * p.to_dim;
      if (kind == 3u) { ((int*)p.to)[to] = (int)((const long long*)p.from)[from]; continue; }
      float x = 0.0f;
      if (!slack) {
        x = __fmul_rn(((const float*)p.from)[from], p.scale);
        x = x > p.largest ? p.largest : x < -p.largest ? -p.largest : x;
      }
      if (kind == 2u) ((float*)p.to)[to] = slack ? of_bits(0x7FC00000u) : x;
      else if (kind == 1u) ((unsigned short*)p.to)[to] = slack ? 0x7FC0u : bfloat_of(x);
      else ((unsigned short*)p.to)[to] = slack ? 0x7E00u : half_of(x);
    }
  }
}
"""
_KERNEL = Handwritten("placed_values", _TEXT)
_MOST = 1 << 31
"""Elements of a tensor that the kernel counts."""


class Placement:
    """Tensors of one Case that are still to be written, on one device; `finish` writes what is left to write.

    Sources must not change before that. A tensor that is returned has its values once `finish` has returned, for whoever uses
    it on the same stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gaps = Pieces(device) if guard_kernel.takes(device) and _KERNEL.takes(device) else None
        self._packed: list[bytes] = []
        self._longest = 0
        self._sources: list[torch.Tensor] = []

    def memory(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `count` elements of NaN, for a tensor with gaps."""
        words = count * dtype.itemsize // 2
        if self._gaps is None:
            return torch.full((words,), GAP, dtype=torch.int16, device=self._device).view(dtype)
        flat = torch.empty(count, dtype=dtype, device=self._device)
        self._gaps.fill(flat.data_ptr(), 2 * words, doubled(GAP))
        return flat

    def values(self, to: torch.Tensor, source: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Write `source` times `scale`, within the range of the dtype of `to`; rows beyond it become NaN. Returns `to`.

        Args:
            to: `(batch, rows, heads, dim)` or `(rows, heads, dim)`.
            source: float32 `(tokens, heads, dim)`, of a batch one sequence after the other.
            scale: a factor.
        """
        view = to if to.ndim == 4 else to[None]
        batch, rows, heads, dim = view.shape
        tokens, largest = source.shape[0] // batch, torch.finfo(to.dtype).max
        if self._gaps is not None and to.numel() < _MOST:
            self._add(view, source, source.stride(), (tokens, rows, heads, dim, batch), view.stride(), (scale, largest))
            return to
        scaled = source if scale == 1 else source * scale
        view[:, :tokens].copy_(scaled.clamp(-largest, largest).unflatten(0, (batch, tokens)))
        if rows > tokens:
            view[:, tokens:].fill_(torch.nan)
        return to

    def integers(self, source: torch.Tensor) -> torch.Tensor:
        """Return int64 numbers of one dimension as int32, in memory of their own."""
        if self._gaps is None:
            return source.to(torch.int32)
        to = torch.empty(source.shape, dtype=torch.int32, device=self._device)
        count = source.shape[0]
        self._add(to, source, (*source.stride(), 0, 0), (count, count, 1, 1, 1), (0, 1, 0, 0), (1.0, 0.0))
        return to

    def finish(self) -> None:
        """Request what is not written yet."""
        if self._gaps is not None:
            self._gaps.launch()
        for start in range(0, len(self._packed), _PARTS):
            some = self._packed[start : start + _PARTS]
            threads = len(some) * -(-self._longest // (_EACH * _BLOCK)) * _BLOCK
            padding = bytes(_PART.size * (_PARTS - len(some)))
            _KERNEL(b"".join(some) + padding + _REST.pack(len(some)), threads, self._device)
        self._packed.clear()
        self._sources.clear()

    def _add(
        self,
        to: torch.Tensor,
        source: torch.Tensor,
        from_steps: tuple[int, ...],
        sizes: tuple[int, int, int, int, int],
        steps: tuple[int, ...],
        factors: tuple[float, float],
    ) -> None:
        count = math.prod(sizes[1:])
        if count:
            shape = (*sizes[:4], _KINDS[to.dtype] | sizes[4] << 2)
            self._packed.append(_PART.pack(source.data_ptr(), to.data_ptr(), *from_steps, *steps, *shape, *factors))
            self._sources.append(source)
            self._longest = max(self._longest, count)
