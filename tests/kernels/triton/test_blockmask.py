"""Block lists against the mask itself: every pair that is seen lies in a listed block, and a full block hides nothing."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import pytest
from support.flex import dense, inputs_of, visible

from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.expressions.named import MASKS, documents
from attnfuzz.kernels.expressions.tree import KV, B, H, Q, truth
from attnfuzz.kernels.modified import mask_of, tensors_of
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.triton import blockmask
from attnfuzz.kernels.triton.blockmask import Band, BlockMask, Lists, band_of, block_mask

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

BLOCK = (16, 32)
BANDS: list[dict[str, Any]] = [
    {}, {"causal": "bottom_right"}, {"causal": "top_left"}, {"window": (20, None)}, {"window": (None, 3)},
    {"causal": "top_left", "window": (7, 4)}, {"causal": "bottom_right", "window": (0, 0)}, {"window": (40, 40)},
]  # fmt: skip
LENGTHS = [(64, 96), (63, 97), (16, 33), (1, 130), (130, 1), (50, 20), (0, 40), (40, 0), (0, 0)]


def lists_of(problem: Problem, block: tuple[int, int] = BLOCK) -> BlockMask:
    captured = {each.name: x for each, x in zip(tensors_of(problem), inputs_of(problem).captured, strict=True)}
    return block_mask(mask_of(problem), band_of(problem), problem.sizes, captured, block, "cpu")


def dense_mask(problem: Problem) -> torch.Tensor:
    """(batch, heads, seqlen_q, seqlen_k), by the words of Problem."""
    shapes = {"b": (-1, 1, 1, 1), "h": (1, -1, 1, 1), "q_idx": (1, 1, -1, 1), "kv_idx": (1, 1, 1, -1)}
    sizes = (problem.batch, problem.heads, problem.seqlens_q[0], problem.seqlens_k[0])
    leaves: dict[str, Any] = {
        name: torch.arange(size).view(shape) for (name, shape), size in zip(shapes.items(), sizes, strict=True)
    }
    captured = {each.name: x for each, x in zip(tensors_of(problem), inputs_of(problem).captured, strict=True)}
    return visible(problem, {**leaves, "seqlen_q": sizes[2], "seqlen_k": sizes[3]}, captured)


def listed(lists: Lists) -> torch.Tensor:
    """bool (B', H', blocks, others) of what is listed; all must ascend, without repetition, in int32."""
    assert lists.count.dtype == lists.index.dtype == torch.int32
    assert lists.count.is_contiguous()
    assert lists.index.is_contiguous()
    actual = torch.zeros(lists.index.shape, dtype=torch.bool)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in lists.count.shape)):
        chosen = lists.index[tuple(place)][: lists.count[tuple(place)]]
        assert (chosen.diff() > 0).all()
        actual[tuple(place)][chosen.long()] = True
    # What follows a list may be read ahead.
    assert int(lists.index.min()) >= 0
    assert int(lists.index.max()) < lists.index.shape[-1]
    return actual


def assert_covers(problem: Problem, block: tuple[int, int] = BLOCK) -> BlockMask:
    mask, whole = lists_of(problem, block), dense_mask(problem)
    partial, full = listed(mask.keys_partial), listed(mask.keys_full)
    assert torch.equal(partial.transpose(2, 3), listed(mask.queries_partial))
    assert torch.equal(full.transpose(2, 3), listed(mask.queries_full))
    assert not (partial & full).any()
    blocks = [max(1, math.ceil(n / edge)) for n, edge in zip(whole.shape[2:], block, strict=True)]
    padded = torch.zeros(*whole.shape[:2], blocks[0] * block[0], blocks[1] * block[1], dtype=torch.bool)
    padded[:, :, : whole.shape[2], : whole.shape[3]] = whole
    visible = padded.unflatten(3, (blocks[1], block[1])).unflatten(2, (blocks[0], block[0])).sum((3, 5))
    shape = (*whole.shape[:2], *blocks)
    # Beyond a length nothing is seen: a block that reaches there is never full.
    assert torch.equal(full.expand(shape), visible == block[0] * block[1])
    assert torch.equal(partial.expand(shape), (visible > 0) & (visible < block[0] * block[1]))
    return mask


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("fields", BANDS, ids=str)
def test_bands(lengths: tuple[int, int], fields: dict[str, Any]) -> None:
    mask = assert_covers(dense(*lengths, **fields))
    assert (mask.batches, mask.heads) == (1, 1)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", MASKS)
def test_masks(lengths: tuple[int, int], name: str) -> None:
    mask = assert_covers(dense(*lengths, mask=MASKS[name], window=(60, None)))
    reads = "documents" in name or "prefix" in name
    assert mask.batches == (2 if reads and 0 not in lengths else 1)


@pytest.mark.parametrize("block", [(1, 1), (128, 128), (16, 16)])
def test_other_blocks(block: tuple[int, int]) -> None:
    assert_covers(dense(40, 50, mask=(H % 2).equals(Q % 2) | (KV * 2 < Q), causal="bottom_right"), block)


def test_lists_have_the_dimensions_that_the_mask_reads() -> None:
    for tree, expected in (((Q + H) > KV, (1, 4)), ((Q + B) > KV, (2, 1)), ((Q + B * H) > KV, (2, 4)), (truth(True), (1, 1))):
        mask = assert_covers(dense(40, 50, mask=tree))
        assert (mask.batches, mask.heads) == expected


def test_a_mask_that_hides_all_lists_nothing() -> None:
    mask = assert_covers(dense(40, 50, mask=truth(False)))
    assert mask.keys_partial.count.sum() + mask.keys_full.count.sum() == 0


def test_chunks_make_the_same_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = dense(100, 90, mask=documents() | (KV > Q), causal="top_left")
    expected = lists_of(problem)
    monkeypatch.setattr(blockmask, "_CHUNK", 1000)
    actual = assert_covers(problem)
    assert torch.equal(expected.keys_full.index, actual.keys_full.index)


def test_what_captured_tensors_do_not_decide_is_remembered() -> None:
    plain, read = dense(40, 50, causal="top_left", mask=KV < Q + 9), dense(40, 50, mask=documents())
    assert lists_of(plain) is lists_of(plain)
    assert lists_of(plain) is not lists_of(dense(41, 50, causal="top_left", mask=KV < Q + 9))
    assert lists_of(read) is not lists_of(read)


def test_lists_of_one_stream_are_not_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one stream has not written yet, another reads without waiting: no key was visible in few runs of two calls at once."""
    problem = dense(40, 50, causal="top_left", mask=KV < Q + 9)
    first = lists_of(problem)
    monkeypatch.setattr(blockmask, "stream_of", lambda device: 7)
    assert lists_of(problem) is not first
    assert lists_of(problem) is lists_of(problem)


def test_a_capture_neither_uses_nor_keeps_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is replayed later has its own; a call after the capture must not read those, which have no values yet."""
    problem = dense(40, 51, causal="top_left", mask=KV < Q + 9)
    before = lists_of(problem)
    with monkeypatch.context() as capture:
        capture.setattr(blockmask, "captures", lambda device: True)
        within = lists_of(problem)
        assert within is not before
        assert lists_of(problem) is not within
    assert lists_of(problem) is before


def test_a_band_of_long_sequences_costs_no_mask() -> None:
    start = time.perf_counter()
    mask = block_mask(None, Band(high=0), {"seqlen_q": 1 << 20, "seqlen_k": 1 << 20}, {}, (1024, 1024), "cpu")
    assert time.perf_counter() - start < 5
    assert mask.keys_full.count[0, 0].tolist() == list(range(1024))


def test_a_block_has_queries_and_keys() -> None:
    with pytest.raises(BadArgument, match=r"block=\(0, 16\)"):
        block_mask(None, Band(), {"seqlen_q": 1, "seqlen_k": 1}, {}, (0, 16), "cpu")
