"""Inputs of a kernel from a Recipe: packing, slack rows, memory layouts, and captured tensors of modifiers.

The values of q, k, v and dO come from harness/trial/values.py. Slack rows are NaN. Unused memory of an allocation (before the
tensor, between rows) is another NaN, with bits that no arithmetic produces.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from itertools import accumulate

import torch

from attnfuzz.harness.trial.noise import Numbers, Request
from attnfuzz.harness.trial.places import lists_of
from attnfuzz.harness.trial.values import Maker, requests_of
from attnfuzz.kernels.contract import Inputs
from attnfuzz.kernels.expressions.tree import Captured
from attnfuzz.kernels.modified import shape_of, tensors_of
from attnfuzz.kernels.problem import Layout, Problem, strides_of
from attnfuzz.strategies.case import Recipe

__all__ = ["GAP", "captured_values", "materialise", "numbers_of"]

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
GAP = 0xFFB5 - (1 << 16)
"""A 16-bit word that is NaN in float16, bfloat16 and (two of them) float32; signalling in the last two."""
_DOCUMENT = 48
"""Mean length of a document in tokens."""
_NUMBERS = 8


def numbers_of(sources: Iterable[tuple[Problem, Recipe]], device: str) -> Numbers:
    """Compute ahead, in few device operations, the hashed numbers of all inputs of `sources`."""
    requests: list[Request] = []
    lists: list[tuple[int, ...]] = []
    for problem, recipe in sources:
        requests += [*requests_of(problem, recipe), *_requests_of(problem, recipe.seed)]
        lists += [*lists_of(problem), _cumulated(problem.seqlens_q), _cumulated(problem.seqlens_k)]
        lists += [_slopes(shape_of(problem, each)[-1]) for each in tensors_of(problem) if each.fill == "slopes"]
    return Numbers(device, requests, lists)


def materialise(problem: Problem, recipe: Recipe, device: str, numbers: Numbers | None = None) -> Inputs:
    """Return the tensors of a Case on `device`: slack rows are NaN, dLSE is set if the Problem needs it.

    `numbers` may hold those of several Cases; the tensors share no memory with it.
    """
    numbers = Numbers(device) if numbers is None else numbers
    maker = Maker(problem, recipe, numbers)
    q = _batched(problem, _scaled(maker.q(), recipe.q_scale), problem.slack_q)
    k = _batched(problem, _scaled(maker.k(), recipe.k_scale), problem.slack_k)
    v = _batched(problem, _scaled(maker.v(), recipe.v_scale), problem.slack_k)
    q, k, v = _laid_out(problem, q, k, v)
    return Inputs(
        problem=problem,
        q=q,
        k=k,
        v=v,
        d_o=_d_o(problem, _scaled(maker.d_o(), recipe.do_scale), recipe.do_scale),
        # In another dtype, so in memory of their own.
        cu_seqlens_q=numbers.integers(_cumulated(problem.seqlens_q)).to(torch.int32),
        cu_seqlens_k=numbers.integers(_cumulated(problem.seqlens_k)).to(torch.int32),
        max_seqlen_q=max(problem.seqlens_q),
        max_seqlen_k=max(problem.seqlens_k),
        d_lse=_d_lse(problem, recipe, numbers) if problem.needs.dlse else None,
        captured=tuple(_captured(problem, each, recipe.seed, numbers) for each in tensors_of(problem)),
    )


def _requests_of(problem: Problem, seed: int) -> Iterable[Request]:
    """Yield the numbers of dLSE and of captured tensors."""
    if problem.needs.dlse:
        yield Request("noise", seed, "dlse", problem.total_q * problem.heads)
    for tensor in tensors_of(problem):
        shape = shape_of(problem, tensor)
        if tensor.fill == "normal":
            yield Request("noise", seed, f"captured {tensor.name}", math.prod(shape))
        elif tensor.fill in ("documents_q", "documents_k"):
            yield Request("hashed", seed, "captured documents", math.prod(_document_grid(problem, shape)))
        elif tensor.fill != "slopes":
            yield Request("hashed", seed, f"captured {tensor.name}", math.prod(shape))


def _scaled(values: torch.Tensor, scale: float) -> torch.Tensor:
    return values if scale == 1 else values * scale


def _batched(problem: Problem, values: torch.Tensor, slack: int) -> torch.Tensor:
    """Bring float32 (tokens, heads, dim) to the packing's shape and the dtype, clamped to its range, with NaN slack rows."""
    dtype = _DTYPES[problem.dtype]
    finite = torch.finfo(dtype).max
    values = values.clamp(-finite, finite).to(dtype)
    if problem.packing == "dense":
        values = values.reshape(problem.batch, values.shape[0] // problem.batch, *values.shape[1:])
    if not slack:
        return values.contiguous()
    shape = list(values.shape)
    shape[-3] += slack
    out = torch.full(shape, torch.nan, dtype=dtype, device=values.device)
    out[..., : values.shape[-3], :, :] = values
    return out


def _laid_out(problem: Problem, *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Place q, k and v by their layouts; packed ones share an allocation."""
    layouts = (problem.layout_q, problem.layout_k, problem.layout_v)
    together = [tensor for tensor, layout in zip(qkv, layouts, strict=True) if layout.packed]
    packed = iter(_side_by_side(together, problem.layout_k) if together else ())
    return tuple(
        next(packed) if layout.packed else _placed(problem, tensor, layout) for tensor, layout in zip(qkv, layouts, strict=True)
    )


def _d_o(problem: Problem, values: torch.Tensor, constant: float) -> torch.Tensor:
    if not problem.layout_do.expanded:
        return _placed(problem, _batched(problem, values, problem.slack_q), problem.layout_do)
    contiguous = _batched(problem, values, problem.slack_q)
    offset = problem.layout_do.offset
    one = _allocated(offset + 1, contiguous.dtype, values.device)
    one[offset] = min(constant, torch.finfo(contiguous.dtype).max)
    return one.as_strided(contiguous.shape, (0,) * contiguous.ndim, offset)


def _placed(problem: Problem, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the same values (with expanded heads: those of head 0) in memory laid out by `layout`."""
    if layout == Layout():
        return tensor
    source = tensor[..., :1, :] if layout.expanded_heads else tensor
    strides, step = strides_of(problem.packing, layout, source.shape)
    flat = _allocated(layout.offset + step, tensor.dtype, tensor.device)
    placed = flat.as_strided(source.shape, strides, layout.offset)
    placed.copy_(source)
    return placed.expand(tensor.shape)


def _side_by_side(tensors: list[torch.Tensor], layout: Layout) -> list[torch.Tensor]:
    """Return slices of one allocation whose rows hold a token of each tensor, one after the other, then padding."""
    widths = [tensor.shape[-2] * tensor.shape[-1] for tensor in tensors]
    outer = tensors[0].shape[:-2]
    row = sum(widths) + layout.pitch
    flat = _allocated(layout.offset + math.prod(outer) * row, tensors[0].dtype, tensors[0].device)
    slices = []
    for tensor, begin in zip(tensors, accumulate(widths, initial=layout.offset), strict=False):
        steps = [row * math.prod(outer[axis + 1 :]) for axis in range(len(outer))]
        part = flat.as_strided(tensor.shape, (*steps, tensor.shape[-1], 1), begin)
        slices.append(part.copy_(tensor))
    return slices


def _allocated(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate `count` elements of NaN."""
    words = torch.full((count * dtype.itemsize // 2,), GAP, dtype=torch.int16, device=device)
    return words.view(dtype)


def _cumulated(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *accumulate(lengths))


def _d_lse(problem: Problem, recipe: Recipe, numbers: Numbers) -> torch.Tensor:
    values = _scaled(numbers.noise(recipe.seed, "dlse", (problem.total_q, problem.heads)), recipe.do_scale)
    if problem.packing == "dense":
        values = values.reshape(problem.batch, problem.seqlens_q[0], problem.heads)
    if not problem.slack_q:
        return values.transpose(-1, -2).clone(memory_format=torch.contiguous_format)
    shape = (*values.shape[:-2], problem.heads, values.shape[-2] + problem.slack_q)
    out = torch.full(shape, torch.nan, dtype=torch.float32, device=values.device)
    out[..., : values.shape[-2]] = values.transpose(-1, -2)
    return out


def captured_values(problem: Problem, tensor: Captured, seed: int, device: str) -> torch.Tensor:
    """Return the values of a captured tensor for `problem`; document ids of queries and keys are parts of one sequence."""
    return _captured(problem, tensor, seed, Numbers(device))


def _captured(problem: Problem, tensor: Captured, seed: int, numbers: Numbers) -> torch.Tensor:
    shape = shape_of(problem, tensor)
    match tensor.fill:
        case "normal":
            return numbers.noise(seed, f"captured {tensor.name}", shape).clone()
        case "slopes":
            return numbers.integers(_slopes(shape[-1])).to(torch.int32).view(torch.float32).expand(shape).contiguous()
        case "documents_q" | "documents_k":
            return _documents(problem, shape, seed, numbers)
    most = problem.sizes["seqlen_k"] + 1 if tensor.fill == "lengths" else _NUMBERS
    return (numbers.hashed(seed, f"captured {tensor.name}", shape) % most).to(torch.int32)


@functools.cache
def _slopes(heads: int) -> tuple[int, ...]:
    """Return the bits of ALiBi's slopes in float32, as integers: computed on the host, since exp2 differs between devices."""
    numbers = torch.arange(1, heads + 1, dtype=torch.float64)
    return tuple(torch.exp2(-8 * numbers / heads).to(torch.float32).view(torch.int32).tolist())


def _documents(problem: Problem, shape: tuple[int, ...], seed: int, numbers: Numbers) -> torch.Tensor:
    """Return ids from 0, growing along the last dimension: a new document begins about every 48 tokens, and in the middle.

    Queries and keys are aligned at their ends, as they are in a causal mask.
    """
    rows, longest = _document_grid(problem, shape)
    starts = numbers.hashed(seed, "captured documents", (rows, longest)) % _DOCUMENT == 0
    starts[:, longest // 2] = True
    ids = starts.cumsum(-1, dtype=torch.int32)
    return ids[:, longest - shape[-1] :].reshape(shape).contiguous()


def _document_grid(problem: Problem, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of sequences with documents of their own, and the tokens of each."""
    return max(1, math.prod(shape[:-1])), max(problem.sizes["seqlen_q"], problem.sizes["seqlen_k"], 1)
