"""What commands print with --json is as docs/reference/attnfuzz.schema.json says, and a bug has one identity in all of it."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.peers import Raising, Right, Skewed
from support.schema import SCHEMA, wrong
from support.small import small_cases

from attnfuzz.harness.audit.conformance import check as conformance
from attnfuzz.harness.audit.conformance.check import Conformance
from attnfuzz.harness.audit.conformance.row import Row
from attnfuzz.harness.campaign.minimise import Minimiser
from attnfuzz.harness.cli import gate as gate_commands
from attnfuzz.harness.cli import main as cli
from attnfuzz.harness.cli.schema import json_schema
from attnfuzz.harness.gate import gate as gating
from attnfuzz.harness.gate.result import Finding, Gate, KernelGate, Part, Waiver
from attnfuzz.harness.judge.failure import Failure, Identity
from attnfuzz.kernels import registry

KEY = "torch.skewed/mismatch/dk/"


SUBJECTS = [Right("torch.right"), Skewed("torch.skewed"), Raising("torch.raising")]


@contextlib.contextmanager
def registered() -> Iterator[None]:
    for kernel in SUBJECTS:
        registry.register(kernel)
    yield
    for kernel in SUBJECTS:
        registry.unregister(kernel.name)


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["attnfuzz"])
    with registered():
        yield


def printed(name: str, *arguments: str, code: int | tuple[int, ...] = 0) -> dict[str, Any]:
    """What a command prints, which is as the definition `name` says."""
    result = CliRunner().invoke(cli.main, [*arguments, "--json"])
    assert result.exit_code in ((code,) if isinstance(code, int) else code), result.output
    content: dict[str, Any] = json.loads(result.stdout)
    assert not list(wrong(content, name))
    assert not list(wrong(content, {"anyOf": SCHEMA["anyOf"]}))
    return content


def run(*arguments: str, seed: int = 0, cases: int = 8, name: str = "Run") -> dict[str, Any]:
    more = ["--device", "cpu", "--in-process", "--plain", "--no-replay", "--max-examples", str(cases), "--seed", str(seed)]
    return printed(name, "run", *more, *arguments, code=(0, 1))


@dataclass(frozen=True)
class Done:
    """A run of all three kernels: its folder, its lines of events, and what it printed."""

    out: Path
    lines: list[dict[str, Any]]
    content: dict[str, Any]

    @property
    def skewed(self) -> dict[str, Any]:
        return next(each for each in self.content["failures"] if each["id"].startswith(KEY))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("run")
    out, events = folder / "out", folder / "events.jsonl"
    with pytest.MonkeyPatch.context() as patch, registered():
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["attnfuzz"])
        small_cases(patch, shrink=10.0)
        content = run(*(each.name for each in SUBJECTS), "--out", str(out), "--events", str(events), seed=3)
    return Done(out, [json.loads(each) for each in events.read_text().splitlines()], content)


@pytest.fixture
def unexplained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explanations take most of the time of a run, and `done` has one."""
    monkeypatch.setattr(Minimiser, "explain", lambda *_: None)


def test_the_schema_is_the_codes() -> None:
    assert json.loads(json.dumps(json_schema())) == SCHEMA


def test_run(done: Done) -> None:
    content = done.content
    assert (content["format"], content["command"], content["seed"]) == (1, "run", 3)
    ids = {each["id"] for each in content["failures"]}
    assert any(each.startswith(KEY) for each in ids)
    assert any(each.startswith("torch.raising/exception/-/") for each in ids)
    assert {each["group"] for each in content["failures"]} <= ids
    assert done.skewed["explanation"]["text"]


