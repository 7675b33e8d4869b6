"""The verdict's rates: the other rules on hand-made outputs, floors, and that a blunt or a nervous judge is caught."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from support.benchmarks import FOLDER, loaded
from support.emulated.faults import FAULTS
from support.emulated.kernel import KERNEL, kernel_named, registered
from support.verdict import processes, rates, trials
from support.verdict.cases import FAMILIES, drawn_case, families
from support.verdict.floors import FLOORS, Floor, least_hits, lower_limit
from support.verdict.other_rules import RULES, Compared, alarms, close, compared, mean, references, twice
from support.verdict.rates import Rate, machine_object, verdict
from support.verdict.trials import Work, work

from attnfuzz.harness.judge.truth import truth
from attnfuzz.harness.judge.verdict import Figures, Verdict
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels.contract import Deviations, Outputs
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Recipe, case_from_object

SURE = ("O_lastrow_missing", "drop_key_fwdbwd")
"""Faults that any sharp judge finds in every case, however few."""


@pytest.fixture(autouse=True)
def _few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_FEWEST", 3)


# ---------------------------------------------------------------- the other rules


def hand_made(got: float, exact: float, steps: float, products: float, count: int = 4) -> Compared:
    """`count` elements: all as exact as the references but the first, which is `got`, and theirs `steps`, `products`."""

    def tensor(first: float) -> torch.Tensor:
        return torch.tensor([first] + [exact] * (count - 1), dtype=torch.float64)

    return Compared(torch.float16, tensor(got), tensor(exact), tensor(exact), tensor(steps), tensor(products))


def test_close_is_absolute_and_relative() -> None:
    assert close(hand_made(1.0 + 0.0199, 1.0, 1.0, 1.0))
    assert not close(hand_made(1.0 + 0.0201, 1.0, 1.0, 1.0))
    assert close(hand_made(0.0099, 0.0, 0.0, 0.0))
    assert not close(hand_made(float("nan"), 0.0, 0.0, 0.0))


def test_twice_takes_the_largest_error_of_the_reference() -> None:
    assert twice(hand_made(1.1, 1.0, 1.05, 1.0))
    # 1 + 0.3 - 0.3 in fp16 is off by at most half a unit at 1.3: 2 ** -11, doubled.
    assert not twice(hand_made(1.1 + 2.0**-8, 1.0, 1.05, 1.0))
    assert not twice(hand_made(float("nan"), 1.0, 1.05, 1.0))
    assert not twice(hand_made(1.1, 1.0, float("nan"), 1.0))


def test_mean_takes_the_mean_error_of_its_own_reference() -> None:
    assert mean(hand_made(1.0 + 0.0109, 1.0, 9.0, 1.01))
    assert not mean(hand_made(1.0 + 0.0111, 1.0, 9.0, 1.01))
    assert not mean(hand_made(float("nan"), 1.0, 1.0, 1.01))


def test_no_elements_are_no_alarm() -> None:
    empty = torch.zeros(0, dtype=torch.float64)
    assert not alarms({"o": Compared(torch.float16, empty, empty, empty, empty, empty)})


def test_alarms_name_the_rules_that_an_output_breaks() -> None:
    assert alarms({"o": hand_made(1.0, 1.0, 1.0, 1.0), "dq": hand_made(2.0, 1.0, 2.0, 1.0)}) == {"close", "mean"}


def test_the_references_are_near_the_truth_and_their_own_rules_pass_them() -> None:
    problem = Problem(seqlens_q=(40, 0, 9), seqlens_k=(33, 8, 0), dim_qk=32, dim_v=24, heads=4, kv_heads=2, causal="bottom_right")
    inputs = materialise(problem, Recipe(), "cpu")
    exact = {name: each.expected for name, each in truth(inputs, Deviations(), "cpu").items()}
    against = references(inputs, exact)
    for parts, rule in ((against.rounded_steps, twice), (against.half_products, mean)):
        for name in ("o", "dq", "dk", "dv"):
            found = parts[name]
            error = (found - exact[name]).abs()
            assert 0 < error.max() < 5e-3, name
            assert rule(Compared(torch.float16, found, exact[name], against.nearest[name], found, found))


def test_outputs_of_dense_and_ragged_batches_are_compared_with_their_own_rows() -> None:
    for packing in ("dense", "ragged"):
        problem = Problem(seqlens_q=(9, 9), seqlens_k=(5, 5), dim_qk=16, dim_v=16, heads=2, packing=packing, slack_q=3, slack_k=2)
        inputs = materialise(problem, Recipe(), "cpu")
        kernel = KERNEL
        built = kernel.build(problem, kernel.configs(problem)[0], "cpu")
        o, lse = built.forward(inputs)
        made = Outputs(o, lse, *built.backward(inputs, o, lse))
        exact = {name: each.expected for name, each in truth(inputs, Deviations(), "cpu").items()}
        for name, each in compared(made, references(inputs, exact)).items():
            assert each.got.shape == each.exact.shape == each.rounded_steps.shape, name
            assert (each.got - each.exact).abs().max() < 1e-2, name


# ---------------------------------------------------------------- the floors


def test_every_fault_has_floors() -> None:
    assert set(FLOORS) == {each.slug for each in FAULTS}
    for plain, mixed in FLOORS.values():
        assert 0 < plain.element <= 100
        assert plain.every >= plain.element
        assert 0 < mixed.element <= 100


def test_the_lower_limit_is_that_of_clopper_and_pearson() -> None:
    assert lower_limit(50, 50) == pytest.approx(0.05 ** (1 / 50))
    assert lower_limit(0, 50) == 0
    assert lower_limit(18, 50) == pytest.approx(0.2472, abs=5e-4)
    assert Floor(50, 36).limit(every=False, cases=500) == pytest.approx(24.72, abs=0.05)
    assert FLOORS["P_bf16_fwd"][1].limit(every=False, cases=500) == pytest.approx(74.12, abs=0.01)
    assert Floor(50, 100).limit(every=True, cases=8) == pytest.approx(100 * 0.05 ** (1 / 8))


def test_other_cases_are_held_to_what_chance_may_do() -> None:
    # 14 per cent of 105 may well be none of 8, and 100 of 50 may be 7 of 8, but not half of 100.
    assert least_hits(15, 105, 8) == 0
    assert Floor(50, 100).limit(every=False, cases=8, same=False) < 87.5
    assert 50 < Floor(50, 100).limit(every=False, cases=100, same=False) < 95
    assert 55 < Floor(94, 82).limit(every=True, cases=94, same=False) < Floor(94, 82).limit(every=True, cases=94)
    # By hand: 5 of 5 before, 0 of 5 now has a chance of 1 / 252.
    assert least_hits(5, 5, 5, error=1 / 251) == 1
    assert least_hits(5, 5, 5, error=1 / 253) == 0


def test_a_rate_is_below_short_or_neither() -> None:
    assert (Rate(10, 50, 36, 24.7).below, Rate(10, 50, 36, 24.7).short) == (True, False)
    assert (Rate(15, 50, 36, 24.7).below, Rate(15, 50, 36, 24.7).short) == (False, True)
    assert (Rate(18, 50, 36, 24.7).below, Rate(18, 50, 36, 24.7).short) == (False, False)
    assert Rate(0, 0, 36, 24.7).below, "a fault that was never tried is not found"


# ---------------------------------------------------------------- the Cases


@pytest.mark.parametrize("table", ["correct", "plain", "mixed"])
def test_drawn_cases_are_supported_and_the_same_again(table: Any) -> None:
    found = [drawn_case(table, 5, index) for index in range(120)]
    for each in found:
        kernel = kernel_named(each.case.kernel)
        assert kernel.supports(each.case.problem, each.case.config, "cpu") is None
    assert found == [drawn_case(table, 5, index) for index in range(120)]
    assert found != [drawn_case(table, 6, index) for index in range(120)]
    assert {each.family for each in found} == set(families(table))
    assert set(families("mixed")) == {*FAMILIES, "padmask", "zero_q"} - {"zeros"}
    assert len(families("mixed")) == 27


# ---------------------------------------------------------------- the self-test itself


def test_a_sharp_judge_is_right_and_the_figures_do_not_depend_on_the_processes() -> None:
    done = verdict(6, jobs=1, seed=1, faults=SURE)
    assert done.right, (done.alarms, done.below)
    assert [row.fault for row in done.faults] == ["drop_key_fwdbwd"] * 2 + ["O_lastrow_missing"] * 2
    assert sum(row.cases for row in done.families) == 6
    assert all(row.cases and row.outputs for row in done.faults)
    told = machine_object(done)
    assert json.dumps(told)
    assert told["right"] is True
    again = verdict(6, jobs=2, seed=1, faults=SURE)
    assert (again.families, again.faults, again.elements) == (done.families, done.faults, done.elements)
    assert verdict(6, jobs=1, seed=2, faults=SURE[:1]).families != done.families


def cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """The benchmark on few faults, in this process."""
    monkeypatch.delenv("COLUMNS", raising=False)
    few = rates.verdict
    monkeypatch.setattr(rates, "verdict", lambda cases, **options: few(cases, **options, faults=SURE))
    return CliRunner().invoke(loaded("verdict").main, ["--cases", "6", "--jobs", "1", *arguments])


@pytest.mark.slow
def test_the_command_ends_with_0_and_shows_both_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    done = cli(monkeypatch)
    assert done.exit_code == 0, done.output
    for text in ("correct kernels", "planted faults", "O_lastrow_missing", "100/100", "0 false alarms", "flex"):
        assert text in done.output


@pytest.mark.slow
def test_the_command_tells_a_machine_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    done = cli(monkeypatch, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["right"] is True
    assert {"families", "faults", "alarms", "cases", "elements", "seconds", "seed", "below"} <= set(told)
    assert {"rate", "floor", "limit", "hits", "cases", "below", "short"} == set(told["faults"][0]["element"])
    assert set(told["faults"][0]["other_rules"]) == set(RULES)


def passing(name: str, inputs: Any, outputs: Any, expected: Any) -> Verdict:
    return Verdict(status="pass", figures={"o": Figures(elements=1)})


def test_a_judge_that_calls_everything_right_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "judge", passing)
    done = cli(monkeypatch)
    assert done.exit_code == 1, done.output
    assert "found in 0 of" in done.output
    assert "4 of 4 rows below their floors" in done.output


def test_a_judge_that_calls_a_right_case_wrong_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the correct cases, and nothing else, is failed."""
    true, calls = trials.judge, []

    def nervous(name: str, inputs: Any, outputs: Any, expected: Any) -> Verdict:
        told = true(name, inputs, outputs, expected)
        calls.append(name)
        if name.startswith("emulated") and calls.count("emulated") + calls.count("emulated.prescaled") == 8:
            return msgspec.structs.replace(told, status="fail")
        return told

    monkeypatch.setattr(trials, "judge", nervous)
    done = cli(monkeypatch)
    assert done.exit_code == 1, done.output
    assert "1 false alarms" in done.output
    assert '"kernel": "emulated' in done.output


