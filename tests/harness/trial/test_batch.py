"""Batches of Cases: the Verdicts of the same Cases run alone, whatever one of them does, with few device operations."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.calls import PROBLEM, Subject
from support.emulated import kernel as emulated
from support.triton_mode import interpreted
from torch.utils._python_dispatch import TorchDispatchMode

from attnfuzz.harness.core import environment
from attnfuzz.harness.judge import judge as judging
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial import batch, bench, reading
from attnfuzz.harness.trial.batch import _BatchBench, run_batch
from attnfuzz.harness.trial.errors import BatchLost
from attnfuzz.harness.trial.inputs import materialise, numbers_of
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Inputs
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Layout, Needs, Problem
from attnfuzz.strategies.case import CALLS, PATTERNS, RELATIONS, Case, Check, Recipe
from attnfuzz.strategies.cases import Limits
from attnfuzz.strategies.draw import draw_values
from attnfuzz.strategies.trials import trial_cases


def plain(verdicts: list[Verdict]) -> list[str]:
    """Verdicts without what two runs differ in, as text, since NaN equals nothing."""
    return [repr(replace(each, seconds={})) for each in verdicts]


def alone(cases: list[Case]) -> list[str]:
    return plain([run_trial(case, "cpu") for case in cases])


def in_batches(cases: list[Case], size: int) -> list[str]:
    return plain([verdict for at in range(0, len(cases), size) for verdict in run_batch(cases[at : at + size], "cpu")])


def drawn(name: str, count: int, limits: Limits | None = None) -> list[Case]:
    cases: list[Case] = []
    draw_values(trial_cases(registry.get(name), device="cpu", limits=limits), cases.append, seed=7, examples=count)
    return cases


# --- equal to Cases run alone

SMALL = Limits(length=24, batch=3, heads=4)


@pytest.mark.parametrize(("name", "count"), [("torch.reference_cpu", 60), ("emulated", 24)])
def test_verdicts_are_those_of_the_cases_run_alone(name: str, count: int) -> None:
    with emulated.registered():
        every, given = drawn(name, 4 * count, SMALL), {2: "oracle", 5: "twice"}
        relations = [case for case in every if case.check in RELATIONS]
        others = [case for case in every if case.check not in RELATIONS]
        cases = [replace(case, check=given.get(at % 8, case.check)) for at, case in enumerate(others[: count - 3])]
        cases += relations[:3]
        expected = alone(cases)
        assert in_batches(cases[:12], 1) == expected[:12]
        for size in (3, 16, 32):
            assert in_batches(cases, size) == expected, size
    for checks in ({"oracle"}, set(CALLS), set(RELATIONS)):
        assert checks & {case.check for case in cases}


@interpreted
@pytest.mark.parametrize("name", ["triton.varlen", "fault.memory.unwritten", "fault.memory.store"])
def test_an_interpreted_kernel_has_the_same_verdicts(name: str) -> None:
    kernel = registry.get(name)
    environment.prepare("cpu")
    if reason := kernel.unavailable("cpu"):
        pytest.skip(reason)
    problem = Problem(seqlens_q=(3, 5), seqlens_k=(4, 6), dim_qk=64, dim_v=64, slack_q=1, causal="bottom_right")
    config = min(kernel.configs(problem), key=lambda each: each.tile("tile_m") * each.tile("tile_n"))
    checks: tuple[Check, ...] = ("oracle", "twice", "oracle", "future_keys")
    cases = [
        Case(kernel=kernel.name, problem=problem, config=config, recipe=Recipe(seed=number), check=check)
        for number, check in enumerate(checks)
    ]
    verdicts = run_batch(cases, "cpu")
    assert plain(verdicts) == alone(cases)
    assert all((each.status == "fail") == name.startswith("fault") for each in verdicts[:3])


@interpreted
def test_cases_with_sinks_are_judged_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = registry.get("triton.varlen")
    environment.prepare("cpu")
    if reason := kernel.unavailable("cpu"):
        pytest.skip(reason)
    problem = Problem(seqlens_q=(3, 5, 2), seqlens_k=(4, 6, 0), heads=2, kv_heads=1, dim_qk=64, dim_v=64, slack_q=1)
    config = min(kernel.configs(problem), key=lambda each: each.tile("tile_m") * each.tile("tile_n"))
    checks: tuple[Check, ...] = ("oracle", "oracle", "twice", "oracle")
    cases = [
        Case(
            kernel=kernel.name, problem=replace(problem, sinks=number > 0), config=config, check=check,
            recipe=Recipe(seed=number, sinks="large" if number == 3 else "moderate"),
        )
        for number, check in enumerate(checks)
    ]  # fmt: skip
    expected = alone(cases)
    monkeypatch.setattr(_BatchBench, "judged", None)
    verdicts = run_batch(cases, "cpu")
    assert plain(verdicts) == expected
    assert [set(each.captured) for each in verdicts] == [set(), {"sinks"}, {"sinks"}, {"sinks"}]
    assert all(each.status == "pass" for each in verdicts)


# --- inputs

PACKED = Layout(packed=True, offset=3, pitch=5)
RAGGED = Problem(seqlens_q=(12, 0, 7, 5), seqlens_k=(12, 6, 0, 9), heads=4, kv_heads=2, dim_qk=8, dim_v=5, needs=Needs(dlse=True))
SHAPES = (
    RAGGED,
    replace(RAGGED, slack_q=1, slack_k=2, layout_k=PACKED, layout_v=PACKED),
    replace(RAGGED, layout_k=Layout(expanded_heads=True), layout_do=Layout(expanded=True, offset=2)),
    replace(RAGGED, seqlens_q=(1, 1), seqlens_k=(1, 1), packing="dense", heads=1, kv_heads=1),
)
TENSORS = ("q", "k", "v", "d_o", "d_lse", "cu_seqlens_q", "cu_seqlens_k")


def memory_of(x: torch.Tensor) -> tuple[object, ...]:
    """Form, place and the bits of the whole allocation of a tensor."""
    whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage(), 0, (x.untyped_storage().nbytes(),), (1,))
    return x.dtype, x.shape, x.stride(), x.storage_offset(), whole.numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_inputs_of_a_batch_are_those_made_alone_in_memory_of_their_own(dtype: str) -> None:
    sources = [
        (replace(problem, dtype=dtype), Recipe(pattern=pattern, seed=number, v_scale=2.0**number))
        for pattern in PATTERNS
        for number, problem in enumerate(SHAPES)
    ]
    numbers = numbers_of(sources, "cpu")
    for problem, recipe in sources:
        ahead, now = materialise(problem, recipe, "cpu", numbers), materialise(problem, recipe, "cpu")
        for name in TENSORS:
            assert memory_of(getattr(ahead, name)) == memory_of(getattr(now, name)), (recipe.pattern, name)


def test_numbers_are_computed_ahead_once_and_the_rest_when_asked() -> None:
    numbers = numbers_of([(RAGGED, Recipe(seed=3))], "cpu")
    first = numbers.noise(3, "q", (24, 4, 8))
    assert numbers.noise(3, "q", (24, 4, 8)).data_ptr() == first.data_ptr()
    assert torch.equal(numbers.noise(3, "q", (5,)), first.flatten()[:5])
    longer = numbers.noise(3, "q", (1000,))
    assert torch.equal(longer[: first.numel()], first.flatten())


# --- faults in the middle of a batch

FAULTY, SIZE = 4, 9


class Faulty(Subject):
    """A subject that acts on its inputs and its output before it returns, with three keys or more."""

    def __init__(self, act: Callable[[Faulty, Inputs, torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__(name="test.batch")
        self.act, self.number = act, 0

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        o, lse = super().forward(inputs)
        self.number += 1
        changed = self.act(self, inputs, o) if max(inputs.problem.seqlens_k) >= 3 else None
        return o if changed is None else changed, lse

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> tuple[Any, Any, Any]:
        return super().backward(inputs, self.made["o"], lse)


@pytest.fixture
def known() -> Iterator[Callable[[Subject], Subject]]:
    names: list[str] = []

    def register(subject: Subject) -> Subject:
        registry.register(subject)
        names.append(subject.name)
        return subject

    yield register
    for name in names:
        registry.unregister(name)


def with_one_faulty(name: str, config: Config = Config(), check: Check = "oracle") -> list[Case]:  # noqa: B008 - frozen
    """Cases of which the middle one alone triggers a fault."""
    short = Problem(seqlens_q=(4,), seqlens_k=(2,), dim_qk=16, dim_v=16, dtype="float32")
    return [
        Case(
            kernel=name,
            problem=replace(short, seqlens_k=(3,)) if number == FAULTY else short,
            recipe=Recipe(seed=number),
            config=config,
            check=check,
        )
        for number in range(SIZE)
    ]


@pytest.mark.parametrize("slug", ["raises", "bounds", "huge", "nan", "numbers", "shape", "dtype", "sysexit"])
def test_a_fault_is_that_of_its_own_case(slug: str) -> None:
    kernel = registry.get(f"fault.{slug}")
    cases = with_one_faulty(kernel.name, kernel.configs(PROBLEM)[0])
    if slug == "shape":
        cases = [
            replace(case, problem=replace(case.problem, seqlens_q=(4 if at == FAULTY else 2,))) for at, case in enumerate(cases)
        ]
    expected = [run_trial(case, "cpu") for case in cases]
    verdicts = run_batch(cases, "cpu")
    assert [each.status for each in verdicts] == ["fail" if at == FAULTY else "pass" for at in range(SIZE)]
    assert plain(verdicts) == plain(expected)


def writes_to_q(_: Faulty, inputs: Inputs, o: torch.Tensor) -> None:
    inputs.q[0, 0, 0] += 1


def writes_past_its_keys(_: Faulty, inputs: Inputs, o: torch.Tensor) -> None:
    ctypes.memset(inputs.k.data_ptr() + inputs.k.numel() * 4, 1, 8)


def takes_memory_away(_: Faulty, inputs: Inputs, o: torch.Tensor) -> None:
    inputs.cu_seqlens_q.untyped_storage().resize_(0)


def leaves_rows_unwritten(_: Faulty, inputs: Inputs, o: torch.Tensor) -> torch.Tensor:
    new = torch.empty_like(o)
    new[1:] = o[1:]
    return new


ACTS = {
    "wrote to its input q": writes_to_q,
    "words were written past the end of its input k": writes_past_its_keys,
    "the memory was taken away from its input cu_seqlens_q": takes_memory_away,
    "elements were never written": leaves_rows_unwritten,
}


@pytest.mark.parametrize("message", ACTS)
def test_memory_misused_is_reported_as_alone(message: str, known: Callable[[Subject], Subject]) -> None:
    cases = with_one_faulty(known(Faulty(ACTS[message])).name)
    verdicts = run_batch(cases, "cpu")
    failing = verdicts[FAULTY].failure
    assert failing is not None
    assert message in failing.message
    assert plain(verdicts) == alone(cases)


def test_patterns_of_known_failures_are_not_looked_for(known: Callable[[Subject], Subject], monkeypatch: Any) -> None:
    def is_wrong(_: Faulty, inputs: Inputs, o: torch.Tensor) -> torch.Tensor:
        return o + 1

    looked: list[str] = []
    whole = judging.diagnose
    monkeypatch.setattr(judging, "diagnose", lambda *args: looked.append(args[2]) or whole(*args))
    cases = with_one_faulty(known(Faulty(is_wrong)).name)
    cases += [replace(cases[FAULTY], recipe=Recipe(seed=SIZE))]
    every = run_batch(cases, "cpu")
    failing = [each.failures[0] for each in every if each.failures]
    assert [each.pattern is not None for each in failing] == [True, True]
    assert len(looked) == sum(each.pattern is not None for verdict in every for each in verdict.failures)

    looked.clear()
    once = run_batch(cases, "cpu", known=[])
    assert len(looked) == len({each.identity for verdict in every for each in verdict.failures})
    assert [each.failures[0].pattern is not None for each in once if each.failures] == [True, False]

    looked.clear()
    identities = [each.identity for each in every[FAULTY].failures]
    never = run_batch(cases, "cpu", known=identities)
    assert looked == []
    assert [[each.identity for each in verdict.failures] for verdict in never] == [
        [each.identity for each in verdict.failures] for verdict in every
    ]
    assert [each.figures for each in never] == [each.figures for each in every]


def test_a_failure_that_becomes_another_kind_has_its_pattern_beside_the_first(known: Callable[[Subject], Subject]) -> None:
    """NaN that is computed, and memory that was never written, are two bugs, which look alike at first."""

    def act(_: Faulty, inputs: Inputs, o: torch.Tensor) -> torch.Tensor:
        return leaves_rows_unwritten(_, inputs, o) if max(inputs.problem.seqlens_k) == 3 else o * torch.nan

    cases = with_one_faulty(known(Faulty(act)).name)
    problem = cases[FAULTY].problem
    for order in ((3, 4), (4, 3)):
        both = [replace(cases[FAULTY], problem=replace(problem, seqlens_k=(n,))) for n in order]
        failures = [each.failures[0] for each in run_batch([*cases[:2], *both], "cpu", known=[]) if each.failures]
        assert {each.kind for each in failures} == {"nonfinite", "unwritten"}
        assert all(each.pattern is not None for each in failures), order


def test_a_write_that_shows_only_after_other_launches_is_kept(known: Callable[[Subject], Subject]) -> None:
    def once(subject: Faulty, inputs: Inputs, o: torch.Tensor) -> None:
        if subject.number == FAULTY + 1:
            writes_past_its_keys(subject, inputs, o)

    cases = with_one_faulty(known(Faulty(once)).name)
    verdicts = run_batch(cases, "cpu")
    assert [each.status for each in verdicts] == ["fail" if at == FAULTY else "pass" for at in range(SIZE)]
    failure = verdicts[FAULTY].failure
    assert failure is not None
    assert (failure.kind, failure.check) == ("guard", "bounds")
    assert "not when run alone" in failure.message


def test_outputs_in_the_same_memory_every_time_are_judged_before_the_next_call(known: Callable[[Subject], Subject]) -> None:
    def into_own_memory(subject: Faulty, inputs: Inputs, o: torch.Tensor) -> torch.Tensor:
        own = subject.kept.setdefault("o", torch.zeros(1 << 12))
        return own[: o.numel()].view(o.shape).copy_(o)

    cases = [replace(case, problem=PROBLEM) for case in with_one_faulty(known(Faulty(into_own_memory)).name)]
    assert all(each.status == "pass" for each in run_batch(cases, "cpu"))
    reused = run_batch([replace(case, check="twice") for case in cases], "cpu")
    assert all(each.failure is not None and each.failure.check == "outputs reused" for each in reused)


# --- calls before the Case's own


def test_a_fault_that_depends_on_the_call_before_is_found(known: Callable[[Subject], Subject]) -> None:
    def spoil(subject: Subject, problem: Problem, out: dict[str, torch.Tensor]) -> None:
        if len(subject.calls) > 1 and subject.calls[-2].scale != problem.scale:
            out["dk"].mul_(1.5)

    subject = known(Subject(spoil=spoil, name="test.batch"))
    checks: tuple[Check, ...] = ("oracle", "twice", "other_scale", "oracle", "twice", "other_scale")
    cases = [Case(kernel=subject.name, problem=PROBLEM, recipe=Recipe(seed=at), check=each) for at, each in enumerate(checks)]
    subject.calls.clear()
    verdicts = run_batch(cases, "cpu")
    assert [each.status for each in verdicts] == ["pass", "pass", "fail", "pass", "pass", "fail"]
    assert plain(verdicts) == alone(cases)


def test_the_calls_before_a_case_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a kernel takes other Problems is asked of each."""
    asked = []
    plain_one = batch.earlier_problems

    def noted(kernel: Any, case: Case, device: Any) -> tuple[Problem, ...]:
        asked.append(case.check)
        return plain_one(kernel, case, device)

    for module in (batch, bench):
        monkeypatch.setattr(module, "earlier_problems", noted)
    checks: tuple[Check, ...] = ("oracle", "twice", "other_scale")
    cases = [Case(kernel="torch.reference_cpu", problem=PROBLEM, check=each) for each in checks]
    verdicts = run_batch(cases, "cpu")
    assert asked == ["twice", "other_scale"]
    assert plain(verdicts) == alone(cases)


