"""Execute the roles of one block under a schedule, and report what no barrier orders.

Roles run in turns; a turn is one synchronising step and the computation behind it. Asynchronous operations finish when the
schedule lets them: by default only when no role can go on without. What each role knows of the others is a vector clock that
only barriers and waits increase, so that two accesses which nothing orders are reported in every schedule in which both happen,
whichever came first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attnfuzz.kernels.tilelang.roles import diagnosis
from attnfuzz.kernels.tilelang.roles.clocks import Access, Clock, History
from attnfuzz.kernels.tilelang.roles.memory import Memory
from attnfuzz.kernels.tilelang.roles.state import Operation, Phases, Runner, Turn
from attnfuzz.kernels.tilelang.roles.steps import BlockProgram, Kind, Step

__all__ = ["Machine"]


class Machine:
    """One execution of a block.

    With a Memory, numbers are computed as well, and a role's own registers are checked, on which no schedule has an influence.
    """

    def __init__(self, program: BlockProgram, memory: Memory | None = None) -> None:
        self.program = program
        self.memory = memory
        count = len(program.roles)
        self.runners = [Runner(role.steps, Clock([0] * count)) for role in program.roles]
        self.phases = {
            (each.slot, each.index): Phases(each, each.arrivals, Clock([0] * count), Clock([0] * count))
            for each in program.barriers
        }
        self.histories: dict[int, History] = {}
        self.operations: list[Operation] = []
        self.running: list[Operation] = []
        self.places: dict[tuple[int, int], Operation] = {}
        self.streams: dict[str, list[Operation]] = {}
        self.named: dict[str, tuple[int, Clock]] = {}
        """Threads that have arrived at each named barrier, and what they knew."""
        self.passed: dict[str, list[tuple[set[int], Clock]]] = {}
        self._turns = [Turn(role) for role in range(count)]
        self._skipped = frozenset[int]() if memory is not None else program.own
        self.taken: list[Turn] = []
        self.last = 0
        for role in range(count):
            self._compute(role)

    def again(self) -> Machine:
        """Return another machine in the same state, without numbers."""
        other = Machine(self.program)
        for turn in self.taken:
            other.take(turn)
        return other

    # choices

    def options(self) -> list[Turn]:
        """Return what may happen next: first the role that had the last turn, last the operations without a role that waits."""
        count = len(self.runners)
        turns = [self._turns[role] for role in (*range(self.last, count), *range(self.last)) if self.can_go(role)]
        first = [each for each in self.running if self._is_first(each)]
        if len(first) > 1 and not turns:
            wanted = self._wanted()
            first.sort(key=lambda each: not wanted(each))
        return turns + [each.turn for each in first]

    def _is_first(self, operation: Operation) -> bool:
        stream = operation.step.stream
        return not stream or self.streams[stream][0] is operation

    def _wanted(self) -> Callable[[Operation], bool]:
        barriers, streams = set(), set()
        for runner in self.runners:
            if runner.place < len(runner.steps):
                step = runner.steps[runner.place]
                if step.kind is Kind.WAIT and step.barrier is not None:
                    barriers.add((step.barrier.slot, step.barrier.index))
                elif step.kind is Kind.DRAIN:
                    streams.add(step.stream)

        def wanted(operation: Operation) -> bool:
            barrier = operation.step.barrier
            return operation.step.stream in streams or (barrier is not None and (barrier.slot, barrier.index) in barriers)

        return wanted

    def can_go(self, role: int) -> bool:
        """Whether a role has a step that need not wait."""
        runner = self.runners[role]
        if runner.place >= len(runner.steps):
            return False
        step = runner.steps[runner.place]
        if step.kind is Kind.WAIT:
            # the parity of the phase that was completed last; before the first one that is 1
            return (self._phases(step).completed + 1) % 2 == step.parity
        if step.kind is Kind.DRAIN:
            return len(self._left(step.stream)) <= step.count
        if step.kind is Kind.SYNC and runner.synced:
            return any(role in waiting for waiting, _ in self.passed.get(step.text, ()))
        return True

    def _left(self, stream: str) -> list[Operation]:
        return self.streams.get(stream, [])

    def _phases(self, step: Step) -> Phases:
        assert step.barrier is not None
        return self.phases[step.barrier.slot, step.barrier.index]

    @property
    def finished(self) -> bool:
        """Whether all roles have ended."""
        return all(each.place >= len(each.steps) for each in self.runners)

    # running

    def run(self, schedule: Sequence[int] = ()) -> int:
        """Run to the end; `schedule` has the choice at each point with several options, 0 behind its end.

        A negative number at its start, -N, holds back the Nth role: it goes on only where nothing else can.

        Returns:
            the number of such points.

        Raises:
            ProtocolFault: what is wrong.
        """
        held, choices, points = -1, tuple(schedule), 0
        if choices and choices[0] < 0:
            # A block without work has no roles.
            held, choices = (-choices[0] - 1) % max(1, len(self.runners)), choices[1:]
        while options := self.options():
            options = [each for each in options if each.place >= 0 or each.role != held] or options
            choice = 0
            if len(options) > 1:
                choice = choices[points] % len(options) if points < len(choices) else 0
                points += 1
            self.take(options[choice])
        self.check_end()
        return points

    def check_end(self) -> None:
        """Report roles that wait without end, and operations for which none has waited.

        Raises:
            ProtocolFault: there are some.
        """
        if not self.finished:
            raise diagnosis.deadlock(self)
        for each in self.phases.values():
            if each.bytes:
                raise diagnosis.bytes_left(self, each)

    def take(self, turn: Turn) -> None:
        """Let one thing happen.

        Raises:
            ProtocolFault: it should not have happened yet.
        """
        self.taken.append(turn)
        if turn.place >= 0:
            self.finish(self.places[turn.role, turn.place])
        else:
            self.last = turn.role
            self._synchronise(turn.role)
            self._compute(turn.role)
        if self.running and self.finished:
            raise diagnosis.left_running(self, self.running[0])

    def _compute(self, role: int) -> None:
        """Do the computation up to the next synchronising step."""
        runner = self.runners[role]
        while runner.place < len(runner.steps) and (step := runner.steps[runner.place]).kind is Kind.COMPUTE:
            self._advance(role)
            number, skipped = runner.clock.steps[role], self._skipped
            accesses = [Access(part, step, role, number, write=False) for part in step.reads if part.buffer.slot not in skipped]
            accesses += [Access(part, step, role, number, write=True) for part in step.writes if part.buffer.slot not in skipped]
            if accesses:
                self._check(accesses, runner.clock)
            if self.memory is not None and step.effect is not None:
                step.effect(self.memory)

    def _advance(self, role: int) -> None:
        runner = self.runners[role]
        runner.place += 1
        runner.clock.steps[role] += 1

    def _check(self, accesses: Sequence[Access], clock: Clock) -> None:
        for access in accesses:
            slot = access.part.buffer.slot
            history = self.histories.setdefault(slot, History())
            if (other := history.conflict(access, clock)) is not None:
                raise diagnosis.conflict(self, access, other)
            if not access.write and not history.is_written(access.box):
                raise diagnosis.unwritten(self, access)
        for access in accesses:
            self.histories[access.part.buffer.slot].add(access)

    def _synchronise(self, role: int) -> None:
        runner = self.runners[role]
        step = runner.steps[runner.place]
        if step.kind is Kind.SYNC:
            self._sync(role, step)
            return
        place = runner.place
        self._advance(role)
        if step.kind is Kind.WAIT:
            self._pass(role, self._phases(step))
        elif step.kind is Kind.ARRIVE:
            self._arrive(role, step, step.count, runner.clock)
        elif step.kind is Kind.EXPECT:
            self._phases(step).bytes += step.count
        elif step.kind in (Kind.COPY, Kind.PRODUCT, Kind.COMMIT):
            self._start(role, place, step)
        elif step.kind is Kind.SIGNAL:
            self._at_named(role, step)
        # what a DRAIN guarantees is known: everything in the stream that no longer runs
        elif step.kind is Kind.DRAIN:
            left = {each.number for each in self._left(step.stream)}
            kept = [each for each in self.operations if each.step.stream == step.stream]
            for each in kept[: len(kept) - step.count] if step.count else kept:
                if each.number not in left:
                    runner.clock.done |= 1 << each.number

    def _pass(self, role: int, phases: Phases) -> None:
        """Pass a wait: the role learns what the completed phases know."""
        observed, before = phases.completed - 1, phases.seen.get(role)
        phases.seen[role] = observed
        (phases.stale.add if observed < 0 or before == observed else phases.stale.discard)(role)
        self.runners[role].clock.join(phases.past)

    def _arrive(self, role: int, step: Step, count: int, clock: Clock) -> None:
        if not self.arrive(self._phases(step), count, clock):
            raise diagnosis.too_many(self, role, step)

    def arrive(self, phases: Phases, count: int, clock: Clock) -> bool:
        """Count arrivals, each of which may complete a phase; False if a phase that lacks bytes alone has more than it counts.

        The number of arrivals that a phase lacks must not fall below 0: PTX ISA, "Contents of the mbarrier object".
        """
        while count:
            taken = min(count, phases.pending)
            phases.pending -= taken
            count -= taken
            phases.current.join(clock)
            if not self.complete(phases) and not taken:
                return False
        return True

    def complete(self, phases: Phases) -> bool:
        """Complete the phase that runs, if nothing is missing."""
        if phases.pending > 0 or phases.bytes:
            return False
        phases.past.join(phases.current)
        phases.completed += 1
        phases.pending += phases.barrier.arrivals
        return True

    # named barriers

    def _sync(self, role: int, step: Step) -> None:
        runner = self.runners[role]
        if runner.synced:
            waiting, clock = next(each for each in self.passed[step.text] if role in each[0])
            waiting.discard(role)
            runner.synced = False
            self._advance(role)
            runner.clock.join(clock)
            return
        runner.synced = True
        self._at_named(role, step)

    def _at_named(self, role: int, step: Step) -> None:
        arrived, clock = self.named.pop(step.text, (0, Clock([0] * len(self.runners))))
        arrived += step.threads
        clock.join(self.runners[role].clock)
        if arrived < step.count:
            self.named[step.text] = (arrived, clock)
            return
        waiting = {
            number
            for number, each in enumerate(self.runners)
            if each.synced and each.place < len(each.steps) and each.steps[each.place].text == step.text
        }
        self.passed.setdefault(step.text, []).append((waiting, clock))

    # asynchronous operations

    def _start(self, role: int, place: int, step: Step) -> None:
        runner = self.runners[role]
        operation = Operation(len(self.operations), role, step, runner.clock.copy(), Turn(role, place))
        self.operations.append(operation)
        self.running.append(operation)
        self.places[role, place] = operation
        if step.stream:
            self.streams.setdefault(step.stream, []).append(operation)
        accesses = [Access(part, step, role, 0, write=False, operation=operation.number) for part in step.reads]
        accesses += [Access(part, step, role, 0, write=True, operation=operation.number) for part in step.writes]
        self._check(accesses, operation.known)

    def finish(self, operation: Operation) -> None:
        """Finish an operation: its values appear, and its barrier hears of it."""
        operation.finished = True
        self.running.remove(operation)
        step = operation.step
        if step.stream:
            self.streams[step.stream].remove(operation)
        if self.memory is not None and step.effect is not None:
            step.effect(self.memory)
        operation.known.done |= 1 << operation.number
        if step.stream:
            for each in self.operations[: operation.number]:
                if each.step.stream == step.stream:
                    operation.known.done |= 1 << each.number
        if step.barrier is None:
            return
        phases = self._phases(step)
        if step.kind is Kind.COPY:
            phases.bytes -= step.count
            phases.current.join(operation.known)
            self.complete(phases)
        else:
            self._arrive(operation.role, step, 1, operation.known)
