"""`attnfuzz selftest barriers`: the executor of warp roles on planted faults of their protocol, and on kernels that have none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from attnfuzz.harness.core.environment import versions
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Kernel, protocol_of
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.faults.barriers import FAULTS, PlantedBarrier, faulty_module
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support.protocol import ProtocolFault
from attnfuzz.kernels.tilelang.roles.executor import Executable, Launched, collected, executable
from attnfuzz.kernels.tilelang.roles.explore import explore
from attnfuzz.kernels.tilelang.roles.machine import Machine
from attnfuzz.kernels.tilelang.roles.memory import Memory
from attnfuzz.kernels.tilelang.roles.steps import BlockProgram, Kind
from attnfuzz.kernels.tilelang.roles.trying import Shown, first_fault, schedules
from attnfuzz.strategies.case import Recipe

__all__ = ["SCHEDULES", "BarrierRow", "BarriersTried", "CleanRoles", "barriers"]

SCHEDULES = 1000
_TILES = 4
"""Tiles that the loop of a block goes through: each stage of two is used twice."""
_WITH_NUMBERS = 50
"""One of so many schedules is run with numbers too."""
_FAULTY = {"dim_qk": 64, "dim_v": 64, "causal": False, "dtype": "float16", "tile_m": 128, "tile_n": 64, "strided": False}
_BACKEND = "tilelang"
Advance = Callable[[str, int], None]
"""Called with what is being tried, and how many schedules more have been run."""


@dataclass(frozen=True, slots=True)
class BarrierRow:
    """One planted fault: what must be reported, what is reported, after how many schedules, and what is wrong with that."""

    fault: str
    title: str
    expected: str
    got: str
    message: str
    tried: int
    """Schedules that were run until it was found."""
    schedule: tuple[int, ...]
    """The shortest one that shows it."""
    wrong: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CleanRoles:
    """A function without a known fault: every report is a false alarm."""

    kernel: str
    function: str
    config: str
    roles: tuple[str, ...]
    schedules: int
    with_numbers: int
    """Schedules of them whose outputs were compared, bit by bit, with those of the first."""
    executions: int
    """Executions that stand for all interleavings of one block."""
    interleavings: str
    """The number of these, such as "1.2e+29"; "" where there are more states than were counted."""
    states: int
    complete: bool
    """Whether every interleaving is equivalent to an execution that was run."""
    alarms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BarriersTried:
    """All rows."""

    rows: tuple[BarrierRow, ...]
    clean: tuple[CleanRoles, ...]
    seconds: float
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Whether every fault is found where it is, and nothing is found in kernels of both architectures."""
        blackwell = {each.kernel.startswith("tilelang.sm100.") for each in self.clean}
        clean = all(not each.alarms and each.complete and each.schedules for each in self.clean)
        return not any(row.wrong for row in self.rows) and clean and blackwell == {True, False}


def barriers(advance: Advance, only: Sequence[str] = (), count: int = SCHEDULES, seed: int = 0) -> BarriersTried:
    """Try each planted fault, and each function of TileLang's kernels that needs an order, as it is.

    Args:
        advance: hears of progress.
        only: slugs of faults; empty: all.
        count: schedules of each function.
        seed: same seed, same schedules.

    Raises:
        BadArgument: an unknown fault, nothing to try, or TileLang cannot run here.
    """
    start = time.monotonic()
    known = tuple(each.slug for each in FAULTS)
    for slug in only:
        if slug not in known:
            raise reject("fault", slug, "no such fault", f"use some of {', '.join(known)}")
    if count < 1:
        raise reject("schedules", count, "must be positive", "give 1 or more")
    kernels = _kernels()
    rows = tuple(_row(each, count, seed, advance) for each in FAULTS if not only or each.slug in only)
    clean = tuple(_clean(each, count, seed, advance) for each in _functions(kernels))
    return BarriersTried(rows, clean, time.monotonic() - start, {"versions": versions()})


def _kernels() -> list[Kernel]:
    """The TileLang kernels of attnfuzz itself that can run as roles here."""
    kernels = [registry.get(name) for name in registry.built_in_names()]
    chosen = [each for each in kernels if each.backend == _BACKEND and protocol_of(each) is not None]
    reasons = {reason for each in chosen if (reason := each.unavailable("cpu"))}
    if reasons or not chosen:
        raise BadArgument(f"backend={_BACKEND!r}: none of its kernels can run on the CPU here: {'; '.join(sorted(reasons))}")
    return chosen


# planted faults


def _row(fault: PlantedBarrier, count: int, seed: int, advance: Advance) -> BarrierRow:
    import torch

    function = executable(faulty_module(fault).forward_wasp(**_FAULTY), {})
    q, k = (torch.zeros((1, rows, 1, 64), dtype=torch.float16) for rows in (128, 64 * _TILES))
    lse = torch.zeros((1, 1, 128), dtype=torch.float32)
    (program,) = function.programs((q, k, k, 1, 0, 1.0, q.clone(), lse))
    shown = first_fault(program, count, seed)
    advance(fault.slug, count)
    expected = _line(fault.kind, fault.role, fault.barrier, fault.stage, fault.iteration)
    return BarrierRow(
        fault=fault.slug,
        title=fault.title,
        expected=expected,
        got="nothing" if shown is None else _described(shown.fault),
        message="" if shown is None else shown.fault.reason,
        tried=count if shown is None else shown.tried,
        schedule=() if shown is None else shown.schedule,
        wrong=_wrong(shown, expected, count),
    )


