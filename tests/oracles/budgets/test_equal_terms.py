"""Sums of float32 with equal terms: what they are off by where the terms are added one by one, and what is allowed."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from attnfuzz.harness.judge.judge import judge  # noqa: E402
from attnfuzz.harness.judge.truth import truth  # noqa: E402
from attnfuzz.harness.trial.inputs import materialise  # noqa: E402
from attnfuzz.kernels.contract import Deviations, Outputs  # noqa: E402
from attnfuzz.kernels.problem import Problem  # noqa: E402
from attnfuzz.oracles import attention  # noqa: E402
from attnfuzz.oracles.budgets.forward_formulas import accumulated, steps_of  # noqa: E402
from attnfuzz.oracles.budgets.roundings import Rounding, repeated_sum  # noqa: E402
from attnfuzz.strategies.case import Recipe  # noqa: E402


def added_one_by_one(terms: torch.Tensor) -> torch.Tensor:
    """The sum of float32 terms over the first dimension."""
    total = torch.zeros_like(terms[0])
    for term in terms:
        total += term
    return total


def test_small_equal_terms_that_are_added_to_a_large_sum_are_no_alarm() -> None:
    """A Case of triton.varlen on an H200, of which O was 1.015 x its budget: each row has four values of P, 512 times each."""
    problem = Problem(seqlens_q=(140, 32), seqlens_k=(63, 2048), dim_qk=16, dim_v=16, dtype="float32")
    inputs = materialise(problem, Recipe(pattern="block_const", q_scale=4.0, k_scale=4.0, seed=21092), "cpu")
    expected = truth(inputs, Deviations(), "cpu")
    outputs = {name: each.expected.float() for name, each in expected.items()}
    outputs |= {name: x.transpose(0, 1).contiguous() for name, x in outputs.items() if name != "lse"}
    data = list(attention.sequences(inputs))[1]
    s = (data.q[0] @ data.k[0].mT).float() * torch.tensor(problem.scale * math.log2(math.e), dtype=torch.float32)
    p = (s - s.amax(-1, keepdim=True)).exp2()
    terms = p.mT[:, :, None] * data.v[0].float()[:, None]
    of_tiles = p.unflatten(1, (-1, 32)).sum(-1)
    o = added_one_by_one(terms) / added_one_by_one(of_tiles.mT)[:, None]
    # The kernel had 1.00006354.
    assert abs(o[16, 7].item() - 1.00006354) < 2e-7

    def failures(o: torch.Tensor) -> list[str]:
        outputs["o"][140:, 0] = o
        return [each.output or "" for each in judge("k", inputs, Outputs(**outputs), expected).failures]

    assert failures(o) == []
    assert failures(o * 1.0002) == ["o"]


@pytest.mark.parametrize("order", ["largest first", "in turn", "any"])
def test_sums_of_equal_terms_are_off_by_at_most_what_is_allowed(order: str) -> None:
    generator, n, worst = torch.Generator().manual_seed(0), 2048, 0.0
    for values in (1, 2, 3, 4, 8, 16):
        x = -torch.randn(1000, values, generator=generator, dtype=torch.float64).abs() * 4
        x = x.sort(-1, descending=True)[0].exp().float()
        x = x.repeat(1, n // values) if order == "in turn" else x.repeat_interleave(n // values, 1)
        if order == "any":
            x = x[:, torch.randperm(x.shape[1], generator=generator)]
        exact = x.sum(-1, dtype=torch.float64)
        allowed = accumulated(steps_of(n), exact, exact, Rounding.of("float32", Deviations(), "cpu"))
        allowed += repeated_sum(x.double()).sum(-1)
        worst = max(worst, ((added_one_by_one(x.mT) - exact).abs() / allowed).max().item())
    assert worst < 1
    # It is no more than a few times what is needed.
    assert worst > (0.5 if order == "largest first" else 0.1)


@pytest.mark.parametrize("values", [2, 4])
def test_large_terms_whose_factor_is_zero_do_not_count(values: int) -> None:
    """P of one key is 1 and v there 0; the sum is one of a few tiny P, many times each."""
    generator, n = torch.Generator().manual_seed(0), 2048
    tiny = (1e-9 * (1 + torch.rand(1000, values, generator=generator))).sort(-1, descending=True)[0]
    x = tiny.repeat_interleave(n // values, 1)
    exact = x.sum(-1, dtype=torch.float64)
    allowed = accumulated(steps_of(n), exact, exact, Rounding.of("float32", Deviations(), "cpu"))
    allowed += repeated_sum(torch.cat([torch.ones(1000, 1), x], -1).double())[:, 1:].sum(-1)
    assert ((added_one_by_one(x.mT) - exact).abs() / allowed).max().item() < 1


def test_terms_that_differ_or_are_zero_add_nothing() -> None:
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert not repeated_sum(x).any()
    assert not repeated_sum(torch.zeros(2, 50, dtype=torch.float64)).any()
    padded = torch.cat([torch.ones(1, 30), torch.zeros(1, 20)], -1).double()
    assert torch.allclose(repeated_sum(padded).sum(-1), torch.tensor(29 / 2 * 30 * 2.0**-24, dtype=torch.float64))
