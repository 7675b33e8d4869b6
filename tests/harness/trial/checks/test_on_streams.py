"""Calls on other streams and in CUDA graphs: right kernels pass, and each planted fault shows in its check alone.

On the CPU a device's streams are simulated; the tests marked gpu plant the same faults around triton.varlen.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from msgspec.structs import replace
from support.calls import PROBLEM, WIDE, Subject
from support.emulated.sinks import kernel as with_sinks
from support.fake_streams import FakeStreams
from support.fused_c import Compiled, generated
from support.on_streams import Around

from attnfuzz.harness.core import environment
from attnfuzz.harness.core.clock import Clock
from attnfuzz.harness.judge.batch import Judged
from attnfuzz.harness.judge.together import Launched
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.trial import batch, side_streams
from attnfuzz.harness.trial.bench import Bench, WentWrong, completed
from attnfuzz.harness.trial.checks import on_streams
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.supports import why_not_case
from attnfuzz.harness.trial.trial import CHECKS, run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Device, Inputs, Kernel
from attnfuzz.kernels.problem import OUTPUT_NAMES, Problem
from attnfuzz.kernels.support.capability_values import impossible
from attnfuzz.kernels.torch.reference_cpu import KERNEL as CORRECT
from attnfuzz.strategies.call_sequences import call_machine
from attnfuzz.strategies.case import STREAMS, Case, Check, Recipe
from attnfuzz.strategies.cases import Limits
from attnfuzz.strategies.draw import drawn
from attnfuzz.strategies.stream_checks import stream_checks
from attnfuzz.strategies.trials import trial_cases
from attnfuzz.strategies.variants import all_variants

GRAPHS = replace(WIDE, cuda_graphs=("forward", "backward"))
DEVICE_SIDE = replace(GRAPHS, devices=("cpu", "cuda"), compiles_on=())


@dataclasses.dataclass
class Streamed(Subject):
    """torch.reference_cpu on simulated streams: a call returns tensors that get their values later.

    `fault`: "" or what it does wrong.
    """

    streams: FakeStreams = dataclasses.field(default_factory=FakeStreams)
    fault: str = ""

    def forward(self, inputs: Inputs) -> Any:
        (o, lse), problem = self._later(lambda: CORRECT.build(inputs.problem, Config(), "cpu").forward(inputs)), inputs.problem
        if self.fault == "waits":
            self.streams.synchronise()
        if self.fault == "raises there" and self.streams.held:
            raise ValueError("not here")
        if self.fault == "kept value":
            # On a GPU a tensor made in the first call with these addresses.
            first = self.kept.setdefault((self.streams.current, inputs.q.data_ptr()), inputs.q.abs().max().clone())
            self.streams.request(lambda: o.mul_(inputs.q.abs().max() / first))
        assert o.shape[-1] == problem.dim_v
        return o, lse

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Any:
        return self._later(lambda: CORRECT.build(inputs.problem, Config(), "cpu").backward(inputs, o, lse))

    def _later(self, compute: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        """Return unwritten tensors of the shapes that `compute` returns, which the stream will fill."""
        results = tuple(torch.empty_like(each) for each in compute())

        def fill() -> None:
            for result, value in zip(results, compute(), strict=True):
                result.copy_(value)

        if self.fault == "default stream":
            fill()
        elif self.fault == "own stream" and self.streams.held:
            self.streams.last.append(fill)
        elif self.fault == "workspace":
            kept = self.kept.setdefault(f"of {len(results)}", [torch.empty_like(each) for each in results])
            self.streams.request(lambda: [to.copy_(value) for to, value in zip(kept, compute(), strict=True)])
            self.streams.request(lambda: [to.copy_(value) for to, value in zip(results, kept, strict=True)])
        else:
            self.streams.request(fill)
        return results


def tried(
    check: Check, fault: str = "", problem: Problem = PROBLEM, recipe: Recipe | None = None, **more: Any
) -> tuple[Verdict, Streamed]:
    """The Verdict of a check on simulated streams, and the kernel."""
    subject = Streamed(fault=fault, capabilities=GRAPHS, **more)
    case = Case(kernel=subject.name, problem=problem, check=check, recipe=recipe or Recipe())
    return verdict_of(subject, case), subject


def verdict_of(subject: Streamed, case: Case) -> Verdict:
    """The Verdict of a Case with the kernel's simulated streams."""
    bench = Bench(case, subject, "cpu", Clock())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_streams, "streams_of", lambda device: subject.streams)
        try:
            return completed(bench, CHECKS[case.check](bench))
        except WentWrong as error:
            return Verdict(status="fail", failures=(error.failure,))


