"""Per-element error budgets from float64 quantities: how far off an output of a correct kernel may be.

A kernel is assumed to compute P <= 1 against the true running maximum, the row sum from fp32 P, to round P and dS once to the
input dtype, to accumulate in fp32, and to round once at the end. It declares deviations from this (`Deviations`); each lets only
its own term grow.

The budget is M = min(H, 6 sigma + 4 tau) + B. H is the worst case of the roundings to the input dtype (of P, dS, and of O inside
Delta), sigma their root mean square, tau the part of it that adds up because values repeat; B is the error of fp32 arithmetic
(scores, exponentials, accumulation) and of values that may be flushed to zero. For float32 kernels H is 0, except for tf32 where
that is declared. Notation: u = unit roundoff of the dtype, eta = half its smallest subnormal, eps = 2**-24.

Without `ties`, tau is left out: that budget is never larger, and far cheaper, so it is tried first.

The last bits of a float64 sum depend on the frame it is computed in. What is compared or rounded exactly (s - m, O, dP - D) is
put on a grid first (`on_grid`), and limits that equal values meet exactly leave room for `LAST_BITS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from attnfuzz.kernels.contract import Deviations, Inputs
from attnfuzz.kernels.problem import SINKS, OutputName, Problem
from attnfuzz.oracles.budgets.backward import backward
from attnfuzz.oracles.budgets.captured import CapturedSums
from attnfuzz.oracles.budgets.delta import delta_error
from attnfuzz.oracles.budgets.doubts import Doubts
from attnfuzz.oracles.budgets.forward import Forward, forward
from attnfuzz.oracles.budgets.forward_formulas import sum_budget
from attnfuzz.oracles.budgets.independence import Independence
from attnfuzz.oracles.budgets.repeats import Repeats
from attnfuzz.oracles.budgets.roundings import Rounding
from attnfuzz.oracles.budgets.score_gradient import Gradients
from attnfuzz.oracles.budgets.scores import Scores, scores
from attnfuzz.oracles.budgets.sinks import PlacedWithSinks, SinkSums
from attnfuzz.oracles.budgets.sums import Sums
from attnfuzz.oracles.formats import half_ulp_of_sum
from attnfuzz.oracles.frames import CHUNK, LEAN, Placed, Steps, Tokens, frames, tokens_of

__all__ = ["PARTS", "SUMS", "Budget", "Budgets", "budgets", "of_sums", "parts_of_rows", "steps_of_rows"]

PARTS = 6
"""Tensors of a Budget."""
SUMS = ("result", "size", "sigma2", "hard", "b", "flush")
"""The parts of dK that are sums over rows, without ties."""


@dataclass(frozen=True, slots=True, eq=False)
class Budget:
    """Budget of one output over the batch, float64 `(heads, tokens, dim)`; `allowed` is M, infinite where nothing is judged.

    `random`: 6 sigma + 4 tau where that is less than H, else 0. `b` is B, `flush` its part from flushed values. `noise`: sigma^2
    for the aggregate tests. `reorder`: how much another order of fp32 additions may change the result.
    """

    allowed: torch.Tensor
    random: torch.Tensor | None = None
    b: torch.Tensor | None = None
    flush: torch.Tensor | None = None
    noise: torch.Tensor | None = None
    reorder: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Budgets:
    """The budget of every output; LSE has only `allowed` `(heads, tokens)`. `repeats`: whether values are generic."""

    lse: torch.Tensor
    outputs: dict[OutputName, Budget]
    repeats: Repeats | None
    captured: dict[str, torch.Tensor]
    """M of captured tensors' gradients, by name, of tensors that some score reads."""
    independence: Independence | None = None
    """Whether errors are independent, if requested and all frames are whole."""
    doubted: dict[OutputName, int] = field(default_factory=dict)
    """Elements that are not judged because mask_mod is in doubt; empty where it never is."""
    overflow: torch.Tensor | None = None
    """bool: whether D may overflow in some row (`Delta.over`), where that is declared; a gradient may be NaN then."""


