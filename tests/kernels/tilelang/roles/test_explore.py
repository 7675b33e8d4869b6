"""Exploration: few executions stand for all interleavings, which a walk through every one of them confirms where they are few."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("tilelang")
pytest.importorskip("torch")

from support.role_kernels import program

from attnfuzz.kernels.support.protocol import ProtocolFault
from attnfuzz.kernels.tilelang.roles.census import count_states
from attnfuzz.kernels.tilelang.roles.explore import explore
from attnfuzz.kernels.tilelang.roles.machine import Machine
from attnfuzz.kernels.tilelang.roles.state import Turn
from attnfuzz.kernels.tilelang.roles.steps import BlockProgram


def everything(block: BlockProgram) -> tuple[int, set[str]]:
    """Walk through each interleaving: their number, and the kinds of faults."""
    count, kinds, stack = 0, set[str](), [list[Turn]()]
    while stack:
        turns = stack.pop()
        try:
            machine = Machine(block)
            for turn in turns:
                machine.take(turn)
            options = machine.options()
            if not options:
                machine.check_end()
        except ProtocolFault as fault:
            kinds.add(fault.kind)
            count += 1
            continue
        stack += [[*turns, each] for each in options]
        count += not options
    return count, kinds


def test_one_execution_stands_for_all_of_a_right_pipeline() -> None:
    done = explore(program(4))
    assert (done.executions, done.complete, done.fault, done.schedule) == (1, True, None, ())
    assert done.census.complete
    assert done.census.stuck == 0
    assert done.census.states > 50
    assert done.census.interleavings > 1000


@pytest.mark.parametrize("tiles", [1, 2])
def test_states_and_interleavings_are_counted_right(tiles: int) -> None:
    block = program(tiles)
    count, kinds = everything(block)
    assert kinds == set()
    assert count_states(block, 10_000).interleavings == count


def test_a_fault_of_few_interleavings_is_found() -> None:
    block = program(1, halves=True)
    Machine(block).run()
    _, kinds = everything(block)
    done = explore(block)
    assert done.fault is not None
    assert kinds == {done.fault.kind} == {"wrong-bytes"}
    with pytest.raises(ProtocolFault) as caught:
        Machine(block).run(done.schedule)
    assert caught.value.kind == "wrong-bytes"


CHOICES = {
    "wait_full": (True, False),
    "wait_free": (True, False),
    "shift": (0, 1),
    "halves": (False, True),
    "more_bytes": (0, 64),
}


@pytest.mark.parametrize("values", list(itertools.product(*CHOICES.values())), ids=str)
def test_exploration_agrees_with_a_walk_through_everything(values: tuple[Any, ...]) -> None:
    block = program(1, **dict(zip(CHOICES, values, strict=True)))
    _, kinds = everything(block)
    done = explore(block, states=1)
    assert (done.fault is not None) == bool(kinds)
    assert done.complete if done.fault is None else done.fault.kind in kinds


def test_a_deadlock_shows_in_the_states() -> None:
    census = count_states(program(3, arrivals=129), 10_000)
    assert census.stuck > 0


def test_limits_are_said() -> None:
    block = program(4)
    assert not count_states(block, 10).complete
    assert not explore(block, executions=0).complete