def test_repro_in_each_way(done: Done, tmp_path: Path) -> None:
    failure = done.skewed
    path = str(shutil.copy(failure["path"], tmp_path))
    here = ("repro", path, "--device", "cpu", "--in-process")
    once = printed("ReproOnce", *here, code=1)
    assert once["ids"] == [failure["id"]]
    assert once["outcome"] == "FAILED"
    repeated = printed("ReproRepeat", *here, "--repeat", "2", code=1)
    assert [each["id"] for each in repeated["failures"]] == [failure["id"]]
    explained = printed("ReproExplain", *here, "--explain", "--budget", "1s", code=1)
    assert explained["outcome"] == "EXPLAINED"
    assert explained["explanation"]["trials"] > 0
    blob = printed("ReproOnce", "repro", failure["blob"], *here[2:], code=1)
    assert blob["case"] == once["case"]


def test_folders_that_are_merged(done: Done, tmp_path: Path) -> None:
    merged = printed("Merge", "merge", str(tmp_path / "all"), str(done.out), code=(0, 1))
    assert (merged["command"], len(merged["runs"])) == ("merge", 1)
    assert {each["id"] for each in merged["failures"]} == {each["id"] for each in done.content["failures"]}
    assert merged["case_files"] == len(merged["failures"])


@pytest.mark.usefixtures("unexplained")
def test_repro_by_shrinking(done: Done, tmp_path: Path) -> None:
    path = str(shutil.copy(done.skewed["path"], tmp_path))
    shrunk = printed("ReproShrink", "repro", path, "--device", "cpu", "--in-process", "--shrink", "--budget", "2s", code=1)
    assert shrunk["id"] == done.skewed["id"]


def test_the_case_files_of_a_folder(done: Done, tmp_path: Path) -> None:
    out = Path(shutil.copytree(done.out, tmp_path / "out"))
    where = ("torch.skewed", "--out", str(out))
    (stored,) = printed("CaseList", "corpus", "list", *where)["cases"]
    assert stored["id"] == done.skewed["id"]
    assert Path(stored["file"]).name == Path(done.skewed["path"]).name
    Path(stored["file"]).with_name("broken.json").write_text("{")
    assert printed("CaseList", "corpus", "list", *where)["unreadable"]
    here = (*where, "--device", "cpu", "--in-process")
    pruned = printed("CaseRemoval", "corpus", "prune", "--dry-run", *here)
    assert (pruned["command"], pruned["kept"], pruned["removed"]) == ("corpus prune", 1, [])
    registry.unregister("torch.skewed")
    registry.register(Right("torch.skewed"))
    assert printed("CaseRemoval", "corpus", "minimise", "--yes", *here)["left"]
    pruned = printed("CaseRemoval", "corpus", "prune", "--yes", *here)
    assert [each["id"] for each in pruned["removed"]] == [done.skewed["id"]]


def test_check_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The object itself: tests/harness/audit/test_conformance.py makes it of kernels, which takes seconds."""
    rows = (Row("name", "ok", "it is a name"), Row("backward", "wrong", "dQ: wrong", "see the formula"))
    done = Conformance("torch.skewed", "cpu", rows, 1.5, interrupted=True)
    monkeypatch.setattr(conformance, "check_adapter", lambda *_, **__: done)
    content = printed("Conformance", "check-adapter", "torch.skewed", "--device", "cpu", code=1)
    assert (content["right"], content["interrupted"]) == (False, True)


def test_list() -> None:
    rows = printed("KernelList", "list")["kernels"]
    assert {"torch.right", "triton.varlen"} <= {each["kernel"] for each in rows}
    (one,) = printed("KernelList", "list", "torch.skewed")["kernels"]
    assert one["runs_on"] == ["cpu"]


def test_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The object itself: tests/harness/gate/test_gate.py makes it of kernels, which takes a minute."""
    identity = Identity(kernel="torch.skewed", kind="mismatch", output="dk", check="element")
    finding = Finding.of("campaign", identity, "dK: wrong", case="x.json", blob="AF1-x", described=(("heads", "1"),))
    known = Finding("speed", "torch.skewed", "slower", waiver=Waiver(1, "#12", "2030-01-01"))
    parts = (Part("load", "pass", "1 s"), Part("campaign", "fail", "1 failure", (finding,)), Part("speed", "known", "", (known,)))
    kernels = (KernelGate("torch.skewed", "x.py changed", parts, "x.py", 3),)
    done = Gate("main", kernels, 1, ("a note",), "ledger.toml", (("stale", 3),), 1.5, {"cores": 2})
    monkeypatch.setattr(gating, "gate", lambda *_: done)
    content = printed("Gate", "gate", "--base", "main", "--device", "cpu", code=1)
    assert content["kernels"][0]["parts"][1]["findings"][0]["id"] == identity.key == KEY + "element"
    assert gate_commands


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "torch.rihgt"),
        ("run", "--budget", "soon"),
        ("repro", "none.json"),
        ("gate",),
        ("list", "x:y"),
        ("run", "--nonsense"),
    ],
    ids=" ".join,
)
def test_wrong_use(arguments: tuple[str, ...]) -> None:
    assert printed("WrongUse", *arguments, code=2)["error"]


