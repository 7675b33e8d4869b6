"""Rows whose mask is in doubt: not judged, and no reason for an alarm; what is wrong elsewhere is found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.doubt import ALL, FEW, MASKS_IN_DOUBT, ONE, TIES, answered
from support.flex import dense
from support.mutants import kernel_of, mutants
from support.triton_mode import interpreted

from attnfuzz.harness.campaign import coverage as tally
from attnfuzz.harness.campaign.events import KernelSummary
from attnfuzz.harness.judge.judge import judge
from attnfuzz.harness.judge.truth import truth
from attnfuzz.harness.judge.verdict import IN_DOUBT, Verdict
from attnfuzz.harness.report.describe import describe_verdict
from attnfuzz.harness.report.terminal import summary_table
from attnfuzz.harness.trial import trial
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Deviations
from attnfuzz.kernels.expressions.named import alibi, bias, softcap
from attnfuzz.kernels.expressions.tree import KV, Captured, Expression, H, Q, S, load, to_data, to_float
from attnfuzz.kernels.problem import Needs, Problem
from attnfuzz.oracles.budgets.bounds import budgets
from attnfuzz.strategies.case import Case, Recipe

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

SCORES = {
    "none": None,
    "bias": bias(),
    "softcap": softcap(5.0),
    "alibi": alibi(gradient=True),
    "gain": S * load(Captured("gain", ("heads",), gradient=True), H),
}
DTYPES = ("float16", "bfloat16", "float32")
EXACT = to_float(Q) * 0.5 <= to_float(KV) * 1.5


def one_sequence(mask: Expression, **fields: Any) -> Problem:
    plain = {"seqlens_q": (40,), "seqlens_k": (50,), "heads": 4, "kv_heads": 2, "dim_qk": 16, "dim_v": 24}
    return Problem(**{**plain, "mask_mod": to_data(mask), **fields})


def judged(kernel: str, problem: Problem, config: int = 0, **recipe: Any) -> Verdict:
    subject = registry.get(kernel)
    return trial.run_trial(
        Case(kernel=kernel, problem=problem, recipe=Recipe(**recipe), config=subject.configs(problem)[config]), "cpu"
    )


def messages(verdict: Verdict) -> list[str]:
    return [each.message for each in verdict.failures]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", MASKS_IN_DOUBT)
def test_any_answer_to_what_is_in_doubt_passes(name: str, score: str) -> None:
    for at, pattern in enumerate(("normal", "large_logits", "onehot", "v_const", "ties_q")):
        tree = SCORES[score]
        problem = one_sequence(
            MASKS_IN_DOUBT[name], dtype=DTYPES[at % 3], score_mod=None if tree is None else to_data(tree),
            needs=Needs(dlse=at % 2 == 0), causal="bottom_right" if at == 3 else None,
        )  # fmt: skip
        inputs = materialise(problem, Recipe(seed=at, pattern=pattern), "cpu")
        expected = truth(inputs, Deviations(), "cpu")
        assert not any(each.allowed.isnan().any() for each in (*expected.values(), *expected.captured.values()))
        for seed in range(3):
            verdict = judge("any", inputs, answered(inputs, seed), expected)
            assert verdict.status == "pass", (pattern, seed, messages(verdict))


@pytest.mark.parametrize("scale", [4.0, 60.0, 2000.0])
@pytest.mark.parametrize("name", MASKS_IN_DOUBT)
def test_scores_in_doubt_may_be_all_that_counts(name: str, scale: float) -> None:
    """Others vanish beside them, to below float64's range even."""
    for seed in range(3):
        problem = one_sequence(MASKS_IN_DOUBT[name], dtype=DTYPES[seed], softmax_scale=scale, score_mod=to_data(SCORES["gain"]))
        inputs = materialise(problem, Recipe(seed=seed), "cpu")
        expected = truth(inputs, Deviations(), "cpu")
        assert not any(each.allowed.isnan().any() for each in (*expected.values(), *expected.captured.values()))
        verdict = judge("any", inputs, answered(inputs, seed), expected)
        assert verdict.status == "pass", messages(verdict)


