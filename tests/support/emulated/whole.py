"""The simpler emulated kernel: each sequence whole, in torch float32, with hooks that plant numeric faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from attnfuzz.kernels.contract import Capabilities, Config, Device, Inputs, why_unsupported
from attnfuzz.kernels.problem import Problem
from attnfuzz.oracles.attention import sequences, visible_keys

LOG2_E, LN_2 = math.log2(math.e), math.log(2.0)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
WIDE = Capabilities(
    packings=("ragged", "dense"),
    dtypes=("float16", "bfloat16", "float32"),
    dims=((64, 64), (32, 32), (64, 48), (16, 40), (128, 128)),
    groups=None,
    causal=(None, "bottom_right", "top_left"),
    zero_q=True,
    zero_k=True,
    unequal=True,
    slack=True,
    layouts=True,
    scale_any=True,
    devices=("cpu",),
    compiles_on=(),
    dlse=True,
)


@dataclass
class Emulated:
    """A Kernel that computes each sequence whole; `faults` change one step each (see `_Sequence`)."""

    name: str = "test.emulated"
    faults: frozenset[str] = frozenset()
    capabilities: Capabilities = WIDE
    backend: str = "test"
    files: tuple[str, ...] = ()
    before: Callable[[Inputs], None] = field(default=lambda inputs: None)

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        return (Config(tile_m=32, tile_n=32), Config(tile_m=16, tile_n=32))

    def unavailable(self, device: Device) -> str | None:
        return None if device == "cpu" else "an emulation on the CPU"

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        return why_unsupported(self.capabilities, problem, device)

    def compile_key(self, problem: Problem, config: Config) -> str:
        return "none"

    def build(self, problem: Problem, config: Config, device: Device) -> Emulated:
        return self

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        self.before(inputs)
        p = inputs.problem
        o = torch.empty(*inputs.q.shape[:-1], p.dim_v, dtype=inputs.q.dtype)
        lse = torch.empty((p.batch, p.heads, inputs.q.shape[1]) if p.packing == "dense" else (p.heads, inputs.q.shape[0]))
        for one in self._each(inputs):
            o_s, lse_s = one.forward()
            one.put(o, o_s, one.problem.seqlens_q)
            one.put_lse(lse, lse_s)
        return o, lse

    def backward(
        self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq, dk, dv = (torch.empty_like(x) for x in (inputs.q, inputs.k, inputs.v))
        for one in self._each(inputs):
            dq_s, dk_s, dv_s = one.backward()
            one.put(dq, dq_s, one.problem.seqlens_q)
            one.put(dk, dk_s, one.problem.seqlens_k)
            one.put(dv, dv_s, one.problem.seqlens_k)
        return dq, dk, dv

    def _each(self, inputs: Inputs) -> list[_Sequence]:
        return [_Sequence(inputs.problem, data, self.faults) for data in sequences(inputs)]


class _Sequence:
    """One sequence, heads first, float32 with one rounding of P, dS and each output to the dtype."""

    def __init__(self, problem: Problem, data, faults: frozenset[str]) -> None:
        self.problem, self.data, self.faults = problem, data, faults
        self.dtype = DTYPES[problem.dtype]
        self.p_dtype = torch.bfloat16 if "p in bf16" in faults else self.dtype
        self.q, self.d_o = data.q.float(), data.d_o.float()
        self.k, self.v = (x.float().repeat_interleave(problem.groups, 0) for x in (data.k, data.v))
        self.mask = visible_keys(problem, data.index)
        if "mask off by one" in faults and problem.causal:
            self.mask = self.mask.roll(1, 1)
        if "last key dropped" in faults and self.mask.shape[1] > 1:
            self.mask = self.mask.clone()
            self.mask[:, -1] = False
        self.live = self.mask.any(-1)
        scale = problem.scale * (1.01 if "scale 1 %" in faults else 1.0)
        log2_e = 1.4424 if "log2e with four digits" in faults else LOG2_E
        s = (self.q @ self.k.mT) * (scale * log2_e)
        if "scores in half" in faults:
            s = s.to(self.dtype).float()
        self.s = s.masked_fill(~self.mask, -math.inf)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        m = self.s.amax(-1) if self.s.shape[-1] else self.s.new_zeros(self.s.shape[:-1])
        m = m.masked_fill(~self.live, 0.0)
        p = torch.exp2(self.s - m[..., None])
        total = p.sum(-1)
        half = p.to(self.p_dtype).float()
        if "p truncated" in self.faults:
            half = _truncated(p, self.dtype)
        o = (half @ self.v) / total.masked_fill(~self.live, 1.0)[..., None]
        o = o.masked_fill(~self.live[:, None], 0.0)
        whole = torch.log2(total) + m
        if split := self._split("partial o in half") or self._split("split lse in half"):
            o, whole = self._of_splits(split, whole)
        if split := self._split("splits weighted by lse"):
            o, whole = self._weighted(split)
        lse = whole * (1.0 if "lse in base 2" in self.faults else LN_2)
        if "lse in half" in self.faults:
            lse = lse.to(self.dtype).float()
        self.o = _truncated(o, self.dtype).to(self.dtype) if "o truncated" in self.faults else o.to(self.dtype)
        self.true_lse = (whole * LN_2).masked_fill(~self.live, -math.inf)
        return self.o, lse.masked_fill(~self.live, -math.inf)

    def _split(self, fault: str) -> int:
        """The N of a fault "..., splits of N", or 0 without it."""
        return next((int(each.split()[-1]) for each in self.faults if each.startswith(f"{fault}, splits of ")), 0)

    def _of_splits(self, size: int, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """O and log2 LSE combined in float32 from those of each split of `size` keys; one of the two is rounded to the dtype."""
        o = self.s.new_zeros(*self.s.shape[:-1], self.v.shape[-1])
        half_lse, partials = bool(self._split("split lse in half")), []
        for start in range(0, self.s.shape[-1], size):
            s, v = self.s[..., start : start + size], self.v[:, start : start + size]
            top = s.amax(-1)
            live = top > -math.inf
            top = top.masked_fill(~live, 0.0)
            p = torch.exp2(s - top[..., None])
            total_s = p.sum(-1).masked_fill(~live, 1.0)
            partial = p.to(self.dtype).float() @ v / total_s[..., None]
            lse = torch.log2(total_s) + top
            if half_lse:
                lse = (lse * LN_2).to(self.dtype).float() * LOG2_E
            else:
                partial = partial.to(self.dtype).float()
            partials.append((start, partial, lse.masked_fill(~live, -math.inf)))
        if half_lse and partials:
            whole = torch.stack([lse.double() for _, _, lse in partials]).mul(math.log(2)).logsumexp(0).div(math.log(2)).float()
            whole = whole.masked_fill(~self.live, 0.0)
        for start, partial, lse in partials:
            weight = torch.exp2(lse - whole)
            if "a split's weight 1 %" in self.faults and start:
                weight = weight * 1.01
            o += weight[..., None] * partial
        return o, whole

    def _weighted(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """O and log2 LSE of splits of `size` keys, weighted by exp(LSE of the split - LSE), float32 and natural."""
        partials, sums = [], []
        for start in range(0, self.s.shape[-1], size):
            s, v = self.s[..., start : start + size], self.v[:, start : start + size]
            live = (s > -math.inf).any(-1)
            top = s.amax(-1).masked_fill(~live, 0.0)
            p = torch.exp2(s - top[..., None])
            total = p.sum(-1).masked_fill(~live, 1.0)
            partials.append(p.to(self.dtype).float() @ v / total[..., None])
            sums.append((torch.log(total) + top * LN_2).masked_fill(~live, -math.inf))
        if not sums:
            return self.s.new_zeros(*self.s.shape[:-1], self.v.shape[-1]), self.s.new_zeros(self.s.shape[:-1])
        most = torch.stack(sums).amax(0).masked_fill(~self.live, 0.0)
        lse = torch.log(torch.stack([torch.exp(each - most) for each in sums]).sum(0)) + most
        lse = lse.masked_fill(~self.live, 0.0)
        o = torch.stack([torch.exp(each - lse)[..., None] * part for each, part in zip(sums, partials, strict=True)]).sum(0)
        return o, lse * LOG2_E

    def backward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.forward()
        s, scaled_k = self.s, self.k * self.problem.scale
        if "k scaled in half" in self.faults:
            # As FlagGems does: dQ is dS @ K of these, divided by log2(e).
            half = (self.k * (self.problem.scale * LOG2_E)).to(self.dtype).float()
            s, scaled_k = self.q @ half.mT, half * LN_2
        p = torch.where(self.mask, torch.exp2(s - self.true_lse[..., None] * LOG2_E), 0.0)
        products = self.o.float() * self.d_o
        delta = (products.to(self.dtype).float() if "delta products in half" in self.faults else products).sum(-1)
        if "delta missing" in self.faults:
            delta = torch.zeros_like(delta)
        if "delta in half" in self.faults:
            delta = delta.to(self.dtype).float()
        if self.data.d_lse is not None:
            delta = delta - self.data.d_lse
        ds = (
            (p * (self.d_o @ self.v.mT - delta[..., None]))
            .to(torch.bfloat16 if "ds in bf16" in self.faults else self.dtype)
            .float()
        )
        dq = ds @ scaled_k * (1.01 if "dq scale 1 %" in self.faults else 1.0)
        dk = self._grouped(ds.mT @ self.q * self.problem.scale)
        dv = self._grouped(p.to(self.p_dtype).float().mT @ self.d_o)
        return dq.to(self.dtype), dk, dv

    def _grouped(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.unflatten(0, (self.problem.kv_heads, self.problem.groups))
        if "group not summed" in self.faults:
            return parts[:, -1].to(self.dtype)
        if "partials in half" in self.faults:
            parts = parts.to(self.dtype).float()
        return parts.sum(1).to(self.dtype)

    def put(self, out: torch.Tensor, part: torch.Tensor, lengths: tuple[int, ...]) -> None:
        """Store (heads, tokens, dim) as this sequence's rows."""
        index, n = self.data.index, lengths[self.data.index]
        if self.problem.packing == "dense":
            out[index, :n] = part.transpose(0, 1)
        else:
            start = sum(lengths[:index])
            out[start : start + n] = part.transpose(0, 1)

    def put_lse(self, out: torch.Tensor, part: torch.Tensor) -> None:
        index, lengths = self.data.index, self.problem.seqlens_q
        if self.problem.packing == "dense":
            out[index, :, : lengths[index]] = part
        else:
            start = sum(lengths[:index])
            out[:, start : start + lengths[index]] = part


def _truncated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 rounded toward zero to `dtype`, as float32."""
    y = x.to(dtype)
    over = y.float().abs() > x.abs()
    return torch.where(over, torch.nextafter(y, torch.zeros_like(y)), y).float()
