"""`torch.reference_cpu` against float64: dense and ragged, grouped heads, empty sequences, slack rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from attnfuzz.kernels.contract import Config, Inputs, Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import OUTPUT_NAMES, Problem
from attnfuzz.kernels.torch.reference_cpu import KERNEL

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

if reason := KERNEL.unavailable("cpu"):
    pytest.skip(reason, allow_module_level=True)

RAGGED: dict[str, Any] = {
    "seqlens_q": (17, 0, 33, 5, 140),
    "seqlens_k": (30, 19, 33, 0, 7),
    "heads": 6,
    "kv_heads": 2,
    "slack_q": 3,
    "slack_k": 5,
}
DENSE: dict[str, Any] = {"seqlens_q": (33, 33), "seqlens_k": (50, 50), "heads": 4, "kv_heads": 2, "packing": "dense"}


def inputs_of(problem: Problem) -> Inputs:
    """Random tensors whose slack rows are NaN."""
    generator = torch.Generator().manual_seed(2)
    dense = problem.packing == "dense"

    def rows(lengths: tuple[int, ...], slack: int, heads: int, dim: int) -> torch.Tensor:
        used = lengths[0] if dense else sum(lengths)
        shape = (problem.batch,) * dense + (used + slack, heads, dim)
        tensor = torch.randn(shape, generator=generator)
        tensor[..., used:, :, :] = math.nan
        return tensor

    def cu_seqlens(lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)

    return Inputs(
        problem=problem,
        q=rows(problem.seqlens_q, problem.slack_q, problem.heads, problem.dim_qk),
        k=rows(problem.seqlens_k, problem.slack_k, problem.kv_heads, problem.dim_qk),
        v=rows(problem.seqlens_k, problem.slack_k, problem.kv_heads, problem.dim_v),
        d_o=rows(problem.seqlens_q, problem.slack_q, problem.heads, problem.dim_v),
        cu_seqlens_q=cu_seqlens(problem.seqlens_q),
        cu_seqlens_k=cu_seqlens(problem.seqlens_k),
        max_seqlen_q=max(problem.seqlens_q),
        max_seqlen_k=max(problem.seqlens_k),
    )


def sequences(tensor: torch.Tensor, lengths: tuple[int, ...], problem: Problem, head_dim: int) -> list[torch.Tensor]:
    """One (heads, rows, ...) float64 tensor per sequence; `head_dim` is where the heads are, the batch left out."""
    if problem.packing == "dense":
        parts = [part.narrow(1 - head_dim, 0, lengths[0]) for part in tensor]
    else:
        parts = list(tensor.narrow(1 - head_dim, 0, sum(lengths)).split(lengths, dim=1 - head_dim))
    return [part.double().movedim(head_dim, 0) for part in parts]


def assert_right(problem: Problem) -> None:
    inputs = inputs_of(problem)
    built = KERNEL.build(problem, Config(), "cpu")
    o, lse = built.forward(inputs)
    assert lse is not None
    actual = (o, lse, *built.backward(inputs, o, lse))
    q_side = [sequences(x, problem.seqlens_q, problem, 1) for x in (inputs.q, inputs.d_o)]
    k_side = [sequences(x, problem.seqlens_k, problem, 1) for x in (inputs.k, inputs.v)]
    got = [
        sequences(output, problem.seqlens_k if name in ("dk", "dv") else problem.seqlens_q, problem, 0 if name == "lse" else 1)
        for name, output in zip(OUTPUT_NAMES, actual, strict=True)
    ]
    for seq, (q, d_o, k, v) in enumerate(zip(*q_side, *k_side, strict=True)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        scores = problem.scale * leaves[0] @ leaves[1].repeat_interleave(problem.groups, 0).mT
        if problem.causal is not None:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
        expected_lse = scores.logsumexp(-1)
        expected_o = scores.softmax(-1) @ leaves[2].repeat_interleave(problem.groups, 0)
        gradients = torch.autograd.grad((expected_o * d_o).sum(), leaves)
        for name, expected, outputs in zip(OUTPUT_NAMES, (expected_o, expected_lse, *gradients), got, strict=True):
            torch.testing.assert_close(outputs[seq], expected.detach(), rtol=1e-5, atol=1e-5, msg=f"{name} of sequence {seq}")


@pytest.mark.parametrize("causal", [None, "top_left"])
@pytest.mark.parametrize("dim", [dims[0] for dims in KERNEL.capabilities.dims])
def test_ragged(dim: int, causal: Any) -> None:
    assert_right(Problem(**RAGGED, dim_qk=dim, dim_v=dim, dtype="float32", causal=causal))


@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize("causal", [None, "top_left"])
def test_dense(causal: Any, slack: int) -> None:
    assert_right(Problem(**DENSE, dim_qk=40, dim_v=40, dtype="float32", causal=causal, slack_q=slack, slack_k=slack))


@pytest.mark.parametrize(("seqlens_q", "seqlens_k"), [((0, 0), (0, 0)), ((0, 0), (9, 9)), ((9, 9), (0, 0))])
@pytest.mark.parametrize("packing", ["ragged", "dense"])
def test_empty(seqlens_q: tuple[int, ...], seqlens_k: tuple[int, ...], packing: Any) -> None:
    assert_right(Problem(seqlens_q=seqlens_q, seqlens_k=seqlens_k, dim_qk=16, dim_v=16, dtype="float32", packing=packing))


def test_the_same_bits_every_time() -> None:
    problem = Problem(**RAGGED, dim_qk=64, dim_v=64, dtype="float32", causal="top_left")
    inputs = inputs_of(problem)
    built = KERNEL.build(problem, Config(), "cpu")
    runs = []
    for _ in range(3):
        o, lse = built.forward(inputs)
        runs.append((o, lse, *built.backward(inputs, o, lse)))
    for outputs in zip(*runs, strict=True):
        assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_fulfils_the_contract() -> None:
    assert isinstance(KERNEL, Kernel)
    problem = Problem(**DENSE, dim_qk=16, dim_v=16, dtype="float32")
    assert KERNEL.configs(problem) == (Config(),)
    assert KERNEL.supports(problem, Config(), "cpu") is None
    assert "runs on cpu only" in str(KERNEL.supports(problem, Config(), "cuda"))
    assert "nothing to choose" in str(KERNEL.supports(problem, Config(tile_m=16), "cpu"))
    for bad in ({"causal": "bottom_right"}, {"softmax_scale": -1.0}, {"dtype": "float16"}):
        with pytest.raises(BadArgument, match="ask supports"):
            KERNEL.build(Problem(**{**DENSE, "dim_qk": 16, "dim_v": 16, "dtype": "float32", **bad}), Config(), "cpu")
