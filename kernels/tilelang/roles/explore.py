"""Explore all executions of one block's roles that differ in what they order, and count the states that there are.

Two executions that differ only in the order of independent turns end alike, so that one of them is enough: dynamic partial-order
reduction (C. Flanagan, P. Godefroid, 2005) with sleep sets runs one execution and, for each pair of turns at one barrier that
nothing orders, one with the pair the other way round. `count_states` walks through the states without that reduction, and without
numbers and clocks: it says how large the space is that the executions stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from attnfuzz.kernels.support.protocol import ProtocolFault
from attnfuzz.kernels.tilelang.roles.census import Census, count_states
from attnfuzz.kernels.tilelang.roles.clocks import Clock
from attnfuzz.kernels.tilelang.roles.machine import Machine
from attnfuzz.kernels.tilelang.roles.state import Turn
from attnfuzz.kernels.tilelang.roles.steps import BlockProgram, Kind, Step

__all__ = ["Exploration", "explore"]

_MOST_EXECUTIONS = 10_000
_MOST_STATES = 200_000
_AT_BARRIERS = (Kind.WAIT, Kind.ARRIVE, Kind.EXPECT)


@dataclass(frozen=True, slots=True)
class Exploration:
    """What has been explored of a block: executions that were run, the states that there are, and a fault if there is one."""

    executions: int
    complete: bool
    """Whether every execution is equivalent to one that was run."""
    census: Census
    fault: ProtocolFault | None = None
    schedule: tuple[int, ...] = ()
    """That of the execution with the fault."""


@dataclass(slots=True)
class _Node:
    """A point of the current execution: what may happen there, and what has been tried or is to be."""

    options: list[Turn]
    sleeping: set[Turn]
    to_try: set[Turn]
    turn: Turn
    tried: set[Turn] = field(default_factory=set)
    step: Step | None = None
    clock: Clock | None = None
    """What the turn knew, without what it learnt from its own barrier."""
    completed: tuple[int, int] = (0, 0)
    """Completed phases of the turn's barrier before and after it."""


def explore(program: BlockProgram, executions: int = _MOST_EXECUTIONS, states: int = _MOST_STATES) -> Exploration:
    """Run one execution of each class of equivalent ones, at most `executions`; count at most `states` states."""
    nodes: list[_Node] = []
    count = 0
    census = count_states(program, states)
    while count < executions:
        count += 1
        machine = None
        try:
            machine = Machine(program)
            for node in nodes:
                machine.take(node.turn)
            _continue(machine, nodes)
        except ProtocolFault as fault:
            schedule = () if machine is None else _schedule(program, machine.taken)
            return Exploration(count, complete=False, census=census, fault=fault, schedule=schedule)
        if not _next(nodes):
            return Exploration(count, complete=True, census=census)
    return Exploration(count, complete=False, census=census)


def _continue(machine: Machine, nodes: list[_Node]) -> None:
    """Run to the end, and note at which earlier points another turn must be tried."""
    if nodes:
        _note(machine, nodes)
    while options := machine.options():
        sleeping = _still_sleeping(machine, nodes[-1]) if nodes else set()
        awake = [each for each in options if each not in sleeping]
        if not awake:
            return  # every execution from here on is equivalent to one that was run
        nodes.append(_Node(options, sleeping, {awake[0]}, awake[0]))
        _take(machine, nodes)
    machine.check_end()


def _take(machine: Machine, nodes: list[_Node]) -> None:
    node = nodes[-1]
    node.tried.add(node.turn)
    node.step, node.clock = _step(machine, node.turn), _clock(machine, node.turn)
    before = _completed(machine, node.step)
    _races(nodes)
    machine.take(node.turn)
    node.completed = (before, _completed(machine, node.step))


