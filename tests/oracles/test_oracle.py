"""The oracle itself: against finite differences, a textbook formula written element by element, and exact rows."""

from __future__ import annotations

import math

import pytest
import torch

from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels.problem import Needs, Problem
from attnfuzz.oracles.attention import attention, reference, sequences, visible_keys
from attnfuzz.strategies.case import Recipe

PROBLEMS = {
    "plain": {},
    "bottom_right, q shorter": {"seqlens_q": (3,), "seqlens_k": (5,), "causal": "bottom_right"},
    "bottom_right, q longer": {"seqlens_q": (5,), "seqlens_k": (3,), "causal": "bottom_right"},
    "top_left, q longer": {"seqlens_q": (5,), "seqlens_k": (3,), "causal": "top_left"},
    "top_left, q shorter": {"seqlens_q": (2,), "seqlens_k": (6,), "causal": "top_left"},
    "window": {"seqlens_q": (6,), "seqlens_k": (6,), "window": (1, 2)},
    "window, causal": {"seqlens_q": (4,), "seqlens_k": (7,), "causal": "bottom_right", "window": (2, None)},
    "negative scale": {"softmax_scale": -0.7},
    "zero scale": {"softmax_scale": 0.0},
    "softcap": {"softcap": 1.5, "softmax_scale": 1.0},
    "groups": {"heads": 6, "kv_heads": 2},
}


def capped(problem: Problem):
    return lambda s: problem.softcap * torch.tanh(s / problem.softcap) if problem.softcap else s


def problem_of(**changes: object) -> Problem:
    return Problem(**{"seqlens_q": (4,), "seqlens_k": (5,), "dim_qk": 3, "dim_v": 2, "dtype": "float32", **changes})


def by_hand(problem: Problem, q: list, k: list, v: list, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE by loops over scalars, with nothing of the oracle's."""
    heads, rows, keys = len(q), len(q[0]), len(k[0])
    o = torch.zeros(heads, rows, problem.dim_v, dtype=torch.float64)
    lse = torch.full((heads, rows), -math.inf, dtype=torch.float64)
    for h in range(heads):
        g = h // (problem.heads // problem.kv_heads)
        for i in range(rows):
            scores = {}
            for j in range(keys):
                if visible[i, j]:
                    s = problem.scale * math.fsum(a * b for a, b in zip(q[h][i], k[g][j], strict=True))
                    scores[j] = problem.softcap * math.tanh(s / problem.softcap) if problem.softcap else s
            if scores:
                total = math.fsum(math.exp(s) for s in scores.values())
                lse[h, i] = math.log(total)
                for d in range(problem.dim_v):
                    o[h, i, d] = math.fsum(math.exp(s) * v[g][j][d] for j, s in scores.items()) / total
    return o, lse


@pytest.mark.parametrize("changes", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_matches_the_formula_written_by_hand(changes: dict) -> None:
    problem = problem_of(**changes)
    inputs = materialise(problem, Recipe(seed=11), "cpu")
    (data,) = sequences(inputs)
    truth = reference(problem, data)
    o, lse = by_hand(problem, data.q.tolist(), data.k.tolist(), data.v.tolist(), visible_keys(problem, 0))
    torch.testing.assert_close(truth.o, o, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(truth.lse, lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("changes", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_gradients_match_finite_differences(changes: dict) -> None:
    problem = problem_of(**changes)
    inputs = materialise(problem, Recipe(seed=5), "cpu")
    (data,) = sequences(inputs)
    visible = visible_keys(problem, 0)
    live = visible.any(-1)
    tensors = [x.double().requires_grad_() for x in (data.q, data.k, data.v)]

    def outputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = attention(q, k, v, visible, problem.scale, capped(problem))
        return o, lse[:, live]

    assert torch.autograd.gradcheck(outputs, tensors)


def test_gradients_match_the_textbook_formula() -> None:
    """dV = P^T dO, dS = P (dP - D + dLSE), dQ = scale dS K, dK = scale dS^T Q, summed over the group by hand."""
    problem = problem_of(heads=4, kv_heads=2, causal="bottom_right", seqlens_q=(5,), seqlens_k=(7,), needs=Needs(dlse=True))
    (data,) = sequences(materialise(problem, Recipe(seed=2), "cpu"))
    truth = reference(problem, data)
    dk, dv = torch.zeros_like(truth.dk), torch.zeros_like(truth.dv)
    for h in range(4):
        q, d_o = data.q[h].double(), data.d_o[h].double()
        k, v = data.k[h // 2].double(), data.v[h // 2].double()
        s = (problem.scale * q @ k.T).masked_fill(~visible_keys(problem, 0), -math.inf)
        p = torch.exp(s - truth.lse[h][:, None])
        ds = p * (d_o @ v.T - (d_o * truth.o[h]).sum(-1, keepdim=True) + data.d_lse[h].double()[:, None])
        torch.testing.assert_close(truth.dq[h], problem.scale * ds @ k, rtol=1e-11, atol=1e-12)
        dk[h // 2] += problem.scale * ds.T @ q
        dv[h // 2] += p.T @ d_o
    torch.testing.assert_close(truth.dk, dk, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(truth.dv, dv, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("n_q", "n_k", "causal", "blind"),
    [(4, 0, None, 4), (5, 3, "bottom_right", 2), (3, 3, "bottom_right", 0), (0, 4, None, 0), (0, 0, "bottom_right", 0)],
)
def test_rows_without_keys_are_exact(n_q: int, n_k: int, causal: str | None, blind: int) -> None:
    problem = problem_of(seqlens_q=(n_q,), seqlens_k=(n_k,), causal=causal)
    (data,) = sequences(materialise(problem, Recipe(), "cpu"))
    truth = reference(problem, data)
    assert (truth.lse == -math.inf).sum() == blind
    assert torch.equal(truth.o[:, :blind], torch.zeros_like(truth.o[:, :blind]))
    assert torch.equal(truth.dq[:, :blind], torch.zeros_like(truth.dq[:, :blind]))
    assert all(torch.isfinite(x).all() for x in (truth.o, truth.dq, truth.dk, truth.dv))
    assert torch.isfinite(truth.lse[:, blind:]).all()
    assert truth.dk.shape == (1, n_k, 3)
    assert truth.dv.shape == (1, n_k, 2)


def test_ragged_is_each_sequence_alone_and_dense_is_ragged() -> None:
    ragged = problem_of(seqlens_q=(3, 0, 3), seqlens_k=(4, 4, 4), slack_q=2, slack_k=1)
    inputs = materialise(ragged, Recipe(seed=9), "cpu")
    assert [data.q.shape[1] for data in sequences(inputs)] == [3, 0, 3]
    dense = problem_of(seqlens_q=(3, 3), seqlens_k=(4, 4), packing="dense", heads=2, kv_heads=1)
    same = problem_of(seqlens_q=(3, 3), seqlens_k=(4, 4), heads=2, kv_heads=1)
    for a, b in zip(
        sequences(materialise(dense, Recipe(seed=9), "cpu")), sequences(materialise(same, Recipe(seed=9), "cpu")), strict=True
    ):
        assert torch.equal(reference(dense, a).dq, reference(same, b).dq)


def test_large_scores_do_not_overflow() -> None:
    problem = problem_of(softmax_scale=1.0)
    (data,) = sequences(materialise(problem, Recipe(pattern="large_logits", q_scale=1024.0, k_scale=1024.0), "cpu"))
    truth = reference(problem, data)
    assert all(torch.isfinite(x).all() for x in (truth.o, truth.lse, truth.dq, truth.dk, truth.dv))
