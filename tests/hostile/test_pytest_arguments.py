"""pytest with hostile or senseless arguments, kernels and Cases: no session is green in which nothing was tried."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch._dynamo  # and so Triton, whose library aborts the process when it is loaded twice

from attnfuzz.harness.campaign import campaign
from attnfuzz.harness.campaign.blob import blob_of
from attnfuzz.harness.plugin import run as plugin_run
from attnfuzz.harness.repro import reproduce as reproducing
from attnfuzz.harness.repro.reproduce import Reproduction
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support import import_trial
from attnfuzz.strategies.case import Case

# pytester forgets modules that are first imported inside: what must be imported once only is imported here.
assert campaign
assert plugin_run
assert torch._dynamo
TESTS = """
from attnfuzz.harness.plugin import fuzz

test_k = fuzz("torch.reference_cpu", max_examples=2, shards=2)
"""
PROBLEM = Problem(seqlens_q=(3,), seqlens_k=(3,), dim_qk=16, dim_v=16, dtype="float32")
OWN = blob_of(Case(kernel="torch.reference_cpu", problem=PROBLEM))
OTHER = blob_of(Case(kernel="triton.varlen", problem=PROBLEM))
USAGE = pytest.ExitCode.USAGE_ERROR


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder of tests, from which its own modules can be imported."""
    monkeypatch.syspath_prepend(pytester.path)
    for table in ("_registered", "_loaded", "_origins"):
        monkeypatch.setattr(registry, table, {})
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)
    pytester.makepyfile(test_k=TESTS)
    return pytester


