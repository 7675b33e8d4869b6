"""Kernels as differentiable functions: `attention` for a dense batch, `attention_varlen` for concatenated sequences,
`attention_padded` for sequences of several lengths in a padded batch.

They take any kernel of the registry, or your own object that fulfils `contract.Kernel`. Arguments are checked before anything is
compiled; each compile key is compiled once. torch.func is not supported (no vmap, no jacrev). Autocast has no effect: tensors
go to the kernel in their own dtype.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import torch

from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Built, Config, Device, Inputs, Kernel
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.problem import Causal, Dtype, Problem
from attnfuzz.kernels.targets import missing_members

__all__ = ["attention", "attention_padded", "attention_varlen"]

_DTYPES: dict[torch.dtype, Dtype] = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_ALIGNED = 16
Mask = bool | Literal["bottom_right", "top_left"] | None
"""True is "bottom_right", False is None."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    kernel: str | Kernel = "tilelang.gqa.atomic",
    causal: Mask = None,
    softmax_scale: float | None = None,
    config: Config | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute O of a dense batch by a kernel, with its gradients.

    Args:
        q: `(batch, seqlen_q, heads, dim_qk)`, float16, bfloat16 or float32, of any strides, as k and v.
        k: `(batch, seqlen_k, kv_heads, dim_qk)`, kv_heads a divisor of heads.
        v: `(batch, seqlen_k, kv_heads, dim_v)`.
        kernel: its name, or the kernel.
        causal: where the mask's diagonal lies, or None.
        softmax_scale: None: dim_qk ** -0.5.
        config: one of `kernel.configs(...)`; None: its default.
        return_lse: return (o, lse) instead of o; lse `(batch, heads, seqlen_q)` float32 has no gradient.

    Returns:
        o `(batch, seqlen_q, heads, dim_v)` in q's dtype.

    Raises:
        BadArgument: (a ValueError) tensors that do not fit each other, or what the kernel does not support.
        BuildError: the compiler refused.
    """
    _fitting(q, k, v, 4)
    lengths = tuple((x.shape[1],) * x.shape[0] for x in (q, k))
    problem = _problem(q, k, v, lengths, (0, 0), "dense", causal, softmax_scale)
    ends = [torch.arange(n.shape[0] + 1, dtype=torch.int32, device=q.device) * n.shape[1] for n in (q, k)]
    return _applied((q, k, v), problem, (ends[0], ends[1]), kernel, config, return_lse)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    kernel: str | Kernel = "tilelang.varlen",
    causal: Mask = None,
    softmax_scale: float | None = None,
    config: Config | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute O of concatenated sequences, with its gradients. Reads cu_seqlens on the host, which waits for the GPU.

    Args:
        q: `(total_q, heads, dim_qk)`; rows beyond cu_seqlens_q[-1] belong to no sequence.
        k: `(total_k, kv_heads, dim_qk)`, likewise.
        v: `(total_k, kv_heads, dim_v)`.
        cu_seqlens_q: where each sequence begins, `(batch + 1,)` int32, from 0, never decreasing.
        cu_seqlens_k: likewise.
        kernel, causal, softmax_scale, config, return_lse: as for `attention`; lse is `(heads, total_q)`.

    Returns:
        o `(total_q, heads, dim_v)` in q's dtype; rows of no sequence are 0, and have no gradient.

    Raises:
        BadArgument: (a ValueError) tensors that do not fit each other, or what the kernel does not support.
        BuildError: the compiler refused.
    """
    _fitting(q, k, v, 3)
    lengths, slack = [], []
    for name, cu, rows in (("cu_seqlens_q", cu_seqlens_q, q.shape[0]), ("cu_seqlens_k", cu_seqlens_k, k.shape[0])):
        ends = _offsets(name, cu, rows, q.device)
        lengths.append(tuple(b - a for a, b in pairwise(ends)))
        slack.append(rows - ends[-1])
    problem = _problem(q, k, v, (lengths[0], lengths[1]), (slack[0], slack[1]), "ragged", causal, softmax_scale)
    return _applied((q, k, v), problem, (cu_seqlens_q, cu_seqlens_k), kernel, config, return_lse)