def test_a_later_call_that_writes_past_an_earlier_calls_memory_is_found(known: Callable[[Subject], Subject]) -> None:
    def spoil(subject: Subject, problem: Problem, out: dict[str, torch.Tensor]) -> None:
        if subject.kept.get("case") == problem and len(subject.calls) % 2 == 0:
            first = subject.kept["dq"]
            ctypes.memset(first.data_ptr() + first.numel() * first.element_size(), 1, 8)
        subject.kept |= {"case": problem, "dq": out["dq"]}

    subject = known(Subject(spoil=spoil, name="test.batch"))
    cases = [Case(kernel=subject.name, problem=PROBLEM, recipe=Recipe(seed=at), check="twice") for at in range(3)]
    verdicts = run_batch(cases, "cpu")
    assert plain(verdicts) == alone(cases)
    assert all(each.failure is not None and each.failure.check == "earlier memory" for each in verdicts)


# --- who is at work, and what is lost


def test_each_case_is_announced_when_it_works() -> None:
    cases = with_one_faulty("torch.reference_cpu")
    events: list[str | int] = []
    verdicts = run_batch(cases, "cpu", events.append, events.append)
    numbers = [each for each in events if isinstance(each, int)]
    assert numbers == [*range(SIZE), *range(SIZE)]
    assert {each for each in events if isinstance(each, str)} >= {"compile", "inputs", "kernel", "oracle"}
    assert events[events.index(3) : events.index(4)] == [3, "compile", "inputs", "kernel"]
    oracle = events.index("oracle")
    assert numbers.index(SIZE - 1) < oracle < len(events) - events[::-1].index(0)
    for each in verdicts:
        assert set(each.seconds) >= {"compile", "inputs", "kernel", "oracle"}
        assert each.seconds["oracle"] == pytest.approx(verdicts[0].seconds["oracle"])