def test_a_judge_of_a_hundred_times_the_budget_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    true = trials.truth

    def widened(*arguments: Any) -> Any:
        import dataclasses

        return {name: dataclasses.replace(each, allowed=each.allowed * 100) for name, each in true(*arguments).items()}

    monkeypatch.setattr(trials, "truth", widened)
    done = verdict(6, jobs=1, faults=("LSE_stored_half", "S_rounded_half", "P_bf16_fwd"))
    assert not done.right
    # Of three cases chance may do much; none at all of what is found always is too few.
    assert len(done.below) >= 2
    assert not done.alarms


def test_a_false_alarm_on_a_faults_case_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(name: str, inputs: Any, outputs: Any, expected: Any) -> Verdict:
        return Verdict(status="fail")

    monkeypatch.setattr(trials, "judge", failing)
    judged = work(Work("plain", 0, {0: ("O_truncated",)}))
    assert judged[0].alarm is not None
    assert judged[0].faults["O_truncated"].every
    case = case_from_object(judged[0].alarm.case)
    monkeypatch.undo()
    with registered():
        assert run_trial(case, "cpu").status == "pass", "the Case of an alarm is one that `attnfuzz repro` can run"


def test_a_fault_is_judged_as_if_it_were_alone() -> None:
    """What the judge counts for one kernel does not loosen what it says of the next."""
    slugs = ("O_lastrow_missing", "dQdK_scale_0.1pct", "P_truncated")
    together = work(Work("mixed", 3, {2: slugs}))[0]
    for slug in slugs:
        assert work(Work("mixed", 3, {2: (slug,)}))[0].faults[slug] == together.faults[slug]


