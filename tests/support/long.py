"""A kernel that is cheap where one side is long: float32, whole rows, strided inputs; and faults that show far along only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attnfuzz.kernels.contract import Capabilities, Config, Device, Inputs, why_unsupported
from attnfuzz.kernels.problem import OUTPUT_NAMES, Problem
from attnfuzz.oracles.attention import visible_keys

FAR = 16_384
"""Index from which the planted faults show."""
CAN = Capabilities(
    packings=("ragged", "dense"),
    dtypes=("float16", "bfloat16", "float32"),
    dims=((16, 16), (32, 32), (16, 40), (40, 16), (1, 1)),
    groups=None,
    causal=(None, "bottom_right", "top_left"),
    layouts=True,
    zero_q=True,
    zero_k=True,
    unequal=True,
    slack=True,
    scale_any=True,
    devices=("cpu",),
    compiles_on=(),
    deterministic=OUTPUT_NAMES,
)


@dataclass
class Long:
    """A Kernel; `fault` is one of those named in the code below, or nothing."""

    name: str = "test.long"
    fault: str = ""
    far: int = FAR
    capabilities: Capabilities = CAN
    backend: str = "test"
    files: tuple[str, ...] = ()

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        return (Config(tile_m=16, tile_n=32),)

    def unavailable(self, device: Device) -> str | None:
        return None

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        return why_unsupported(self.capabilities, problem, device)

    def compile_key(self, problem: Problem, config: Config) -> str:
        return "none"

    def build(self, problem: Problem, config: Config, device: Device) -> Long:
        return self

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        p = inputs.problem
        o = torch.zeros(*inputs.q.shape[:-1], p.dim_v, dtype=inputs.q.dtype)
        lse = torch.full((*inputs.q.shape[:-3], p.heads, inputs.q.shape[-3]), -math.inf)
        for index, at_q, at_k in self._sequences(p):
            scores, _ = self._scores(inputs, index, at_q, at_k)
            v = self._keys(self._rows(inputs.v, at_k, "v"), at_k).repeat_interleave(p.groups, 0)
            o_s, lse_s = self._softmax(scores, v, inputs.q.dtype)
            o[at_q] = o_s.transpose(0, 1).to(o.dtype)
            lse[(*at_q[:-1], slice(None), at_q[-1])] = lse_s
        return o, lse

    def backward(
        self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert lse is not None
        p, dtype = inputs.problem, inputs.q.dtype
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (inputs.q, inputs.k, inputs.v))
        for index, at_q, at_k in self._sequences(p):
            scores, k = self._scores(inputs, index, at_q, at_k)
            q, d_o = (self._rows(x, at_q, name).transpose(0, 1).float() for x, name in ((inputs.q, "q"), (inputs.d_o, "do")))
            v = self._keys(self._rows(inputs.v, at_k, "v"), at_k).repeat_interleave(p.groups, 0)
            row_lse = lse[(*at_q[:-1], slice(None), at_q[-1])]
            prob = torch.exp(scores - row_lse.masked_fill(torch.isinf(row_lse), 0.0)[..., None])
            delta = (o[at_q].transpose(0, 1).float() * d_o).sum(-1, keepdim=True)
            ds = (prob * (d_o @ v.mT - delta)).to(dtype).float()
            half = prob.to(dtype).float()
            dq[at_q] = (ds @ k * p.scale).transpose(0, 1).to(dtype)
            dk[at_k] = self._grouped(p, ds.mT @ q * p.scale).transpose(0, 1).to(dtype)
            dv[at_k] = self._grouped(p, half.mT @ d_o).transpose(0, 1).to(dtype)
        return dq, dk, dv

    def _sequences(self, p: Problem):
        """(index, place of the queries, place of the keys) of each sequence."""
        begin_q = begin_k = 0
        for index, (n_q, n_k) in enumerate(zip(p.seqlens_q, p.seqlens_k, strict=True)):
            if p.packing == "dense":
                yield index, (index, slice(n_q)), (index, slice(n_k))
            else:
                yield index, (slice(begin_q, begin_q + n_q),), (slice(begin_k, begin_k + n_k),)
            begin_q, begin_k = begin_q + n_q, begin_k + n_k

    def _rows(self, x: torch.Tensor, at: tuple, name: str) -> torch.Tensor:
        """(rows, heads, dim) of one sequence."""
        if self.fault == f"the row offset of {name} wraps at 2^31" and len(at) == 1 and x.shape[0]:
            rows = torch.arange(x.shape[0])[at[0]]
            wrapped = torch.where(rows * x.stride(0) < 2**31, rows, 0)
            return x[wrapped]
        return x[at]

    def _keys(self, x: torch.Tensor, at: tuple) -> torch.Tensor:
        """(kv_heads, keys, dim) float32."""
        x = x.transpose(0, 1).float()
        if self.fault == "a sequence far along reads the rows of the first" and at[-1].start and at[-1].start >= 2 * self.far:
            x = x.roll(1, 1)
        return x

    def _scores(self, inputs: Inputs, index: int, at_q: tuple, at_k: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        p = inputs.problem
        q = self._rows(inputs.q, at_q, "q").transpose(0, 1).float()
        k = self._keys(self._rows(inputs.k, at_k, "k"), at_k).repeat_interleave(p.groups, 0)
        if self.fault == "a sequence far along reads the rows of the first" and at_k[-1].start and at_k[-1].start >= 2 * self.far:
            k = k.roll(-1, 1)
        seen = visible_keys(p, index)
        if self.fault == "far rows see one key too many" and p.causal and seen.shape[1] > self.far:
            seen = seen | seen.roll(1, 1) & (torch.arange(seen.shape[1]) > self.far)
        if self.fault == "a band of far keys is dropped":
            seen = seen.clone()
            seen[:, self.far + 64 : self.far + 128] = False
        scores = (q @ k.mT) * p.scale
        if self.fault == "far rows have their scores capped":
            scores[:, self.far :] = scores[:, self.far :].clamp(min=-80.0)
        return scores.masked_fill(~seen, -math.inf), k

    def _softmax(self, scores: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -math.inf)
        m = scores.amax(-1) if scores.shape[-1] else lse
        m = m.masked_fill(torch.isinf(m), 0.0)
        p = torch.exp(scores - m[..., None])
        total = p.sum(-1)
        if self.fault == "padded keys enter the row sum of far rows":
            total[:, self.far :] += torch.exp(-m[:, self.far :])
        o = (p.to(dtype).float() @ v) / total.masked_fill(total == 0, 1.0)[..., None]
        if self.fault == "far rows of O have a bias":
            o[:, self.far :] += 1e-4
        if self.fault == "LSE is that of the last chunk of keys" and scores.shape[-1] > self.far:
            lse = torch.logsumexp(scores[..., self.far :], -1)
        return o, lse

    def _grouped(self, p: Problem, x: torch.Tensor) -> torch.Tensor:
        parts = x.unflatten(0, (p.kv_heads, p.groups))
        total = parts.sum(1)
        if self.fault == "the last head of a group is not added for far keys":
            total[:, self.far :] -= parts[:, -1, self.far :]
        return total
