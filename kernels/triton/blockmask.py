"""Lists of the blocks of scores that a kernel visits: the blocks of keys for each block of queries, and the other way round.

A block is full where every query in it sees every key in it, so that nothing is left to mask: it lies within both lengths. It
is partial where some query sees some key; otherwise it is in no list. A mask is a band of diagonals, low <= kv_idx - q_idx <=
high, for `causal` and `window`, and a tree for `mask_mod`. Lists are int32, `count (B', H', blocks)` and `index (B', H', blocks,
others)`: the first `count` of `index` ascend, the rest are other blocks. B' and H' are 1 where the mask does not read b or h.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnfuzz.kernels.errors import reject
from attnfuzz.kernels.expressions.evaluation import evaluate
from attnfuzz.kernels.expressions.tree import Expression, captured
from attnfuzz.kernels.problem import Problem

if TYPE_CHECKING:
    import torch

__all__ = ["WIDEST", "Band", "BlockMask", "Lists", "band_of", "block_mask", "blocks_in", "captures", "stream_of"]

WIDEST = 2**31 - 1
_CHUNK = 1 << 24
"""Scores for which the mask is evaluated at once."""


@dataclass(frozen=True, slots=True)
class Band:
    """The keys that causal and window leave visible to query q: q + low to q + high; `WIDEST` where a side has no limit."""

    low: int = -WIDEST
    high: int = WIDEST

    @property
    def everything(self) -> bool:
        """Whether the band hides nothing."""
        return self == Band()


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """For each block the number of other blocks to visit, and their indices."""

    count: torch.Tensor
    index: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class BlockMask:
    """Both directions: lists of key blocks for each query block, and lists of query blocks for each key block."""

    keys_partial: Lists
    keys_full: Lists
    queries_partial: Lists
    queries_full: Lists

    @property
    def batches(self) -> int:
        """1 where all sequences share the lists."""
        return int(self.keys_partial.count.shape[0])

    @property
    def heads(self) -> int:
        """1 where all heads share the lists."""
        return int(self.keys_partial.count.shape[1])


def band_of(problem: Problem) -> Band:
    """The band of a dense problem's causal mask and window; the window is counted from the bottom-right diagonal without one."""
    n_q, n_k = problem.seqlens_q[0], problem.seqlens_k[0]
    diagonal = 0 if problem.causal == "top_left" else n_k - n_q
    low, high = -WIDEST, WIDEST
    if problem.causal is not None:
        high = diagonal
    if problem.window is not None:
        left, right = problem.window
        low = low if left is None else max(low, diagonal - left)
        high = high if right is None else min(high, diagonal + right)
    return Band(low, high)


