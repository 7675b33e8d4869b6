"""Recipe -> tensors: in the right shapes, slack and memory layouts; and the poison round them."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from attnfuzz.harness.trial.bands import Bands, memory
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.launch import copied
from attnfuzz.harness.trial.noise import few_hashed, hashed
from attnfuzz.harness.trial.poison import PoisonEmpty
from attnfuzz.kernels.problem import Layout, Needs, Problem
from attnfuzz.strategies.case import Recipe, SinkValues

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


@pytest.mark.parametrize("seed", [0, 7, 2**40])
def test_few_hashed_numbers_are_those_of_torch(seed: int) -> None:
    for count in (0, 1, 33):
        assert few_hashed(seed, "some", count) == hashed(seed, "some", (count,), "cpu").tolist()


SINKS: dict[SinkValues, list[float]] = {
    "mixed": [-512.0, 33.0, 0.0, -2.625, -11008.0],
    "moderate": [3.875, -0.875, -2.375, -2.625, -1.25],
    "zero": [0.0, 0.0, 0.0, 0.0, 0.0],
    "large": [71.0, 33.0, 21.0, 19.0, 30.0],
    "small": [-512.0, -10240.0, -13312.0, -13824.0, -11008.0],
}


@pytest.mark.parametrize("kind", SINKS)
def test_sinks_of_a_seed_stay_the_same(kind: SinkValues) -> None:
    problem = Problem(seqlens_q=(1,), seqlens_k=(1,), heads=5, dim_qk=8, dim_v=8, sinks=True)
    sinks = materialise(problem, Recipe(seed=7, sinks=kind), "cpu").sinks
    assert sinks is not None
    assert sinks.dtype == torch.float32
    assert sinks.tolist() == SINKS[kind]


# --- memory layouts

DENSE = Problem(seqlens_q=(5, 5), seqlens_k=(5, 5), heads=4, kv_heads=2, dim_qk=8, dim_v=6, packing="dense", slack_q=1, slack_k=1)
RAGGED = Problem(seqlens_q=(3, 0, 5), seqlens_k=(3, 0, 5), heads=4, kv_heads=2, dim_qk=8, dim_v=6, slack_q=1, slack_k=1)
PACKED = Layout(packed=True, offset=3, pitch=5)
# What is laid out how; then one tensor, its strides and its offset.
LAID_OUT: dict[str, tuple[Problem, dict[str, Layout], str, tuple[int, ...], int]] = {
    "offset": (RAGGED, {"layout_k": Layout(offset=3)}, "k", (16, 8, 1), 3),
    "pitch": (RAGGED, {"layout_q": Layout(pitch=7)}, "q", (39, 8, 1), 0),
    "heads outermost": (RAGGED, {"layout_v": Layout(order="htd")}, "v", (6, 54, 1), 0),
    "heads outermost, pitch and offset": (RAGGED, {"layout_v": Layout(order="htd", pitch=2, offset=4)}, "v", (8, 72, 1), 4),
    "dO other than O": (RAGGED, {"layout_do": Layout(order="htd")}, "d_o", (6, 54, 1), 0),
    "one head for all": (RAGGED, {"layout_k": Layout(expanded_heads=True)}, "k", (8, 0, 1), 0),
    "one head for all, padded": (RAGGED, {"layout_v": Layout(expanded_heads=True, pitch=3, offset=1)}, "v", (9, 0, 1), 1),
    "a constant dO": (RAGGED, {"layout_do": Layout(expanded=True, offset=2)}, "d_o", (0, 0, 0), 2),
    "packed, q": (RAGGED, dict.fromkeys(("layout_q", "layout_k", "layout_v"), PACKED), "q", (65, 8, 1), 3),
    "packed, k": (RAGGED, dict.fromkeys(("layout_q", "layout_k", "layout_v"), PACKED), "k", (65, 8, 1), 35),
    "packed, v": (RAGGED, dict.fromkeys(("layout_q", "layout_k", "layout_v"), PACKED), "v", (65, 6, 1), 51),
    "packed without q": (RAGGED, dict.fromkeys(("layout_k", "layout_v"), Layout(packed=True)), "v", (28, 6, 1), 16),
    "dense, pitch": (DENSE, {"layout_q": Layout(pitch=7)}, "q", (234, 39, 8, 1), 0),
    "dense, heads before rows": (DENSE, {"layout_k": Layout(order="bhsd")}, "k", (96, 8, 48, 1), 0),
    "dense, heads before padded rows": (DENSE, {"layout_k": Layout(order="bhsd", pitch=8)}, "k", (192, 16, 96, 1), 0),
    "dense, batch within rows": (DENSE, {"layout_k": Layout(order="sbhd", pitch=4)}, "k", (20, 40, 8, 1), 0),
    "dense, one head for all": (DENSE, {"layout_v": Layout(expanded_heads=True, order="bhsd")}, "v", (36, 6, 0, 1), 0),
    "dense, packed": (DENSE, dict.fromkeys(("layout_k", "layout_v"), PACKED), "v", (198, 33, 6, 1), 19),
    "dense, a constant dO": (DENSE, {"layout_do": Layout(expanded=True)}, "d_o", (0, 0, 0, 0), 0),
}


def whole(x: torch.Tensor) -> torch.Tensor:
    """All elements of a tensor's allocation."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", LAID_OUT)
