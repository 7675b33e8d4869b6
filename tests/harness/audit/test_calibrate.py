"""Calibration: what is right raises no alarm, what is wrong does, and what is known of a peer is told with its versions."""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console
from support.peers import Raising, Right, Skewed

from attnfuzz.harness.audit.calibrate.calibrate import Calibration, _in_processes, calibrate, planned
from attnfuzz.harness.audit.calibrate.known import found_at, matching, read_known
from attnfuzz.harness.audit.calibrate.report import CalibrationProgress, calibration_object, markdown, show_calibration
from attnfuzz.harness.audit.calibrate.turn import WHOLE, Asked, Count, Plan, Progress, Turn
from attnfuzz.harness.campaign.events import KernelSummary, Worst
from attnfuzz.harness.cli import main as cli
from attnfuzz.harness.core.environment import versions
from attnfuzz.harness.core.text import dumps
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import BadArgument

CASES = 12


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    made = [Right("torch.right"), Skewed("torch.skewed"), Raising("torch.raising"), Skewed("acme.skewed")]
    for kernel in made:
        registry.register(kernel)
    yield
    for kernel in made:
        registry.unregister(kernel.name)


def run(names: list[str], out: Path, *, jobs: int = 1, known: Path | None = None, cases: int = CASES) -> Calibration:
    told: list[Progress] = []
    plan = Plan(device="cpu", cases=cases, jobs=jobs, out=str(out), known=read_known(known) if known else ())
    done = calibrate([registry.get(name) for name in names], plan, told.append)
    assert {each.kernel for each in told if each.over} == {turn.kernel for turn in done.turns if not turn.skipped}
    return done


def table(done: Calibration) -> str:
    text = StringIO()
    show_calibration(Console(file=text, width=200), done)
    return text.getvalue()


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A peer with a defect, calibrated once beside a right one, two at a time."""
    folder = tmp_path_factory.mktemp("skewed")
    made = [Right("torch.right"), Skewed("torch.skewed")]
    for kernel in made:
        registry.register(kernel)
    return {"folder": folder, "done": run(["torch.skewed", "torch.right", "torch.flash"], folder, jobs=2)}


def kept(skewed: dict[str, Any], folder: Path, **changes: Any) -> Path:
    """The defect's case file as one would keep it, with `changes` in what is told of it."""
    (found,) = skewed["done"].turns[0].alarms
    folder.mkdir(exist_ok=True)
    content = json.loads(Path(found.path).read_text())
    content["found"] |= changes
    (folder / "skewed.json").write_text(json.dumps(content))
    return folder


def test_a_right_kernel_raises_no_alarm_beside_one_that_is_wrong(skewed: dict[str, Any]) -> None:
    done = skewed["done"]
    wrong, right, flash = done.turns
    assert (wrong.kernel, right.kernel, flash.kernel) == ("torch.skewed", "torch.right", "torch.flash")
    assert flash.skipped == "it is declared for cuda only"
    assert (right.alarms, right.counts, right.broken) == ((), {}, "")
    assert right.summary is not None
    assert right.summary.cases == CASES
    assert {name: each.cases for name, each in right.summary.outputs.items()} == dict.fromkeys(
        ("o", "lse", "dq", "dk", "dv"), CASES
    )
    assert 0 < right.summary.outputs["dk"].worst < 1
    (found,) = wrong.alarms
    assert (found.identity.kind, found.identity.output) == ("mismatch", "dk")
    assert wrong.summary is not None
    assert wrong.summary.cases == CASES, "a defect does not cost a peer its Cases"
    assert wrong.counts["dk"].alarms > 1
    assert wrong.counts["dk"].known == 0
    assert wrong.summary.outputs["dk"].worst > 1
    assert (done.failed, done.broken, done.interrupted, done.cases) == (True, False, False, 2 * CASES)