def blocks_in(length: int, block: int) -> int:
    """Number of blocks that cover `length`, at least one, so that no list is empty."""
    return max(1, -(-length // block))


def block_mask(
    tree: Expression | None,
    band: Band,
    sizes: Mapping[str, int],
    tensors: Mapping[str, torch.Tensor],
    block: tuple[int, int],
    device: Any,
) -> BlockMask:
    """Make the lists of a mask.

    Args:
        tree: a bool tree, or None.
        band: applies in addition to `tree`.
        sizes: "batch", "heads", "kv_heads", "seqlen_q", "seqlen_k".
        tensors: captured tensors by name.
        block: queries and keys of a block.
        device: device of the lists; for a mask that reads no captured tensor they are cached, for each stream, except in the
            capture of a CUDA graph: what it makes has no values yet, and what was made before may be gone when it is replayed.

    Raises:
        BadArgument: a block without queries or keys.
    """
    if min(block) < 1:
        raise reject("block", block, "it has queries and keys", "give positive numbers")
    if captured(tree) or captures(device):
        return _listed(tree, band, dict(sizes), tensors, block, device)
    return _remembered(tree, band, tuple(sorted(sizes.items())), block, str(device), stream_of(device))


def stream_of(device: Any) -> int:
    """Return the handle of the device's current CUDA stream, 0 on a CPU: what one stream writes, another must wait for."""
    import torch

    where = torch.device(device)
    return int(torch.cuda.current_stream(where).cuda_stream) if where.type == "cuda" else 0


def captures(device: Any) -> bool:
    """Whether the device's current CUDA stream is being captured into a graph."""
    import torch

    return bool(torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing())


@functools.lru_cache(maxsize=64)
def _remembered(
    tree: Expression | None,
    band: Band,
    sizes: tuple[tuple[str, int], ...],
    block: tuple[int, int],
    device: str,
    stream: int,  # noqa: ARG001 - part of the key
) -> BlockMask:
    return _listed(tree, band, dict(sizes), {}, block, device)


def _listed(
    tree: Expression | None,
    band: Band,
    sizes: Mapping[str, int],
    tensors: Mapping[str, torch.Tensor],
    block: tuple[int, int],
    device: Any,
) -> BlockMask:
    if tree is None or 0 in (sizes["seqlen_q"], sizes["seqlen_k"]):
        some, full = _of_band(band, sizes, block, device)
    else:
        some, full = _of_tree(tree, band, sizes, tensors, block, device)
    partial = some & ~full
    return BlockMask(_lists(partial), _lists(full), _lists(partial.transpose(2, 3)), _lists(full.transpose(2, 3)))


def _of_band(band: Band, sizes: Mapping[str, int], block: tuple[int, int], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks with some pair within the band, and with all: bool (1, 1, query blocks, key blocks)."""
    import torch

    n_q, n_k = sizes["seqlen_q"], sizes["seqlen_k"]
    first_q = torch.arange(blocks_in(n_q, block[0]), device=device)[:, None] * block[0]
    first_k = torch.arange(blocks_in(n_k, block[1]), device=device)[None, :] * block[1]
    last_q, last_k = first_q + block[0] - 1, first_k + block[1] - 1
    whole = (last_q < n_q) & (last_k < n_k)
    last_q, last_k = last_q.clamp(max=n_q - 1), last_k.clamp(max=n_k - 1)
    # The differences in a block are all whole numbers from the least to the most.
    least, most = first_k - last_q, last_k - first_q
    some = (most >= band.low) & (least <= band.high) & (min(n_q, n_k) > 0)
    full = whole & (least >= band.low) & (most <= band.high)
    return some[None, None], full[None, None]


def _of_tree(
    tree: Expression,
    band: Band,
    sizes: Mapping[str, int],
    tensors: Mapping[str, torch.Tensor],
    block: tuple[int, int],
    device: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_of_band`, for the whole mask, some query blocks at a time: bool (B', H', query blocks, key blocks)."""
    import torch

    n_q, n_k = sizes["seqlen_q"], sizes["seqlen_k"]
    reads = {each.op for each in tree.walk()}
    batches, heads = (sizes[name] if leaf in reads else 1 for name, leaf in (("batch", "b"), ("heads", "h")))
    q_blocks, k_blocks = blocks_in(n_q, block[0]), blocks_in(n_k, block[1])
    leaves = {
        "b": torch.arange(batches, device=device).view(-1, 1, 1, 1),
        "h": torch.arange(heads, device=device).view(1, -1, 1, 1),
        "kv_idx": torch.arange(n_k, device=device).view(1, 1, 1, -1),
        "seqlen_q": n_q,
        "seqlen_k": n_k,
    }
    step = max(1, _CHUNK // (batches * heads * k_blocks * block[0] * block[1]))
    counts = []
    for at in range(0, q_blocks, step):
        rows = torch.arange(at * block[0], min(n_q, (at + step) * block[0]), device=device).view(1, 1, -1, 1)
        visible = evaluate(tree, {**leaves, "q_idx": rows}, tensors, torch.float32)
        if not band.everything:
            offset = leaves["kv_idx"] - rows
            visible = visible & (offset >= band.low) & (offset <= band.high)
        here = min(step, q_blocks - at)
        dense = torch.zeros(batches, heads, here * block[0], k_blocks * block[1], dtype=torch.bool, device=device)
        dense[:, :, : rows.numel(), :n_k] = visible
        counts.append(dense.view(batches, heads, here, block[0], k_blocks, block[1]).sum((3, 5), dtype=torch.int32))
    count = torch.cat(counts, 2)
    return count > 0, count == block[0] * block[1]


def _lists(chosen: torch.Tensor) -> Lists:
    import torch

    index = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return Lists(chosen.sum(-1, dtype=torch.int32).contiguous(), index.to(torch.int32).contiguous())
