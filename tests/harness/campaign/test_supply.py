"""The supply of a worker: Cases in order, rounds that end, what the compiler refuses, draws from compiled variants."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from msgspec.structs import replace
from support.runs import FunctionExecutor
from support.subjects import Subject

from attnfuzz.harness.campaign import drawer as drawer_module
from attnfuzz.harness.campaign.account import Account
from attnfuzz.harness.campaign.backlog import Backlog
from attnfuzz.harness.campaign.compiles import KeyState, Wanted
from attnfuzz.harness.campaign.context import Batch, CampaignContext, WorkerContext
from attnfuzz.harness.campaign.coordinator import Coordinator, LocalTurns
from attnfuzz.harness.campaign.drawer import Drawer
from attnfuzz.harness.campaign.kernel_run import KernelRun
from attnfuzz.harness.campaign.kernel_state import KernelState
from attnfuzz.harness.campaign.plan import KernelPlan, plan_of
from attnfuzz.harness.campaign.rounds import EXAMPLES, Round, Rounds
from attnfuzz.harness.campaign.settings import PROFILES, Settings
from attnfuzz.harness.campaign.supply import Supply
from attnfuzz.harness.campaign.worker import Worker
from attnfuzz.harness.campaign.worker_link import Turn, TurnEnd
from attnfuzz.harness.isolation.executors import Compiled, Compiler, SerialCompiler, compile_error
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.faults.host import FaultyReference
from attnfuzz.kernels.problem import Layout, Problem
from attnfuzz.strategies.case import Case, Check, Recipe
from attnfuzz.strategies.cases import cases
from attnfuzz.strategies.variants import Variant, all_variants


def case(number: int, length: int = 3) -> Case:
    problem = Problem(seqlens_q=(length,), seqlens_k=(length,), dim_qk=16, dim_v=16, dtype="float32")
    return Case(kernel="test.supply", problem=problem, recipe=Recipe(seed=number))


def numbers(taken: Sequence[Case]) -> list[int]:
    return [each.recipe.seed for each in taken]


def needing(one: Case, *keys: str) -> tuple[dict[str, Case], Case]:
    """A Case with the compile keys of its launches."""
    return dict.fromkeys(keys, one), one


# --- backlog


def test_the_oldest_cases_that_can_run_come_first() -> None:
    over: list[int] = []
    backlog = Backlog(over.append)
    backlog.add(0, [needing(case(number), key) for number, key in enumerate("abab")])
    backlog.add(1, [needing(case(4), "a"), needing(case(5), "c")])
    assert backlog.take(Batch(most=2)) == []
    assert numbers(list(backlog.waiting.values())) == [0, 1, 5]
    backlog.mark(["b"])
    assert (backlog.ready, len(backlog)) == (2, 6)
    assert numbers(backlog.take(Batch())) == [1]
    backlog.mark(["a"])
    assert numbers(backlog.take(Batch(most=2))) == [0, 2]
    assert numbers(backlog.take(Batch(most=2))) == [3, 4]
    assert over == [], "they are given out, and not tried yet: their worker may die"
    for number in range(4):
        backlog.tried(case(number))
    assert over == [0]
    backlog.drop(["c", "unknown"])
    backlog.tried(case(4))
    assert (over, len(backlog)) == ([0, 1], 0)


def test_a_case_waits_for_the_code_of_all_its_launches() -> None:
    over: list[int] = []
    backlog = Backlog(over.append)
    backlog.add(0, [needing(case(0), "a", "b"), needing(case(1), "a", "c"), needing(case(2), "a")])
    assert list(backlog.waiting) == ["a", "b", "c"]
    backlog.mark(["a"])
    assert (backlog.ready, numbers(backlog.take(Batch(most=9)))) == (1, [2])
    backlog.mark(["b"])
    assert numbers(backlog.take(Batch(most=9))) == [0]
    backlog.tried(case(0))
    backlog.tried(case(2))
    backlog.drop(["c"])
    assert (over, len(backlog)) == ([0], 0)


def shaped(number: int, **changes: Any) -> Case:
    return replace(case(number), problem=replace(case(number).problem, **changes))


def test_code_of_a_form_that_no_variant_has_is_asked_for_first() -> None:
    """Then the code that most Cases need: in the order in which Cases were drawn, sinks and strides came by chance."""
    wide = {"layout_q": Layout(pitch=8)}
    backlog = Backlog(lambda _: None, own=["plain", "other"])
    drawn = [
        *(needing(case(number), key) for number, key in enumerate(["other", "rare", "often", "often", "plain"])),
        *(needing(shaped(number, **wide), key) for number, key in enumerate(["strided", "rare strided", "strided"], 5)),
        needing(shaped(8, sinks=True), "sinks"),
        needing(shaped(9, **wide), "plain", "both", "too"),
    ]
    backlog.add(0, drawn)
    assert list(backlog.waiting) == ["other", "plain", "strided", "sinks", "often", "rare", "rare strided", "both", "too"]
    backlog.add(1, [needing(shaped(number, sinks=True), key) for number, key in enumerate(["new", "newer", "newer"], 10)])
    assert list(backlog.waiting)[-4:] == ["both", "too", "newer", "new"], "what was asked for stays in its place"
    backlog.mark(["plain", "strided"])
    assert list(backlog.waiting)[:2] == ["other", "sinks"]


def test_forms_of_the_variants_own_code_are_not_new() -> None:
    wide = {"layout_q": Layout(pitch=8)}
    backlog = Backlog(lambda _: None, own=["plain", "strided"])
    backlog.add(0, [needing(shaped(0, **wide), "strided"), needing(shaped(1, **wide), "a"), *[needing(case(2), "b")] * 2])
    assert list(backlog.waiting) == ["strided", "b", "a"]


def test_a_batch_is_of_cases_that_are_judged_in_one_go() -> None:
    """Of equal dtype and dims, whatever their compile keys: it has room, and always one Case."""
    backlog = Backlog(lambda _: None)
    backlog.add(0, [needing(case(number, length), str(number % 2)) for number, length in enumerate((9, 2, 2, 2, 5))])
    wide = replace(case(9), problem=replace(case(9).problem, dim_qk=32))
    backlog.add(1, [needing(wide, "0"), needing(case(10, 6), "0")])
    backlog.mark(["0", "1"])
    batch = Batch(True, 8, 6.0, lambda each: float(each.problem.total_q))
    assert [numbers(backlog.take(batch)) for _ in range(6)] == [[0], [1, 2, 3], [4], [9], [10], []]


def test_the_kind_of_which_most_wait_comes_first_but_not_for_ever() -> None:
    backlog = Backlog(lambda _: None)
    wide = replace(case(0), problem=replace(case(0).problem, dim_qk=32))
    backlog.add(0, [needing(wide, "0"), *(needing(case(number), "0") for number in range(1, 40))])
    backlog.mark(["0"])
    batch, order = Batch(True, 2, 100.0), []
    while taken := numbers(backlog.take(batch)):
        order.append(taken)
    assert order[:8] == [[number, number + 1] for number in range(1, 17, 2)]
    assert order[8] == [0], "it has waited for eight batches"
    assert sorted(number for taken in order for number in taken) == list(range(40))
    backlog.add(1, [needing(wide, "0"), *(needing(case(number), "0") for number in range(1, 4))])
    assert numbers(backlog.take(Batch(most=3))) == [0, 1, 2], "one after the other: in order"


def test_cases_that_are_put_back_keep_their_place_and_their_round() -> None:
    over: list[int] = []
    backlog = Backlog(over.append)
    backlog.add(7, [needing(case(number), "a") for number in range(4)])
    backlog.mark("a")
    first = backlog.take(Batch(most=3))
    backlog.tried(first[0])
    backlog.put_back()
    assert numbers(backlog.take(Batch(most=2))) == [1, 2]
    assert numbers(backlog.take(Batch(most=2))) == [3]
    for number in (1, 2):
        backlog.tried(case(number))
    assert not over
    backlog.tried(case(3))
    assert over == [7]


def test_a_round_without_a_new_case_is_over_at_once() -> None:
    over: list[int] = []
    backlog = Backlog(over.append)
    backlog.add(7, [])
    assert over == [7]


# --- drawer


@pytest.mark.parametrize("background", [True, False])
def test_a_round_is_the_same_in_a_thread(background: bool) -> None:
    drawer = Drawer(lambda _: st.builds(case, st.integers(0, 10**6)), 3, background=background)
    rounds = []
    for number in (4, 4, 5):
        drawer.request(Round(number, 20), ())
        assert drawer.busy
        drawn = drawer.take(wait=True)
        assert drawn is not None
        assert not drawer.busy
        rounds.append(drawn.ids)
        assert drawn.ids == [each.id for each in drawn.cases]
    assert rounds[0] == rounds[1] != rounds[2]
    assert [len(each) for each in rounds] == [20, 20, 20]
    assert drawer.take(wait=True) is None


def test_what_the_strategy_raises_is_raised_where_it_is_taken() -> None:
    drawer = Drawer(lambda _: st.nothing().map(case), 3, background=True)
    drawer.request(Round(0), ())
    with pytest.raises(Exception, match="nothing"):
        drawer.take(wait=True)
    assert not drawer.busy


def test_waiting_for_a_round_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(drawer_module, "drawn", lambda *_, **__: release.wait(20) and [])
    drawer = Drawer(lambda _: st.nothing(), 3, background=True)
    drawer.request(Round(0), ())
    start = time.monotonic()
    assert drawer.take(wait=False) is None
    assert drawer.take(wait=True, until=start + 0.1) is None
    assert 0.1 <= time.monotonic() - start < 5
    assert drawer.busy
    release.set()
    assert drawer.take(wait=True) is not None


# --- supply

KERNEL = FaultyReference("test.supply", lambda *_: None, lambda: None)


class Campaign:
    """Gives rounds, and code for the keys of `compiled` only; those of `refused` it refuses."""

    def __init__(self, most: int | None = None) -> None:
        self.rounds = Rounds(most)
        self.compiled, self.refused = set[str](), set[str]()
        self.wanted: list[str] = []

    def round(self, kernel: str) -> Round | None:
        return self.rounds.take()

    def drawn(self, kernel: str, number: int, ids: Sequence[str]) -> list[int]:
        return self.rounds.drawn(number, ids)

    def end_round(self, kernel: str, number: int) -> None:
        self.rounds.finish(number)

    def want(self, kernel: str, cases: Mapping[str, Case]) -> dict[str, KeyState]:
        self.wanted += [each for each in cases if each not in self.wanted]
        states: dict[str, KeyState] = dict.fromkeys(cases, "waiting")
        return {
            key: "ready" if key in self.compiled else "failed" if key in self.refused else state for key, state in states.items()
        }

    def ready(self, kernel: str, keys: Collection[str]) -> set[str]:
        return self.compiled & set(keys)


def supply_of(
    campaign: Campaign, *, growing: bool, together: bool = False
) -> tuple[Supply, dict[Any, str], list[tuple[Variant, ...]]]:
    """A supply, the compile key of each mask, and the variants of each strategy that is made."""
    variants, strategies = all_variants(KERNEL, "cpu"), list[tuple[Variant, ...]]()
    plan = KernelPlan(variants, PROFILES["quick"].limits["cpu"], 1, compiled=True)

    def strategy(some: tuple[Variant, ...]) -> st.SearchStrategy[Case]:
        strategies.append(some)
        return cases(KERNEL, device="cpu", limits=plan.limits, variants=some)

    keys = {each.causal: plan.key(KERNEL, each) for each in variants}
    assert len(keys) == 2
    supply = Supply(KERNEL, plan, strategy, campaign, "cpu", background=False, growing=growing)  # type: ignore[arg-type]
    return supply, keys, strategies


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawer_module, "EXAMPLES", 30)


def taken(supply: Supply, times: int) -> list[Case]:
    """What a worker takes and tries."""
    cases = [each for _ in range(times) for each in supply.take(Batch())]
    for each in cases:
        supply.tried(each)
    return cases


def test_under_a_budget_cases_are_drawn_from_compiled_variants_and_later_ones_join() -> None:
    campaign = Campaign()
    supply, keys, strategies = supply_of(campaign, growing=True)
    campaign.compiled = {keys[None]}
    first = taken(supply, 60)
    assert first
    assert {each.problem.causal for each in first} == {None}
    assert supply.waiting == 0
    campaign.compiled |= {keys["top_left"]}
    later = taken(supply, 200)
    assert {each.problem.causal for each in later} == {None, "top_left"}
    assert [{each.causal for each in some} for some in strategies] == [{None}, {None, "top_left"}]


def test_with_a_limit_cases_are_drawn_from_all_variants_and_wait_for_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnfuzz.harness.campaign.supply._ASK_EVERY", 0.0)
    campaign = Campaign(60)
    supply, keys, _ = supply_of(campaign, growing=False)
    campaign.compiled = {keys[None]}
    first = taken(supply, 100)
    assert {each.problem.causal for each in first} == {None}
    assert set(campaign.wanted) == set(keys.values())
    assert supply.waiting > 0
    campaign.compiled |= {keys["top_left"]}
    later = taken(supply, 100)
    assert {each.problem.causal for each in later} == {"top_left"}
    assert len({*first, *later}) == len(first) + len(later) == 60
    assert (supply.waiting, supply.ready, campaign.rounds.over) == (0, 0, True)


def test_cases_whose_code_is_refused_are_dropped_and_their_rounds_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnfuzz.harness.campaign.supply._ASK_EVERY", 0.0)
    campaign = Campaign(60)
    supply, keys, _ = supply_of(campaign, growing=False)
    campaign.compiled, campaign.refused = {keys[None]}, {keys["top_left"]}
    assert {each.problem.causal for each in taken(supply, 100)} == {None}
    assert (supply.waiting, supply.ready, campaign.rounds.over) == (0, 0, True)
    assert not campaign.rounds._untried


@pytest.mark.parametrize(("check", "masks"), [("other_mask", {"top_left"}), ("twice", {None}), ("split_batch", {None})])
def test_the_code_of_related_launches_is_asked_for_too(check: Check, masks: set[object]) -> None:
    """A compile in the middle of a Trial would let its worker wait."""
    campaign = Campaign()
    _, keys, _ = supply_of(campaign, growing=False)
    plan = KernelPlan(all_variants(KERNEL, "cpu"), PROFILES["quick"].limits["cpu"], 1, compiled=True)
    one = replace(case(1), kernel=KERNEL.name, config=KERNEL.configs(case(1).problem)[0], check=check)

    def strategy(_: tuple[Variant, ...]) -> st.SearchStrategy[Case]:
        return st.just(one)

    supply = Supply(KERNEL, plan, strategy, campaign, "cpu", background=False, growing=False)  # type: ignore[arg-type]
    assert taken(supply, 3) == []
    assert set(campaign.wanted) == {keys[mask] for mask in {None} | masks}


def test_what_waits_does_not_grow_without_end() -> None:
    """Nothing is compiled for long: rounds are drawn until 600 Cases wait."""
    campaign = Campaign()
    supply, _, _ = supply_of(campaign, growing=False)
    assert taken(supply, 100) == []
    assert 600 <= supply.waiting < 600 + EXAMPLES
    assert supply.full
    campaign.compiled.update(campaign.wanted)
    supply.ask_again()
    assert taken(supply, 1)
    assert not supply.full


def test_cases_that_are_judged_together_are_drawn_kind_by_kind_after_the_first_rounds() -> None:
    kernel = registry.get("torch.reference_cpu")
    plan = KernelPlan(all_variants(kernel, "cpu"), PROFILES["quick"].limits["cpu"], 1, compiled=False)
    every = {(each.dtype, each.dims) for each in plan.variants}
    assert len(every) > 1

    def kinds(number: int, *, growing: bool = True, together: bool = True) -> set[Any]:
        supply = Supply(
            kernel, plan, lambda _: st.nothing(), Campaign(), "cpu", background=False, growing=growing, together=together
        )  # type: ignore[arg-type]
        return {(each.dtype, each.dims) for each in supply._variants(number)}

    assert kinds(0) == kinds(1) == every
    for shard in range(4):
        later = [kinds(number) for number in range(4 + shard, 4 + 4 * 12 * len(every), 4)]
        assert all(len(each) == 1 for each in later)
        assert set.union(*later) == every
    for begin in range(len(every), 9 * len(every), len(every)):
        assert set.union(*(kinds(number) for number in range(begin, begin + len(every)))) == every
    assert kinds(100, together=False) == kinds(100, growing=False) == every


def test_first_batches_of_many_workers_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has one or two rounds before its second batch: where these are of all kinds, that has few Cases of each."""
    monkeypatch.setattr(drawer_module, "EXAMPLES", EXAMPLES)
    kernel = registry.get("triton.varlen")
    plan = dataclasses.replace(plan_of(kernel, Settings(device="cuda", budget=30.0)), compiled=False)
    assert len({(each.dtype, each.dims) for each in plan.variants}) > 6
    campaign, first = Campaign(), Batch(True, 4, math.inf)
    batch = dataclasses.replace(first, most=96)
    supplies = [
        Supply(
            kernel,
            plan,
            lambda some: cases(kernel, device="cuda", limits=plan.limits, variants=some),
            campaign,  # type: ignore[arg-type]
            "cuda",
            background=False,
            growing=True,
            together=True,
        )
        for _ in range(12)
    ]
    for each in supplies:
        each.take(first)
        assert len(each.take(first)) == 4
    sizes = [len(each.take(batch)) for _ in range(2) for each in supplies]
    assert sum(size > 80 for size in sizes) > 0.8 * len(sizes)


