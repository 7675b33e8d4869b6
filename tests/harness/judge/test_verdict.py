"""The verdict: no alarm on correct kernels, an alarm on each numeric fault, and a message that says it all."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from support.emulated.whole import Emulated

from attnfuzz.harness.core import environment
from attnfuzz.harness.judge import judge as judging
from attnfuzz.harness.judge.judge import judge
from attnfuzz.harness.judge.truth import truth
from attnfuzz.harness.trial import trial
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Deviations, Outputs
from attnfuzz.kernels.problem import Problem
from attnfuzz.oracles import formats
from attnfuzz.strategies.case import PATTERNS, Case, Recipe
from attnfuzz.strategies.cases import Limits, cases

GOOD = Emulated()
SMALL = Limits(batch=3, heads=4, length=140, tiles=24)
NUMERIC_FAULTS = {
    "p in bf16": ("float16", "o"),
    "scores in half": ("float16", "lse"),
    "scale 1 %": ("bfloat16", "lse"),
    "log2e with four digits": ("bfloat16", "lse"),
    "lse in half": ("float16", "lse"),
    "lse in base 2": ("bfloat16", "lse"),
    "last key dropped": ("bfloat16", "lse"),
    "dq scale 1 %": ("float16", "dq"),
    "ds in bf16": ("float16", "dq"),
    "delta missing": ("bfloat16", "dq"),
    "group not summed": ("bfloat16", "dk"),
}
"""Fault -> (dtype in which it is planted, the first output that must show it). What stays inside the worst case of the roundings
(truncation for rounding, Delta or partial sums in half) needs the statistical budget that is still to come."""


@pytest.fixture(autouse=True)
def _registered():
    registry.register(GOOD)
    yield
    registry.unregister(GOOD.name)


@seed(20240901)
@settings(max_examples=150, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases(GOOD, device="cpu", limits=SMALL))
def test_a_correct_kernel_never_alarms(case: Case) -> None:
    verdict = trial.run_trial(case, "cpu")
    assert verdict.status == "pass", (case.canonical(), [each.message for each in verdict.failures])
    assert set(verdict.figures) == {"o", "lse", "dq", "dk", "dv"}
    assert all(figures.worst <= 1 for figures in verdict.figures.values())


@pytest.mark.parametrize(
    ("pattern", "dtype"),
    [
        pytest.param(pattern, dtype, marks=() if number % 3 == turn else pytest.mark.slow)
        for number, pattern in enumerate(PATTERNS)
        for turn, dtype in enumerate(("float16", "bfloat16", "float32"))
    ],
)
def test_a_correct_kernel_passes_every_pattern(pattern: str, dtype: str) -> None:
    problem = Problem(
        seqlens_q=(33, 0, 70), seqlens_k=(65, 7, 40), heads=4, kv_heads=2, dim_qk=64, dim_v=48, dtype=dtype, causal="bottom_right"
    )
    for scale in (1.0, 4.0):
        recipe = Recipe(pattern=pattern, seed=4, q_scale=scale, k_scale=scale)
        verdict = trial.run_trial(Case(kernel=GOOD.name, problem=problem, recipe=recipe), "cpu")
        assert verdict.status == "pass", [each.message for each in verdict.failures]


@pytest.mark.parametrize("fault", NUMERIC_FAULTS)
def test_a_numeric_fault_is_an_alarm(fault: str) -> None:
    dtype, output = NUMERIC_FAULTS[fault]
    problem = Problem(seqlens_q=(128, 40), seqlens_k=(130, 90), heads=4, kv_heads=2, dim_qk=64, dim_v=64, dtype=dtype)
    bad = registry.register(Emulated(name="test.faulty", faults=frozenset({fault})))
    try:
        verdicts = [trial.run_trial(Case(kernel=bad.name, problem=problem, recipe=Recipe(seed=s)), "cpu") for s in range(3)]
    finally:
        registry.unregister(bad.name)
    for verdict in verdicts:
        assert output in {each.output for each in verdict.failures}, {n: f.worst for n, f in verdict.figures.items()}


def outputs_of(problem: Problem, recipe: Recipe | None = None) -> tuple:
    inputs = materialise(problem, recipe or Recipe(seed=1), "cpu")
    o, lse = GOOD.forward(inputs)
    dq, dk, dv = GOOD.backward(inputs, o, lse)
    return inputs, Outputs(o=o, lse=lse, dq=dq, dk=dk, dv=dv), truth(inputs, Deviations(), "cpu")


RAGGED = Problem(
    seqlens_q=(5, 0, 9), seqlens_k=(6, 3, 4), heads=4, kv_heads=2, dim_qk=8, dim_v=4, causal="bottom_right", slack_q=2
)


def test_the_message_names_everything() -> None:
    inputs, got, expected = outputs_of(RAGGED)
    got.dk[6 + 1, 1, 3] = 0.5
    verdict = judge("test.emulated", inputs, got, expected)
    (failure,) = verdict.failures
    assert failure.message.startswith(
        "dK: 1 of 208 elements is wrong; worst at sequence 1, key 1, head 1, dim 3: got 0.5, expected 0, allowed error 0"
    )
    assert (failure.place.sequence, failure.place.position, failure.place.head, failure.place.dim) == (1, 1, 1, 3)
    assert failure.identity.kind == "mismatch"
    got.lse[3, 5 + 8] += 0.01
    verdict = judge("test.emulated", inputs, got, expected)
    assert [each.output for each in verdict.failures] == ["lse", "dk"]
    assert "worst at sequence 2, query 8, head 3: got" in verdict.failures[0].message
    assert "x its budget" in verdict.failures[0].message


def test_nan_comes_before_numbers() -> None:
    inputs, got, expected = outputs_of(RAGGED)
    got.o[0, 0, 0] = 100.0
    got.o[12, 2, 1] = math.nan
    (failure,) = judge("k", inputs, got, expected).failures
    assert failure.kind == "nonfinite"
    assert failure.message.startswith("O: 2 of 224 elements are wrong; worst at sequence 2, query 7, head 2, dim 1: got nan")


@pytest.mark.parametrize("value", [0.0, 1.4e-45, -math.inf, math.inf, -1e30])
def test_rows_without_keys_are_judged_exactly(value: float) -> None:
    """Rows 0 to 4 of sequence 2 see no key: LSE is -inf there, everything else is 0."""
    inputs, got, expected = outputs_of(RAGGED)
    got.lse[0, 5] = value
    assert bool(judge("k", inputs, got, expected).failures) == (value != -math.inf)


def test_the_smallest_subnormal_in_a_dead_row_fails() -> None:
    inputs, got, expected = outputs_of(RAGGED)
    got.dq[5, 0, 0] = 2.0**-24
    (failure,) = judge("k", inputs, got, expected).failures
    assert failure.output == "dq"
    assert failure.place.allowed == 0


def test_slack_rows_are_not_judged() -> None:
    inputs, got, expected = outputs_of(RAGGED)
    got.o[14:] = 7.0
    got.lse[:, 14:] = 7.0
    assert judge("k", inputs, got, expected).status == "pass"


@pytest.mark.parametrize(
    ("name", "change", "check", "text"),
    [
        ("o", lambda x: x[:-1], "shape", "O has shape (15, 4, 4) where (16, 4, 4) is expected"),
        ("lse", lambda x: x.T, "shape", "LSE has shape (16, 4) where (4, 16) is expected"),
        ("dq", lambda x: x.float(), "dtype", "dQ has dtype torch.float32 where torch.float16 is expected"),
        ("lse", lambda x: x.half(), "dtype", "LSE has dtype torch.float16 where torch.float32 is expected"),
        ("dk", lambda x: x.to("meta"), "device", "dK has device meta where cpu is expected"),
        ("dv", lambda x: None, "type", "dV has type None where a tensor is expected"),
        ("dv", lambda x: 3, "type", "dV has type int where a tensor is expected"),
    ],
)
def test_the_contract_is_checked_before_values(name: str, change, check: str, text: str) -> None:
    inputs, got, expected = outputs_of(RAGGED)
    outputs = {n: getattr(got, n) for n in ("o", "lse", "dq", "dk", "dv")}
    verdict = judge("k", inputs, Outputs(**{**outputs, name: change(outputs[name])}), expected)
    (failure,) = verdict.failures
    assert (failure.kind, failure.output, failure.check, failure.message) == ("contract", name, check, text)


def test_infinity_is_right_only_where_the_value_overflows() -> None:
    problem = Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=8, dim_v=8)
    inputs, got, expected = outputs_of(problem)
    expected["o"] = type(expected["o"])(torch.full((1, 1, 8), 65519.0, dtype=torch.float64), torch.full((1, 1, 8), 4.0).double())
    got.o.fill_(math.inf)
    assert judge("k", inputs, got, {"o": expected["o"]}).status == "pass"
    got.o.fill_(65504.0)
    assert judge("k", inputs, got, {"o": expected["o"]}).status == "pass"
    got.o.fill_(-math.inf)
    assert judge("k", inputs, got, {"o": expected["o"]}).failures[0].kind == "nonfinite"


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"), [("float16", torch.float16), ("bfloat16", torch.bfloat16), ("float32", torch.float32)]
)
def test_rounding_is_the_dtypes_own(dtype: str, torch_dtype: torch.dtype) -> None:
    form = formats.Format.of(dtype)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20000, generator=generator, dtype=torch.float32) * torch.exp2(
        torch.randint(-30, 12, (20000,), generator=generator)
    )
    assert torch.equal(formats.rounded(x.double(), form), x.to(torch_dtype).double())
    assert formats.rounded(torch.tensor([form.largest * 1.001]).double(), form).item() in (form.largest, math.inf)
    neighbours = (
        torch.nextafter(x.to(torch_dtype), torch.tensor(math.inf, dtype=torch_dtype)).double() - x.to(torch_dtype).double()
    )
    positive = (x > 0) & (x.to(torch_dtype) > 0)
    assert torch.equal(formats.half_ulp(x.to(torch_dtype).double(), form)[positive] * 2, neighbours[positive])


def test_declared_deviations_widen_only_their_own_term() -> None:
    problem = Problem(seqlens_q=(40,), seqlens_k=(40,), dim_qk=32, dim_v=32)
    inputs = materialise(problem, Recipe(), "cpu")
    plain = truth(inputs, Deviations(), "cpu")
    for deviation in (Deviations(prescaled_q=True), Deviations(l_from_rounded_p=True)):
        wider = truth(inputs, deviation, "cpu")
        assert (wider["lse"].allowed > plain["lse"].allowed).all()
    base2 = truth(inputs, Deviations(lse_base2=True), "cpu")
    torch.testing.assert_close(base2["lse"].expected, plain["lse"].expected / math.log(2))
    single = truth(
        materialise(Problem(seqlens_q=(9,), seqlens_k=(9,), dim_qk=8, dim_v=8, dtype="float32"), Recipe(), "cpu"),
        Deviations(),
        "cpu",
    )
    assert single["o"].allowed.max() < 1e-5


def test_a_harness_error_is_never_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("in the oracle")

    monkeypatch.setattr(judging, "truth", broken)
    with pytest.raises(ZeroDivisionError):
        trial.run_trial(Case(kernel=GOOD.name, problem=Problem(seqlens_q=(2,), seqlens_k=(2,), dim_qk=64, dim_v=64)), "cpu")
    assert environment.alive("cpu")
