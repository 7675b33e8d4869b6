"""Inputs built from the tensors of their sequences, and outputs of one sequence, heads first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from attnfuzz.kernels.contract import Inputs, Outputs
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.oracles.attention import SequenceData

__all__ = ["BY_QUERY", "output", "packed"]

BY_QUERY = ("o", "lse", "dq")


def packed(problem: Problem, parts: Sequence[SequenceData]) -> Inputs:
    """Build the Inputs of `problem` from `parts`, one for each sequence; slack rows are NaN."""
    device = parts[0].q.device

    def cumulated(lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)

    return Inputs(
        problem=problem,
        q=_stacked(problem, [part.q for part in parts], problem.slack_q),
        k=_stacked(problem, [part.k for part in parts], problem.slack_k),
        v=_stacked(problem, [part.v for part in parts], problem.slack_k),
        d_o=_stacked(problem, [part.d_o for part in parts], problem.slack_q),
        cu_seqlens_q=cumulated(problem.seqlens_q),
        cu_seqlens_k=cumulated(problem.seqlens_k),
        max_seqlen_q=max(problem.seqlens_q),
        max_seqlen_k=max(problem.seqlens_k),
    )


def _stacked(problem: Problem, parts: list[torch.Tensor], slack: int) -> torch.Tensor:
    rows = [part.transpose(0, 1) for part in parts]
    tokens = torch.stack(rows) if problem.packing == "dense" else torch.cat(rows)
    shape = list(tokens.shape)
    shape[-3] = slack
    return torch.cat((tokens, tokens.new_full(shape, torch.nan)), dim=-3) if slack else tokens.contiguous()


def output(problem: Problem, outputs: Outputs, name: OutputName, index: int) -> torch.Tensor:
    """Return output `name` of sequence `index` without slack rows: float64 `(heads, rows, dim)`, LSE `(heads, rows)`."""
    got: torch.Tensor | None = getattr(outputs, name)
    assert got is not None
    lengths = problem.seqlens_q if name in BY_QUERY else problem.seqlens_k
    got = got.detach()
    if problem.packing == "dense":
        got, start = got[index], 0
    else:
        start = sum(lengths[:index])
    rows = slice(start, start + lengths[index])
    return (got[:, rows] if name == "lse" else got[rows].transpose(0, 1)).double()
