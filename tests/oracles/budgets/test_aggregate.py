"""The statistics over a whole output: what they count as independent, and Cases of correct kernels where they were wrong once.

The Cases came from PyTorch's own kernels on a GPU; here an output is what is expected, rounded, or what their order of additions
makes of it.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attnfuzz.harness.judge.judge import judge  # noqa: E402
from attnfuzz.harness.judge.truth import Truths, is_tiny, truth  # noqa: E402
from attnfuzz.harness.trial.inputs import materialise  # noqa: E402
from attnfuzz.kernels.contract import Deviations, Inputs, Outputs  # noqa: E402
from attnfuzz.kernels.problem import Layout, Problem  # noqa: E402
from attnfuzz.oracles import attention  # noqa: E402
from attnfuzz.oracles.budgets.bounds import budgets  # noqa: E402
from attnfuzz.oracles.budgets.repeats import generic  # noqa: E402
from attnfuzz.oracles.frames import Placed, frames, key_range, rows_seeing, tokens_of  # noqa: E402
from attnfuzz.strategies.case import Recipe  # noqa: E402


def as_expected(inputs: Inputs) -> dict[str, torch.Tensor]:
    """The outputs of a kernel that makes no error but the last rounding."""
    right = {name: each.expected for name, each in truth(inputs, Deviations(), "cpu").items()}
    return {name: x.float() if name == "lse" else x.transpose(0, 1).to(inputs.q.dtype).contiguous() for name, x in right.items()}


def messages(inputs: Inputs, outputs: dict[str, Any]) -> list[str]:
    verdict = judge("k", inputs, Outputs(**outputs), truth(inputs, Deviations(), "cpu"))
    return [each.message for each in verdict.failures]


@pytest.mark.parametrize(
    ("problem", "recipe"),
    [
        (
            Problem(seqlens_q=(837, 848), seqlens_k=(245, 247), heads=6, kv_heads=3, dim_qk=64, dim_v=64, dtype="bfloat16"),
            Recipe(pattern="large_logits", q_scale=0.5),
        ),
        (
            Problem(seqlens_q=(15, 30), seqlens_k=(3468, 3470), heads=5, kv_heads=5, dim_qk=64, dim_v=64, softmax_scale=1.0),
            Recipe(pattern="v_mean", q_scale=0.25, k_scale=0.5, seed=1),
        ),
        (
            Problem(seqlens_q=(4065,), seqlens_k=(98,), dim_qk=192, dim_v=192, causal="bottom_right", softmax_scale=1.0),
            Recipe(pattern="tiny", do_scale=2.0),
        ),
    ],
    ids=["rows of one key", "means of V", "scores of nothing"],
)
def test_the_last_rounding_is_no_bias(problem: Problem, recipe: Recipe) -> None:
    inputs = materialise(problem, recipe, "cpu")
    assert messages(inputs, as_expected(inputs)) == []


def test_an_equal_share_for_every_key_is_rounded_alike_in_every_head() -> None:
    problem = Problem(
        seqlens_q=(9, 2), seqlens_k=(9, 2), heads=8, kv_heads=8, dim_qk=192, dim_v=128, causal="top_left",
    )  # fmt: skip
    for seed in (3236, 6, 27, 48):
        inputs = materialise(problem, Recipe(pattern="subnormal", seed=seed), "cpu")
        outputs, shares = as_expected(inputs), []
        for data in attention.sequences(inputs):
            scores = (data.q.double() @ data.k.double().mT) * problem.scale
            hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
            p = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
            shares.append((p.half().double().mT @ data.d_o.double()).transpose(0, 1))
        outputs["dv"] = torch.cat(shares).half()
        assert messages(inputs, outputs) == []


@pytest.mark.parametrize(("seqlen", "recipe"), [(54, Recipe(seed=3)), (32, Recipe())])
def test_sums_of_rounded_p_lie_on_the_steps_of_dv(seqlen: int, recipe: Recipe) -> None:
    """Two keys a row, and one dO for all rows: half of dV's roundings are ties. R was 1.02 x its limit on an H200."""
    problem = Problem(
        seqlens_q=(seqlen,), seqlens_k=(seqlen,), dim_qk=64, dim_v=48, dtype="bfloat16", window=(1, 0),
        softmax_scale=0.0078125 if recipe.seed else None, layout_do=Layout(expanded=True),
    )  # fmt: skip
    inputs = materialise(problem, recipe, "cpu")
    q, k, d_o = (x[:, 0].double() for x in (inputs.q, inputs.k, inputs.d_o))
    distance = torch.arange(seqlen)[:, None] - torch.arange(seqlen)
    scores = (q @ k.T * problem.scale).masked_fill((distance < 0) | (distance > 1), -torch.inf)
    p = torch.softmax(scores, -1).to(torch.bfloat16).double()
    outputs = as_expected(inputs)
    dv = (p.T @ d_o).to(torch.bfloat16).reshape(outputs["dv"].shape)
    assert messages(inputs, {**outputs, "dv": dv}) == []
    # An element beyond its budget is still reported.
    assert "dV: " in "".join(messages(inputs, {**outputs, "dv": dv * 1.02}))


