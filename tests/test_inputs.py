"""Recipe -> tensors: in the right shapes, slack and memory layouts; and the poison round them."""

from __future__ import annotations

import pytest
import torch

from attnfuzz.harness.inputs import materialise
from attnfuzz.harness.poison import Bands, PoisonEmpty
from attnfuzz.kernels.problem import BadArgument, Layout, Needs, Problem
from attnfuzz.strategies.case import Recipe

PROBLEM = Problem(seqlens_q=(3, 0, 5), seqlens_k=(2, 4, 9), heads=4, kv_heads=2, dim_qk=8, dim_v=5, slack_q=1, slack_k=2)
TENSORS = ("q", "k", "v", "d_o")


def test_shapes_and_slack() -> None:
    inputs = materialise(PROBLEM, Recipe(), "cpu")
    assert inputs.q.shape == (9, 4, 8)
    assert inputs.k.shape == (17, 2, 8)
    assert inputs.v.shape == (17, 2, 5)
    assert inputs.d_o.shape == (9, 4, 5)
    assert inputs.cu_seqlens_q.tolist() == [0, 3, 3, 8]
    assert inputs.cu_seqlens_k.dtype == torch.int32
    assert (inputs.max_seqlen_q, inputs.max_seqlen_k) == (5, 9)
    assert torch.isnan(inputs.q[8:]).all()
    assert torch.isnan(inputs.v[15:]).all()
    assert all(torch.isfinite(getattr(inputs, name)[:8]).all() for name in TENSORS)


def test_dense_has_the_ragged_values() -> None:
    ragged = Problem(seqlens_q=(3, 3), seqlens_k=(4, 4), dim_qk=8, dim_v=8, heads=2)
    dense = Problem(
        seqlens_q=(3, 3), seqlens_k=(4, 4), dim_qk=8, dim_v=8, heads=2, packing="dense", slack_k=2, needs=Needs(dlse=True)
    )
    a, b = materialise(ragged, Recipe(), "cpu"), materialise(dense, Recipe(), "cpu")
    assert b.k.shape == (2, 6, 1, 8)
    assert torch.equal(a.k.reshape(2, 4, 1, 8), b.k[:, :4])
    assert torch.isnan(b.k[:, 4:]).all()
    assert b.d_lse.shape == (2, 2, 3)


def test_values_are_clamped_to_the_dtype() -> None:
    problem = Problem(seqlens_q=(4,), seqlens_k=(4,), dim_qk=8, dim_v=8)
    inputs = materialise(problem, Recipe(v_scale=2.0**20), "cpu")
    assert inputs.v.abs().max() == torch.finfo(torch.float16).max


def test_a_layout_that_cannot_be_built_is_refused() -> None:
    problem = Problem(seqlens_q=(4,), seqlens_k=(4,), dim_qk=8, dim_v=8, layout_k=Layout(offset=3))
    with pytest.raises(BadArgument, match="layout_k"):
        materialise(problem, Recipe(), "cpu")


def test_poison_fills_every_kind_of_empty() -> None:
    with PoisonEmpty(Bands()):
        x = torch.empty(3)
        made = [
            x,
            torch.empty_like(x),
            x.new_empty(2, 2),
            torch.empty_strided((2, 3), (3, 1)),
            torch.empty(2, dtype=torch.float16),
        ]
        integers = torch.empty(4, dtype=torch.int32)
        kept = [torch.zeros(3), torch.ones(2), torch.full((2,), 5.0)]
    assert all(torch.isnan(each).all() for each in made)
    assert (integers == torch.iinfo(torch.int32).max).all()
    assert [each.tolist() for each in kept] == [[0, 0, 0], [1, 1], [5, 5]]
    assert torch.empty(0).numel() == 0