def test_after_a_round_without_a_new_case_all_kinds_are_drawn_from() -> None:
    kernel = registry.get("torch.reference_cpu")
    plan = KernelPlan(all_variants(kernel, "cpu"), PROFILES["quick"].limits["cpu"], 1, compiled=False)
    one = replace(case(1), kernel=kernel.name)
    strategies = list[tuple[Variant, ...]]()

    def strategy(some: tuple[Variant, ...]) -> st.SearchStrategy[Case]:
        strategies.append(some)
        return st.just(one)

    campaign = Campaign()
    campaign.rounds._next = 8
    supply = Supply(kernel, plan, strategy, campaign, "cpu", background=False, growing=True, together=True)  # type: ignore[arg-type]
    taken(supply, 10)
    assert len({(each.dtype, each.dims) for each in strategies[0]}) == 1
    assert strategies[-1] == plan.variants


# --- turns


class ByLength(FaultyReference):
    """A kernel that compiles code for the number of its keys as well, which is of no variant."""

    def compile_key(self, problem: Problem, config: Config) -> str:
        return f"{super().compile_key(problem, config)} {sum(problem.seqlens_k) % 3}"


class CompiledMeanwhile(FunctionExecutor):
    """Its compiler ends a compile whenever it is looked at, while Cases are tried as well, except while it is held."""

    held = False

    def compiler(self) -> Compiler:
        compiler = SerialCompiler(lambda each: Compiled(each, 0.0))
        compiler.poll = lambda _: [] if self.held else SerialCompiler.poll(compiler, 1.0)  # type: ignore[method-assign]
        return compiler


