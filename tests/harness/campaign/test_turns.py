"""Turns that a campaign gives to its workers: which kernel each tries next, and for how long."""

from __future__ import annotations

import time

import pytest
from support.runs import FunctionExecutor

from attnfuzz.harness.campaign.context import CampaignContext
from attnfuzz.harness.campaign.coordinator import Coordinator
from attnfuzz.harness.campaign.kernel_state import KernelState
from attnfuzz.harness.campaign.plan import plan_of
from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.campaign.worker_link import Turn, TurnEnd
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.faults.host import FaultyReference


def coordinated(names: str, workers: int = 1) -> tuple[Coordinator, list[KernelState]]:
    """A campaign of 100 s with a kernel for each letter of `names`, all of whose code is compiled."""
    settings = Settings(out=None)
    context = CampaignContext(settings, end=time.monotonic() + 100.0)
    kernels = [FaultyReference(f"test.{name}", lambda *_: None, lambda: None) for name in names]
    states = [KernelState(each, plan_of(each, settings), context) for each in kernels]
    for state in states:
        for key in {state.plan.key(state.kernel, each) for each in state.plan.variants}:
            state.know(key)
    return Coordinator(context, states, FunctionExecutor(lambda _: Verdict(status="pass")), workers), states


def test_a_worker_whose_cases_all_wait_leaves_the_kernel_until_code_is_compiled() -> None:
    """Its turns would end at once, and the kernel would always be the one with the least time."""
    coordinator, states = coordinated("ab")

    def kernel_of(worker: int) -> str:
        turn = coordinator.turn(worker)
        assert isinstance(turn, Turn)
        return turn.kernel

    assert kernel_of(0) == "test.a"
    coordinator.end_turn(0, "test.a", TurnEnd(seconds=0.0, waiting=600, full=True))
    assert kernel_of(0) == "test.b"
    coordinator.end_turn(0, "test.b", TurnEnd(seconds=9.0))
    assert kernel_of(0) == "test.b", "it has had more time, but something can be tried"
    coordinator.end_turn(0, "test.b", TurnEnd(seconds=0.0))
    assert kernel_of(1) == "test.a", "another worker draws Cases of its own"
    coordinator.end_turn(1, "test.a", TurnEnd(seconds=0.0, waiting=3))
    assert kernel_of(1) == "test.a", "not so many wait yet that no more are drawn"
    coordinator.leave(1)
    states[0].compiles += 1
    assert kernel_of(0) == "test.a"
    coordinator.end_turn(0, "test.a", TurnEnd(seconds=0.0, ready=3, waiting=600))
    assert kernel_of(0) == "test.a", "Cases that can run are tried, whatever waits"


def test_the_first_turns_of_workers_end_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, none would fill the GPU while they load the next kernels' code."""
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    coordinator, _ = coordinated("abcd", 4)

    def seconds_of(worker: int) -> float:
        turn = coordinator.turn(worker)
        assert isinstance(turn, Turn)
        assert turn.until is not None
        coordinator.end_turn(worker, turn.kernel, TurnEnd(seconds=1.0))
        return turn.until - 1000.0

    first = [seconds_of(worker) for worker in range(4)]
    longest = first[-1]
    assert first == pytest.approx([longest * part for part in (0.625, 0.75, 0.875, 1.0)])
    assert [seconds_of(worker) for worker in range(4)] == pytest.approx([longest] * 4)


def kernels_of_turns(coordinator: Coordinator, workers: int) -> list[list[str]]:
    """The kernels of three turns of each worker; one after the other, each ends its turn and begins the next."""
    kernels: list[list[str]] = [[] for _ in range(workers)]
    for _ in range(3):
        for worker, had in enumerate(kernels):
            if had:
                coordinator.end_turn(worker, had[-1], TurnEnd(seconds=9.0))
            turn = coordinator.turn(worker)
            assert isinstance(turn, Turn)
            had.append(turn.kernel)
    return kernels


def test_many_workers_stay_with_their_kernels_and_few_change() -> None:
    """A process that begins with another kernel makes a context on the GPU and loads code."""
    coordinator, _ = coordinated("abc", 14)
    many = kernels_of_turns(coordinator, 14)
    assert all(len(set(each)) == 1 for each in many)
    first = [each[0] for each in many]
    assert sorted(first.count(each) for each in set(first)) == [4, 5, 5]
    coordinator, _ = coordinated("abc", 4)
    few = kernels_of_turns(coordinator, 4)
    assert any(len(set(each)) > 1 for each in few)
    times = [name for each in few for name in each]
    assert {times.count(each) for each in ("test.a", "test.b", "test.c")} == {4}, "each kernel has as many turns"


@pytest.mark.parametrize(("workers", "shares"), [(9, [3, 3, 3]), (13, [4, 4, 5])])
def test_a_kernel_whose_code_is_compiled_later_gets_its_share_of_workers(
    workers: int, shares: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, states = coordinated("abc", workers)
    able, ready = coordinator._can_try, states[:2]
    monkeypatch.setattr(coordinator, "_can_try", lambda state, worker: state in ready and able(state, worker))
    kernels = kernels_of_turns(coordinator, workers)
    assert all(len(set(each)) == 1 for each in kernels), "four at least for each of those that can be tried"
    ready.append(states[2])
    for _ in range(2):
        for worker, had in enumerate(kernels):
            coordinator.end_turn(worker, had[-1], TurnEnd(seconds=9.0))
            turn = coordinator.turn(worker)
            assert isinstance(turn, Turn)
            had.append(turn.kernel)
    last = [each[-1] for each in kernels]
    assert sorted(last.count(each) for each in set(last)) == shares


def test_fewer_workers_than_were_asked_for_change_their_kernels() -> None:
    coordinator, _ = coordinated("ab", 8)
    times = [name for each in kernels_of_turns(coordinator, 3) for name in each]
    assert sorted(times.count(each) for each in ("test.a", "test.b")) == [4, 5]


def test_a_kernel_that_has_ended_sets_its_workers_free() -> None:
    coordinator, states = coordinated("ab", 8)
    kernels = kernels_of_turns(coordinator, 8)
    states[0].broken = True
    for worker, had in enumerate(kernels):
        coordinator.end_turn(worker, had[-1], TurnEnd(seconds=1.0))
    turns = [coordinator.turn(worker) for worker in range(8)]
    assert [isinstance(each, Turn) and each.kernel for each in turns] == ["test.b"] * 8
