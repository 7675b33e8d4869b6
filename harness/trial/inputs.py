"""Inputs of a kernel from a Recipe: packing, slack rows, memory layouts, and captured tensors of modifiers.

The values of q, k, v and dO come from harness/trial/values.py. Slack rows are NaN. Unused memory of an allocation (before the
tensor, between rows) is another NaN, with bits that no arithmetic produces.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch

from attnfuzz.harness.trial.noise import Numbers, Request, few_hashed
from attnfuzz.harness.trial.pages import with_pages
from attnfuzz.harness.trial.placement import GAP, Placement
from attnfuzz.harness.trial.places import cumulated, lists_of
from attnfuzz.harness.trial.values import Maker, requests_of
from attnfuzz.kernels.contract import Inputs
from attnfuzz.kernels.expressions.tree import Captured
from attnfuzz.kernels.modified import shape_of, tensors_of
from attnfuzz.kernels.problem import SINKS, Layout, Problem, strides_of
from attnfuzz.strategies.case import Recipe, SinkValues

__all__ = ["GAP", "materialise", "numbers_of"]

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_DOCUMENT = 48
"""Mean length of a document in tokens."""
_NUMBERS = 8


def numbers_of(sources: Iterable[tuple[Problem, Recipe]], device: str) -> Numbers:
    """Compute ahead, in few device operations, the hashed numbers of all inputs of `sources`."""
    requests: list[Request] = []
    lists: list[tuple[int, ...]] = []
    for problem, recipe in sources:
        requests += [*requests_of(problem, recipe), *_requests_of(problem, recipe.seed)]
        lists += [*lists_of(problem), *([_sinks(problem.heads, recipe)] if problem.sinks else [])]
        lists += [_slopes(shape_of(problem, each)[-1]) for each in tensors_of(problem) if each.fill == "slopes"]
    return Numbers(device, requests, lists)


def materialise(problem: Problem, recipe: Recipe, device: str, numbers: Numbers | None = None) -> Inputs:
    """Return the tensors of a Case on `device`: slack rows are NaN, dLSE is set if the Problem needs it.

    `numbers` may hold those of several Cases; the tensors share no memory with it.
    """
    numbers = Numbers(device) if numbers is None else numbers
    maker = Maker(problem, recipe, numbers)
    placer = _Placer(problem, torch.device(device))
    q, k, v = placer.qkv((maker.q(), recipe.q_scale), (maker.k(), recipe.k_scale), (maker.v(), recipe.v_scale))
    inputs = Inputs(
        problem=problem,
        q=q,
        k=k,
        v=v,
        d_o=placer.d_o(maker.d_o, recipe.do_scale),
        cu_seqlens_q=placer.placement.integers(numbers.integers(cumulated(problem.seqlens_q))),
        cu_seqlens_k=placer.placement.integers(numbers.integers(cumulated(problem.seqlens_k))),
        max_seqlen_q=max(problem.seqlens_q),
        max_seqlen_k=max(problem.seqlens_k),
        d_lse=placer.d_lse(recipe, numbers) if problem.needs.dlse else None,
        captured=tuple(_tensor(problem, each, recipe, numbers, placer.placement) for each in tensors_of(problem)),
    )
    placer.placement.finish()
    return with_pages(inputs, recipe.seed) if problem.page_size else inputs


def _requests_of(problem: Problem, seed: int) -> Iterable[Request]:
    """Yield the numbers of dLSE and of captured tensors."""
    if problem.needs.dlse:
        yield Request("noise", seed, "dlse", problem.total_q * problem.heads)
    for tensor in tensors_of(problem):
        shape = shape_of(problem, tensor)
        if problem.sinks and tensor.name == SINKS:
            continue
        if tensor.fill == "normal":
            yield Request("noise", seed, f"captured {tensor.name}", math.prod(shape))
        elif tensor.fill in ("documents_q", "documents_k"):
            yield Request("hashed", seed, "captured documents", math.prod(_document_grid(problem, shape)))
        elif tensor.fill != "slopes":
            yield Request("hashed", seed, f"captured {tensor.name}", math.prod(shape))


class _Placer:
    """Makes the tensors of one Problem, whose values `placement` writes."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self.placement = Placement(device)
        self._problem, self._device, self._dtype = problem, device, _DTYPES[problem.dtype]

    def qkv(self, *parts: tuple[torch.Tensor, float]) -> tuple[torch.Tensor, ...]:
        """Return q, k and v of their values and scales, placed by their layouts; packed ones share an allocation."""
        p = self._problem
        layouts, slacks = (p.layout_q, p.layout_k, p.layout_v), (p.slack_q, p.slack_k, p.slack_k)
        shapes = [self._shape(values.shape, slack) for (values, _), slack in zip(parts, slacks, strict=True)]
        packed = iter(self._side_by_side([x for x, layout in zip(shapes, layouts, strict=True) if layout.packed]))
        tensors = []
        for (values, scale), shape, layout in zip(parts, shapes, layouts, strict=True):
            if layout.packed:
                tensors.append(self.placement.values(next(packed), values, scale))
            else:
                tensors.append(self._placed(values, scale, shape, layout))
        return tuple(tensors)

    def d_o(self, values: Callable[[], torch.Tensor], scale: float) -> torch.Tensor:
        """Return dO; an expanded one is one element."""
        p, layout = self._problem, self._problem.layout_do
        shape = self._shape((p.total_q, p.heads, p.dim_v), p.slack_q)
        if not layout.expanded:
            return self._placed(values(), scale, shape, layout)
        one = self.placement.memory(layout.offset + 1, self._dtype)
        constant = torch.ones((), device=self._device).expand(1, 1, 1)
        self.placement.values(one[layout.offset :].view(1, 1, 1), constant, scale)
        return one.as_strided(shape, (0,) * len(shape), layout.offset)

    def d_lse(self, recipe: Recipe, numbers: Numbers) -> torch.Tensor:
        """Return dLSE: contiguous, heads before rows, slack rows NaN."""
        p = self._problem
        values = numbers.noise(recipe.seed, "dlse", (p.total_q, p.heads, 1))
        batch, rows, heads, _ = (1,) * (p.packing != "dense") + self._shape(values.shape, p.slack_q)
        flat = torch.empty((batch, heads, rows), dtype=torch.float32, device=self._device)
        self.placement.values(flat.transpose(1, 2)[..., None], values, recipe.do_scale)
        return flat if p.packing == "dense" else flat[0]

    def _shape(self, size: Sequence[int], slack: int) -> tuple[int, ...]:
        """Return the shape of a tensor of values of `size`, (tokens, heads, dim)."""
        tokens, *row = size
        if self._problem.packing == "dense":
            return (self._problem.batch, tokens // self._problem.batch + slack, *row)
        return (tokens + slack, *row)

    def _placed(self, values: torch.Tensor, scale: float, shape: tuple[int, ...], layout: Layout) -> torch.Tensor:
        """Return the values (with expanded heads: those of head 0) in memory laid out by `layout`."""
        if layout == Layout():
            return self.placement.values(torch.empty(shape, dtype=self._dtype, device=self._device), values, scale)
        own = (*shape[:-2], 1, shape[-1]) if layout.expanded_heads else shape
        strides, step = strides_of(self._problem.packing, layout, own)
        placed = self.placement.memory(layout.offset + step, self._dtype).as_strided(own, strides, layout.offset)
        self.placement.values(placed, values[:, :1] if layout.expanded_heads else values, scale)
        return placed.expand(shape)

    def _side_by_side(self, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
        """Return slices of one allocation whose rows hold a token of each tensor, one after the other, then padding."""
        if not shapes:
            return []
        layout, outer = self._problem.layout_k, shapes[0][:-2]
        widths = [heads * dim for *_, heads, dim in shapes]
        row = sum(widths) + layout.pitch
        flat = self.placement.memory(layout.offset + math.prod(outer) * row, self._dtype)
        steps = [row * math.prod(outer[axis + 1 :]) for axis in range(len(outer))]
        begins = accumulate(widths, initial=layout.offset)
        return [flat.as_strided(shape, (*steps, shape[-1], 1), begin) for shape, begin in zip(shapes, begins, strict=False)]


def _tensor(problem: Problem, tensor: Captured, recipe: Recipe, numbers: Numbers, placement: Placement) -> torch.Tensor:
    if problem.sinks and tensor.name == SINKS:
        return placement.integers(numbers.integers(_sinks(problem.heads, recipe))).view(torch.float32)
    return _captured(problem, tensor, recipe.seed, numbers)


_SINK_SIZES: dict[SinkValues, tuple[float, float]] = {
    "moderate": (-4.0, 4.0),
    "zero": (0.0, 0.0),
    "large": (8.0, 72.0),
    "small": (-16640.0, -256.0),
}
"""The range of each kind. Beyond exp(88) a kernel that does not subtract the sink from its exponents would be infinite."""
_SINK_STEPS = 64


@functools.lru_cache(maxsize=256)
def _sinks(heads: int, recipe: Recipe) -> tuple[int, ...]:
    """Return the bits of the sinks in float32, as integers: few numbers, computed on the host.

    They are multiples of a 64th of their range: seven bits, exact in float16 and bfloat16.
    """
    kinds = list(_SINK_SIZES.values())
    sinks = []
    for number in few_hashed(recipe.seed, SINKS, heads):
        low, high = kinds[number // 1024 % len(kinds)] if recipe.sinks == "mixed" else _SINK_SIZES[recipe.sinks]
        sinks.append(low + (high - low) / _SINK_STEPS * (number % (_SINK_STEPS + 1)))
    return struct.unpack(f"{heads}i", struct.pack(f"{heads}f", *sinks))


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