def test_what_is_left_unjudged_is_those_rows_alone() -> None:
    inputs = materialise(one_sequence(FEW), Recipe(seed=1), "cpu")
    batch = budgets(inputs, Deviations(), "cpu")
    rows = [7, 14, 21, 28]
    for name, allowed in (("o", batch.outputs["o"].allowed), ("dq", batch.outputs["dq"].allowed), ("lse", batch.lse)):
        endless = allowed.isinf().reshape(4, 40, -1)
        assert endless[:, rows].all(), name
        assert endless.sum() == endless[:, rows].numel(), name
    assert not any(batch.outputs[name].allowed.isinf().any() for name in ("dk", "dv"))
    assert batch.doubted == {"o": 16 * 24, "lse": 16, "dq": 16 * 16, "dk": 0, "dv": 0}


def test_keys_grow_by_what_rows_in_doubt_may_add_to_them() -> None:
    some, none = (
        budgets(materialise(one_sequence(mask), Recipe(seed=1), "cpu"), Deviations(), "cpu")
        for mask in (FEW, FEW & (Q % 7).differs(0) | (Q % 7).equals(0) & (KV > Q))
    )
    assert none.doubted == {"o": 0, "lse": 0, "dq": 0, "dk": 0, "dv": 0}
    # Keys of two rows in doubt: before the first and behind the last.
    for name in ("dk", "dv"):
        allowed = some.outputs[name].allowed
        assert (allowed[:, 7:] > 3 * none.outputs[name].allowed[:, 7:]).any(), name
        assert allowed.max() < 1, name


@pytest.mark.parametrize("chunk", [None, 1, 700, 5000])
@pytest.mark.parametrize("lean", [False, True])
def test_frames_do_not_matter(chunk: int | None, lean: bool) -> None:
    problem = one_sequence(TIES, seqlens_q=(40, 9, 0, 40), seqlens_k=(50, 30, 7, 12))
    inputs = materialise(problem, Recipe(seed=2), "cpu")
    whole, cut = (budgets(inputs, Deviations(), "cpu", chunk=each, lean=of) for each, of in ((None, False), (chunk, lean)))
    assert cut.doubted == whole.doubted
    for name, each in whole.outputs.items():
        assert torch.equal(each.allowed.isinf(), cut.outputs[name].allowed.isinf()), name
    torch.testing.assert_close(cut.lse, whole.lse, rtol=1e-9, atol=1e-35)
    torch.testing.assert_close(cut.outputs["o"].allowed, whole.outputs["o"].allowed, rtol=1e-9, atol=1e-35)


def test_rows_that_see_nothing_for_certain_leave_keys_unjudged() -> None:
    inputs = materialise(one_sequence(ONE), Recipe(seed=1), "cpu")
    batch = budgets(inputs, Deviations(), "cpu")
    # q_idx + 1 is 3 (kv_idx + 1): 13 keys, and no other is seen by any row.
    assert batch.doubted["dk"] == 2 * 13 * 16
    assert (batch.outputs["dv"].allowed[:, 13:] == 0).all()


@pytest.mark.parametrize("mask", [EXACT, Q >= KV, to_float(Q) >= to_float(KV)], ids=str)
def test_exact_masks_are_judged_whole(mask: Expression) -> None:
    inputs = materialise(one_sequence(mask), Recipe(seed=1), "cpu")
    batch = budgets(inputs, Deviations(), "cpu")
    assert not any(batch.doubted.values())
    assert all(each.allowed.isfinite().all() for each in batch.outputs.values())
    like = budgets(materialise(one_sequence(where_whole(mask)), Recipe(seed=1), "cpu"), Deviations(), "cpu")
    for name, each in like.outputs.items():
        assert torch.equal(each.allowed, batch.outputs[name].allowed), name


