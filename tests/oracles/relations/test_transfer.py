"""Copies between device and host: equal bits, and memory of its own for each tensor of a launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import pytest
import torch

from attnfuzz.kernels.contract import Inputs, Outputs
from attnfuzz.kernels.problem import Needs, Problem
from attnfuzz.oracles.relations import transfer
from attnfuzz.oracles.relations.transfer import Move, moved


def done(steps: Generator[Move, list[torch.Tensor], Any]) -> Any:
    """Return the result of steps whose Moves are fulfilled one by one."""
    answer = None
    while True:
        try:
            move = steps.send(answer)
        except StopIteration as end:
            return end.value
        (answer,) = moved([move])


NAMES = ("q", "k", "v", "d_o", "cu_seqlens_q", "cu_seqlens_k")


def inputs_of(seqlens: tuple[int, ...], dtype: torch.dtype) -> Inputs:
    problem = Problem(seqlens_q=seqlens, seqlens_k=seqlens, dim_qk=3, dim_v=5)
    q, k, v, d_o = (torch.randn(sum(seqlens), 1, dim).to(dtype) for dim in (3, 3, 5, 5))
    ends = torch.tensor([0, *seqlens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Inputs(problem, q, k, v, d_o, ends, ends.clone(), max(seqlens), max(seqlens))


@pytest.mark.parametrize("stride", [0, 1, 3])
def test_one_element_has_its_bytes_whatever_its_stride(stride: int) -> None:
    """An expanded dO of one row of one column: torch takes it for contiguous, and refuses a view as bytes."""
    base = torch.arange(8, dtype=torch.float32).to(torch.bfloat16)
    one = base.as_strided((1, 1, 1), (stride,) * 3, 2)
    assert torch.equal(transfer.flat_bytes(one), torch.tensor([2.0], dtype=torch.bfloat16).view(torch.uint8))
    several = base.as_strided((2, 2), (stride, stride))
    assert torch.equal(transfer.flat_bytes(several).view(torch.bfloat16), several.reshape(-1))


def test_inputs_and_outputs_arrive_bit_by_bit() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for seqlens in ((3, 0), (1,), (0,)):
            inputs = inputs_of(seqlens, dtype)
            inputs.q.view(-1)[:1] = torch.nan
            copy = done(transfer.inputs_on_host(inputs))
            for name in NAMES:
                before, after = getattr(inputs, name), getattr(copy, name)
                assert (before.dtype, before.shape) == (after.dtype, after.shape)
                assert torch.equal(before.view(torch.int8), after.view(torch.int8))
                assert not before.numel() or before.data_ptr() != after.data_ptr()


def test_outputs_of_launches_arrive_with_other_numbers() -> None:
    problem = Problem(seqlens_q=(3,), seqlens_k=(3,), dim_qk=3, dim_v=5, needs=Needs(outputs=("o", "dv")))
    strided = torch.randn(5, 1, 3).transpose(0, 2)
    first = Outputs(o=strided.half(), lse=torch.randn(1, 3), dq=torch.ones(1), dv=torch.randn(3, 1, 5).half())
    second = dataclasses.replace(first, o=first.o * 2, lse=None)
    numbers = [torch.arange(3), torch.arange(1)]
    (one, two), values = done(transfer.outputs_on_host([(problem, first), (problem, second)], numbers))
    assert torch.equal(one.o, first.o)
    assert torch.equal(two.o, second.o)
    assert torch.equal(two.dv, first.dv)
    assert torch.equal(one.lse, first.lse), "limits of other outputs are made of it"
    assert (two.lse, one.dq, one.dk) == (None, None, None)
    assert [each.tolist() for each in values] == [[0, 1, 2], [0]]


def test_launches_have_memory_of_their_own_or_that_of_the_case() -> None:
    original = inputs_of((3, 2), torch.bfloat16)
    copy = done(transfer.inputs_on_host(original))
    changed = dataclasses.replace(copy, k=copy.k * 2, v=copy.v + 1)
    whole, other = done(transfer.launches_on_device([copy, changed], copy, original))
    assert all(getattr(whole, name) is getattr(original, name) for name in NAMES)
    assert other.q is original.q
    assert torch.equal(other.k, original.k * 2)
    assert torch.equal(other.v, original.v + 1)
    storages = {each.untyped_storage().data_ptr() for each in (other.k, other.v, changed.k, changed.v)}
    assert len(storages) == 4
    assert all(each.storage_offset() == 0 and each.untyped_storage().nbytes() == each.nbytes for each in (other.k, other.v))


def test_launches_that_change_nothing_send_nothing(monkeypatch) -> None:
    original = inputs_of((3,), torch.float16)
    copy = done(transfer.inputs_on_host(original))
    monkeypatch.setattr(transfer, "_sent", None)
    (only,) = done(transfer.launches_on_device([copy], copy, original))
    assert only.q is original.q


def test_elements_that_lie_apart_are_copied() -> None:
    """LSE of one head within padded rows, as memory-efficient attention returns it, and O with its heads outermost."""
    problem = Problem(seqlens_q=(5,), seqlens_k=(5,), dim_qk=16, dim_v=16, dtype="float16")
    wide = torch.arange(5 * 32, dtype=torch.float32).reshape(5, 32)
    outputs = Outputs(
        o=torch.arange(80, dtype=torch.float32).to(torch.float16).reshape(1, 5, 16).transpose(0, 1),
        lse=wide[None, :, 0],
        dq=torch.ones(5, 1, 16, dtype=torch.float16),
        dk=torch.ones(5, 1, 16, dtype=torch.float16),
        dv=torch.ones(5, 1, 16, dtype=torch.float16),
    )
    [copied], [other] = done(transfer.outputs_on_host([(problem, outputs)], [wide[:, 3]]))
    assert torch.equal(copied.lse, wide[None, :, 0])
    assert torch.equal(copied.o, outputs.o)
    assert torch.equal(other, wide[:, 3])