def budgets(
    inputs: Inputs,
    deviations: Deviations,
    device: str,
    *,
    ties: bool = False,
    lean: bool = False,
    generic: bool = True,
    independent: bool = False,
    chunk: int | None = None,
) -> Budgets:
    """Compute the budget M of every output of the batch, by the formulae at `forward` and `backward`.

    Args:
        inputs: the kernel's inputs.
        deviations: what the kernel declares.
        device: "cpu" or "cuda", for deviations declared for one of them.
        ties: whether to count equal values (tau).
        lean: only `allowed`, for a batch whose other parts would not fit into memory.
        generic: whether to look for values that repeat (`Budgets.repeats`), a fifth of the time of a small batch.
        independent: whether to look for errors that are not independent (`Budgets.independence`); about doubles the time.
        chunk: scores of a frame; None: by the device.
    """
    problem = inputs.problem
    if chunk is None:
        chunk = CHUNK["cuda" if inputs.q.is_cuda else "cpu"]
        chunk = min(chunk, LEAN) if lean else chunk
    # Without autograd's bookkeeping a launch costs a tenth less.
    with torch.inference_mode():
        tokens = tokens_of(inputs)
        partials, rounding = deviations.half_partials and problem.groups > 1, Rounding.of(problem.dtype, deviations, device)
        totals = _Totals(tokens, rounding, lean=lean, ties=ties, partials=partials, generic=generic)
        for frame in frames(problem, chunk):
            placed = PlacedWithSinks(tokens, frame) if problem.sinks else Placed(tokens, frame)
            t = scores(placed, placed.load(), deviations, device, ties=ties)
            f, of_p = forward(t, ties=ties, lean=lean)
            delta = delta_error(t, f, of_p, deviations)
            if independent and frame.whole:
                totals.independence.add(t, f, delta, placed)
            # Here and below: a frame's large tensors are freed before the next ones are allocated.
            del of_p
            with totals.sums(placed) as (dk, dv):
                g = backward(t, f, delta, dk, dv, deviations, ties=ties, lean=lean, captured=totals.captured)
            totals.add(placed, t, f, g)
            del placed, t, f, delta, g, dk, dv
        return totals.finished()