def test_the_table_tells_all_of_it(skewed: dict[str, Any]) -> None:
    text = table(skewed["done"])
    assert "1. torch.skewed: mismatch in dK" in text
    assert "torch.flash: not run here: it is declared for cuda only" in text
    assert f"1 alarm in {2 * CASES} cases of 2 kernels (cpu" in text
    document = markdown(skewed["done"], "attnfuzz calibrate --device cpu --max-examples 12")
    assert f"| torch.right | O | {CASES} | 0 | 0 | 0 | " in document
    assert "Made by `attnfuzz calibrate --device cpu --max-examples 12` on cpu" in document
    assert f"torch {versions()['torch']}" in document
    assert "## Alarms\n\n- torch.skewed: mismatch in dK: seqlen_q x seqlen_k " in document
    found = calibration_object(skewed["done"])
    assert json.loads(dumps(found))["kernels"][2]["skipped"] == "it is declared for cuda only"
    assert [row["kernel"] for row in found["kernels"]] == ["torch.skewed", "torch.right", "torch.flash"]
    assert found["kernels"][0]["alarms"][0]["identity"]["output"] == "dk"


def test_what_is_known_of_a_peer_is_no_alarm(skewed: dict[str, Any], tmp_path: Path) -> None:
    done = run(["torch.skewed"], tmp_path / "out", known=kept(skewed, tmp_path / "known"))
    (turn,) = done.turns
    assert (turn.alarms, turn.gone, turn.elsewhere, done.failed) == ((), (), (), False)
    ((known, cases),) = turn.known
    assert cases == turn.counts["dk"].known > 1
    assert turn.counts["dk"].alarms == 0
    assert f"torch.skewed: known: torch.skewed: mismatch in dK ({known.stored.path}, torch {versions()['torch']})" in table(done)
    assert "no alarms in 12 cases" in table(done)


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": {"torch": "1.0"}},
        {"identity": {"kernel": "torch.skewed", "kind": "nonfinite", "output": "dk", "check": "element", "message": ""}},
        {"identity": {"kernel": "torch.skewed", "kind": "mismatch", "output": "dv", "check": "element", "message": ""}},
        {"identity": {"kernel": "torch.skewed", "kind": "mismatch", "output": "dk", "check": "other", "message": ""}},
    ],
    ids=["another torch", "another kind", "another output", "another check"],
)
def test_what_is_known_is_that_and_nothing_else(skewed: dict[str, Any], tmp_path: Path, changes: dict[str, Any]) -> None:
    (found,) = skewed["done"].turns[0].alarms
    known = read_known(kept(skewed, tmp_path / "known", **changes))
    assert matching(known, found.identity, versions()) is None
    assert matching(read_known(kept(skewed, tmp_path / "known")), found.identity, versions()) is not None


def test_an_exception_is_known_by_its_message_too(skewed: dict[str, Any], tmp_path: Path) -> None:
    told = {"kernel": "torch.skewed", "kind": "exception", "output": None, "check": "forward", "message": "forward raised A"}
    known = read_known(kept(skewed, tmp_path / "known", identity=told))
    same = Identity(kernel="torch.skewed", kind="exception", output=None, check="forward", message="forward raised A")
    other = Identity(kernel="torch.skewed", kind="exception", output=None, check="forward", message="forward raised B")
    assert matching(known, same, versions()) is not None
    assert matching(known, other, versions()) is None


def test_what_is_known_and_gone_is_wrong_as_well(skewed: dict[str, Any], tmp_path: Path) -> None:
    folder = kept(skewed, tmp_path / "known")
    content = json.loads((folder / "skewed.json").read_text().replace("torch.skewed", "torch.right"))
    (folder / "skewed.json").write_text(json.dumps(content))
    done = run(["torch.right"], tmp_path / "out", known=folder, cases=4)
    (turn,) = done.turns
    assert [str(each.stored.path) for each in turn.gone] == [str(folder / "skewed.json")]
    assert done.failed
    assert "torch.right: known, but gone: torch.right: mismatch in dK" in table(done)
    content["found"]["versions"]["torch"] = "1.0"
    (folder / "skewed.json").write_text(json.dumps(content))
    done = run(["torch.right"], tmp_path / "out", known=folder, cases=4)
    (turn,) = done.turns
    assert (turn.gone, len(turn.elsewhere), done.failed) == ((), 1, False)
    assert "torch.right: known of other versions and not judged: " in table(done)


