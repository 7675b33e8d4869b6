"""Sequences of calls: which come before a Case's own, and what may differ between equal ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.calls import PROBLEM, WIDE, Spoil, Subject
from support.mutants import kernel_of, mutants
from support.runs import FunctionExecutor

from attnfuzz.harness.campaign.corpus import read_case
from attnfuzz.harness.campaign.events import Finding
from attnfuzz.harness.campaign.runner import TrialRunner
from attnfuzz.harness.campaign.shrink import Shrinker
from attnfuzz.harness.core import environment
from attnfuzz.harness.judge.failure import own_message
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial.checks import calls
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.supports import why_not_case
from attnfuzz.harness.trial.trial import check_runnable, run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Device
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import OUTPUT_NAMES, Problem
from attnfuzz.strategies.case import CALLS, Case, Check, Recipe
from attnfuzz.strategies.earlier_calls import earlier_problems, other_problems, why_not_call
from attnfuzz.strategies.trials import call_checks


def bits_differ(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """What a GPU says of pairs in one launch."""

    def words(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)

    return [torch.tensor([int((words(one) != words(other)).any())]) for one, other in pairs]


@pytest.fixture(autouse=True, scope="module", params=["values", "bits first"])
def compared(request: pytest.FixtureRequest) -> Iterator[None]:
    """How equal calls are compared: as on a CPU, and as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "bits first":
            patch.setattr(calls, "differing", bits_differ)
        yield


def tried(subject: Subject, check: Check, problem: Problem = PROBLEM, seed: int = 0) -> Verdict:
    registry.register(subject)
    try:
        return run_trial(Case(kernel=subject.name, problem=problem, recipe=Recipe(seed=seed), check=check), "cpu")
    finally:
        registry.unregister(subject.name)


# --- which calls come before


def test_the_case_is_the_last_call() -> None:
    for check in CALLS:
        subject = Subject()
        assert tried(subject, check).status == "pass"
        case = Case(kernel=subject.name, problem=PROBLEM, check=check)
        assert subject.calls == [*earlier_problems(subject, case, "cpu"), PROBLEM]


def test_which_calls_come_before() -> None:
    subject = Subject()

    def before(check: Check) -> tuple[Problem, ...]:
        return earlier_problems(subject, Case(kernel=subject.name, problem=PROBLEM, check=check), "cpu")

    assert before("twice") == (PROBLEM,)
    first, middle, last = before("other_shape")
    assert first == last
    assert middle == PROBLEM
    assert first == replace(PROBLEM, seqlens_q=first.seqlens_q, seqlens_k=first.seqlens_k)
    (scaled,) = before("other_scale")
    assert scaled == replace(PROBLEM, softmax_scale=scaled.softmax_scale)
    assert scaled.scale != PROBLEM.scale
    assert before("other_mask") == (replace(PROBLEM, causal="top_left"),)


def test_other_shapes_are_both_larger_and_smaller_and_follow_from_the_case() -> None:
    subject = Subject()
    totals = set()
    for seed in range(30):
        case = Case(kernel=subject.name, problem=PROBLEM, recipe=Recipe(seed=seed), check="other_shape")
        first = earlier_problems(subject, case, "cpu")[0]
        assert first == earlier_problems(subject, case, "cpu")[0]
        totals.add(first.total_q)
    assert min(totals) < PROBLEM.total_q < max(totals)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_other_problem_is_one_that_the_kernel_takes(data: st.DataObject) -> None:
    dense, equal = data.draw(st.booleans()), data.draw(st.booleans())
    zero, longest = data.draw(st.booleans()), data.draw(st.sampled_from((None, 9)))
    lengths = st.lists(st.integers(0 if zero else 1, 9), min_size=1, max_size=3)
    q = data.draw(lengths)
    q = q[:1] * len(q) if dense else q
    k = q if equal else [min(9, n + 1) for n in q]
    can = replace(WIDE, unequal=not equal, zero_q=zero, zero_k=zero, length_max=longest)
    problem = replace(PROBLEM, seqlens_q=tuple(q), seqlens_k=tuple(k), packing="dense" if dense else "ragged")
    subject = Subject(capabilities=can)
    for check in ("other_shape", "other_scale", "other_mask"):
        for other in other_problems(subject, check, problem, Config(), "cpu"):
            assert other != problem
            assert subject.supports(other, Config(), "cpu") is None
            if check == "other_shape":
                assert (other.total_q, other.total_k) != (problem.total_q, problem.total_k)


# --- where a check makes no sense


