"""Say which role, barrier, stage and iteration a fault of the protocol belongs to."""

from __future__ import annotations

from collections.abc import Sequence

from attnfuzz.kernels.support.protocol import ProtocolFault, ProtocolKind
from attnfuzz.kernels.tilelang.roles.clocks import Access
from attnfuzz.kernels.tilelang.roles.state import Execution, Operation, Phases
from attnfuzz.kernels.tilelang.roles.steps import Kind, Mbarrier, Step

__all__ = ["bytes_left", "conflict", "deadlock", "left_running", "too_many", "unwritten"]


def conflict(machine: Execution, access: Access, other: Access) -> ProtocolFault:
    """Two accesses that nothing orders; `other` happened first in this execution."""
    running = other.operation >= 0 and not machine.operations[other.operation].finished
    if not access.write:
        return _early_read(machine, access, other, running=running)
    if running or (other.write and access.write):
        return _early_overwrite(machine, access, other)
    # The order in this execution means nothing: a reader that tells nobody when it has read should have waited itself.
    reader, writer = other, access
    if _signals_after(machine, reader):
        return _early_overwrite(machine, writer, reader)
    return _early_read(machine, reader, writer, running=False)


def unwritten(machine: Execution, access: Access) -> ProtocolFault:
    """A read of memory that nothing has written."""
    steps = _writers(machine, access)
    barrier = _waited(machine, access.role, [barrier for _, barrier in steps])
    reason = f"it reads {access.part.text}, which nothing has written yet ({access.step.text})"
    copied = any(step.kind is Kind.COPY for step, _ in steps)
    return _unfinished(machine, access, barrier, reason, copied=copied)


def _early_read(machine: Execution, reader: Access, writer: Access, *, running: bool) -> ProtocolFault:
    barrier = _waited(machine, reader.role, _signals_after(machine, writer))
    state = "has not finished" if running else "is not ordered before it"
    reason = f"it reads {reader.part.text} ({reader.step.text}), but {_of(machine, writer)} {state}"
    return _unfinished(machine, reader, barrier, reason, copied=writer.step.kind is Kind.COPY)


def _unfinished(machine: Execution, reader: Access, barrier: Mbarrier | None, reason: str, *, copied: bool) -> ProtocolFault:
    """A read of what is not there: of a copy's bytes in spite of a wait for a phase, these were not counted in it."""
    phases = None if barrier is None else machine.phases[_key(barrier)]
    if barrier is not None and phases is not None and copied and reader.role in phases.seen and reader.role not in phases.stale:
        reason = f"{reason}; {barrier.text} completed a phase that does not count its bytes"
        return _fault(machine, "wrong-bytes", reader, barrier, reason)
    return _fault(machine, "early-read", reader, barrier, reason)


def _early_overwrite(machine: Execution, writer: Access, reader: Access) -> ProtocolFault:
    # What a role itself still writes is to be read by another one first.
    own = reader.write and reader.role == writer.role
    barrier = _waited(machine, writer.role, _readers_signals(machine, writer) if own else _signals_after(machine, reader))
    what = "writes" if reader.write else "reads"
    reason = f"it overwrites {writer.part.text} ({writer.step.text}) while {_of(machine, reader)} still {what} it"
    return _fault(machine, "early-overwrite", writer, barrier, reason)


def _fault(machine: Execution, kind: ProtocolKind, access: Access, barrier: Mbarrier | None, reason: str) -> ProtocolFault:
    if barrier is not None and access.role in machine.phases[_key(barrier)].stale:
        phase = machine.phases[_key(barrier)].seen[access.role]
        seen = "before any phase was completed" if phase < 0 else f"for phase {phase} a second time"
        kind, reason = "wrong-phase", f"its wait for {barrier.text} returned {seen}; {reason}"
    stage = access.part.stage or (0 if barrier is None or barrier.alone else barrier.index)
    return ProtocolFault(
        kind, machine.program.roles[access.role].name, barrier.text if barrier else "", stage, access.step.iteration, reason
    )


def _of(machine: Execution, access: Access) -> str:
    return f"the {access.step.text!r} of {machine.program.roles[access.role].name}, iteration {access.step.iteration},"


def _key(barrier: Mbarrier) -> tuple[int, int]:
    return (barrier.slot, barrier.index)


def _signals_after(machine: Execution, access: Access) -> list[Mbarrier]:
    """The barriers that hear of an access: those of the operation and of commits behind it, or the role's next arrivals."""
    steps = machine.program.roles[access.role].steps
    return _signals_behind(steps, next(place for place, step in enumerate(steps) if step is access.step))


def _signals_behind(steps: Sequence[Step], place: int) -> list[Mbarrier]:
    barriers: list[Mbarrier] = []
    if steps[place].kind is not Kind.COMPUTE:
        if (barrier := steps[place].barrier) is not None:
            barriers.append(barrier)
        for step in steps[place + 1 :]:
            if step.kind is Kind.PRODUCT:
                break
            if step.kind is Kind.COMMIT and step.barrier is not None:
                barriers.append(step.barrier)
        return barriers
    for step in steps[place + 1 :]:
        if step.kind is Kind.ARRIVE and step.barrier is not None:
            return [step.barrier]
    return []


def _readers_signals(machine: Execution, access: Access) -> list[Mbarrier]:
    """The barriers that hear when another role has read what an access writes."""
    for number, role in enumerate(machine.program.roles):
        for place, step in enumerate(role.steps if number != access.role else ()):
            if any(part.buffer is access.part.buffer and part.stage == access.part.stage for part in step.reads):
                return _signals_behind(role.steps, place)
    return []