def _note(machine: Machine, nodes: list[_Node]) -> None:
    """Describe the last turn of a prefix, which has been taken again, and differs from the one before."""
    prefix = [each.turn for each in nodes[:-1]]
    again = Machine(machine.program)
    for turn in prefix:
        again.take(turn)
    _take(again, nodes)


def _next(nodes: list[_Node]) -> bool:
    """Go back to the last point at which something is left to try."""
    while nodes:
        node = nodes[-1]
        node.sleeping.add(node.turn)
        left = [each for each in node.options if each in node.to_try and each not in node.tried and each not in node.sleeping]
        if left:
            node.turn = left[0]
            return True
        nodes.pop()
    return False


def _races(nodes: list[_Node]) -> None:
    """Add, for each earlier turn that the last one need not follow, the other order to what is to be tried."""
    last = nodes[-1]
    for node in reversed(nodes[:-1]):
        if not _dependent(node, last) or _before(node, last.clock):
            continue
        if last.turn in node.options:
            node.to_try.add(last.turn)
        else:
            node.to_try.update(node.options)
        return


def _dependent(earlier: _Node, later: _Node) -> bool:
    """Whether the order of two turns at one barrier may matter."""
    a, b = earlier.step, later.step
    if a is None or b is None or a.barrier is None or a.barrier is not b.barrier or earlier.turn.role == later.turn.role == -1:
        return False
    if earlier.turn.place < 0 and later.turn.place < 0 and earlier.turn.role == later.turn.role:
        return False
    kinds = (a.kind, b.kind)
    if kinds == (Kind.WAIT, Kind.WAIT):
        return False
    if a.kind is Kind.WAIT:
        return True
    if b.kind is Kind.WAIT:
        # before the phase was completed, the wait would have had to find another one of the same parity
        return (earlier.completed[0] + 1) % 2 == b.parity
    completes = earlier.completed[0] != earlier.completed[1]
    return completes or Kind.EXPECT in kinds


def _before(node: _Node, clock: Clock | None) -> bool:
    assert clock is not None
    if node.turn.place < 0:
        assert node.clock is not None
        return node.clock.steps[node.turn.role] + 1 <= clock.steps[node.turn.role]
    assert node.clock is not None
    return node.clock.done & ~clock.done == 0


def _step(machine: Machine, turn: Turn) -> Step | None:
    if turn.place >= 0:
        return machine.places[turn.role, turn.place].step
    runner = machine.runners[turn.role]
    step = runner.steps[runner.place]
    return step if step.kind in _AT_BARRIERS else None


def _clock(machine: Machine, turn: Turn) -> Clock:
    if turn.place < 0:
        return machine.runners[turn.role].clock.copy()
    operation = machine.places[turn.role, turn.place]
    clock = operation.known.copy()
    clock.done |= 1 << operation.number
    return clock


def _completed(machine: Machine, step: Step | None) -> int:
    return machine.phases[step.barrier.slot, step.barrier.index].completed if step is not None and step.barrier is not None else 0


def _still_sleeping(machine: Machine, node: _Node) -> set[Turn]:
    """Those that sleep on behind a point's turn: the independent ones."""
    barrier = node.step.barrier if node.step is not None else None
    stay = set()
    for each in node.sleeping:
        if each.place < 0 and each.role == node.turn.role:
            continue
        if each.place >= 0 and (each.role, each.place) not in machine.places:
            continue
        step = _step(machine, each)
        if barrier is None or step is None or step.barrier is not barrier:
            stay.add(each)
    return stay


def _schedule(program: BlockProgram, turns: Sequence[Turn]) -> tuple[int, ...]:
    """Return the schedule under which a machine takes `turns`."""
    machine, choices = Machine(program), []
    for turn in turns[:-1]:
        options = machine.options()
        if len(options) > 1:
            choices.append(options.index(turn))
        machine.take(turn)
    if turns and len(options := machine.options()) > 1:
        choices.append(options.index(turns[-1]))
    while choices and not choices[-1]:
        choices.pop()
    return tuple(choices)