def pytest_of(folder: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    options = ("-p", "no:cacheprovider", "-rs", "--attnfuzz-device", "cpu", "--attnfuzz-in-process", *arguments)
    return folder.runpytest_inprocess(*options)


UNTAKEN = {
    "of another kernel": ((), OTHER, "no test takes this case of triton.varlen: the tests here are of torch.reference_cpu;"),
    "one of two": (("--attnfuzz-case", OWN), OTHER, "no test takes this case of triton.varlen: the tests here are of torch"),
    "deselected by -k": (("-k", "nothing"), OWN, "no test takes this case of torch.reference_cpu: its tests are deselected (-k,"),
    "deselected by --deselect": (("--deselect", "test_k.py"), OWN, "its tests are deselected (-k, -m, --deselect,"),
    "another kernel asked for": (("--attnfuzz-kernel", "triton.flex"), OWN, "its tests are deselected (-k, -m, --deselect,"),
    "cut": ((), OWN[:-9], "the blob is cut or changed"),
    "of another version": ((), "AF7-abc", "a blob of version 7"),
    "a folder": ((), ".", "case='.': "),
    "no file": ((), "none.json", "case='none.json': it cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("row", UNTAKEN)
def test_a_case_that_no_test_runs_is_a_usage_error(row: str, folder: pytest.Pytester) -> None:
    options, case, words = UNTAKEN[row]
    result = pytest_of(folder, *options, "--attnfuzz-case", case)
    assert result.ret == USAGE
    assert words in result.stderr.str()
    assert "Traceback" not in result.stderr.str()
    assert "INTERNALERROR" not in result.stdout.str()


def test_a_case_where_no_test_is_of_attnfuzz_is_a_usage_error(folder: pytest.Pytester) -> None:
    folder.makepyfile(test_k="def test_plain(): pass\n")
    result = pytest_of(folder, "--attnfuzz-case", OWN)
    assert result.ret == USAGE
    assert "the tests here are of no kernel" in result.stderr.str()


@pytest.mark.parametrize(
    "case",
    [pytest.param(OTHER, id="of another kernel"), pytest.param(OWN, id="of the tests' kernel", marks=pytest.mark.slow)],
)
def test_with_xdist_as_well(case: str, folder: pytest.Pytester) -> None:
    options = ("-n", "2", "-p", "no:cacheprovider", "--attnfuzz-device", "cpu", "--attnfuzz-in-process")
    result = folder.runpytest_subprocess(*options, "--attnfuzz-case", case)
    if case == OWN:
        assert result.ret == 0
        result.assert_outcomes(passed=1, skipped=1)
    else:
        assert result.ret == USAGE
        result.stdout.fnmatch_lines(["ERROR: attnfuzz-case=*: no test takes this case of triton.varlen: *"])


def test_the_first_selected_shard_runs_it(folder: pytest.Pytester) -> None:
    folder.makepyfile(test_k=TESTS)
    result = pytest_of(folder, "test_k.py::test_k[1]", "--attnfuzz-case", OWN)
    assert result.ret == 0
    result.assert_outcomes(passed=1)
    whole = pytest_of(folder, "--attnfuzz-case", OWN)
    whole.assert_outcomes(passed=1, skipped=1)
    whole.stdout.fnmatch_lines(["SKIPPED*: --attnfuzz-case is run by another shard of this test"])


def test_a_test_that_names_its_kernel_by_target_takes_its_cases(folder: pytest.Pytester) -> None:
    folder.makepyfile(test_k=TESTS.replace('"torch.reference_cpu"', '"attnfuzz.kernels.torch.reference_cpu:KERNEL"'))
    assert pytest_of(folder, "--attnfuzz-case", OWN).ret == 0


def test_a_case_that_cannot_run_here_fails(folder: pytest.Pytester) -> None:
    folder.makepyfile(test_k=TESTS.replace("reference_cpu", "flash"))
    result = pytest_of(folder, "--attnfuzz-case", blob_of(Case(kernel="torch.flash", problem=PROBLEM)))
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(["*torch.flash cannot run on cpu here: *; the case was not tried: run it where it can*"])


def test_a_case_that_is_not_judged_fails(folder: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = reproducing.reproduce(Case(kernel="torch.reference_cpu", problem=PROBLEM), reproducing.Where("cpu", in_process=True))
    monkeypatch.setattr(reproducing, "reproduce", lambda *_, **__: Reproduction("UNJUDGED", "cpu", judged.verdict))
    result = pytest_of(folder, "--attnfuzz-case", OWN)
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(["UNJUDGED AF1-*: nothing failed, but nothing was judged either"])


def test_a_shard_that_drew_nothing_fails(folder: pytest.Pytester) -> None:
    result = pytest_of(folder, "--attnfuzz-budget", "1ms")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["torch.reference_cpu: no Case was tried*; give it more time, or more Cases"])


def test_more_shards_than_cases_are_no_failure(folder: pytest.Pytester) -> None:
    folder.makepyfile(test_k=TESTS.replace("max_examples=2, shards=2", "max_examples=1, shards=2"))
    assert pytest_of(folder).ret == 0


KERNELS = {
    "exit 0": ("import sys; sys.exit(0)", "importing ev_exit_0 failed with SystemExit: 0"),
    "pytest's exit": ("import pytest; pytest.exit('gone', returncode=0)", "failed with Exit: gone"),
    "pytest's skip": ("import pytest; pytest.skip('gone', allow_module_level=True)", "failed with Skipped: gone"),
    "the process ended with 0": ("import os; os._exit(0)", "it ended the process, with exit code 0"),
}


@pytest.mark.parametrize("row", KERNELS)
def test_a_kernel_that_leaves_the_process_fails_its_tests(row: str, folder: pytest.Pytester) -> None:
    code, words = KERNELS[row]
    name = f"ev_{row.replace(' ', '_').replace(chr(39), '')}"
    Path(folder.path, f"{name}.py").write_text(f"{code}\n")
    folder.makepyfile(test_k=TESTS.replace("torch.reference_cpu", f"{name}:KERNEL"))
    result = pytest_of(folder)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(failed=2)
    assert words in result.stdout.str()
    assert import_trial.SECONDS not in os.environ


def test_a_test_file_that_imports_a_kernel_that_exits_is_not_green(folder: pytest.Pytester) -> None:
    Path(folder.path, "ev_imported.py").write_text("import sys; sys.exit(0)\n")
    folder.makepyfile(test_k="from ev_imported import KERNEL\n" + TESTS)
    assert pytest_of(folder).ret not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
