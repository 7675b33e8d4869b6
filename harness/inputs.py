"""Recipe -> tensors: the same values, bit for bit, on every device, in any order of creation.

Each element is a hash of (seed, tensor name, element index) in 64-bit integers; what follows is exact in float32 (sums of small
integers, powers of two) up to one rounding to the dtype, so that no device's own arithmetic can show.
"""

from __future__ import annotations

import hashlib
import math
from itertools import accumulate

import torch

from attnfuzz.kernels.contract import Inputs
from attnfuzz.kernels.problem import Problem, reject
from attnfuzz.strategies.case import Recipe

__all__ = ["materialise", "noise"]

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_MASK_32 = (1 << 32) - 1
_NOISE_BITS = 11
_PARTS = 4
_SIGMA = math.sqrt(2 * _PARTS * ((1 << _NOISE_BITS) ** 2 - 1) / 12)
"""Of a sum of 8 uniform 11-bit integers; noise() divides by the power of two next to it, so its deviation is 0.816."""
_UNIT = 2.0 ** -round(math.log2(_SIGMA))


def materialise(problem: Problem, recipe: Recipe, device: str) -> Inputs:
    """The tensors of a Case on `device`: slack rows are NaN, dLSE is given where the Problem needs it.

    Raises:
        BadArgument: a memory layout that inputs cannot build yet.
    """
    for name in ("layout_q", "layout_k", "layout_v", "layout_do"):
        layout = getattr(problem, name)
        if layout != type(layout)():
            raise reject(name, layout, "only contiguous tensors can be built yet", "leave the layout out")
    dtype = _DTYPES[problem.dtype]
    maker = _Maker(problem, recipe, device)
    q, k, v, d_o = maker.q(), maker.k(), maker.v(), maker.d_o()
    return Inputs(
        problem=problem,
        q=_packed(problem, q * recipe.q_scale, problem.seqlens_q, problem.slack_q, dtype),
        k=_packed(problem, k * recipe.k_scale, problem.seqlens_k, problem.slack_k, dtype),
        v=_packed(problem, v * recipe.v_scale, problem.seqlens_k, problem.slack_k, dtype),
        d_o=_packed(problem, d_o * recipe.do_scale, problem.seqlens_q, problem.slack_q, dtype),
        cu_seqlens_q=_cumulated(problem.seqlens_q, device),
        cu_seqlens_k=_cumulated(problem.seqlens_k, device),
        max_seqlen_q=max(problem.seqlens_q),
        max_seqlen_k=max(problem.seqlens_k),
        d_lse=_d_lse(problem, recipe, device) if problem.needs.dlse else None,
    )


def noise(seed: int, name: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Hashed noise of `shape`: float32, near normal, mean 0, deviation 0.816, within 4.

    It is a sum of 8 uniforms, exact multiples of 2**-12.

    Element i depends on (seed, name, i) alone.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    count = math.prod(shape)
    index = torch.arange(count, dtype=torch.int64, device=device)
    total = torch.zeros(count, dtype=torch.int64, device=device)
    for part in range(2):
        key = int.from_bytes(digest[8 * part : 8 * part + 7], "little")
        bits = _mixed(index * 2 + part + key)
        for slot in range(_PARTS):
            total += (bits >> (slot * _NOISE_BITS)) & ((1 << _NOISE_BITS) - 1)
    centre = 2 * _PARTS * ((1 << _NOISE_BITS) - 1)
    return ((2 * total - centre).to(torch.float32) * (_UNIT / 2)).reshape(shape)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """A 64-bit finaliser (xor-shift and odd multiply, twice); int64 wraps alike on every device, and shifts are made logical."""
    for shift, factor in ((32, 0x9E3779B97F4A7C15), (29, 0xD6E8FEB86659FD93), (32, 0xD6E8FEB86659FD93)):
        x = x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))
        x = x * (factor - (1 << 64))
    return x ^ ((x >> 32) & _MASK_32)


