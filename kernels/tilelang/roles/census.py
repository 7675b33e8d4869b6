"""Count the states of one block's roles, and the interleavings of their turns: without numbers and clocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from attnfuzz.kernels.tilelang.roles.steps import BlockProgram, Kind, Step

__all__ = ["Census", "count_states"]


@dataclass(frozen=True, slots=True)
class Census:
    """Reachable states, and the number of paths from the first to a last one; `complete`: all were counted."""

    states: int
    interleavings: int
    complete: bool
    stuck: int
    """States in which roles wait without end."""


class _State(NamedTuple):
    """Places of roles among their synchronising steps, barriers, running operations, and named barriers."""

    places: tuple[int, ...]
    barriers: tuple[tuple[int, int, int], ...]
    """Arrivals that are missing, bytes that are missing, parity of the number of completed phases."""
    running: tuple[tuple[int, int], ...]
    """(role, place) of each operation, the first started first within a role."""
    synced: tuple[int, ...]
    """For each role: 0, or 1 while it waits at a named barrier, or 2 when it may go on."""
    arrived: tuple[tuple[str, int], ...]


def count_states(program: BlockProgram, most: int) -> Census:
    """Walk through the reachable states, at most `most`."""
    walk = _Walk(program)
    start = walk.start()
    order, following = [start], {start: walk.following(start)}
    for state in order:
        for each in following[state]:
            if each not in following:
                if len(order) >= most:
                    return Census(len(order), 0, complete=False, stuck=0)
                following[each] = walk.following(each)
                order.append(each)
    paths: dict[_State, int] = {}
    stack = [start]
    while stack:
        state = stack[-1]
        left = [each for each in following[state] if each not in paths]
        if left:
            stack.extend(left)
            continue
        stack.pop()
        paths[state] = sum(paths[each] for each in following[state]) or 1
    stuck = sum(1 for state in order if not following[state] and not walk.ended(state))
    return Census(len(order), paths[start], complete=True, stuck=stuck)


class _Walk:
    def __init__(self, program: BlockProgram) -> None:
        self.steps = [[each for each in role.steps if each.kind is not Kind.COMPUTE] for role in program.roles]
        self.numbers = {id(each): number for number, each in enumerate(program.barriers)}
        self.arrivals = [each.arrivals for each in program.barriers]

    def start(self) -> _State:
        """The state before the first turn."""
        roles = len(self.steps)
        return _State((0,) * roles, tuple((each, 0, 0) for each in self.arrivals), (), (0,) * roles, ())

    def ended(self, state: _State) -> bool:
        """Whether all roles have ended."""
        return all(place >= len(steps) for place, steps in zip(state.places, self.steps, strict=True))

    def following(self, state: _State) -> list[_State]:
        """The states after one turn."""
        states = [self._go(state, role) for role in range(len(self.steps)) if self._can_go(state, role)]
        streams: set[str] = set()
        for each in state.running:
            stream = self.steps[each[0]][each[1]].stream
            if stream not in streams:
                states.append(self._finish(state, each))
                if stream:
                    streams.add(stream)
        return states

    def _can_go(self, state: _State, role: int) -> bool:
        place = state.places[role]
        if place >= len(self.steps[role]):
            return False
        step = self.steps[role][place]
        if step.kind is Kind.WAIT:
            return (state.barriers[self._number(step)][2] + 1) % 2 == step.parity
        if step.kind is Kind.DRAIN:
            return sum(1 for each in state.running if self.steps[each[0]][each[1]].stream == step.stream) <= step.count
        return state.synced[role] != 1

    def _number(self, step: Step) -> int:
        return self.numbers[id(step.barrier)]

    def _go(self, state: _State, role: int) -> _State:
        place = state.places[role]
        step = self.steps[role][place]
        if step.kind in (Kind.SYNC, Kind.SIGNAL):
            return self._at_named(state, role, step)
        moved = state._replace(places=(*state.places[:role], place + 1, *state.places[role + 1 :]))
        if step.kind is Kind.ARRIVE:
            return self._counted(moved, step, step.count, 0)
        if step.kind is Kind.EXPECT:
            return self._counted(moved, step, 0, step.count)
        if step.kind in (Kind.COPY, Kind.PRODUCT, Kind.COMMIT):
            return moved._replace(running=tuple(sorted((*state.running, (role, place)))))
        return moved

    def _counted(self, state: _State, step: Step, arrivals: int, count: int) -> _State:
        """Count arrivals and expected bytes; complete the phase if nothing is missing."""
        number = self._number(step)
        pending, missing, parity = state.barriers[number]
        pending, missing = pending - arrivals, missing + count
        while pending <= 0 and not missing and step.kind is not Kind.EXPECT:
            pending, parity = pending + self.arrivals[number], 1 - parity
        barriers = (*state.barriers[:number], (pending, missing, parity), *state.barriers[number + 1 :])
        return state._replace(barriers=barriers)

    def _finish(self, state: _State, operation: tuple[int, int]) -> _State:
        step = self.steps[operation[0]][operation[1]]
        left = state._replace(running=tuple(each for each in state.running if each != operation))
        if step.barrier is None:
            return left
        return self._counted(left, step, 0, -step.count) if step.kind is Kind.COPY else self._counted(left, step, 1, 0)

    def _at_named(self, state: _State, role: int, step: Step) -> _State:
        if state.synced[role] == 2:
            return state._replace(
                places=(*state.places[:role], state.places[role] + 1, *state.places[role + 1 :]),
                synced=(*state.synced[:role], 0, *state.synced[role + 1 :]),
            )
        arrived = dict(state.arrived)
        total = arrived.pop(step.text, 0) + step.threads
        synced, places = list(state.synced), list(state.places)
        if step.kind is Kind.SYNC:
            synced[role] = 1
        else:
            places[role] += 1
        if total < step.count:
            arrived[step.text] = total
        else:
            for other, waits in enumerate(synced):
                if waits == 1 and self.steps[other][places[other]].text == step.text:
                    synced[other] = 2
        return state._replace(places=tuple(places), synced=tuple(synced), arrived=tuple(sorted(arrived.items())))
