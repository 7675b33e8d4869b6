"""Ctrl-C and SIGTERM, once, twice and without end: what was found is printed and kept, and the exit code says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from click.testing import CliRunner
from support.runs import FunctionExecutor

from attnfuzz.harness.audit.conformance.check import check_adapter
from attnfuzz.harness.campaign import campaign
from attnfuzz.harness.campaign.corpus import read_case
from attnfuzz.harness.campaign.events import FailureFound
from attnfuzz.harness.campaign.findings import Findings
from attnfuzz.harness.cli.main import main
from attnfuzz.harness.core import environment, signals
from attnfuzz.harness.core.signals import drop_interrupts, ending, interrupted_once, uninterrupted
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.report import interim
from attnfuzz.harness.repro import reproduce
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case

INT, TERM = signal.SIGINT, signal.SIGTERM
COMMAND = [sys.executable, "-P", "-m", "attnfuzz.harness.cli"]
KERNEL = "torch.reference_cpu"
FAILED = Failure(kernel=KERNEL, kind="mismatch", output="o", check="element", message="planted")


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """SIGTERM interrupts as the command line has it, and both are handled afterwards as they were."""
    before = {each: signal.getsignal(each) for each in (INT, TERM, signal.SIGALRM)}
    signal.signal(INT, signal.default_int_handler)
    signal.signal(TERM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for each, handler in before.items():
        signal.signal(each, handler)


# --- the mechanism


@pytest.mark.parametrize("presses", [(INT,), (INT, INT), (INT, TERM), (TERM, INT), (INT, INT, INT), (TERM, TERM)], ids=str)
def test_one_interrupt_is_heard_of_several(presses: tuple[signal.Signals, ...]) -> None:
    steps = []
    with interrupted_once():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(presses[0])
        for each in presses[1:]:
            signal.raise_signal(each)
        steps.append("before the answer")
        ending()
        for each in presses:
            signal.raise_signal(each)
        steps.append("after it")
    assert steps == ["before the answer", "after it"]
    assert signal.getsignal(INT) is signal.default_int_handler


def test_an_interrupt_that_was_lost_is_no_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One raised in a callback is printed and forgotten; the run must still be possible to end."""
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    with interrupted_once():
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(INT)
            signal.raise_signal(INT)
            now[0] += 6.0
        ending()
        now[0] += 60.0
        signal.raise_signal(INT)


