"""Typical sizes of outputs and of their errors, from O(tokens * dim) quantities: no score is computed.

For values that are generic (near normal, independent, scores of a deviation of at most about 1.5), with n_i keys seen by row i:

    p_i = sqrt(sum_j P_ij^2) ~ min(1, max(exp(sigma_i^2 / 2) / sqrt(n_i), exp(sigma_i z - sigma_i^2 / 2) / n_i))
                               sigma_i = |scale| |q_i| rms(k),   z = sqrt(2 log(rows x keys)): the largest of so many scores
    |O_i|  ~ rms(v) p_i                          |dQ_i| ~ |scale| |dO_i| rms(v) rms(k) p_i
    |dV_j| ~ sqrt(sum_i (rms(dO_i) P_ij)^2)      |dK_j| ~ |scale| sqrt(sum_i (|dO_i| rms(v) rms(q_i) P_ij)^2)

per element, with P_ij^2 ~ exp(2 tau_j^2) / n_i^2, tau_j = |scale| |k_j| rms(q), and times how much larger dO_i or q_i is in
that dim than its rms (for O and dQ: the column of v or k). Without that, one query of 2.5 rms(q_i) in a dim had moved dK there
by 1.07 x the limit. Rounding P (dS) to the input dtype gives every term an independent error of 0.42 u of it, so the sum one of
0.42 u of these sizes; the output's own rounding adds 0.42 u of its value; the difference of two runs has sqrt(2) times both.
The error of Delta, dO . dO(O), moves a row of dS by 0.42 u |dO_i| rms(v) p_i P: in dQ that is times sum_j P_ij k_j, which is
the keys' mean, plus rms(k) sigma_i q_i / |q_i|, since keys with more weight point along q, plus p_i rms(k). Subnormals of P and
dS lose eta each. fp32 arithmetic adds a few eps, times the magnitude of the exponents, and sqrt(n) of accumulation. The unit of
`Noise` is the sum of all, with u in place of 0.6 u.

Limits are multiples of it: 6.2 for an element, 1.8 for the root mean square of a row of 64, 1.2 for a long head
(`worst.limit`). A row that is the sum of fewer terms than it has elements has as many independent errors as terms: with one
query and 192 dims, two runs of torch's memory-efficient attention had a row of dK 1.38 x the limit of 192 on an H100.
Largest error measured between correct runs, in units of the limit, over some 1,600 Cases on the CPU (an emulated half-precision
kernel to 1,500 tokens, torch's flash attention to 20,000, Triton's interpreter, TileLang's C code):

    permuted_keys    O 0.18  LSE 0.38  dQ 0.31  dK 0.23  dV 0.27
    repeated_heads   O 0     LSE 0     dQ 0     dK 0.26  dV 0.33
    shifted_scores   O 0.33  LSE 0.71  dQ 0.62  dK 0.33  dV 0.31
    split_keys       O 0.57  LSE 0.36
    constant_v       O 0.52  LSE 0     dQ 0.11  dK 0.09  dV 0.17 (sum over the keys)
    split_batch, future_keys, scaled_values: 0, except for subnormals of float16, 0.8 of the one rounding allowed
"""

from __future__ import annotations

import math
from functools import cached_property

import torch

from attnfuzz.kernels.contract import Deviations, Device
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.oracles.attention import SequenceData
from attnfuzz.oracles.formats import EPS, Format
from attnfuzz.oracles.relations.difference import Difference

__all__ = ["Noise", "first_seeing", "key_counts", "sum_of_seeing"]

_TF32 = 2.0**-10
_LN_2 = math.log(2.0)


def key_counts(problem: Problem, index: int, device: torch.device | str) -> torch.Tensor:
    """Return how many keys each query of sequence `index` sees, always the first ones: `(seqlen_q,)` int64."""
    n_q, n_k = problem.seqlens_q[index], problem.seqlens_k[index]
    if problem.causal is None:
        return torch.full((n_q,), n_k, device=device)
    diagonal = 1 if problem.causal == "top_left" else n_k - n_q + 1
    return (torch.arange(n_q, device=device) + diagonal).clamp(0, n_k)


def first_seeing(counts: torch.Tensor, keys: int) -> torch.Tensor:
    """Return the first row that sees each key, by `counts` of keys; a key that none sees has the number of rows."""
    return torch.searchsorted(counts, torch.arange(keys, device=counts.device), right=True)


def sum_of_seeing(first: torch.Tensor, by_row: torch.Tensor) -> torch.Tensor:
    """Sum `by_row (heads, seqlen_q, ...)` over the rows from `first` of each key on: `(heads, keys, ...)`."""
    total = torch.nn.functional.pad(by_row.flip(1).cumsum(1).flip(1).movedim(1, -1), (0, 1)).movedim(-1, 1)
    return total[:, first]


def _rms(x: torch.Tensor) -> torch.Tensor:
    """Return the root mean square as a tensor without dimensions: a number would wait for the device."""
    return x.square().mean().sqrt() if x.numel() else x.new_zeros(())


