"""`torch.varlen_attn`: torch.nn.attention.varlen.varlen_attn, the public function over ragged flash-attention 2.

Gradients come from autograd: the graph is kept from forward to backward. The function takes no gradient of LSE.
Its causal mask is bottom-right aligned, requested by window_size=(-1, 0), or by is_causal where it has that argument.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from attnfuzz.kernels.contract import BuildError, Config
from attnfuzz.kernels.support.installed_torch import built_with, has_name, parameters
from attnfuzz.kernels.torch.flash import FLASH_CAPABILITIES, OPS
from attnfuzz.kernels.torch.ops import Part, Peer, Step, missing_op, without_keys

if TYPE_CHECKING:
    import torch

    from attnfuzz.kernels.problem import Problem

__all__ = ["KERNEL", "arguments"]

_MODULE: Final = "torch.nn.attention.varlen"
"""Its import registers ops, which takes seconds: it is imported where it is called."""


def arguments(problem: Problem, parameters: frozenset[str]) -> dict[str, Any]:
    """The keywords of varlen_attn for `problem`, other than tensors and lengths; `parameters` are those that it has."""
    keywords: dict[str, Any] = {"scale": problem.scale}
    if problem.causal is not None:
        keywords |= {"is_causal": True} if "is_causal" in parameters else {"window_size": (-1, 0)}
    if "enable_gqa" in parameters:
        keywords["enable_gqa"] = problem.groups > 1
    return keywords


class _VarlenAttn(Step):
    """Calls of varlen_attn on separate leaves, so that no gradient reaches the harness' tensors."""

    def __init__(self, problem: Problem, config: Config) -> None:
        super().__init__(problem, config)
        # Here, where code is built, which may take longer than a launch.
        try:
            importlib.import_module(_MODULE)
        except ImportError as error:
            raise BuildError(f"{_MODULE} of this torch cannot be imported: {error}") from error

    def attend(self, part: Part) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """LSE is `(heads, total_q)`."""
        import torch
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        leaves = tuple(x.detach().requires_grad_() for x in (part.q, part.k, part.v))
        with torch.enable_grad():
            o, lse = varlen_attn(
                *(*leaves, part.cu_seqlens_q, part.cu_seqlens_k, part.max_seqlen_q, part.max_seqlen_k),
                return_aux=AuxRequest(lse=True),
                **arguments(part.problem, _parameters(varlen_attn)),
            )
        return o.detach(), without_keys(lse.detach()), (o, leaves)

    def differentiate(self, part: Part, kept: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) by autograd."""
        import torch

        o, leaves = kept
        dq, dk, dv = torch.autograd.grad(o, leaves, part.d_o, retain_graph=True)
        return dq, dk, dv


def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _missing() -> str | None:
    if reason := missing_op(OPS):
        return reason
    version, of = built_with()[0], parameters(_MODULE, "varlen_attn")
    if of is None or not has_name(_MODULE, "AuxRequest"):
        return f"torch {version} has no {_MODULE}.{'varlen_attn' if of is None else 'AuxRequest'}; install torch 2.11 or newer"
    lacking = sorted({"scale", "return_aux"} - of)
    if lacking or not {"is_causal", "window_size"} & of:
        which = ", ".join(lacking) or "is_causal or window_size"
        return f"varlen_attn of torch {version} takes no {which}; install torch 2.11 or newer"
    return None


KERNEL: Final = Peer(
    name="torch.varlen_attn",
    file=__file__,
    capabilities=replace(FLASH_CAPABILITIES, packings=("ragged",)),
    step=_VarlenAttn,
    missing=_missing,
)
