"""A kernel team's five-line test file, its failures, and pytest's own options beside those of attnfuzz."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.acme import FAILING, PASSING, pytest_here, pytest_of


def test_five_lines_gate_a_correct_kernel(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_acme=PASSING)
    result = pytest_of(acme, "-v", "--attnfuzz-seed", "3")
    result.assert_outcomes(passed=2)
    told = "attnfuzz: acme.flash in 2 tests; device=cpu profile=quick seed=3 budget=as the tests say"
    result.stdout.fnmatch_lines(["attnfuzz: device=cpu seed=3", told, "*::test_kernel?0? PASSED*", "*::test_kernel?1? PASSED*"])
    assert [each.name for each in (acme.path / ".attnfuzz").iterdir()] == ["runs"]
    runs = [json.loads(each.read_text()) for each in (acme.path / ".attnfuzz" / "runs").iterdir()]
    assert [(each["state"], each["settings"]["seed"]) for each in runs] == [("finished", 3)] * 2
    assert len({each["session"] for each in runs}) == 1, "one report shows both shards"


def test_a_faulty_kernel_fails_with_its_minimal_case_and_how_to_run_it_again(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_acme=FAILING)
    result = pytest_here(acme, "--attnfuzz-out", "found", "-k", "0")
    result.assert_outcomes(failed=1, deselected=1)
    result.stdout.fnmatch_lines(
        [
            "*1. acme.faulty: exception in forward (forward raised ValueError: more than # keys) (found after *",
            "   seqlen_q x seqlen_k  *6 (ragged)",
            "   heads                1 query, 1 key/value (groups of 1)",
            "   exception: forward raised ValueError: more than 5 keys",
            "   run it again: *pytest test_acme.py::test_kernel --attnfuzz-case found/cases/acme.faulty-forward-exception-*.json",
            "   without that file:   pytest test_acme.py::test_kernel --attnfuzz-case AF1-*",
            '   to keep it:          fuzz(..., cases=?"AF1-*"?)',
        ]
    )
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*_run_shard*")
    [path] = (acme.path / "found" / "cases").iterdir()
    assert path.suffix == ".json"


def test_the_shards_share_the_work_among_xdist_workers(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_acme=PASSING)
    result = pytest_of(acme, "-n", "2", "-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines_random(["*gw*PASSED*test_kernel[[]0]*", "*gw*PASSED*test_kernel[[]1]*"])


@pytest.mark.slow
def test_only_the_named_kernels_run(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_acme=PASSING, test_faulty=FAILING)
    result = pytest_here(acme, "-rs", "--attnfuzz-kernel", "acme.flash")
    result.assert_outcomes(passed=2, skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED*: --attnfuzz-kernel names acme.flash"])


def test_a_misspelt_kernel_is_no_empty_run(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_acme=PASSING)
    result = pytest_here(acme, "--attnfuzz-kernel", "acme.flush")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*no kernel of that name is installed; did you mean 'acme.flash'?"])


def test_the_beginning_of_names_is_no_kernel(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("from attnfuzz.harness.plugin import fuzz\n\ntest_group = fuzz('torch', shards=1)\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*kernel='torch': it is no kernel, but the beginning of *; give one of torch.cudnn, *"])


def test_a_kernel_that_cannot_run_here_is_skipped_with_the_reason(acme: pytest.Pytester) -> None:
    acme.makepyfile(
        test_acme="""
        from acme import Capabilities, Kernel
        from attnfuzz.harness.plugin import fuzz

        class Absent(Kernel):
            def unavailable(self, device):
                return "its compiler is missing"

        class Elsewhere(Kernel):
            capabilities = Capabilities(devices=("cuda",))

        test_absent = fuzz(Absent(), shards=1)
        test_elsewhere = fuzz(Elsewhere(), shards=1)
        """
    )
    result = pytest_here(acme, "-rs")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines_random(
        [
            "SKIPPED*: acme.flash cannot run on cpu here: its compiler is missing",
            "SKIPPED*: acme.flash cannot run on cpu here: it is declared for cuda only",
        ]
    )


@pytest.mark.slow
def test_a_failure_under_xdist_is_short_and_in_junit_with_its_figures(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_acme=FAILING, test_good=PASSING)
    result = pytest_of(acme, "-n", "2", "--junitxml", "junit.xml", "--attnfuzz-out", "found", "--attnfuzz-max-failures", "1")
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"] >= 2, outcomes["failed"] >= 1) == (True, True), outcomes
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.fnmatch_lines(
        [
            "seed 0: the same cases again by --attnfuzz-seed 0",
            "test_acme.py::test_kernel (acme.faulty): *, [1-9]* failure*",
            "test_good.py::test_kernel (acme.flash): 12 cases, 0 failures; worst error / budget 0.??*",
        ]
    )
    suite = ElementTree.parse(acme.path / "junit.xml").getroot()
    found: dict[str, list[dict[str, str]]] = {"acme.flash": [], "acme.faulty": []}
    for case in suite.iter("testcase"):
        properties = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
        found[properties["attnfuzz.kernel"]].append({**properties, "failure text": case.findtext("failure") or ""})
    assert [len(each) for each in found.values()] == [2, 2]
    for properties in found["acme.flash"]:
        assert int(properties["attnfuzz.cases"]) >= 1
        assert 0 <= float(properties["attnfuzz.o.worst_error_over_budget"]) <= 1
        assert (properties["attnfuzz.failures"], properties["failure text"]) == ("0", "")
    failed = [each for each in found["acme.faulty"] if each["failure text"]]
    shrunk = [each for each in failed if each["attnfuzz.failures"] != "0"]
    assert len(shrunk) == 1
    assert all(each["attnfuzz.failures_elsewhere"] == "1" for each in failed if each not in shrunk)
    for properties in shrunk:
        assert properties["attnfuzz.failure"].startswith("acme.faulty: exception in forward")
        assert Path(acme.path / properties["attnfuzz.failure.case"]).is_file()
        assert "run it again:" in properties["failure text"]
        assert "more than 5 keys" in properties["failure text"]
        assert len(properties["failure text"].splitlines()) < 20
    assert len(failed) == outcomes["failed"]


def test_stop_at_first_and_last_failed(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_a=FAILING.replace("max_examples=40", "max_examples=40, shards=1"), test_b=PASSING)
    options = ("--attnfuzz-device", "cpu", "--attnfuzz-in-process", "--attnfuzz-out", "found", "--attnfuzz-seed", "0")
    first = acme.runpytest_inprocess("-x", *options)
    first.assert_outcomes(failed=1)
    first.stdout.fnmatch_lines(["*stopping after 1 failures*"])
    again = acme.runpytest_inprocess("--lf", *options)
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["*run-last-failure: rerun previous 1 failure*", "*found after 1 case,*"])
