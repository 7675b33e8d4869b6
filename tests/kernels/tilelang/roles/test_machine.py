"""Faults of the protocol in a small pipeline: each is reported with role, barrier, stage and iteration, under every schedule."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("tilelang")
pytest.importorskip("torch")

from support.role_kernels import COMPUTE, program

from attnfuzz.kernels.support.protocol import ProtocolFault
from attnfuzz.kernels.tilelang.roles import regions
from attnfuzz.kernels.tilelang.roles.machine import Machine
from attnfuzz.kernels.tilelang.roles.regions import Buffer
from attnfuzz.kernels.tilelang.roles.state import Turn
from attnfuzz.kernels.tilelang.roles.steps import BlockProgram, Kind, Mbarrier, Role, Step
from attnfuzz.kernels.tilelang.roles.trying import first_fault, schedules

READER, COPIER = "compute threads 0-127", "DMA threads 128-159"
FAULTS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "no wait for a tile": ({"wait_full": False}, ("early-read", READER, "full[0]", 0, 0)),
    "no wait for a free stage": ({"wait_free": False}, ("early-overwrite", COPIER, "free[0]", 0, 2)),
    "the other phase": ({"shift": 1}, ("wrong-phase", READER, "full[0]", 0, 0)),
    "one arrival short": ({"arrivals": COMPUTE + 1}, ("deadlock", COPIER, "free[0]", 0, 2)),
    "more arrivals than are counted": ({"filled": 31}, ("wrong-phase", COPIER, "full[0]", 0, 0)),
    "bytes that never come": ({"more_bytes": 64}, ("wrong-bytes", READER, "full[0]", 0, 0)),
    "a copy that nobody waits for": ({"unused": True}, ("left-running", COPIER, "full[0]", 0, 4)),
}


def described(fault: ProtocolFault) -> tuple[Any, ...]:
    return (fault.kind, fault.role, fault.barrier, fault.stage, fault.iteration)


def fault_of(block: BlockProgram, schedule: tuple[int, ...]) -> tuple[str, str] | None:
    try:
        Machine(block).run(schedule)
    except ProtocolFault as fault:
        return fault.kind, fault.check
    return None


def test_the_right_pipeline_is_clean() -> None:
    block = program()
    points = {Machine(block).run(schedule) for schedule in schedules(block, 100, 0)}
    assert max(points) > 20


def turns(block: BlockProgram, schedule: tuple[int, ...]) -> list[Turn]:
    machine = Machine(block)
    machine.run(schedule)
    return machine.taken


@pytest.mark.parametrize("held", [0, 1])
def test_a_role_that_is_held_back_goes_on_only_where_nothing_else_can(held: int) -> None:
    block = program()
    machine, by_hand = Machine(block), list[Turn]()
    while options := machine.options():
        # Its copies and products are none of its turns: they may finish.
        by_hand.append(next((each for each in options if each.place >= 0 or each.role != held), options[0]))
        machine.take(by_hand[-1])
    assert turns(block, (-held - 1,)) == turns(block, (-held - 1 - 10 * len(block.roles),)) == by_hand
    assert by_hand != turns(block, ())


@pytest.mark.parametrize("held", [0, 1])
def test_the_number_of_a_role_that_is_held_back_is_no_choice(held: int) -> None:
    block = program()
    assert turns(block, (-held - 1,)) == turns(block, (-held - 1, 0, 0))


def test_a_block_without_roles_has_none_to_hold_back() -> None:
    assert Machine(BlockProgram("empty", (0, 0, 0), (), (), (), {}, frozenset())).run((-3, 1)) == 0


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_where_it_is(name: str) -> None:
    fault, expected = FAULTS[name]
    shown = first_fault(program(**fault), 1, 0)
    assert shown is not None
    assert described(shown.fault) == expected
    assert str(shown.fault).startswith(f"{expected[1]}, barrier {expected[2]}, stage {expected[3]}, iteration {expected[4]}: ")


@pytest.mark.parametrize("name", ["no wait for a tile", "no wait for a free stage", "the other phase"])
def test_what_nothing_orders_is_found_under_every_schedule(name: str) -> None:
    block = program(**FAULTS[name][0])
    for schedule in schedules(block, 30, 1):
        with pytest.raises(ProtocolFault):
            Machine(block).run(schedule)


def test_a_fault_of_some_schedules_is_found_and_the_schedule_shortened() -> None:
    block = program(halves=True)
    Machine(block).run()
    shown = first_fault(block, 200, 0)
    assert shown is not None
    assert described(shown.fault)[:3] == ("wrong-bytes", READER, f"full[{shown.fault.stage}]")
    assert 0 < sum(map(bool, shown.schedule)) <= 3
    with pytest.raises(ProtocolFault):
        Machine(block).run(shown.schedule)
    for number, choice in enumerate(shown.schedule):
        if choice:
            # each choice that is left matters
            other = (*shown.schedule[:number], 0, *shown.schedule[number + 1 :])
            assert fault_of(block, other) != (shown.fault.kind, shown.fault.check)


def test_choices_count_modulo_the_options() -> None:
    block, source = program(), random.Random(3)
    schedule = tuple(source.randrange(3) for _ in range(50))
    one, other = Machine(block), Machine(block)
    one.run(schedule)
    other.run(tuple(choice + 6 for choice in schedule))
    assert one.taken == other.taken


def test_the_check_of_a_fault_has_no_numbers() -> None:
    fault = ProtocolFault("deadlock", COPIER, "free[1]", 1, 3, "it waits")
    assert fault.check == "DMA at free"
    assert str(fault) == "DMA threads 128-159, barrier free[1], stage 1, iteration 3: it waits"
    assert str(ProtocolFault("early-read", READER, "", 0, 0, "x")) == "compute threads 0-127, no barrier, stage 0, iteration 0: x"


def products(*, chained: bool, waits: bool = False) -> BlockProgram:
    """One role that starts two products, of which the second adds to the first one's result, or takes it as its left operand."""
    left, right, first, second = (
        regions.block(Buffer(name, (128, 128), "float16", "shared.tmem", slot), (0, 0), (128, 128))
        for slot, name in enumerate("ABCD")
    )
    done = tuple(Mbarrier("done", index, 1, alone=False, slot=4) for index in range(2))
    target = second if chained else first
    started = [
        Step(Kind.PRODUCT, "A B to C", (), reads=(left, right), writes=(first,), stream="tcgen05 0", barrier=done[0]),
        Step(
            Kind.PRODUCT, "C B to D" if chained else "A B to C", (), reads=(first if chained else left, right, target),
            writes=(target,), stream="tcgen05 0", barrier=done[1],
        ),
    ]  # fmt: skip
    wait = [Step(Kind.WAIT, f"wait for parity 0 of done[{index}]", (), barrier=done[index]) for index in range(2)]
    filled = Step(Kind.COMPUTE, "fill", (), writes=(left, right, second))
    steps = [filled, started[0], *wait[: int(waits)], started[1], *wait]
    buffers = tuple(each.buffer for each in (left, right, first, second))
    return BlockProgram("products", (0, 0, 0), (Role("MMA threads 0-31", (0, 32), steps),), done, buffers, {}, frozenset())


def test_products_are_in_order_only_where_they_share_an_accumulator() -> None:
    Machine(products(chained=False)).run()
    # nothing but an mbarrier says when a result may be taken as an operand
    with pytest.raises(ProtocolFault) as found:
        Machine(products(chained=True)).run()
    assert (found.value.kind, found.value.barrier, found.value.stage) == ("early-read", "done[0]", 0)
    twice = products(chained=True, waits=True)
    twice.roles[0].steps.pop(-2)
    Machine(twice).run()
