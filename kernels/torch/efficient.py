"""`torch.efficient`: PyTorch's memory-efficient attention (CUTLASS), the raw op in its dense and its ragged form.

Query and value dims may differ; heads may not be grouped. A float32 product consists of three tf32 products (CUTLASS'
OpMultiplyAddFastF32, on devices from sm_80 on), which is declared: each is close to float32 itself, but their sums are truncated.
The op pads LSE to a multiple of 32 rows with +inf; its backward gets that padding back unchanged. The backward computes dS from P
as rounded for dV, which is declared.

scaled_dot_product_attention never calls it for a tensor or a sequence without elements; neither does this adapter.

With a bottom-right mask and more queries than keys, every output of the op is wrong (torch.nn.attention.bias warns of NaN there):
its mask test subtracts without a sign. `torch.efficient` excludes such sequences; `torch.efficient_more_queries` is the same op
with them, so that this known defect hides no others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from attnfuzz.kernels.contract import Capabilities, Deviations
from attnfuzz.kernels.torch.ops import DETERMINISTIC, Op, Part, Peer, Step, missing_op

if TYPE_CHECKING:
    import torch

    from attnfuzz.kernels.problem import Causal, Problem

__all__ = ["KERNEL", "MORE_QUERIES"]

_CAPABILITIES: Final = Capabilities(
    packings=("ragged", "dense"),
    dtypes=("float16", "bfloat16", "float32"),
    dims=((64, 64), (32, 32), (16, 16), (128, 128), (64, 48), (40, 72), (192, 128), (96, 96), (8, 8), (256, 256)),
    # 16-byte rows, as scaled_dot_product_attention requires.
    dim_multiple=8,
    dim_max=256,
    groups=(1,),
    causal=(None, "bottom_right", "top_left"),
    unequal=True,
    slack=True,
    layouts=False,
    compiles_on=(),
    deterministic=("o", "lse", "dk", "dv"),
    deviations=Deviations(ds_from_rounded_p=True, tf32x3_on=("cuda",)),
)

_OPS: Final = (
    Op(
        "_efficient_attention_forward",
        "query key value bias cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p custom_mask_type compute_log_sumexp",
    ),
    Op(
        "_efficient_attention_backward",
        "grad_out_ query key value bias out cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k logsumexp dropout_p "
        "philox_seed philox_offset custom_mask_type bias_requires_grad",
    ),
)
_MASKS: Final[dict[Causal | None, int]] = {None: 0, "top_left": 1, "bottom_right": 2}


class _Efficient(Step):
    """`aten::_efficient_attention_forward` and its backward: q (batch, seqlen, heads, dim), a ragged batch as a batch of one."""

    def attend(self, part: Part) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """The op's LSE is `(batch, heads, longest query sequence, padded)`."""
        import torch

        q, k, v = (_batched(part, x) for x in (part.q, part.k, part.v))
        o, lse, seed, offset, *_ = torch.ops.aten._efficient_attention_forward.default(
            q, k, v, None, *_lengths(part), 0.0, _MASKS[part.problem.causal], True, scale=part.problem.scale
        )
        return o if part.dense else o[0], _unpadded(part, lse), (o, lse, seed, offset)

    def differentiate(self, part: Part, kept: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The op's own backward."""
        import torch

        o, lse, seed, offset = kept
        d_o, q, k, v = (_batched(part, x) for x in (part.d_o, part.q, part.k, part.v))
        mask = _MASKS[part.problem.causal]
        dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward.default(
            d_o, q, k, v, None, o, *_lengths(part), lse, 0.0, seed, offset, mask, False, scale=part.problem.scale
        )
        return (dq, dk, dv) if part.dense else (dq[0], dk[0], dv[0])


def _batched(part: Part, x: torch.Tensor) -> torch.Tensor:
    return x if part.dense else x[None]


def _lengths(part: Part) -> tuple[Any, ...]:
    offsets = (None, None) if part.dense else (part.cu_seqlens_q, part.cu_seqlens_k)
    return *offsets, part.max_seqlen_q, part.max_seqlen_k


def _unpadded(part: Part, lse: torch.Tensor) -> torch.Tensor:
    """`(batch, heads, seqlen_q)` dense, `(heads, total_q)` ragged."""
    import torch

    if part.dense:
        return lse[:, :, : part.max_seqlen_q]
    return torch.cat([lse[number, :, :length] for number, _, length in part.sequences()], dim=-1)


def _more_queries(problem: Problem) -> str | None:
    """Why the op is known to be wrong for `problem`, or None."""
    pairs = zip(problem.seqlens_q, problem.seqlens_k, strict=True)
    if problem.causal == "bottom_right" and any(n_q > n_k for n_q, n_k in pairs):
        return "causal='bottom_right': no more queries than keys here; torch.efficient_more_queries is the same op with them"
    return None


KERNEL: Final = Peer(
    name="torch.efficient",
    file=__file__,
    capabilities=_CAPABILITIES,
    step=_Efficient,
    missing=lambda: missing_op(_OPS),
    refuses=_more_queries,
    configs=DETERMINISTIC,
)
MORE_QUERIES: Final = Peer(
    name="torch.efficient_more_queries",
    file=__file__,
    capabilities=replace(_CAPABILITIES, causal=("bottom_right",), deterministic=()),
    step=_Efficient,
    missing=lambda: missing_op(_OPS),
    configs=DETERMINISTIC,
)