def attention_padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths_q: torch.Tensor,
    lengths_k: torch.Tensor,
    *,
    kernel: str | Kernel = "tilelang.varlen",
    causal: Mask = None,
    softmax_scale: float | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Compute O of a padded batch by a ragged kernel, with its gradients; rows beyond a sequence's length are ignored, 0 in O.

    Args:
        q: `(batch, seqlen_q, heads, dim_qk)`; the first lengths_q[i] rows count, the others may hold anything.
        k: `(batch, seqlen_k, kv_heads, dim_qk)`, likewise with lengths_k.
        v: `(batch, seqlen_k, kv_heads, dim_v)`.
        lengths_q: `(batch,)` whole numbers from 0 to seqlen_q.
        lengths_k: `(batch,)` from 0 to seqlen_k.
        kernel, causal, softmax_scale, config: as for `attention_varlen`.

    Returns:
        o `(batch, seqlen_q, heads, dim_v)` in q's dtype.

    Raises:
        BadArgument: (a ValueError) tensors that do not fit each other, or what the kernel does not support.
        BuildError: the compiler refused.
    """
    _fitting(q, k, v, 4)
    real_q, cu_q = _unpadded("lengths_q", lengths_q, q)
    real_k, cu_k = _unpadded("lengths_k", lengths_k, k)
    rows = attention_varlen(
        q[real_q], k[real_k], v[real_k], cu_q, cu_k, kernel=kernel, causal=causal, softmax_scale=softmax_scale, config=config
    )
    o = rows.new_zeros((*q.shape[:3], v.shape[-1]))
    return o.masked_scatter(real_q[..., None, None], rows)


def _unpadded(name: str, lengths: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (which rows count, `(batch, seqlen)` bool; cu_seqlens)."""
    batch, seqlen = x.shape[:2]
    if not batch:
        raise reject("q.shape", tuple(x.shape), "a batch has at least one sequence", "give one length per sequence")
    whole = isinstance(lengths, torch.Tensor) and lengths.dtype in _WHOLE and lengths.device.type != "meta"
    if not whole or lengths.shape != (batch,):
        actual = f"{tuple(lengths.shape)} {lengths.dtype}" if isinstance(lengths, torch.Tensor) else type(lengths).__name__
        raise reject(name, actual, f"a whole number for each of {batch} sequences is expected", "give a (batch,) tensor")
    if outside := [n for n in lengths.tolist() if not 0 <= n <= seqlen]:
        raise reject(name, outside[0], f"a sequence has 0 to {seqlen} rows", "give lengths within the padded batch")
    lengths = lengths.to(x.device)
    real = torch.arange(seqlen, device=x.device) < lengths[:, None]
    return real, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def _fitting(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ndim: int) -> None:
    """Raise BadArgument unless the three fit each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor) or x.ndim != ndim:
            actual = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            what = "(batch, seqlen, heads, dim)" if ndim == 4 else "(tokens, heads, dim)"
            raise reject(f"{name}.shape", actual, f"{ndim} dimensions are expected", f"give {what}")
        if x.dtype not in _DTYPES:
            raise reject(f"{name}.dtype", x.dtype, "no kernel takes it", "use float16, bfloat16 or float32")
        if x.dtype != q.dtype:
            raise reject(f"{name}.dtype", x.dtype, f"q has {q.dtype}", "give all three the same dtype")
        if x.device != q.device:
            raise reject(f"{name}.device", x.device, f"q is on {q.device}", "move all three to one device")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.layout is not torch.strided or x.device.type not in ("cpu", "cuda"):
            raise reject(name, f"{x.layout} on {x.device}", "kernels read plain memory", "give a dense tensor on a CPU or a GPU")
    if k.shape[: ndim - 1] != v.shape[: ndim - 1]:
        raise reject("v.shape", tuple(v.shape), f"k has {tuple(k.shape)}", "k and v differ in their last dimension at most")
    if ndim == 4 and k.shape[0] != q.shape[0]:
        raise reject("k.shape", tuple(k.shape), f"q has a batch of {q.shape[0]}", "give both the same batch")
    if k.shape[-1] != q.shape[-1]:
        raise reject("k.shape", tuple(k.shape), f"q has dim {q.shape[-1]}", "give q and k the same dim")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if not heads or not kv_heads or heads % kv_heads:
        raise reject(
            "k.shape", tuple(k.shape), f"its {kv_heads} heads do not divide q's {heads}", "give k and v a divisor of them"
        )


def _offsets(name: str, cu: torch.Tensor, rows: int, device: torch.device) -> list[int]:
    if not isinstance(cu, torch.Tensor) or cu.ndim != 1 or cu.dtype != torch.int32 or len(cu) < 2:
        actual = f"{tuple(cu.shape)} {cu.dtype}" if isinstance(cu, torch.Tensor) else type(cu).__name__
        raise reject(name, actual, "one int32 offset for each sequence and the end is expected", "give (batch + 1,) int32")
    if cu.device != device:
        raise reject(f"{name}.device", cu.device, f"q is on {device}", "move it there")
    if not cu.is_contiguous():
        raise reject(f"{name}.stride()", cu.stride(), "kernels read it one after the other", "call .contiguous()")
    ends: list[int] = cu.tolist()
    if ends[0] != 0:
        raise reject(f"{name}[0]", ends[0], "the first sequence begins at 0", "begin with 0")
    for i, (a, b) in enumerate(pairwise(ends), start=1):
        if b < a:
            raise reject(f"{name}[{i}]", b, f"it is less than the one before ({a})", "give offsets that never decrease")
    if ends[-1] > rows:
        raise reject(f"{name}[-1]", ends[-1], f"there are {rows} rows", "give at most as many tokens as rows")
    return ends


def _problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: tuple[tuple[int, ...], ...],
    slack: tuple[int, int],
    packing: Literal["dense", "ragged"],
    causal: Mask,
    softmax_scale: float | None,
) -> Problem:
    if not (causal is None or isinstance(causal, bool | str)) or causal not in (None, True, False, "bottom_right", "top_left"):
        raise reject("causal", causal, "no such mask", "use True, False, 'bottom_right' or 'top_left'")
    aligned: Causal | None = "bottom_right" if causal is True else causal or None
    return Problem(
        seqlens_q=lengths[0],
        seqlens_k=lengths[1],
        packing=packing,
        slack_q=slack[0],
        slack_k=slack[1],
        heads=q.shape[-2],
        kv_heads=k.shape[-2],
        dim_qk=q.shape[-1],
        dim_v=v.shape[-1],
        dtype=_DTYPES[q.dtype],
        causal=aligned,
        softmax_scale=softmax_scale,
    )


def _applied(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    problem: Problem,
    starts: tuple[torch.Tensor, torch.Tensor],
    kernel: str | Kernel,
    config: Config | None,
    return_lse: bool,
) -> Any:
    subject = registry.get(kernel) if isinstance(kernel, str) else kernel
    if missing_members(subject):
        raise reject("kernel", kernel, "it is not a kernel", "give a name of `attnfuzz list`, or a Kernel")
    device: Device = "cuda" if qkv[0].is_cuda else "cpu"
    if reason := subject.unavailable(device):
        raise BadArgument(f"kernel={subject.name!r}: it cannot run on {device} here: {reason}")
    configs = subject.configs(problem)
    if not configs:
        raise BadArgument(f"kernel={subject.name!r}: none of its Configs fits these dims and this dtype; use another kernel")
    chosen = configs[0] if config is None else config
    if reason := subject.supports(problem, chosen, device):
        raise BadArgument(f"kernel={subject.name!r}: {reason}; use another kernel, or give what it supports")
    # A kernel's `layouts` holds for the layouts that a Problem names, and this one names none.
    strided = bool(getattr(subject, "any_strides", False))
    o, lse = _Attention.apply(*qkv, subject.build(problem, chosen, device), problem, starts, strided)
    return (o, lse) if return_lse else o


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """A built kernel's forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        built: Built,
        problem: Problem,
        starts: tuple[torch.Tensor, torch.Tensor],
        strided: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(o, lse)."""
        q, k, v = (_readable(x, strided) for x in (q, k, v))
        o, lse = built.forward(_inputs(problem, (q, k, v), starts, q))
        # A kernel may leave anything in slack rows.
        _clear_slack(o, problem.slack_q)
        ctx.built, ctx.problem, ctx.strided = built, problem, strided
        # The offsets too: torch checks that nothing saved is overwritten before the backward.
        ctx.save_for_backward(q, k, v, o, lse, *starts)
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d_o: torch.Tensor, _: Any) -> tuple[Any, ...]:
        """(dq, dk, dv), and None for each argument that is not a tensor."""
        q, k, v, o, lse, *starts = ctx.saved_tensors
        inputs = _inputs(ctx.problem, (q, k, v), (starts[0], starts[1]), _readable(d_o, ctx.strided))
        d_q, d_k, d_v = ctx.built.backward(inputs, o, lse)[:3]
        _clear_slack(d_q, ctx.problem.slack_q)
        for each in (d_k, d_v):
            _clear_slack(each, ctx.problem.slack_k)
        return d_q, d_k, d_v, None, None, None, None


def _clear_slack(x: torch.Tensor, rows: int) -> None:
    """Write 0 to the last rows, which belong to no sequence."""
    if rows:
        x[x.shape[0] - rows :] = 0


def _readable(x: torch.Tensor, strided: bool) -> torch.Tensor:
    """`x` as a kernel can read it: contiguous and, on a GPU, 16-byte aligned, unless the kernel reads any strides."""
    if strided:
        return x.detach()
    dense = x.detach().contiguous()
    return dense.clone() if dense.is_cuda and dense.data_ptr() % _ALIGNED else dense


def _inputs(
    problem: Problem,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    starts: tuple[torch.Tensor, torch.Tensor],
    d_o: torch.Tensor,
) -> Inputs:
    return Inputs(
        problem=problem,
        q=qkv[0],
        k=qkv[1],
        v=qkv[2],
        d_o=d_o,
        cu_seqlens_q=starts[0],
        cu_seqlens_k=starts[1],
        max_seqlen_q=max(problem.seqlens_q),
        max_seqlen_k=max(problem.seqlens_k),
    )