def test_a_compile_that_ends_in_the_middle_of_a_turn_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker asks for the state of compiles now and then only: here when a round is drawn, and once a turn."""
    monkeypatch.setattr("attnfuzz.harness.campaign.supply._ASK_EVERY", 1e9)
    monkeypatch.setattr("attnfuzz.harness.campaign.compiles._LOOK_SECONDS", -1.0)
    kernel = ByLength("test.by_length", lambda *_: None, lambda: None)

    def verdict(_: Case) -> Verdict:
        executor.held = not state.rounds.over
        return Verdict(status="pass")

    settings, executor = Settings(max_examples=40, out=None), CompiledMeanwhile(verdict)
    context, plan = CampaignContext(settings), plan_of(kernel, settings)
    assert plan.compiled
    state = KernelState(kernel, plan, context)
    coordinator = Coordinator(context, [state], executor)

    def poll(seconds: float = 0.0) -> None:
        assert not seconds or coordinator.compiles.pending(), "the worker waits, and nothing is being compiled"
        coordinator.compiles.poll(seconds)

    def end_turn(worker: int, name: str, end: TurnEnd) -> None:
        turns.append(end.waiting)
        state.end_turn(worker, end)

    turns: list[int] = []
    monkeypatch.setattr(coordinator, "poll", poll)
    monkeypatch.setattr(coordinator, "end_turn", end_turn)
    Worker(lambda _: (kernel, plan), WorkerContext(settings, executor), coordinator, LocalTurns(coordinator)).work()
    assert len(executor.cases) == 40
    assert turns[0] > 0
    assert turns[-1] == 0


def test_cases_that_a_turn_had_no_time_for_are_tried_in_the_next() -> None:
    """A worker takes several at once, for one entry of the journal."""
    kernel = FaultyReference("test.turns", lambda *_: None, lambda: None)
    settings, executor = Settings(max_examples=40, out=None), FunctionExecutor(lambda _: Verdict(status="pass"))
    context, plan = CampaignContext(settings), dataclasses.replace(plan_of(kernel, settings), compiled=False)
    coordinator = Coordinator(context, [KernelState(kernel, plan, context)], executor)
    worker = WorkerContext(settings, executor, batch=Batch(most=16))
    run = KernelRun(kernel, plan, worker, coordinator, Account(executor.statistics))
    for _ in range(200):
        run.turn(Turn("test.turns", until=time.monotonic()))
        run._try_next() or run._wait(None)
    assert len(executor.cases) == len(set(executor.cases)) == 40


class ByDims(Subject):
    """A kernel that is only compiled: for each dtype and dims."""

    def compile_key(self, problem: Problem, config: Config) -> str:
        return f"{problem.dtype} {problem.dim_qk} {problem.dim_v}"


def test_the_simplest_variant_stands_for_those_that_the_compiler_refuses_whatever_their_order() -> None:
    kernel = ByDims({"compiles_on": ("cpu",)})
    settings = Settings(max_examples=40, out=None, profile="nightly")
    plan, context = plan_of(kernel, settings), CampaignContext(settings)
    state = KernelState(kernel, plan, context)
    wanted = list(plan.compiles(kernel).items())
    simplest = list(dict.fromkeys(plan.key(kernel, each) for each in plan.variants))
    assert [key for key, _ in wanted] != simplest
    assert wanted[0][0] == simplest[0]
    for place, (key, case) in enumerate(wanted):
        failure = compile_error(case, "too many registers") if place else None
        state.compiled(Wanted(kernel.name, key, case), Compiled(case, 0.0, failure))
    assert [each.case for each in state.findings.closed.values()] == [dict(wanted)[simplest[1]]]
