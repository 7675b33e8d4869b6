"""`attnfuzz mutants`: its rows, as a table and as JSON; Ctrl-C keeps them; wrong use, and an installation without the bank."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.detection import Attempt, Found
from support.mutants import mutants
from support.mutants_command import direct_case, row, run

from attnfuzz.harness.cli import mutants as command
from attnfuzz.harness.cli import mutants_bank
from attnfuzz.kernels import registry

pytestmark = pytest.mark.usefixtures("of_checkout")


def test_each_mutant_has_a_row(campaigns: list[Attempt]) -> None:
    done = run("MSK-05", "DIM-04", "MSK-05", "--seeds", "1", "--max-examples", "7", "--shrink", "0.01")
    assert done.exit_code == 0, done.output
    assert campaigns == [Attempt("MSK-05", 0, 7, 0.01), Attempt("DIM-04", 0, 7, 0.01)]
    assert "MSK-05   triton.varlen   mismatch dq" in done.output
    assert "2 of 2 campaigns found their bug; Cases to find it: median 3" in done.output


def test_what_is_held_out_is_tried_instead_of_the_bank(campaigns: list[Attempt]) -> None:
    out = [id_ for id_, each in mutants().items() if each.held_out]
    run("--seeds", "1")
    assert {each.mutant for each in campaigns}.isdisjoint(out)
    campaigns.clear()
    run("--held-out", "--seeds", "1")
    assert {each.mutant for each in campaigns} == {each for each in out if mutants()[each].device == "cpu"}
    campaigns.clear()
    run(out[0], "--seeds", "1")
    assert [each.mutant for each in campaigns] == out[:1]


def test_a_survivor_is_a_failure_and_its_nearest_case_is_shown(campaigns: list[Attempt]) -> None:
    done = run("MSK-05", "--seeds", "2", "--max-examples", "7")
    assert done.exit_code == 1
    assert "never" in done.output
    text = " ".join(done.output.split())
    assert f"MSK-05, seed 1: not found: {mutants()['MSK-05'].mechanism}: 7 Cases; nearest to the budget" in text
    assert "(error / budget): o 0.75 in" in text


def test_json_has_every_campaign(campaigns: list[Attempt]) -> None:
    done = run("MSK-05", "--seeds", "2", "--json")
    content = json.loads(done.stdout)
    assert (content["command"], content["interrupted"]) == ("mutants", False)
    assert (content["rates"]["attempts"], content["rates"]["killed"]) == (2, 1)
    assert [each["cases"] for each in content["attempts"]] == [3, None]
    assert content["attempts"][1]["nearest"] == {"o": {"ratio": 0.75, "case": direct_case()}}


def test_mutants_of_operators_have_the_same_rows_without_the_equivalent_ones(
    campaigns: list[Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = pytest.importorskip("support.operators.bank")
    chosen = bank.sample(bank.operator_mutants("triton.varlen"), 4)
    monkeypatch.setattr(bank, "equivalents", lambda kernel: {chosen[1]: "it is never read"})
    arguments = ("--operators", "triton.varlen", "--sample", "4", "--seeds", "1", "--max-examples", "7")
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    assert campaigns == [Attempt(each, 0, 7, None) for each in chosen if each != chosen[1]]
    assert "3 of 3 campaigns found their bug" in done.output
    assert "left out, as they are equivalent or cannot show here: 1" in done.output
    content = json.loads(run(*arguments, "--json").stdout)
    assert content["equivalent"] == {chosen[1]: "it is never read"}
    assert content["changes"][chosen[0]] == bank.operator_mutant(chosen[0]).mechanism


def test_mutants_that_do_not_run_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Found("MSK-05", 0, 3, 0.5, case=direct_case()),
        Found("DIM-04", 0, 1, 0.5, kind="exception", case=direct_case(), runs=False),
    ]
    monkeypatch.setattr("support.verdict.processes.finished", lambda *_, **limits: iter(rows))
    done = run("MSK-05", "DIM-04", "--seeds", "1")
    assert done.exit_code == 0
    assert "does not run" in done.output
    assert "1 of 1 campaigns found their bug; Cases to find it: median 3" in done.output
    assert "not counted, as they do not run: 1" in done.output


def test_operators_need_libcst(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libcst", None)
    for name in ("bank", "changes"):
        monkeypatch.delitem(sys.modules, f"support.operators.{name}", raising=False)
    done = run("--operators", "triton.varlen")
    assert done.exit_code == 2
    assert (
        "operators='triton.varlen': they change a syntax tree of libcst, which is not installed; pip install libcst"
        in done.output
    )


OF_OPERATORS = {
    "an unknown kernel": (["--operators", "triton.nothing"], "kernel='triton.nothing': no bugs are planted in it; it is one of"),
    "an unknown id": (
        ["--operators", "triton.varlen", "triton.varlen.forward.drop.99"],
        "mutants of triton.varlen has that id; did you mean triton.varlen.forward.drop.9",
    ),
    "an empty sample": (["--operators", "triton.varlen", "--sample", "0"], "'--sample': 0 is not in the range x>=1"),
    "a sample of the bank": (["--sample", "3"], "sample=3: the bank is tried as a whole; give --operators KERNEL, or ids"),
}


@pytest.mark.parametrize(("arguments", "text"), list(OF_OPERATORS.values()), ids=list(OF_OPERATORS))
def test_wrong_use_of_operators_is_refused(arguments: list[str], text: str) -> None:
    pytest.importorskip("libcst")
    done = run(*arguments)
    assert done.exit_code == 2
    assert text in done.output


@pytest.mark.parametrize("rows", [0, 1])
def test_ctrl_c_keeps_the_finished_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def finished(_: Any, tasks: list[Attempt], jobs: int, **limits: Any) -> Iterator[Found]:
        yield from map(row, tasks[:rows])
        raise KeyboardInterrupt

    monkeypatch.setattr("support.verdict.processes.finished", finished)
    done = run("MSK-05", "DIM-04", "--seeds", "1")
    assert done.exit_code == 130
    assert ("mismatch dq" in done.output) == bool(rows)
    assert f"interrupted; campaigns until then: {rows}" in done.stderr
    done = run("MSK-05", "DIM-04", "--seeds", "1", "--json")
    assert done.exit_code == 130
    content = json.loads(done.stdout)
    assert (content["interrupted"], len(content["attempts"])) == (True, rows)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that say they can run on a GPU, with 16 cores."""
    for name in ("triton.varlen", "tilelang.varlen"):
        monkeypatch.setattr(type(registry.get(name)), "unavailable", lambda self, device: None)
    monkeypatch.setattr(command.os, "sched_getaffinity", lambda _: set(range(16)))