def test_a_case_that_runs_alone_afterwards_is_announced_again() -> None:
    kernel = registry.get("fault.bounds")
    numbers: list[int] = []
    run_batch(with_one_faulty(kernel.name, kernel.configs(PROBLEM)[0]), "cpu", None, numbers.append)
    assert numbers == [*range(SIZE), *(each for each in range(SIZE) if each != FAULTY), FAULTY]


def test_an_error_of_the_device_loses_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: str) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(batch.environment, "synchronise", broken)
    with pytest.raises(BatchLost, match="the batch of 9 Cases is lost: RuntimeError: CUDA error"):
        run_batch(with_one_faulty("torch.reference_cpu"), "cpu")


def test_a_launch_that_raises_on_a_lost_device_loses_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = registry.get("fault.raises")
    monkeypatch.setattr(batch.environment, "alive", lambda device: False)
    with pytest.raises(BatchLost, match="device context is lost"):
        run_batch(with_one_faulty(kernel.name, kernel.configs(PROBLEM)[0]), "cpu")


def test_without_memory_for_the_judgement_of_all_each_is_judged_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = with_one_faulty("torch.reference_cpu")
    expected = alone(cases)
    judged_together = batch.judge_batch

    def refused(*_: object) -> list[Any]:
        raise MemoryError

    monkeypatch.setattr(batch, "judge_batch", refused)
    assert in_batches(cases, SIZE) == expected
    monkeypatch.setattr(batch, "judge_batch", lambda *args: [None, *judged_together(*args)[1:]])
    assert in_batches(cases, SIZE) == expected