def _line(kind: str, role: str, barrier: str, stage: int, iteration: int) -> str:
    return f"{kind}: {role}, {barrier}, stage {stage}, iteration {iteration}"


def _described(fault: ProtocolFault) -> str:
    return _line(fault.kind, fault.role, fault.barrier, fault.stage, fault.iteration)


def _wrong(shown: Shown | None, expected: str, count: int) -> tuple[str, ...]:
    if shown is None:
        return (f"not found under {count} schedules",)
    return () if _described(shown.fault) == expected else ("another kind, role, barrier, stage or iteration is named",)


# functions without a fault


@dataclass(frozen=True, slots=True)
class _Function:
    """A function of a kernel in which several things go on at once, and the block of a call that has the most steps."""

    kernel: str
    config: Config
    function: Executable
    program: BlockProgram


def _functions(kernels: Sequence[Kernel]) -> Iterator[_Function]:
    """Yield the functions of kernels with roles or asynchronous operations, for each of their Configs; equal functions once."""
    known: set[str] = set()
    for kernel in kernels:
        can = kernel.capabilities
        heads = 1 if can.groups == (1,) else 2
        shape = Problem(seqlens_q=(1,), seqlens_k=(1,), heads=heads, kv_heads=1, dim_qk=64, dim_v=64, packing=can.packings[0])
        for config in kernel.configs(shape):
            for part in ("", "back_"):
                tokens = {f"seqlens_{of}": (_TILES * config.tile(f"{part}tile_{name}"),) for of, name in (("q", "m"), ("k", "n"))}
                for function, arguments in _launches(kernel, replace(shape, **tokens), config, backward=bool(part)):
                    key = f"{function.translation.source}{function.translation.barriers}"
                    if key in known:
                        continue
                    known.add(key)
                    longest = max(function.programs(arguments), key=_size)
                    if _needs_order(longest):
                        yield _Function(kernel.name, config, function, longest)


def _launches(kernel: Kernel, problem: Problem, config: Config, *, backward: bool) -> list[Launched]:
    """Return the launches of forward or backward, which are not run: no step depends on what a tensor holds."""
    protocol, inputs = protocol_of(kernel), materialise(problem, Recipe(), "cpu")
    assert protocol is not None
    built = protocol(problem, config, ())
    with collected() as launches:
        o, lse = built.forward(inputs)
        count = len(launches)
        if backward:
            built.backward(inputs, o, lse)
    return launches[count:] if backward else launches


def _needs_order(program: BlockProgram) -> bool:
    """Whether something goes on beside what a role does: another role, or an asynchronous copy or product."""
    steps = [step for role in program.roles for step in role.steps]
    return len(program.roles) > 1 or any(step.kind in (Kind.COPY, Kind.PRODUCT) for step in steps)


def _size(program: BlockProgram) -> int:
    return sum(len(role.steps) for role in program.roles)


def _clean(of: _Function, count: int, seed: int, advance: Advance) -> CleanRoles:
    program, alarms, compared = of.program, list[str](), 0
    name = f"{of.kernel} {program.name}"
    expected: list[Any] | None = None
    for number, schedule in enumerate(schedules(program, count, seed)):
        try:
            if number % _WITH_NUMBERS:
                Machine(program).run(schedule)
                continue
            values = _values(of.function, program, schedule)
            expected = values if expected is None else expected
            compared += 1
            if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(values, expected, strict=True)):
                alarms.append(f"other values than under the first schedule: {schedule}")
        except ProtocolFault as fault:
            alarms.append(f"{_described(fault)}: {fault.reason}")
            break
        finally:
            advance(name, 1)
    explored = explore(program)
    if explored.fault is not None:
        alarms.append(f"{_described(explored.fault)}: {explored.fault.reason}")
    if explored.census.stuck:
        alarms.append(f"{explored.census.stuck} states in which roles wait without end")
    return CleanRoles(
        kernel=of.kernel,
        function=program.name,
        config=str(of.config),
        roles=tuple(role.name for role in program.roles),
        schedules=count,
        with_numbers=compared,
        executions=explored.executions,
        interleavings=f"{explored.census.interleavings:.1e}" if explored.census.complete else "",
        states=explored.census.states,
        complete=explored.complete and explored.census.complete,
        alarms=tuple(alarms),
    )


def _values(function: Executable, program: BlockProgram, schedule: tuple[int, ...]) -> list[Any]:
    """Run one block with numbers, and return the tensors that the function writes."""
    copies = {slot: array.copy() for slot, array in program.tensors.items()}
    with np.errstate(all="ignore"):
        Machine(program, Memory(program.buffers, copies)).run(schedule)
    written = function.translation.written
    return [copies[slot] for slot, each in enumerate(function.translation.buffers) if each.parameter in written]
