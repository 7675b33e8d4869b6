"""Budgets by generated kernels are those of the plain functions: the C is compiled and run here in place of a GPU's."""

from __future__ import annotations

import importlib
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.doubt import MASKS_IN_DOUBT
from support.emulated.sinks import kernel as with_sinks
from support.emulated.whole import WIDE, Emulated
from support.fused_c import Compiled, generated

from attnfuzz.harness.judge.batch import judge_batch
from attnfuzz.harness.judge.together import Launched
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels.contract import Config, Deviations, Outputs
from attnfuzz.kernels.expressions.named import alibi
from attnfuzz.kernels.expressions.tree import to_data
from attnfuzz.kernels.problem import Needs, Problem
from attnfuzz.oracles.budgets.bounds import budgets
from attnfuzz.oracles.fused import fused, stacked, sums_of, whole_of
from attnfuzz.strategies.case import Recipe

launch = importlib.import_module("attnfuzz.oracles.fused.launch")

GOOD = Emulated(capabilities=replace(WIDE, window=True, dims=((32, 24),)))
RAGGED = Problem(
    seqlens_q=(5, 0, 17), seqlens_k=(9, 3, 21), packing="ragged", heads=4, kv_heads=2, dim_qk=32, dim_v=24,
    causal="bottom_right", needs=Needs(dlse=True),
)  # fmt: skip
"""Rows without keys, keys that no row sees, and an empty sequence."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("fused"))


def tensors(x: Any, at: str = "") -> dict[str, torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return {at: x}
    if isinstance(x, dict):
        return {k: v for name, each in x.items() for k, v in tensors(each, f"{at}.{name}").items()}
    if is_dataclass(x):
        return {k: v for f in fields(x) for k, v in tensors(getattr(x, f.name), f"{at}.{f.name}").items()}
    return {}


DECLARED = {
    "plain": Deviations(),
    "dS from rounded P, partial sums": Deviations(ds_from_rounded_p=True, half_partials=True),
    "scaled q, lazy, l from rounded P": Deviations(prescaled_q=True, lazy_rescale=True, l_from_rounded_p=True),
    "Delta of half products, partial O": Deviations(half_delta_products=True, half_partial_o=True),
    "scaled k": Deviations(half_scaled_k=True),
    "LSE of splits": Deviations(half_split_lse=True, split_lse_weights=True),
    "normalised P": Deviations(normalised_p=True),
    "scaled k, O and LSE of splits": Deviations(half_scaled_k=True, half_partial_o=True, half_split_lse=True),
    "tf32": Deviations(tf32_on=("cpu",)),
    "tf32x3": Deviations(tf32x3_on=("cpu",)),
}


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", DECLARED)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("pattern", ["normal", "huge_logits", "ties_q"])
def test_budgets_are_equal(compiled: Compiled, dtype: Any, name: str, ties: bool, pattern: Any) -> None:
    inputs = materialise(replace(RAGGED, dtype=dtype), Recipe(pattern=pattern), "cpu")
    plain = budgets(inputs, DECLARED[name], "cpu", ties=ties)
    compiled.calls.clear()
    with generated(compiled):
        ours = tensors(budgets(inputs, DECLARED[name], "cpu", ties=ties))
    assert len(compiled.calls) > 15
    theirs = tensors(plain)
    assert set(ours) == set(theirs)
    for at, x in theirs.items():
        torch.testing.assert_close(ours[at], x, rtol=1e-9, atol=0.0, equal_nan=True, msg=lambda text, at=at: f"{at}: {text}")


SCORES = {"none": {}, "softcap": {"softcap": 2.0}, "alibi": {"score_mod": to_data(alibi(gradient=True))}}


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", [None, *MASKS_IN_DOUBT])
def test_budgets_with_modifiers_are_equal(compiled: Compiled, mask: str | None, score: str) -> None:
    of_mask = {} if mask is None else {"mask_mod": to_data(MASKS_IN_DOUBT[mask])}
    inputs = materialise(replace(RAGGED, **SCORES[score], **of_mask), Recipe(), "cpu")
    theirs = tensors(budgets(inputs, Deviations(), "cpu"))
    with generated(compiled):
        ours = tensors(budgets(inputs, Deviations(), "cpu"))
    assert set(ours) == set(theirs)
    for at, x in theirs.items():
        torch.testing.assert_close(ours[at], x, rtol=1e-9, atol=0.0, equal_nan=True, msg=lambda text, at=at: f"{at}: {text}")


SHAPES = ((2, 1.0), (4, 0.25), (8, 0.1), (6, 3.0))


def launched(problem: Problem, recipe: Recipe) -> Launched:
    inputs = materialise(problem, recipe, "cpu")
    if problem.sinks:
        return Launched("k", inputs, with_sinks(inputs, first=True), Config())
    with torch.no_grad():
        o, lse = GOOD.forward(inputs)
        dq, dk, dv = GOOD.backward(inputs, o, lse)
    return Launched("k", inputs, Outputs(o=o, lse=lse, dq=dq, dk=dk, dv=dv), Config())


@pytest.mark.parametrize("sinks", [False, True])
def test_cases_judged_together_have_the_same_verdicts(compiled: Compiled, sinks: bool) -> None:
    every = [
        launched(replace(RAGGED, heads=heads, softmax_scale=scale, needs=Needs(), sinks=sinks and seed > 0), Recipe(seed=seed))
        for seed, (heads, scale) in enumerate(SHAPES)
    ]
    plain = [each and each.verdict for each in judge_batch(every, Deviations(), "cpu")]
    with generated(compiled):
        ours = [each and each.verdict for each in judge_batch(every, Deviations(), "cpu")]
    assert ours == plain
    assert any(each is not None and each.figures["dq"].r is not None for each in plain)


def test_a_kernel_is_compiled_once_for_arguments_of_a_kind(compiled: Compiled) -> None:
    x, y = torch.rand(2, 3, 4, dtype=torch.float64).unbind()
    with generated(compiled):
        before = len(compiled.sources)
        for scale in (1.0, 2.0, 3):
            assert torch.equal(sized(x, y, scale, "sum"), (x + y) * scale)
        assert torch.equal(sized(x, y[:1], 2.0, "sum"), (x + y[:1]) * 2)
        assert len(compiled.sources) == before + 2
        assert torch.equal(sized(x, y, 2.0, "difference"), (x - y) * 2)
        assert len(compiled.sources) == before + 3
    assert torch.equal(sized(x, y, 2.0, "difference"), (x - y) * 2)


def test_other_dtypes_are_refused_whatever_was_compiled_before(compiled: Compiled) -> None:
    x = torch.rand(2, 3, dtype=torch.float64)
    with generated(compiled):
        assert torch.equal(sized(x, x, 1.0, "sum"), x + x)
        with pytest.raises(TypeError, match=r"takes float64 and bool, not torch\.float32"):
            sized(x, x.float(), 1.0, "sum")


@fused
def sized(x: torch.Tensor, y: torch.Tensor, scale: float, what: str) -> torch.Tensor:
    return (x + y if what == "sum" else x - y) * scale


@stacked
def _three_results(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x + 1, x > 0, x * 2


@fused
def _two_results(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x * y, x > y, x - y


@pytest.mark.parametrize("y", [torch.ones(2, 3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)])
def test_results_of_several_dtypes_are_those_of_the_plain_function(compiled: Compiled, y: torch.Tensor) -> None:
    x = torch.tensor([[1.0, -2.0, 3.0], [0.0, 4.0, -1.0]], dtype=torch.float64)
    plain = _two_results(x, y)
    with generated(compiled):
        ours = _two_results(x, y)
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(ours, plain, strict=True))
    assert len({each.data_ptr() for each in ours}) == 3


def test_results_of_one_dtype_lie_together_where_that_is_asked_for(compiled: Compiled) -> None:
    x = torch.tensor([[1.0, -2.0, 3.0], [0.0, 4.0, -1.0]], dtype=torch.float64)
    plain = _three_results(x)
    assert whole_of([plain[0], plain[2]]) is None
    with generated(compiled):
        more, positive, twice = _three_results(x)
    for one, other in zip((more, positive, twice), plain, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    whole = whole_of([more, twice])
    assert whole is not None
    assert whole.data_ptr() == more.data_ptr()
    assert torch.equal(whole, torch.stack([more, twice]))
    assert whole_of([twice, more]) is None, "the order counts"
    assert whole_of([more, twice[:1]]) is None
    assert [each.tolist() for each in sums_of([more, twice])] == [each.tolist() for each in sums_of([plain[0], plain[2]])]
    assert [each.tolist() for each in sums_of([more, twice])] == [[[5.0], [6.0]], [[4.0], [6.0]]]
