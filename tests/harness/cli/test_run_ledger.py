"""`attnfuzz run --ledger --table`: right kernels pass, known failures are let through until they are gone, and figures of all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.peers import Raising, Right, Skewed
from support.small import small_cases

from attnfuzz.harness.campaign.coverage import Worst
from attnfuzz.harness.campaign.events import CampaignFinished, KernelBroke, KernelSkipped, KernelSummary
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.cli import main as cli
from attnfuzz.harness.core.environment import versions
from attnfuzz.harness.gate import known as known_failures
from attnfuzz.harness.gate.known import read_known
from attnfuzz.harness.isolation.outcomes import ExecutionError
from attnfuzz.harness.report.figures import Figures
from attnfuzz.kernels import registry

CASES = 12
LATER = (date.today() + timedelta(days=30)).isoformat()
ENTRY = {"kernel": "torch.skewed", "kind": "mismatch", "output": "dK", "issue": "#12", "versions": {"torch": versions()["torch"]}}


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    small_cases(monkeypatch)
    subjects = [Right("torch.right"), Skewed("torch.skewed"), Raising("torch.raising")]
    for kernel in subjects:
        registry.register(kernel)
    yield
    for kernel in subjects:
        registry.unregister(kernel.name)


def run(*arguments: str, cases: int = CASES) -> Result:
    given = [
        "run",
        "--device",
        "cpu",
        "--in-process",
        "--plain",
        "--no-replay",
        "--seed",
        "0",
        "--max-examples",
        str(cases),
        *arguments,
    ]
    return CliRunner().invoke(cli.main, given)


def ledger(*entries: dict[str, Any], path: str = "known.toml") -> str:
    lines = []
    for entry in entries:
        content = {"expires": LATER, **entry}
        needed = ", ".join(f'{name} = "{version}"' for name, version in content.pop("versions").items())
        lines += ["[[known]]", f"versions = {{ {needed} }}", *(f"{name} = {json.dumps(each)}" for name, each in content.items())]
    Path(path).write_text("\n".join(lines) + "\n")
    return path


def case_file() -> str:
    """The case file of what is wrong in torch.skewed."""
    assert run("torch.skewed", "--max-failures", "1").exit_code == 1
    (path,) = Path(".attnfuzz/cases").glob("*.json")
    return str(path)


def test_right_kernels_pass_and_the_table_has_all_figures() -> None:
    done = run("torch.right", "torch.skewed", "torch.flash", "--seed", "3", "--table", "docs/peers.md", "--json")
    assert done.exit_code == 1, done.output
    result = json.loads(done.stdout)
    right, wrong = result["kernels"]
    assert (right["kernel"], right["cases"], right["failures"], right["wrong"]) == ("torch.right", CASES, 0, {})
    assert {each["cases"] for each in right["outputs"].values()} == {CASES}
    assert 0 < right["outputs"]["dk"]["worst"] < 1 < wrong["outputs"]["dk"]["worst"]
    assert wrong["cases"] == CASES, "a defect does not cost a kernel its Cases"
    assert wrong["wrong"]["dk"]["wrong"] > wrong["wrong"]["dk"]["known"] == 0
    assert result["skipped"][0]["reason"] == "it is declared for cuda only"
    (failure,) = result["failures"]
    assert (failure["identity"]["output"], failure["known"]) == ("dk", [])
    assert (result["ledger"], result["ledger_errors"], result["notes"]) == (None, [], [])
    document = Path("docs/peers.md").read_text()
    command = "attnfuzz run torch.right torch.skewed torch.flash --max-examples 12 --seed 3 --in-process --plain --no-replay"
    assert f"Made by `{command} --device cpu` on cpu" in document
    assert f"torch {versions()['torch']}" in document
    assert f"| torch.right | O | {CASES} | 0 | 0 | 0 | " in document
    assert f"|  | dK | {CASES} | 0 | {wrong['wrong']['dk']['wrong']} | 0 | " in document
    assert f"{2 * CASES} Cases of 2 kernels." in document
    assert "## Failures\n\n- torch.skewed: mismatch in dK: seqlen_q x seqlen_k " in document
    assert "## Notes\n\n- torch.flash: not run here: it is declared for cuda only\n" in document


@pytest.mark.slow
def test_in_children_too() -> None:
    path = ledger(ENTRY)
    given = [
        "run",
        "torch.skewed",
        "torch.right",
        "--device",
        "cpu",
        "--plain",
        "--max-examples",
        "12",
        "--seed",
        "0",
        "--ledger",
        path,
        "--json",
    ]
    done = CliRunner().invoke(cli.main, given)
    assert done.exit_code == 0, done.output
    assert [len(each["known"]) for each in json.loads(done.stdout)["failures"]] == [1]


def test_a_known_failure_is_let_through_and_named() -> None:
    path = ledger({**ENTRY, "case": case_file()})
    done = run("torch.skewed", "--ledger", path, "--table", "table.md", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    (failure,) = result["failures"]
    assert failure["known"] == [{"number": 1, "issue": "#12", "expires": LATER}]
    counts = result["kernels"][0]["wrong"]["dk"]
    assert counts["known"] > counts["wrong"] == 0
    said = f"entry 1 (torch.skewed: mismatch in dK, #12): known until {LATER}"
    assert (result["ledger"], result["ledger_errors"], result["notes"]) == (path, [], [said])
    document = Path("table.md").read_text()
    assert f"|  | dK | {CASES} | 0 | 0 | {counts['known']} | " in document
    assert "## Failures" not in document
    assert f"## Notes\n\n- {said}\n" in document
    done = run("torch.skewed", "--ledger", path)
    assert done.exit_code == 0
    assert f"{path}: 1 of 1 failure known, 0 ledger errors" in done.stdout


@pytest.mark.parametrize(
    "change",
    [{"versions": {"torch": "1.0"}}, {"kind": "nonfinite"}, {"output": "dV"}, {"check": "other"}],
    ids=["another torch", "another kind", "another output", "another check"],
)
def test_what_is_known_is_that_and_nothing_else(change: dict[str, Any]) -> None:
    done = run("torch.skewed", "--ledger", ledger({**ENTRY, **change}), "--json")
    assert done.exit_code == 1
    result = json.loads(done.stdout)
    assert result["failures"][0]["known"] == []
    assert result["kernels"][0]["wrong"]["dk"]["known"] == 0
    if "versions" in change:
        assert "not used: it holds for torch 1.0, which is not installed here" in result["notes"][0]
        assert result["ledger_errors"] == [], "with its own versions it may show"


def test_an_exception_is_known_by_its_message_and_has_a_row_of_its_own() -> None:
    entry = {**ENTRY, "kernel": "torch.raising", "kind": "exception", "message": "heads are too many"}
    del entry["output"]
    done = run("torch.raising", "--ledger", ledger(entry), "--table", "table.md", "--seed", "3", cases=8)
    assert done.exit_code == 0, done.output
    assert "\n|  | run |  |  | 0 | " in Path("table.md").read_text()
    other = ledger({**entry, "message": "heads are too few"})
    done = run("torch.raising", "--ledger", other, "--table", "table.md", "--seed", "3", cases=8)
    assert done.exit_code == 1
    assert "\n|  | run |  |  | 0 | " not in Path("table.md").read_text()


@pytest.mark.slow
def test_a_failure_that_is_gone_fails() -> None:
    entry = {**ENTRY, "kernel": "torch.right"}
    done = run("torch.right", "--ledger", ledger(entry), "--json", cases=4)
    assert done.exit_code == 1
    (error,) = json.loads(done.stdout)["ledger_errors"]
    gone = "entry 1 (torch.right: mismatch in dK, #12): it did not show in the corpus nor in the campaign"
    assert error == {"error": f"{gone}; take the entry out", "line": 1}
    done = run("torch.right", "--ledger", ledger(entry), "--budget", "1ms", cases=4000)
    assert done.exit_code == 2, "no Case was tried"
    assert gone not in done.stdout
    done = run("torch.right", "--ledger", ledger(entry), "--budget", "3s", cases=4000)
    assert done.exit_code == 0, "a campaign that time ended proves nothing"
    assert f"{gone}; give the entry its case file" in done.stdout
    stored = Path(case_file())
    Path("gone.json").write_text(stored.read_text().replace("torch.skewed", "torch.right"))
    done = run("torch.right", "--ledger", ledger({**entry, "case": "gone.json"}), "--budget", "1ms", cases=4000)
    assert done.exit_code == 1, "its own case does"
    assert "known.toml:1: entry 1 (torch.right: mismatch in dK, #12): its case gone.json does not show it" in done.stdout
    done = run("torch.skewed", "--ledger", ledger(entry), "--max-failures", "1")
    assert "gone" not in done.stdout, "torch.right was not tried"


@pytest.mark.slow
def test_a_failure_that_is_not_drawn_shows_in_its_own_case() -> None:
    entry = {**ENTRY, "case": case_file()}
    done = run("torch.skewed", "--ledger", ledger(entry), cases=1)
    assert done.exit_code == 0, done.output
    assert f"known until {LATER}; only its case {Path(entry['case']).name} showed it" in done.stdout
    other = ledger({**entry, "kind": "nonfinite"}, path="other.toml")
    done = run("torch.skewed", "--ledger", other, cases=1)
    assert done.exit_code == 1
    assert "fails in another way: mismatch: dK: " in done.stdout


def test_an_entry_of_another_device_is_neither_tried_nor_missed() -> None:
    other = {**ENTRY, "kernel": "torch.right", "device": "cuda"}
    done = run("torch.right", "--ledger", ledger(other))
    assert (done.exit_code, "entry 1" in done.output) == (0, False), done.output
    done = run("torch.right", "--ledger", ledger({**other, "device": "cpu"}))
    assert done.exit_code == 1
    assert "entry 1 (torch.right: mismatch in dK on cpu, #12): it did not show" in done.stdout


def test_an_expired_entry_fails() -> None:
    done = run("torch.skewed", "--ledger", ledger({**ENTRY, "expires": "2026-01-01"}))
    assert done.exit_code == 1
    assert "known.toml:1: entry 1 (torch.skewed: mismatch in dK, #12): it expired on 2026-01-01" in done.stdout
    assert "0 of 1 failure known, 1 ledger error" in done.stdout


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"issue": "later"}, "entry 2 (line 8): issue='later' is not a reference to an issue"),
        ({"kernel": "acme.gone"}, "line 8: entry 2 (acme.gone: mismatch in dK, #12): there is no such kernel here"),
        ({"case": "none.json"}, "entry 2 (line 8): case='none.json': there is no such file"),
        ({"case": "broken.json"}, "case='broken.json': not JSON"),
        ({"versions": {}}, "entry 2 (line 8): versions={} must be a table"),
    ],
)
def test_a_broken_ledger_ends_with_2_before_the_run(entry: dict[str, Any], message: str) -> None:
    Path("broken.json").write_text("{")
    done = run("torch.skewed", "--ledger", ledger({**ENTRY, "output": "O"}, {**ENTRY, **entry}), cases=4)
    assert (done.exit_code, message in done.stderr) == (2, True), done.output
    assert not Path(".attnfuzz").exists()


def test_files_that_cannot_be_used_end_with_2() -> None:
    Path("docs").mkdir()
    for wrong, message in (
        (["--ledger", "none.toml"], "ledger='none.toml': it cannot be read"),
        (["--table", "docs"], "table='docs': it is a folder; give a file"),
        (["--table", "/proc/nowhere"], "table='/proc/nowhere': it cannot be written (No such file or directory)"),
    ):
        done = run("torch.right", *wrong, cases=1)
        assert (done.exit_code, message in done.stderr) == (2, True), done.output


def test_cases_that_cannot_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    path = ledger({**ENTRY, "case": case_file()})

    def broken(*_: object) -> None:
        raise ExecutionError("no child answers")

    monkeypatch.setattr(known_failures, "executor_for", broken)
    done = run("torch.skewed", "--ledger", path, cases=1)
    assert done.exit_code == 2
    assert "torch.skewed: the cases of the ledger could not be tried: no child answers" in done.stdout

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(known_failures, "executor_for", interrupted)
    done = run("torch.skewed", "--ledger", path, cases=1)
    assert (done.exit_code, "0 ledger errors" in done.stdout) == (130, True)


def test_a_run_that_ended_early_proves_nothing() -> None:
    known = read_known(Path(ledger({**ENTRY, "kernel": "torch.right"})), [registry.get("torch.right")], "cpu", date.today())
    settings = Settings(max_examples=4, in_process=True)
    done = CampaignFinished((KernelSummary("torch.right", 4, 0, 1.0, 0, 0.0, {}, ()),), (), 1.0)
    assert known.judge(done, settings).wrong
    broken = (KernelBroke("torch.right", "no such module"),)
    for early in (replace(done, interrupted=True), replace(done, lost="the device is gone"), replace(done, broken=broken)):
        assert known.judge(early, settings).wrong == ()


def test_notes_of_kernels_that_were_not_tried_to_the_end() -> None:
    row = KernelSummary("torch.x", 3, 0, 1.0, 0, 0.0, {"o": Worst(cases=3, worst=float("inf"), unjudged=2, sigmas=1e9)}, ())
    broken = (KernelBroke("torch.y", "no such module\nat all"),)
    done = CampaignFinished((row,), (KernelSkipped("torch.z", "no GPU"),), 1.0, True, broken, "the device is gone")
    document = Figures().markdown(done, "attnfuzz run", ())
    notes = (
        "torch.z: not run here: no GPU",
        "torch.y: not tried to the end: no such module",
        "stopped early: the device is gone",
    )
    assert "".join(f"- {each}\n" for each in (*notes, "interrupted")) in document
    assert "| torch.x | O | 3 | 2 | 0 | 0 | inf | 1.0e+09 | " in document