def test_a_check_that_makes_no_sense_is_refused_with_its_reason() -> None:
    subject = Subject(capabilities=replace(WIDE, causal=(None,)))
    case = Case(kernel=subject.name, problem=PROBLEM, check="other_mask")
    reason = "check='other_mask': test.calls takes no Problem that differs from this one in its mask"
    assert why_not_call(subject, case, "cpu") == why_not_case(subject, case, "cpu") == reason
    registry.register(subject)
    try:
        with pytest.raises(BadArgument, match=f"does not support it: {reason}; give a Case within its capabilities"):
            check_runnable(case, "cpu")
    finally:
        registry.unregister(subject.name)
    assert why_not_case(subject, replace(case, check="twice"), "cpu") is None


def test_what_the_kernel_does_not_take_comes_before_what_the_check_asks() -> None:
    case = Case(kernel="test.calls", problem=replace(PROBLEM, dtype="float16"), check="other_scale")
    assert "dtype" in str(why_not_case(Subject(), case, "cpu"))


def test_a_kernel_with_one_length_has_no_other_shape() -> None:
    one = Subject(refuses=lambda problem: None if problem.seqlens_q == (5, 7) else "only 5 and 7 queries")
    assert why_not_call(one, Case(kernel=one.name, problem=PROBLEM, check="other_shape"), "cpu") is not None


def test_only_checks_that_make_sense_are_drawn_the_oracle_first() -> None:
    def drawn_checks(subject: Subject) -> set[str]:
        checks: set[str] = set()

        @given(call_checks(subject, PROBLEM, Config(), "cpu"))
        @settings(max_examples=80, database=None)
        def draw(check: str) -> None:
            checks.add(check)

        draw()
        return checks

    assert drawn_checks(Subject()) == {"oracle", *CALLS}
    assert drawn_checks(Subject(capabilities=replace(WIDE, causal=(None,)))) == {"oracle", "twice", "other_shape", "other_scale"}


# --- what may differ


def nth(number: int, name: str, change: Callable[[torch.Tensor], Any]) -> Spoil:
    """Change output `name` of call `number`."""

    def spoil(subject: Subject, problem: Problem, out: dict[str, torch.Tensor]) -> None:
        if len(subject.calls) == number:
            change(out[name])

    return spoil


def one_ulp(x: torch.Tensor) -> None:
    x[2, 1, 3] = torch.nextafter(x[2, 1, 3], torch.tensor(torch.inf))


def test_a_bit_of_difference_in_a_deterministic_output_is_named() -> None:
    verdict = tried(Subject(nth(2, "dq", one_ulp)), "twice")
    (failure,) = verdict.failures
    assert (failure.kind, failure.check, failure.output) == ("nondeterministic", "twice", "dq")
    assert failure.message.startswith(
        "dQ: 1 of 384 elements differs between two equal calls (declared deterministic); "
        "worst at sequence 0, query 2, head 1, dim 3: "
    )
    assert failure.place is not None
    assert failure.place.got > failure.place.expected
    assert f"{failure.place.expected:.9g} in the first call, {failure.place.got:.9g} in the last" in failure.message


def test_the_same_bit_in_an_output_that_declares_nothing_passes() -> None:
    free = replace(WIDE, deterministic=("o", "lse"))
    assert tried(Subject(nth(2, "dq", one_ulp), capabilities=free), "twice").status == "pass"


def test_more_than_another_order_explains_is_named_where_nothing_is_declared() -> None:
    free = replace(WIDE, deterministic=())
    verdict = tried(Subject(nth(1, "dq", lambda dq: dq[2, 1, 3].add_(0.5)), capabilities=free), "twice")
    (failure,) = verdict.failures
    assert failure.kind == "nondeterministic"
    assert "another order of additions explains" in failure.message


SUBNORMAL = next(
    recipe
    for recipe in (Recipe(pattern="subnormal", seed=seed) for seed in range(99))
    if materialise(PROBLEM, recipe, "cpu").d_o.abs().max() < 1e-30
)
"""Values by which dO, and so dQ, is around the smallest normal float32."""


def flush(x: torch.Tensor) -> None:
    """Lose what atomic additions may lose by their order."""
    small = (x != 0) & (x.abs() < 2.0**-126)
    assert small.any()
    x[small] = 0.0


@pytest.mark.parametrize(("spoil", "status"), [(flush, "pass"), (lambda dq: dq[2, 1, 3].add_(1e-35), "fail")])
def test_sums_that_are_flushed_are_explained_by_another_order(spoil: Callable[[torch.Tensor], Any], status: str) -> None:
    free = replace(WIDE, deterministic=())
    subject = Subject(nth(2, "dq", spoil), capabilities=free)
    registry.register(subject)
    try:
        case = Case(kernel=subject.name, problem=PROBLEM, recipe=SUBNORMAL, check="twice")
        verdict = run_trial(case, "cpu")
    finally:
        registry.unregister(subject.name)
    assert verdict.status == status, verdict.failures
    assert {each.kind for each in verdict.failures} <= {"nondeterministic", "mismatch"}