@pytest.mark.parametrize(("kv_heads", "seed"), [(1, 16090), (3, 16090), (3, 16091)])
def test_p_of_a_few_subnormal_numbers_is_rounded_alike_in_every_row(kv_heads: int, seed: int) -> None:
    """Beside a large sink all P are some 2.1 of float16's smallest steps, and become 2: R was beyond its limit in a run."""
    problem = Problem(
        seqlens_q=(17,), seqlens_k=(19,), heads=3, kv_heads=kv_heads, dim_qk=64, dim_v=64, softmax_scale=2.0**-7, sinks=True
    )
    inputs = materialise(problem, Recipe(pattern="uniform01", sinks="large", seed=seed), "cpu")
    if seed != 16090:
        inputs = dataclasses.replace(inputs, captured=(torch.full((3,), 16.0),))
    (data,) = attention.sequences(inputs)
    scores = (data.q.double() @ data.k.double().mT) * problem.scale
    p = (scores - torch.logaddexp(torch.logsumexp(scores, -1), data.captured[-1].double()[:, None])[..., None]).exp()
    assert bool((p.half() < 2.0**-14).all())

    def wrong(rounded: torch.Tensor) -> list[str]:
        dv = (rounded.double().mT @ data.d_o.double()).unflatten(0, (kv_heads, -1)).sum(1)
        outputs = {**as_expected(inputs), "dv": dv.transpose(0, 1).half().contiguous()}
        expected = truth(inputs, Deviations(), "cpu")
        d_sinks = expected.captured["sinks"].expected.float()
        verdict = judge("k", inputs, Outputs(**outputs, d_captured=(d_sinks,)), expected)
        return [f"{each.output} {each.check}" for each in verdict.failures]

    assert wrong(p.half()) == []
    # The same roundings twice, as of a P that lost one bit more, are an error.
    assert wrong(p + 2 * (p.half().double() - p)) == ["dv R"]


def test_equal_terms_of_a_float32_sum_are_rounded_alike() -> None:
    problem = Problem(seqlens_q=(772,), seqlens_k=(64,), heads=3, dim_qk=16, dim_v=16, dtype="float32")
    recipe = Recipe(pattern="ties_q")
    inputs = materialise(problem, recipe, "cpu")
    outputs = as_expected(inputs)
    (data,) = attention.sequences(inputs)
    p = torch.softmax((data.q @ data.k.mT) * problem.scale, -1)
    total = torch.zeros(64, 16)
    for head in range(3):
        for row in range(772):
            total += p[head, row, :, None] * data.d_o[head, row]
    outputs["dv"] = total[:, None]
    assert messages(inputs, outputs) == []
    outputs["dv"] = total[:, None] * 1.001
    assert messages(inputs, outputs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("seqlen", "heads", "dim"), [(200, 2, 64), (60, 1, 32)])
def test_a_scale_in_all_of_an_output_is_an_alarm(dtype: str, seqlen: int, heads: int, dim: int) -> None:
    problem = Problem(seqlens_q=(seqlen,), seqlens_k=(seqlen,), heads=heads, kv_heads=heads, dim_qk=dim, dim_v=dim, dtype=dtype)
    inputs = materialise(problem, Recipe(seed=3), "cpu")
    exact = {name: each.expected for name, each in truth(inputs, Deviations(), "cpu").items()}
    for name in ("o", "dq", "dv"):
        outputs = as_expected(inputs)
        off = 1 + (2.0**-12 if dtype == "float16" else 2.0**-9)
        outputs[name] = (exact[name] * off).transpose(0, 1).to(inputs.q.dtype)
        assert any("together their errors lean one way" in each for each in messages(inputs, outputs)), name


def test_a_tiny_batch_is_looked_at_for_repeats_only_on_suspicion() -> None:
    problem = Problem(seqlens_q=(60,), seqlens_k=(60,), heads=1, kv_heads=1, dim_qk=32, dim_v=32)
    assert is_tiny(problem)
    inputs = materialise(problem, Recipe(seed=3), "cpu")
    expected, outputs = truth(inputs, Deviations(), "cpu"), as_expected(inputs)
    assert isinstance(expected, Truths)
    assert judge("k", inputs, Outputs(**outputs), expected).status == "pass"
    assert not expected.generic_known
    outputs["dv"] = (expected["dv"].expected * (1 + 2.0**-12)).transpose(0, 1).half()
    assert judge("k", inputs, Outputs(**outputs), expected).failures[0].check == "z"
    assert expected.generic_known


