"""A batch's modifiers at given coordinates: which scores they hide, how they change scores, and how far off a kernel may be."""

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
    """Return batch, head, query and key of each score, broadcast; positions beyond a sequence are clamped to its last one."""
    # Numbers are filled in on the device: a copy from the host would wait for it.
    n_q, n_k = (n if isinstance(n, torch.Tensor) else torch.full((), n, device=i.device) for n in (n_q, n_k))
    return {
        "b": b, "h": h, "q_idx": torch.minimum(i, (n_q - 1).clamp(min=0)), "kv_idx": torch.minimum(j, (n_k - 1).clamp(min=0)),
        "seqlen_q": n_q, "seqlen_k": n_k,
    }  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Changed:
    """Scores s before score_mod and after it, float64: f(s), f'(s), and the errors that a kernel's may have."""

    before: torch.Tensor
    before_error: torch.Tensor
    after: torch.Tensor
    after_error: torch.Tensor
    slope: torch.Tensor
    slope_error: torch.Tensor
    leaves: Leaves


@dataclass(frozen=True, slots=True, eq=False)
class Modifiers:
    """softcap and score_mod as one tree, mask_mod, and by name the tensors that they read."""

    score: Expression | None
    mask: Expression | None
    tensors: Mapping[str, torch.Tensor]

    @staticmethod
    def of(problem: Problem, captured: tuple[torch.Tensor, ...]) -> Modifiers:
        """Return the modifiers of `problem` over its captured tensors."""
        names = [each.name for each in tensors_of(problem)]
        return Modifiers(score_of(problem), mask_of(problem), dict(zip(names, captured, strict=True)))

    @property
    def none(self) -> bool:
        """Whether no score is changed or hidden."""
        return self.score is None and self.mask is None

    def unmasked(self, leaves: Leaves) -> torch.Tensor | None:
        """Return which scores mask_mod keeps, bool, broadcast; None without a mask_mod."""
        return None if self.mask is None else evaluate(self.mask, leaves, self.tensors, torch.float64)

    def doubtful(self, leaves: Leaves) -> torch.Tensor | None:
        """Return for which scores a kernel's mask_mod may differ, bool, broadcast; None where no float is in it."""
        return None if self.mask is None else doubtful(self.mask, leaves, self.tensors)

    def changed(self, s: torch.Tensor, leaves: Leaves, tensors: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Return score_mod(s), differentiable by s and by `tensors` (default: the batch's own)."""
        if self.score is None:
            return s
        result = evaluate(self.score, {**leaves, "score": s}, self.tensors if tensors is None else tensors, s.dtype)
        return result.expand(torch.broadcast_shapes(result.shape, s.shape))

    def with_error(self, s: torch.Tensor, error: torch.Tensor, leaves: Leaves) -> Changed:
        """Return score_mod(s) and its derivative with their errors, where s may be off by `error`."""
        assert self.score is not None
        shape = s.shape
        values = {**leaves, "score": s}
        after, slope = (evaluated(tree, values, self.tensors, error) for tree in (self.score, by_score(self.score)))
        return Changed(
            before=s, before_error=error, after=after[0].expand(shape), after_error=after[1].expand(shape),
            slope=slope[0].expand(shape), slope_error=slope[1].expand(shape), leaves=leaves,
        )  # fmt: skip

    def gradients(self, changed: Changed) -> list[tuple[Captured, tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]]:
        """Return for each load that takes a gradient: its tensor, the indices it reads, d f / d load and the error of that."""
        parts = []
        for each in self.score.walk() if self.score is not None else ():
            if isinstance(each.value, Captured) and each.value.gradient:
                assert self.score is not None
                leaves = {**changed.leaves, "score": changed.before}
                slope, error = evaluated(by_load(self.score, each), leaves, self.tensors, changed.before_error)
                index = tuple(evaluate(arg, leaves, self.tensors, torch.float64) for arg in each.args)
                parts.append((each.value, index, slope.expand(changed.before.shape), error.expand(changed.before.shape)))
        return parts
