"""Memory of a GPU that others hold is not what a kernel needs: with figures in place of torch's, and on a GPU with torch's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from attnfuzz.harness.trial import gpu_memory
from attnfuzz.harness.trial.batch import run_batch
from attnfuzz.harness.trial.build import build_kernel, compile_here
from attnfuzz.harness.trial.gpu_memory import is_out_of_memory, is_own_need, trim, when_free
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import BuildError
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import Case, Recipe

GIB = 1 << 30
REFUSED = "CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of 160.00 GiB of which 23.06 MiB is free."


@dataclass
class Gpu:
    """160 GiB, of which this process has allocated `peak` at most, `held` at first, and keeps `kept`; `free` are no one's."""

    peak: int = 0
    held: int = 0
    kept: int = 0
    free: int = 100 * GIB
    emptied: int = 0
    waits: list[float] = field(default_factory=list)

    def empty(self) -> None:
        self.emptied += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    own = Gpu()
    monkeypatch.setattr(gpu_memory, "_total", lambda: 160 * GIB)
    monkeypatch.setattr(gpu_memory.time, "sleep", own.waits.append)
    monkeypatch.setattr(gpu_memory, "_held", 0)
    for name, value in {
        "is_initialized": lambda: True,
        "max_memory_allocated": lambda: own.peak,
        "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: own.held,
        "memory_stats_as_nested_dict": lambda: {"allocated_bytes": {"all": {"current": own.held}}},
        "memory_reserved": lambda: own.kept,
        "mem_get_info": lambda: (own.free, 160 * GIB),
        "empty_cache": own.empty,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return own


@pytest.mark.parametrize(
    ("message", "peak", "own"),
    [
        (REFUSED.format("20.00 MiB"), 1 * GIB, False),
        (REFUSED.format("20.00 MiB"), 10 * GIB, True),
        (REFUSED.format("12.00 GiB"), 0, True),
        (REFUSED.format("9.99 GiB"), 0, False),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", 0, True),
        (REFUSED.format("512 bytes"), 0, False),
        ("CUDA error: out of memory", 1 * GIB, False),
    ],
)
def test_a_kernel_is_refused_on_its_own_account_beyond_a_share_of_the_gpu(message: str, peak: int, own: bool, gpu: Gpu) -> None:
    gpu.peak = peak
    error = torch.OutOfMemoryError(message)
    assert is_out_of_memory(error)
    assert is_own_need(error, "cuda") is own
    assert is_own_need(error, "cpu"), "a child of the CPU has a limit of its own"


@pytest.mark.parametrize(
    ("held", "peak", "own"),
    [
        (2, 11, False),
        (2, 33, False),
        (2, 35, True),
        (12, 31, False),
        (0.5, 9.9, False),
        (0.5, 11, True),
        # More than the GPU has beside them.
        (12, 159, False),
        (12, 160, True),
        (40, 240, True),
    ],
)
def test_a_need_in_proportion_to_the_inputs_is_not_the_kernels_own(held: float, peak: float, own: bool, gpu: Gpu) -> None:
    """12 and 31 GiB: seven sequences of 119,724 queries in float32, where other workers held the rest."""
    gpu.held, gpu.peak = int(held * GIB), int(peak * GIB)
    gpu_memory.start_counting("cuda")
    assert is_own_need(torch.OutOfMemoryError(REFUSED.format("512.00 MiB")), "cuda") is own


def test_what_torch_keeps_is_given_back_if_it_is_much(gpu: Gpu) -> None:
    for kept, emptied in ((9 * GIB, 0), (11 * GIB, 1)):
        gpu.kept = kept
        trim("cpu")
        trim("cuda")
        assert gpu.emptied == emptied


@pytest.mark.parametrize(("kept", "free", "emptied"), [(2, 19, 0), (2, 21, 0), (3, 19, 1), (3, 21, 0), (11, 100, 1)])
def test_where_little_is_free_less_is_kept(kept: int, free: int, emptied: int, gpu: Gpu) -> None:
    gpu.kept, gpu.free = kept * GIB, free * GIB
    trim("cuda")
    assert gpu.emptied == emptied


def test_what_was_refused_for_the_memory_of_others_is_tried_again(gpu: Gpu) -> None:
    answers = [torch.OutOfMemoryError(REFUSED.format("20.00 MiB")), RuntimeError("CUDA error: out of memory"), 7]

    def action() -> object:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    assert when_free(action, "cuda") == 7
    assert len(gpu.waits) == 2


@pytest.mark.parametrize("error", [ValueError("another error"), torch.OutOfMemoryError(REFUSED.format("99.00 GiB"))])
def test_other_errors_and_own_needs_are_raised_at_once(error: Exception, gpu: Gpu) -> None:
    def action() -> None:
        raise error

    with pytest.raises(type(error)):
        when_free(action, "cuda")
    assert not gpu.waits


def test_patience_ends(gpu: Gpu) -> None:
    def action() -> None:
        raise torch.OutOfMemoryError(REFUSED.format("20.00 MiB"))

    with pytest.raises(torch.OutOfMemoryError):
        when_free(action, "cuda", patience=0.0)


class Refused:
    """torch.reference_cpu whose launch, or whose build, finds no memory."""

    def __init__(self, step: str, message: str) -> None:
        kernel = registry.get("torch.reference_cpu")
        self.__dict__.update({name: getattr(kernel, name) for name in dir(kernel) if not hasattr(Refused, name)})
        self.step, self.message, self.name = step, message, "test.refused"

    def refuse(self, step: str) -> None:
        if step == self.step:
            raise torch.OutOfMemoryError(self.message)

    def build(self, *_: object) -> Refused:
        try:
            self.refuse("build")
        except torch.OutOfMemoryError as error:
            raise BuildError(str(error)) from error
        return self

    def forward(self, *_: object) -> None:
        self.refuse("forward")


@pytest.mark.parametrize(("size", "own"), [("20.00 MiB", False), ("99.00 GiB", True)])
def test_neither_a_build_nor_a_launch_is_a_failure_where_others_hold_the_memory(
    size: str, own: bool, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch is of a Case of the CPU: only what counts the memory takes it for one of a GPU."""
    as_cuda = gpu_memory.is_own_need
    for module in ("build", "launch.gpu_memory"):
        monkeypatch.setattr(f"attnfuzz.harness.trial.{module}.is_own_need", lambda error, _: as_cuda(error, "cuda"))
    problem = Problem(seqlens_q=(2,), seqlens_k=(2,), dim_qk=16, dim_v=16, dtype="float32")
    for step in ("build", "forward"):
        kernel = Refused(step, REFUSED.format(size))
        registry.register(kernel)  # type: ignore[arg-type]
        try:
            case = Case(kernel=kernel.name, problem=problem, config=kernel.configs(problem)[0])  # type: ignore[attr-defined]
            if own:
                [failure] = run_trial(case, "cpu").failures
                assert failure.kind == ("compile-error" if step == "build" else "out-of-memory")
            else:
                with pytest.raises(MemoryError, match="other processes hold"):
                    run_trial(case, "cpu")
            if step == "build":
                with pytest.raises(BuildError if own else MemoryError):
                    build_kernel(kernel, problem, case.config, "cpu")  # type: ignore[arg-type]
                if own:
                    assert compile_here(kernel, problem, case.config, "cpu")[1]  # type: ignore[arg-type]
        finally:
            registry.unregister(kernel.name)


class RefusedOnce:
    """torch.reference_cpu, whose launches take 12 GiB for a while; its third build or forward finds 20 MiB taken by others."""

    def __init__(self, step: str, gpu: Gpu) -> None:
        self._kernel, self._step, self._gpu = registry.get("torch.reference_cpu"), step, gpu
        self._calls = {"build": 0, "forward": 0}
        self.__dict__.update({name: getattr(self._kernel, name) for name in dir(self._kernel) if not hasattr(RefusedOnce, name)})
        self.name = "test.refused"

    def _count(self, step: str) -> None:
        self._calls[step] += 1
        if (step, self._calls[step]) == (self._step, 3):
            raise torch.OutOfMemoryError(REFUSED.format("20.00 MiB"))

    def build(self, *of: Any) -> RefusedOnce:
        self._count("build")
        self._built = self._kernel.build(*of)
        return self

    def forward(self, inputs: Any) -> Any:
        self._count("forward")
        self._gpu.peak = max(self._gpu.peak, self._gpu.held + 12 * GIB)
        return self._built.forward(inputs)

    def backward(self, *of: Any) -> Any:
        return self._built.backward(*of)


@pytest.mark.parametrize("step", ["build", "forward"])
def test_a_case_of_a_batch_that_is_refused_memory_runs_alone(step: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other Cases of the batch took is not its own need, and nothing is counted for each launch of a batch."""
    counted: list[str] = []
    as_cuda = gpu_memory.is_own_need
    for module in ("build", "launch.gpu_memory"):
        monkeypatch.setattr(f"attnfuzz.harness.trial.{module}.is_own_need", lambda error, _: as_cuda(error, "cuda"))
    monkeypatch.setattr(gpu_memory, "start_counting", counted.append)
    kernel = RefusedOnce(step, gpu)
    registry.register(kernel)  # type: ignore[arg-type]
    try:
        problem = Problem(seqlens_q=(2,), seqlens_k=(2,), dim_qk=16, dim_v=16, dtype="float32")
        config = registry.get("torch.reference_cpu").configs(problem)[0]
        cases = [Case(kernel=kernel.name, problem=problem, config=config, recipe=Recipe(seed=seed)) for seed in range(4)]
        assert [each.status for each in run_batch(cases, "cpu")] == ["pass"] * 4
        assert kernel._calls == {"build": 5, "forward": 5 if step == "forward" else 4}
        assert 1 <= len(counted) <= 2, "the Case alone"
    finally:
        registry.unregister(kernel.name)


@pytest.mark.gpu
def test_a_gpu_gets_back_what_a_process_keeps() -> None:
    torch.cuda.synchronize()
    trim("cuda")
    total = gpu_memory._total()
    before = torch.cuda.mem_get_info()[0]
    large = torch.empty(total // 12, dtype=torch.uint8, device="cuda")
    del large
    assert torch.cuda.mem_get_info()[0] < before - total // 16
    trim("cuda")
    assert torch.cuda.mem_get_info()[0] > before - total // 64
    held = torch.ones(1 << 20, device="cuda")
    gpu_memory.start_counting("cuda")
    assert gpu_memory._held == torch.cuda.memory_allocated() >= 4 * held.numel()
    with pytest.raises(torch.OutOfMemoryError) as refused:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert is_own_need(refused.value, "cuda")
    assert not is_own_need(torch.OutOfMemoryError(REFUSED.format("20.00 MiB")), "cuda")
