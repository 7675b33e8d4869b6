"""The values of q, k, v and dO: each pattern of a Recipe, before its scales, as float32 (tokens, heads, dim).

Every element is a hash (noise.py); all arithmetic on it is exact in float32 (sums of small integers, powers of two) up to one
rounding to the dtype, so that all devices give the same values. Positions, first keys, blocks and outliers are those of each
sequence. Magnitudes within a pattern are chosen by a hash of the seed. What each pattern is for:

    normal         scores near 0: the sharpest probe of indexing, masks and scale
    zeros          q = k = 0: every P is 1/n, dQ and dK are exactly 0
    uniform01      no negative values: sums do not cancel, so that a bias of the rounding adds up
    fewvalued      -1, 0 and 1: products are exact, so that only errors of P remain
    sparse         four fifths are 0: lost and doubled terms are large
    constant_v     O is that V: softmax must sum to 1; Delta cancels dP
    ties           all keys are equal: P is uniform, every score is the maximum
    ties_q         all queries are equal: dK, dV add up n equal terms, whose roundings do not average out
    dup_keys       few distinct keys: ties between tiles
    block_const    runs of equal rows: equal roundings within a tile, other ones in the next
    needle         V encodes the key's position, so that O shows which keys took part
    small_logits   scores so small that P is almost uniform
    normal_scaled  normal with another magnitude for each tensor
    large_logits   one key wins: rescaling, P near 0 and 1
    huge_logits    scores in the hundreds: only the maximum has weight, the exponent's error is largest
    falling        scores fall tile by tile: the first maximum stays
    rising         scores rise tile by tile: every tile rescales
    negative       all scores far below 0
    below_sentinels  all scores below -1e4 or below -65504, values with which kernels replace -inf; else as normal
    large_products products of q and k beyond 65504, the largest float16, with a scale so small that scores are plain
    sink           the first key takes most of the weight, with V = 0 there for half of the seeds
    onehot         key i is query i: P is the identity, dS cancels
    k_offset       a row common to all keys: scores share a large offset that softmax must cancel
    v_mean         V far from 0: O is large beside its differences, dP - Delta cancels
    sorted_do      dO and V grow with the position: errors keep one sign over a tile
    outlier        one large token of the batch in k and v
    chan_outlier   a few large channels, as in trained models
    tok_outlier    one large token in every sequence and tensor
    lognormal      heavy tails in all tensors: sums dominated by few terms
    do_orthogonal  dO orthogonal to O: Delta is the small rest of large products
    do_parallel    dO along O: Delta is as large as can be
    tiny           everything small, but normal numbers
    subnormal      around the dtype's smallest normal number: flushing and lost bits
    near_overflow  V close to the dtype's largest number: intermediate results must not overflow

Keys beyond a sequence's length (padding) need no pattern: they are slack rows, NaN in the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from attnfuzz.harness.trial.noise import Numbers, Request, chosen
from attnfuzz.harness.trial.places import Places, equal_lengths, starts_of
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Recipe

__all__ = ["Maker", "requests_of"]

_T = TypeVar("_T")
_TENSORS = ("q", "k", "v", "do")
_DEVIATION = 0.816
"""Standard deviation of the noise."""
_LARGEST_PRODUCT = 26
"""Power of two: q and k, each about half of it, stay far below the largest float16."""


class Maker:
    """One Recipe's pattern on one Problem's shapes, before scales: float32 (tokens, heads, dim)."""

    def __init__(self, problem: Problem, recipe: Recipe, numbers: Numbers) -> None:
        self.problem, self.recipe, self.pattern = problem, recipe, recipe.pattern
        self._numbers, self.device = numbers, numbers.device
        self._queries, self._keys = Places(problem.seqlens_q, numbers), Places(problem.seqlens_k, numbers)

    def q(self) -> torch.Tensor:
        """Queries: (total_q, heads, dim_qk)."""
        p = self.problem
        q = self._plain("q", p.total_q, p.heads, p.dim_qk)
        match self.pattern:
            case "large_logits":
                return q * 8
            case "huge_logits":
                return q * 64
            case "onehot":
                return q * 8
            case "small_logits":
                return q * self._power("q", -12, -5)
            case "below_sentinels":
                return self._one_channel(q, 2.0 ** (self._depth() // 2))
            case "large_products":
                return q * 2.0 ** (self._growth() // 2)
            case "falling" | "rising" | "negative":
                # q along a common positive direction, so that k alone decides the score's level.
                return q * 0.25 + 1
            case "sink":
                return q + self._chosen("level", (0.5, 1.0, 2.0))
            case "ties_q":
                return q[self._queries.first]
            case "block_const":
                return q[self._queries.block(4)]
            case "sorted_do":
                return self._queries.sorted(q) if self._chosen("q too", (False, True)) else q
            case "chan_outlier":
                return self._channels(q, "qk", 2, self._power("q", 3, 7))
            case "tok_outlier":
                return self._token(q, "q", self._queries, self._power("q", 1, 5))
            case "normal_scaled":
                return q * self._power("q", -3, 2)
            case "tiny":
                return q * 2.0**-8
            case "subnormal":
                return q * self._subnormal("q")
            case "zeros":
                return torch.zeros_like(q)
            case _:
                return q

    def k(self) -> torch.Tensor:
        """Keys: (total_k, kv_heads, dim_qk)."""
        p = self.problem
        k = self._plain("k", p.total_k, p.kv_heads, p.dim_qk)
        match self.pattern:
            case "ties":
                return self._noise("k", 1, p.kv_heads, p.dim_qk).expand_as(k)
            case "dup_keys":
                return k[self._repeated()]
            case "block_const":
                return k[self._keys.block(4)]
            case "large_logits":
                return k * 4
            case "huge_logits":
                return k * 16
            case "onehot":
                return self._copied_queries(k * 8)
            case "sink":
                return torch.where(self._keys.position[:, None, None] == 0, 1.0, k)
            case "k_offset":
                offset = self._noise("offset", p.batch, p.kv_heads, p.dim_qk) * self._power("k", 2, 4)
                return k + offset[self._keys.sequence]
            case "outlier":
                return self._outlier(k, 16.0)
            case "chan_outlier":
                return self._channels(k, "qk", 2, self._chosen("k", (1.0, 4.0)))
            case "tok_outlier":
                return self._token(k, "k", self._keys, self._power("k", 1, 5))
            case "below_sentinels":
                return self._one_channel(k, math.copysign(2.0 ** -(-self._depth() // 2), -p.scale))
            case "large_products":
                return k * 2.0 ** -(-self._growth() // 2)
            case "falling" | "rising":
                return k * 0.25 + self._staircase()
            case "negative":
                # Scores near -32 * dim * scale: lse < -88 by the default scale, and below -1e4 with larger ones.
                return k * 0.25 - 32
            case "normal_scaled":
                return k * self._power("k", -3, 2)
            case "tiny":
                return k * 2.0**-8
            case "subnormal":
                return k * self._subnormal("k")
            case "zeros":
                return torch.zeros_like(k)
            case _:
                return k

    def v(self) -> torch.Tensor:
        """Values: (total_k, kv_heads, dim_v)."""
        p = self.problem
        v = self._plain("v", p.total_k, p.kv_heads, p.dim_v)
        match self.pattern:
            case "constant_v":
                return self._constant(p.kv_heads).expand_as(v)
            case "do_orthogonal" | "do_parallel":
                return self._constant(p.kv_heads) + v * 0.0625
            case "needle":
                return self._needle(v)
            case "dup_keys":
                return v[self._repeated()] if self._chosen("v too", (False, True)) else v
            case "block_const":
                return self._blocks_of_v(v)
            case "sink":
                first = self._keys.position[:, None, None] == 0
                return v.masked_fill(first, 0.0) if self._chosen("empty sink", (False, True)) else v
            case "v_mean":
                return v + self._power("v", 0, 6)
            case "sorted_do":
                return self._keys.sorted(v)
            case "outlier":
                return self._outlier(v, 64.0)
            case "chan_outlier":
                return self._channels(v, "v", 1, self._power("v", 3, 8))
            case "tok_outlier":
                return self._token(v, "v", self._keys, self._power("v", 3, 8))
            case "normal_scaled":
                return v * self._power("v", -6, 6)
            case "tiny":
                return v * 2.0**-10
            case "subnormal":
                return v * self._subnormal("v")
            case "near_overflow":
                return v * (self._power("v", 12, 14) if p.dtype == "float16" else 2.0**100)
            case _:
                return v

    def d_o(self) -> torch.Tensor:
        """Gradients of O: (total_q, heads, dim_v)."""
        p = self.problem
        d_o = self._plain("do", p.total_q, p.heads, p.dim_v)
        match self.pattern:
            case "do_parallel":
                return self._constant(p.kv_heads).repeat_interleave(p.groups, 1) + d_o * 0.0625
            case "do_orthogonal":
                return self._turned(self._constant(p.kv_heads).repeat_interleave(p.groups, 1)) + d_o * 0.0625
            case "ties_q":
                return d_o[self._queries.first] if self._chosen("do too", (False, True)) else d_o
            case "block_const":
                return d_o[self._queries.block(4)] if self._chosen("v too", (False, True)) else d_o
            case "v_mean":
                return d_o + self._chosen("do", (0.0, 1.0, 4.0))
            case "sorted_do":
                return self._queries.sorted(d_o)
            case "chan_outlier":
                return self._channels(d_o, "do", 1, self._power("do", 0, 6))
            case "tok_outlier":
                return self._token(d_o, "do", self._queries, self._power("do", 2, 6))
            case "normal_scaled":
                return d_o * self._power("do", -10, 5)
            case "tiny":
                return d_o * 2.0**-10
            case "subnormal":
                return d_o * self._subnormal("do")
            case "near_overflow":
                return d_o * self._power("do", -3, 4)
            case _:
                return d_o

    def _noise(self, name: str, *shape: int) -> torch.Tensor:
        return self._numbers.noise(self.recipe.seed, name, shape)

    def _hashed(self, name: str, *shape: int) -> torch.Tensor:
        return self._numbers.hashed(self.recipe.seed, name, shape)

    def _chosen(self, name: str, options: Sequence[_T]) -> _T:
        return chosen(self.recipe.seed, f"{self.pattern} {name}", options)

    def _power(self, name: str, low: int, high: int) -> float:
        """Return a power of two from 2**low to 2**high, by the seed."""
        return 2.0 ** self._chosen(f"{name} power", range(low, high + 1))

    def _plain(self, name: str, *shape: int) -> torch.Tensor:
        """Return the values that a pattern starts from: noise, or a distribution common to all tensors."""
        match self.pattern:
            case "uniform01":
                return self._numbers.uniform(self.recipe.seed, f"{name} uniform", shape)
            case "fewvalued":
                return self._noise(name, *shape).clamp(-1.25, 1.25).round()
            case "sparse":
                kept = self._hashed(f"{name} kept", *shape) % 5 == 0
                return torch.where(kept, self._noise(name, *shape), 0.0)
            case "lognormal":
                return self._numbers.heavy(self.recipe.seed, f"{name} heavy", shape)
            case _:
                return self._noise(name, *shape)

    def _constant(self, heads: int) -> torch.Tensor:
        return self._noise("constant", 1, heads, self.problem.dim_v)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """Map (a, b) to (b, -a) on pairs of dims; an odd last dim stays 0."""
        turned, even = torch.zeros_like(x), x.shape[-1] // 2 * 2
        turned[..., 0:even:2], turned[..., 1:even:2] = x[..., 1:even:2], -x[..., 0:even:2]
        return turned

    def _staircase(self) -> torch.Tensor:
        """Return keys whose scores fall (or rise) by a step every 8 keys, over 16 levels, then start again."""
        level = torch.floor(self._keys.position[:, None, None].to(torch.float32) / 8) % 16
        return (15 - level if self.pattern == "falling" else level) * 0.25

    def _needle(self, v: torch.Tensor) -> torch.Tensor:
        """Set V of key j to 1 in dim j % dim_v, and to its position as a fraction in the next dim."""
        place = self._keys.position[:, None, None].to(torch.float32)
        dims = torch.arange(self.problem.dim_v, dtype=torch.float32, device=self.device)
        hit = (dims == place % self.problem.dim_v).to(torch.float32)
        after = (dims == (place + 1) % self.problem.dim_v).to(torch.float32)
        return (hit + after * ((place % 256) / 256)).expand_as(v).clone()

    def _outlier(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """Multiply one token of the batch, chosen by the seed, by `factor`."""
        if x.shape[0]:
            x = x.clone()
            x[self.recipe.seed % x.shape[0]] *= factor
        return x

    def _token(self, x: torch.Tensor, name: str, places: Places, factor: float) -> torch.Tensor:
        """Multiply one token of each sequence, chosen by the seed, by `factor`."""
        token = self._hashed(f"{name} token", self.problem.batch)
        return torch.where((token[places.sequence] % places.length == places.position)[:, None, None], x * factor, x)

    def _channels(self, x: torch.Tensor, name: str, count: int, factor: float) -> torch.Tensor:
        """Multiply `count` dims by `factor`, the same ones for all tensors of this `name`; those of v and dO differ."""
        dim = x.shape[-1]
        first = self._chosen("channel qk" if name == "qk" else "channel v", range(dim)) + (name == "do")
        x = x.clone()
        for other in range(min(count, dim)):
            x[..., (first + other * (dim // 2 or 1)) % dim] *= factor
        return x

    def _one_channel(self, x: torch.Tensor, value: float) -> torch.Tensor:
        """Set one dim, the same in q and k, to a value."""
        x = x.clone()
        x[..., self._chosen("channel", range(self.problem.dim_qk))] = value
        return x

    def _depth(self) -> int:
        """Return the power of two of a product that lies, scaled, below -1e4 or below -65504."""
        _, power = math.frexp(abs(self.problem.scale) or 1.0)
        return max(0, min(_LARGEST_PRODUCT, self._chosen("depth", (14, 17, 17, 17)) + 1 - power))

    def _growth(self) -> int:
        """Return the power of two by which products of noise grow until scores deviate by 1 to 2."""
        _, power = math.frexp(_DEVIATION**2 * abs(self.problem.scale) * math.sqrt(self.problem.dim_qk))
        return max(0, min(_LARGEST_PRODUCT, 1 - power))

    def _repeated(self) -> torch.Tensor:
        """Return for each key the one it repeats: from 1/2, 1/4 or 1/16 of its sequence, at random or in runs."""
        keys = self._keys
        distinct = (keys.length // self._chosen("distinct", (2, 4, 16))).clamp(min=1)
        if self._chosen("runs", (False, True)):
            return keys.first + keys.position * distinct // keys.length
        return keys.first + self._hashed("k repeated", self.problem.total_k) % distinct

    def _blocks_of_v(self, v: torch.Tensor) -> torch.Tensor:
        if self._chosen("v too", (False, True)):
            v = v[self._keys.block(4)] * 4
        if self._chosen("signs", (False, False, True)):
            v = v.sign()
        return v[..., :1].expand_as(v) if self._chosen("one value", (False, False, True)) else v

    def _copied_queries(self, k: torch.Tensor) -> torch.Tensor:
        """Set key i to query i of its group's first head, in sequences with equal lengths."""
        p = self.problem
        equal = equal_lengths(p)
        if not any(same and n for same, n in zip(equal, p.seqlens_k, strict=True)):
            return k
        keys = self._keys
        starts = self._numbers.integers(starts_of(p.seqlens_q))
        same = self._numbers.integers(equal).to(torch.bool)[keys.sequence]
        source = torch.where(same, starts[keys.sequence] + keys.position, 0)
        return torch.where(same[:, None, None], self.q()[source][:, :: p.groups] * self._chosen("copy", (1.0, 2.0)), k)

    def _subnormal(self, name: str) -> float:
        """Return a scale that moves some tensors around the dtype's smallest normal number, but not the products of others."""
        if self.problem.dtype == "float16":
            return 1.0 if name == "k" else 2.0**-14
        # q with k, and each of v and dO; both would make dP exactly 0.
        scales = self._chosen("tensors", ((0, 0, -126, 0), (0, 0, 0, -126), (0, 0, -126, -126), (-126, 100, 0, 0)))
        return 2.0 ** scales[_TENSORS.index(name)]


