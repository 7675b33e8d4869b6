"""Errors that are not independent: what rows share, and single numbers, are distinguished from faults."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from msgspec.structs import replace  # noqa: E402
from support.paths import CORPUS  # noqa: E402
from support.triton_mode import interpreted  # noqa: E402

from attnfuzz.harness.campaign.corpus import read_case  # noqa: E402
from attnfuzz.harness.judge.judge import judge  # noqa: E402
from attnfuzz.harness.judge.truth import truth  # noqa: E402
from attnfuzz.harness.trial.inputs import materialise  # noqa: E402
from attnfuzz.harness.trial.trial import run_trial  # noqa: E402
from attnfuzz.kernels.contract import Deviations, Outputs  # noqa: E402
from attnfuzz.kernels.problem import Layout, Problem  # noqa: E402
from attnfuzz.oracles.budgets.bounds import budgets  # noqa: E402
from attnfuzz.oracles.budgets.independence import Independence  # noqa: E402
from attnfuzz.strategies.case import Recipe  # noqa: E402

FALSE_ALARMS = sorted((CORPUS / "false_alarms").glob("*.json"))
BY_KEY = ["sub", ["score"], ["mul", ["const", 0.5], ["float", ["kv_idx"]]]]
PLAIN = Problem(
    seqlens_q=(96, 200), seqlens_k=(128, 200), packing="ragged", heads=4, kv_heads=2, dim_qk=64, dim_v=64, causal="bottom_right"
)


def figures(problem: Problem, recipe: Recipe) -> dict[str, tuple[float, float]]:
    batch = budgets(materialise(problem, recipe, "cpu"), Deviations(), "cpu", generic=False, independent=True)
    assert batch.independence is not None
    return batch.independence.figures()


@interpreted
@pytest.mark.parametrize("path", FALSE_ALARMS, ids=lambda path: path.stem)
def test_a_false_alarm_of_before_passes(path: Path) -> None:
    assert run_trial(read_case(path).case, "cpu").failures == ()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_generic_values_are_independent(dtype: str, seed: int) -> None:
    of_outputs = figures(replace(PLAIN, dtype=dtype), Recipe(seed=seed))
    assert set(of_outputs) == {"o", "dq", "dk", "dv"}
    assert max(z for z, _ in of_outputs.values()) < Independence.Z_LIMIT
    assert max(c for _, c in of_outputs.values()) < 0.4, "R's limit is about the common one"


def test_a_slope_beside_which_scores_are_nothing_is_rounded_alike_in_every_row() -> None:
    problem = replace(PLAIN, score_mod=BY_KEY, window=(7, None), dtype="bfloat16")
    assert figures(problem, Recipe(pattern="tiny"))["o"][0] > 2 * Independence.Z_LIMIT
    assert figures(replace(problem, score_mod=None), Recipe())["o"][0] < Independence.Z_LIMIT


def test_where_rows_see_one_or_two_keys_a_rows_error_is_a_single_number() -> None:
    few = replace(PLAIN, seqlens_q=(2,) * 20, seqlens_k=(2,) * 20, causal=None)
    assert figures(few, Recipe(pattern="uniform01"))["dq"][1] > 0.5


def test_rows_of_equal_values_have_one_error_in_all_dims() -> None:
    """With one query and one element of dO for all dims, a row of dV is one number, and so is its last rounding."""
    problem = replace(PLAIN, seqlens_q=(1, 1, 1), seqlens_k=(1, 1, 119), causal=None, layout_do=Layout(expanded=True))
    assert figures(problem, Recipe(seed=3))["dv"][1] == pytest.approx(1.0)
    assert figures(replace(problem, layout_do=Layout()), Recipe(seed=3))["dv"][1] < 0.7


@pytest.mark.parametrize("output", ["o", "dq", "dv"])
@pytest.mark.parametrize("score_mod", [None, ["mul", ["score"], ["const", 0.5]]], ids=["plain", "halved"])
def test_a_scale_is_found_as_before(output: str, score_mod: object) -> None:
    problem = Problem(seqlens_q=(256,), seqlens_k=(256,), heads=4, dim_qk=64, dim_v=64, score_mod=score_mod)
    inputs = materialise(problem, Recipe(seed=5), "cpu")
    true = truth(inputs, Deviations(), "cpu")
    outputs = {name: each.expected for name, each in true.items()}
    outputs[output] = outputs[output] * (1 + 2.0**-12)
    rounded = {name: x.float() if name == "lse" else x.transpose(0, 1).to(inputs.q.dtype) for name, x in outputs.items()}
    failures = judge("k", inputs, Outputs(**{name: x.contiguous() for name, x in rounded.items()}), true).failures
    assert [(each.output, each.check) for each in failures] == [(output, "z")]


FEW_VALUES = replace(PLAIN, seqlens_q=(1, 1), seqlens_k=(2, 128), causal=None, heads=8, kv_heads=8, dtype="bfloat16")


def test_a_p_of_few_values_leans_by_the_last_rounding() -> None:
    """255/256 of a value with eight bits is rounded down: dV of one query whose P are next to a power of two."""
    assert figures(FEW_VALUES, Recipe(pattern="small_logits", seed=10))["dv"][0] > 2 * Independence.Z_LIMIT
    assert figures(FEW_VALUES, Recipe(seed=10))["dv"][0] < Independence.Z_LIMIT


@pytest.mark.parametrize("factor", [1.0, 1.001, 0.999, 1.002])
@pytest.mark.parametrize("seed", [10, 11])
def test_a_scale_is_found_beside_what_is_known_to_lean(seed: int, factor: float) -> None:
    inputs = materialise(FEW_VALUES, Recipe(pattern="small_logits", seed=seed), "cpu")
    true = truth(inputs, Deviations(), "cpu")
    exact = {name: of.expected * (factor if name == "dv" else 1.0) for name, of in true.items()}
    rounded = {name: x.float() if name == "lse" else x.transpose(0, 1).to(inputs.q.dtype) for name, x in exact.items()}
    outputs = Outputs(**{name: x.contiguous() for name, x in rounded.items()})
    checks = {each.check for each in judge("k", inputs, outputs, true).failures}
    assert ("z" in checks) == (factor != 1.0)
