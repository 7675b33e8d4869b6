"""Each planted fault of memory, or of what one call leaves to the next, is found as what it is; clean kernels pass."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from msgspec.structs import replace
from support.mutants import Mutant, kernel_of, mutants
from support.runs import try_variants
from support.triton_mode import interpreted

from attnfuzz.harness.campaign import plan
from attnfuzz.harness.campaign.kernel_state import KernelState
from attnfuzz.harness.campaign.minimise import Minimiser
from attnfuzz.harness.core import environment
from attnfuzz.harness.isolation.executors import Executor, InProcess
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.trial.bands import Bands
from attnfuzz.harness.trial.poison import PoisonEmpty
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.strategies.case import Case, Check
from attnfuzz.strategies.cases import cases
from attnfuzz.strategies.trials import call_checks
from attnfuzz.strategies.variants import all_variants

CASES = 150
FAULTS = [each for each in mutants().values() if each.memory]
OFTEN = {"OOB-30", "OOB-31", "OOB-32", "HST-04", "RAG-03", "HST-01-call", "HST-33-tilelang"}
"""Some of each check; the others are tried by `-m slow`."""


def with_calls(only: Check | None = None):
    """The strategy of Cases whose checks are sequences of calls as well, or `only` one of these."""

    def mixed(kernel: Kernel, *, device: Device, models: bool, **chosen) -> st.SearchStrategy[Case]:
        assert not models

        def checked(case: Case) -> st.SearchStrategy[Case]:
            checks = call_checks(kernel, case.problem, case.config, device)
            wanted = checks if only is None else checks.filter(lambda check: check == only)
            return wanted.map(lambda check: replace(case, check=check))

        return cases(kernel, device=device, **chosen).flatmap(checked)

    return mixed


def run_of(
    kernel: Kernel,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    check: Check | None,
    dtype: str,
    most: int,
    isolated: bool = False,
    memory_check: bool = True,
) -> KernelState:
    """A run of the simplest variants of `dtype`: each costs TileLang a compile."""
    device: Device = "cuda" if environment.has_cuda() else "cpu"
    environment.prepare(device)
    if reason := kernel.unavailable(device):
        pytest.skip(reason)
    if check != "oracle":
        monkeypatch.setattr(plan, "trial_cases", with_calls(check))
    if not (isolated or memory_check):
        # Neighbours with no keys are among those that explain a failure: to read past nothing ends this process.
        monkeypatch.setattr(Minimiser, "explain", lambda *_: None)
    registry.register(kernel)
    variants = all_variants(kernel, device)
    first = next(each for each in variants if each.dtype == dtype)
    executor: Executor = Isolated(device, backends=[kernel.backend]) if isolated else InProcess(device, memory_check=memory_check)
    variants = tuple(each for each in variants if (each.dtype, each.dims, each.config) == (dtype, first.dims, first.config))[:1]
    try:
        return try_variants(kernel, variants, folder, seed=3, most=most, device=device, executor=executor)
    finally:
        executor.close()
        registry.unregister(kernel.name)


ALLOCATIONS = {
    "empty": lambda x: torch.empty(2, 3),
    "empty_like": torch.empty_like,
    "empty_strided": lambda x: torch.empty_strided((2, 3), (1, 2)),
    "empty_permuted": lambda x: torch.empty_permuted((2, 3), (1, 0)),
    "new_empty": lambda x: x.new_empty(2, 3),
    "new_empty_strided": lambda x: x.new_empty_strided((2, 3), (3, 1)),
    "Tensor": lambda x: torch.Tensor(2, 3),
    "new": lambda x: x.new(2, 3),
    "resize_": lambda x: torch.empty(0).resize_(2, 3),
    "half": lambda x: torch.empty(2, 3, dtype=torch.float16),
}


@pytest.mark.parametrize("way", ALLOCATIONS)
@pytest.mark.parametrize("fill", [math.nan, 0.34375])
def test_every_way_to_allocate_gives_the_filling(way: str, fill: float) -> None:
    with torch.no_grad(), PoisonEmpty(Bands(), fill=fill):
        tensor = ALLOCATIONS[way](torch.ones(2, 3))
    assert tensor.shape == (2, 3)
    torch.testing.assert_close(tensor, torch.full((2, 3), fill, dtype=tensor.dtype), rtol=0, atol=0, equal_nan=True)


def test_what_a_tensor_holds_survives_its_growth() -> None:
    with torch.no_grad(), PoisonEmpty(Bands()):
        tensor = torch.arange(4.0).resize_(3, 2)
    assert tensor.flatten()[:4].tolist() == [0, 1, 2, 3]
    assert tensor.flatten()[4:].isnan().all()


def dtype_of(mutant: Mutant) -> str:
    return mutant.direct_case(mutant.kernel).problem.dtype


@pytest.mark.any_device
@pytest.mark.parametrize(
    "mutant", [pytest.param(each, id=each.id, marks=[pytest.mark.slow] * (each.id not in OFTEN)) for each in FAULTS]
)
def test_the_fault_is_found_as_what_it_is(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mutant.memory is not None
    if mutant.not_on_gpu and environment.has_cuda():
        pytest.skip(mutant.not_on_gpu)
    kernel, check = kernel_of(mutant), mutant.direct_case(mutant.kernel).check
    # The memory checker, which a GPU has not, would be first.
    run = run_of(kernel, tmp_path, monkeypatch, check=check, dtype=dtype_of(mutant), most=CASES, memory_check=False)
    assert run.findings.closed, f"not found in {run.tally.cases} cases"
    finding = next(iter(run.findings.closed.values()))
    failure = next(each for each in finding.verdict.failures if each.identity == finding.identity)
    assert failure.kind in mutant.memory.kinds, failure.message
    assert mutant.memory.says in failure.message
    assert finding.case.problem.batch <= 2


@interpreted
@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(each, id=each.id, marks=[pytest.mark.slow] * (each.id == "HST-32"))
        for each in FAULTS
        if each.memory and each.memory.checker
    ],
)
def test_the_memory_checker_finds_it_first(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mutant.memory is not None
    check = mutant.direct_case(mutant.kernel).check
    run = run_of(kernel_of(mutant), tmp_path, monkeypatch, check=check, dtype=dtype_of(mutant), most=CASES)
    assert next(iter(run.findings.closed)).kind == mutant.memory.checker


@interpreted
@pytest.mark.parametrize(("id_", "kinds"), [("DIM-04", {"guard"}), ("RAG-07", {"crash", "guard", "hang"})])
def test_without_the_memory_checker_bands_show_it(id_: str, kinds: set[str]) -> None:
    """As on a GPU: columns past the last row, and a sequence whose end lies behind those of the lengths."""
    mutant = mutants()[id_]
    environment.prepare("cpu")
    kernel = registry.register(kernel_of(mutant))
    executor = Isolated("cpu", backends=[kernel.backend], memory_check=False, deadline=20.0)
    try:
        found = executor.trial(mutant.direct_case(kernel.name)).failures
        assert {each.kind for each in found} & kinds, found
        assert executor.trial(mutant.direct_case(mutant.kernel)).status == "pass"
    finally:
        executor.close()
        registry.unregister(kernel.name)


def test_those_are_there() -> None:
    assert {each.id for each in FAULTS} >= OFTEN


@pytest.mark.any_device
def test_what_one_case_leaves_to_the_next_becomes_a_case_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the oracle in a process that earlier Cases have used: shrunk to calls that show it in any process."""
    kernel = kernel_of(mutants()["HST-01-call"])
    run = run_of(kernel, tmp_path, monkeypatch, check="oracle", dtype="float16", most=CASES, isolated=True)
    finding = next(iter(run.findings.closed.values()))
    assert finding.case.check in ("other_scale", "other_shape")
    assert finding.rate is None
    assert not finding.partly
    registry.register(kernel)
    executor = Isolated("cuda" if environment.has_cuda() else "cpu", backends=["triton"])
    try:
        assert executor.trial(finding.case).failures[0].identity == finding.identity
        assert executor.trial(replace(finding.case, check="oracle")).failures, "the process keeps the scale"
        executor.fresh()
        assert not executor.trial(replace(finding.case, check="oracle")).failures
    finally:
        executor.close()
        registry.unregister(kernel.name)


@pytest.mark.any_device
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["triton", "tilelang"])
def test_a_clean_kernel_passes_every_sequence_of_calls(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = copy.copy(registry.get(f"{backend}.varlen"))
    kernel.name = "test.clean"
    run = run_of(kernel, tmp_path, monkeypatch, check=None, dtype="float16", most=40)
    assert not run.findings.closed
    assert run.tally.cases == 40


@interpreted
@pytest.mark.slow
def test_another_order_of_additions_is_right_where_nothing_else_is_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernel_of(mutants()["RAC-27"])
    kernel.capabilities = replace(kernel.capabilities, deterministic=("o", "lse", "dk", "dv"))
    run = run_of(kernel, tmp_path, monkeypatch, check="twice", dtype="float32", most=40)
    assert not run.findings.closed
