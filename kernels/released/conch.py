"""`released.conch.*`: attention of conch-triton-kernels (Apache-2.0) over a paged cache, forward only, in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnfuzz.kernels.contract import Deviations
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.released.subject import Package, released

if TYPE_CHECKING:
    import torch

__all__ = ["ALL", "DECODE_ALL", "VARLEN"]

_CONCH: Final = Package("conch-triton-kernels", "conch")
_PAGE: Final = 16
"""Keys of a page of the cache."""


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Call `varlen_attention` with keys and values copied into pages, those of the last sequence first."""
    from conch.ops.attention.varlen_attention import varlen_attention

    lengths = cu_seqlens_k.diff()
    table, (keys, values) = _paged(lengths, cu_seqlens_k, max_seqlen_k, k, v)
    options = {"causal": causal, "scale": scale, "softcap": softcap}
    return varlen_attention(q, keys, values, cu_seqlens_q, max_seqlen_q, lengths, max_seqlen_k, table, **options)


def _paged(
    lengths: torch.Tensor, starts: torch.Tensor, longest: int, *tensors: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copy `(total_k, heads, dim)` tensors into pages `(pages, 16, heads, dim)`; return the table `(batch, pages)` and those."""
    import torch

    counts = [-(-int(each) // _PAGE) for each in lengths]
    table = torch.zeros(len(counts), max(1, -(-longest // _PAGE)), dtype=torch.int32, device=lengths.device)
    caches = [x.new_zeros(max(1, sum(counts)), _PAGE, *x.shape[1:]) for x in tensors]
    page = sum(counts)
    for sequence, (count, start, length) in enumerate(zip(counts, starts.tolist(), lengths.tolist(), strict=False)):
        for number in range(count):
            page -= 1
            table[sequence, number] = page
            first = start + number * _PAGE
            kept = min(_PAGE, length - number * _PAGE)
            for x, cache in zip(tensors, caches, strict=True):
                cache[page, :kept] = x[first : first + kept]
    return table, caches


def _refuses_fewer_keys(problem: Problem) -> str | None:
    """A causal sequence has at least as many keys as queries: its cache holds the queries' own."""
    for queries, keys in zip(problem.seqlens_q, problem.seqlens_k, strict=True):
        if problem.causal is not None and keys < queries:
            return f"seqlen_q={queries}, seqlen_k={keys}: each query has a key of its own in the cache"
    return None


def _refuses_findings(problem: Problem) -> str | None:
    """What is known to be wrong: causal masks over a cached prompt, except for one query."""
    for queries, keys in zip(problem.seqlens_q, problem.seqlens_k, strict=True):
        if problem.causal is not None and queries not in (1, keys):
            return f"seqlen_q={queries}, seqlen_k={keys}: known to be wrong (docs/findings.md); {ALL.name} takes it"
    return None


_DECLARED: Final[dict[str, Any]] = {
    "package": _CONCH,
    "like": "varlen",
    "files": ("ops/attention/varlen_attention.py", "kernels/attention/varlen_attention.py"),
    "dims": ((64, 64), (16, 16), (32, 32), (128, 128), (96, 96)),
    "groups": None,
    "causal": (None, "bottom_right"),
    "unequal": True,
    "gradients": False,
    "deterministic": ("o",),
}

_ROUNDED: Final[dict[str, Any]] = {"l_from_rounded_p": True, "lazy_rescale": True}
"""P is rounded before its row sum is taken, and the running maximum is. O and the row sum are kept in half precision between
tiles as well, for which there is no deviation: docs/findings.md."""

VARLEN: Final = released(
    _varlen,
    name="released.conch.varlen",
    refuses=_refuses_findings,
    # In other dtypes O and LSE of each split of the keys are rounded to that dtype.
    dtypes=("float32",),
    deviations=Deviations(tf32_on=("cuda",)),
    **_DECLARED,
)
ALL: Final = released(
    _varlen,
    name="released.conch.varlen_all",
    refuses=_refuses_fewer_keys,
    dtypes=("float16", "bfloat16", "float32"),
    deviations=Deviations(**_ROUNDED, tf32_on=("cuda",)),
    **_DECLARED,
)
DECODE_ALL: Final = released(
    _varlen,
    name="released.conch.decode_all",
    dtypes=("float16", "bfloat16"),
    # Keys are split for single queries and 4,096 keys or more only.
    shapes=((1, 1, 1, 1, 4096), (1, 4, 1, 1, 4112), (2, 2, 2, 1, 4099), (3, 4, 2, 1, 5000)),
    deviations=Deviations(**_ROUNDED, half_partial_o=True, half_split_lse=True),
    **{key: value for key, value in _DECLARED.items() if key not in ("groups", "unequal")},
)
