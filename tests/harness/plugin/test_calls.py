"""Sequences of calls: each rule is used, and each planted fault in what calls leave behind is found, with the calls it needs."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from support.state_faults import FAULTS

from attnfuzz.harness.campaign.corpus import read_case
from attnfuzz.harness.campaign.runner import TrialRunner
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.campaign.shrink import Shrinker
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.plugin import calls, fuzz_calls
from attnfuzz.harness.repro.reproduce import Where, reproduce
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.call_sequences import call_machine
from attnfuzz.strategies.case import CALLS, Case
from attnfuzz.strategies.cases import Limits
from attnfuzz.strategies.draw import no_local_constants
from attnfuzz.strategies.neighbours import differences
from attnfuzz.strategies.variants import all_variants

NEED_NO_CALLS = {"always", "sometimes"}
FAST = {"mask", "counter", "always"}


@pytest.fixture(scope="module")
def children() -> Iterator[Isolated]:
    made = Isolated("cpu", deadline=4.0)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def test_every_rule_makes_calls_and_a_sequence_begins_in_a_new_process() -> None:
    kernel = registry.get("triton.varlen")
    changes: Counter[str] = Counter()
    sequences: list[list[Case]] = []

    def call(case: Case) -> None:
        own = sequences[-1]
        if own:
            changes.update([", ".join(differences(own[-1], case)) or "nothing"])
        changes["back"] += case in own[:-1] and case != own[-1]
        own.append(case)

    machine = call_machine(
        kernel,
        device="cpu",
        limits=Limits(batch=3, length=40, tiles=4),
        variants=all_variants(kernel, "cpu")[::7],
        begin=lambda: sequences.append([]),
        call=call,
    )
    with no_local_constants():
        run_state_machine_as_test(
            seed(1)(machine),
            settings=settings(
                max_examples=60,
                stateful_step_count=12,
                phases=(Phase.generate,),
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    assert len(sequences) >= 60
    assert {"nothing", "seed", "softmax_scale", "causal", "layouts", "back"} <= {each for each, count in changes.items() if count}
    assert any(each in ("seqlen_q", "seqlen_k", "both lengths") for each in changes), changes
    assert changes["layouts"] > 10
    assert any("dtype" in each for each in changes), changes
    assert all(case.check == "oracle" and not case.after for own in sequences for case in own)


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each not in FAST)) for each in sorted(FAULTS)])
def test_what_a_call_leaves_behind_is_found(
    name: str, children: Isolated, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = registry.register(FAULTS[name])
    of = Settings(device="cpu", max_examples=60, seed=1, shrink=8.0, out=str(tmp_path))
    search = calls._Search(kernel, of, TrialRunner(children))
    search.run(10)
    assert search.finding is not None, f"not found in {search.calls} calls"
    assert read_case(search.finding.path or "").case == search.finding.case
    search.minimise()
    finding = search.finding
    assert [str(each) for each in (tmp_path / "cases").iterdir()] == [finding.path], "it replaces the first one"
    assert finding.path is not None
    stored = read_case(finding.path)
    assert len(stored.case.after) <= 3
    own_calls = stored.case.check in CALLS
    assert name in NEED_NO_CALLS or own_calls or stored.case.after or finding.rate is not None
    if finding.rate is None:
        assert reproduce(stored.case, Where("cpu")).verdict.failures


def test_a_right_kernel_passes(children: Isolated) -> None:
    search = calls._Search(
        registry.get("torch.reference_cpu"), Settings(device="cpu", max_examples=10, seed=2, out=None), TrialRunner(children)
    )
    search.run(8)
    search.minimise()
    assert search.finding is None
    assert search.calls > 20


def test_a_budget_is_the_only_limit(children: Isolated) -> None:
    kernel = registry.get("torch.reference_cpu")
    search = calls._Search(kernel, Settings(device="cpu", budget=3.0, max_examples=None, seed=2, out=None), TrialRunner(children))
    # The first process takes longer than all of the budget where others are at work.
    small = Problem(seqlens_q=(2,), seqlens_k=(2,), dim_qk=16, dim_v=16, dtype="float32")
    assert children.trial(Case(kernel=kernel.name, problem=small)).status == "pass"
    start = time.monotonic()
    search.run(2)
    assert 3.0 <= time.monotonic() - start < 10.0
    assert search.calls > 3


def test_ctrl_c_while_it_is_shrunk_loses_no_failure(children: Isolated, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Shrinker, "shrink", interrupted)
    search = calls._Search(
        registry.register(FAULTS["always"]),
        Settings(device="cpu", max_examples=60, seed=1, out=str(tmp_path)),
        TrialRunner(children),
    )
    search.run(10)
    with pytest.raises(KeyboardInterrupt):
        search.minimise()
    assert search.finding is not None
    assert read_case(search.finding.path or "").case == search.finding.case


RIGHT = """
from attnfuzz.harness import fuzz_calls

test_calls = fuzz_calls("torch.reference_cpu", max_examples=2, max_calls=3)
"""
WRONG = """
from attnfuzz.harness import fuzz_calls

test_calls = fuzz_calls("support.state_faults:COUNTER", max_examples=30)
"""


def pytest_of(pytester: pytest.Pytester, text: str, *arguments: str) -> pytest.RunResult:
    pytester.makepyfile(test_them=text)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "--attnfuzz-device", "cpu", "--attnfuzz-seed", "0", *arguments)


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    return pytester


def test_a_file_whose_kernel_is_right_passes(folder: pytest.Pytester) -> None:
    pytest_of(folder, RIGHT).assert_outcomes(passed=1)
    pytest_of(folder, RIGHT, "--attnfuzz-in-process").assert_outcomes(skipped=1)


@pytest.mark.slow
def test_a_failure_is_shown_and_kept_and_its_file_fails_again(folder: pytest.Pytester) -> None:
    result = pytest_of(folder, WRONG)
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "state.counter: mismatch in O" in text
    assert "Traceback" not in text
    (file,) = (folder.path / ".attnfuzz" / "cases").iterdir()
    again = pytest_of(folder, WRONG, "--attnfuzz-case", str(file))
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines([f"FAILED {file}*"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_examples": 0}, "max_examples=0: nothing would be tried; give a whole number, 1 or more"),
        ({"max_calls": 1}, "max_calls=1: nothing would be tried; give a whole number, 2 or more"),
        ({"max_calls": "3"}, "max_calls='3': nothing would be tried; give a whole number, 2 or more"),
        ({"seed": -1}, "seed=-1: must not be negative; give 0 or more"),
    ],
)
def test_wrong_arguments_are_named(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fuzz_calls("torch.reference_cpu", **arguments)
