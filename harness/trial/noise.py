"""Hashed numbers that depend on (seed, name, index) alone: the same bits on every device, in any order of creation."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TypeVar

import torch

__all__ = ["chosen", "hashed", "noise", "uniform"]

_T = TypeVar("_T")
_MASK_32 = (1 << 32) - 1
_NOISE_BITS = 11
_PARTS = 4
_SIGMA = math.sqrt(2 * _PARTS * ((1 << _NOISE_BITS) ** 2 - 1) / 12)
"""Deviation of a sum of 8 uniform 11-bit integers; noise() divides by the next power of two, so its deviation is 0.816."""
_UNIT = 2.0 ** -round(math.log2(_SIGMA))


def noise(seed: int, name: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Return hashed noise of `shape`: float32, near normal, mean 0, deviation 0.816, within 4.

    Each element is a sum of 8 uniforms, an exact multiple of 2**-12. Element i depends on (seed, name, i) alone.
    """
    total = torch.zeros(math.prod(shape), dtype=torch.int64, device=device)
    for part in range(2):
        bits = _words(seed, name, math.prod(shape), device, part)
        for slot in range(_PARTS):
            total += (bits >> (slot * _NOISE_BITS)) & ((1 << _NOISE_BITS) - 1)
    centre = 2 * _PARTS * ((1 << _NOISE_BITS) - 1)
    return ((2 * total - centre).to(torch.float32) * (_UNIT / 2)).reshape(shape)


def hashed(seed: int, name: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Return hashed integers of `shape`: int64, uniform over 0 to 2**48 - 1. Element i depends on (seed, name, i) alone."""
    return (_words(seed, name, math.prod(shape), device, 0) & ((1 << 48) - 1)).reshape(shape)


def uniform(seed: int, name: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Return hashed uniforms of `shape`: float32, multiples of 2**-16 from 0 to below 1."""
    return (hashed(seed, name, shape, device) & 0xFFFF).to(torch.float32) * 2.0**-16


def chosen(seed: int, name: str, options: Sequence[_T]) -> _T:
    """Return one of `options`, by (seed, name) alone."""
    digest = hashlib.sha256(f"{seed}:{name}:chosen".encode()).digest()
    return options[int.from_bytes(digest[:8], "little") % len(options)]


def _words(seed: int, name: str, count: int, device: str, part: int) -> torch.Tensor:
    """Return 64-bit word number `part` (0 or 1) of each element, as int64."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    key = int.from_bytes(digest[8 * part : 8 * part + 7], "little")
    return _mixed(torch.arange(count, dtype=torch.int64, device=device) * 2 + part + key)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Apply a 64-bit finaliser (xor-shift and odd multiply); int64 wraps alike on every device, and shifts are made logical."""
    for shift, factor in ((32, 0x9E3779B97F4A7C15), (29, 0xD6E8FEB86659FD93), (32, 0xD6E8FEB86659FD93)):
        x = x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))
        x = x * (factor - (1 << 64))
    return x ^ ((x >> 32) & _MASK_32)
