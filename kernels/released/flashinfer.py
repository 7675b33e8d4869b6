"""`released.flashinfer.*`: attention of FlashInfer (package flashinfer-python, Apache-2.0), forward only; CUDA only.

The package compiles a kernel with nvcc and ninja at the first call of each form of it (dtype, dims, window, softcap), which
takes a minute or more. `build` makes that call, with one token, so that it counts as compiling.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from attnfuzz.kernels.contract import Deviations, Device
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.released.subject import Package, released

if TYPE_CHECKING:
    import torch

__all__ = ["DECODE", "PAGED_PREFILL", "RAGGED_PREFILL", "SINGLE_PREFILL"]

_FLASHINFER: Final = Package("flashinfer-python", "flashinfer", needs=("tvm_ffi",), outside_extra=True, options="")
_WORKSPACE: Final = 128 << 20
"""Bytes of the workspace that the package recommends."""


def _workspace(device: Any) -> torch.Tensor:
    """Return the workspace of the current stream, 0 at first, as the package asks; calls at once must not share one."""
    import torch

    return _workspace_of(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)


@functools.cache
def _workspace_of(device: Any, stream: int) -> torch.Tensor:  # noqa: ARG001 - one for each
    import torch

    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)


def _set_up(device: str) -> None:
    """Allocate the workspace before the first launch."""
    import torch

    _workspace(torch.empty(0, device=device).device)


def _single_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Any:
    """Call `single_prefill_with_kv_cache` for a batch of one sequence; LSE is `(1, seqlen_q, heads)` in base 2."""
    from flashinfer import single_prefill_with_kv_cache

    options: dict[str, Any] = {"causal": causal, "sm_scale": sm_scale, "window_left": window_size[0]}
    options |= {"logits_soft_cap": softcap, "return_lse": return_lse}
    result = single_prefill_with_kv_cache(q[0], k[0], v[0], **options)
    return tuple(each[None] for each in result) if return_lse else result[None]


def _ragged_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,  # noqa: ARG001 - the plan has it
    max_seqlen_k: int,  # noqa: ARG001
    sm_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Any:
    """Plan and run `BatchPrefillWithRaggedKVCacheWrapper`; LSE is `(total_q, heads)` in base 2."""
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    wrapper = BatchPrefillWithRaggedKVCacheWrapper(_workspace(q.device), "NHD")
    heads = (q.shape[1], k.shape[1], q.shape[2])
    options = _plan_options(q, sm_scale, window_size, softcap)
    wrapper.plan(cu_seqlens_q, cu_seqlens_k, *heads, head_dim_vo=v.shape[2], causal=causal, **options)
    return wrapper.run(q, k, v, return_lse=return_lse)


def _paged_prefill(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    seqlens_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,  # noqa: ARG001 - the plan has it
    sm_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Any:
    """Plan and run `BatchPrefillWithPagedKVCacheWrapper`; LSE is `(total_q, heads)` in base 2."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(q.device), "NHD")
    pages = _pages(page_table, seqlens_k, k_pages.shape[1])
    sizes = (q.shape[1], k_pages.shape[2], q.shape[2], k_pages.shape[1])
    wrapper.plan(cu_seqlens_q, *pages, *sizes, causal=causal, **_plan_options(q, sm_scale, window_size, softcap))
    return wrapper.run(q, (k_pages, v_pages), return_lse=return_lse)


def _decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    seqlens_k: torch.Tensor,
    sm_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Any:
    """Plan and run `BatchDecodeWithPagedKVCacheWrapper` for one query a sequence; LSE is `(batch, heads)` in base 2."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    wrapper = BatchDecodeWithPagedKVCacheWrapper(_workspace(q.device), "NHD")
    pages = _pages(page_table, seqlens_k, k_pages.shape[1])
    sizes = (q.shape[1], k_pages.shape[2], q.shape[2], k_pages.shape[1])
    wrapper.plan(*pages, *sizes, **_plan_options(q, sm_scale, window_size, softcap))
    return wrapper.run(q, (k_pages, v_pages), return_lse=return_lse)


def _plan_options(q: torch.Tensor, sm_scale: float | None, window_size: tuple[int, int], softcap: float) -> dict[str, Any]:
    return {"sm_scale": sm_scale, "window_left": window_size[0], "logits_soft_cap": softcap, "q_data_type": q.dtype}


def _pages(table: torch.Tensor, lengths: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a page table as the package has it, int32: where each sequence's pages begin, the pages, tokens of its last one."""
    import torch

    counts = (lengths + (size - 1)) // size
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=table.device)
    starts[1:] = counts.cumsum(0)
    used = torch.arange(table.shape[1], device=table.device) < counts[:, None]
    last = (lengths - (counts - 1).clamp(min=0) * size).to(torch.int32)
    return starts, table[used].to(torch.int32), last


