"""The relation for huge strides: a tiny tensor with an offset beyond 2^31 elements gives the same results as a contiguous one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch

from attnfuzz.kernels.contract import Inputs, Outputs
from attnfuzz.kernels.problem import Layout, strides_of
from attnfuzz.oracles.attention import sequences
from attnfuzz.oracles.relations.difference import Difference, Related, Setup
from attnfuzz.oracles.relations.sizes import Noise
from attnfuzz.oracles.relations.tensors import output

__all__ = ["huge_strides", "stretch"]

_Allocate: TypeAlias = Callable[..., torch.Tensor]
"""Returns an unfilled tensor of (shape, strides, dtype=, device=), as torch.empty_strided does."""

TENSORS = (("q", "layout_q"), ("k", "layout_k"), ("v", "layout_v"), ("d_o", "layout_do"))


def huge_strides(setup: Setup) -> Related:
    """Launch the Case contiguous, then each of `setup.problems` with a huge pitch of one tensor: all outputs are equal.

    The inputs of the related launches are contiguous here: `stretch` makes them one at a time, since each takes gigabytes of
    address space.
    """
    whole = setup.inputs.problem
    parts = list(sequences(setup.inputs))

    def differences(outputs: Sequence[Outputs]) -> Iterator[Difference]:
        of_contiguous = []
        for part in parts:
            noise = Noise(whole, part, setup.deviations, setup.device)
            for name in whole.needs.outputs:
                expected = output(whole, outputs[0], name, part.index)
                of_contiguous.append(noise.difference(name, expected, expected))
        for problem, own in zip(setup.problems, outputs[1:], strict=True):
            wide = next(name for name, layout in TENSORS if getattr(problem, layout) != Layout())
            apart = "heads" if getattr(problem, dict(TENSORS)[wide]).order else "rows"
            # A huge pitch between rows puts sequences as far apart.
            what = f"with {apart} of {wide} a huge pitch apart"
            for each in of_contiguous:
                yield dataclasses.replace(each, got=output(problem, own, each.output, each.sequence), what=what)

    others = (dataclasses.replace(setup.inputs, problem=problem) for problem in setup.problems)
    return Related((setup.inputs, *others), differences)


def stretch(inputs: Inputs, allocate: _Allocate = torch.empty_strided) -> Inputs:
    """Copy contiguous `inputs` into its Problem's layouts, those with a pitch, in tensors of `allocate`.

    Memory between rows is never touched: on the CPU, and on CUDA with an `allocate` that maps the rows only, it takes none.
    A kernel that reads there on CUDA makes an illegal memory access then.

    Raises:
        RuntimeError, MemoryError: there is not enough memory.
    """
    problem = inputs.problem
    tensors = {}
    for name, layout in TENSORS:
        if getattr(problem, layout).pitch:
            strides, _ = strides_of(problem.packing, getattr(problem, layout), getattr(inputs, name).shape)
            tensors[name] = _stretch(getattr(inputs, name), strides, allocate)
    return dataclasses.replace(inputs, **tensors)


def _stretch(x: torch.Tensor, strides: tuple[int, ...], allocate: _Allocate) -> torch.Tensor:
    wide = allocate(x.shape, strides, dtype=x.dtype, device=x.device)
    return wide.copy_(x)
