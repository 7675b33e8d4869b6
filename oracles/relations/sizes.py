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

Sums by tf32x3 are cut toward zero, in proportion to the partial sums (`CUT_OF_TF32X3`), which depend on the order of the keys.
Of n random terms, partial sums have 0.53 of the size of the whole on average, so that O and dQ are off by 0.53 * 21 / 16 n eps. A
bit counts as 2 eps there, where 1.4 is usual: that is room for the error of the other run.

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
from attnfuzz.oracles.formats import CUT_OF_TF32X3, EPS, Format
from attnfuzz.oracles.relations import size_formulas as formulas
from attnfuzz.oracles.relations.difference import Difference
from attnfuzz.oracles.relations.size_formulas import Errors

__all__ = ["Noise", "Seeing", "first_seeing", "key_counts", "rms", "rows_of"]

_TF32 = 2.0**-10
_LN_2 = math.log(2.0)
_CUT = 0.53 * CUT_OF_TF32X3


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


class Seeing:
    """Which rows of a sequence see which keys: made on the host, and sent by one copy.

    `counts`: the keys that a row sees, float64 `(rows, 1)`. `touched`: 1 for keys that some row sees, else 0, `(keys, 1)`.
    `rows_from`: the rows from the first that sees a key on, at least one, float64 `(keys,)`.
    """

    def __init__(self, problem: Problem, index: int, device: torch.device) -> None:
        self._masked = problem.causal is not None
        counts = key_counts(problem, index, "cpu")
        rows, keys = len(counts), problem.seqlens_k[index]
        first = first_seeing(counts, keys)
        numbers = [counts.double(), (first < rows).double(), (rows - first).clamp(min=1).double()]
        table = torch.cat([*(each.view(torch.int64) for each in numbers), (rows - 1 - first).clamp(min=0)])
        counts, touched, rows_from, self._last = table.to(device, non_blocking=True).split([rows, keys, keys, keys])
        self.counts, self.touched = counts.view(torch.float64)[:, None], touched.view(torch.float64)[:, None]
        self.rows_from = rows_from.view(torch.float64)

    def sums(self, by_row: torch.Tensor) -> torch.Tensor:
        """Sum `by_row (heads, rows, dim)` over the rows that see each key, `(heads, keys, dim)`; anything where none does."""
        keys = len(self._last)
        if not by_row.shape[1]:
            return by_row.new_zeros((by_row.shape[0], keys, by_row.shape[2]))
        if not self._masked:
            return by_row.sum(1, keepdim=True).expand(-1, keys, -1)
        return by_row.flip(1).cumsum(1).index_select(1, self._last)