def _of_element(x: torch.Tensor) -> torch.Tensor:
    """Return the square of each element of x, q or dO, over the mean square of its row, at least 1: `(heads, rows, dim)`."""
    square = x.double().square()
    return (square / square.mean(2, keepdim=True).clamp(min=1e-300)).clamp(min=1.0)


class Noise:
    """Typical error of each output of one sequence, an upper estimate for the difference of two correct runs.

    Args:
        problem: for the mask, dtype and scale.
        data: the sequence's tensors.
        deviations: what the kernel declares.
        device: where it runs.
        shift: `(heads, seqlen_q)`, how much larger the scores of some launch are than those of `data`.
    """

    def __init__(
        self, problem: Problem, data: SequenceData, deviations: Deviations, device: Device, shift: torch.Tensor | None = None
    ) -> None:
        form = Format.of(problem.dtype)
        self._groups, self._deviations, self.keys = problem.groups, deviations, data.k.shape[1]
        self._masked = problem.causal is not None
        tf32 = self.tf32 = problem.dtype == "float32" and device in deviations.tf32_on
        self.half = problem.dtype != "float32"
        self.u = _TF32 if tf32 else form.u
        # The output's last rounding; by tf32 that of the term that dominates the sum.
        self._own = self.u if tf32 or self.half else 2 * form.u
        self._eta = form.eta
        scale = self._scale = abs(problem.scale)
        self._data, k = data, data.k.double()
        self.key_counts = key_counts(problem, data.index, data.q.device)
        n = self.n = self.key_counts.double().clamp(min=1)
        self.live = self.key_counts > 0
        self._rms_k = _rms(k)
        self._q_size = data.q.double().norm(dim=2)
        sigma = self.sigma = scale * self._q_size * self._rms_k
        # The largest of so many scores is some z deviations above 0: with spread scores its key leads the row.
        z = math.sqrt(2 * math.log(max(2, sigma.numel() * self.keys)))
        half_square = sigma.square() / 2
        led = torch.exp(sigma * z - half_square) / n
        self.p = torch.maximum(torch.exp(half_square) / n.sqrt(), led).clamp(max=1.0)
        lifted = 3 * sigma if shift is None else 3 * sigma + shift.abs() * max(1.0, problem.dim_qk / 32)
        self.exponent = n.log() + lifted
        self._fp32 = EPS * (4 + 2 * self.exponent + n.sqrt() / 2)
        self._q = self._q_size / math.sqrt(problem.dim_qk)

    @cached_property
    def _rms_v(self) -> torch.Tensor:
        return _rms(self._data.v.double())

    @cached_property
    def _w(self) -> torch.Tensor:
        return self._data.d_o.double().square().mean(2).sqrt()

    @cached_property
    def _t(self) -> torch.Tensor:
        return self._data.d_o.double().norm(dim=2) * self._rms_v

    @cached_property
    def _peak(self) -> torch.Tensor:
        """exp(tau^2) of each key."""
        tau = self._scale * self._data.k.double().norm(dim=2) * _rms(self._q)
        return torch.exp(tau.square()).clamp(max=20.0)

    @cached_property
    def first(self) -> torch.Tensor:
        """The first row that sees each key."""
        return first_seeing(self.key_counts, self.keys)

    @cached_property
    def touched(self) -> torch.Tensor:
        """Whether any row sees the key."""
        return self.first < self.key_counts.numel()

    def difference(self, name: OutputName, got: torch.Tensor, expected: torch.Tensor) -> Difference:
        """Return the Difference of two correct runs' values of one output."""
        allowed, noisy = self.unit(name, expected), name != "lse"
        return Difference(name, self._data.index, got, expected, allowed, noise=noisy, terms=self._terms(name) if noisy else None)

    def unit(self, name: OutputName, expected: torch.Tensor) -> torch.Tensor:
        """Return the typical error of each element of an output of value `expected`; for LSE the largest error."""
        match name:
            case "lse":
                return self._lse()
            case "o":
                size = self._rms_v * self.p
                # Partial O are rounded once more, each by a unit of its own.
                times = math.sqrt(2) if self._deviations.half_partial_o and self.half else 1.0
                rounding = torch.hypot(self._of_p * size, self._eta * self.n * size) * times
                return self._total(expected * times, size, rounding[..., None] * self._of_column(self._data.v), self._fp32)
            case "dq":
                size = self._scale * self._t * self._rms_k * self.p
                flushed = self._eta * max(1.0, 1 / self._scale if self._scale else 1.0) * self.n
                of_delta = 2 * self._more_of_delta * torch.hypot(self.p[..., None], self._drift())
                rounding = (self._of_p * size)[..., None] * (1 + of_delta)
                flushed = (flushed * self._scale * self._rms_k * self.p)[..., None]
                rounding = torch.hypot(rounding, flushed) * self._of_column(self._data.k)
                return self._total(expected, size, rounding, self._fp32)
            case "dv":
                rounding = torch.hypot(self._of_p + torch.zeros_like(self.n), self._eta * self.n)
                return self._by_key(expected, self._w / self.n, self._w / self.n * rounding, _of_element(self._data.d_o))
            case "dk":
                size = self._scale * self._t * self._q / self.n
                flushed = self._eta * max(1.0, 1 / self._scale if self._scale else 1.0) * self._scale * self._q
                rounding = torch.hypot(self._of_p * size * (1 + 2 * self._more_of_delta * self.p), flushed)
                return self._by_key(expected, size, rounding, _of_element(self._data.q))

    @cached_property
    def _of_p(self) -> torch.Tensor | float:
        """Relative error of P: u, and where LSE of splits is rounded also u times that, at most the largest exponent."""
        return torch.hypot(self.of_splits, torch.full_like(self.exponent, self.u)) if self.half else self.u

    @property
    def of_splits(self) -> torch.Tensor:
        """Relative error of a row's P where LSE of splits is rounded: u times that, at most the largest exponent; else 0."""
        declared = self._deviations.half_split_lse and self.half
        return self.u * self.exponent if declared else torch.zeros_like(self.exponent)

    @property
    def _more_of_delta(self) -> float:
        """Delta's error over that of O's rounding: rounded products, and partial O, add as much each."""
        more = (self._deviations.half_delta_products, self._deviations.half_partial_o)
        return math.sqrt(1 + sum(more)) if self.half else 1.0

    def _terms(self, name: OutputName) -> float | torch.Tensor:
        """Return of how many terms each row of an output is the sum: one number, or `(rows,)` where a mask makes them differ.

        A term is a number with an error, P or dS, times a row of an input: elements of a row with few terms share their errors.
        """
        if name in ("o", "dq"):
            return self.n if self._masked else float(max(1, self.keys))
        rows = self.key_counts.numel()
        return self._groups * ((rows - self.first).clamp(min=1).double() if self._masked else float(max(1, rows)))

    def _drift(self) -> torch.Tensor:
        """Return |sum_j P_ij k_j| / rms(k), without its random part: as large as the others, so not kept."""
        toward_q = (self.sigma / self._q_size.clamp(min=1e-300))[..., None] * self._data.q.double()
        if not self.keys:
            return torch.hypot(toward_q, toward_q)
        of_mean = self._data.k.double().mean(1, keepdim=True) / self._rms_k.clamp(min=1e-300)
        return torch.hypot(toward_q, of_mean.repeat_interleave(self._groups, 0).expand_as(toward_q))

    def _lse(self) -> torch.Tensor:
        # Of a score: tensor cores truncate each step of its product, up to 2 eps a step of 16, and scale, log2(e), ln(2) and the
        # result are rounded. Measured on an H200 where one key is seen: 4.2 eps of it.
        allowed = EPS * (16 + 6 * self.exponent + 2 * self.n.log2())
        if self._deviations.l_from_rounded_p:
            allowed = allowed + 4 * self.u * self.p
        allowed = allowed + 2 * self.of_splits
        return allowed / _LN_2 if self._deviations.lse_base2 else allowed

    def _total(self, expected: torch.Tensor, size: torch.Tensor, rounding: torch.Tensor, fp32: torch.Tensor) -> torch.Tensor:
        fixed = torch.where(self.live[:, None], torch.hypot(rounding, (fp32 * size)[..., None]), 0.0)
        own = self._own + fp32[..., None]
        least = torch.where(self.live, self._eta, 0.0)[:, None]
        return torch.hypot(torch.hypot(fixed, own * expected.abs()), least)

    def _of_column(self, x: torch.Tensor) -> torch.Tensor:
        """Return for each query head and dim the mean square of that column of x, k or v, over that of all, its root, at least 1.

        `(heads, 1, dim)`: where few keys are seen, an error of P or dS is in each dim in proportion to k or v there.
        """
        square = x.double().square()
        part = square.mean(1, keepdim=True) / square.mean((1, 2), keepdim=True).clamp(min=1e-300)
        return part.clamp(min=1.0).sqrt().repeat_interleave(self._groups, 0)

    def _by_key(self, expected: torch.Tensor, size: torch.Tensor, rounding: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Sum over the rows that see a key, and over the query heads of its group; `part (heads, seqlen_q, dim)`: of each dim."""
        if not self.n.numel():
            return torch.zeros_like(expected)
        if self._deviations.half_partials:
            rounding = 1.5 * rounding
        fp32 = self._fp32.amax() + EPS * math.sqrt(self.n.numel() * self._groups) / 2
        # Of each row its variance, of each element that times the square of q or dO there: few rows do not average out.
        # The last dim may be left out.
        part = part[..., : expected.shape[-1]]
        squares = torch.where(self.live, rounding.square() + (fp32 * size).square(), 0.0)[..., None] * part
        by_row = squares.unflatten(0, (-1, self._groups)).sum(1)
        fixed = sum_of_seeing(self.first, by_row).sqrt() * self._peak[..., None]
        own = self._own + fp32
        least = torch.where(self.touched, self._eta * math.sqrt(self._groups), 0.0)[:, None]
        return torch.hypot(torch.hypot(fixed, own * expected.abs()), least)
