"""A batch's modifiers on coordinates: what they hide, what they make of scores, and how far off a kernel's may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from attnfuzz.kernels.expressions.derivative import by_load, by_score
from attnfuzz.kernels.expressions.evaluation import evaluate
from attnfuzz.kernels.expressions.tree import Captured, Expression
from attnfuzz.kernels.modified import mask_of, score_of, tensors_of
from attnfuzz.kernels.problem import Problem
from attnfuzz.oracles.mask_doubt import doubtful
from attnfuzz.oracles.tree_errors import evaluated

__all__ = ["Changed", "Leaves", "Modifiers", "leaves_of"]

Leaves: TypeAlias = dict[str, torch.Tensor]


def leaves_of(
    b: torch.Tensor,
    h: torch.Tensor,
    i: torch.Tensor,
    j: torch.Tensor,
    n_q: torch.Tensor | int,
    n_k: torch.Tensor | int,
) -> Leaves:
    """Batch, head, query and key of each score, broadcast; what is beyond a sequence is taken for its last one."""
    device = i.device
    n_q, n_k = (torch.as_tensor(n, device=device) for n in (n_q, n_k))
    return {
        "b": b, "h": h, "q_idx": torch.minimum(i, (n_q - 1).clamp(min=0)), "kv_idx": torch.minimum(j, (n_k - 1).clamp(min=0)),
        "seqlen_q": n_q, "seqlen_k": n_k,
    }  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Changed:
    """Scores s before score_mod, float64, and after it: f(s), the error of a kernel's, f'(s) and its error."""

    before: torch.Tensor
    before_error: torch.Tensor
    after: torch.Tensor
    after_error: torch.Tensor
    slope: torch.Tensor
    slope_error: torch.Tensor
    leaves: Leaves


@dataclass(frozen=True, slots=True, eq=False)
class Modifiers:
    """softcap and score_mod as one tree, mask_mod, and the tensors that they read by name."""

    score: Expression | None
    mask: Expression | None
    tensors: Mapping[str, torch.Tensor]

    @staticmethod
    def of(problem: Problem, captured: tuple[torch.Tensor, ...]) -> Modifiers:
        """Those of `problem`, whose captured tensors are `captured`."""
        names = [each.name for each in tensors_of(problem)]
        return Modifiers(score_of(problem), mask_of(problem), dict(zip(names, captured, strict=True)))

    def unmasked(self, leaves: Leaves) -> torch.Tensor | None:
        """Which scores mask_mod leaves, bool, broadcast; None where there is none."""
        return None if self.mask is None else evaluate(self.mask, leaves, self.tensors, torch.float64)

    def doubtful(self, leaves: Leaves) -> torch.Tensor | None:
        """Of which scores a kernel's mask_mod may say otherwise, bool, broadcast; None where no float is in it."""
        return None if self.mask is None else doubtful(self.mask, leaves, self.tensors)

    def changed(self, s: torch.Tensor, leaves: Leaves, tensors: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """score_mod(s), differentiable by s and by `tensors` (default: the batch's own)."""
        if self.score is None:
            return s
        found = evaluate(self.score, {**leaves, "score": s}, self.tensors if tensors is None else tensors, s.dtype)
        return found.expand(torch.broadcast_shapes(found.shape, s.shape))

    def with_error(self, s: torch.Tensor, error: torch.Tensor, leaves: Leaves) -> Changed:
        """score_mod(s) and its derivative, with their errors where s may be off by `error`."""
        assert self.score is not None
        shape = s.shape
        given = {**leaves, "score": s}
        after, slope = (evaluated(tree, given, self.tensors, error) for tree in (self.score, by_score(self.score)))
        return Changed(
            before=s, before_error=error, after=after[0].expand(shape), after_error=after[1].expand(shape),
            slope=slope[0].expand(shape), slope_error=slope[1].expand(shape), leaves=leaves,
        )  # fmt: skip

    def gradients(self, changed: Changed) -> list[tuple[Captured, tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]]:
        """Of each load that takes a gradient: its tensor, where it reads, d f / d load and the error of that."""
        found = []
        for each in self.score.walk() if self.score is not None else ():
            if isinstance(each.value, Captured) and each.value.gradient:
                assert self.score is not None
                leaves = {**changed.leaves, "score": changed.before}
                slope, error = evaluated(by_load(self.score, each), leaves, self.tensors, changed.before_error)
                index = tuple(evaluate(arg, leaves, self.tensors, torch.float64) for arg in each.args)
                found.append((each.value, index, slope.expand(changed.before.shape), error.expand(changed.before.shape)))
        return found
