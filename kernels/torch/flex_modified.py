"""`torch.flex_modified`: torch.compile(flex_attention) with the Problem's own score_mod, mask_mod, softcap and window, dense.

The trees become Python functions (trees.py), which Dynamo traces; captured tensors are their free variables, and take gradients.
`torch.flex` stays a separate kernel: its masks and scores are fixed, so that it compiles rarely.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from attnfuzz.kernels.contract import Config, Gradients, Inputs
from attnfuzz.kernels.expressions.tree import Captured, Expression, S, load, substitute, whole
from attnfuzz.kernels.modified import score_of, tensors_of, whole_mask_of
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.torch import flex
from attnfuzz.kernels.torch.ops import Part
from attnfuzz.kernels.torch.trees import function_of

if TYPE_CHECKING:
    import torch

__all__ = ["KERNEL", "FlexModified", "modifiers_of"]

_SCALE = Captured("_softmax_scale_of_the_batch", (1,))


class FlexModified(flex.Flex):
    """The adapter; each pair of functions is compiled separately."""

    def compile_key(self, problem: Problem, config: Config) -> str:
        """The key of `torch.flex`, and the trees."""
        return f"{super().compile_key(problem, config)} {score_of(problem)} {whole_mask_of(problem)} {tensors_of(problem)}"


def modifiers_of(problem: Problem, tensors: dict[str, torch.Tensor], device: Any) -> tuple[Any, Any, float]:
    """(score_mod, mask_mod, scale) for flex_attention; None where there is none."""
    import torch

    # Tensors: numbers would be constants of the compiled code.
    lengths = tuple(torch.tensor(n[0], device=device) for n in (problem.seqlens_q, problem.seqlens_k))
    score, mask, scale = score_of(problem), whole_mask_of(problem), problem.scale
    if problem.softmax_scale is not None:
        factor = torch.tensor([problem.scale], dtype=torch.float32, device=device)
        tensors, scale = {**tensors, _SCALE.name: factor}, 1.0
        scaled: Expression = S * load(_SCALE, whole(0))
        score = scaled if score is None else substitute(score, S.op, scaled)
    functions = [None if tree is None else function_of(tree, (lengths[0], lengths[1]), tensors) for tree in (score, mask)]
    return functions[0], functions[1], scale


class _Step(flex.FlexStep):
    """`torch.flex`'s calls, with the trees' functions."""

    def __init__(self, problem: Problem, config: Config) -> None:
        super().__init__(problem, config)
        self._captured: tuple[torch.Tensor, ...] = ()
        self._gradients: dict[str, torch.Tensor] = {}

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Step.forward`."""
        self._captured = inputs.captured
        return super().forward(inputs)

    def attend(self, part: Part) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """As `torch.flex`."""
        import torch
        from torch.nn.attention.flex_attention import create_block_mask
        from torch.utils._python_dispatch import _disable_current_modes

        p, function = part.problem, flex.function(KERNEL.compile_key(part.problem, self.config))
        with _disable_current_modes(), torch.enable_grad():
            leaves = tuple(x.detach().requires_grad_() for x in (part.q, part.k, part.v))
            tensors = {
                each.name: x.detach().requires_grad_(each.gradient) for each, x in zip(tensors_of(p), self._captured, strict=True)
            }
            q, k, v = (x.transpose(1, 2) for x in leaves)
            score_mod, mask_mod, scale = modifiers_of(p, tensors, part.q.device)
            block_mask = None
            if mask_mod is not None:
                sizes = (p.batch, p.heads, q.shape[2], k.shape[2])
                block_mask = create_block_mask(mask_mod, *sizes, device=str(part.q.device))
            o, lse = function(q, k, v, score_mod, block_mask, scale, p.groups > 1)
            taking = {name: x for name, x in tensors.items() if x.requires_grad}
            return o.detach().transpose(-3, -2), lse.detach(), (o, lse, (*leaves, *taking.values()), tuple(taking))

    def differentiate(self, part: Part, kept: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `torch.flex`; gradients of captured tensors are kept for `backward`."""
        import torch
        from torch.utils._python_dispatch import _disable_current_modes

        o, lse, leaves, names = kept
        with _disable_current_modes():
            incoming = [part.d_o.transpose(-3, -2), *([part.d_lse] if part.d_lse is not None else [])]
            dq, dk, dv, *rest = torch.autograd.grad(
                [o, lse][: len(incoming)], leaves, incoming, materialize_grads=True, allow_unused=True
            )
        self._gradients = dict(zip(names, rest, strict=True))
        return dq, dk, dv

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Gradients:  # type: ignore[override]
        """As `Step.backward`, with the gradients of captured tensors."""
        import torch

        self._gradients = {}
        gradients = super().backward(inputs, o, lse)
        tensors = tensors_of(inputs.problem)
        if not any(each.gradient for each in tensors):
            return gradients
        captured = tuple(
            self._gradients.get(each.name, torch.zeros_like(x)) if each.gradient else None
            for each, x in zip(tensors, inputs.captured, strict=True)
        )
        return *gradients, captured


KERNEL: Final = FlexModified(
    name="torch.flex_modified",
    file=__file__,
    capabilities=replace(
        flex.KERNEL.capabilities, packings=("dense",), softcap=True, window=True, score_mod=True, mask_mod=True,
        captured=True, captured_gradients=True,
        # Gradients of captured tensors are atomic additions; those of q, k and v are not.
    ),
    step=_Step,
    missing=flex.missing,
    refuses=flex.too_wide,
)  # fmt: skip
