"""Fill, copy and compare several parts of a GPU's memory by one launch: guard bands, copies of inputs, and their checks.

Each of these is small, and a launch costs more than its bytes.
"""

from __future__ import annotations

import struct

import torch

from attnfuzz.oracles.fused import Handwritten

__all__ = ["Part", "Pieces", "doubled", "takes"]

_PIECE, _BOTH = struct.Struct("=QQQQII"), struct.Struct("=QQQQIIQQQQII")
"""A piece, and two."""
_REST = struct.Struct("=I4x")
_PIECES = 64
"""Pieces of one launch: the driver takes arguments of 4 KiB."""
_CHUNK = 16
"""Bytes that one thread handles at a time."""
_EACH, _BLOCK = 4, 256
"""Of the longest piece, how often it does so; threads of a block."""
_FLAGS = 256
"""Flags that are made at once. They lie between no bands: what a kernel writes there makes few checks doubtful."""
_FILL, _COPY, _HOLDS, _EQUAL = range(4)
_WORD = 0xFFFFFFFF
_TEXT = """
typedef unsigned long long address;
struct piece { address at, other, bytes, flag; unsigned kind, pattern; };
struct arguments { piece pieces[64]; index_t number; };
struct __align__(16) quad { unsigned a, b, c, d; };

__device__ inline bool differs(const quad& x, const quad& y) {
  return x.a != y.a || x.b != y.b || x.c != y.c || x.d != y.d;
}

extern "C" __global__ void guarded_pieces(const arguments a) {
  const index_t each = gridDim.x < a.number ? 1 : gridDim.x / a.number, step = each * blockDim.x;
  for (index_t block = blockIdx.x; block < a.number * each; block += gridDim.x) {
    const piece p = a.pieces[block % a.number];
    bool wrong = false;
    const index_t first = block / a.number * blockDim.x + threadIdx.x;
    const address gap = (16 - (p.at & 15)) & 15, lead = gap < p.bytes ? gap : p.bytes;
    const bool paired = p.kind & 1;
    const address quads = paired && ((p.at ^ p.other) & 15) ? 0 : (p.bytes - lead) / 16;
    const quad all = {p.pattern, p.pattern, p.pattern, p.pattern};
    for (address i = first; i < quads; i += step) {
      quad* at = (quad*)(p.at + lead) + i;
      const quad value = paired ? ((const quad*)(p.other + lead))[i] : all;
      if (p.kind < 2) *at = value; else wrong |= differs(*at, value);
    }
    for (address i = first; i < p.bytes - 16 * quads; i += step) {
      const address j = i < lead ? i : i + 16 * quads;
      unsigned char* at = (unsigned char*)(p.at + j);
      const unsigned char value =
          paired ? ((const unsigned char*)p.other)[j] : (unsigned char)(p.pattern >> (8 * ((p.at + j) & 3)));
      if (p.kind < 2) *at = value; else wrong |= *at != value;
    }
    if (wrong) *(long long*)p.flag = 1;
  }
}
"""
_KERNEL = Handwritten("guarded_pieces", _TEXT)


def takes(device: torch.device) -> bool:
    """Whether pieces of memory on that device can be handled by the kernel."""
    return _KERNEL.takes(device)


def doubled(word: int) -> int:
    """Return a pattern of 32 bits from one of 16, which may be negative."""
    return (word & 0xFFFF) * 0x10001


Part = tuple[int, int, int]
"""Address, bytes, and a pattern of 32 bits, which is repeated from every multiple of 4 bytes."""


class Pieces:
    """Parts of the memory of one device, and what is to be done with each; addresses and sizes in bytes.

    The memory must live until the launch has been requested.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._packed = bytearray()
        self._bytes = 0
        self._flag = 0

    def fill(self, at: int, size: int, pattern: int) -> None:
        """Write a pattern."""
        self._add(at, 0, size, _FILL, pattern)

    def fill_both(self, first: Part, last: Part) -> None:
        """Write the patterns of two parts, which are not empty."""
        self._add_both(_FILL, first, last)

    def copy(self, at: int, source: int, size: int) -> None:
        """Write a copy of what lies at `source`."""
        self._add(at, source, size, _COPY)

    def check(self) -> torch.Tensor:
        """Return one int64 that the launch leaves 0 if all that is checked from now on is so, else makes 1."""
        flag = _UNUSED.one(self.device)
        self._flag = flag.data_ptr()
        return flag

    def holds(self, at: int, size: int, pattern: int) -> None:
        """Check that a pattern lies there."""
        self._add(at, 0, size, _HOLDS, pattern)

    def both_hold(self, first: Part, last: Part) -> None:
        """Check the patterns of two parts, which are not empty."""
        self._add_both(_HOLDS, first, last)

    def equal(self, at: int, other: int, size: int) -> None:
        """Check that two parts are equal."""
        self._add(at, other, size, _EQUAL)

    def launch(self) -> None:
        """Begin with all of them, on the current stream."""
        most = _PIECES * _PIECE.size
        for start in range(0, len(self._packed), most):
            some = bytes(self._packed[start : start + most])
            number = len(some) // _PIECE.size
            # Pieces are handled side by side, each by as many blocks.
            threads = number * -(-self._bytes // (_CHUNK * _EACH * _BLOCK)) * _BLOCK
            _KERNEL(some.ljust(most, b"\0") + _REST.pack(number), threads, self.device)

    def _add(self, at: int, other: int, size: int, kind: int, pattern: int = 0) -> None:
        if size:
            self._packed += _PIECE.pack(at, other, size, self._flag, kind, pattern & _WORD)
            self._bytes = max(self._bytes, size)

    def _add_both(self, kind: int, first: Part, last: Part) -> None:
        (at, size, pattern), (other_at, other_size, other_pattern) = first, last
        flag = self._flag
        self._packed += _BOTH.pack(at, 0, size, flag, kind, pattern, other_at, 0, other_size, flag, kind, other_pattern)
        self._bytes = max(self._bytes, size, other_size)


class _Flags:
    """Numbers that are 0, each handed out once."""

    def __init__(self) -> None:
        self._left: dict[torch.device, list[torch.Tensor]] = {}

    def one(self, device: torch.device) -> torch.Tensor:
        left = self._left.setdefault(device, [])
        if not left:
            left.extend(torch.zeros(_FLAGS, dtype=torch.int64, device=device).split(1))
        return left.pop()


_UNUSED = _Flags()