def test_events_are_lines_that_come_before_the_end(done: Done) -> None:
    for each in done.lines:
        assert not [text for text in wrong(each, "EventLine") if "is not in the schema" not in text]
    lines = [each for each in done.lines if each["event"] != "progress"]
    kinds = [each["event"] for each in lines]
    assert (kinds[0], kinds[-1]) == ("started", "finished")
    of_skewed = [each["event"] for each in lines if each.get("id") == done.skewed["id"] or each.get("kernel") == "torch.skewed"]
    assert of_skewed.index("failure") < of_skewed.index("shrunk") < of_skewed.index("kernel")
    shrunk = next(each for each in lines if each["event"] == "shrunk" and each["id"] == done.skewed["id"])
    assert shrunk["blob"] == done.skewed["blob"]


def test_events_on_stdout_leave_the_text_to_stderr() -> None:
    arguments = ["run", "torch.right", "--device", "cpu", "--in-process", "--max-examples", "1", "--events", "-"]
    result = CliRunner().invoke(cli.main, arguments)
    assert [json.loads(each)["format"] for each in result.stdout.splitlines()]
    assert "no failures in 1 case," in result.stderr
    refused = CliRunner().invoke(cli.main, [*arguments, "--json"])
    assert refused.exit_code == 2
    assert "leave --json out" in refused.stderr


# --- identities


@pytest.mark.usefixtures("unexplained")
def test_a_bug_has_the_same_identity_for_every_seed(done: Done) -> None:
    keys = {each["id"] for seed in (1, 2) for each in run("torch.skewed", seed=seed, cases=4)["failures"]}
    assert keys == {done.skewed["id"]}


def key(message: str = "", **changed: Any) -> str:
    return Failure(**{"kernel": "mine", "kind": "exception", "check": "forward", "message": message, **changed}).identity.key


PINNED = {
    "mine/mismatch/dq/element": {"kind": "mismatch", "output": "dq", "check": "element", "message": "dQ: 7 of 9 elements"},
    "mine/hang/-/kernel": {"kind": "hang", "check": "kernel", "message": "kernel did not end within 60 s"},
    "my_kernel/race/o/store": {"kernel": "my kernel", "kind": "race", "output": "o", "check": "store"},
}


@pytest.mark.parametrize("expected", list(PINNED))
def test_identities_are_words_that_stay(expected: str) -> None:
    """A change of these is a change of the format: users keep them."""
    assert key(**{"message": "", **PINNED[expected]}) == expected


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("ValueError: no more than 5 keys, not 17", "ValueError: no more than 5 keys, not 6", True),
        ("OSError: /home/me/kernel.cu: no such file", "OSError: /tmp/build/x/kernel.cu: no such file", True),
        ("at 0x7f3a in f", "at 0x55d0 in f", True),
        ("ValueError: no keys", "ValueError: no queries", False),
        ("SIGSEGV at kernel.py:forward", "SIGSEGV at kernel.py:backward", False),
        ("1 / 2 is a ratio", "1 * 2 is a product", False),
    ],
)
def test_messages_count_without_numbers_and_folders(one: str, other: str, same: bool) -> None:
    assert (key(one) == key(other)) is same
