"""`torch.cudnn` and `torch.cudnn_varlen`: cuDNN's attention behind PyTorch's ops, dense and ragged.

The causal mask is top-left aligned. Dims are multiples of 8 up to 128, and 192/128 from cuDNN 9.11 on.
scaled_dot_product_attention never calls it for tensors without elements or for a single key, so neither is declared here.
cuDNN's arithmetic is not published. Measured on cuDNN 9 (H200): with grouped heads, dK and dV have the noise of one rounding for
each query head before the group is summed; without groups they do not. That is declared.

The ragged backward gets the head dim as the longest query sequence (query.size(2) of a ragged q is its dim). dQ and dK are
therefore wrong (unwritten, or different each time) as soon as a sequence has more queries than that. With several sequences of
one query each, it may not end at all. `torch.cudnn_varlen` excludes such batches; `torch.cudnn_varlen_any` is the same op with
them, so that these known defects hide no others.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from attnfuzz.kernels.contract import Capabilities, Deviations
from attnfuzz.kernels.support.installed_torch import built_with, cudnn_version, has_cudnn
from attnfuzz.kernels.torch.ops import Op, Part, Peer, Step, missing_op, without_keys

if TYPE_CHECKING:
    import torch

    from attnfuzz.kernels.problem import Problem

__all__ = ["ANY", "DENSE", "RAGGED"]

_CAPABILITIES: Final = Capabilities(
    packings=("dense",),
    dims=((64, 64), (32, 32), (16, 16), (128, 128), (64, 48), (40, 72), (96, 96), (8, 8), (192, 128)),
    groups=None,
    causal=(None, "top_left"),
    unequal=True,
    min_seqlen_k=2,
    # Dense tensors have no gaps between the sequences, the form that cuDNN's graph describes best.
    slack=False,
    layouts=False,
    compiles_on=(),
    # A plan is made for each shape: 0.3 to 0.5 s a Case on an H200, where others take 0.01 s.
    compiles_each_shape=True,
    # cuDNN's backward is not deterministic by default.
    deterministic=("o", "lse"),
    deviations=Deviations(half_partials=True),
)

_DENSE_OPS: Final = (
    Op(
        "_scaled_dot_product_cudnn_attention",
        "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask",
    ),
    Op(
        "_scaled_dot_product_cudnn_attention_backward",
        "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q max_k "
        "dropout_p is_causal",
    ),
)
_RAGGED_OPS: Final = (
    Op(
        "_cudnn_attention_forward",
        "query key value attn_bias cum_seq_q cum_seq_k max_q max_k compute_log_sumexp dropout_p is_causal return_debug_mask",
    ),
    Op(
        "_cudnn_attention_backward",
        "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q max_k "
        "dropout_p is_causal",
    ),
)
_LONG_ROWS: Final = 91100
"""The first cuDNN version that takes dims 192/128."""


class _Dense(Step):
    """`aten::_scaled_dot_product_cudnn_attention` and its backward: q (batch, heads, seqlen, dim) as a view."""

    def attend(self, part: Part) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """The op's LSE is `(batch, heads, seqlen_q, 1)`."""
        import torch

        q, k, v = (x.transpose(1, 2) for x in (part.q, part.k, part.v))
        outputs = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, None, True, 0.0, part.problem.causal is not None, False, scale=part.problem.scale
        )
        return outputs[0].transpose(1, 2), outputs[1].squeeze(-1), outputs

    def differentiate(self, part: Part, kept: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The op's own backward."""
        import torch

        o, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = kept
        d_o, q, k, v = (x.transpose(1, 2) for x in (part.d_o, part.q, part.k, part.v))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
            *(d_o, q, k, v, o, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, part.problem.causal is not None),
            scale=part.problem.scale,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class _Ragged(Step):
    """`aten::_cudnn_attention_forward` and its backward: q (total, heads, dim) and cu_seqlens, as jagged NestedTensors use it."""

    def attend(self, part: Part) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """The op's LSE is `(total_q, heads, 1)`."""
        import torch

        outputs = torch.ops.aten._cudnn_attention_forward.default(
            *(part.q, part.k, part.v, None, part.cu_seqlens_q, part.cu_seqlens_k, part.max_seqlen_q, part.max_seqlen_k),
            *(True, 0.0, part.problem.causal is not None, False),
            scale=part.problem.scale,
        )
        return outputs[0], without_keys(outputs[1].squeeze(-1).transpose(0, 1)), (outputs[0], outputs[1], outputs[6], outputs[7])

    def differentiate(self, part: Part, kept: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The op's own backward."""
        import torch

        dq, dk, dv = torch.ops.aten._cudnn_attention_backward.default(
            *(part.d_o, part.q, part.k, part.v, *kept, None, part.cu_seqlens_q, part.cu_seqlens_k),
            *(part.max_seqlen_q, part.max_seqlen_k, 0.0, part.problem.causal is not None),
            scale=part.problem.scale,
        )
        return dq, dk, dv


def _without_cudnn(ops: tuple[Op, ...]) -> str | None:
    if reason := missing_op(ops):
        return reason
    version, cuda = built_with()
    if cuda is not None and not has_cudnn():
        return f"torch {version} finds no cuDNN: install the nvidia-cudnn package that it was built for"
    return None


def _too_wide(problem: Problem) -> str | None:
    """Why an older cuDNN does not take dims beyond 128, or None."""
    if max(problem.dim_qk, problem.dim_v) <= 128:
        return None
    version = None if importlib.util.find_spec("torch") is None else cudnn_version()
    if version is not None and version >= _LONG_ROWS:
        return None
    return f"dim_qk, dim_v={(problem.dim_qk, problem.dim_v)}: cuDNN {_LONG_ROWS} or newer takes them, here is {version or 'none'}"


DENSE: Final = Peer(
    name="torch.cudnn",
    file=__file__,
    capabilities=_CAPABILITIES,
    step=_Dense,
    missing=lambda: _without_cudnn(_DENSE_OPS),
    refuses=_too_wide,
)
_RAGGED_CAPABILITIES: Final = replace(_CAPABILITIES, packings=("ragged",), slack=True, groups=(1,))


def _too_long(problem: Problem) -> str | None:
    """Why the ragged backward is known to be wrong for `problem`, or None."""
    longest = max(problem.seqlens_q)
    if longest > problem.dim_qk or longest == 1 < problem.batch:
        return f"seqlen_q={longest}: 2 to dim_qk queries in the longest of several; torch.cudnn_varlen_any takes others"
    return _too_wide(problem)


RAGGED: Final = Peer(
    name="torch.cudnn_varlen",
    file=__file__,
    capabilities=replace(_RAGGED_CAPABILITIES, length_max=192),
    step=_Ragged,
    missing=lambda: _without_cudnn(_RAGGED_OPS),
    refuses=_too_long,
)
ANY: Final = Peer(
    name="torch.cudnn_varlen_any",
    file=__file__,
    capabilities=replace(_RAGGED_CAPABILITIES, deterministic=()),
    step=_Ragged,
    missing=lambda: _without_cudnn(_RAGGED_OPS),
    refuses=_too_wide,
)
