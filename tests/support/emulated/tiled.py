"""Tiled flash attention of one sequence, forward and backward, step by step as a GPU kernel takes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from support.emulated.arithmetic import Accumulation, Float32, product, rounded, truncated
from support.emulated.choices import Choices
from support.emulated.faults import Change, Rounding
from support.emulated.modified import Modified

_INF = math.inf


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """Tensors of one sequence, float32 holding values of `dtype`, heads as [kv_heads, groups].

    `q [kv_heads, groups, n, dim_qk]`, `k, v [kv_heads, 1, m, dim]`, `d_o` like q with dim_v, `mask [n, m]`,
    `d_lse [kv_heads, groups, n]` or None. `mask` may be `[kv_heads, groups, n, m]`, too.
    """

    dtype: torch.dtype
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_o: torch.Tensor
    d_lse: torch.Tensor | None
    mask: torch.Tensor
    modified: Modified | None = None


class Tiled:
    """One sequence's forward and backward with some Choices and a Change."""

    def __init__(
        self,
        sequence: Sequence,
        scale: float,
        choices: Choices,
        change: Change,
        *,
        prescaled_q: bool = False,
        rounded_p: bool = False,
        float32: Float32 = "f32",
    ) -> None:
        self.float32 = float32
        self.x, self.choices, self.change, self.dtype, self.prescaled = sequence, choices, change, sequence.dtype, prescaled_q
        self.rounded_p = rounded_p
        # exp(s scale) is monotone in s for a scale that is not negative: a sign goes to q, exactly.
        self.scale = scale
        self.size = abs(scale)
        self.q = -sequence.q if scale < 0 else sequence.q
        if sequence.modified is not None:
            # score_mod is of the scaled score
            self.size, self.q = 1.0, sequence.q
        self.keys = sequence.k.shape[2]
        self.random = torch.Generator().manual_seed(choices.seed)

    # ---------------------------------------------------------------- what both passes share

    def _f32(self, value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float32)

    def _rounded(self, x: torch.Tensor, how: Rounding) -> torch.Tensor:
        if how == "truncated":
            return truncated(x, self.dtype)
        return rounded(x, torch.bfloat16 if how == "bfloat16" else self.dtype)

    def _mma(self, a: torch.Tensor, b: torch.Tensor, start: torch.Tensor | None = None, *, in_half: bool = False) -> torch.Tensor:
        mode: Accumulation = "half" if in_half else self.choices.mma if self.float32 == "f32" else self.float32
        return product(a, b, mode, start, self.dtype)

    def _scores(self, q: torch.Tensor, k: torch.Tensor, keys: slice) -> torch.Tensor:
        s = self._mma(q, k.mT, in_half=self.change.scores_in_half)
        s = rounded(s, self.dtype) if self.change.scores_rounded else s
        modified = self.x.modified
        return s if modified is None else modified.score(s * self._f32(self.scale), keys)

    def _mask(self, where: str) -> torch.Tensor:
        """Which keys are visible in the forward or in the backward, without the dropped key."""
        mask = self.x.mask
        if where in self.change.key_dropped and self.keys:
            mask = mask.clone()
            mask[..., self.keys // 2] = False
        return mask

    def _exp2(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.exp2(x)
        if bits := self.choices.exp2_noise_bits:
            y = y * (1 + 2.0**-bits * (2 * torch.rand(y.shape, generator=self.random) - 1))
        return y

    def _exponential(self, s: torch.Tensor, factor: torch.Tensor, less: torch.Tensor) -> torch.Tensor:
        """exp2(s factor - less) by one rounding or by two; exp where the Config says natural."""
        if self._by_one_rounding:
            return self._exp2((s.double() * factor.double() - less.double()).float())
        return torch.exp(s * factor - less) if self._natural else self._exp2(s * factor - less)

    @cached_property
    def _by_one_rounding(self) -> bool:
        """With a score_mod a score may be -1e38, whose product with log2(e), rounded, does not cancel against the exact one."""
        return self.choices.exp == "fma" and self.x.modified is None

    @cached_property
    def _natural(self) -> bool:
        return self.choices.exp == "natural" and not self.prescaled

    # ---------------------------------------------------------------- forward

    def forward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(o float32 holding `dtype` values, lse float32, o before its rounding)."""
        change, x = self.change, self.x
        base = self.size * change.scale_forward * (1.0 if self._natural else change.log2_e_forward)
        q, factor = self.q, self._f32(base)
        if self.prescaled:
            q, factor = rounded(self.q * factor, self.dtype), self._f32(1.0)
        shape = x.q.shape[:3]
        m, total, acc = torch.full(shape, -_INF), torch.zeros(shape), torch.zeros(*shape, x.v.shape[-1])
        starts = list(range(0, self.keys, self.choices.tile_n))
        if self.choices.reversed_tiles:
            starts.reverse()
        for step, start in enumerate(starts):
            s, v = self._tile(q, start)
            grown = torch.maximum(m, s.amax(-1))
            if change.no_maximum:
                grown = torch.where(torch.isinf(grown), grown, 0.0)
            p, alpha = self._probabilities(s, m, grown, factor)
            forgotten = step == max(1, len(starts) // 2)
            p_half = self._rounded(p, change.p_forward)
            l_alpha = torch.ones_like(alpha) if change.l_not_rescaled and forgotten else alpha
            o_alpha = torch.ones_like(alpha) if change.o_not_rescaled and forgotten else alpha
            total = total * l_alpha + (p_half if change.l_from_rounded_p else p).sum(-1)
            acc = self._mma(p_half, v, acc * o_alpha[..., None], in_half=change.o_in_half)
            m = grown
        return self._finished(m, total, acc, factor)

    def _tile(self, q: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of one key tile before their factor, -inf where masked, and the tile's v."""
        end, tile_n = min(self.keys, start + self.choices.tile_n), self.choices.tile_n
        k, v = self.x.k[:, :, start:end], self.x.v[:, :, start:end]
        s = self._scores(q, k, slice(start, end)).masked_fill(~self._mask("forward")[..., start:end], -_INF)
        if self.change.padding_visible and end - start < tile_n:
            padding = start + tile_n - end
            s = torch.cat([s, s.new_zeros(*s.shape[:-1], padding)], -1)
            v = torch.cat([v, v.new_zeros(*v.shape[:2], padding, v.shape[3])], 2)
        return s, v

    def _probabilities(
        self, s: torch.Tensor, old: torch.Tensor, new: torch.Tensor, factor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(P against the running maximum, the factor that brings older sums to that maximum)."""
        at = torch.where(torch.isinf(new) & (new < 0), 0.0, new)
        masked, first = torch.isinf(s) & (s < 0), torch.isinf(old) & (old < 0)
        less = at * factor
        p = self._exponential(torch.where(masked, 0.0, s), factor, less[..., None])
        before = torch.where(first, 0.0, old)
        if self._by_one_rounding:
            alpha = self._exp2((before - at) * factor)
        else:
            alpha = torch.exp(before * factor - less) if self._natural else self._exp2(before * factor - less)
        return torch.where(masked, 0.0, p), torch.where(first, 0.0, alpha)

    def _finished(
        self, m: torch.Tensor, total: torch.Tensor, acc: torch.Tensor, factor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        change = self.change
        blind = total == 0
        by = torch.where(blind, 1.0, total)[..., None]
        o32 = acc / by if self.choices.division == "quotient" else acc * (1 / by)
        o32 = torch.where(blind[..., None], 0.0, o32)
        if change.o == "via_bfloat16":
            o = rounded(rounded(o32, torch.bfloat16), self.dtype)
        else:
            o = self._rounded(o32, "truncated" if change.o == "truncated" else "dtype")
        if change.o_last_row_missing:
            o = o.clone()
            o[:, :, -1:] = 0
        at = torch.where(torch.isinf(m), torch.where(m < 0, 0.0, m), m) * factor
        # A kernel whose log2(e) is wrong goes back by the same wrong number.
        base2 = (torch.log2(total) + at) * self._f32(1.0 / change.log2_e_forward)
        lse = at + torch.log(total) if self._natural else base2
        lse = torch.where(blind, -_INF, lse)
        return o, rounded(lse, self.dtype) if change.lse_rounded else lse, o32

    # ---------------------------------------------------------------- backward

    def backward(self, o: torch.Tensor, lse: torch.Tensor, o32: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq like q, dk `[kv_heads, m, dim_qk]`, dv) as float32 holding `dtype` values, of what forward returned."""
        x, change = self.x, self.change
        p = self._recomputed(lse)
        delta = self._delta(o, o32)
        if x.d_lse is not None:
            delta = delta - x.d_lse
        gradient = self._f32(self.scale * change.scale_gradient)
        of_ds = self._rounded(p, "dtype") if self.rounded_p else p
        ds = of_ds * (self._mma(x.d_o, x.v.mT) - delta[..., None])
        if x.modified is not None:
            s = self._mma(self.q, x.k.mT) * self._f32(self.scale)
            x.modified.add_gradients(s, ds)
            ds = torch.where(self._mask("backward"), ds * x.modified.slope(s), 0.0)
        after = None
        if self.choices.ds_scale == "before":
            ds = ds * gradient
        else:
            after = gradient
        p_half, ds_half = self._rounded(p, change.p_backward), self._rounded(ds, change.ds)
        if change.backward_last_row_missing:
            p_half, ds_half = p_half.clone(), ds_half.clone()
            p_half[:, :, -1:], ds_half[:, :, -1:] = 0, 0
        dk, dv = self._by_key(p_half, ds_half, after)
        if "dq" in change.key_dropped and self.keys:
            ds_half = ds_half.clone()
            ds_half[..., self.keys // 2] = 0
        dq = self._by_query(ds_half, after)
        return rounded(dq, self.dtype), rounded(dk, self.dtype), rounded(dv, self.dtype)

    def _recomputed(self, lse: torch.Tensor) -> torch.Tensor:
        """P of the backward, from LSE."""
        change = self.change
        s = self._scores(self.q, self.x.k, slice(self.keys))
        scale = self.size * change.scale_backward
        blind = torch.isinf(lse) & (lse < 0)
        lse = torch.where(blind, 0.0, lse)
        if self.choices.exp == "natural":
            p = torch.exp(s * self._f32(scale) - lse[..., None])
        else:
            log2_e = change.log2_e_backward
            p = self._exponential(s, self._f32(scale * log2_e), (lse * self._f32(log2_e))[..., None])
        return torch.where(self._mask("backward") & ~blind[..., None], p, 0.0)

    def _delta(self, o: torch.Tensor, o32: torch.Tensor) -> torch.Tensor:
        """D = rowsum(dO * O)."""
        change, d_o = self.change, self.x.d_o
        if change.delta == "product_rounded":
            delta = rounded(d_o * o, self.dtype).sum(-1)
        elif change.delta == "stored_rounded":
            delta = rounded((d_o * o).sum(-1), self.dtype)
        elif change.delta == "bfloat16_o":
            delta = (d_o * rounded(o32, torch.bfloat16)).sum(-1)
        else:
            delta = (d_o * (o if self.choices.delta == "rounded_o" else o32)).sum(-1)
        if change.delta_last_row_zero:
            delta = delta.clone()
            delta[:, :, -1:] = 0
        return delta

    def _by_query(self, ds: torch.Tensor, after: torch.Tensor | None) -> torch.Tensor:
        """dQ, key tile by key tile."""
        change, tile_n = self.change, self.choices.tile_n
        tiles = -(-self.keys // tile_n)
        order = torch.randperm(tiles, generator=self.random).tolist() if self.choices.dq_order == "permuted" else range(tiles)
        dq = torch.zeros_like(self.q)
        for number, tile in enumerate(order):
            at = slice(tile * tile_n, tile * tile_n + tile_n)
            part = self._mma(ds[..., at], self.x.k[:, :, at])
            if change.dq_tile_lost and number == 0 and tiles > 1:
                part[:, :, -min(self.choices.tile_m, part.shape[2]) :] = 0
            if after is not None:
                part = part * after
            dq = rounded(dq + part, self.dtype) if change.dq_in_half else dq + part
        return dq

    def _by_key(self, p: torch.Tensor, ds: torch.Tensor, after: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(dK, dV): query tile by query tile for each query head, then the group's heads in some order."""
        x, change = self.x, self.change
        kv_heads, groups, rows, _ = x.q.shape
        dks = torch.zeros(kv_heads, groups, self.keys, x.k.shape[-1])
        dvs = torch.zeros(kv_heads, groups, self.keys, x.v.shape[-1])
        for start in range(0, rows, self.choices.tile_m):
            at = slice(start, start + self.choices.tile_m)
            dvs = self._mma(p[:, :, at].mT, x.d_o[:, :, at], dvs, in_half=change.dv_in_half)
            dks = self._mma(ds[:, :, at].mT, x.q[:, :, at], dks)
        if after is not None:
            dks = dks * after
        if change.partials == "rounded":
            dks, dvs = rounded(dks, self.dtype), rounded(dvs, self.dtype)
        dk, dv = torch.zeros_like(dks[:, 0]), torch.zeros_like(dvs[:, 0])
        for head in torch.randperm(groups, generator=self.random).tolist():
            dk, dv = dk + dks[:, head], dv + dvs[:, head]
            if change.partials == "sum_rounded":
                dk, dv = rounded(dk, self.dtype), rounded(dv, self.dtype)
        return dk, dv
