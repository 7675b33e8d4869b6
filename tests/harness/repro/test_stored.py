"""`attnfuzz corpus`: case files listed, pruned and minimised; what cannot be read or run stays."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.repro import Plain, register_all

from attnfuzz.harness.campaign.corpus import read_case
from attnfuzz.harness.cli import main as cli
from attnfuzz.harness.repro import stored
from attnfuzz.harness.repro.stored import listed, remove
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.strategies.case import case_from_object

CASES = Path("out/cases")


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    CASES.mkdir(parents=True)
    register_all()


def corpus(*arguments: str, stdin: str = "") -> Result:
    in_process = ("--device", "cpu", "--in-process") if arguments[0] != "list" else ()
    return CliRunner().invoke(cli.main, ["corpus", *arguments, *in_process, "--out", "out"], input=stdin)


def written(name: str, kernel: str = "acme.element", *, tokens: int = 3, run: bool = True, **found: Any) -> Path:
    """A case file; `run`: with the failure that it has now."""
    content: dict[str, Any] = {
        "format": 1, "kernel": kernel, "config": {"tile_m": 6, "tile_n": 6},
        "problem": {"seqlens_q": [tokens], "seqlens_k": [tokens], "dim_qk": 8, "dim_v": 8, "dtype": "float32"},
    }  # fmt: skip
    if run:
        failure = run_trial(case_from_object(content), "cpu").failures[0]
        content["found"] = {"identity": json.loads(json.dumps(structs(failure.identity)))}
    content["found"] = {**content.get("found", {}), **found}
    path = CASES / name
    path.write_text(json.dumps(content))
    return path


def structs(identity: Any) -> dict[str, Any]:
    return {name: getattr(identity, name) for name in identity.__struct_fields__}


def names() -> list[str]:
    return sorted(each.name for each in CASES.iterdir())


# --- list


def test_the_table_has_kernel_output_kind_size_age_and_file() -> None:
    path = written("acme.element-dv-mismatch-1.json")
    written("acme.right-x.json", "acme.right", run=False)
    os.utime(path, (time.time() - 2 * 86400 - 60,) * 2)
    result = corpus("list")
    assert result.exit_code == 0, result.output
    row = next(line for line in result.output.splitlines() if "acme.element-dv-mismatch-1.json" in line)
    cells = [each.strip() for each in row.strip("│").split("│")]
    assert cells[:5] == ["acme.element", "dV", "mismatch", "3x3, heads 1/1, dims 8/8", "2 d"]
    assert "2 cases in out/cases" in result.output


def test_json_and_the_filter_by_kernel() -> None:
    written("a.json")
    written("b.json", "acme.right", run=False)
    content = json.loads(corpus("list", "acme.element", "--json").stdout)
    (case,) = content["cases"]
    assert {name: case[name] for name in ("kernel", "output", "kind", "elements", "file")} == {
        "kernel": "acme.element", "output": "dv", "kind": "mismatch", "elements": 72, "file": "out/cases/a.json",
    }  # fmt: skip
    assert set(case) >= {"age_seconds", "last_seen", "check", "id", "lengths", "minimal"}


def test_a_kernel_need_not_exist_to_be_listed() -> None:
    written("a.json", "gone.kernel", run=False)
    assert "gone.kernel" in corpus("list", "gone.kernel").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("list", "acme.nothing"), "kernel='acme.nothing': no case of it is in out/cases; kernels there: acme.element"),
        (("prune",), "yes=False: files are removed after a question, and there is no terminal for it; add --yes, or --dry-run"),
        (("prune", "--json"), "--json asks nothing; add --yes"),
        (("prune", "--yes", "--dry-run"), "--yes removes, and --dry-run removes nothing; leave one of them out"),
        (("minimise",), "there is no terminal for it"),
        (("minimise", "--yes", "--budget", "soon"), "budget='soon': it is not a duration"),
        (("prune", "--yes", "acme.none"), "kernel='acme.none': no case of it"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_wrong_use_removes_nothing(arguments: tuple[str, ...], message: str) -> None:
    written("a.json")
    result = corpus(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert names() == ["a.json"]


@pytest.mark.parametrize("command", ["list", "prune", "minimise"])
def test_a_folder_that_is_not_there_is_refused(command: str) -> None:
    more = ["--yes"] if command != "list" else []
    result = CliRunner().invoke(cli.main, ["corpus", command, "--out", "elsewhere", *more])
    assert result.exit_code == 2
    assert "out='elsewhere': there is no such folder; give the --out of a run" in result.stderr


# --- prune

UNREADABLE: dict[str, bytes] = {
    "cut.json": b'{"format": 1, "kern',
    "empty.json": b"",
    "version.json": b'{"format": 7}',
    "list.json": b"[1]",
    "target.json": b'{"format": 1, "kernel": "os:system", "problem": {}}',
    "bytes.json": b"\xff\xfe\x00",
    "nested.json": b"[" * 100_000,
}


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("command", [("list",), ("prune", "--yes"), ("minimise", "--yes", "--budget", "1s")], ids=lambda x: x[0])
def test_what_cannot_be_read_is_said_and_left(name: str, command: tuple[str, ...]) -> None:
    (CASES / name).write_bytes(UNREADABLE[name])
    result = corpus(*command)
    assert result.exit_code == 0, result.output
    assert f"left out/cases/{name}: case=" in result.output
    assert "Traceback" not in result.output
    assert names() == [name]


def test_a_pipe_is_left() -> None:
    os.mkfifo(CASES / "pipe.json")
    result = corpus("prune", "--yes")
    assert "left out/cases/pipe.json: " in result.output
    assert names() == ["pipe.json"]


def full() -> None:
    """One file of each sort."""
    written("1-fails.json")
    written("2-larger.json", tokens=5)
    written("3-passes.json", "acme.right", run=False)
    written("4-gone.json", "gone.kernel", run=False)
    written("5-elsewhere.json", "far.kernel", run=False, target="far.away:KERNEL")
    unsupported = json.loads(written("6-unsupported.json", "acme.right", run=False).read_text())
    unsupported["problem"]["dim_qk"] = 300
    (CASES / "6-unsupported.json").write_text(json.dumps(unsupported))
    (CASES / "7-broken.json").write_text("{")


REASONS = {
    "2-larger.json": "the same failure as 1-fails.json, which is simpler",
    "3-passes.json": "it passes on cpu",
    "4-gone.json": "no kernel is called 'gone.kernel' any more",
}
LEFT = ["1-fails.json", "5-elsewhere.json", "6-unsupported.json", "7-broken.json"]


def test_prune_removes_what_passes_is_gone_or_a_duplicate_and_says_why() -> None:
    full()
    result = corpus("prune", "--yes")
    assert result.exit_code == 0, result.output
    for name, reason in REASONS.items():
        assert f"removed out/cases/{name}: {reason}\n" in result.output
    assert (
        "left out/cases/5-elsewhere.json: not run: it was found at far.away:KERNEL: add --kernel far.away:KERNEL" in result.output
    )
    assert "left out/cases/6-unsupported.json: not run: acme.right does not support it: " in result.output
    assert "left out/cases/7-broken.json: case=" in result.output
    assert "3 removed, 3 kept" in result.output
    assert names() == LEFT
    assert "0 removed, 3 kept" in corpus("prune", "--yes").output


def test_a_dry_run_says_the_same_and_removes_nothing() -> None:
    full()
    content = json.loads(corpus("prune", "--dry-run", "--json").stdout)
    assert {Path(each["file"]).name: each["reason"] for each in content["removed"]} == REASONS
    assert {Path(each["file"]).name for each in content["left"]} == set(LEFT[1:])
    assert content["dry_run"]
    assert names() == sorted([*LEFT, *REASONS])
    assert "would remove out/cases/3-passes.json: it passes on cpu" in corpus("prune", "--dry-run").output


@pytest.mark.parametrize(("answer", "kept"), [("y\n", []), ("n\n", ["a.json"])])
def test_prune_asks(answer: str, kept: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from attnfuzz.harness.cli import corpus as command

    monkeypatch.setattr(command, "_on_terminal", lambda: True)
    written("a.json", "acme.right", run=False)
    result = corpus("prune", stdin=answer)
    assert "Remove 1 file? [y/N]" in result.output
    assert names() == kept


def test_a_kernel_that_cannot_run_here_keeps_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    written("a.json", "acme.right", run=False)
    monkeypatch.setattr(Plain, "unavailable", lambda self, device: "no such machine")
    result = corpus("prune", "--yes")
    assert "left out/cases/a.json: not run: kernel='acme.right': it cannot run on cpu here: no such machine" in result.output
    assert names() == ["a.json"]


def test_a_file_that_changed_since_is_left() -> None:
    written("a.json", "acme.right", run=False)
    (entry,) = listed("out").entries
    written("a.json", "acme.element")
    os.utime(CASES / "a.json", ns=(1, 1))
    (done,) = remove([stored.Removal(entry, "it passes")])
    assert done[1] == "left: it has changed since it was read"
    (CASES / "a.json").unlink()
    (done,) = remove([stored.Removal(entry, "it passes")])
    assert done[1] == "left: it is not there any more"


# --- minimise


def test_minimise_keeps_the_smallest_case_of_each_failure() -> None:
    written("1.json", tokens=9)
    written("2.json", tokens=12)
    written("3-passes.json", "acme.right", run=False)
    before = read_case(CASES / "1.json").finding.identity
    result = corpus("minimise", "--yes", "--budget", "20s")
    assert result.exit_code == 0, result.output
    assert "left out/cases/3-passes.json: it passes: attnfuzz corpus prune removes it" in result.output
    kept = [each for each in names() if each != "3-passes.json"]
    assert len(kept) == 1
    smallest = read_case(CASES / kept[0])
    assert smallest.finding.identity == before
    assert smallest.case.problem.total_q < 9
    assert f"removed out/cases/1.json: replaced by {kept[0]}, which is smaller" in result.output
    assert f"removed out/cases/2.json: the same failure as {kept[0]}, which is simpler" in result.output


def test_minimise_leaves_what_it_cannot_run() -> None:
    written("gone.json", "gone.kernel", run=False)
    result = corpus("minimise", "--yes", "--budget", "1s")
    assert "left out/cases/gone.json: not run: kernel='gone.kernel': no kernel of that name is installed" in result.output
    assert names() == ["gone.json"]