def test_a_defect_that_is_not_drawn_is_tried_by_its_own_case(skewed: dict[str, Any], tmp_path: Path) -> None:
    """A known failure of one output must not be lost because the few drawn Cases did not meet it."""
    from attnfuzz.harness.audit.calibrate.turn import _Counter

    known = read_known(kept(skewed, tmp_path / "known"))

    class Executor:
        def begin(self, case: Any, *, patient: bool = False) -> None:
            assert (case, patient) == (known[0].stored.case, True)

        def finish(self) -> Any:
            return skewed["done"].turns[0].alarms[0].verdict

    counter = _Counter("torch.skewed", known, lambda _: None)
    counter.versions = versions()
    assert counter.seen_again(Executor()) == [(known[0], True)]  # type: ignore[arg-type]
    assert Asked("torch.skewed", {}, Plan(device="cpu", cases=1)).plan.settings("torch.skewed").replay is False


def test_a_failure_of_no_output_has_a_row_of_its_own(tmp_path: Path) -> None:
    done = run(["torch.raising"], tmp_path, cases=8)
    (turn,) = done.turns
    assert turn.counts[WHOLE].alarms >= 1
    assert [each.identity.kind for each in turn.alarms] == ["exception"]
    assert "\n|  | run |  |  | " in markdown(done, "attnfuzz calibrate")
    assert done.failed


def test_our_own_kernels_have_no_known_defects(skewed: dict[str, Any], tmp_path: Path) -> None:
    folder = kept(skewed, tmp_path / "known")
    content = json.loads((folder / "skewed.json").read_text().replace("torch.skewed", "acme.skewed"))
    (folder / "skewed.json").write_text(json.dumps(content))
    with pytest.raises(BadArgument, match=r"acme.skewed is no peer of PyTorch \(torch.\*\); mend the kernel"):
        read_known(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"identity": {}}, "it tells no failure"),
        ({"identity": None}, "it tells no failure"),
        ({"versions": {}}, "it does not tell the versions of torch"),
        ({"versions": None}, "it does not tell the versions of torch"),
    ],
)
def test_what_is_kept_wrongly_is_refused(skewed: dict[str, Any], tmp_path: Path, changes: Any, reason: str) -> None:
    with pytest.raises(BadArgument, match=reason):
        read_known(kept(skewed, tmp_path / "known", **changes))


def test_a_kept_defect_of_another_kernel_than_its_case_is_refused(skewed: dict[str, Any], tmp_path: Path) -> None:
    identity = {"kernel": "torch.right", "kind": "mismatch", "output": "dk", "check": "element", "message": ""}
    with pytest.raises(BadArgument, match=r"its failure is of torch.right, its Case of torch.skewed"):
        read_known(kept(skewed, tmp_path / "known", identity=identity))


def test_folders_of_what_is_known(skewed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert found_at(None) == ()
    with pytest.raises(BadArgument, match="no such folder"):
        found_at("nowhere")
    shutil.copytree(kept(skewed, tmp_path / "known"), tmp_path / "tests/corpus/peers")
    assert len(found_at(None)) == len(found_at("known")) == 1


def test_a_quarter_of_the_cores_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert (planned(None), planned(3)) == (4, 3)
    assert Plan(device="cpu", cases=1, jobs=4).settings("x").jobs == 4
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    assert planned(None) == 1


def test_nothing_that_can_run_here_is_wrong_use() -> None:
    with pytest.raises(BadArgument, match=r"no kernel can run here \(torch.flash: it is declared for cuda only\)"):
        calibrate([registry.get("torch.flash")], Plan(device="cpu", cases=1), lambda _: None)
    with pytest.raises(BadArgument, match="max_examples=0"):
        Plan(device="cpu", cases=0)


class Exits:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


def test_a_process_that_dies_is_told() -> None:
    plan = Plan(device="cpu", cases=1, jobs=2)
    deadly = {"name": "torch.deadly", "pickle": base64.b64encode(pickle.dumps(Exits())).decode(), "modules": {}}
    asked = [Asked("torch.deadly", deadly, plan), Asked("torch.nothing", {"name": "torch.nothing"}, plan)]
    turns = _in_processes(asked, 2, lambda _: None)
    assert turns["torch.deadly"].broken == "its process ended without a result (exit code 3)"
    assert turns["torch.nothing"].broken.startswith("kernel='torch.nothing': no kernel of that name is installed")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["Ctrl-C", "terminated"])