def where_whole(mask: Expression) -> Expression:
    """The same in whole numbers."""
    return {str(EXACT): Q <= KV * 3}.get(str(mask), Q >= KV)


@interpreted
@pytest.mark.parametrize("lengths", [(40, 50), (64, 64), (33, 130), (100, 36)])
def test_a_right_kernel_passes_with_some_not_judged(lengths: tuple[int, int]) -> None:
    for seed in (1, 2):
        verdict = judged("triton.flex", dense(*lengths, mask=TIES, dtype="float16"), seed=seed)
        assert verdict.status == "pass", messages(verdict)
        figures = verdict.figures
        assert all(0 < figures[name].doubted < figures[name].elements for name in ("o", "lse", "dq"))
        assert f"more not judged ({IN_DOUBT})" in describe_verdict(verdict)[0]
        assert not any(figures[name].doubted for name in ("dk", "dv"))


@interpreted
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if number % 3 == turn else pytest.mark.slow)
        for number, name in enumerate(MASKS_IN_DOUBT)
        for turn, dtype in enumerate(DTYPES)
    ],
)
def test_every_mask_in_doubt_passes_on_a_right_kernel(name: str, dtype: str) -> None:
    problem = dense(40, 70, mask=MASKS_IN_DOUBT[name], score=alibi(gradient=True), dtype=dtype, causal="bottom_right")
    assert messages(judged("triton.flex", problem, seed=5)) == []


@interpreted
def test_where_all_is_in_doubt_the_verdict_says_so() -> None:
    verdict = judged("triton.flex", dense(40, 50, mask=ALL))
    assert {name: figures.unjudged for name, figures in verdict.figures.items()} == dict.fromkeys(verdict.figures, IN_DOUBT)
    assert describe_verdict(verdict)[0] == f"O: not judged ({IN_DOUBT})"
    counts = tally.Tally()
    counts.add("generate", Case(kernel="triton.flex", problem=dense(40, 50, mask=ALL)), verdict)
    assert {(each.cases, each.unjudged, each.doubted) for each in counts.outputs.values()} == {(0, 1, 0)}


@interpreted
def test_what_is_judged_in_part_is_counted() -> None:
    problem = dense(40, 50, mask=FEW)
    counts = tally.Tally()
    counts.add("generate", Case(kernel="triton.flex", problem=problem), judged("triton.flex", problem))
    assert (counts.outputs["o"].cases, counts.outputs["o"].unjudged, counts.outputs["o"].doubted) == (1, 0, 1)
    table = summary_table((KernelSummary("triton.flex", 1, 0, 1.0, 0, 0.0, counts.outputs, ()),))
    assert list(table.columns[2].cells) == ["1 (1 in part)"] * 3 + ["1"] * 2


IN_OTHER_ROWS = {
    "LSE-14-flex": (TIES, (70, 100), "lse"),
    "BWD-31": (TIES, (70, 100), "dq"),
    "FLX-43": (FEW, (70, 100), "o lse dq dk dv"),
    "FLX-11": (TIES, (128, 128), "dk dv"),
    "FLX-44": (TIES, (128, 128), "o lse dq dk dv"),
}
"""Mutants by id, with a mask in doubt, lengths, and the outputs that are wrong."""


@interpreted
@pytest.mark.parametrize("id_", IN_OTHER_ROWS)
def test_a_fault_in_other_rows_is_found(id_: str) -> None:
    mask, lengths, shows = IN_OTHER_ROWS[id_]
    problem = dense(*lengths, batch=1, mask=mask)
    kernel = registry.register(kernel_of(mutants()[id_]))
    try:
        verdict = judged(kernel.name, problem)
    finally:
        registry.unregister(kernel.name)
    assert judged("triton.flex", problem).status == "pass"
    assert set(shows.split()) <= {each.output for each in verdict.failures}, messages(verdict)
