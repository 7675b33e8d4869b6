"""Which Cases of one kernel are judged at once, and how many of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from attnfuzz.harness.judge.contract import why_unfit
from attnfuzz.harness.judge.truth import WHOLE
from attnfuzz.kernels.contract import Config, Deviations, Inputs, Outputs
from attnfuzz.kernels.problem import Problem
from attnfuzz.oracles import blockwise
from attnfuzz.oracles.frames import CHUNK

__all__ = ["FRAME", "Launched", "alike", "parts", "takes_gradient"]

FRAME = {"cpu": 1 << 16, "cuda": 1 << 23}
"""Scores of a frame: few enough for a CPU's cache, and many enough to fill a GPU."""
_ELEMENTS = 1 << 18
"""Elements of q, k, v and dO of the Cases judged at once on a CPU. Cases of up to 12 tokens a sequence take a third of their time
alone then, those of up to 64 two thirds."""
_MEMORY = 1 << 13
"""Bytes of a GPU's memory for each of these elements, which is held some fifty times in 8 bytes at once: 5 % of it. A process
that needs more gives it back after each batch, and takes it again. Half as many elements take 15 % more of a batch's time on an
H100, and twice as many save nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A Case's kernel, inputs and outputs."""

    kernel: str
    inputs: Inputs
    outputs: Outputs
    config: Config


def alike(launched: Sequence[Launched], deviations: Deviations) -> list[list[int]]:
    """Return the numbers of Cases to judge at once, unless they have too many elements: equal dtype, dims, outputs and device."""
    of: dict[object, list[int]] = {}
    for number, each in enumerate(launched):
        p, where = each.inputs.problem, each.inputs.q.device
        if _fits(p, where) and _has_gradient(each) and not why_unfit(each.kernel, each.inputs, each.outputs):
            groups = p.groups if deviations.half_partials else 0
            of.setdefault((p.dtype, p.dim_qk, p.dim_v, p.needs.outputs, where, groups), []).append(number)
    return list(of.values())


def parts(launched: Sequence[Launched], numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yield the numbers in parts of not too many elements; Cases of similar scores are together, which fill fewer frames."""
    part: list[int] = []
    taken = 0
    for number in sorted(numbers, key=lambda number: _most_scores(launched[number].inputs.problem)):
        size, most = _elements(launched[number].inputs.problem), _most_elements(launched[number].inputs.q.device)
        if part and taken + size > most:
            yield part
            part, taken = [], 0
        part.append(number)
        taken += size
    if part:
        yield part


@functools.cache
def _most_elements(where: torch.device) -> int:
    return torch.cuda.get_device_properties(where).total_memory // _MEMORY if where.type == "cuda" else _ELEMENTS


def _most_scores(problem: Problem) -> int:
    """Return the scores of the largest slot: of one sequence and key/value head."""
    return problem.groups * max(n_q * n_k for n_q, n_k in zip(problem.seqlens_q, problem.seqlens_k, strict=True))


def _elements(problem: Problem) -> int:
    rows = problem.total_q * problem.heads + problem.total_k * problem.kv_heads
    return rows * (problem.dim_qk + problem.dim_v)


def _fits(problem: Problem, where: torch.device) -> bool:
    """Whether a Case can be judged with others."""
    if problem.score_mod is not None or problem.mask_mod is not None or problem.softcap:
        return False
    largest = _most_scores(problem)
    within = largest * problem.kv_heads <= WHOLE and largest <= CHUNK[where.type]
    return within and not blockwise.is_large(problem) and where.type in FRAME


def _has_gradient(each: Launched) -> bool:
    """Whether the gradient of the sinks is as the contract requires, where there is one."""
    p, x = each.inputs.problem, each.inputs.q
    if not takes_gradient(p):
        return True
    got = each.outputs.d_captured[0] if len(each.outputs.d_captured) == 1 else None
    if got is None or type(got) not in (torch.Tensor, torch.nn.Parameter) or got.layout is not torch.strided:
        return False
    return tuple(got.shape) == (p.heads,) and got.dtype in (torch.float32, x.dtype) and got.device == x.device


def takes_gradient(problem: Problem) -> bool:
    """Whether a kernel returns the gradient of the sinks."""
    return problem.sinks and bool({"dq", "dk", "dv"} & set(problem.needs.outputs))