class _Totals:
    """Collects the results of all frames."""

    def __init__(self, tokens: Tokens, rounding: Rounding, *, lean: bool, ties: bool, partials: bool, generic: bool) -> None:
        p: Problem = tokens.problem
        self._tokens, self._rounding, self._partials = tokens, rounding, partials
        self.captured = CapturedSums(tokens.modifiers)
        self._parts = 1 if lean else PARTS
        names = [*(SUMS[:-1] if lean else SUMS), *(["tau2"] if ties else [])]
        # dK's statistics take sigma^2 as it is.
        self._names: dict[OutputName, list[str]] = {"dk": names, "dv": [*names, *([] if lean else ["noise"])]}

        def zeros(heads: int, total: int, dim: int) -> torch.Tensor:
            return torch.zeros((heads, total, dim), dtype=torch.float64, device=tokens.q.device)

        self._lse = zeros(p.heads, p.total_q, 1)
        self._sinks = SinkSums(tokens) if p.sinks else None
        if self._sinks is not None:
            self._lse += self._sinks.lse_without_keys
        self._o, self._dq = (zeros(p.heads, p.total_q, self._parts * dim) for dim in (p.dim_v, p.dim_qk))
        dims: dict[OutputName, int] = {"dk": p.dim_qk, "dv": p.dim_v}
        self._keys = {name: zeros(p.kv_heads, p.total_k, len(self._names[name]) * dim) for name, dim in dims.items()}
        # The statistics are those of roundings to half precision; the errors of float32 arithmetic are bounded, not modelled.
        taken = not lean and p.dtype != "float32" and p.total_q * p.heads >= Repeats.FEWEST
        self._repeats = Repeats() if taken and generic else None
        self.independence = Independence()
        self._doubts = Doubts(p, tokens.q.device)
        self._overflow: torch.Tensor | None = None

    @contextmanager
    def sums(self, placed: Placed) -> Iterator[tuple[Sums, Sums]]:
        """Give a frame the sums of dK and dV to add to, and store them afterwards."""
        parts = {name: placed.sums(whole) for name, whole in self._keys.items()}
        dk, dv = (Sums.within(part, self._names[name]) for name, part in parts.items())
        yield dk, dv
        for name, part in parts.items():
            placed.store_sums(self._keys[name], part)

    def add(self, placed: Placed, t: Scores, f: Forward, g: Gradients) -> None:
        """Store one frame's results."""
        if t.doubt is not None:
            self._doubts.add(placed, t.doubt)
            for each in (t.m_lse, f.m_o, g.m_dq):
                each.masked_fill_(t.doubt.rows, torch.inf)
        if self._parts == 1:
            o, dq = f.m_o, g.m_dq
        else:
            o, dq = (torch.cat(each, -1) for each in parts_of_rows(f, g))
        placed.store_rows(self._lse, t.m_lse)
        placed.store_rows(self._o, o)
        placed.store_rows(self._dq, dq)
        if self._repeats is not None:
            self._repeats.add(t, f, g, placed)
        if g.over is not None:
            over = g.over.any()
            self._overflow = over if self._overflow is None else self._overflow | over
        if self._sinks is not None and g.sinks is not None:
            self._sinks.add(placed, *g.sinks)

    def finished(self) -> Budgets:
        """Return the budgets of the whole batch; frees the sums, so it can be called only once."""
        steps = _row_steps(self._tokens.problem, self._lse.device)
        outputs: dict[OutputName, Budget] = {
            "o": Budget(*self._o.chunk(self._parts, -1)),
            "dq": Budget(*self._dq.chunk(self._parts, -1)),
        }
        for name in ("dk", "dv"):
            outputs[name] = self._summed(self._names[name], self._keys.pop(name), steps)
        captured = self.captured.allowed()
        if self._sinks is not None:
            captured[SINKS] = self._sinks.allowed()
        return Budgets(
            lse=self._lse[..., 0], outputs=outputs, repeats=self._repeats, captured=captured,
            independence=self.independence, doubted=self._doubts.counts(), overflow=self._overflow,
        )  # fmt: skip

    def _summed(self, names: list[str], whole: torch.Tensor, steps: Steps) -> Budget:
        return of_sums(Sums.within(whole, names), steps, self._rounding, lean=self._parts == 1, partials=self._partials)


def of_sums(x: Sums, steps: Steps, rounding: Rounding, *, lean: bool = False, partials: bool = False) -> Budget:
    """Return the budget of dK or dV from sums over all rows, of `steps` matrix steps (`steps_of_rows`)."""
    reorder, b, allowed, random = sum_budget(x.result, x.size, x.hard, x.sigma2, x.tau2, x.b, steps, rounding)
    if lean:
        return Budget(allowed)
    noise = x.sigma2 if x.noise is None else x.noise
    if partials:
        # A sum of two half-precision numbers lies on half units: its rounding is exact or breaks a tie, hence h^2 / 2.
        noise = noise + half_ulp_of_sum(x.result, rounding.form).square_().div_(6)
    return Budget(allowed, random, b, x.flush, noise, reorder)


def parts_of_rows(f: Forward, g: Gradients) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors of O's and of dQ's `Budget` on a frame."""
    assert f.noise is not None
    assert g.flush is not None
    o = [f.m_o, f.random, f.b, f.flush, f.noise, f.reorder]
    return o, [g.m_dq, g.random, g.b, g.flush, g.sigma2, g.reorder]


def steps_of_rows(problem: Problem) -> list[int]:
    """Return the matrix steps of 16 rows that sum to dK and dV, of each sequence."""
    return [problem.groups * (math.ceil(n / 16) + 2) for n in problem.seqlens_q]


def _row_steps(problem: Problem, device: torch.device) -> Steps:
    """Return the matrix steps of 16 rows that sum to dK and dV, for each key token: `(total_k, 1)`, or one number for all."""
    steps = steps_of_rows(problem)
    if len(set(steps)) == 1:
        return float(steps[0])
    each = torch.tensor(steps, dtype=torch.float64).repeat_interleave(torch.tensor(problem.seqlens_k))
    return each[:, None].to(device, non_blocking=True)
