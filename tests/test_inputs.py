"""Recipe -> tensors: the same bits always, in the right shapes, with the values each pattern promises."""

from __future__ import annotations

import hashlib
import itertools

import pytest
import torch

from attnfuzz.harness.inputs import materialise, noise
from attnfuzz.harness.poison import Bands, PoisonEmpty
from attnfuzz.kernels.problem import BadArgument, Layout, Needs, Problem
from attnfuzz.strategies.case import PATTERNS, Recipe

PROBLEM = Problem(seqlens_q=(3, 0, 5), seqlens_k=(2, 4, 9), heads=4, kv_heads=2, dim_qk=8, dim_v=5, slack_q=1, slack_k=2)
TENSORS = ("q", "k", "v", "d_o")


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(x.cpu().contiguous().view(torch.uint8).numpy().tobytes() for x in tensors)).hexdigest()[:16]


def test_noise_is_pinned() -> None:
    """These bits are part of every case file: a change of them makes all stored Cases other Cases."""
    assert digest(noise(7, "q", (3, 5), "cpu")) == PINNED_NOISE
    inputs = materialise(PROBLEM, Recipe(seed=3), "cpu")
    assert digest(inputs.q, inputs.k, inputs.v, inputs.d_o) == PINNED_INPUTS


PINNED_NOISE, PINNED_INPUTS = "b9fdec114e27d0a1", "4a73599d667ebf30"


def test_noise_depends_on_seed_name_and_index_alone() -> None:
    torch.manual_seed(1)
    first = noise(7, "q", (4, 6), "cpu")
    torch.manual_seed(2)
    assert torch.equal(first, noise(7, "q", (4, 6), "cpu"))
    assert torch.equal(first.flatten()[:10], noise(7, "q", (10,), "cpu"))
    assert not torch.equal(first, noise(8, "q", (4, 6), "cpu"))
    assert not torch.equal(first, noise(7, "k", (4, 6), "cpu"))


def test_noise_is_close_to_normal() -> None:
    x = noise(1, "q", (200_000,), "cpu")
    assert abs(x.mean().item()) < 0.01
    assert abs(x.std().item() - 0.8165) < 0.005
    assert x.abs().max() < 4
    assert abs(torch.corrcoef(torch.stack([x[:-1], x[1:]]))[0, 1].item()) < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_cpu_and_gpu_have_the_same_bits(pattern: str, dtype: str) -> None:
    problem = Problem(
        seqlens_q=(33, 0, 70),
        seqlens_k=(65, 7, 40),
        heads=3,
        dim_qk=40,
        dim_v=72,
        dtype=dtype,
        needs=Needs(dlse=True),
        kv_heads=1,
    )
    for scale in (1.0, 0.0625, 16.0):
        recipe = Recipe(pattern=pattern, seed=5, q_scale=scale, v_scale=scale)
        here, there = materialise(problem, recipe, "cpu"), materialise(problem, recipe, "cuda")
        for name in (*TENSORS, "d_lse"):
            assert digest(getattr(here, name)) == digest(getattr(there, name)), name


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


@pytest.mark.parametrize(("pattern", "dtype"), list(itertools.product(PATTERNS, ("float16", "bfloat16", "float32"))))
def test_every_pattern_is_finite_and_scales_exactly(pattern: str, dtype: str) -> None:
    problem = Problem(seqlens_q=(20,), seqlens_k=(30,), dim_qk=8, dim_v=8, dtype=dtype)
    plain, scaled = (materialise(problem, Recipe(pattern=pattern, q_scale=scale), "cpu") for scale in (1.0, 2.0))
    assert all(torch.isfinite(getattr(plain, name)).all() for name in TENSORS)
    if pattern != "subnormal":
        assert torch.equal(plain.q * 2, scaled.q)


def test_patterns_keep_their_promise() -> None:
    problem = Problem(seqlens_q=(40,), seqlens_k=(40,), dim_qk=16, dim_v=16, dtype="float32")
    make = {pattern: materialise(problem, Recipe(pattern=pattern, seed=2), "cpu") for pattern in PATTERNS}
    score = {pattern: (x.q[:, 0] @ x.k[:, 0].T) / 4 for pattern, x in make.items()}
    assert (make["constant_v"].v == make["constant_v"].v[:1]).all()
    assert (make["ties"].k == make["ties"].k[:1]).all()
    assert make["zeros"].q.abs().max() == 0
    assert score["large_logits"].abs().max() > 30
    assert score["negative"].max() < -8
    assert score["falling"][:, :8].mean() > score["falling"][:, 32:].mean() + 1
    assert score["rising"][:, :8].mean() < score["rising"][:, 32:].mean() - 1
    assert make["outlier"].v.abs().amax((1, 2)).max() > 20
    needle = make["needle"].v[:, 0]
    assert (needle.argmax(1) == torch.arange(40) % 16).all()
    assert needle.unique(dim=0).shape[0] == 40
    v, d_o = make["do_orthogonal"].v[:, 0], make["do_orthogonal"].d_o[:, 0]
    cosine = torch.nn.functional.cosine_similarity(v.mean(0), d_o.mean(0), dim=0)
    assert abs(cosine) < 0.1
    v, d_o = make["do_parallel"].v[:, 0], make["do_parallel"].d_o[:, 0]
    assert torch.nn.functional.cosine_similarity(v.mean(0), d_o.mean(0), dim=0) > 0.9
    half = materialise(Problem(seqlens_q=(9,), seqlens_k=(9,), dim_qk=8, dim_v=8), Recipe(pattern="subnormal"), "cpu")
    assert (half.v.abs() < torch.finfo(torch.float16).tiny).any()


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
