"""benchmarks/detection.py: a rule fails a plain fault and passes a right kernel, kernels take the Cases, turns are fair."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from msgspec.structs import replace
from support.benchmarks import loaded
from support.emulated.kernel import Emulated
from support.peers import Bent

from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Device, Inputs
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case, Recipe

BASE = Problem(seqlens_q=(9, 33), seqlens_k=(20, 33), heads=4, kv_heads=2, dim_qk=32, dim_v=32, causal="bottom_right")
OTHERS = ("flash", "tilelang", "flex", "boundary", "plain")
KERNELS = ("triton.varlen", "triton.flex")


def part(name: str) -> ModuleType:
    """A module of benchmarks/detection/."""
    loaded("detection")
    return importlib.import_module(f"detection.{name}")


class Kernel(Emulated):
    """The emulated kernel, its gradients put through a function."""

    def __init__(self, name: str, bent: Callable[..., Any]) -> None:
        super().__init__(name)
        self._bent = bent

    def bent(self, inputs: Inputs, gradients: Any) -> Any:
        return self._bent(*gradients[:3])

    def build(self, problem: Problem, config: Config, device: Device) -> Any:
        return Bent(super().build(problem, config, device), self)  # type: ignore[arg-type]


def one_nan(dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Any:
    dv.flatten()[0] = torch.nan
    return dq, dk, dv


def raising(*_: torch.Tensor) -> Any:
    raise RuntimeError("too many heads")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("rule", ["twice", "close", "mean", "tolerance"])
def test_a_rule_passes_a_right_kernel_and_fails_a_fault(rule: str, dtype: Any) -> None:
    right = Kernel("emulated.right", lambda *gradients: gradients)
    problem = replace(BASE, dtype=dtype)
    case = Case(kernel=right.name, problem=problem, recipe=Recipe(seed=1), config=right.configs(problem)[0])

    def broken(bent: Callable[..., Any]) -> str:
        return str(part("rules").broken_outputs(rule, Kernel("emulated.bent", bent), case))

    assert part("rules").broken_outputs(rule, right, case) == ""
    assert broken(lambda dq, dk, dv: (dq / 2, dk, dv)) == "dq"
    assert broken(one_nan) == "dv"
    assert broken(lambda dq, dk, dv: (dq, dk[:-1], dv)).startswith("outputs that cannot be compared")
    assert broken(raising).startswith("exception: RuntimeError: too many heads")


def test_a_rule_knows_the_modifiers() -> None:
    flex, scored = part("shapes"), []
    flex.flex_attention(registry.get("triton.flex"), 0, lambda case: scored.append(case) or len(scored) == 100)
    case = next(each for each in scored if each.problem.score_mod is not None and each.problem.dtype == "float16")
    inputs = materialise(case.problem, case.recipe, "cpu")
    references = part("references")
    true, plain = references.exact(inputs), replace(case.problem, score_mod=None)
    for low in (references.stepwise(inputs), references.eager(inputs)):
        assert (low["o"] - true["o"]).abs().max() < 0.05
    without = materialise(plain, case.recipe, "cpu")
    assert (references.exact(without)["o"] - true["o"]).abs().max() > 0.05


@pytest.mark.parametrize("method", OTHERS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_cases_are_those_of_their_seed_and_the_kernel_takes_them(kernel: str, method: str) -> None:
    draw = part("contest").METHODS[method].draw
    taken = registry.get(kernel)

    def first(seed: int) -> list[Case]:
        cases: list[Case] = []
        draw(taken, seed, lambda case: cases.append(case) or len(cases) == 20)
        return cases

    cases = first(3)
    assert len(cases) == 20
    assert cases == first(3)
    for each in cases:
        assert taken.supports(each.problem, each.config, "cpu") is None
        assert each.recipe.pattern == "normal"
    assert len({each.canonical() for each in cases}) > 10
    if method != "tilelang":
        assert cases != first(4)


@pytest.mark.parametrize("method", ["flash", "tilelang", "flex"])
def test_a_grid_ends(method: str) -> None:
    count = 0

    def consume(case: Case) -> bool:
        nonlocal count
        count += 1
        return False

    part("contest").METHODS[method].draw(registry.get("triton.varlen"), 0, consume)
    assert 50 < count < 3000


@pytest.mark.parametrize("method", OTHERS)
def test_each_method_finds_a_bug_that_any_grid_shows(method: str) -> None:
    pytest.importorskip("triton")
    contest = part("contest")
    row = contest.played(contest.Turn(method, "MSK-05", 300.0, 0))
    assert row.found
    assert (row.method, row.subject) == (method, "MSK-05")
    assert row.cases >= 1


@pytest.mark.parametrize("method", ["attnfuzz", *OTHERS])
def test_a_right_kernel_has_no_bug_to_find(method: str) -> None:
    pytest.importorskip("triton")
    contest = part("contest")
    row = contest.played(contest.Turn(method, "triton.varlen", 2.0, 0))
    assert (row.found, row.case) == ("", "")
    assert row.alarms <= row.cases
    if method in ("attnfuzz", "plain"):
        assert row.alarms == 0


class Clock:
    """Time that passes when a Case is judged: each takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that plays a turn: Cases 0, 1, 2 ..., of which `faulty` and `right` name those that each kernel fails."""
    contest, clock = part("contest"), Clock()
    monkeypatch.setattr(contest, "time", clock)

    def play(faulty: set[int], right: set[int], seconds: float, cases: int = 100) -> Any:
        def draw(kernel: Any, seed: int, consume: Callable[[Case], bool]) -> None:
            for number in range(cases):
                if consume(Case(kernel="triton.varlen", problem=BASE, recipe=Recipe(seed=number))):
                    return

        def failure_of(case: Case, rule: str | None) -> str:
            clock.now += 1.0
            return "dq" if case.recipe.seed in (right if case.kernel == "triton.varlen" else faulty) else ""

        monkeypatch.setattr(contest, "failure_of", failure_of)
        monkeypatch.setitem(contest.METHODS, "flash", contest.Method("", draw, "twice", "", ""))
        return contest.played(contest.Turn("flash", "MSK-05", seconds, 0))

    monkeypatch.setattr(contest, "_ready", lambda kernel: None)
    return play


def test_what_the_kernel_without_the_bug_fails_as_well_is_a_false_alarm(turn: Callable[..., Any]) -> None:
    row = turn(faulty={0, 1, 3, 4}, right={0, 3}, seconds=10)
    assert (row.found, row.cases, row.alarms) == ("dq", 2, 1)
    assert json.loads(row.case)["recipe"] == {"seed": 1}


def test_the_time_of_checks_does_not_count(turn: Callable[..., Any]) -> None:
    row = turn(faulty={0, 1, 2, 3}, right={0, 1, 2}, seconds=4)
    assert (row.found, row.cases, row.alarms, row.seconds) == ("dq", 4, 3, 4)


def test_a_case_that_ends_after_the_time_does_not_count(turn: Callable[..., Any]) -> None:
    row = turn(faulty={3}, right=set(), seconds=3.5)
    assert (row.found, row.cases, row.seconds, row.exhausted) == ("", 3, 3.5, False)


def test_a_grid_that_is_done_is_named(turn: Callable[..., Any]) -> None:
    row = turn(faulty={7}, right=set(), seconds=30, cases=5)
    assert (row.found, row.cases, row.exhausted) == ("", 5, True)


def command(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(part("cli").main, list(arguments))


@pytest.fixture
def rows() -> list[Any]:
    row = part("contest").Result
    return [
        row("attnfuzz", "MSK-05", 4, 1.0, "mismatch dq"), row("flash", "MSK-05", 9, 2.0, "dq"),
        row("attnfuzz", "FLX-03", 7, 3.0, "out-of-bounds"), row("flash", "FLX-03", 11, 6.0, alarms=2),
        row("attnfuzz", "triton.flex", 50, 9.0), row("flash", "triton.flex", 40, 9.0, alarms=3),
    ]  # fmt: skip


def test_tables_count_what_each_found(rows: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def finished(_: Any, turns: list[Any], jobs: int) -> Iterator[Any]:
        assert {(each.method, each.subject) for each in turns} == {(each.method, each.subject) for each in rows} | {
            (method, "triton.varlen") for method in ("attnfuzz", "flash")
        }
        yield from rows

    monkeypatch.setattr(part("cli"), "finished", finished)
    file = tmp_path / "turns.json"
    done = command("MSK-05", "FLX-03", "--method", "attnfuzz", "--method", "flash", "--markdown", "--json", str(file))
    assert done.exit_code == 0, done.output
    lines = ["|".join(cell.strip() for cell in line.split("|")) for line in done.output.splitlines()]
    assert "|attnfuzz|2 of 2|1 of 1|1 of 1|1|5.5|11|2.0|0 of 50|" in lines
    assert "|flash|1 of 2|1 of 1|0 of 1|0|11|20|2.0|3 of 40|" in lines
    assert "|FLX|1|1|0|" in lines
    assert "found by attnfuzz alone (1): FLX-03" in lines
    assert "found by others only (0): -" in lines
    assert "found by none (0): -" in lines
    assert "of attnfuzz and flash, the first alone found 1, the second alone 0" in lines
    again = command("--read", str(file), "--markdown")
    assert (again.exit_code, again.output) == (0, done.output)


def test_ctrl_c_keeps_finished_turns(rows: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def finished(_: Any, turns: list[Any], jobs: int) -> Iterator[Any]:
        yield from rows[:2]
        raise KeyboardInterrupt

    monkeypatch.setattr(part("cli"), "finished", finished)
    file = tmp_path / "turns.json"
    done = command("MSK-05", "--json", str(file))
    assert done.exit_code == 130
    assert "interrupted; turns until then: 2" in done.output
    assert len(json.loads(file.read_text())) == 2


def test_an_error_keeps_finished_turns(rows: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of which one of the ways had no Case ended a run after 23 minutes, with all that it had found."""

    def finished(_: Any, turns: list[Any], jobs: int) -> Iterator[Any]:
        yield from rows[:3]
        raise LookupError("a method has no Case")

    monkeypatch.setattr(part("cli"), "finished", finished)
    file = tmp_path / "turns.json"
    assert isinstance(command("MSK-05", "--json", str(file)).exception, LookupError)
    assert len(json.loads(file.read_text())) == 3


