"""benchmarks/throughput.py: its arithmetic, its processes, and the suites that it puts beside the engine."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import torch
from support.benchmarks import FOLDER, loaded
from support.engine import wait_for

from attnfuzz.harness.campaign.corpus import Corpus
from attnfuzz.harness.campaign.settings import PROFILES, Settings
from attnfuzz.harness.core.environment import has_cuda
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Built, Inputs
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case

KERNEL = "torch.reference_cpu"


def part(name: str) -> ModuleType:
    """A module of benchmarks/throughput/."""
    loaded("throughput")
    return importlib.import_module(f"throughput.{name}")


@pytest.mark.parametrize("words", [["--only"], ["--only", "--device", "cpu"], ["--workers", "2", "--only"]])
def test_an_option_without_a_word_is_left_for_click_to_refuse(words: list[str]) -> None:
    assert part("cli").spread(words) == words


@pytest.mark.parametrize("content", ["[]", "{}", '{"soak": [1]}', '{"soak": {"figures": {}}}', '{"engine": 5}'])
def test_a_file_that_is_no_result_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(click.BadParameter, match=r"nothing was measured|not what --json has written"):
        part("cli").main(["--read", str(tmp_path / "x.json")], standalone_mode=False)


def test_an_option_takes_several_words() -> None:
    words = ["--workers", "1", "2", "auto", "--cold", "--kernel", "a", "--budget", "3s"]
    expected = ["--workers", "1", "--workers", "2", "--workers", "auto", "--cold", "--kernel", "a", "--budget", "3s"]
    assert part("cli").spread(words) == expected


def test_rates_are_of_the_time_that_all_have() -> None:
    stamps = part("campaigns").Stamps(100.0, 110.0, [106.0, 104.0, 108.0, 111.0])
    assert (stamps.count, stamps.first) == (3, 4.0)
    assert stamps.cold == pytest.approx(0.3)
    assert stamps.warm == pytest.approx(2 / 6)
    for at in ([], [104.0]):
        assert part("campaigns").Stamps(100.0, 110.0, at).warm is None


def test_a_log_is_read_while_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = part("campaigns").LogFile(path)
    assert log.update().cases == []
    lines = [{"trial": 1.5, "phase": "generate", "tokens": 4}, {"trial": 2.5, "phase": "shrink"}, {"campaign": {"lost": None}}]
    text = "".join(json.dumps(each) + "\n" for each in lines)
    path.write_text(text[:70])
    assert [each["trial"] for each in log.update().cases] == [1.5]
    path.write_text(text)
    trials = log.update()
    assert [each["trial"] for each in trials.others] == [2.5]
    assert trials.mean("tokens") == 4
    assert trials.result == {"lost": None}
    assert trials.stamps(0.0, 2.0).count == 1


def test_a_judged_test_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "judged"
    assert part("rivals").judged_in(path) == []
    path.write_text("1.5 30 1\n2.5 40 0\n3.5 4")
    assert part("rivals").judged_in(path) == [(1.5, 30, True), (2.5, 40, False)]


def test_ours_is_a_multiple_of_each_contestant() -> None:
    rivals = part("rivals")
    base = {"kernel": "k", "workers": "1", "caches": "warm", "judged": 9, "tokens": 5.0, "failures": 0, "first": 1.0}
    rates = {rivals.OURS: (8.0, 9.0), "parametrised suite": (2.0, 3.0), "Hypothesis test": (0.0, None)}
    sheet = rivals.sheets([{**base, "who": who, "cold": cold, "warm": warm} for who, (cold, warm) in rates.items()])[0]
    assert [(row["x cold"], row["x warm"]) for row in sheet.rows] == [(1.0, 1.0), (4.0, 3.0), (None, None)]


def test_medians_are_of_the_rounds_that_measured_something() -> None:
    rows = [
        {"k": "a", "n": 1, "x": None, "s": "t"},
        {"k": "a", "n": 5, "x": 4.0, "s": "t"},
        {"k": "a", "n": 6, "x": 2.0, "s": "t"},
    ]
    assert part("tables").medians(rows, ("k",)) == [{"k": "a", "n": 5, "x": 3.0, "s": "t", "rounds": 3}]


def test_markdown_is_a_table_ready_for_a_page() -> None:
    tables = part("tables")
    sheet = tables.Sheet(
        "t", [tables.Column("a", "A"), tables.Column("b", "B", ".1f")], [{"a": "x|y", "b": 1.25}, {"a": 2}], ["n"]
    )
    assert sheet.markdown() == "**t**\n\n| A | B |\n| --- | --: |\n| x\\|y | 1.2 |\n| 2 | - |\n\nn\n"


@pytest.mark.parametrize(
    ("line", "expected"), [("97, 5120", (97.0, 5120.0)), ("[N/A], 5120", None), ("", None), ("1, 2, 3", None)]
)  # fmt: skip
def test_what_nvidia_smi_prints(line: str, expected: tuple[float, float] | None) -> None:
    assert part("gpu").sample(line) == expected


def test_a_gpu_is_sampled_while_the_block_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = part("gpu")
    tool = tmp_path / "nvidia-smi"
    lines = ("import time", "print('[N/A], 7')", "print('40, 100')", "print('60, 90', flush=True)", "time.sleep(60)")
    tool.write_text("\n".join((f"#!{sys.executable}", *lines)))
    tool.chmod(0o755)
    monkeypatch.setattr(gpu.shutil, "which", lambda _: str(tool))
    begin = time.monotonic()
    with gpu.Gpu(True) as watched:
        while watched.busy(begin, time.monotonic()) != 50.0 and time.monotonic() < begin + 30:
            time.sleep(0.01)
    assert watched.busy(begin, time.monotonic()) == 50.0
    assert watched.busy(0.0, begin) is None
    assert watched.peak == 100.0
    with gpu.Gpu(False) as nothing:
        assert (nothing.busy(0.0, time.monotonic()), nothing.peak) == (None, None)


def test_the_drawn_cases_judged_are_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    judged, commands, note = part("judged"), part("commands"), tmp_path / "judged"
    heard: list[Any] = []
    monkeypatch.setattr(judged.Recorder, "__call__", lambda _, event: heard.append(event))
    judged.note_judged(note)
    clock = iter((10.0, 10.1, 10.2, 10.9, 11.0, 11.1))
    monkeypatch.setattr(judged.time, "monotonic", lambda: next(clock))
    problem = Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=8, dim_v=8)
    recorder, case = object.__new__(judged.Recorder), Case(kernel="k", problem=problem)
    phases = ("replay", "generate", "generate", "generate", "shrink")
    events = [judged.TrialFinished("k", phase, case, Verdict(status="pass")) for phase in phases]
    events.append(judged.CampaignFinished((), (), 1.0))
    for each in events:
        recorder(each)
    assert heard == events
    assert commands.judged_cases(note) == [(10.1, 1), (10.9, 3), (11.1, 3)]
    assert commands.judged_cases(tmp_path / "nothing") == []


def test_the_later_rate_needs_three_notes() -> None:
    finished = part("commands").Finished
    notes = ((2.0, 1), (4.0, 11), (6.0, 91))
    assert [finished({}, 2.0, 7.0, judged=notes[:n]).later_rate() for n in range(4)] == [None, None, None, 40.0]


def times(**worker: float) -> dict[str, Any]:
    """The `times` of 40 Cases in `attnfuzz run --json`."""
    child = {"compile": 0.5, "inputs": 1.0, "kernel": 2.0, "oracle": 3.0, "judge": 0.5}
    steps = dict.fromkeys(("turn", "campaign", "draw", "journal", "start", "trial", "shrink", "other"), 0.0)
    checks = {"oracle": {"cases": 38, "seconds": 5.7}, "twice": {"cases": 2, "seconds": 1.3}}
    return {"worker": {**steps, **worker}, "child": child, "checks": checks, "cases": 40, "batches": 5, "children": 3}


def finished(times: dict[str, Any], cases: int = 40) -> Any:
    """A run of one kernel, of 16 s, whose first Verdict came after 6 s."""
    kernel = {"kernel": "k", "cases": cases, "shrink_cases": 0, "compile_seconds": 2.5, "times": times}
    return part("commands").Finished({"kernels": [kernel], "failures": []}, first=6.0, wall=16.0)


def test_each_account_adds_up_to_the_time_of_the_turns() -> None:
    rows = part("stages").accounts(finished(times(campaign=4.0, trial=10.0, shrink=4.0, other=2.0)), 2)
    for side in ("worker", "child"):
        assert sum(row["share"] for row in rows if row["side"] == side) == pytest.approx(100)
    steps = {(row["side"], row["step"]): row for row in rows}
    # Of 20 s of two workers, their children are at their stages for 7, and shrink for 4.
    assert steps["worker", "trial"]["ms"] == pytest.approx(250)
    assert steps["child", "oracle"]["ms"] == pytest.approx(75)
    assert steps["child", "shrink"]["ms"] == steps["worker", "shrink"]["ms"] == pytest.approx(100)
    assert steps["child", "pipe, idle, or none"]["ms"] == pytest.approx(225)
    twice = steps["check", "twice"]
    assert (twice["part"], twice["own"], twice["ms"]) == pytest.approx((5.0, 650.0, 32.5))
    total = steps["both", "all"]
    assert (total["ms"], total["batch"], total["rate"], total["turns"]) == pytest.approx((500, 8.0, 4.0, 62.5))


def test_a_check_without_a_case_in_a_round_counts_as_nothing_there() -> None:
    stages, rows = part("stages"), list[dict[str, Any]]()
    for checks in ({"oracle": (30, 5.0), "twice": (10, 2.0)}, {"oracle": (40, 7.0)}, {"oracle": (20, 3.0), "twice": (20, 4.0)}):
        by_check = {name: {"cases": cases, "seconds": seconds} for name, (cases, seconds) in checks.items()}
        run = finished({**times(trial=9.0), "checks": by_check})
        rows += [{"kernel": "k", "workers": "1", "caches": "warm", **row} for row in stages.accounts(run, 1)]
    found = {row["step"]: (row["part"], row["own"], row["ms"]) for row in stages.sheets(rows)[1].rows}
    assert found["oracle"] == pytest.approx((75, 500 / 3, 125))
    assert found["twice"] == pytest.approx((25, 200, 50)), "the median of 0, 10 and 20 Cases"


def test_there_is_a_table_for_each_number_of_workers() -> None:
    stages = part("stages")
    rows = [
        {"kernel": "k", "workers": workers, "caches": "warm", **row}
        for workers, seconds in (("1", 8.0), ("2", 9.0), ("1", 10.0))
        for row in stages.accounts(finished(times(trial=seconds)), int(workers))
    ]
    sheets = stages.sheets(rows)
    of = [f"{part}: k, {workers} workers, caches warm" for workers in "12" for part in ("stages", "checks")]
    assert [each.title for each in sheets] == of
    assert [row["step"] for row in sheets[1].rows] == ["oracle", "twice"]
    assert {row["side"] for row in sheets[0].rows} == {"worker", "child", "both"}
    sheets = sheets[::2]
    trial = [next(row["ms"] for row in each.rows if row["step"] == "trial") for each in sheets]
    assert trial == pytest.approx([225, 225])
    assert sheets[0].notes[0] == (
        "40 Cases, 8.0 a batch, 4.0 a second from the first on; the first Verdict came after 6.0 s, the end after 16.0 s. "
        "Turns are 56 % of the workers' time since the start of the command; 3 children started."
    )


def test_a_run_without_a_turn_is_not_measured() -> None:
    with pytest.raises(part("campaigns").NotMeasured, match="no turn with a Case came to its end"):
        part("stages").accounts(finished({**times(), "cases": 0, "batches": 0}), 1)


def test_rates_of_the_engine_are_with_and_without_its_start() -> None:
    row = part("engine").row_of(("k",), "2", "warm", finished(times()))
    assert (row["cold"], row["warm"]) == (2.5, 4.0)
    assert (row["kernel"], row["cases"], row["compile_seconds"]) == ("k", 40, 2.5)


def samples(count: int = 30, rate: float = 10.0, last_rate: float = 10.0, leak: int = 0) -> list[Any]:
    """Samples of a campaign that begins after two seconds; `leak`: bytes a second that its children grow by."""
    sample, cases, taken = part("soak").Sample, 0.0, []
    for at in range(count):
        cases += 0 if at < 2 else rate if at < 20 else last_rate
        taken.append(sample(float(at), int(cases), 3, 100 << 20, (900 << 20) + leak * at, 800 << 20, 2.0 + (at >= 20)))
    return taken


def test_a_steady_campaign_is_right() -> None:
    result = part("soak").judged(samples(), 0)
    assert result["wrong"] == []
    assert result["figures"]["rate"] == {"first": 10.0, "last": 10.0, "drift": 0.0}
    assert result["figures"]["core"] == {"first": 2.0, "last": 3.0, "drift": 0.5}, "of the machine: it is shown, and has no limit"
    assert result["figures"]["pace"] == {"first": 20.0, "last": 30.0, "drift": 0.5}, "as many Cases on slower cores"
    assert result["cases"] == 280


@pytest.mark.parametrize(
    ("changed", "orphans", "expected"),
    [
        ({"leak": 3 << 20}, 0, "memory: 9"),
        ({"last_rate": 8.0}, 0, "rate: 10 in the first third, 8 in the last: -20.0%, the limit is 10%"),
        ({"last_rate": 0.0}, 0, "rate: 10 in the first third, 0 in the last"),
        ({}, 2, "orphans: 2 processes outlived the campaign"),
    ],
)
def test_a_drift_is_wrong(changed: dict[str, Any], orphans: int, expected: str) -> None:
    wrong = part("soak").judged(samples(**changed), orphans)["wrong"]
    assert len(wrong) == 1
    assert wrong[0].startswith(expected)


def test_a_piece_of_work_takes_time_of_a_core_and_waits_are_left_out() -> None:
    core = part("core")
    assert 0 < core.piece_of_work() < 1000
    with core.Core() as taken:
        begin = time.monotonic()
        wait_for(lambda: taken.between(begin, time.monotonic()))
    assert taken.between(0.0, begin) is None


def test_a_soak_that_is_too_short_says_so() -> None:
    with pytest.raises(part("campaigns").NotMeasured, match="give --soak more time"):
        part("soak").judged(samples(10), 0)


def test_a_process_that_is_left_behind_is_counted_and_killed(tmp_path: Path) -> None:
    child = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
    child += " start_new_session=True, stdout=subprocess.DEVNULL).pid)"
    with part("processes").Session([sys.executable, "-c", child], tmp_path) as session:
        assert session.wait(60)
        left = int(session.text("stdout"))
        memory = session.memory()
        assert list(memory.others) == [left]
        assert memory.total == memory.others[left] > 1 << 20
        assert session.kill_all() == 1
        assert session.memory().others == {}


def test_stored_cases_are_ones_that_a_campaign_reads(tmp_path: Path) -> None:
    kernel = registry.get(KERNEL)
    part("growth").store_cases(kernel, "cpu", tmp_path, 5)
    stored = [each.case for each in Corpus(tmp_path).of(KERNEL)]
    assert len(set(stored)) == 5
    assert all(kernel.supports(each.problem, each.config, "cpu") is None for each in stored)


def test_a_logged_run_takes_the_options_of_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    logged_run = part("logged_run")
    settings = logged_run.settings_of({"budget": "2s", "seed": "3", "plain": "1", "workers": "1", "out": str(tmp_path)}, "cpu")
    assert (settings.budget, settings.seed, settings.plain, settings.out) == (2.0, 3, True, str(tmp_path))
    monkeypatch.setitem(PROFILES, "quick", PROFILES["quick"])
    before = PROFILES["quick"].limits["cpu"]
    logged_run.limit(settings, {"length": 7})
    assert PROFILES["quick"].limits["cpu"] == dataclasses.replace(before, length=7)


def test_limits_that_no_drawing_process_would_see_are_refused() -> None:
    with pytest.raises(BadArgument, match="workers=2: limits are those of the process that draws"):
        part("logged_run").limit(Settings(workers=2), {"length": 7})


def test_a_point_has_the_median_and_the_span_of_its_rounds() -> None:
    rows = [{"kernel": "k", "curve": "heads", "point": p, "x": x, "y": y, "cases": 1}
            for p, x, y in (("2", 2.0, 5.0), ("1", 1.0, 9.0), ("2", 2.0, 7.0), ("auto", None, 3.0))]  # fmt: skip
    assert part("curves").points_of(rows, "heads") == [(1.0, 9.0, 9.0, 9.0), (2.0, 6.0, 5.0, 7.0)]


def test_equal_figures_are_equal_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [{"kernel": "k", "curve": "corpus", "point": str(x), "x": x, "y": y, "cases": 1} for x, y in ((0, 1.0), (100, 2.0))]
    other = [{**row, "y": row["y"] ** 3} for row in rows]
    one, again, third = (
        part("curves").draw(each, tmp_path / str(n))[0].read_bytes() for n, each in enumerate((rows, rows, other))
    )
    assert one == again != third


class Wrong:
    """`torch.reference_cpu` with one gradient off by a hundredth."""

    def __init__(self, built: Built) -> None:
        self._built = built

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._built.forward(inputs)

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Any:
        dq, dk, dv = self._built.backward(inputs, o, lse)[:3]
        return dq, dk * 1.01, dv


@pytest.mark.parametrize("causal", [False, True])
def test_the_suites_formula_judges_as_tests_usually_do(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    formula = part("suite_formula")
    notes: list[tuple[int, bool]] = []
    monkeypatch.setattr(formula, "_note", lambda *note: notes.append(note))
    kernel = registry.get(KERNEL)
    shape = formula.Shape("float32", causal, 4, 2, 16, 16, ((5, 9), (12, 3), (1, 1)))
    problem = formula.problem_of(kernel, shape)
    formula.compare(kernel, problem)
    build = type(kernel).build
    monkeypatch.setattr(type(kernel), "build", lambda *arguments: Wrong(build(*arguments)))
    with pytest.raises(AssertionError, match="dK is off by"):
        formula.compare(kernel, problem)
    assert notes == [(31, True), (31, False)]
    assert formula.problem_of(kernel, dataclasses.replace(shape, dtype="float16")) is None


@pytest.mark.parametrize("who", ["parametrised suite", "Hypothesis test"])
@pytest.mark.slow
def test_a_suite_judges_a_right_kernel(who: str, tmp_path: Path) -> None:
    rivals, plan = part("rivals"), part("plan").Plan("cpu", (KERNEL,), seconds=2.0)
    with rivals.suite(plan, KERNEL, "1", who, tmp_path, {}) as run:
        part("campaigns").run_for(run, 120, lambda: len(rivals.judged_in(tmp_path / "judged")) >= 4)
        lines = rivals.judged_in(tmp_path / "judged")
        assert len(lines) >= 4, run.text("stdout")[-3000:]
    # Twice the error of half precision is exceeded by right kernels too, now and then.
    assert sum(passed for _, _, passed in lines) > len(lines) / 2
    assert all(run.started < at < time.monotonic() for at, _, _ in lines)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--workers", "1", "0"], "'0': give positive numbers, or auto"),
        (["--device", "cpu", "--kernel", "nothing"], "kernel='nothing'"),
        (["--device", "cpu", "--kernel", "torch.flash"], "none can run on cpu here"),
        (["--device", "cpu", "--budget", "3"], "budget='3'"),
        pytest.param(["--device", "cuda"], "cuda", marks=pytest.mark.skipif(has_cuda(), reason="there is a GPU")),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], expected: str) -> None:
    done = benchmark(*arguments)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_an_earlier_result_is_printed_as_tables(tmp_path: Path) -> None:
    row = {"kernel": "k", "curve": "heads", "point": "2", "x": 2.0, "y": 5.0, "cases": 9}
    (tmp_path / "r.json").write_text(json.dumps({"growth": [row]}))
    done = benchmark("--read", str(tmp_path / "r.json"), "--markdown")
    assert done.returncode == 0
    assert "| 2 | 2 | 5.0 | 9 |" in done.stdout


@pytest.mark.slow
def test_every_part_measures_a_kernel(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    words = ["--only", "engine", "stages", "rivals", "--device", "cpu", "--kernel", KERNEL, "--workers", "1"]
    done = benchmark(*words, "--budget", "12s", "--rounds", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    measured = json.loads(file.read_text())
    assert measured["engine"][0]["cases"] > 0
    assert measured["engine"][0]["warm"] > measured["engine"][0]["cold"] > 0
    assert {row["side"] for row in measured["stages"]} == {"worker", "child", "check", "both"}
    trial = {row["step"]: row["ms"] for row in measured["stages"] if row["side"] == "child"}
    assert all(trial[stage] > 0 for stage in ("inputs", "kernel", "oracle", "judge", "pipe, idle, or none"))
    assert [row["judged"] > 0 for row in measured["rivals"]] == [True] * 3, done.stderr


def benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run benchmarks/throughput.py."""
    return subprocess.run(
        [sys.executable, str(FOLDER / "throughput.py"), *arguments], capture_output=True, text=True, check=False
    )
