"""`released.flag_gems.*`: attention of FlagGems (package flag-gems, Apache-2.0) in Triton, which replaces torch's operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnfuzz.kernels.contract import Deviations
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.released.subject import Package, released

if TYPE_CHECKING:
    import torch

__all__ = ["FLASH", "FLASH_ALL", "SDPA", "SDPA_ALL", "VARLEN", "VARLEN_ALL"]

_FLAG_GEMS: Final = Package("flag-gems", "flag_gems", needs=("sqlalchemy", "yaml", "packaging"), outside_extra=True)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None, is_causal: bool = False) -> torch.Tensor:
    """Call `scaled_dot_product_attention`, with torch's parameters: its causal mask begins at the top left."""
    from flag_gems.ops.attention import scaled_dot_product_attention

    return scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    disable_splitkv: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `flash_attention_forward`, which replaces `aten::_flash_attention_forward`: None for a side without a limit."""
    from flag_gems.ops.attention import flash_attention_forward

    left, right = (None if side < 0 else side for side in window_size)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "disable_splitkv": disable_splitkv}
    options |= {"window_size_left": left, "window_size_right": right}
    o, lse, *_ = flash_attention_forward(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, **options)
    return o, lse


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `flash_attn_varlen_func`, with flash-attention's parameters in another order."""
    from flag_gems.ops.attention import flash_attn_varlen_func

    return flash_attn_varlen_func(  # type: ignore[no-any-return]
        q,
        k,
        v,
        max_seqlen_q,
        cu_seqlens_q,
        max_seqlen_k,
        cu_seqlens_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        return_softmax_lse=True,
    )


_BLOCK: Final = 128
"""The most queries of a program."""


def _refuses_findings(problem: Problem) -> str | None:
    """What is known to be wrong: a causal mask where the last of several blocks of queries is not full."""
    for queries, keys in zip(problem.seqlens_q, problem.seqlens_k, strict=True):
        if problem.causal is not None and queries > _BLOCK and queries % _BLOCK:
            return f"seqlen_q={queries}, seqlen_k={keys}: known to be wrong (docs/findings.md); {FLASH_ALL.name} takes it"
    return None


def _refuses_ragged_findings(problem: Problem) -> str | None:
    """What is known to be wrong beside one-sided windows: limits that count as none, and LSE of several single queries."""
    queries, keys = (max(lengths, default=0) for lengths in (problem.seqlens_q, problem.seqlens_k))
    sides = problem.window or (None, None)
    # The package takes a limit of as many keys as there are, or more, for none.
    left, right = (side is not None and side < keys for side in sides)
    single = queries == 1
    # A causal mask is the limit on the right. One query has no keys on its right, and the package leaves the mask out.
    masked = problem.causal is not None and not single
    left_only, right_only = left and not (right or masked), right and not (left or masked or single)
    # With more queries than keys such a limit on the right does hide keys, of the first queries.
    right_lost = sides[1] is not None and keys <= sides[1] < queries - 1 and not masked
    if left_only or right_only or right_lost:
        return f"window={problem.window}: one side alone is known to be wrong (docs/findings.md); {VARLEN_ALL.name} takes it"
    swapped = single and problem.groups > 1 and not (left or right)
    if swapped and len(problem.seqlens_q) > 1 and "lse" in problem.needs.outputs:
        rows = f"seqlens_q={problem.seqlens_q}, groups={problem.groups}"
        return f"{rows}: their LSE is known to be wrong (docs/findings.md); {VARLEN_ALL.name} takes it"
    return None


_DECLARED: Final[dict[str, Any]] = {
    "package": _FLAG_GEMS,
    # The package looks for a vendor's tools otherwise; its tuner keeps results in a file of the user's home.
    "environment": {"GEMS_VENDOR": "nvidia", "FLAGGEMS_DB_URL": "sqlite:///:memory:"},
    # What its launchers compare each tensor's device with.
    "on_cpu": (("flag_gems", "device", "cpu"),),
    "groups": None,
    "unequal": True,
    # Lengths and groups are constants, or choose tiles.
    "compiles_each_shape": True,
}
_FLASH: Final[dict[str, Any]] = {
    **_DECLARED,
    "files": ("ops/attention.py", "ops/flash_api.py", "ops/flash_kernel.py"),
    # Rows of V beyond a sequence's keys are multiplied by 0: they must not be NaN.
    "masked_loads": "zero",
    "lse": True,
    "gradients": False,
    "deterministic": ("o", "lse"),
}

_SDPA: Final[dict[str, Any]] = {
    **_DECLARED,
    "like": "dense",
    "layout": "bhsd",
    "files": ("ops/attention.py",),
    "dims": ((64, 64), (16, 16), (32, 32), (128, 128), (256, 256)),
    "causal": (None, "top_left"),
}

SDPA: Final = released(_sdpa, name="released.flag_gems.sdpa", gradients=False, deterministic=("o",), **_SDPA)
SDPA_ALL: Final = released(
    _sdpa,
    name="released.flag_gems.sdpa_all",
    # The backward rounds k times the scale and log2(e), and sums each query head's dK and dV in the input dtype.
    deviations=Deviations(half_scaled_k=True, half_partials=True),
    **_SDPA,
)
_FLASH_DIMS: Final = ((64, 64), (32, 32), (128, 128), (96, 96), (192, 192), (256, 256), (40, 40))

FLASH: Final = released(
    _flash,
    name="released.flag_gems.flash",
    like="dense",
    dims=_FLASH_DIMS,
    # Splits of the keys and windows are known to be wrong: FLASH_ALL.
    configs=({"disable_splitkv": True},),
    window=False,
    refuses=_refuses_findings,
    **_FLASH,
)
FLASH_ALL: Final = released(
    _flash,
    name="released.flag_gems.flash_all",
    like="dense",
    dims=_FLASH_DIMS,
    configs=({}, {"disable_splitkv": True}),
    **_FLASH,
)
_VARLEN: Final[dict[str, Any]] = {
    **_FLASH,
    "like": "varlen",
    "dims": ((64, 64), (32, 32), (128, 128), (256, 256)),
    # Its kernel uses block pointers, which Triton 3.9 no longer has.
    "triton_before": (3, 9),
}
VARLEN: Final = released(
    _varlen,
    name="released.flag_gems.varlen",
    # A limit on one side alone is known to be wrong: VARLEN_ALL.
    window_forms=("both",),
    refuses=_refuses_ragged_findings,
    **_VARLEN,
)
VARLEN_ALL: Final = released(_varlen, name="released.flag_gems.varlen_all", **_VARLEN)
