"""Commands that try nothing: none of them ends as if what it was to try had passed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as Xml

import click
import pytest
from support.gate import Repository
from support.hostile import attnfuzz, json_of, refused

from attnfuzz.harness.campaign import campaign
from attnfuzz.harness.campaign.coverage import Worst
from attnfuzz.harness.campaign.events import CampaignFinished, KernelSummary
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.cli import main as cli
from attnfuzz.harness.cli import options
from attnfuzz.harness.gate.parts.correctness import campaign_part
from attnfuzz.kernels import registry

PLAIN = {"seqlens_q": [3], "seqlens_k": [3], "dim_qk": 16, "dim_v": 16, "dtype": "float32"}
ON_CPU = ("--device", "cpu")
ROWS: dict[str, tuple[tuple[str, ...], str]] = {
    "run: no Case": (("run", "torch.reference_cpu", *ON_CPU, "--max-examples", "0"), "max_examples=0: must be positive"),
    "run: no time": (("run", "torch.reference_cpu", *ON_CPU, "--budget", "0s"), "budget='0s': must be positive"),
    "run: too little time": (
        ("run", "torch.reference_cpu", *ON_CPU, "--budget", "1ms", "--in-process"),
        "error: kernel='torch.reference_cpu': no Case was tried; give it more time, or more Cases",
    ),
    "run: all skipped": (("run", "torch.flash", *ON_CPU), "no kernel can run here (torch.flash: it is declared for cuda only)"),
    "run: an empty name": (("run", "", *ON_CPU), "kernel='': no kernel of that name is installed"),
    "compile: a case of a kernel without CUDA": (
        ("compile", "--case", "plain.json"),
        "case='plain.json': nothing was compiled; torch.reference_cpu: it does not run on CUDA",
    ),
    "compile: a case of an adapter": (
        ("compile", "--case", "adapted.json", "--kernel", "adapted:KERNEL"),
        "case='adapted.json': nothing was compiled; ev.adapted: not lowered: it has no `lower`",
    ),
    "compile: nothing": (("compile", "torch.reference_cpu"), "nothing was compiled; torch.reference_cpu: it does not run on"),
    "compile: no architecture": (("compile", "triton.varlen", "--arch", ","), "arch=',': it names no architecture"),
    "merge: an empty folder": (("merge", "whole", "empty"), "no run is recorded there"),
    "merge: no folder": (("merge", "whole", "none"), "no such folder"),
    "report: an empty folder": (("report", "empty"), "no run is recorded there"),
    "repro: no run": (("repro", "plain.json", *ON_CPU, "--repeat", "0"), "repeat=0: must be positive"),
    "selftest faults: no such": (("selftest", "faults", "none", *ON_CPU), "fault='none': no such fault kernel"),
    "selftest memory: no such": (("selftest", "memory", "none"), "fault='none': no such fault"),
    "selftest barriers: no such": (("selftest", "barriers", "none"), "fault='none': no such fault"),
    "gate: no Cases": (("gate", "--base", "HEAD", *ON_CPU, "--cases", "0"), "cases=0: must be 6 or more"),
    "gate: no Case of the campaign": (("gate", "--base", "HEAD", *ON_CPU, "--max-examples", "0"), "max_examples=0: must be pos"),
    "gate: no checkout": (("gate", "--base", "HEAD", *ON_CPU), "it is not in a git checkout"),
    "run: a ledger that is a folder": (
        ("run", "torch.reference_cpu", *ON_CPU, "--max-examples", "1", "--ledger", "empty"),
        "ledger='empty'",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for table in ("_registered", "_loaded", "_origins"):
        monkeypatch.setattr(registry, table, {})
    (tmp_path / "empty").mkdir()
    (tmp_path / "plain.json").write_text(json.dumps({"format": 1, "kernel": "torch.reference_cpu", "problem": PLAIN}))
    (tmp_path / "adapted.json").write_text(json.dumps({"format": 1, "kernel": "ev.adapted", "problem": PLAIN}))
    adapted = (
        "from attnfuzz.kernels.adapters import dense\nKERNEL = dense(lambda q, k, v: q, name='ev.adapted', files=[__file__])\n"
    )
    (tmp_path / "adapted.py").write_text(adapted)


@pytest.mark.parametrize("row", ROWS)
def test_a_command_that_tries_nothing_ends_with_2_and_the_reason(row: str) -> None:
    command, words = ROWS[row]
    refused(attnfuzz(*command), [words])


def test_a_compile_of_nothing_writes_no_baseline(tmp_path: Path) -> None:
    refused(attnfuzz("compile", "torch.reference_cpu", "--write", "table.json", "--json"), ["nothing was compiled"])
    assert not (tmp_path / "table.json").exists(), "an empty one would let everything pass"


ROW = KernelSummary(kernel="ev.k", cases=0, shrink_cases=0, seconds=1.0, compiles=0, compile_seconds=0.0, outputs={}, findings=())


@pytest.mark.parametrize(
    ("row", "untried"),
    [
        (ROW, "no Case was tried; give"),
        (replace(ROW, unreached=3), "no Case was tried: 3 of its variants were not compiled in this time"),
        (replace(ROW, cases=4, outputs={"o": Worst(unjudged=4)}), "none of its 4 Cases could be judged"),
        (replace(ROW, cases=4, outputs={"o": Worst(unjudged=3, cases=1)}), None),
        (replace(ROW, cases=4), None),
    ],
    ids=["no case", "not compiled", "not judged", "judged", "no figures"],
)
def test_a_kernel_is_untried_without_a_judged_case(row: KernelSummary, untried: str | None) -> None:
    done = CampaignFinished((row,), (), 1.0)
    assert [reason.startswith(untried or "-") for _, reason in done.untried] == [True] * (untried is not None)
    assert replace(done, interrupted=True).untried == ()
    part = campaign_part(row, done, Settings(max_examples=4))
    assert (part.outcome, (untried or "") in part.summary) == ("error" if untried else "pass", True)
    assert campaign_part(row, done, Settings(max_examples=4, shards=5)).outcome == "pass", "a shard may be empty"


LATE, TRIED = replace(ROW, kernel="ev.late", unreached=3), replace(ROW, kernel="ev.tried", cases=4)


@pytest.mark.parametrize(
    ("names", "rows", "code", "says"),
    [
        ((), (LATE, TRIED), 0, "note: kernel='ev.late': no Case was tried: 3 of its variants"),
        ((), (LATE, LATE), 2, "error: kernel='ev.late': no Case was tried: 3 of its variants"),
        ((), (ROW, TRIED), 2, "error: kernel='ev.k': no Case was tried; give"),
        (("torch.reference_cpu",), (LATE, TRIED), 2, "error: kernel='ev.late': no Case was tried: 3 of its variants"),
    ],
    ids=["one of all", "all", "another reason", "asked for by name"],
)
def test_of_all_kernels_one_may_be_too_slow_to_compile(
    names: tuple[str, ...], rows: tuple[KernelSummary, ...], code: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of every kernel for two minutes has done what it could; who names a kernel wants it tried."""

    def ran(*_: object, **__: object) -> CampaignFinished:
        click.echo("a summary: a command that prints nothing has not ended by itself")
        return CampaignFinished(rows, (), 1.0)

    monkeypatch.setattr(campaign, "run_campaign", ran)
    monkeypatch.setattr(options, "every_kernel", lambda: options.Asked((registry.get("torch.reference_cpu"),), named=False))
    result = attnfuzz("run", *names, *ON_CPU, "--max-examples", "1")
    assert (result.exit_code, says in result.stderr) == (code, True), result.stderr


