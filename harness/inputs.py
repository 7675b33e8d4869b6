"""Recipe -> tensors as a kernel gets them: packing, slack rows and memory layouts. Values are made in harness/values.py."""

from __future__ import annotations

from itertools import accumulate

import torch

from attnfuzz.harness.noise import noise
from attnfuzz.harness.values import Maker
from attnfuzz.kernels.contract import Inputs
from attnfuzz.kernels.problem import Problem, reject
from attnfuzz.strategies.case import Recipe

__all__ = ["materialise"]

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


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
    maker = Maker(problem, recipe, device)
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
