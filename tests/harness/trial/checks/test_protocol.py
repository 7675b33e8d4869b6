"""The check protocol: a Case runs as warp roles under its schedule; what is wrong is a Failure that shrinks and is reproduced."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

pytest.importorskip("tilelang")
pytest.importorskip("torch")

from support.role_kernels import program

from attnfuzz.harness.campaign.corpus import CaseFile, StoredFinding
from attnfuzz.harness.repro.script.script import unshown
from attnfuzz.harness.repro.script.short import why_not_short
from attnfuzz.harness.trial.supports import why_not_case
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import BuildError
from attnfuzz.kernels.faults.barriers import FAULTS, faulty_module
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support.protocol import PROTOCOL_KINDS
from attnfuzz.kernels.tilelang.roles.trying import schedules
from attnfuzz.kernels.tilelang.sm100 import WASP, Sm100
from attnfuzz.strategies.case import Case, case_from_json
from attnfuzz.strategies.shrink_steps import simpler
from attnfuzz.strategies.variants import all_variants

FAULT = next(each for each in FAULTS if each.slug == "bytes")
PROBLEM = Problem(seqlens_q=(5,), seqlens_k=(70,), heads=1, kv_heads=1, dim_qk=32, dim_v=32, dtype="float16", packing="dense")
CONFIG = next(each for each in WASP.configs(PROBLEM) if each["tile_n"] == 64)
CASE = Case(kernel=WASP.name, problem=PROBLEM, config=CONFIG, check="protocol")


class Refusing(Sm100):
    """A kernel whose roles cannot be built."""

    def protocol(self, problem: Problem, config: object, schedule: tuple[int, ...]) -> object:  # type: ignore[override]
        raise BuildError(f"no roles for {len(problem.seqlens_q)} sequence")


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels with a fault, known by name in this process."""
    for name, kernel in (
        ("planted.bytes", Sm100("planted.bytes", "wasp", forward_code=lambda: faulty_module(FAULT))),
        ("planted.refusing", Refusing("planted.refusing", "wasp")),
    ):
        get = registry.get
        monkeypatch.setattr(
            registry, "get", lambda wanted, name=name, kernel=kernel, get=get: kernel if wanted == name else get(wanted)
        )


@pytest.mark.parametrize("schedule", [(), (1, 0, 2, 1, 1)])
def test_a_right_kernel_passes_under_any_schedule(schedule: tuple[int, ...]) -> None:
    verdict = run_trial(replace(CASE, schedule=schedule), "cpu")
    assert (verdict.status, verdict.failures) == ("pass", ())


def test_a_fault_of_some_schedules_is_a_failure_and_shrinks() -> None:
    case = replace(CASE, kernel="planted.bytes")
    assert run_trial(case, "cpu").status == "pass"

    def failing(tried: Case) -> bool:
        return any(each.kind == "wrong-bytes" for each in run_trial(tried, "cpu").failures)

    found = next(each for each in (replace(case, schedule=choices) for choices in schedules(program(8), 50, 2)) if failing(each))
    (failure,) = run_trial(found, "cpu").failures
    assert failure.kind in PROTOCOL_KINDS
    assert failure.check == "MMA at v_full"
    assert failure.message.startswith("forward: MMA threads 160-191, barrier v_full[")
    assert case_from_json(found.canonical()) == found
    variants = all_variants(WASP, "cpu")
    while (
        better := next((x for x in simpler(found, variants) if x.schedule != found.schedule and failing(x)), None)
    ) is not None:
        found = better
    assert found.check == "protocol"
    assert 1 <= sum(map(bool, found.schedule)) <= 2


def test_a_build_that_fails_is_a_compile_error() -> None:
    (failure,) = run_trial(replace(CASE, kernel="planted.refusing"), "cpu").failures
    assert (failure.kind, failure.check, failure.message) == ("compile-error", "build", "no roles for 1 sequence")


def test_who_cannot_run_it_says_why() -> None:
    assert why_not_case(WASP, CASE, "cpu") is None
    other = registry.get("torch.reference_cpu")
    single = replace(PROBLEM, dtype="float32")
    reason = why_not_case(other, replace(CASE, kernel=other.name, problem=single, config=other.configs(single)[0]), "cpu")
    assert reason == "check='protocol': the kernel has no method `protocol`, which executes its warp roles"
    assert "device cpu" in (why_not_case(WASP, CASE, "cuda") or "")


def test_a_script_makes_a_plain_call_and_says_so() -> None:
    stored = CaseFile(replace(CASE, schedule=(1,)), StoredFinding.read({}), Path("case.json"))
    assert (why_not_short(stored) or "").startswith("the Case runs as warp roles under a schedule")
    assert (unshown(stored, "cpu") or "").startswith("the Case runs as warp roles under a schedule")