class _Maker:
    """One Recipe's pattern on one Problem's shapes, before scales: float32 (tokens, heads, dim)."""

    def __init__(self, problem: Problem, recipe: Recipe, device: str) -> None:
        self.problem, self.recipe, self.device, self.pattern = problem, recipe, device, recipe.pattern

    def noise(self, name: str, *shape: int) -> torch.Tensor:
        return noise(self.recipe.seed, name, shape, self.device)

    def q(self) -> torch.Tensor:
        p = self.problem
        q = self.noise("q", p.total_q, p.heads, p.dim_qk)
        match self.pattern:
            case "large_logits":
                return q * 8
            case "falling" | "rising" | "negative":
                # q along a common positive direction, so that k alone decides the score's level.
                return q * 0.25 + 1
            case "tiny":
                return q * 2.0**-8
            case "subnormal":
                return q * _subnormal(p)
            case "zeros":
                return torch.zeros_like(q)
            case _:
                return q

    def k(self) -> torch.Tensor:
        p = self.problem
        k = self.noise("k", p.total_k, p.kv_heads, p.dim_qk)
        match self.pattern:
            case "ties":
                return self.noise("k", 1, p.kv_heads, p.dim_qk).expand_as(k)
            case "large_logits":
                return k * 4
            case "outlier":
                return self._outlier(k, 16.0)
            case "falling" | "rising":
                return k * 0.25 + self._staircase()
            case "negative":
                # Scores near -32 * dim * scale: lse < -88 by the default scale, and below -1e4 with larger ones.
                return k * 0.25 - 32
            case "tiny":
                return k * 2.0**-8
            case "zeros":
                return torch.zeros_like(k)
            case _:
                return k

    def v(self) -> torch.Tensor:
        p = self.problem
        v = self.noise("v", p.total_k, p.kv_heads, p.dim_v)
        match self.pattern:
            case "constant_v":
                return self._constant(p.kv_heads).expand_as(v)
            case "do_orthogonal" | "do_parallel":
                return self._constant(p.kv_heads) + v * 0.0625
            case "needle":
                return self._needle(v)
            case "outlier":
                return self._outlier(v, 64.0)
            case "tiny":
                return v * 2.0**-10
            case "subnormal":
                return v * _subnormal(p)
            case _:
                return v

    def d_o(self) -> torch.Tensor:
        p = self.problem
        d_o = self.noise("do", p.total_q, p.heads, p.dim_v)
        constant = self._constant(p.kv_heads).repeat_interleave(p.groups, 1)
        match self.pattern:
            case "do_parallel":
                return constant + d_o * 0.0625
            case "do_orthogonal":
                # (a, b) -> (b, -a) on pairs of dims; an odd last dim keeps 0.
                turned = torch.zeros_like(constant)
                even = p.dim_v // 2 * 2
                turned[..., 0:even:2], turned[..., 1:even:2] = constant[..., 1:even:2], -constant[..., 0:even:2]
                return turned + d_o * 0.0625
            case "tiny":
                return d_o * 2.0**-10
            case "subnormal":
                return d_o * _subnormal(p)
            case _:
                return d_o

    def _constant(self, heads: int) -> torch.Tensor:
        return self.noise("constant", 1, heads, self.problem.dim_v)

    def _positions(self) -> torch.Tensor:
        """Position of each key in its own sequence, float32 (total_k, 1, 1)."""
        lengths = self.problem.seqlens_k
        ranges = [torch.arange(n, dtype=torch.float32, device=self.device) for n in lengths]
        return torch.cat(ranges)[:, None, None]

    def _staircase(self) -> torch.Tensor:
        """Keys whose scores fall (or rise) by a step every 8 keys, over 16 levels and back again."""
        level = torch.floor(self._positions() / 8) % 16
        return (15 - level if self.pattern == "falling" else level) * 0.25

    def _needle(self, v: torch.Tensor) -> torch.Tensor:
        """Key j is 1 in dim j % dim_v and its own position, as a fraction, in the dim after: O tells which keys took part."""
        place = self._positions()
        dims = torch.arange(self.problem.dim_v, dtype=torch.float32, device=self.device)
        hit = (dims == place % self.problem.dim_v).to(torch.float32)
        after = (dims == (place + 1) % self.problem.dim_v).to(torch.float32)
        return (hit + after * ((place % 256) / 256)).expand_as(v).clone()

    def _outlier(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """One token of the batch, chosen by the seed, is `factor` times as large."""
        if x.shape[0]:
            x = x.clone()
            x[self.recipe.seed % x.shape[0]] *= factor
        return x


def _subnormal(problem: Problem) -> float:
    """A scale that puts values around the dtype's smallest normal number."""
    return 2.0**-14 if problem.dtype == "float16" else 2.0**-126


def _packed(problem: Problem, values: torch.Tensor, lengths: tuple[int, ...], slack: int, dtype: torch.dtype) -> torch.Tensor:
    """float32 (tokens, heads, dim) -> the packing in `dtype`, clamped to its finite range, NaN in slack rows."""
    finite = torch.finfo(dtype).max
    values = values.clamp(-finite, finite).to(dtype)
    if problem.packing == "dense":
        values = values.reshape(problem.batch, lengths[0], *values.shape[1:])
    shape = list(values.shape)
    shape[-3] += slack
    out = torch.full(shape, torch.nan, dtype=dtype, device=values.device)
    out[..., : values.shape[-3], :, :] = values
    return out


def _cumulated(lengths: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _d_lse(problem: Problem, recipe: Recipe, device: str) -> torch.Tensor:
    values = noise(recipe.seed, "dlse", (problem.total_q, problem.heads), device) * recipe.do_scale
    if problem.packing == "dense":
        values = values.reshape(problem.batch, problem.seqlens_q[0], problem.heads)
    shape = (*values.shape[:-2], problem.heads, values.shape[-2] + problem.slack_q)
    out = torch.full(shape, torch.nan, dtype=torch.float32, device=device)
    out[..., : values.shape[-2]] = values.transpose(-1, -2)
    return out
