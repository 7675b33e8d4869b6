"""`torch.flash`: flash-attention 2 as PyTorch ships it, the raw op in its dense and its ragged form.

The op's causal mask is bottom-right aligned, so scaled_dot_product_attention refuses it for unequal lengths; here the op is
called as torch.nn.attention.bias.causal_lower_right does. Grouped heads are the op's own. dQ is summed by atomic adds unless
torch's deterministic algorithms are on; dK and dV are summed over a group's query heads after rounding each to the input dtype.
Rows that see no key get LSE = +inf (flash-attention's convention), which becomes -inf here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnfuzz.kernels.contract import Capabilities, Deviations
from attnfuzz.kernels.torch.ops import DETERMINISTIC, Op, Part, Peer, Step, missing_op, without_keys

if TYPE_CHECKING:
    import torch

__all__ = ["FLASH_CAPABILITIES", "KERNEL", "OPS"]

FLASH_CAPABILITIES: Final = Capabilities(
    packings=("ragged", "dense"),
    dims=((64, 64), (32, 32), (16, 16), (128, 128), (96, 96), (8, 8), (40, 40), (72, 72), (192, 192), (256, 256)),
    groups=None,
    causal=(None, "bottom_right"),
    zero_q=True,
    zero_k=True,
    unequal=True,
    slack=True,
    # The row's maximum is taken before the scale is applied.
    scale_any=False,
    # The op takes any strides whose last one is 1, but its loads are 16 bytes wide and their alignment is not checked.
    layouts=False,
    compiles_on=(),
    deterministic=("o", "lse", "dk", "dv"),
    # The dense form splits the keys where few tiles of queries would leave the GPU idle.
    deviations=Deviations(half_partials=True, split_lse_weights=True),
)

OPS: Final = (
    Op(
        "_flash_attention_forward",
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask",
    ),
    Op(
        "_flash_attention_backward",
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal "
        "rng_state|philox_seed unused|philox_offset",
    ),
)


class _Flash(Step):
    """`aten::_flash_attention_forward` and its backward: q (batch, seqlen, heads, dim), or (total, heads, dim) and cu_seqlens."""

    def attend(self, part: Part) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """LSE is `(batch, heads, seqlen_q)` dense and `(heads, total_q)` ragged, as in the contract."""
        import torch

        o, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward.default(
            part.q, part.k, part.v, *self._lengths(part), 0.0, self._causal, False, scale=part.problem.scale
        )
        return o, without_keys(lse), (o, lse, rng_state, unused)

    def differentiate(self, part: Part, kept: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The op's own backward."""
        import torch

        o, lse, *random = kept
        dq, dk, dv = torch.ops.aten._flash_attention_backward.default(
            *(part.d_o, part.q, part.k, part.v, o, lse, *self._lengths(part), 0.0, self._causal, *random),
            scale=part.problem.scale,
        )
        return dq, dk, dv

    @property
    def _causal(self) -> bool:
        return self.problem.causal is not None

    @staticmethod
    def _lengths(part: Part) -> tuple[Any, ...]:
        offsets = (None, None) if part.dense else (part.cu_seqlens_q, part.cu_seqlens_k)
        return *offsets, part.max_seqlen_q, part.max_seqlen_k


KERNEL: Final = Peer(
    name="torch.flash",
    file=__file__,
    capabilities=FLASH_CAPABILITIES,
    step=_Flash,
    missing=lambda: missing_op(OPS),
    configs=DETERMINISTIC,
)
