"""PyTorch's own attention on the CPU as a kernel under test: `attnfuzz run sdpa:KERNEL --device cpu`, in this folder."""

import torch.nn.functional as F

from attnfuzz.kernels import dense


def attend(q, k, v, scale=None, is_causal=False):
    """Scaled dot-product attention; q is (batch, heads, seqlen, dim)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)


KERNEL = dense(
    attend, name="sdpa", layout="bhsd", devices=("cpu",), dtypes=("bfloat16",), causal=(None, "top_left"), unequal=True
)
