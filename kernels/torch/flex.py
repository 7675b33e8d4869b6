"""`torch.flex`: torch.compile(flex_attention), whose Triton kernels are generated for the masks and scores in use.

Masks are mask_mods with a BlockMask: causal with either alignment, and for a ragged batch a mask of documents over one long
sequence. The default scale is an argument, a constant of the compiled code; another scale is a score_mod that multiplies by a
captured tensor, which saves a compile for each scale and also tests captured tensors. Shapes are dynamic: heads and dims are
constants, lengths are not, though PyTorch recompiles for a length of 1 and for fewer than 128 queries.

A TorchDispatchMode keeps torch.compile from compiling, so the calls are made outside the harness' poison mode. The compiled
code's allocations then have neither poison nor guard bands; its inputs still lie between bands, slack rows included.
Layouts other than contiguous would work, but each needs another compile: they are not declared.
"""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from attnfuzz.kernels.contract import BuildError, Built, Capabilities, Config, Device, Inputs
from attnfuzz.kernels.modified import shape_of, tensors_of
from attnfuzz.kernels.problem import OUTPUT_NAMES, Problem
from attnfuzz.kernels.support.installed_torch import built_with, has_name, parameters
from attnfuzz.kernels.torch.ops import Part, Peer, Step

if TYPE_CHECKING:
    import torch

__all__ = ["KERNEL", "Flex", "FlexStep", "function", "mask_of", "missing", "score_of", "too_wide"]

_CAPABILITIES: Final = Capabilities(
    packings=("dense", "ragged"),
    dtypes=("float16", "bfloat16", "float32"),
    dims=((64, 64), (128, 128), (16, 16), (32, 32), (64, 128), (128, 64), (96, 96), (192, 128)),
    # Heads are constants of the compiled code: few group sizes save compiles.
    groups=(1, 3, 4),
    causal=(None, "bottom_right", "top_left"),
    zero_q=True,
    zero_k=True,
    unequal=True,
    slack=True,
    scale_any=True,
    layouts=False,
    # For each combination of heads and classes of lengths too: 2 to 3 s a Case on an H200.
    compiles_each_shape=True,
    dlse=True,
    deterministic=OUTPUT_NAMES,
)
_SHORT: Final = 128
"""With fewer queries PyTorch uses another template (split over keys)."""
_RECOMPILES: Final = 64

_compiled: dict[str, Callable[..., Any]] = {}
_warmed: set[str] = set()


class Flex(Peer):
    """The adapter, whose compiled code depends on more than its Config."""

    def compile_key(self, problem: Problem, config: Config) -> str:
        """The values torch.compile specialises on: dtype, dims, heads, mask, whether the scale is default, lengths by class."""
        p, dense = problem, problem.packing == "dense"
        rows_q = p.seqlens_q[0] if dense else p.total_q
        rows_k = p.seqlens_k[0] if dense else p.total_k
        lengths = f"{_class(p.batch if dense else 1)} {_class(rows_q, _SHORT)} {_class(rows_k)}"
        scale = "default" if p.softmax_scale is None else "any"
        shape = f"{p.dtype} {p.dim_qk} {p.dim_v} {p.heads} {p.kv_heads}"
        return f"{self.name} {p.packing} {shape} {p.causal} {scale} {lengths} {config.canonical()}"

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        """Compile by a first call on zeros, where this process has not compiled for the key yet.

        Raises:
            BuildError: the compiler refused.
            BadArgument: `problem` is not supported.
        """
        built = super().build(problem, config, device)
        key = self.compile_key(problem, config)
        if key not in _warmed:
            _compile(built, _zeros(problem, device))
            _warmed.add(key)
        return built


def _class(count: int, short: int = 2) -> str:
    if count < 2:
        return str(count)
    return "few" if count < short else "many"


def _compile(built: Built, inputs: Inputs) -> None:
    """Call once to compile; errors of the kernel itself are ignored here, since they recur on the Case.

    Raises:
        BuildError: with the compiler's text.
    """
    import torch

    try:
        o, lse = built.forward(inputs)
        built.backward(inputs, o, lse)
    except torch.AcceleratorError:
        return
    except Exception as error:  # Dynamo, Inductor and Triton raise dozens of unrelated types
        raise BuildError(f"{type(error).__name__}: {error}") from error