def _one_query(problem: Problem) -> str | None:
    """A decode has one query a sequence."""
    if any(each != 1 for each in problem.seqlens_q):
        return f"seqlens_q={problem.seqlens_q}: a decode has one query a sequence"
    return None


def _compiled(function: Callable[..., Any]) -> Callable[[Problem, Device], None]:
    """Return a function that has the package compile what a Problem needs: by a launch of one token."""

    def compile_for(problem: Problem, device: Device) -> None:
        import torch

        q, k, v, given = _one_token(problem, device)
        given |= {"sm_scale": problem.scale, "softcap": problem.softcap, "causal": problem.causal is not None, "return_lse": True}
        if problem.window is not None and problem.window[0] is not None:
            given["window_size"] = (0, -1)
        taken = inspect.signature(function).parameters
        function(q, k, v, **{name: value for name, value in given.items() if name in taken})
        if device == "cuda":
            torch.cuda.synchronize()

    return compile_for


def _one_token(problem: Problem, device: Device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return q, k and v, all zero, of one query and one key, and what says so beside them."""
    import torch

    dtype, lead = getattr(torch, problem.dtype), (1,) if problem.packing == "ragged" else (1, 1)
    tokens = (1, problem.page_size) if problem.page_size else lead
    q = torch.zeros(*lead, problem.groups, problem.dim_qk, dtype=dtype, device=device)
    k, v = (torch.zeros(*tokens, 1, dim, dtype=dtype, device=device) for dim in (problem.dim_qk, problem.dim_v))
    starts = torch.arange(2, dtype=torch.int32, device=device)
    given: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 1, "max_seqlen_k": 1}
    return q, k, v, given | {"page_table": starts[:1, None], "seqlens_k": starts[1:]}


_DECLARED: Final[dict[str, Any]] = {
    "package": _FLASHINFER,
    "backend": "torch",
    "devices": ("cuda",),
    "set_up": _set_up,
    "lse_base": 2,
    "dims": ((64, 64), (128, 128), (256, 256)),
    "groups": (1, 2, 4, 8),
    "unequal": True,
    # Only the left side of a window can be given.
    "window_forms": ("left",),
}
# Read in include/flashinfer/attention of 0.7.2: the row sum is a product of rounded P, and O of splits has O's dtype.
_PREFILL: Final[dict[str, Any]] = {
    **_DECLARED,
    "files": ("prefill.py", "data/include/flashinfer/attention/prefill.cuh"),
    "deviations": Deviations(l_from_rounded_p=True, half_partial_o=True),
}
_PAGES: Final[dict[str, Any]] = {"like": "paged", "page_sizes": (16, 1, 8, 64)}

SINGLE_PREFILL: Final = released(
    _single_prefill,
    name="released.flashinfer.single_prefill",
    like="dense",
    lse_layout="bsh",
    gradients=False,
    batch_max=1,
    compile_for=_compiled(_single_prefill),
    **_PREFILL,
)
RAGGED_PREFILL: Final = released(
    _ragged_prefill,
    name="released.flashinfer.ragged_prefill",
    like="varlen",
    lse_layout="th",
    gradients=False,
    compile_for=_compiled(_ragged_prefill),
    **_PREFILL,
)
PAGED_PREFILL: Final = released(
    _paged_prefill,
    name="released.flashinfer.paged_prefill",
    lse_layout="th",
    compile_for=_compiled(_paged_prefill),
    **_PAGES,
    **_PREFILL,
)
DECODE: Final = released(
    _decode,
    name="released.flashinfer.decode",
    lse_layout="th",
    refuses=_one_query,
    compile_for=_compiled(_decode),
    files=("decode.py", "data/include/flashinfer/attention/decode.cuh"),
    deviations=Deviations(half_partial_o=True),
    **_PAGES,
    **_DECLARED,
)