def test_an_ended_calibration_reports_and_leaves_nothing(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-m", "attnfuzz.harness.cli", "calibrate", "torch.reference_cpu", "triton.varlen"]
    command += ["--device", "cpu", "--max-examples", "100000", "--jobs", "2"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True)
    time.sleep(30)
    # A terminal sends Ctrl-C to all processes of the run.
    os.killpg(run.pid, signal.SIGINT) if how == "Ctrl-C" else run.terminate()
    told, _ = run.communicate(timeout=60)
    assert run.returncode == 130, told
    assert "torch.reference_cpu: interrupted" in told
    assert "triton.varlen: interrupted" in told
    assert "no alarms in " in told
    assert "Traceback" not in told
    deadline = time.monotonic() + 20
    while _alive(run.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(run.pid)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_notes_of_turns_that_did_not_end_well() -> None:
    summary = KernelSummary("torch.x", 3, 0, 1.0, 0, 0.0, {"o": Worst(cases=3, worst=float("inf"), unjudged=2)}, ())
    turns = (
        Turn("torch.x", summary=summary, counts={"o": Count(alarms=2)}, environment={"device": "H200", "versions": {}}),
        Turn("torch.y", broken="no such module\nat all"),
        Turn("torch.z", interrupted=True),
        Turn("torch.w", summary=summary, lost="the device is gone"),
    )
    done = Calibration(Plan(device="cpu", cases=5), turns, 1.0)
    text = table(done)
    for line in (
        "torch.x: 3 of 5 Cases: there are no more to draw",
        "torch.y: not tried to the end: no such module\n",
        "torch.z: interrupted",
        "torch.w: stopped early: the device is gone",
    ):
        assert line in text
    assert " inf " in text
    assert (done.failed, done.broken, done.interrupted) == (True, True, True)
    assert not Calibration(Plan(device="cpu", cases=5), turns[:1], 1.0).failed, "alarms are told by their failures"


def test_progress_is_shown_and_taken_away() -> None:
    text = StringIO()
    with CalibrationProgress(Console(file=text, force_terminal=True, width=100)) as progress:
        progress(Progress("torch.flash", 3, 1, "trying"))
        progress(Progress("torch.flash", over=True))
        progress(Progress("torch.cudnn", over=True))
    assert "torch.flash" in text.getvalue()


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["calibrate", "--device", "cpu", "--max-examples", "12", "--jobs", "1"]
    done = CliRunner().invoke(cli.main, [*given, "torch.right", "torch.flash", "--write", "docs/peers.md", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["cases"] == 12
    command = "attnfuzz calibrate torch.right torch.flash --device cpu --max-examples 12"
    assert f"Made by `{command}` on cpu" in Path("docs/peers.md").read_text()
    done = CliRunner().invoke(cli.main, [*given, "torch.skewed"])
    assert done.exit_code == 1
    assert "1 alarm in 12 cases of 1 kernel" in done.stdout
    for wrong, message in (
        (["torch.flash"], "no kernel can run here"),
        (["torch.right", "--known", "nowhere"], "known='nowhere': no such folder"),
        (["torch.right", "--write", "docs"], "write='docs': it is a folder; give a file"),
        (["torch.right", "--write", "/proc/nowhere"], "write='/proc/nowhere': it cannot be written (No such file or directory)"),
        (["torch.right", "--out", "/proc/nowhere"], "out='/proc/nowhere': failing Cases could not be written there"),
        (["torch.right", "--profile", "tiny"], "profile='tiny'"),
    ):
        done = CliRunner().invoke(cli.main, [*given, *wrong])
        assert (done.exit_code, message in done.stderr) == (2, True), done.output