def test_zeros_of_other_sign_differ_to_the_bit() -> None:
    hidden = replace(PROBLEM, causal="top_left", seqlens_q=(1,), seqlens_k=(3,))
    verdict = tried(Subject(nth(2, "dk", lambda dk: dk[2].fill_(-0.0))), "twice", hidden)
    assert [each.kind for each in verdict.failures] == ["nondeterministic"]


def test_nan_equals_nan_and_slack_rows_are_not_compared() -> None:
    def spoil(subject: Subject, problem: Problem, out: dict[str, torch.Tensor]) -> None:
        out["dv"][1].fill_(torch.nan)
        out["o"][problem.total_q :] = float(len(subject.calls))
        out["lse"][:, problem.total_q :] = float(len(subject.calls))

    verdict = tried(Subject(spoil), "twice", replace(PROBLEM, slack_q=3, slack_k=2))
    assert [(each.kind, each.output) for each in verdict.failures] == [("nonfinite", "dv")]


def test_another_shape_in_the_second_call_is_named() -> None:
    def spoil(subject: Subject, problem: Problem, out: dict[str, torch.Tensor]) -> None:
        if len(subject.calls) == 1:
            out["dq"] = out["dq"].double()

    verdict = tried(Subject(spoil), "twice")
    message = "dQ: (12, 2, 16) torch.float64 in the first of two equal calls, (12, 2, 16) torch.float32 in the last"
    assert verdict.failures[0].message == message


@pytest.mark.parametrize("broken", [None, "text"])
def test_what_is_no_tensor_is_left_to_the_judge(broken: object) -> None:
    def spoil(subject: Subject, problem: Problem, out: dict[str, Any]) -> None:
        out["dk"] = broken

    assert [each.kind for each in tried(Subject(spoil), "twice").failures] == ["contract"]


def test_an_output_in_the_first_calls_memory_is_named() -> None:
    def spoil(subject: Subject, problem: Problem, out: dict[str, torch.Tensor]) -> None:
        buffer = subject.kept.setdefault("dv", out["dv"])
        buffer.copy_(out["dv"])
        out["dv"] = buffer

    (failure,) = tried(Subject(spoil), "twice").failures
    assert (failure.kind, failure.check, failure.output) == ("guard", "outputs reused", "dv")


def test_wrong_values_returned_in_the_first_calls_memory_still_differ_from_the_first() -> None:
    def spoil(subject: Subject, problem: Problem, out: dict[str, torch.Tensor]) -> None:
        buffer = subject.kept.setdefault("dv", out["dv"])
        buffer.copy_(out["dv"] * len(subject.calls))
        out["dv"] = buffer

    kinds = [each.kind for each in tried(Subject(spoil), "twice").failures]
    assert kinds == ["nondeterministic", "guard", "mismatch"]


@pytest.mark.parametrize(
    ("check", "key"),
    [
        ("other_scale", lambda problem: problem.scale),
        ("other_mask", lambda problem: 0.5 if problem.causal else 1.0),
        ("other_shape", lambda problem: problem.total_q),
    ],
)
def test_a_value_kept_from_the_first_call_shows_in_the_last(check: Check, key: Callable[[Problem], float]) -> None:
    def spoil(subject: Subject, problem: Problem, out: dict[str, torch.Tensor]) -> None:
        out["o"] *= subject.kept.setdefault("first", key(problem)) / key(problem)

    verdict = tried(Subject(spoil), check)
    assert [(each.kind, each.output) for each in verdict.failures] == [("mismatch", "o")]
    assert tried(Subject(spoil), "oracle").status == "pass"


@pytest.mark.any_device
@pytest.mark.usefixtures("unchecked")
def test_a_workspace_of_other_lengths_is_watched_in_later_calls() -> None:
    device: Device = "cuda" if environment.has_cuda() else "cpu"
    kernel = kernel_of(mutants()["HST-35"])
    if reason := kernel.unavailable(device):
        pytest.skip(reason)
    registry.register(kernel)
    problem = replace(PROBLEM, dim_qk=64, dim_v=64, dtype="float16")
    try:
        kinds = set()
        for seed in range(4):
            kernel = kernel_of(mutants()["HST-35"])
            registry.register(kernel)
            case = Case(kernel=kernel.name, problem=problem, recipe=Recipe(seed=seed), config=kernel.configs(problem)[0])
            assert run_trial(case, device).status == "pass"
            kernel = kernel_of(mutants()["HST-35"])
            registry.register(kernel)
            kinds |= {each.check for each in run_trial(replace(case, check="other_shape"), device).failures}
    finally:
        registry.unregister(kernel.name)
    assert kinds == {"earlier memory"}


