"""Cases given to pytest by file or by blob."""

from __future__ import annotations

import pytest
from support.acme import FAILING, KERNEL_FILE, PASSING, pytest_alone, pytest_here

from attnfuzz.harness import plugin


@pytest.mark.slow
def test_a_case_file_is_run_again_by_the_line_that_was_printed(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_acme=FAILING)
    pytest_here(acme, "--attnfuzz-out", "found", "-k", "0")
    [path] = (acme.path / "found" / "cases").iterdir()
    result = pytest_here(acme, "test_acme.py::test_kernel", "--attnfuzz-case", str(path))
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(
        ["FAILED *.json", "   seqlen_q x seqlen_k  *6 (ragged)", "exception: forward raised ValueError: *"]
    )
    acme.makepyfile(test_acme=PASSING)
    missing = pytest_here(acme, "--attnfuzz-case", "nowhere.json")
    assert missing.ret == pytest.ExitCode.USAGE_ERROR
    missing.stderr.fnmatch_lines(["ERROR: case='nowhere.json': it cannot be read*"])
    (acme.path / "file").write_text("")
    unwritable = pytest_here(acme, "--attnfuzz-out", "file/found")
    assert unwritable.ret == pytest.ExitCode.USAGE_ERROR


def blob_in(result: pytest.RunResult) -> str:
    """The blob of the line that a failing test printed."""
    [line] = (each for each in result.outlines if each.strip().startswith("without that file:"))
    return line.split()[-1]


def test_a_blob_runs_a_case_again_without_its_file_and_keeps_it(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_acme=FAILING)
    blob = blob_in(pytest_alone(acme, "--attnfuzz-out", "found", "-k", "0"))
    again = pytest_alone(acme, "test_acme.py::test_kernel", "--attnfuzz-case", blob)
    again.assert_outcomes(failed=1, skipped=1)
    again.stdout.fnmatch_lines([f"FAILED {blob}", "   seqlen_q x seqlen_k  *6 (ragged)"])

    kept = f'test_kernel = fuzz(Faulty(), max_examples=1, cases=["{blob}"])'
    acme.makepyfile(test_acme=FAILING.splitlines()[0] + "\nfrom acme import Faulty\n\n" + kept)
    result = pytest_alone(acme, "-k", "case0")
    result.assert_outcomes(failed=1, deselected=2)
    result.stdout.fnmatch_lines([f"FAILED {blob}", "exception: forward raised ValueError: more than 5 keys"])
    acme.makepyfile(acme=KERNEL_FILE.replace('"acme.faulty", 5', '"acme.faulty", 999'))
    pytest_alone(acme, "-k", "case0").assert_outcomes(passed=1, deselected=2)


def test_a_broken_or_a_foreign_case_fails_with_a_clear_message(acme: pytest.Pytester) -> None:
    acme.makepyfile(test_acme=FAILING)
    blob = blob_in(pytest_alone(acme, "--attnfuzz-out", "found", "-k", "0"))
    acme.makepyfile(
        test_acme=PASSING.replace("max_examples=12", f'max_examples=1, cases=["AF1-abc", "AF7-abc", "none.json", "{blob}"]')
    )
    result = pytest_alone(acme, "-k", "case")
    result.assert_outcomes(failed=4, deselected=2)
    result.stdout.fnmatch_lines(
        [
            "*case='AF1-abc': the blob is cut or changed; paste all of it, without blanks",
            "*case='AF7-abc': a blob of version 7, and this attnfuzz reads version 1; use the attnfuzz that printed it, *",
            "*case='none.json': it cannot be read (No such file or directory); give the path of a case file",
            "*it is one of acme.faulty, not of acme.flash",
        ]
    )
    result.stdout.no_fnmatch_line("*Traceback*")
    with pytest.raises(ValueError, match="one case; give a list of cases"):
        plugin.fuzz("acme.flash", cases="AF1-abc")
