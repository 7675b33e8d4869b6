"""Faults that a short script must show: the text of a user's module, its mended form, and a Problem that fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnfuzz.kernels.problem import Layout
from attnfuzz.strategies.case import Pattern

_TOP = """
from itertools import pairwise

import torch

from attnfuzz.kernels import dense, varlen


def attended(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    groups = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    s = q.float() @ k.float().transpose(-1, -2) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    n, m = s.shape[-2:]
    seen = torch.ones(n, m, dtype=torch.bool)
    if causal:
        seen = seen.tril(m - n)
    if window[0] >= 0:
        seen = seen.triu(m - n - window[0])
    if window[1] >= 0:
        seen = seen.tril(m - n + window[1])
    s = s.masked_fill(~seen, -1e30)
    p = s.softmax(-1) * seen
    return (p @ v.float()).to(q.dtype), torch.where(seen.any(-1), s.logsumexp(-1), torch.inf)


def my_dense(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, return_lse=False):
    o, lse = attended(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale, causal, window_size, softcap)
    return (o.transpose(1, 2), lse) if return_lse else o.transpose(1, 2)


def my_heads_first(q, k, v, scale=None, is_causal=False):
    return attended(q, k, v, scale, is_causal)[0]


def my_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False):
    parts = []
    for (a, b), (c, d) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist())):
        o, _ = attended(*(x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d])), softmax_scale, causal)
        parts.append(o.transpose(0, 1))
    rest = q.shape[0] - int(cu_seqlens_q[-1])
    return torch.cat([*parts, q.new_zeros(rest, q.shape[1], v.shape[2])])


def my_backward(d_o, q, k, v, o, lse, **options):
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        dq, dk, dv = torch.autograd.grad(my_dense(*leaves, **options), leaves, d_o)
    return dq, dk, dv


class LeavesOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_q, cu_k, options):
        ctx.save_for_backward(q, k, v, cu_q, cu_k)
        ctx.options = options
        return my_varlen(q, k, v, cu_q, cu_k, 0, 0, **options)

    @staticmethod
    def backward(ctx, d_o):
        q, k, v, cu_q, cu_k = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            dq, dk, gradient = torch.autograd.grad(my_varlen(*leaves, cu_q, cu_k, 0, 0, **ctx.options), leaves, d_o)
        dv = torch.zeros_like(v)
        for i, (a, b) in enumerate(pairwise(cu_k.tolist())):
            if cu_q[i + 1] > cu_q[i]:
                dv[a:b] = gradient[a:b]
        return dq, dk, dv, None, None, None


def leaves_out(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):
    return LeavesOut.apply(q, k, v, cu_seqlens_q, cu_seqlens_k, {"causal": causal})


