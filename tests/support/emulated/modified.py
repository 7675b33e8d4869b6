"""softcap, score_mod and mask_mod of one sequence, evaluated in float32 as a kernel does."""

from __future__ import annotations

import torch

from attnfuzz.kernels.contract import Inputs
from attnfuzz.kernels.expressions.derivative import by_load, by_score
from attnfuzz.kernels.expressions.evaluation import evaluate
from attnfuzz.kernels.expressions.tree import Captured, Expression
from attnfuzz.kernels.modified import mask_of, score_of, tensors_of


def _leaves(inputs: Inputs, index: int) -> dict[str, torch.Tensor]:
    """Coordinates of `[kv_heads, groups, n, m]`."""
    p = inputs.problem
    n, m = p.seqlens_q[index], p.seqlens_k[index]
    return {
        "b": torch.tensor(index),
        "h": torch.arange(p.heads).reshape(p.kv_heads, p.groups, 1, 1),
        "q_idx": torch.arange(n)[:, None],
        "kv_idx": torch.arange(m)[None, :],
        "seqlen_q": torch.tensor(n),
        "seqlen_k": torch.tensor(m),
    }


def _tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
    return {each.name: x for each, x in zip(tensors_of(inputs.problem), inputs.captured, strict=True)}


def unmasked(inputs: Inputs, index: int) -> torch.Tensor:
    """What mask_mod leaves of the scores of sequence `index`, bool, broadcast to `[kv_heads, groups, n, m]`."""
    tree = mask_of(inputs.problem)
    if tree is None or not (inputs.problem.seqlens_q[index] and inputs.problem.seqlens_k[index]):
        return torch.tensor(True)
    return evaluate(tree, _leaves(inputs, index), _tensors(inputs), torch.float32)


class Modified:
    """What becomes of scores, `[kv_heads, groups, n, m]` float32; sums up the gradients of captured tensors."""

    def __init__(self, inputs: Inputs, index: int) -> None:
        self._tree = score_of(inputs.problem)
        self._leaves, self._tensors = _leaves(inputs, index), _tensors(inputs)
        pairs = zip(tensors_of(inputs.problem), inputs.captured, strict=True)
        self.gradients = {each.name: torch.zeros_like(x) for each, x in pairs if each.gradient}

    def _of(self, tree: Expression, s: torch.Tensor, keys: slice) -> torch.Tensor:
        leaves = {**self._leaves, "kv_idx": self._leaves["kv_idx"][:, keys], "score": s}
        return evaluate(tree, leaves, self._tensors, torch.float32).expand(s.shape)

    def score(self, s: torch.Tensor, keys: slice) -> torch.Tensor:
        """Of scaled scores of some keys."""
        return s if self._tree is None else self._of(self._tree, s, keys)

    def slope(self, s: torch.Tensor) -> torch.Tensor:
        """d score_mod / d score, all keys."""
        return torch.ones_like(s) if self._tree is None else self._of(by_score(self._tree), s, slice(None))

    def add_gradients(self, s: torch.Tensor, ds: torch.Tensor) -> None:
        """Add what dS of the modified scores gives to captured tensors."""
        for each in self._tree.walk() if self._tree is not None else ():
            if isinstance(each.value, Captured) and each.value.gradient:
                assert self._tree is not None
                terms = ds * self._of(by_load(self._tree, each), s, slice(None))
                leaves = {**self._leaves, "score": s}
                at = tuple(evaluate(arg, leaves, self._tensors, torch.float32).expand(s.shape) for arg in each.args)
                self.gradients[each.value.name].index_put_(at, terms, accumulate=True)