def _writers(machine: Execution, access: Access) -> list[tuple[Step, Mbarrier]]:
    """A step that writes what an access reads, with the barrier that hears of it."""
    for role in machine.program.roles:
        for place, step in enumerate(role.steps):
            if any(part.buffer is access.part.buffer and part.stage == access.part.stage for part in step.writes):
                if step.barrier is not None:
                    return [(step, step.barrier)]
                return [(step, each.barrier) for each in role.steps[place + 1 :] if each.kind is Kind.ARRIVE and each.barrier][:1]
    return []


def _waited(machine: Execution, role: int, barriers: list[Mbarrier]) -> Mbarrier | None:
    """The barrier among `barriers` that a role waits for somewhere; the last one where it waits for none."""
    waits = {
        _key(step.barrier) for step in machine.program.roles[role].steps if step.kind is Kind.WAIT and step.barrier is not None
    }
    return next((each for each in barriers if _key(each) in waits), barriers[-1] if barriers else None)


def left_running(machine: Execution, operation: Operation) -> ProtocolFault:
    """An operation still runs when all roles have ended."""
    step = operation.step
    name = machine.program.roles[operation.role].name
    reason = f"all roles have ended, and none has waited for its {step.text!r}"
    own = 0 if step.barrier is None or step.barrier.alone else step.barrier.index
    stage = step.writes[0].stage if step.writes else own
    return ProtocolFault("left-running", name, step.barrier.text if step.barrier else "", stage, step.iteration, reason)


def bytes_left(machine: Execution, phases: Phases) -> ProtocolFault:
    """A barrier expects bytes that no copy brings, or had more than it expected."""
    barrier = phases.barrier
    role, step = next(
        (role, step)
        for role in machine.program.roles
        for step in role.steps
        if step.kind is Kind.EXPECT and step.barrier is barrier
    )
    stage = 0 if barrier.alone else barrier.index
    reason = f"{barrier.text} still expects {phases.bytes} bytes when all roles have ended"
    return ProtocolFault("wrong-bytes", role.name, barrier.text, stage, step.iteration, reason)


def too_many(machine: Execution, role: int, step: Step) -> ProtocolFault:
    """More arrivals than the phase that runs counts, which still waits for bytes."""
    assert step.barrier is not None
    phases = machine.phases[_key(step.barrier)]
    missing = f"{phases.barrier.arrivals} arrivals, and lacks {phases.bytes} bytes alone"
    return _blocked(
        machine, "wrong-phase", role, step, f"it arrives at {step.barrier.text}, whose phase {phases.completed} has all {missing}"
    )


def deadlock(machine: Execution) -> ProtocolFault:
    """Roles wait, and nothing can happen any more: name the wait that is the cause."""
    blocked = [
        (number, runner.steps[runner.place]) for number, runner in enumerate(machine.runners) if runner.place < len(runner.steps)
    ]
    waits = [(role, step, machine.phases[_key(step.barrier)]) for role, step in blocked if step.barrier is not None]
    everyone = "; ".join(f"{machine.program.roles[role].name} {_waiting(machine, step)}" for role, step in blocked)
    for role, step, phases in waits:
        if phases.pending <= 0 and phases.bytes:
            reason = f"{phases.barrier.text} has all arrivals, and {phases.bytes} of its expected bytes never come"
            return _blocked(machine, "wrong-bytes", role, step, f"{reason}; {everyone}")
    for role, step, phases in waits:
        if phases.seen.get(role, -1) < phases.completed - 1:
            missed = f"has never waited for phase {phases.completed - 1}"
            reason = f"it waits for phase {phases.completed} of {phases.barrier.text}, and {missed}"
            return _blocked(machine, "wrong-phase", role, step, f"{reason}; {everyone}")
    for role, step, phases in waits:
        if 0 < phases.pending < phases.barrier.arrivals:
            return _blocked(machine, "deadlock", role, step, everyone)
    role, step = _cause(machine, waits) or blocked[0]
    return _blocked(machine, "deadlock", role, step, everyone)


def _waiting(machine: Execution, step: Step) -> str:
    if step.barrier is None:
        return f"is at {step.text!r}"
    phases = machine.phases[_key(step.barrier)]
    arrived = phases.barrier.arrivals - max(0, phases.pending)
    return f"waits for phase {phases.completed} of {step.barrier.text}, which has {arrived} of {phases.barrier.arrivals} arrivals"


def _blocked(machine: Execution, kind: ProtocolKind, role: int, step: Step, reason: str) -> ProtocolFault:
    barrier = step.barrier
    stage = 0 if barrier is None or barrier.alone else barrier.index
    return ProtocolFault(kind, machine.program.roles[role].name, barrier.text if barrier else "", stage, step.iteration, reason)


def _cause(machine: Execution, waits: list[tuple[int, Step, Phases]]) -> tuple[int, Step] | None:
    """The wait whose barrier lacks an arrival: with it, the others go on without a fault, and further than otherwise."""
    best, furthest = None, -1
    for role, step, phases in waits:
        again = machine.again()
        again.arrive(again.phases[_key(phases.barrier)], max(1, phases.pending), again.runners[role].clock)
        try:
            while options := again.options():
                again.take(options[0])
        except ProtocolFault:
            continue
        if len(again.taken) > furthest:
            best, furthest = (role, step), len(again.taken)
    return best