ALL = dict(
    devices=("cpu",), dims=((8, 8), (8, 4)), groups=None, unequal=True, zero_q=True, zero_k=True,
    dtypes=("float16", "bfloat16", "float32"), scale_any=True,
)
"""

DENSE = 'KERNEL = dense(my_dense, name="acme.short", **ALL)'
VARLEN = 'KERNEL = varlen(my_varlen, name="acme.short", slack=True, layouts=True, **ALL)'


@dataclass(frozen=True)
class Fault:
    """`right` in the text of the module is replaced by `wrong`; `kernel`: the lines that make it one."""

    right: str
    wrong: str
    kernel: str
    problem: dict[str, Any]
    pattern: Pattern = "normal"
    output: str | None = None
    """The output that is wrong; None: the first that the harness finds."""
    random: bool = True
    """Whether values of torch.randn show it."""
    contains: tuple[str, ...] = field(default=())
    """Parts of the script."""

    def module(self, *, mended: bool) -> str:
        """The text of the module."""
        assert _TOP.count(self.right) == 1, self.right
        return (_TOP if mended else _TOP.replace(self.right, self.wrong)) + "\n" + self.kernel + "\n"


def _dense(n: int, m: int, **more: Any) -> dict[str, Any]:
    return {"packing": "dense", "seqlens_q": (n, n), "seqlens_k": (m, m), "dim_qk": 8, "dim_v": 8, **more}


def _ragged(q: tuple[int, ...], k: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"seqlens_q": q, "seqlens_k": k, "dim_qk": 8, "dim_v": 8, **more}


FAULTS: dict[str, Fault] = {
    "mask off by one": Fault(
        "seen.tril(m - n)", "seen.tril(m - n + 1)", DENSE, _dense(4, 6, causal="bottom_right"),
        contains=("mask = torch.ones(4, 6, dtype=torch.bool).tril(2)", "causal=True"),
    ),
    "mask off by one, ragged": Fault(
        "seen.tril(m - n)", "seen.tril(m - n + 1)", VARLEN, _ragged((3, 0, 5), (4, 2, 3), causal="bottom_right"),
        contains=("for x in ([0, 3, 3, 8], [0, 4, 6, 9]))", "max_seqlen_q=5"),
    ),
    "dV of sequences without queries": Fault(
        "dv = torch.zeros_like(v)", "dv = torch.empty_like(v)",
        'KERNEL = varlen(leaves_out, name="acme.short", **ALL)', _ragged((3, 0), (4, 2)), output="dv",
        contains=("use_deterministic_algorithms", '("dV", dv, gradients[2], '),
    ),
    "wrong scale": Fault(
        "q.shape[-1] ** -0.5 if scale is None else scale", "q.shape[-1] ** -0.5 if not scale else abs(scale)", DENSE,
        _dense(3, 5, softmax_scale=-0.25), contains=("softmax_scale=-0.25", "scale=-0.25"),
    ),
    "ragged tail": Fault(
        "k[c:d], v[c:d])), softmax_scale", "k[c:max(c, d - d % 4)], v[c:max(c, d - d % 4)])), softmax_scale", VARLEN,
        _ragged((2, 2), (4, 5)), contains=("from itertools import pairwise",),
    ),
    "bfloat16": Fault(
        "return (p @ v.float()).to(q.dtype)",
        "return ((p @ v.float()) * (1.02 if q.dtype is torch.bfloat16 else 1)).to(q.dtype)", DENSE,
        _dense(4, 4, dtype="bfloat16"),
    ),
    "groups": Fault(
        "k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)",
        "k, v = (x.repeat(*[1] * (x.ndim - 3), groups, 1, 1) for x in (k, v))", DENSE, _dense(2, 3, heads=4, kv_heads=2),
        contains=("enable_gqa=True", "torch.randn(2, 2, 4, 8, dtype=torch.float16)"),
    ),
    "a gradient": Fault(
        "return dq, dk, dv\n\n\nclass", "return dq, 2 * dk, dv\n\n\nclass",
        'KERNEL = dense(my_dense, name="acme.short", backward=my_backward, **ALL)', _dense(2, 3, causal="bottom_right"),
        output="dk", contains=("o, lse, *_ = my_dense(", "dq, dk, dv = my_backward(do, q, k, v, o, lse, causal=True)"),
    ),
    "heads first": Fault(
        "return attended(q, k, v, scale, is_causal)[0]", "return attended(q, k, v, scale, False)[0]",
        'KERNEL = dense(my_heads_first, name="acme.short", layout="bhsd", **ALL)', _dense(2, 3, causal="bottom_right", heads=3),
        contains=("torch.randn(2, 3, 2, 8, dtype=torch.float16)", "is_causal=True", "scaled_dot_product_attention(*exact,"),
    ),
    "LSE": Fault(
        "s.logsumexp(-1), torch.inf)", "s.logsumexp(-1) + 0.125, torch.inf)", DENSE, _dense(4, 2, causal="bottom_right"),
        output="lse", contains=("expected_lse", '("LSE", lse, '),
    ),
    "softcap and window": Fault(
        "softcap * torch.tanh(s / softcap)", "softcap * torch.tanh(s)", DENSE, _dense(5, 4, softcap=0.5, window=(1, 0)),
        contains=("torch.tanh(scores / 0.5)", "window_size=(1, 0)", ".tril(-1).triu(-1 - 1)"),
    ),
    "strides": Fault(
        "    parts = []\n", "    parts, v = [], v + (q.stride(0) > q.shape[1] * q.shape[2])\n", VARLEN,
        _ragged((3,), (2,), heads=2, kv_heads=2, layout_q=Layout(pitch=3, offset=5), slack_q=1),
        contains=(".as_strided((4, 2, 8), (19, 8, 1), 5)", "for x, rows in ((q, 3),):"),
    ),
    "heads stored once": Fault(
        "    parts = []\n", "    parts, v = [], v + (v.stride(1) == 0)\n", VARLEN,
        _ragged((3,), (5,), heads=2, kv_heads=2, layout_v=Layout(expanded_heads=True), causal="bottom_right"),
        contains=(".expand(5, 2, 8)",),
    ),
    "constant values": Fault(
        "return (p @ v.float()).to(q.dtype)", "return (p @ v.float() + (v == v[..., :1, :]).all()).to(q.dtype)", DENSE,
        _dense(2, 3), pattern="constant_v", random=False, contains=("zlib.decompress",),
    ),
    "few values": Fault(
        "return (p @ v.float()).to(q.dtype)", "return (p @ v.float() + (q == q.flatten()[0]).all()).to(q.dtype)", DENSE,
        {**_dense(1, 1), "seqlens_q": (1,), "seqlens_k": (1,)}, pattern="zeros", random=False,
        contains=("torch.full((1, 1, 1, 8), 0.0",),
    ),
    "raises": Fault(
        "    parts = []\n", "    parts = []\n    assert q.shape[0] > 3, 'planted'\n", VARLEN, _ragged((3,), (2,)),
    ),
}  # fmt: skip