def _zeros(problem: Problem, device: str) -> Inputs:
    import torch

    p, dtype = problem, getattr(torch, problem.dtype)
    dense = p.packing == "dense"
    rows_q = (p.batch, p.seqlens_q[0] + p.slack_q) if dense else (p.total_q + p.slack_q,)
    rows_k = (p.batch, p.seqlens_k[0] + p.slack_k) if dense else (p.total_k + p.slack_k,)

    def zeros(rows: tuple[int, ...], heads: int, dim: int) -> torch.Tensor:
        return torch.zeros((*rows, heads, dim), dtype=dtype, device=device)

    d_lse = torch.zeros((*rows_q[:-1], p.heads, rows_q[-1]), device=device) if p.needs.dlse else None
    offsets = [
        torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        for lengths in (p.seqlens_q, p.seqlens_k)
    ]
    return Inputs(
        problem=p,
        q=zeros(rows_q, p.heads, p.dim_qk),
        k=zeros(rows_k, p.kv_heads, p.dim_qk),
        v=zeros(rows_k, p.kv_heads, p.dim_v),
        d_o=zeros(rows_q, p.heads, p.dim_v),
        cu_seqlens_q=offsets[0],
        cu_seqlens_k=offsets[1],
        max_seqlen_q=max(p.seqlens_q),
        max_seqlen_k=max(p.seqlens_k),
        d_lse=d_lse,
        captured=tuple(
            torch.zeros(shape_of(p, each), dtype=torch.float32 if each.kind == "float" else torch.int32, device=device)
            for each in tensors_of(p)
        ),
    )


class FlexStep(Step):
    """The calls; q (batch, heads, seqlen, dim) is a view of the harness' tensor, a ragged batch a batch of one."""

    def attend(self, part: Part) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """LSE is `(batch, heads, seqlen_q)`; autograd's graph is kept for the backward."""
        import torch
        from torch.utils._python_dispatch import _disable_current_modes

        p, compiled = part.problem, function(KERNEL.compile_key(part.problem, self.config))
        with _disable_current_modes(), torch.enable_grad():
            leaves = tuple(x.detach().requires_grad_() for x in (part.q, part.k, part.v))
            q, k, v = ((x if part.dense else x[None]).transpose(1, 2) for x in leaves)
            score_mod = score_of(p, part.q.device)
            scale = p.scale if score_mod is None else 1.0
            o, lse = compiled(q, k, v, score_mod, _block_mask(part), scale, p.groups > 1)
            kept = (o if part.dense else o[0], lse if part.dense else lse[0], leaves)
            return kept[0].detach().transpose(-3, -2), kept[1].detach(), kept

    def differentiate(self, part: Part, kept: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) of sum(d_o * o) (+ sum(d_lse * lse)) by autograd."""
        import torch
        from torch.utils._python_dispatch import _disable_current_modes

        o, lse, leaves = kept
        with _disable_current_modes():
            incoming = [part.d_o.transpose(-3, -2), *([part.d_lse] if part.d_lse is not None else [])]
            outputs = [o, lse][: len(incoming)]
            # The graph is not retained: compiled graphs free their buffers.
            dq, dk, dv = torch.autograd.grad(outputs, leaves, incoming)
        return dq, dk, dv


def score_of(problem: Problem, device: Any) -> Callable[..., Any] | None:
    """Make a score_mod that scales by a captured tensor, or None for the default scale."""
    import torch

    if problem.softmax_scale is None:
        return None
    factor = torch.tensor(problem.scale, dtype=torch.float32, device=device)

    def scaled(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:  # noqa: ARG001 - a score_mod's signature
        return score * factor

    return scaled


def mask_of(problem: Problem, device: Any) -> Callable[..., Any] | None:
    """Make the mask_mod of `problem`, or None where every query sees every key.

    In a ragged batch, query i and key j are rows of the whole batch: `document_q`, `document_k` hold their sequences, and
    j <= i + shift[i] is the causal mask of query i's own sequence.
    """
    import torch

    shifts = _shifts(problem)
    if problem.packing == "dense":
        if problem.causal is None:
            return None
        shift = torch.tensor(shifts[0], device=device)

        def causal(b: Any, h: Any, i: Any, j: Any) -> Any:  # noqa: ARG001 - a mask_mod's signature
            return j <= i + shift

        return causal

    def by_row(values: Any, lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(values, device=device).repeat_interleave(torch.tensor(lengths, device=device))

    numbers = range(problem.batch)
    document_q, document_k = by_row(list(numbers), problem.seqlens_q), by_row(list(numbers), problem.seqlens_k)

    def same_document(b: Any, h: Any, i: Any, j: Any) -> Any:  # noqa: ARG001 - a mask_mod's signature
        return document_q[i] == document_k[j]

    if problem.causal is None:
        return same_document
    shift_q = by_row(shifts, problem.seqlens_q)

    def causal_in_document(b: Any, h: Any, i: Any, j: Any) -> Any:  # noqa: ARG001 - a mask_mod's signature
        return (document_q[i] == document_k[j]) & (j <= i + shift_q[i])

    return causal_in_document


def _shifts(problem: Problem) -> list[int]:
    """Distance from a query's row to the last key that it sees, for each sequence, in rows of the whole tensors."""
    shifts, begin_q, begin_k = [], 0, 0
    for n_q, n_k in zip(problem.seqlens_q, problem.seqlens_k, strict=True):
        aligned = n_k - n_q if problem.causal == "bottom_right" else 0
        shifts.append((0 if problem.packing == "dense" else begin_k - begin_q) + aligned)
        begin_q, begin_k = begin_q + n_q, begin_k + n_k
    return shifts


