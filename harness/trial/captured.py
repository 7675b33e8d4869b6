"""What the tensors that modifiers read hold, from the Recipe's seed: float32 or int32, contiguous."""

from __future__ import annotations

import math

import torch

from attnfuzz.harness.trial.noise import hashed, noise
from attnfuzz.kernels.expressions.tree import Captured
from attnfuzz.kernels.modified import shape_of
from attnfuzz.kernels.problem import Problem

__all__ = ["made"]

_DOCUMENT = 48
"""Tokens of a document, about."""
_NUMBERS = 8


def made(problem: Problem, tensor: Captured, seed: int, device: str) -> torch.Tensor:
    """The values of `tensor` for `problem`; what two documents' tensors share is the sequence that they tell of."""
    shape = shape_of(problem, tensor)
    match tensor.fill:
        case "normal":
            return noise(seed, f"captured {tensor.name}", shape, device)
        case "slopes":
            heads = torch.arange(1, shape[-1] + 1, dtype=torch.float64)
            return torch.exp2(-8 * heads / shape[-1]).to(torch.float32).expand(shape).contiguous().to(device)
        case "documents_q" | "documents_k":
            return _documents(problem, shape, seed, device)
    most = problem.sizes["seqlen_k"] + 1 if tensor.fill == "lengths" else _NUMBERS
    return (hashed(seed, f"captured {tensor.name}", shape, device) % most).to(torch.int32)


def _documents(problem: Problem, shape: tuple[int, ...], seed: int, device: str) -> torch.Tensor:
    """Ids from 0, growing along the last dimension: a new document begins at about every 48th token, and in the middle.

    Queries and keys are aligned at their ends, as they are in a causal mask.
    """
    longest = max(problem.sizes["seqlen_q"], problem.sizes["seqlen_k"], 1)
    rows = max(1, math.prod(shape[:-1]))
    starts = hashed(seed, "captured documents", (rows, longest), device) % _DOCUMENT == 0
    starts[:, longest // 2] = True
    ids = starts.cumsum(-1, dtype=torch.int32)
    return ids[:, longest - shape[-1] :].reshape(shape).contiguous()
