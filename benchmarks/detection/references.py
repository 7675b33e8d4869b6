"""Attention by one formula, for the rules of other suites: in float64, in the kernel's own dtype, and as eager flex attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from attnfuzz.kernels.contract import Inputs
from attnfuzz.kernels.problem import OutputName
from attnfuzz.oracles.attention import (
    SequenceData,
    attention,
    differentiable,
    leaves_within,
    reference,
    sequences,
    visible_keys,
)

__all__ = ["GRADED", "Parts", "eager", "exact", "stepwise"]

GRADED: tuple[OutputName, ...] = ("o", "dq", "dk", "dv")
Parts: TypeAlias = dict[OutputName, torch.Tensor]
"""Outputs of the whole batch, heads first: (heads, tokens[, dim])."""
_Modify = Callable[[torch.Tensor], torch.Tensor]
_Formula = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, _Modify], torch.Tensor]


def exact(inputs: Inputs) -> Parts:
    """Return O, LSE, dQ, dK and dV in float64."""
    parts = [reference(inputs.problem, each) for each in sequences(inputs)]
    names: tuple[OutputName, ...] = ("o", "lse", "dq", "dk", "dv")
    return {name: torch.cat([getattr(each, name) for each in parts], 1) for name in names}


def stepwise(inputs: Inputs) -> Parts:
    """Return O, dQ, dK and dV with every operation in the inputs' dtype, as flash-attention's `attention_ref(upcast=False)`."""

    def formula(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float, modify: _Modify
    ) -> torch.Tensor:
        return attention(q, k, v, visible, scale, modify)[0]

    return _by_autograd(inputs, formula)


def eager(inputs: Inputs) -> Parts:
    """Return O, dQ, dK and dV with products in the inputs' dtype, scores and softmax in float32, as flex attention uncompiled."""
    return _by_autograd(inputs, _eager)


def _eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float, modify: _Modify
) -> torch.Tensor:
    groups = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = modify(scale * (q @ k.transpose(-1, -2)).float())
    blind = ~visible.any(-1)[..., None]
    scores = scores.masked_fill(~(visible | blind), -torch.inf)
    return torch.softmax(scores, -1).masked_fill(blind, 0.0).to(q.dtype) @ v


def _by_autograd(inputs: Inputs, formula: _Formula) -> Parts:
    parts = [_of_sequence(inputs, each, formula) for each in sequences(inputs)]
    return {name: torch.cat([each[name] for each in parts], 1).double() for name in GRADED}


def _of_sequence(inputs: Inputs, data: SequenceData, formula: _Formula) -> Parts:
    """Return one sequence's outputs, gradients by autograd."""
    problem = inputs.problem
    rows, keys = range(data.q.shape[1]), range(data.k.shape[1])
    leaves = leaves_within(data, torch.arange(problem.heads)[:, None, None], rows, keys)
    modifiers, _ = differentiable(problem, data)
    visible = visible_keys(problem, data.index)
    if (unmasked := modifiers.unmasked(leaves)) is not None:
        visible = visible & unmasked
    with torch.enable_grad():
        q, k, v = (x.detach().clone().requires_grad_() for x in (data.q, data.k, data.v))
        o = formula(q, k, v, visible, problem.scale, lambda scores: modifiers.changed(scores, leaves))
        gradients = torch.autograd.grad((o * data.d_o).sum(), (q, k, v), materialize_grads=True, allow_unused=True)
    return dict(zip(GRADED, (o.detach(), *gradients), strict=True))