def _block_mask(part: Part) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    mask_mod = mask_of(part.problem, part.q.device)
    if mask_mod is None:
        return None
    rows_q, rows_k = part.q.shape[-3], part.k.shape[-3]
    return create_block_mask(mask_mod, None, None, rows_q, rows_k, device=str(part.q.device))


def function(key: str) -> Callable[..., Any]:
    """flex_attention with LSE, compiled for `key`, with its own code object: Dynamo counts and looks up compiles by code."""
    import torch
    import torch._dynamo
    import torch._inductor.config
    from torch.nn.attention import flex_attention as module

    if key not in _compiled:
        torch._dynamo.config.recompile_limit = max(_RECOMPILES, torch._dynamo.config.recompile_limit)
        # A child process that is killed must not leave a pool of compilers behind.
        torch._inductor.config.compile_threads = 1
        body = _with_aux if hasattr(module, "AuxRequest") else _with_lse
        own = types.FunctionType(body.__code__.replace(co_name=f"flex_{len(_compiled)}"), dict(vars(module)))
        _compiled[key] = torch.compile(own, dynamic=True, fullgraph=True)
    return _compiled[key]


# The two bodies run with the names of torch.nn.attention.flex_attention.
def _with_aux(q: Any, k: Any, v: Any, score_mod: Any, block_mask: Any, scale: float, grouped: bool) -> Any:
    o, aux = flex_attention(  # type: ignore[name-defined]  # noqa: F821
        q,
        k,
        v,
        score_mod,
        block_mask,
        scale,
        grouped,
        return_aux=AuxRequest(lse=True),  # type: ignore[name-defined]  # noqa: F821
    )
    return o, aux.lse


def _with_lse(q: Any, k: Any, v: Any, score_mod: Any, block_mask: Any, scale: float, grouped: bool) -> Any:
    return flex_attention(q, k, v, score_mod, block_mask, scale, grouped, return_lse=True)  # type: ignore[name-defined]  # noqa: F821


def missing() -> str | None:
    """Why this torch lacks what the adapter calls, or None."""
    version = built_with()[0]
    if not has_name("torch", "AcceleratorError"):
        return f"torch {version} is too old for this adapter: install torch 2.11 or newer"
    if (of := parameters("torch.nn.attention.flex_attention", "flex_attention")) is None:
        return f"torch {version} has no torch.nn.attention.flex_attention: install torch 2.11 or newer"
    if not {"return_aux", "return_lse"} & of:
        return f"flex_attention of torch {version} returns no LSE: install torch 2.11 or newer"
    # Not imported: that would fix Triton's mode for this process.
    if importlib.util.find_spec("triton") is None:
        return "triton, with which torch.compile makes kernels, is not installed: pip install triton"
    return None


def too_wide(problem: Problem) -> str | None:
    """Why Inductor has no tiles for `problem`, or None: "No valid triton configs", 280 KB of shared memory (torch 2.11, H200)."""
    if problem.dtype == "float32" and problem.dim_qk > 128:
        return f"dtype='float32', dim_qk={problem.dim_qk}: inductor finds no tiles that fit; at most 128"
    return None


KERNEL: Final = Flex(
    name="torch.flex",
    file=__file__,
    capabilities=_CAPABILITIES,
    step=FlexStep,
    missing=missing,
    refuses=too_wide,
)