def test_rows_and_keys_that_see_something_are_told_without_their_scores() -> None:
    generator = random.Random(1)
    for _ in range(1500):
        n_q, n_k = generator.randint(1, 9), generator.randint(1, 9)
        window = (generator.choice([None, 0, 1, 3]), generator.choice([None, 0, 2]))
        problem = Problem(
            seqlens_q=(n_q,), seqlens_k=(n_k,), dim_qk=8, dim_v=8,
            causal=generator.choice([None, "bottom_right", "top_left"]), window=generator.choice([None, window]),
        )  # fmt: skip
        visible = attention.sees(problem, torch.arange(n_q)[:, None], torch.arange(n_k)[None], n_q, n_k)
        rows = rows_seeing(problem, 0)
        assert list(rows) == visible.any(1).nonzero().flatten().tolist(), problem
        if rows:
            assert list(key_range(problem, 0, rows)) == visible.any(0).nonzero().flatten().tolist(), problem


@pytest.mark.parametrize("most", [3, 64, 10_000])
def test_samples_are_rows_and_keys_that_see_something(most: int) -> None:
    problem = Problem(
        seqlens_q=(190, 5, 0, 40), seqlens_k=(7, 9, 3, 40), heads=6, kv_heads=3, dim_qk=8, dim_v=8, causal="bottom_right"
    )
    inputs = materialise(problem, Recipe(), "cpu")
    for frame in frames(problem, 1 << 20):
        placed = Placed(tokens_of(inputs), frame)
        rows, keys = placed.sampled(most)
        visible = placed.visible()
        visible = visible.expand(len(frame.sequences) * len(frame.kv_heads), -1, -1)
        assert visible.any(2).flatten()[rows].all()
        assert visible.any(1).flatten()[keys].all()
        assert len(set(rows.tolist())) == len(rows) > 0.7 * min(most, int(visible.any(2).sum()))
        assert len(set(keys.tolist())) == len(keys) > 0.7 * min(most, int(visible.any(1).sum()))


def test_dead_rows_hide_no_repeated_values() -> None:
    """Of 190 rows the last 7 see a key: evenly spaced samples of all rows had none of them, and all looked generic."""
    problem = Problem(seqlens_q=(190,), seqlens_k=(7,), heads=8, kv_heads=8, dim_qk=64, dim_v=64, causal="bottom_right")
    for pattern, is_generic in (("ties", False), ("normal", True)):
        repeats = budgets(materialise(problem, Recipe(pattern=pattern), "cpu"), Deviations(), "cpu").repeats
        assert repeats is not None
        figures = repeats.figures()
        assert figures is not None
        assert (generic(figures.tolist()).g < repeats.LIMIT) == is_generic


def test_a_p_below_the_smallest_normal_float32_may_be_flushed() -> None:
    """A GPU's exp2 flushes it, and P of one key then is lost in all of its dV: one of 600,000 Cases was accused for that."""
    problem = Problem(seqlens_q=(1,) * 4, seqlens_k=(511, 1, 1, 1), heads=4, kv_heads=4, dim_qk=96, dim_v=96, dtype="bfloat16")
    inputs = materialise(problem, Recipe(pattern="tok_outlier", q_scale=4.0, seed=3), "cpu")
    outputs = as_expected(inputs)
    scores = torch.einsum("hd,khd->kh", inputs.q[0].double(), inputs.k[:511].double()) * problem.scale
    p = scores.softmax(0)
    kept = torch.where(p < 2.0**-126, 0.0, p).to(torch.bfloat16)
    assert bool(((p < 2.0**-126) & (p > 2.0**-130)).any())
    outputs["dv"][:511] = (kept.double()[..., None] * inputs.d_o[0].double()).to(torch.bfloat16)
    assert messages(inputs, outputs) == []
    # A scale of 0.997 is still an error.
    outputs["dv"][:511] = (p.double()[..., None] * inputs.d_o[0].double() * (1 - 3e-3)).to(torch.bfloat16)
    assert messages(inputs, outputs)


def test_ds_of_a_p_below_the_smallest_normal_float32_may_be_flushed() -> None:
    """Beside a large sink P of a row is, and with it all of its dQ: one of 350,000 Cases was accused for that."""
    problem = Problem(
        seqlens_q=(20,),
        seqlens_k=(1,),
        heads=1,
        kv_heads=1,
        dim_qk=40,
        dim_v=72,
        dtype="bfloat16",
        softmax_scale=-0.125,
        sinks=True,
    )
    inputs = materialise(problem, Recipe(pattern="falling", v_scale=4.0, do_scale=16.0, seed=55779), "cpu")
    inputs = dataclasses.replace(inputs, captured=(torch.tensor([70.0]),))
    outputs: dict[str, Any] = {**as_expected(inputs), "d_captured": (torch.zeros(1),)}
    scores = (inputs.q.double() * inputs.k[0].double()).sum(-1) * problem.scale
    flushed = torch.exp(scores - outputs["lse"].mT.double()) < 2.0**-126
    assert flushed.sum() > 10
    right = outputs["dq"].clone()
    outputs["dq"][flushed] = 0
    assert messages(inputs, outputs) == []
    # Errors that no flushed value makes are still errors.
    outputs["dq"] = torch.where(flushed[..., None], right * 8, right)
    assert messages(inputs, outputs)