def test_strides_offset_values_and_gaps_of_a_layout(name: str, dtype: str) -> None:
    problem, layouts, tensor, strides, offset = LAID_OUT[name]
    problem = replace(problem, dtype=dtype)
    plain, laid_out = (materialise(replace(problem, **changed), Recipe(do_scale=2.0), "cpu") for changed in ({}, layouts))
    for each in TENSORS:
        expected, got = getattr(plain, each), getattr(laid_out, each)
        assert got.shape == expected.shape
        layout = layouts.get(f"layout_{each.replace('_', '')}", Layout())
        if layout.expanded_heads:
            expected = expected[..., :1, :].expand_as(expected)
        if layout.expanded:
            assert (got == 2.0).all()
        else:
            assert torch.equal(bits(expected), bits(got))
    got = getattr(laid_out, tensor)
    assert (got.stride(), got.storage_offset()) == (strides, offset)
    gaps = bits(whole(got).clone())
    for each in TENSORS:
        if getattr(laid_out, each).untyped_storage().data_ptr() == got.untyped_storage().data_ptr():
            other = getattr(laid_out, each)
            gaps.as_strided(other.shape, other.stride(), other.storage_offset()).zero_()
    gaps = gaps[gaps != 0].view(got.dtype)
    assert gaps.isnan().all()
    layout = layouts[f"layout_{tensor.replace('_', '')}"]
    assert len(gaps) >= layout.offset + layout.pitch * 8


def test_packed_tensors_share_an_allocation() -> None:
    inputs = materialise(replace(RAGGED, layout_q=PACKED, layout_k=PACKED, layout_v=PACKED), Recipe(), "cpu")
    assert len({getattr(inputs, name).untyped_storage().data_ptr() for name in ("q", "k", "v")}) == 1


@pytest.mark.parametrize("name", LAID_OUT)
def test_what_the_kernel_gets_lies_in_memory_as_what_was_made(name: str) -> None:
    problem, layouts, _, _, _ = LAID_OUT[name]
    inputs, bands = materialise(replace(problem, **layouts), Recipe(), "cpu"), Bands()
    copies = copied(inputs, bands)
    for each in TENSORS:
        before, after = getattr(inputs, each), getattr(copies, each)
        assert after.stride() == before.stride()
        assert after.untyped_storage().data_ptr() != before.untyped_storage().data_ptr()
        assert after.storage_offset() * after.element_size() % 256 == before.storage_offset() * before.element_size() % 256
        assert torch.equal(memory(before), memory(after))
    shared = [{getattr(x, each).untyped_storage().data_ptr() for each in ("q", "k", "v")} for x in (inputs, copies)]
    assert len(shared[0]) == len(shared[1])
    assert bands.broken() is None


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("offset", [0, 1, 7, 40])
def test_a_write_on_either_side_of_a_copy_is_found(offset: int, size: int) -> None:
    for at, side in ((-1, "before the start"), (size, "past the end")):
        bands = Bands()
        copy = bands.copies({"q": torch.zeros(64, dtype=torch.float16)[offset : offset + size]}, "its input")["q"]
        assert bands.broken() is None
        whole(copy)[copy.storage_offset() + at] = 0
        assert bands.broken() == f"1 2-byte words were written {side} of its input q ({size},) torch.float16"


def test_a_write_past_packed_inputs_names_them_all() -> None:
    inputs, bands = materialise(replace(RAGGED, layout_k=PACKED, layout_v=PACKED), Recipe(), "cpu"), Bands()
    k = copied(inputs, bands).k
    whole(k)[k.storage_offset() - 1] = 0
    assert bands.broken() == "1 2-byte words were written before the start of its input k, v in one allocation"


def test_poison_fills_every_kind_of_empty() -> None:
    with PoisonEmpty(Bands()):
        x = torch.empty(3)
        empties = [
            x,
            torch.empty_like(x),
            x.new_empty(2, 2),
            torch.empty_strided((2, 3), (3, 1)),
            torch.empty(2, dtype=torch.float16),
        ]
        integers = torch.empty(4, dtype=torch.int32)
        kept = [torch.zeros(3), torch.ones(2), torch.full((2,), 5.0)]
    assert all(torch.isnan(each).all() for each in empties)
    assert (integers == torch.iinfo(torch.int32).max).all()
    assert [each.tolist() for each in kept] == [[0, 0, 0], [1, 1], [5, 5]]
    assert torch.empty(0).numel() == 0