def test_a_case_that_cannot_run_is_refused_before_any_launch(known: Callable[[Subject], Subject]) -> None:
    subject = known(Subject(name="test.batch"))
    cases = [Case(kernel=subject.name, problem=PROBLEM), Case(kernel=subject.name, problem=replace(PROBLEM, dtype="float16"))]
    with pytest.raises(BadArgument, match="dtype"):
        run_batch(cases, "cpu")
    assert not subject.calls
    assert run_batch([], "cpu") == []


# --- few device operations

VIEWS = {"view", "as_strided", "slice", "select", "split", "split_with_sizes", "transpose", "expand", "detach", "alias", "empty",
         "set_", "unsqueeze", "_unsafe_view", "permute", "lift_fresh"}  # fmt: skip


class Operations(TorchDispatchMode):
    """Counts operations by stage, without views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.stage, self.counts = "", Counter[str]()

    def enter(self, stage: str) -> None:
        self.stage = stage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.split("::")[1] not in VIEWS:
            self.counts[self.stage] += 1
        return func(*args, **(kwargs or {}))


def test_a_case_of_a_batch_takes_few_operations_and_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Counter[str]()
    shipped = reading._read
    monkeypatch.setattr(reading, "_read", lambda parts: (reads.update(["reads"]), shipped(parts))[1])
    problem = replace(PROBLEM, slack_q=1, needs=Needs(dlse=False))
    cases = [Case(kernel="torch.reference_cpu", problem=problem, recipe=Recipe(seed=at)) for at in range(32)]
    inputs, built = materialise(problem, Recipe(), "cpu"), registry.get("torch.reference_cpu").build(problem, Config(), "cpu")
    with torch.no_grad(), Operations() as kernel:
        o, lse = built.forward(inputs)
        built.backward(inputs, o, lse)
    with Operations() as operations:
        run_batch(cases, "cpu", operations.enter)
    assert operations.counts["inputs"] / len(cases) <= 20
    assert operations.counts["kernel"] / len(cases) - kernel.counts[""] <= 40
    assert reads["reads"] == 1