def rms(size: torch.Tensor, elements: int) -> torch.Tensor:
    """Return the root mean square of `elements` numbers, whose rows or columns have the norms `size`.

    It has no dimensions: a number would wait for the device.
    """
    return torch.linalg.vector_norm(size) / math.sqrt(max(1, elements))


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return the norm of each row, `(heads, rows, 1)`."""
    return torch.linalg.vector_norm(x, dim=2, keepdim=True)


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
        self.tf32x3 = problem.dtype == "float32" and not tf32 and device in deviations.tf32x3_on
        half = self.half = problem.dtype != "float32"
        u = self.u = _TF32 if tf32 else form.u
        # Delta's error over that of O's rounding: rounded products, and partial O, add as much each.
        more = sum((deviations.half_delta_products, deviations.half_partial_o))
        self.errors = Errors(
            u=u,
            # By tf32 the rounding of the term that dominates the sum.
            own=u if tf32 or half else 2 * form.u,
            eta=form.eta,
            half=half,
            splits=deviations.half_split_lse and half,
            partials=1.5 if deviations.half_partials else 1.0,
            times=math.sqrt(2) if deviations.half_partial_o and half else 1.0,
            of_delta=math.sqrt(1 + more) if half else 1.0,
        )
        scale = self._scale = abs(problem.scale)
        # A lost subnormal of dS, which a kernel may scale before.
        self._flushed = form.eta * max(1.0, 1 / scale if scale else 1.0)
        self._index, self._v, self._d_o = data.index, data.v, data.d_o
        self.q, self.k = data.q.double(), data.k.double()
        self.seeing = Seeing(problem, data.index, data.q.device)
        self.q_size, self.k_size = rows_of(self.q), rows_of(self.k)
        self._rms_k = rms(self.k_size, self.k.numel())
        # The largest of so many scores is some z deviations above 0: with spread scores its key leads the row.
        z = math.sqrt(2 * math.log(max(2, self.q_size.numel() * self.keys)))
        shifts = None if shift is None else shift[..., None]
        of_shift = max(1.0, problem.dim_qk / 32)
        self.sigma, self.p, self.exponent, self._fp32 = formulas.of_rows(
            self.q_size, self._rms_k, self.seeing.counts, shifts, scale, z, of_shift
        )

    @cached_property
    def v(self) -> torch.Tensor:
        """V, float64."""
        return self._v.double()

    @cached_property
    def d_o(self) -> torch.Tensor:
        """dO, float64."""
        return self._d_o.double()

    @cached_property
    def _d_size(self) -> torch.Tensor:
        return rows_of(self.d_o)

    @cached_property
    def _v_columns(self) -> torch.Tensor:
        return torch.linalg.vector_norm(self.v, dim=1, keepdim=True)

    @cached_property
    def _rms_v(self) -> torch.Tensor:
        return rms(self._v_columns, self.v.numel())

    @cached_property
    def _rms_q(self) -> torch.Tensor:
        return rms(self.q_size, self.q.numel())

    @cached_property
    def _of_keys(self) -> torch.Tensor:
        """The error of float32 arithmetic of each row of O and dQ, sums over keys."""
        return self._fp32 + self.seeing.counts * (_CUT * EPS) if self.tf32x3 else self._fp32

    @cached_property
    def _most(self) -> torch.Tensor:
        """The largest error of float32 arithmetic of a row."""
        return self._fp32.amax()

    def difference(self, name: OutputName, got: torch.Tensor, expected: torch.Tensor) -> Difference:
        """Return the Difference of two correct runs' values of one output."""
        allowed, noisy = self.unit(name, expected), name != "lse"
        return Difference(name, self._index, got, expected, allowed, noise=noisy, terms=self._terms(name) if noisy else None)

    def unit(self, name: OutputName, expected: torch.Tensor) -> torch.Tensor:
        """Return the typical error of each element of an output of value `expected`; for LSE the largest error."""
        counts = self.seeing.counts
        of_p = (self.p, self.exponent, self._of_keys, counts)
        match name:
            case "lse":
                allowed = formulas.of_lse(self.exponent, counts, self.p, self.errors, self._deviations.l_from_rounded_p)[..., 0]
                return allowed / _LN_2 if self._deviations.lse_base2 else allowed
            case "o":
                return formulas.unit_of_o(expected, *of_p, self._rms_v, self._column(self._v_columns), self.errors)
            case "dq":
                of_column = self._column(torch.linalg.vector_norm(self.k, dim=1, keepdim=True))
                mean_k = self._of_heads(self.k.mean(1, keepdim=True))
                return formulas.unit_of_dq(
                    expected, self.q, self.sigma, self.q_size, self._d_size, *of_p, self._rms_k, self._rms_v, mean_k, of_column,
                    self._scale, self._flushed, self.errors,
                )  # fmt: skip
            case "dv":
                return self._by_key(expected, self.d_o)
            case "dk":
                # The last dim may be left out.
                return self._by_key(expected, self.q[..., : expected.shape[-1]], of_dk=True)

    def _terms(self, name: OutputName) -> float | torch.Tensor:
        """Return of how many terms each row of an output is the sum: one number, or `(rows,)` where a mask makes them differ.

        A term is a number with an error, P or dS, times a row of an input: elements of a row with few terms share their errors.
        """
        if name in ("o", "dq"):
            return self.seeing.counts[:, 0].clamp(min=1.0) if self._masked else float(max(1, self.keys))
        return self._groups * (self.seeing.rows_from if self._masked else float(max(1, len(self.seeing.counts))))

    def _column(self, columns: torch.Tensor) -> torch.Tensor:
        """Return for each query head and dim how much larger that column of k or v is than all, by the norms of columns.

        `(heads, 1, dim)`: where few keys are seen, an error of P or dS is in each dim in proportion to k or v there.
        """
        return self._of_heads(formulas.column(columns, rows_of(columns), float(columns.shape[-1])))

    def _of_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(self._groups, 0) if self._groups > 1 else x

    def _by_key(self, expected: torch.Tensor, x: torch.Tensor, *, of_dk: bool = False) -> torch.Tensor:
        """Sum over the rows that see a key, and over the query heads of its group; `x`: the factor of P or dS in the sum."""
        rows = len(self.seeing.counts)
        if not rows:
            return torch.zeros_like(expected)
        accumulated, dim = EPS * math.sqrt(rows * self._groups) / 2, float((self.q if of_dk else x).shape[-1])
        counts, size = self.seeing.counts, self._d_size
        if of_dk:
            squares = formulas.squares_of_dk(
                x, self.q_size, size, self._rms_v, self.p, self.exponent, counts, self._most, accumulated, dim, self._scale,
                self._flushed, self.errors,
            )  # fmt: skip
        else:
            squares = formulas.squares_of_dv(x, size, self.exponent, counts, self._most, accumulated, dim, self.errors)
        by_row = squares.unflatten(0, (-1, self._groups)).sum(1) if self._groups > 1 else squares
        least = self.errors.eta * math.sqrt(self._groups)
        return formulas.by_key(
            expected, self.seeing.sums(by_row), self.seeing.touched, self.k_size, self._rms_q, self._most, accumulated,
            self._scale, least, self.errors,
        )  # fmt: skip