def test_what_ends_by_itself_leaves_the_rest_of_the_command_open() -> None:
    """A campaign that has ended drops what comes late; the ledger's Cases after it can be interrupted."""
    with interrupted_once():
        with interrupted_once():
            ending()
            signal.raise_signal(INT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(INT)
        with interrupted_once():
            ending()
        signal.raise_signal(INT)


def test_a_handler_that_only_takes_note_is_called_each_time() -> None:
    """Of a program that uses attnfuzz: it decides what ends it."""
    notes: list[int] = []
    signal.signal(INT, lambda number, _: notes.append(number))
    with interrupted_once():
        signal.raise_signal(INT)
        signal.raise_signal(INT)
    assert notes == [INT, INT]


def test_a_block_that_is_put_off_is_interrupted_once() -> None:
    with interrupted_once():
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            [signal.raise_signal(INT) for _ in range(3)]
        signal.raise_signal(TERM)


def test_handlers_that_the_block_sets_for_what_follows_stay() -> None:
    with interrupted_once():
        restore = drop_interrupts()
    signal.raise_signal(INT)
    restore()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(INT)


# --- commands


def failing(case: Case) -> Verdict:
    shows = max(case.problem.seqlens_k) >= 3
    return Verdict(status="fail", failures=(FAILED,)) if shows else Verdict(status="pass")


class Stub(FunctionExecutor):
    """Takes no time; a Case fails from three keys on."""

    def __init__(self) -> None:
        super().__init__(failing)

    def describe(self) -> dict[str, Any]:
        return environment.describe("cpu")


class Presses:
    """Presses Ctrl-C at the nth call of a function of attnfuzz, then again and again until the command has ended."""

    def __init__(self, number: int) -> None:
        self.left, self.pressed = number, 0

    def begin(self) -> None:
        sys.setprofile(self._count)

    def end(self) -> None:
        sys.setprofile(None)
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or "/harness/" not in frame.f_code.co_filename:
            return
        self.left -= 1
        if self.left < 0:
            sys.setprofile(None)
            signal.signal(signal.SIGALRM, self._press)
            signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
            self.pressed += 1
            signal.raise_signal(INT)

    def _press(self, *_: object) -> None:
        if signal.getsignal(INT) is signal.default_int_handler:
            # The command has ended; the script `attnfuzz` would ignore it then.
            signal.setitimer(signal.ITIMER_REAL, 0)
            return
        self.pressed += 1
        signal.raise_signal((INT, INT, TERM)[self.pressed % 3])


def pressed(presses: Presses, *arguments: str) -> tuple[int, str]:
    try:
        result = CliRunner().invoke(main, arguments)
    finally:
        presses.end()
    return result.exit_code, result.output


@pytest.mark.parametrize("number", [0, 1, 2, 3, 5, 8, 12, 18, 26, 40, 60, 90, 130, 180, 240, 320, 420, 560, 750, 1000])
def test_whenever_ctrl_c_comes_after_a_failure_the_run_says_so(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first call after the failure is announced to the last of the command."""
    presses, listen = Presses(number), interim.listen
    monkeypatch.setattr(campaign, "executor_of", lambda *_, **__: Stub())
    found: list[FailureFound] = []

    def listening(event: Any) -> None:
        listen(event)
        if isinstance(event, FailureFound) and not found:
            found.append(event)
            presses.begin()

    monkeypatch.setattr(interim, "listen", listening)
    code, text = pressed(presses, "run", KERNEL, "--device", "cpu", "--max-examples", "12", "--out", str(tmp_path / "out"))
    assert found, text
    assert code == 1, text
    assert "nothing was found" not in text
    assert "Traceback" not in text
    [file] = (tmp_path / "out" / "cases").glob("*.json")
    assert read_case(file).case.kernel == KERNEL
    assert file.name in text, "in the summary, or in the list where there is none"
    assert signal.getsignal(INT) is signal.default_int_handler


@pytest.mark.parametrize("number", [0, 1, 4, 16, 64])
def test_before_a_failure_nothing_was_found(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "executor_of", lambda *_, **__: Stub())
    monkeypatch.setattr(Findings, "open", lambda *_: pytest.fail("too late"))
    presses = Presses(number)
    start = campaign._run_campaign

    def starting(*arguments: Any) -> Any:
        presses.begin()
        return start(*arguments)

    monkeypatch.setattr(campaign, "_run_campaign", starting)
    code, text = pressed(presses, "run", KERNEL, "--device", "cpu", "--max-examples", "12", "--out", str(tmp_path / "out"))
    assert code == 130, text
    assert "Traceback" not in text
    assert "nothing was found until then" in text or "no failures" in text
    assert not list((tmp_path / "out").glob("cases/*"))


def test_failures_are_printed_where_no_summary_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the end of a campaign and what the command does with it."""
    monkeypatch.setattr(campaign, "executor_of", lambda *_, **__: Stub())

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attnfuzz.harness.cli.run._run_object", interrupted)
    out = tmp_path / "out"
    result = CliRunner().invoke(main, ["run", KERNEL, "--device", "cpu", "--max-examples", "9", "--json", "--out", str(out)])
    [file] = (out / "cases").glob("*.json")
    assert result.exit_code == 1
    assert f"interrupted; failures until then:\n{KERNEL}: mismatch in O: {file}\n" in result.stderr


def stored(folder: Path) -> Path:
    """A case file that can be shrunk."""
    problem = Problem(seqlens_q=(7, 2), seqlens_k=(9, 4), dim_qk=16, dim_v=16, dtype="float32")
    file = folder / "case.json"
    file.write_text(json.dumps(Case(kernel=KERNEL, problem=problem).to_object()))
    return file


@pytest.mark.parametrize(
    ("more", "codes"),
    [(("--repeat", "40"), (1, 130)), (("--shrink",), (0, 1, 130)), ((), (1, 130))],
    ids=["repeat", "shrink", "again"],
)
@pytest.mark.parametrize("number", [0, 7, 25, 60])
def test_repro_ends_with_what_it_has(
    more: tuple[str, ...], codes: tuple[int, ...], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = stored(tmp_path)
    presses = Presses(number)

    def stub(*_: Any, **__: Any) -> Stub:
        presses.begin()
        return Stub()

    monkeypatch.setattr(reproduce, "Isolated", stub)
    code, text = pressed(presses, "repro", str(file), "--device", "cpu", *more)
    assert code in codes, text
    assert "Traceback" not in text
    assert ("nothing was found until then" in text) == (code == 130 and "runs" not in text), text
    assert read_case(file).case.kernel == KERNEL


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_check_adapter_keeps_its_rows(rows: int) -> None:
    seen: list[str] = []

    def listen(row: Any) -> None:
        seen.append(row.check)
        if len(seen) >= rows:
            signal.raise_signal(INT)

    with interrupted_once():
        done = check_adapter(KERNEL, "cpu", listen, in_process=True)
    assert done.interrupted
    assert not done.complete
    assert [row.check for row in done.rows] == seen
    assert (done.rows[-1].check, done.rows[-1].status, done.rows[-1].found) == ("all else", "not run", "interrupted")


def test_ctrl_c_while_the_command_line_is_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from attnfuzz.harness.cli import start

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attnfuzz.harness.cli.main.main", interrupted)
    with pytest.raises(SystemExit) as ended:
        start.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted: nothing was found until then\n"


# --- real processes


def waits_for(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    lines = ""
    for line in process.stdout:
        lines += line
        if text in line:
            break
    return lines


def pressing(process: subprocess.Popen[str], gap: float, presses: tuple[signal.Signals, ...]) -> None:
    for number, each in enumerate(presses):
        time.sleep(gap if number else 0.0)
        process.send_signal(each)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("gap", "presses"),
    [
        (0.005, (INT, INT)), (0.02, (INT, INT)), (0.1, (INT, INT)), (0.3, (INT, INT)), (0.6, (INT, INT)), (1.0, (INT, INT)),
        (0.02, (INT, INT, INT)), (0.3, (INT, INT, INT)), (0.02, (INT, TERM)), (0.5, (TERM, INT)),
    ],
)  # fmt: skip
def test_a_run_ends_with_its_summary(workers: str, gap: float, presses: tuple[signal.Signals, ...], tmp_path: Path) -> None:
    command = [*COMMAND, "run", "fault.numbers", "--device", "cpu", "--budget", "60s", "--workers", workers, "--out", "out"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
    text = waits_for(process, "found")
    pressing(process, gap, presses)
    text += process.communicate(timeout=120)[0]
    assert process.returncode == 1, text
    assert "1 failure in " in text
    assert "Traceback" not in text
    assert "nothing was found" not in text
    [file] = (tmp_path / "out" / "cases").glob("*.json")
    assert file.name in text


TEST = """
from attnfuzz.harness.plugin import fuzz
test_wrong = fuzz("fault.numbers", max_examples=4000, shards=1)
test_other = fuzz("torch.reference_cpu", max_examples=4000, shards=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("gap", "presses"), [(0.02, (INT, INT)), (0.5, (INT, INT)), (0.2, (INT, INT, INT))])
def test_pytest_shows_what_was_found(gap: float, presses: tuple[signal.Signals, ...], tmp_path: Path) -> None:
    (tmp_path / "test_kernels.py").write_text(TEST)
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "test_kernels.py", "--attnfuzz-device=cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
    cases = tmp_path / ".attnfuzz" / "cases"
    _wait(lambda: cases.exists() and bool(list(cases.iterdir())), process)
    pressing(process, gap, presses)
    text = process.communicate(timeout=120)[0]
    assert process.returncode == 1, text
    assert "Traceback" not in text
    assert "interrupted by Ctrl-C: no other test was run" in text
    assert "mismatch in O" in text
    [file] = cases.glob("*.json")
    assert file.name in text


def _wait(ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and not ready():
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        time.sleep(0.05)
    assert ready()
    assert os.getpid() != process.pid