PROBLEMS = {
    "plain": PROBLEM,
    "slack, a mask": replace(PROBLEM, slack_q=3, slack_k=2, causal="top_left"),
    "forward alone": replace(PROBLEM, needs=replace(PROBLEM.needs, outputs=("o", "lse"))),
    "dense": replace(PROBLEM, packing="dense", seqlens_q=(4, 4), seqlens_k=(3, 3)),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("check", STREAMS)
def test_a_right_kernel_passes(check: Check, problem: Problem) -> None:
    assert tried(check, problem=problem)[0].failures == ()


FAULTS: dict[str, tuple[Check, set[str]]] = {
    "default stream": ("other_stream", {"nondeterministic"}),
    "own stream": ("other_stream", {"nondeterministic"}),
    "workspace": ("two_streams", {"nondeterministic"}),
    "kept value": ("graph", {"nondeterministic"}),
    "waits": ("graph", {"exception"}),
}
"""The check that finds each fault, and the kinds of its failures."""


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(fault: str) -> None:
    check, kinds = FAULTS[fault]
    verdict, _ = tried(check, fault)
    assert verdict.status == "fail"
    assert {each.kind for each in verdict.failures} == kinds
    assert all("(the call was made " in each.message and "; a plain call is right)" in each.message for each in verdict.failures)


@pytest.mark.parametrize("fault", ["workspace", "waits", "own stream"])
def test_a_fault_passes_where_it_does_no_harm(fault: str) -> None:
    others = [check for check in STREAMS if check not in (FAULTS[fault][0], "two_streams")]
    assert others
    for check in others:
        assert tried(check, fault)[0].status == "pass", check


def test_what_is_read_too_early_is_said() -> None:
    verdict, _ = tried("other_stream", "own stream")
    assert {each.output for each in verdict.failures} == set(OUTPUT_NAMES)
    assert (
        verdict.failures[0].message == "O: 384 elements were read too early, by an operation that follows on the same stream "
        "(the call was made on another stream than torch's default one; a plain call is right)"
    )


def test_a_capture_that_is_refused_is_an_exception_of_its_step() -> None:
    (failure,) = tried("graph", "waits")[0].failures
    assert (failure.kind, failure.check) == ("exception", "forward")
    assert failure.message.startswith("forward raised RuntimeError: operation not permitted when stream is capturing")
    assert failure.message.endswith("(the call was made in a CUDA graph, replayed with other values; a plain call is right)")


def test_what_is_held_back_is_let_go_where_the_kernel_raises() -> None:
    verdict, subject = tried("other_stream", "raises there")
    assert [each.kind for each in verdict.failures] == ["exception"]
    assert not subject.streams.held
    assert subject.streams.log.count("let go") == 1


def test_a_plain_failure_is_that_of_a_plain_call() -> None:
    for check in STREAMS:
        subject = Streamed(lambda subject, problem, out: None, capabilities=GRAPHS)
        subject._later = lambda compute: tuple(each * 2 for each in compute())  # type: ignore[method-assign]
        bench = Bench(Case(kernel=subject.name, problem=PROBLEM, check=check), subject, "cpu", Clock())
        verdict = completed(bench, CHECKS[check](bench))
        assert verdict.status == "fail"
        assert not any("the call was made" in each.message for each in verdict.failures)
        assert subject.streams.log == []


def test_a_backward_that_is_not_declared_is_not_captured() -> None:
    for steps, count in ((("forward",), 1), (("forward", "backward"), 2)):
        subject = Streamed(capabilities=replace(WIDE, cuda_graphs=steps))
        bench = Bench(Case(kernel=subject.name, problem=PROBLEM, check="graph"), subject, "cpu", Clock())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(on_streams, "streams_of", lambda device, subject=subject: subject.streams)
            assert completed(bench, CHECKS["graph"](bench)).status == "pass"
        assert subject.streams.log.count("capture") == count
        assert subject.streams.log.count("replay") == 2 * count


def test_the_second_of_two_calls_is_judged() -> None:
    """Only what the call with other values returns is wrong."""
    assert on_streams.beside(Recipe()) != Recipe()
    assert on_streams.beside(Recipe(seed=7)) != Recipe(seed=7)
    subject = Streamed(capabilities=GRAPHS)
    plain_forward = subject.forward

    def forward(inputs: Inputs) -> Any:
        o, lse = plain_forward(inputs)
        if subject.streams.current == 1:
            subject.streams.request(lambda: o.mul_(2.0))
        return o, lse

    subject.forward = forward  # type: ignore[method-assign]
    verdict = verdict_of(subject, Case(kernel=subject.name, problem=PROBLEM, check="two_streams"))
    # The gradients are of that O.
    assert [(each.kind, each.output) for each in verdict.failures] == [("mismatch", name) for name in ("o", "dq", "dk")]


def test_a_plain_failure_of_the_other_values_is_no_failure_of_streams() -> None:
    subject = Streamed(capabilities=GRAPHS)
    plain_forward, others = subject.forward, materialise(PROBLEM, on_streams.beside(Recipe()), "cpu")

    def forward(inputs: Inputs) -> Any:
        o, lse = plain_forward(inputs)
        if torch.equal(inputs.q, others.q):
            subject.streams.request(lambda: o.mul_(2.0))
        return o, lse

    subject.forward = forward  # type: ignore[method-assign]
    verdict = verdict_of(subject, Case(kernel=subject.name, problem=PROBLEM, check="two_streams"))
    assert {each.kind for each in verdict.failures} == {"mismatch"}
    assert not any("the call was made" in each.message for each in verdict.failures)


def test_each_output_of_a_call_that_differs_is_one_failure() -> None:
    verdict, _ = tried("other_stream", "default stream")
    assert sorted(str(each.output) for each in verdict.failures) == sorted(OUTPUT_NAMES)
    assert {each.check for each in verdict.failures} == {"other_stream"}


class OfSinks(Streamed):
    """One with sinks, whose gradient lies in the same memory each time; `fault`: "sinks" makes it wrong on other streams."""

    def forward(self, inputs: Inputs) -> Any:
        def compute() -> tuple[torch.Tensor, ...]:
            out = with_sinks(inputs, first=False)
            return out.o, out.lse

        return self._later(compute)

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Any:
        wrong = self.fault == "sinks" and self.streams.current is not None

        def compute() -> tuple[torch.Tensor, ...]:
            out = with_sinks(inputs, first=False)
            (of_sinks,) = out.d_captured
            assert of_sinks is not None
            return out.dq, out.dk, out.dv, of_sinks * 2 if wrong else of_sinks

        *gradients, own = self._later(compute)
        # Two calls at once may not share it.
        kept = self.kept.setdefault(f"beside {self.streams.current == 1}", torch.zeros_like(own))
        self.streams.request(lambda: kept.copy_(own))
        return (*gradients, (kept,))


@pytest.mark.parametrize("check", STREAMS)
def test_the_gradient_of_sinks_is_compared_too(check: Check) -> None:
    """With a copy of that of the plain call."""
    problem = replace(PROBLEM, sinks=True)
    for fault in ("", "sinks"):
        subject = OfSinks(fault=fault, capabilities=replace(GRAPHS, sinks=True))
        verdict = verdict_of(subject, Case(kernel=subject.name, problem=problem, check=check))
        assert [each.kind for each in verdict.failures][:1] == (["mismatch"] if fault else []), (check, verdict.failures)
        assert all("; a plain call is right)" in each.message for each in verdict.failures)


# --- where they apply


def test_they_apply_on_cuda_alone_and_graphs_where_declared() -> None:
    subject = Subject(capabilities=replace(DEVICE_SIDE, cuda_graphs=()))
    assert stream_checks(subject, "cpu") == ()
    assert stream_checks(subject, "cuda") == ("other_stream", "two_streams")
    assert stream_checks(Subject(capabilities=DEVICE_SIDE), "cuda") == STREAMS
    case = Case(kernel=subject.name, problem=PROBLEM, check="graph")
    assert why_not_case(subject, case, "cpu") == "check='graph': a CPU has no CUDA streams; give device cuda"
    reason = "check='graph': test.calls does not declare that it can be captured (cuda_graphs=('forward',))"
    assert why_not_case(subject, case, "cuda") == reason


def test_a_backward_without_its_forward_is_no_declaration() -> None:
    assert list(impossible(replace(WIDE, cuda_graphs=("backward",))))
    assert not list(impossible(replace(WIDE, cuda_graphs=("forward",))))
    assert list(impossible(replace(WIDE, cuda_graphs=("sideways",))))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_they_are_drawn_rarely_and_on_cuda_alone(device: Device) -> None:
    strategy = trial_cases(Subject(capabilities=DEVICE_SIDE), device=device)
    checks = [case.check for case in drawn(strategy, seed=1, examples=3000, quota=3000)]
    shares = {check: checks.count(check) / len(checks) for check in STREAMS}
    if device == "cpu":
        assert not any(shares.values())
    else:
        assert all(shares.values())
        assert 1 / 100 < sum(shares.values()) < 1 / 40


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sequences_of_calls_have_them_too(device: Device) -> None:
    subject, checks, problems = Subject(capabilities=DEVICE_SIDE), set[str](), list[Problem]()

    def call(case: Case) -> None:
        if case.check != "oracle":
            assert case.problem == problems[-1]
        checks.add(case.check)
        problems.append(case.problem)

    limits = Limits(batch=2, heads=2, length=8)
    machine = call_machine(
        subject, device=device, limits=limits, variants=all_variants(subject, device), begin=problems.clear, call=call
    )
    run_state_machine_as_test(
        seed(2)(machine),
        settings=settings(
            max_examples=30, stateful_step_count=12, phases=(Phase.generate,), database=None, deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
    assert checks == ({"oracle"} if device == "cpu" else {"oracle", *STREAMS})


# A value that is kept by address may be another Case's.
IN_A_BATCH = [*((check, "") for check in STREAMS), *((FAULTS[each][0], each) for each in FAULTS if each != "kept value")]


@pytest.mark.parametrize(("check", "fault"), IN_A_BATCH)
def test_in_a_batch_they_are_judged_with_others(check: Check, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain calls are judged with the other Cases' outputs, and what differs, or has other values, with that of such Cases."""
    alone, _ = tried(check, fault, recipe=Recipe(seed=3))
    subject = Streamed(fault=fault, capabilities=GRAPHS)
    plain = Case(kernel=subject.name, problem=PROBLEM)
    cases = [plain, *(replace(plain, check=check, recipe=Recipe(seed=seed)) for seed in (3, 4))]

    def run_alone(case: Case, *_: object) -> Verdict:
        raise AssertionError(case)

    together: list[int] = []

    def judge_batch(launched: list[Launched], *rest: Any) -> list[Judged | None]:
        together.append(len(launched))
        return judge_together(launched, *rest)

    judge_together = batch.judge_batch
    monkeypatch.setattr(batch, "check_runnable", lambda case, device: subject)
    monkeypatch.setattr(batch, "run_trial", run_alone)
    monkeypatch.setattr(batch, "judge_batch", judge_batch)
    monkeypatch.setattr(on_streams, "streams_of", lambda device: subject.streams)
    verdicts = batch.run_batch(cases, "cpu")
    assert together[0] == 3
    assert set(together[1:]) == ({2} if check == "two_streams" or fault == "default stream" else set())
    status = "fail" if fault else "pass"
    assert [each.status for each in verdicts] == ["pass", status, status]
    assert [each.message for each in verdicts[1].failures] == [each.message for each in alone.failures]
    assert verdicts[1].figures == alone.figures


def test_outputs_that_lie_in_the_memory_of_another_cases_are_settled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the call beside are judged together, after all of them were made."""
    subject = Streamed(capabilities=GRAPHS)
    later = subject._later

    def in_one_memory(compute: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        results = later(compute)
        if subject.streams.current != 1:
            return results
        kept: tuple[torch.Tensor, ...] = subject.kept.setdefault(f"of {len(results)}", tuple(map(torch.zeros_like, results)))
        subject.streams.request(lambda: [to.copy_(x) for to, x in zip(kept, results, strict=True)])
        return kept

    subject._later = in_one_memory  # type: ignore[method-assign]
    case = Case(kernel=subject.name, problem=PROBLEM, check="two_streams")
    cases = [replace(case, recipe=Recipe(seed=seed)) for seed in (3, 5)]
    alone: list[Case] = []

    def run_alone(case: Case, *_: object) -> Verdict:
        alone.append(case)
        return Verdict(status="pass")

    monkeypatch.setattr(batch, "check_runnable", lambda case, device: subject)
    monkeypatch.setattr(batch, "run_trial", run_alone)
    monkeypatch.setattr(on_streams, "streams_of", lambda device: subject.streams)
    assert [each.failures for each in batch.run_batch(cases, "cpu")] == [(), ()]
    assert alone == cases


@pytest.mark.slow
def test_all_outputs_are_compared_by_one_launch(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait for a device lasts until other processes have had their turns."""
    flags: list[int] = []
    plain_one = on_streams.differing

    def noted(pairs: Any) -> Any:
        found = plain_one(pairs)
        flags.append(len(found or ()))
        return found

    monkeypatch.setattr(on_streams, "differing", noted)
    for check, fault, count in (("other_stream", "", 10), ("other_stream", "own stream", 10), ("graph", "kept value", 5)):
        with generated(Compiled(tmp_path)):
            ours, _ = tried(check, fault)
        assert flags.pop() == count
        plain, _ = tried(check, fault)
        assert flags.pop() == 0
        assert [each.message for each in ours.failures] == [each.message for each in plain.failures]
        assert bool(ours.failures) == bool(fault)


# --- the kernel that holds a stream back


def test_a_stream_is_held_back_until_the_number_is_there(tmp_path: Any) -> None:
    device, flag = torch.device("cpu"), torch.zeros(1, dtype=torch.int32)
    with generated(Compiled(tmp_path)):
        flag.fill_(3)
        side_streams._KERNEL(side_streams.hold_arguments(flag.data_ptr(), 3, most=2**32 - 1), 1, device)
        # Not there yet: it gives up after so many looks.
        side_streams._KERNEL(side_streams.hold_arguments(flag.data_ptr(), 4, most=1000), 1, device)


class Graph:
    """torch.cuda.CUDAGraph of a capture that ends as `refusal` says."""

    refusal: Exception | None = None

    def __init__(self) -> None:
        self.log: list[str] = []

    def capture_begin(self, **how: Any) -> None:
        assert how == {"pool": (0, 7), "capture_error_mode": "thread_local"}
        self.log.append("begin")

    def capture_end(self) -> None:
        self.log.append("end")
        if self.refusal is not None:
            raise self.refusal

    def replay(self) -> None:
        self.log.append("replay")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> side_streams.CudaStreams:
    """The streams of a GPU that is not there."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **more: zeros(*size, **more))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return side_streams.CudaStreams()


def test_all_streams_are_let_go_by_one_number(cuda: side_streams.CudaStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[bytes] = []
    monkeypatch.setattr(side_streams._KERNEL, "takes", lambda device: True, raising=False)
    monkeypatch.setattr(side_streams.Handwritten, "__call__", lambda kernel, argument, *_: waiting.append(argument))
    for number in (1, 2):
        cuda.hold()
        cuda.hold()
        expected = side_streams.hold_arguments(cuda._flag.data_ptr(), number)
        assert waiting[-2:] == [expected, expected]
        assert cuda._flag.item() == number - 1
        cuda.let_go()
        assert cuda._flag.item() == number


def test_without_a_kernel_of_our_own_a_stream_waits_some_time(
    cuda: side_streams.CudaStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(side_streams._KERNEL, "takes", lambda device: False, raising=False)
    monkeypatch.setattr(torch.cuda, "_sleep", waits.append, raising=False)
    cuda.hold()
    assert waits == [side_streams._CYCLES]


@pytest.mark.parametrize("refusal", [None, RuntimeError("the capture has failed")])
@pytest.mark.parametrize("raised", [None, ValueError("by the kernel")])
def test_a_capture_is_ended_whatever_the_kernel_raises(
    raised: Exception | None, refusal: Exception | None, cuda: side_streams.CudaStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(Graph, "refusal", refusal)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *of: ended.append(of), raising=False)

    def call() -> str:
        assert not gc.isenabled()
        if raised is not None:
            raise raised
        return "result"

    if (error := raised or refusal) is None:
        result, replay = cuda.captured(call)
        replay()
        assert (result, ended) == ("result", [])
    else:
        with pytest.raises(type(error), match=str(error)):
            cuda.captured(call)
        # Torch's allocator may ask the graph later.
        (graph,) = cuda._failed
        assert (graph.log, ended) == (["begin", "end"], [(0, (0, 7))])
    assert gc.isenabled()


def test_a_capture_that_cannot_begin_leaves_collections_as_they_were(
    cuda: side_streams.CudaStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(graph: Graph, **_: Any) -> None:
        raise RuntimeError("not on this stream")

    monkeypatch.setattr(Graph, "capture_begin", refuse)
    with pytest.raises(RuntimeError, match="not on this stream"):
        cuda.captured(lambda: None)
    assert gc.isenabled()


# --- on a GPU


@pytest.fixture
def around() -> Iterator[Callable[[str, Check], Verdict]]:
    registered: list[str] = []

    def run(fault: str, check: Check) -> Verdict:
        if reason := registry.get("triton.varlen").unavailable("cuda"):
            pytest.skip(reason)
        kernel: Kernel = Around(fault)
        registry.register(kernel)
        registered.append(kernel.name)
        problem = Problem(seqlens_q=(70, 33), seqlens_k=(70, 33), heads=2, dim_qk=64, dim_v=64)
        return run_trial(Case(kernel=kernel.name, problem=problem, config=kernel.configs(problem)[0], check=check), "cuda")

    yield run
    for name in dict.fromkeys(registered):
        registry.unregister(name)


@pytest.mark.gpu
@pytest.mark.parametrize("check", STREAMS)
def test_a_right_kernel_passes_on_the_gpu(check: Check, around: Callable[[str, Check], Verdict]) -> None:
    # Twice: the second time, memory of the streams is used once more.
    for _ in range(2):
        assert around("", check).failures == ()


@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_on_the_gpu(fault: str, around: Callable[[str, Check], Verdict]) -> None:
    check, _ = FAULTS[fault]
    verdict = around(fault, check)
    assert verdict.status == "fail"
    assert all("; a plain call is right)" in each.message for each in verdict.failures)
    kinds = {each.kind for each in verdict.failures}
    assert kinds <= {"mismatch", "nonfinite", "nondeterministic", "exception"}
    assert ("exception" in kinds) == (fault == "waits")
    # The process goes on.
    assert around("", "oracle").status == "pass"
    assert environment.alive("cuda")


@pytest.mark.gpu
# TileLang compiles for minutes on busy cores.
@pytest.mark.parametrize("name", ["torch.flash", "torch.cudnn", pytest.param("tilelang.varlen", marks=pytest.mark.slow)])
def test_kernels_are_right_on_other_streams(name: str) -> None:
    kernel = registry.get(name)
    if reason := kernel.unavailable("cuda"):
        pytest.skip(reason)
    packing = kernel.capabilities.packings[0]
    problem = Problem(seqlens_q=(64, 64), seqlens_k=(64, 64), heads=2, dim_qk=64, dim_v=64, packing=packing)
    checks: tuple[Check, ...] = ("other_stream", "two_streams")
    for check in checks:
        case = Case(kernel=name, problem=problem, config=kernel.configs(problem)[0], check=check)
        assert run_trial(case, "cuda").failures == (), check


@pytest.mark.gpu
def test_a_stream_is_held_back_on_the_gpu() -> None:
    streams = side_streams.CudaStreams()
    source, target = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
    streams.synchronise()
    with streams.on(0):
        source.fill_(1.0)
        target.fill_(0.0)
    streams.synchronise()
    with streams.on(0):
        streams.hold()
        source.fill_(2.0)
    with streams.on(1):
        # Not held back, and so before.
        target.copy_(source)
        assert target.tolist() == [1.0]
    streams.let_go()
    streams.synchronise()
    assert source.tolist() == [2.0]