def test_rows_that_see_one_key_almost_alone_are_generic() -> None:
    # Their largest P is 1 in every row: truncated values of O stay within each element's budget, and R alone tells.
    case = drawn_case("mixed", 0, 0).case
    (judged,) = work(Work("mixed", 0, {0: ("O_truncated",)}))
    assert case.problem.scale == 1.5
    assert judged.r is not None
    assert judged.alarm is None
    assert judged.faults["O_truncated"].every
    assert not judged.faults["O_truncated"].element


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(BadArgument, match="cases=0"):
        verdict(0)
    with pytest.raises(BadArgument, match="fault='nothing'"):
        verdict(1, faults=("nothing",))


# ---------------------------------------------------------------- its processes


def test_tasks_are_done_in_this_process_or_in_others() -> None:
    for jobs in (1, 2):
        assert sorted(processes.finished(math.sqrt, [1.0, 4.0, 9.0], jobs)) == [1.0, 2.0, 3.0]


def test_a_task_that_raises_or_kills_its_process_ends_the_run_with_its_reason() -> None:
    for jobs in (1, 2):
        with pytest.raises(ValueError, match=r"domain|nonnegative"):
            list(processes.finished(math.sqrt, [1.0, -1.0], jobs))
    with pytest.raises(processes.LostProcess, match="a process ended in the middle of a task"):
        list(processes.finished(signal.raise_signal, [signal.SIGKILL, signal.SIGKILL], 2))


def test_ctrl_c_while_processes_start_is_answered_afterwards() -> None:
    with processes._without_ctrl_c():
        ignoring = subprocess.run(["sh", "-c", "kill -INT $$; echo on"], capture_output=True, text=True, check=False)
    assert ignoring.stdout == "on\n", "what starts in the block gets none"
    with pytest.raises(KeyboardInterrupt), processes._without_ctrl_c():
        signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_at_once() -> None:
    """130, nothing left behind."""
    command = [sys.executable, str(FOLDER / "verdict.py"), "--jobs", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    group, deadline = process.pid, time.monotonic() + 60
    try:
        while len(members(group)) < 3 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert len(members(group)) >= 3
        os.killpg(group, signal.SIGINT)
        out, error = process.communicate(timeout=120)
        assert (process.returncode, out, error) == (130, "", "interrupted\n")
        while members(group) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not members(group)
    finally:
        if process.poll() is None:
            os.killpg(group, signal.SIGKILL)
            process.wait()


def members(group: int) -> list[int]:
    """Processes of a process group."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                if os.getpgid(int(path.name)) == group:
                    found.append(int(path.name))
            except ProcessLookupError:
                continue
    return found
