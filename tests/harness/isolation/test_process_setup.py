"""The set-up of processes: variables and a function of a kernel, once in each child process, before anything else of a Case."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support import set_up
from support.set_up import CARELESS, ENDS, NOTES, REFUSED, WITH, WITHOUT, WORKSPACE, notes

from attnfuzz.harness.audit.conformance.check import check_adapter, probe_result
from attnfuzz.harness.audit.conformance.row import Row
from attnfuzz.harness.isolation import tasks
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.isolation.kernel_ref import shipped
from attnfuzz.kernels import registry
from attnfuzz.kernels.adapters import Adapted, dense
from attnfuzz.kernels.contract import BuildError, Config
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Needs, Problem
from attnfuzz.kernels.support import process_setup
from attnfuzz.strategies.case import Case, Recipe

PROBLEM = Problem(
    seqlens_q=(5,), seqlens_k=(5,), packing="dense", dim_qk=8, dim_v=8, dtype="float32", needs=Needs(outputs=("o",))
)


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(process_setup, "_process", process_setup._Process(os.getpid()))
    monkeypatch.setattr(set_up, "_workspace", [])
    monkeypatch.setenv(NOTES, str(tmp_path / "notes"))
    monkeypatch.delenv(WORKSPACE, raising=False)
    for each in (WITH, WITHOUT, REFUSED, ENDS, CARELESS):
        registry.register(each)
    yield
    # Variables that a test in this process left in place.
    process_setup.enter(WITHOUT, "cpu")


@pytest.fixture
def executor() -> Iterator[Isolated]:
    with contextlib.closing(Isolated("cpu", backends=["torch"], spares=1)) as executor:
        yield executor


def case(kernel: Adapted, seed: int = 0) -> Case:
    return Case(kernel=kernel.name, problem=PROBLEM, recipe=Recipe(seed=seed), config=Config())


def test_each_child_process_is_set_up_once_and_for_one_kernel(executor: Isolated, tmp_path: Path) -> None:
    for kernel, seed in ((WITHOUT, 0), (WITH, 0), (WITH, 1), (WITH, 2), (WITHOUT, 1), (WITH, 3)):
        verdict = executor.trial(case(kernel, seed))
        assert verdict.failures == ()
    lines = notes(tmp_path / "notes")
    of = {name: [pid for pid, what in lines if what == name] for name in ("with", "without", "set_up cpu 7")}
    assert [len(of["with"]), len(of["without"])] == [4, 2]
    assert len(set(of["with"][:3])) == 1, "Cases that follow each other share a process"
    assert not set(of["with"]) & set(of["without"])
    assert set(of["with"]) <= set(of["set_up cpu 7"])
    assert len(of["set_up cpu 7"]) == len(set(of["set_up cpu 7"]))
    assert not {pid for pid, _ in lines} & {os.getpid()}


def test_a_new_child_is_set_up_too(executor: Isolated, tmp_path: Path) -> None:
    for seed in (0, 1):
        assert executor.trial(case(WITH, seed)).failures == ()
        executor.fresh()
    processes = [pid for pid, what in notes(tmp_path / "notes") if what == "with"]
    assert len(set(processes)) == 2


def test_a_process_is_set_up_before_it_makes_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(process_setup, "enter", lambda *_: order.append("set up"))
    monkeypatch.setattr("attnfuzz.harness.trial.trial.rehearse", lambda _: order.append("rehearse"))
    monkeypatch.setattr(gc, "freeze", lambda: order.append("leave imports out of collections"))
    tasks.warm({"device": "cpu", "kernel": shipped(WITH.name)}, lambda *_: None)
    assert order == ["set up", "rehearse", "leave imports out of collections"]


def test_no_other_code_is_compiled_in_a_process_that_was_set_up() -> None:
    """What set_up changed, options of a compiler say, would be in the other kernel's code, or refuse it."""
    for kernel, replaced in ((WITHOUT, False), (WITH, True)):
        payload = {
            "kernel": shipped(kernel.name), "problem": msgspec.to_builtins(PROBLEM), "config": {},
            "device": "cpu", "later": False,
        }  # fmt: skip
        assert tasks.compile_variant(payload, lambda *_: None)[1] == replaced


def test_a_set_up_that_raises_is_the_failure_of_each_case(executor: Isolated) -> None:
    for seed in (0, 1):
        (failure,) = executor.trial(case(REFUSED, seed)).failures
        assert (failure.kind, failure.check) == ("compile-error", "build")
        assert "its set_up() raised OSError: no workspace on cpu" in failure.message
    assert executor.trial(case(WITHOUT)).failures == ()


def test_a_set_up_that_asks_its_process_to_end_is_the_failure_of_a_case(executor: Isolated) -> None:
    (failure,) = executor.trial(case(ENDS)).failures
    assert (failure.kind, failure.check) == ("compile-error", "build")
    assert "its set_up() raised SystemExit: no workspace on cpu" in failure.message


def test_a_build_outside_the_harness_sets_the_process_up_too() -> None:
    WITH.build(PROBLEM, Config(), "cpu")
    WITH.build(PROBLEM, Config(), "cpu")
    assert set_up._workspace == [7]
    assert os.environ[WORKSPACE] == "7"
    process_setup.enter(WITHOUT, "cpu")
    assert WORKSPACE not in os.environ
    process_setup.enter(WITH, "cpu")
    assert set_up._workspace == [7]
    assert os.environ[WORKSPACE] == "7"
    with pytest.raises(BuildError, match="no workspace on cpu"):
        REFUSED.build(PROBLEM, Config(), "cpu")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"environment": {"A=B": "1"}}, "a variable has a name without '=' and a text as its value"),
        ({"environment": {"A": 1}}, "a variable has a name without '='"),
        ({"environment": [("A", "1")]}, "it is no mapping"),
        ({"set_up": 5}, "set_up=5: it cannot be called; give a function of the device"),
    ],
)
def test_what_no_process_can_have_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        dense(set_up.flash, **set_up.SMALL, **given)  # type: ignore[arg-type]


# --- check-adapter


def test_a_row_of_check_adapter_for_kernels_that_set_processes_up() -> None:
    rows = {kernel.name: check_adapter(kernel.name, "cpu", in_process=True).rows for kernel in (WITH, WITHOUT)}
    (found,) = [each for each in rows[WITH.name] if each.check == "set-up of a process"]
    assert found == Row("set-up of a process", "ok", "variables: ACME_WORKSPACE; set_up ran once")
    assert not any(each.status == "wrong" for each in rows[WITH.name])
    assert not any(each.check == "set-up of a process" for each in rows[WITHOUT.name])


@pytest.mark.parametrize(
    ("kernel", "wrong"),
    [
        (REFUSED, "set_up('cpu') raised OSError: no workspace on cpu"),
        (CARELESS, "set_up changes torch's default dtype"),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_what_is_wrong_with_a_set_up(kernel: Adapted, wrong: str) -> None:
    assert probe_result("process", kernel, shipped(kernel.name), case(kernel), "cpu") == {
        "wrong": [wrong],
        "right": "set_up ran once",
    }
