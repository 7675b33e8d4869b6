"""Slots: their masks, indices and frames are those of each batch alone."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from msgspec.structs import replace

from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels.problem import Needs, Problem
from attnfuzz.oracles.attention import sequences, visible_keys
from attnfuzz.oracles.slots import Slots, flat, grouped, sinks_of
from attnfuzz.strategies.case import Recipe

CPU = torch.device("cpu")


def problems(count: int, seed: int) -> list[Problem]:
    generator = random.Random(seed)
    drawn = []
    for _ in range(count):
        dense = generator.random() < 0.3
        lengths = [(generator.randint(0, 9), generator.randint(0, 9)) for _ in range(generator.randint(1, 3))]
        lengths = [lengths[0]] * len(lengths) if dense else lengths
        kv_heads = generator.randint(1, 3)
        window = (generator.choice([None, 0, 1, 3]), generator.choice([None, 0, 2]))
        drawn.append(
            Problem(
                seqlens_q=tuple(n for n, _ in lengths), seqlens_k=tuple(n for _, n in lengths),
                heads=kv_heads * generator.randint(1, 3), kv_heads=kv_heads, dim_qk=4, dim_v=3,
                packing="dense" if dense else "ragged",
                slack_q=generator.choice([0, 2]), slack_k=generator.choice([0, 1]),
                causal=generator.choice([None, "bottom_right", "top_left"]), window=generator.choice([None, window]),
                softmax_scale=generator.choice([None, 0.0, -2.0]), needs=Needs(dlse=generator.random() < 0.5),
            )
        )  # fmt: skip
    return drawn


@pytest.mark.parametrize("chunk", [1, 60, 1 << 16])
def test_a_frame_holds_the_tensors_masks_and_scales_of_its_slots(chunk: int) -> None:
    batches = [materialise(p, Recipe(seed=at), "cpu") for at, p in enumerate(problems(40, 1))]
    slots = Slots([each.problem for each in batches], chunk, CPU)
    x = flat(slots, batches)
    assert x.d_lse is not None
    taken = [frame.take(x) for frame in slots.frames]
    seen = 0
    for number, inputs in enumerate(batches):
        p = inputs.problem
        for data in sequences(inputs):
            n_q, n_k = data.q.shape[1], data.k.shape[1]
            for kv in range(p.kv_heads if n_q and n_k else 0):
                at, z = slots.place[slots.number(number, data.index, kv)]
                frame, loaded, heads = slots.frames[at], taken[at], slice(kv * p.groups, (kv + 1) * p.groups)
                rows = p.groups * n_q
                for own, got in ((data.q[heads].flatten(0, 1), loaded.q), (data.d_o[heads].flatten(0, 1), loaded.d_o)):
                    assert torch.equal(got[z, :rows], own.double())
                    assert not got[z, rows:].any()
                for own, got in ((data.k[kv], loaded.k), (data.v[kv], loaded.v)):
                    assert torch.equal(got[z, :n_k], own.double())
                    assert not got[z, n_k:].any()
                assert loaded.d_lse is not None
                own_lse = torch.zeros(rows) if data.d_lse is None else data.d_lse[heads].flatten()
                assert torch.equal(loaded.d_lse[z, :rows, 0], own_lse.double())
                visible = frame.visible()[z]
                assert torch.equal(visible[:rows, :n_k], visible_keys(p, data.index).repeat(p.groups, 1)), p
                assert int(visible.sum()) == int(visible[:rows, :n_k].sum())
                assert (float(frame.scale[z]), float(frame.terms_q[z]), float(frame.n_k[z])) == (p.scale, rows, n_k)
                seen += 1
    assert seen == len(slots.place) > 60


def test_rows_and_keys_are_stored_where_a_batch_has_them() -> None:
    batches = [materialise(p, Recipe(seed=at), "cpu") for at, p in enumerate(problems(12, 2))]
    slots = Slots([each.problem for each in batches], 1 << 16, CPU)
    x = flat(slots, batches)
    for number, inputs in enumerate(batches):
        p = inputs.problem
        rows, keys = (torch.cat([y for each in sequences(inputs) for y in [getattr(each, name)]], 1) for name in ("q", "k"))
        assert torch.equal(x.q[slots.row_starts[number] : slots.row_starts[number + 1]].view(p.heads, p.total_q, 4), rows)
        assert torch.equal(x.k[slots.key_starts[number] : slots.key_starts[number + 1]].view(p.kv_heads, p.total_k, 4), keys)
        assert (slots.batch_of_row == number).sum() == p.heads * p.total_q


@pytest.mark.parametrize("chunk", [60, 1 << 16])
def test_with_sinks_the_last_key_of_a_frame_is_the_sink_of_each_row(chunk: int) -> None:
    own = [replace(p, sinks=at % 3 > 0) for at, p in enumerate(problems(40, 3))]
    batches = [materialise(p, Recipe(seed=at, sinks="mixed" if p.sinks else "moderate"), "cpu") for at, p in enumerate(own)]
    sinks = sinks_of(batches)
    assert sinks is not None
    slots = Slots(own, chunk, CPU, sinks=sinks)
    x = flat(slots, batches)
    for number, inputs in enumerate(batches):
        p = inputs.problem
        for data in sequences(inputs):
            n_q, n_k = data.q.shape[1], data.k.shape[1]
            for kv in range(p.kv_heads if n_q and n_k else 0):
                at, z = slots.place[slots.number(number, data.index, kv)]
                frame = slots.frames[at]
                assert frame.sinks is not None
                loaded, visible = frame.take(x), frame.visible()[z]
                assert torch.equal(loaded.k[z, :n_k], data.k[kv].double())
                assert not loaded.k[z, n_k:].any()
                assert not loaded.v[z, n_k:].any()
                of_head = inputs.sinks[kv * p.groups : (kv + 1) * p.groups] if inputs.sinks is not None else None
                for row in range(frame.shape[1]):
                    head, i = divmod(row, frame.shape[1] if of_head is None else n_q)
                    real = of_head is not None and head < p.groups and i < n_q
                    expected = float(of_head[head]) if real and of_head is not None else -torch.inf
                    assert float(frame.sinks[z, row]) == expected
                    assert bool(visible[row, -1]) == (expected > -torch.inf)
                assert torch.equal(visible[: p.groups * n_q, :n_k], visible_keys(p, data.index).repeat(p.groups, 1))
                assert float(frame.n_k[z]) == n_k + p.sinks
        heads = slice(*slots.head_starts[number : number + 2])
        assert torch.equal(slots.batch_of_head[heads], torch.full((p.heads,), number))
        of_rows = slots.head_of_row[slice(*slots.row_starts[number : number + 2])]
        assert torch.equal(of_rows, (torch.arange(p.heads) + heads.start).repeat_interleave(p.total_q))


def padded(sizes: list[tuple[int, int]], group: list[int]) -> int:
    return max(sizes[n][0] for n in group) * max(sizes[n][1] for n in group) * len(group)


def cost(sizes: list[tuple[int, int]], group: list[int], around: int) -> int:
    return padded(sizes, group) + around * len(group) * sum(max(sizes[n][side] for n in group) for side in (0, 1))


@pytest.mark.parametrize(("around", "most"), [(0, 40), (128, 60)])
def test_every_slot_is_in_one_group_and_no_merge_of_two_is_cheaper(around: int, most: int) -> None:
    generator = random.Random(3)
    sizes = [(generator.choice([1, 5, 40, 300]), generator.choice([1, 7, 33, 200])) for _ in range(300)]
    chunk = 1 << 16
    groups = grouped(sizes, chunk, around)
    assert sorted(number for group in groups for number in group) == list(range(300))
    assert all(padded(sizes, group) <= chunk for group in groups)
    for one, other in itertools.combinations(groups, 2):
        more = cost(sizes, one + other, around) - cost(sizes, one, around) - cost(sizes, other, around)
        assert padded(sizes, one + other) > chunk or more >= chunk // 2
    assert len(groups) < most


def test_a_slot_larger_than_a_chunk_is_a_group_of_its_own() -> None:
    assert grouped([(1000, 1000), (2, 2)], 1 << 16) == [[0], [1]]