def requests_of(problem: Problem, recipe: Recipe) -> Iterator[Request]:
    """Yield the numbers that a `Maker` will ask for."""
    p, pattern = problem, recipe.pattern
    tokens = {"q": p.total_q, "k": p.total_k, "v": p.total_k, "do": p.total_q}
    rows = {"q": p.heads * p.dim_qk, "k": p.kv_heads * p.dim_qk, "v": p.kv_heads * p.dim_v, "do": p.heads * p.dim_v}
    hashes = {"uniform01": "uniform", "sparse": "kept"}
    for name, count in tokens.items():
        if pattern in hashes:
            yield Request("hashed", recipe.seed, f"{name} {hashes[pattern]}", count * rows[name])
        if pattern == "lognormal":
            yield Request("heavy", recipe.seed, f"{name} heavy", count * rows[name])
        elif pattern != "uniform01":
            yield Request("noise", recipe.seed, name, count * rows[name])
        if pattern == "tok_outlier":
            yield Request("hashed", recipe.seed, f"{name} token", p.batch)
    if pattern in ("constant_v", "do_orthogonal", "do_parallel"):
        yield Request("noise", recipe.seed, "constant", rows["v"])
    elif pattern == "k_offset":
        yield Request("noise", recipe.seed, "offset", p.batch * rows["k"])
    elif pattern == "dup_keys":
        yield Request("hashed", recipe.seed, "k repeated", p.total_k)
