"""Each planted fault is found within 200 cases and shrunk to at most 2 sequences, on the CPU or on a GPU if there is one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import get_args

import pytest
from support.faults import FAULTS, Fault, faulty
from support.tilelang_faults import DENSE_FAULTS, RAGGED_FAULTS, TileLangFault, faulty_tilelang

from attnfuzz.harness.campaign.corpus import Corpus
from attnfuzz.harness.campaign.hunt import Hunt
from attnfuzz.harness.campaign.settings import PROFILES
from attnfuzz.harness.core import environment
from attnfuzz.harness.isolation.executors import InProcess
from attnfuzz.harness.report.describe import lengths
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Device, Kernel
from attnfuzz.kernels.faults import device as on_device
from attnfuzz.kernels.faults.planted import planted_source
from attnfuzz.kernels.support.memory import MemoryKind
from attnfuzz.strategies.shapes import Variant, all_variants

CASES = 200


def few_variants(variants: tuple[Variant, ...], config: Config, causal: bool) -> tuple[Variant, ...]:
    """fp16, 64/64, one Config: causal alone where only that shows the fault (each variant costs TileLang a compile)."""
    plain = [each for each in variants if each.dtype == "float16" and each.dims == variants[0].dims and each.config == config]
    return tuple(each for each in plain if bool(each.causal) == causal)


# A quarter of them always, another one in each of the two, the others when asked for: most of the time is compilers'.
@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        pytest.param(
            backend, fault, id=f"{backend}-{fault.name}", marks=[pytest.mark.slow] * (number % 4 != (backend == "tilelang"))
        )
        for backend in ("triton", "tilelang")
        for number, fault in enumerate(FAULTS)
    ],
)
def test_the_fault_is_found_and_shrunk(backend: str, fault: Fault, tmp_path: Path, record_property) -> None:
    record_property("fault", hunted(faulty(backend, fault), backend, fault.name, tmp_path, causal=fault.causal))


@pytest.mark.slow
@pytest.mark.parametrize("fault", DENSE_FAULTS, ids=lambda fault: fault.name)
def test_the_fault_of_a_dense_kernel_is_found_and_shrunk(fault: TileLangFault, tmp_path: Path, record_property) -> None:
    kernel = faulty_tilelang(fault, ragged=False)
    record_property("fault", hunted(kernel, "dense", fault.name, tmp_path, causal=fault.causal, ahead=fault.ahead))


@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, marks=[pytest.mark.slow] * each.slow) for each in RAGGED_FAULTS],
    ids=lambda fault: fault.name,
)
def test_the_fault_of_a_ragged_kernel_is_found_and_shrunk(fault: TileLangFault, tmp_path: Path, record_property) -> None:
    kernel = faulty_tilelang(fault, ragged=True)
    record_property("fault", hunted(kernel, "ragged", fault.name, tmp_path, causal=fault.causal, ahead=fault.ahead))


@pytest.mark.parametrize("fault", on_device.FAULTS, ids=lambda fault: fault.slug)
def test_a_fault_that_only_a_gpu_shows_can_still_be_planted(fault: on_device.DeviceFault) -> None:
    for backend, edits in (("triton", fault.triton), ("tilelang", fault.tilelang)):
        _, source = planted_source(f"attnfuzz.kernels.{backend}.varlen_device", edits)
        compile(source, backend, "exec")


def hunted(kernel: Kernel, backend: str, fault: str, folder: Path, *, causal: bool, ahead: bool = False) -> dict[str, object]:
    """Find `fault` in `kernel`, which must succeed, and return its row of the table."""
    device: Device = "cuda" if environment.has_cuda() and "cuda" in kernel.capabilities.devices else "cpu"
    environment.prepare(device)
    if reason := kernel.unavailable(device):
        pytest.skip(reason)
    registry.register(kernel)
    variants = all_variants(kernel, device)
    if device in kernel.capabilities.compiles_on:
        # Small tiles cost a CPU the least.
        configs = dict.fromkeys(each.config for each in variants if not ahead or each.config.integer("threads") >= 128)
        smallest = min(configs, key=lambda each: each.tile("tile_m", 1) * each.tile("tile_n", 1))
        own = "back_tile_m" in smallest
        variants = few_variants(variants, smallest if own else variants[0].config, causal)
    start = time.monotonic()
    hunt = Hunt(
        kernel,
        device,
        limits=PROFILES["quick"].limits["cpu"],
        executor=InProcess(device),
        listener=lambda _: None,
        corpus=Corpus(folder),
        seed=1,
        seconds=None,
        most=CASES,
        most_failures=1,
        shrink_seconds=60.0,
    )
    try:
        hunt.run(variants)
    finally:
        registry.unregister(kernel.name)
    assert hunt.found, f"not found in {hunt.tally.cases} cases"
    finding = next(iter(hunt.found.values()))
    assert finding.verdict.failure is not None
    kinds = ("mismatch", "aggregate", "nonfinite", "unwritten", *get_args(MemoryKind))
    assert finding.identity.kind in kinds, finding.verdict.failure.message
    assert finding.case.problem.batch <= 2, finding.case.canonical()
    assert not finding.partly
    problem = finding.case.problem
    return {
        "kernel": backend,
        "fault": fault,
        "shows in": str(finding.identity.output or finding.identity.kind),
        "cases": finding.cases_to_find,
        "seconds": round(time.monotonic() - start, 1),
        "minimal": f"{lengths(finding.case)} heads {problem.heads}/{problem.kv_heads} {problem.dtype} "
        f"{problem.causal or 'full'} {finding.case.recipe.pattern}",
    }
