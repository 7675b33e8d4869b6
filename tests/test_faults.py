"""Each planted fault is found within 200 cases and shrunk to at most 2 sequences, on the CPU or on a GPU if there is one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support_faults import FAULTS, Fault, faulty

from attnfuzz.harness import environment
from attnfuzz.harness.corpus import Corpus
from attnfuzz.harness.executors import InProcess
from attnfuzz.harness.hunt import Hunt
from attnfuzz.harness.report.describe import lengths
from attnfuzz.harness.settings import PROFILES
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device
from attnfuzz.strategies.shapes import Variant, all_variants

CASES = 200


def few_variants(variants: tuple[Variant, ...], fault: Fault) -> tuple[Variant, ...]:
    """fp16, 64/64, the default Config: causal alone where only that shows the fault (each variant costs TileLang a compile)."""
    plain = [
        each
        for each in variants
        if each.dtype == "float16" and each.dims == variants[0].dims and each.config == variants[0].config
    ]
    return tuple(each for each in plain if bool(each.causal) == fault.causal)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("backend", ["triton", "tilelang"])
def test_the_fault_is_found_and_shrunk(backend: str, fault: Fault, tmp_path: Path, record_property) -> None:
    device: Device = "cuda" if environment.has_cuda() else "cpu"
    environment.prepare(device)
    kernel = faulty(backend, fault)
    if reason := kernel.unavailable(device):
        pytest.skip(reason)
    registry.register(kernel)
    variants = all_variants(kernel, device)
    if device in kernel.capabilities.compiles_on:
        variants = few_variants(variants, fault)
    start = time.monotonic()
    hunt = Hunt(
        kernel,
        device,
        limits=PROFILES["quick"].limits["cpu"],
        executor=InProcess(device),
        listener=lambda _: None,
        corpus=Corpus(tmp_path),
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
    found = next(iter(hunt.found.values()))
    assert found.verdict.failure is not None
    assert found.identity.kind in ("mismatch", "nonfinite", "unwritten"), found.verdict.failure.message
    assert found.case.problem.batch <= 2, found.case.canonical()
    assert not found.partly
    problem = found.case.problem
    record_property(
        "fault",
        {
            "kernel": backend,
            "fault": fault.name,
            "shows in": str(found.identity.output),
            "cases": found.cases_to_find,
            "seconds": round(time.monotonic() - start, 1),
            "minimal": f"{lengths(found.case)} heads {problem.heads}/{problem.kv_heads} {problem.dtype} "
            f"{problem.causal or 'full'} {found.case.recipe.pattern}",
        },
    )