def test_campaigns_on_a_gpu_have_less_time_and_few_compiles(campaigns: list[Attempt], on_gpu: None) -> None:
    arguments = ("MSK-05", "LSE-21-tilelang", "--device", "cuda", "--seeds", "1", "--seed", "2")
    assert run(*arguments).exit_code == 0
    common = {"device": "cuda", "compiles": 1, "backends": ("tilelang", "triton")}
    assert set(campaigns) == {
        Attempt(each, 2, 500, budget=60.0, deadline=10.0, **common) for each in ("MSK-05", "LSE-21-tilelang")
    }
    campaigns.clear()
    assert run(*arguments, "--jobs", "4", "--each", "90s", "--deadline", "7s").exit_code == 0
    assert {(each.budget, each.deadline, each.compiles) for each in campaigns} == {(90.0, 7.0, 4)}


def test_the_cpu_has_no_limits_but_those_that_are_given(campaigns: list[Attempt]) -> None:
    assert run("MSK-05", "--seeds", "1", "--each", "2m").exit_code == 0
    assert campaigns == [Attempt("MSK-05", 0, 500, budget=120.0)]


def test_kernels_take_turns_and_seeds_follow_each_other(campaigns: list[Attempt]) -> None:
    run("MSK-05", "DIM-04", "MSK-10", "LSE-21-tilelang", "--seeds", "2")
    names = [each.mutant for each in campaigns]
    assert names[:4] == names[4:] == ["MSK-05", "DIM-04", "LSE-21-tilelang", "MSK-10"]
    assert [each.seed for each in campaigns] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_what_a_gpu_cannot_show_is_left_out_there(
    campaigns: list[Attempt], on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = {each: mutants()[each] for each in ("MSK-05", "RAC-27")}
    monkeypatch.setattr("support.mutants.mutants", lambda: bank)
    content = json.loads(run("--device", "cuda", "--seeds", "1", "--json").stdout)
    assert [each.mutant for each in campaigns] == ["MSK-05"]
    assert content["not_here"] == {"RAC-27": mutants()["RAC-27"].not_on_gpu}
    done = run("RAC-27", "--device", "cuda")
    assert done.exit_code == 2
    assert "ID='RAC-27': Its code counts calls in Python, which Triton cannot compile.; give another" in done.output


def test_a_kernel_that_cannot_run_on_this_gpu_is_left_out_unless_it_is_named(
    campaigns: list[Attempt], on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = {each: mutants()[each] for each in ("MSK-05", "LSE-21-tilelang")}
    monkeypatch.setattr("support.mutants.mutants", lambda: bank)
    monkeypatch.setattr(type(registry.get("tilelang.varlen")), "unavailable", lambda self, device: "its assembler is old")
    done = run("--device", "cuda", "--seeds", "1", "--json")
    assert done.exit_code == 0
    assert [each.mutant for each in campaigns] == ["MSK-05"]
    assert json.loads(done.stdout)["not_here"] == {"LSE-21-tilelang": "tilelang.varlen cannot run: its assembler is old"}
    assert campaigns[0].backends == ("triton",)
    done = run("LSE-21-tilelang", "--device", "cuda")
    assert done.exit_code == 2
    assert "device='cuda': tilelang.varlen cannot run: its assembler is old; give ids of other kernels" in done.output


def test_where_no_kernel_can_run_on_a_gpu_it_says_so_without_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = {"MSK-05": mutants()["MSK-05"]}
    monkeypatch.setattr("support.mutants.mutants", lambda: bank)
    monkeypatch.setattr(type(registry.get("triton.varlen")), "unavailable", lambda self, device: "there is no GPU")
    done = run("--device", "cuda")
    assert done.exit_code == 2
    assert "device='cuda': triton.varlen cannot run: there is no GPU" in done.output


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(registry.get("triton.varlen")), "unavailable", lambda self, device: "there is no GPU")
    done = run("MSK-05", "--device", "cuda")
    assert done.exit_code == 2
    assert "device='cuda': triton.varlen cannot run: there is no GPU; give ids of other kernels, or --device cpu" in done.output


@pytest.mark.parametrize("text", ["nan", "inf", "0"])
def test_a_time_to_shrink_is_a_finite_number(text: str, campaigns: list[Attempt]) -> None:
    done = run("MSK-05", "--shrink", text)
    assert (done.exit_code, campaigns) == (2, [])
    assert "Invalid value for '--shrink': " in done.output


@pytest.mark.parametrize("option", ["--each", "--deadline", "--budget"])
@pytest.mark.parametrize("text", ["", "0s", "soon"])
def test_a_time_that_is_none_is_an_error(option: str, text: str, campaigns: list[Attempt]) -> None:
    done = run("MSK-05", option, text)
    assert done.exit_code == 2
    assert f"{option[2:]}={text!r}" in done.output
    assert not campaigns


def test_figures_are_counted_by_kernel_seed_and_of_controls(campaigns: list[Attempt]) -> None:
    content = json.loads(run("MSK-05", "DIM-04", "LSE-21-tilelang", "--seeds", "2", "--json").stdout)
    counts = {name: (each["killed"], each["attempts"], each["most"]) for name, each in content["by_kernel"].items()}
    assert counts == {"triton.varlen": (2, 4, 3), "tilelang.varlen": (1, 2, 3)}
    assert {name: each["killed"] for name, each in content["by_seed"].items()} == {"0": 3, "1": 0}
    assert (content["controls"]["controls"]["killed"], content["controls"]["controls"]["attempts"]) == (1, 2)


WRONG = {
    "no duration": (["--budget", "soon"], "budget='soon': it is not a duration"),
    "an unknown device": (["--device", "tpu"], "'--device': 'tpu' is not one of 'cpu', 'cuda'"),
    "an unknown id": (["MSK-99"], "mutants has that id; did you mean MSK-"),
    "an id in small letters": (["bwd-01"], "mutants has that id; did you mean BWD-01"),
    "no Cases": (["--max-examples", "0"], "'--max-examples': 0 is not in the range x>=1"),
    "no seeds": (["--seeds", "0"], "'--seeds': 0 is not in the range x>=1"),
    "no number": (["--seeds", "many"], "'--seeds': 'many' is not a valid integer range"),
    "no time": (["--shrink", "0"], "'--shrink': 0.0 is not in the range x>0"),
    "what is held out, and ids": (["--held-out", "MSK-05"], "held-out=True: it stands for ids"),
    "no jobs": (["--jobs", "0"], "'--jobs': 0 is not in the range x>=1"),
}


@pytest.mark.parametrize(("arguments", "text"), list(WRONG.values()), ids=list(WRONG))
def test_wrong_use_is_refused(arguments: list[str], text: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert text in done.output


def test_a_mutant_that_shows_on_a_gpu_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import msgspec

    alike = {"MSK-05": msgspec.structs.replace(mutants()["MSK-05"], device="cuda")}
    monkeypatch.setattr("support.mutants.mutants", lambda: alike)
    done = run("MSK-05")
    assert done.exit_code == 2
    assert "ID='MSK-05': it shows on a GPU only; give another, or another --device" in done.output


def test_a_process_that_ends_in_a_campaign_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from support.verdict.processes import LostProcess

    def finished(_: Any, tasks: list[Attempt], jobs: int, **limits: Any) -> Iterator[Found]:
        raise LostProcess("a process ended")
        yield

    monkeypatch.setattr("support.verdict.processes.finished", finished)
    done = run("MSK-05", "--jobs", "2")
    assert done.exit_code == 2
    assert "jobs=2: a process ended; give fewer" in done.output


def test_a_broken_bank_is_wrong_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ValueError("MSK-05.toml: unknown field `colour`")

    monkeypatch.setattr("support.mutants.mutants", broken)
    done = run()
    assert done.exit_code == 2
    assert "MSK-05.toml: unknown field `colour`" in done.output


def test_an_installation_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants_bank, "BANK", tmp_path / "mutants" / "bugs")
    done = run("MSK-05")
    assert done.exit_code == 2
    assert "the bank of mutants is no part of an installation; run `attnfuzz` from a checkout of the repository" in done.output
