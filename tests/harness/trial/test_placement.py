"""Values placed by the kernel of a GPU, compiled for the host, are bit by bit those that torch's operations place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.fused_c import Compiled, generated

from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.placement import GAP, Placement
from attnfuzz.kernels.contract import Inputs
from attnfuzz.kernels.problem import Layout, Needs, Problem
from attnfuzz.strategies.case import Recipe

TENSORS = ("q", "k", "v", "d_o", "cu_seqlens_q", "cu_seqlens_k", "d_lse")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The compiler of generated code for the host."""
    return Compiled(tmp_path_factory.mktemp("placement"))


@pytest.fixture
def by_kernel(backend: Compiled) -> Iterator[Compiled]:
    """Generated code in place of torch's operations."""
    with generated(backend):
        yield backend


def _memory(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


def _same(one: Inputs, other: Inputs) -> None:
    for name in TENSORS:
        a, b = getattr(one, name), getattr(other, name)
        if a is None:
            assert b is None
            continue
        form = [(x.shape, x.stride(), x.dtype, x.storage_offset()) for x in (a, b)]
        assert form[0] == form[1], name
        # All of the allocation: gaps between rows, and what lies before the first, are NaN of one pattern.
        assert torch.equal(_memory(a), _memory(b)), name


PROBLEMS = {
    "ragged, slack rows": Problem(seqlens_q=(3, 0, 5), seqlens_k=(4, 2, 0), heads=4, kv_heads=2, dim_qk=16, dim_v=24, slack_q=2),
    "dense, slack rows": Problem(
        seqlens_q=(3, 3), seqlens_k=(5, 5), heads=2, dim_qk=8, dim_v=8, packing="dense", slack_k=3, dtype="bfloat16"
    ),
    "float32": Problem(seqlens_q=(7,), seqlens_k=(9,), dim_qk=8, dim_v=4, dtype="float32"),
    "no query": Problem(seqlens_q=(0,), seqlens_k=(3,), dim_qk=8, dim_v=8),
    "orders, pitch, offset": Problem(
        seqlens_q=(3, 3), seqlens_k=(5, 5), heads=2, dim_qk=8, dim_v=8, packing="dense",
        layout_q=Layout(order="bhsd", offset=3, pitch=5), layout_k=Layout(order="sbhd"), layout_do=Layout(pitch=2, offset=1),
    ),
    "one head for all": Problem(
        seqlens_q=(3,), seqlens_k=(5,), heads=4, kv_heads=2, dim_qk=8, dim_v=8, layout_v=Layout(expanded_heads=True, offset=2)
    ),
    "packed": Problem(
        seqlens_q=(4, 3), seqlens_k=(4, 3), heads=2, kv_heads=2, dim_qk=8, dim_v=8,
        layout_q=Layout(packed=True, pitch=3), layout_k=Layout(packed=True, pitch=3), layout_v=Layout(packed=True, pitch=3),
    ),
    "dO of one element": Problem(seqlens_q=(3,), seqlens_k=(5,), dim_qk=8, dim_v=8, layout_do=Layout(expanded=True, offset=4)),
    "dLSE": Problem(seqlens_q=(3, 4), seqlens_k=(5, 2), heads=2, dim_qk=8, dim_v=8, slack_q=1, needs=Needs(dlse=True)),
}  # fmt: skip


@pytest.mark.parametrize("pattern", ["normal", "ties", "constant_v", "lognormal", "subnormal", "near_overflow"])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_inputs_are_those_of_torch(problem: Problem, pattern: str, backend: Compiled) -> None:
    recipe = Recipe(seed=5, pattern=pattern, q_scale=4.0, v_scale=2.0**17, do_scale=0.125)
    by_torch = materialise(problem, recipe, "cpu")
    backend.calls.clear()
    with generated(backend):
        _same(by_torch, materialise(problem, recipe, "cpu"))
    assert backend.calls["placed_values"] == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_rounding_is_that_of_torch(dtype: torch.dtype, by_kernel: Compiled) -> None:
    bits = torch.arange(0, 1 << 16, dtype=torch.int64)
    # Each upper half of a float32, with a rest below, at and above half of the last place of either dtype.
    rests = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    words = ((bits[:, None] << 16) | rests).flatten()
    x = (words - (words >> 31 << 32)).to(torch.int32).view(torch.float32)
    x = x[x.isfinite()]
    largest = torch.finfo(dtype).max
    expected = x.clamp(-largest, largest).to(dtype)
    placement = Placement(torch.device("cpu"))
    got = placement.values(torch.empty((len(x), 1, 1), dtype=dtype), x[:, None, None])
    placement.finish()
    whole = torch.int32 if dtype is torch.float32 else torch.int16
    assert torch.equal(got.flatten().view(whole), expected.view(whole))


def test_more_tensors_than_one_launch_takes(by_kernel: Compiled) -> None:
    by_kernel.calls.clear()
    placement, source = Placement(torch.device("cpu")), torch.arange(6, dtype=torch.float32).view(3, 1, 2)
    every = [placement.values(torch.empty(4, 1, 2), source, float(number)) for number in range(40)]
    placement.finish()
    assert all(torch.equal(each[:3], source * number) and each[3:].isnan().all() for number, each in enumerate(every))
    assert by_kernel.calls["placed_values"] == 3


def test_gaps_are_filled_before_values(by_kernel: Compiled) -> None:
    placement = Placement(torch.device("cpu"))
    flat = placement.memory(12, torch.float16)
    placement.values(flat.as_strided((3, 1, 2), (4, 2, 1), 1), torch.ones(3, 1, 2))
    placement.finish()
    row = [GAP, 0x3C00, 0x3C00, GAP]
    assert flat.view(torch.int16).tolist() == row * 3
