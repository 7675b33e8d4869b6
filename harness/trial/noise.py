"""Hashed numbers that depend on (seed, name, index) alone: the same bits on every device, in any order of creation.

A tensor takes some 30 device operations, or one on a GPU (noise_kernel.py). `Numbers` computes those of many tensors together,
over one flat buffer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeVar

import torch

from attnfuzz.harness.trial.noise_kernel import KINDS, Segment, numbers_by_kernel, takes

__all__ = ["Numbers", "Request", "chosen", "few_hashed", "hashed", "noise", "uniform"]

_T = TypeVar("_T")
_Kind = Literal["noise", "hashed", "heavy"]
_MASK_32, _MASK_64 = (1 << 32) - 1, (1 << 64) - 1
_NOISE_BITS = 11
_PARTS = 4
_SIGMA = math.sqrt(2 * _PARTS * ((1 << _NOISE_BITS) ** 2 - 1) / 12)
"""Deviation of a sum of 8 uniform 11-bit integers; noise is divided by the next power of two, so its deviation is 0.816."""
_UNIT = 2.0 ** -round(math.log2(_SIGMA))
_CENTRE = _PARTS * ((1 << _NOISE_BITS) - 1)
"""Half of the largest sum."""
_EVEN = (1 << _NOISE_BITS) - 1 | ((1 << _NOISE_BITS) - 1) << 2 * _NOISE_BITS
"""The first and third of the four 11-bit parts of a word: the gaps between them take the carries of a sum."""
_LOW = (1 << 2 * _NOISE_BITS) - 1
_AT_ONCE = {"cpu": 1 << 15, "cuda": 1 << 22}
"""Words computed together. On a CPU they stay in its cache; on a GPU the temporaries take 100 MiB."""
_HASHED_BITS = 48
_ROUNDS = ((32, 0x9E3779B97F4A7C15), (29, 0xD6E8FEB86659FD93), (32, 0xD6E8FEB86659FD93))
"""Shifts and factors of the finaliser."""
_FEW = 2
"""Segments whose bases are added one by one, without waiting for a copy to the device."""
_BY_KERNEL = 1 << 25
"""Numbers of one launch of the kernel, which has no temporaries."""
_MOST = 1 << 26
"""Elements held for one `Numbers`."""


@dataclass(frozen=True, slots=True)
class Request:
    """Numbers that will be asked for: `count` elements of noise, of hashed integers, or of heavy-tailed numbers."""

    kind: _Kind
    seed: int
    name: str
    count: int


class Numbers:
    """Hashed numbers and small index tensors on one device; those that were requested are computed together, ahead.

    Tensors may share memory with each other: a caller does not change them.
    """

    def __init__(self, device: str, requests: Iterable[Request] = (), lists: Iterable[tuple[int, ...]] = ()) -> None:
        self.device = device
        self._ready: dict[tuple[str, int, str], torch.Tensor] = {}
        at_once = _AT_ONCE["cuda" if device.startswith("cuda") else "cpu"]
        for together in _rounds(requests, _BY_KERNEL if takes(torch.device(device), 1) else at_once):
            self._ready |= _computed(together, device)
        self._lists = _sent(list(dict.fromkeys(lists)), device)

    def noise(self, seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return hashed noise of `shape`: float32, near normal, mean 0, deviation 0.816, within 4.

        Each element is a sum of 8 uniforms, an exact multiple of 2**-12. Element i depends on (seed, name, i) alone.
        """
        return self._of("noise", seed, name, shape)

    def hashed(self, seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return hashed integers of `shape`: int64, uniform over 0 to 2**48 - 1. Element i depends on (seed, name, i) alone."""
        return self._of("hashed", seed, name, shape)

    def heavy(self, seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return heavy-tailed numbers of `shape`: float32, with exponents of a binomial distribution."""
        return self._of("heavy", seed, name, shape)

    def uniform(self, seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return hashed uniforms of `shape`: float32, multiples of 2**-16 from 0 to below 1."""
        return (self.hashed(seed, name, shape) & 0xFFFF).to(torch.float32) * 2.0**-16

    def integers(self, values: tuple[int, ...]) -> torch.Tensor:
        """Return `values` as an int64 tensor."""
        sent = self._lists.get(values)
        return torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True) if sent is None else sent

    def _of(self, kind: _Kind, seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        count, ready = math.prod(shape), self._ready.get((kind, seed, name))
        if ready is None or ready.shape[0] < count:
            ready = _computed([Request(kind, seed, name, count)], self.device)[kind, seed, name]
        return (ready if ready.shape[0] == count else ready[:count]).view(shape)


def noise(seed: int, name: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Return noise as `Numbers.noise` does."""
    return Numbers(device).noise(seed, name, shape)


def hashed(seed: int, name: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Return hashed integers as `Numbers.hashed` does."""
    return Numbers(device).hashed(seed, name, shape)


def few_hashed(seed: int, name: str, count: int) -> list[int]:
    """Return hashed integers as `Numbers.hashed` does, by Python's own arithmetic: of few, torch's operations take longer."""
    first = _key(Request("hashed", seed, name, count), 0)
    numbers = []
    for x in range(first, first + 2 * count, 2):
        for shift, factor in _ROUNDS:
            x = (x ^ x >> shift) * factor & _MASK_64
        numbers.append((x ^ x >> 32) & (1 << _HASHED_BITS) - 1)
    return numbers


def uniform(seed: int, name: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Return hashed uniforms as `Numbers.uniform` does."""
    return Numbers(device).uniform(seed, name, shape)


def chosen(seed: int, name: str, options: Sequence[_T]) -> _T:
    """Return one of `options`, by (seed, name) alone."""
    digest = hashlib.sha256(f"{seed}:{name}:chosen".encode()).digest()
    return options[int.from_bytes(digest[:8], "little") % len(options)]


def _rounds(requests: Iterable[Request], at_once: int) -> Iterator[list[Request]]:
    """Yield requests to compute together: the longest of each name; none that is large, since sharing saves it nothing."""
    longest: dict[tuple[str, int, str], Request] = {}
    for each in requests:
        key = (each.kind, each.seed, each.name)
        if each.count <= at_once and (key not in longest or longest[key].count < each.count):
            longest[key] = each
    together: list[Request] = []
    words = total = 0
    for each in longest.values():
        own = each.count * (2 if each.kind == "noise" else 1)
        if total + each.count > _MOST:
            # Only these are computed when they are asked for.
            continue
        total += each.count
        if together and words + own > at_once:
            yield together
            together, words = [], 0
        together.append(each)
        words += own
    if together:
        yield together


def _computed(requests: list[Request], device: str) -> dict[tuple[str, int, str], torch.Tensor]:
    """Compute all requests over one flat buffer of words: first and second words of noise, then the others."""
    where = torch.device(device)
    if takes(where, sum(each.count for each in requests)):
        return _computed_by_kernel(requests, where)
    normal, integers, heavy = ([each for each in requests if each.kind == kind] for kind in ("noise", "hashed", "heavy"))
    segments = [(each, 0) for each in normal] + [(each, 1) for each in normal] + [(each, 0) for each in (*integers, *heavy)]
    words = _words(segments, device)
    ready: dict[tuple[str, int, str], torch.Tensor] = {}
    begin = 0
    for group, parts, values_of in ((normal, 2, _summed), (integers, 1, _low_bits), (heavy, 1, _heavy_tailed)):
        if group:
            total = sum(each.count for each in group)
            values = values_of(words[begin : begin + parts * total].view(parts, total)).split([each.count for each in group])
            ready |= {(each.kind, each.seed, each.name): x for each, x in zip(group, values, strict=True)}
            begin += parts * total
    return ready


def _computed_by_kernel(requests: list[Request], device: torch.device) -> dict[tuple[str, int, str], torch.Tensor]:
    """Compute all requests: those of float32 in one launch, the integers in another."""
    ready: dict[tuple[str, int, str], torch.Tensor] = {}
    for integers in (False, True):
        group = [each for each in requests if each.count and (each.kind == "hashed") == integers]
        if group:
            segments = [Segment(x.count, KINDS.index(x.kind), _key(x, 0), _key(x, 1) + 1) for x in group]
            ready |= {(x.kind, x.seed, x.name): one for x, one in zip(group, numbers_by_kernel(segments, device), strict=True)}
    for x in (each for each in requests if not each.count):
        ready[x.kind, x.seed, x.name] = torch.empty(0, dtype=torch.int64 if x.kind == "hashed" else torch.float32, device=device)
    return ready


def _summed(words: torch.Tensor) -> torch.Tensor:
    """Return noise of two words (2, n): the sum of their 8 parts, two parts of a word added at once."""
    pairs = (words & _EVEN).add_((words >> _NOISE_BITS).bitwise_and_(_EVEN))
    both = pairs[0] + pairs[1]
    total = (both & _LOW).add_(both >> 2 * _NOISE_BITS)
    return total.sub_(_CENTRE).to(torch.float32).mul_(_UNIT)


def _low_bits(words: torch.Tensor) -> torch.Tensor:
    """Return the low 48 bits of each word of (1, n)."""
    return words[0] & ((1 << _HASHED_BITS) - 1)


def _heavy_tailed(words: torch.Tensor) -> torch.Tensor:
    """Return +-m * 2**e of each word of (1, n): m uniform in [1, 2), e + 7 the ones among 12 bits.

    log2 deviates by 1.76, as that of exp(1.2 normal) does.
    """
    bits = words[0]
    # Ones of each 2 bits, of each 4, then of all three fours.
    ones = bits & 0xFFF
    ones = ones - (ones >> 1 & 0x555)
    ones = (ones & 0x333) + (ones >> 2 & 0x333)
    ones = (ones & 0xF) + (ones >> 4 & 0xF) + (ones >> 8)
    mantissa = 256 + ((bits >> 12) & 255)
    sign = 1 - 2 * ((bits >> 20) & 1)
    return (sign * mantissa * (1 << ones)).to(torch.float32) * 2.0**-15


def _words(segments: list[tuple[Request, int]], device: str) -> torch.Tensor:
    """Return 64-bit word number 0 or 1 of each element of each segment, one segment after the other, as int64."""
    counts = [each.count for each, _ in segments]
    starts = list(accumulate(counts, initial=0))
    bases = [_key(each, part) + part - 2 * start for (each, part), start in zip(segments, starts, strict=False)]
    x = torch.arange(0, 2 * starts[-1], 2, dtype=torch.int64, device=device)
    if len(segments) <= _FEW:
        for base, part in zip(bases, x.split(counts), strict=True):
            part += base
    else:
        both = torch.tensor([bases, counts], dtype=torch.int64).to(device, non_blocking=True)
        x += both[0].repeat_interleave(both[1], output_size=starts[-1])
    return _mixed(x)


def _key(request: Request, part: int) -> int:
    digest = hashlib.sha256(f"{request.seed}:{request.name}".encode()).digest()
    return int.from_bytes(digest[8 * part : 8 * part + 7], "little")


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Apply a 64-bit finaliser (xor-shift and odd multiply) in place.

    int64 wraps alike on every device, and shifts are made logical.
    """
    for shift, factor in _ROUNDS:
        x ^= (x >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        x *= factor - (1 << 64)
    x ^= (x >> 32).bitwise_and_(_MASK_32)
    return x


def _sent(lists: list[tuple[int, ...]], device: str) -> dict[tuple[int, ...], torch.Tensor]:
    """Copy all lists to the device at once."""
    if not lists:
        return {}
    flat = torch.tensor([value for each in lists for value in each], dtype=torch.int64).to(device, non_blocking=True)
    return dict(zip(lists, flat.split([len(each) for each in lists]), strict=True))