def test_what_goes_wrong_in_an_earlier_call_says_so() -> None:
    def spoil(subject: Subject, problem: Problem, out: dict[str, torch.Tensor]) -> None:
        if problem.causal:
            raise ValueError("no masks today")

    (failure,) = tried(Subject(spoil), "other_mask").failures
    assert failure.kind == "exception"
    assert failure.message == "backward raised ValueError: no masks today (in the call before, of check other_mask)"
    # It is the bug that a Case with a mask shows in its own call, which is shrunk once.
    assert failure.identity.message == "backward raised ValueError: no masks today"


@pytest.mark.parametrize("cut", [None, 70, 48])
def test_a_file_of_an_earlier_version_has_the_failure_of_the_call_before_as_its_own(cut: int | None, tmp_path: Path) -> None:
    message = "backward raised ValueError: no masks today (in the call before, of check other_mask)"[:cut]
    identity = {"kernel": "acme.flash", "kind": "exception", "output": None, "check": "backward", "message": message}
    problem = {"seqlens_q": [2], "seqlens_k": [3], "dim_qk": 16, "dim_v": 16}
    file = tmp_path / "case.json"
    file.write_text(json.dumps({"format": 1, "kernel": "acme.flash", "problem": problem, "found": {"identity": identity}}))
    stored = read_case(file).finding.identity
    assert stored is not None
    assert stored.message == "backward raised ValueError: no masks today"


def test_other_brackets_of_a_message_stay() -> None:
    for text in ("f(x) failed (in the kernel)", "no room (int)", "no masks", ""):
        assert own_message(text) == text


# --- shrinking


def sighting(fails: Callable[[Case, int], bool], check: Check = "oracle") -> tuple[Case, Finding]:
    """What a Shrinker makes of a Case that fails where `fails(case, calls made in its process)` says."""
    subject = Subject()
    made = 0

    def verdict(case: Case) -> Verdict:
        nonlocal made
        wrong = fails(case, made)
        made += 1 + len(earlier_problems(subject, case, "cpu") if case.check != "oracle" else ())
        return failing if wrong else Verdict(status="pass")

    def fresh() -> None:
        nonlocal made
        made = 0

    registry.register(bad := Subject(nth(1, "o", lambda o: o.mul_(2.0))))
    failing = run_trial(Case(kernel=bad.name, problem=PROBLEM), "cpu")
    registry.unregister(bad.name)
    identity = failing.failures[0].identity
    case = Case(kernel=subject.name, problem=PROBLEM, check=check)
    made = 5
    runner = TrialRunner(FunctionExecutor(verdict, fresh))
    supported = lambda each: why_not_case(subject, each, "cpu") is None  # noqa: E731
    return case, Shrinker(Finding(identity, case, failing), runner, supported, ()).shrink(60.0)


def test_a_failure_of_calls_is_not_shrunk_to_one_call_in_a_used_process() -> None:
    _, seen = sighting(lambda case, made: made > 0 or case.check == "other_scale", "other_scale")
    assert (seen.case.check, seen.case.problem.batch, seen.partly, seen.rate) == ("other_scale", 1, False, None)


def test_a_failure_of_calls_that_a_used_process_hides_is_shrunk() -> None:
    """A cache has the right scale there already: each step passed, until one had another key."""
    _, seen = sighting(lambda case, made: made == 0 and case.check == "other_scale", "other_scale")
    assert (seen.case.check, seen.case.problem.batch, seen.partly, seen.rate) == ("other_scale", 1, False, None)


def test_a_plain_failure_found_by_calls_is_shrunk_to_one_call() -> None:
    _, seen = sighting(lambda case, made: True, "other_scale")
    assert (seen.case.check, seen.case.problem.batch, seen.partly) == ("oracle", 1, False)


def test_a_failure_that_earlier_cases_cause_becomes_one_of_calls() -> None:
    _, seen = sighting(lambda case, made: made > 0 or case.check == "other_mask")
    assert (seen.case.check, seen.partly, seen.rate) == ("other_mask", False, None)


def test_one_that_no_calls_explain_keeps_its_rate() -> None:
    """The first of ten calls in a new process is right."""
    _, seen = sighting(lambda case, made: made > 0 and case.check == "oracle")
    assert (seen.case.check, seen.rate) == ("oracle", (9, 10))


def test_outputs_are_all_compared() -> None:
    for name in OUTPUT_NAMES:
        flip: Spoil = nth(2, name, lambda x: x.view(-1)[0].mul_(1 + 2**-20))
        verdict = tried(Subject(flip), "twice")
        assert [(each.kind, each.output) for each in verdict.failures][:1] == [("nondeterministic", name)]