def test_a_merge_of_runs_that_tried_nothing_is_no_success(tmp_path: Path) -> None:
    assert attnfuzz("run", "torch.reference_cpu", *ON_CPU, "--budget", "1ms", "--in-process", "--out", "a").exit_code == 2
    result = attnfuzz("merge", "whole", "a", "--json")
    refused(result, ["error: kernel='torch.reference_cpu': no Case was tried"])
    assert [each["kernel"] for each in json_of(result)["untried"]] == ["torch.reference_cpu"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return Repository.create(tmp_path_factory.mktemp("gated"), "one", "two")


GATED = {
    "exit 0": ("import sys; sys.exit(0)\n", "importing acme.one failed with SystemExit: 0 (one.py:1)"),
    "the process ended with 0": ("import os; os._exit(0)\n", "importing acme.one failed: it ended the process, with exit code 0"),
    "it cannot run here": ("", "it cannot run on cpu here: it is declared for cuda only; no kernel of this gate was tried"),
}


@pytest.mark.parametrize("row", GATED)
def test_a_gate_of_what_cannot_be_tried_ends_with_2_and_says_so_everywhere(row: str, repository: Repository) -> None:
    prefix, reason = GATED[row]
    text = (repository.root / "src/acme/two.py").read_text().replace("acme.two", "acme.one")
    if not prefix:
        text += "\nimport msgspec\nKernel.capabilities = msgspec.structs.replace(Acme.capabilities, devices=('cuda',))\n"
    repository.write("src/acme/one.py", prefix + text)
    options = ("--json", "--junit", "junit.xml", "--markdown", "page.md", "--max-examples", "1")
    ran = repository.gate("--base", "main", "--kernel", "acme.one:KERNEL", *options)
    assert ran.returncode == 2, ran.stderr
    assert "Traceback" not in ran.stderr
    [part] = json.loads(ran.stdout)["kernels"][0]["parts"]
    assert (part["name"], part["outcome"]) == ("load", "error")
    assert reason in part["summary"]
    assert reason in (repository.root / "page.md").read_text()
    root = Xml.parse(repository.root / "junit.xml").getroot()
    assert root.get("errors") == "1"
    assert [reason in each.get("message", "") for each in root.iter("error")] == [True]


def test_a_gate_that_cannot_begin_says_so_in_its_reports(tmp_path: Path) -> None:
    refused(
        attnfuzz("gate", "--base", "HEAD", *ON_CPU, "--junit", "junit.xml", "--markdown", "page.md"), ["not in a git checkout"]
    )
    assert Xml.parse(tmp_path / "junit.xml").getroot().get("errors") == "1"
    assert "it is not in a git checkout" in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SystemExit(0), "the command was ended by SystemExit: 0, which code that it called has raised; nothing counts as tried"),
        (SystemExit(), "the command was ended by SystemExit"),
        (GeneratorExit(), "the command was ended by GeneratorExit"),
        (click.exceptions.Exit(0), "the command ended without a result"),
        (None, "the command ended without a result"),
    ],
    ids=["exit 0", "exit", "GeneratorExit", "click's own exit", "silence"],
)
@pytest.mark.parametrize("as_json", [False, True], ids=["", "json"])
def test_a_command_that_code_within_ends_is_no_success(
    error: BaseException | None, words: str, as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(**_: object) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(cli.main.commands["list"], "callback", ended)
    result = attnfuzz("list", *["--json"] * as_json)
    refused(result, [words])
    if as_json:
        assert words in json_of(result)["error"]


def test_completions_still_come() -> None:
    program = "from attnfuzz.harness.cli.main import main; main(prog_name='attnfuzz')"
    environment = {"_ATTNFUZZ_COMPLETE": "bash_complete", "COMP_WORDS": "attnfuzz re", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "plain,report" in done.stdout) == (0, True), done.stderr