def test_kernels_without_gradients_are_left_out() -> None:
    bank, chosen = part("cli").mutants(), part("cli").chosen
    without = {each.kernel for each in bank.values() if each.device == "cpu"} - {each.kernel for each in chosen(bank, ())}
    assert without == {"triton.paged"}


@pytest.mark.parametrize("method", OTHERS)
def test_a_way_without_cases_ends(method: str) -> None:
    """triton.paged has no gradients, which they all ask for."""
    part("contest").METHODS[method].draw(registry.get("triton.paged"), 0, lambda _: pytest.fail("it takes a Case"))


WRONG = {
    "a kernel without gradients": (["PGD-01"], "ID='PGD-01': triton.paged lacks outputs that the other ways compare"),
    "an unknown id": (["MSK-99"], "ID='MSK-99': no mutant has that id; give one of ADD-01, "),
    "an unknown method": (["--method", "luck"], "'luck' is not one of 'attnfuzz', 'flash'"),
    "no time": (["--seconds", "0"], "'--seconds': 0.0 is not in the range x>0"),
    "no jobs": (["--jobs", "0"], "'--jobs': 0 is not in the range x>=1"),
    "no file": (["--read", "/no/such/file"], "read='/no/such/file': it cannot be read"),
    "no place": (["--json", "/dev/null/file"], "json='/dev/null/file': it cannot be written"),
}


@pytest.mark.parametrize(("arguments", "text"), list(WRONG.values()), ids=list(WRONG))
def test_wrong_use_is_refused(arguments: list[str], text: str) -> None:
    done = command(*arguments)
    assert done.exit_code == 2
    assert text in done.output
