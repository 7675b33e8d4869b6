"""Memory layouts from draw to verdict: right kernels pass with all of them, and a kernel that takes one wrongly is found."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from msgspec.structs import replace
from support.emulated.whole import Emulated
from support.mutants import module_of
from support.runs import try_variants

from attnfuzz.harness.campaign.events import Finding
from attnfuzz.harness.core import environment
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.report.describe import describe_case
from attnfuzz.harness.trial import trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device, Inputs, Kernel
from attnfuzz.kernels.faults.planted import Edit, planted_copy
from attnfuzz.kernels.problem import LAYOUTS, Layout, Problem
from attnfuzz.kernels.triton.varlen import KERNEL, TritonVarlen
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.cases import Limits, cases
from attnfuzz.strategies.variants import all_variants

DEVICE: Device = "cuda" if environment.has_cuda() else "cpu"
launchable = pytest.mark.skipif(KERNEL.unavailable(DEVICE) is not None, reason=f"no Triton on {DEVICE}")
RAGGED = Problem(seqlens_q=(7, 0, 40), seqlens_k=(7, 0, 40), heads=4, kv_heads=2, dim_qk=16, dim_v=40, slack_q=2, slack_k=2)
PACKED = Layout(packed=True, offset=3, pitch=5)
ALL = {
    "offsets of every alignment": dict(zip(LAYOUTS, (Layout(offset=n) for n in (1, 2, 4, 8)), strict=True)),
    "padded rows": dict(zip(LAYOUTS, (Layout(pitch=n) for n in (1, 3, 8, 64)), strict=True)),
    "heads outermost": dict.fromkeys(LAYOUTS, Layout(order="htd", pitch=1)),
    "dO other than O": {"layout_do": Layout(order="htd")},
    "one head for all": {"layout_k": Layout(expanded_heads=True), "layout_v": Layout(expanded_heads=True, pitch=2)},
    "packed k, v": {"layout_k": PACKED, "layout_v": PACKED},
    "packed q, k, v": {"layout_q": PACKED, "layout_k": PACKED, "layout_v": PACKED},
    "a constant dO": {"layout_do": Layout(expanded=True, offset=1)},
}


def verdict_of(kernel: Kernel, problem: Problem, device: Device = "cpu") -> Verdict:
    registry.register(kernel)
    try:
        return trial.run_trial(Case(kernel=kernel.name, problem=problem, config=kernel.configs(problem)[0]), device)
    finally:
        registry.unregister(kernel.name)


@pytest.mark.parametrize("layout", ALL)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_right_kernel_passes_with_every_layout(layout: str, dtype: str) -> None:
    verdict = verdict_of(Emulated(), replace(RAGGED, dtype=dtype, **ALL[layout]))
    assert verdict.status == "pass", [each.message for each in verdict.failures]


@pytest.mark.any_device
@launchable
@pytest.mark.parametrize("layout", ALL)
def test_triton_varlen_passes_with_every_layout(layout: str) -> None:
    problem = replace(RAGGED, causal="bottom_right", **ALL[layout])
    verdict = trial.run_trial(Case(kernel=KERNEL.name, problem=problem, config=KERNEL.configs(problem)[2]), DEVICE)
    assert verdict.status == "pass", [each.message for each in verdict.failures]


@seed(20240902)
@settings(max_examples=120, database=None, deadline=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
@given(case=cases(Emulated(), device="cpu", limits=Limits(batch=3, heads=4, length=70, tiles=12)))
def test_a_right_kernel_passes_with_what_is_drawn(case: Case) -> None:
    kernel = registry.register(Emulated())
    try:
        verdict = trial.run_trial(case, "cpu")
    finally:
        registry.unregister(kernel.name)
    assert verdict.status == "pass", (case.canonical(), [each.message for each in verdict.failures])


# --- faults


@dataclasses.dataclass
class Misreading(Emulated):
    """Reads one input as if it were contiguous."""

    misread: str = "q"

    def _each(self, inputs: Inputs):
        x = getattr(inputs, self.misread)
        contiguous = torch.empty(x.shape, device="meta").stride()
        return super()._each(dataclasses.replace(inputs, **{self.misread: x.as_strided(x.shape, contiguous)}))


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def writes_after_the_first_row(inputs: Inputs) -> None:
    """One element to the right of key 0: the next row's first element where rows are not padded."""
    if inputs.problem.layout_k.pitch and not inputs.problem.layout_k.packed and inputs.k.shape[-3] > 1:
        row = inputs.k[0, 0] if inputs.k.dim() == 4 else inputs.k[0]
        last = row[-1] if inputs.problem.layout_k.order is None and not inputs.problem.layout_k.expanded_heads else row[0]
        whole(inputs.k)[last.storage_offset() + last.shape[-1]] = 0


@pytest.fixture
def finding_of(tmp_path: Path) -> Callable[[Kernel], Finding]:
    def find(kernel: Kernel, most: int = 300) -> Finding:
        registry.register(kernel)
        try:
            # Against the oracle alone: huge strides find such a kernel as well, without a layout.
            run = try_variants(kernel, all_variants(kernel, "cpu"), tmp_path, seed=1, most=most, plain=True)
        finally:
            registry.unregister(kernel.name)
        assert run.findings.closed, f"not found in {run.tally.cases} cases"
        return next(iter(run.findings.closed.values()))

    return find


@pytest.mark.parametrize("tensor", [*(pytest.param(each, marks=pytest.mark.slow) for each in "qkv"), "d_o"])
def test_a_kernel_that_ignores_strides_is_found(tensor: str, finding_of: Callable[[Kernel], Finding]) -> None:
    """For d_o: a backward that takes dO's strides for those of O."""
    found = finding_of(Misreading(name="test.misreading", misread=tensor))
    problem = found.case.problem
    own = f"layout_{tensor.replace('_', '')}"
    assert getattr(problem, own) != Layout()
    assert all(getattr(problem, name) == Layout() for name in LAYOUTS if name != own) or getattr(problem, own).packed
    # One row alone lies where it would lie anyway.
    assert (problem.total_q if tensor in ("q", "d_o") else problem.total_k) <= 2


def test_a_write_between_rows_is_found(finding_of: Callable[[Kernel], Finding]) -> None:
    found = finding_of(Emulated(name="test.writing", before=writes_after_the_first_row))
    assert (found.identity.kind, found.identity.check) == ("guard", "input k")
    assert found.verdict.failures[0].message == "the kernel wrote between the rows of its input k"
    assert found.case.problem.layout_k == Layout(pitch=1)


def test_a_write_into_a_packed_neighbour_names_the_neighbour() -> None:
    def writes(inputs: Inputs) -> None:
        whole(inputs.k)[inputs.k.storage_offset() + inputs.k[0].numel()] = 0

    verdict = verdict_of(Emulated(name="test.writing", before=writes), replace(RAGGED, layout_k=PACKED, layout_v=PACKED))
    assert [each.message for each in verdict.failures] == ["the kernel wrote to its input v"]


def test_a_write_to_a_constant_gradient_is_found() -> None:
    def writes(inputs: Inputs) -> None:
        whole(inputs.d_o)[inputs.d_o.storage_offset()] = 3

    verdict = verdict_of(Emulated(name="test.writing", before=writes), replace(RAGGED, layout_do=Layout(expanded=True)))
    assert [each.message for each in verdict.failures] == ["the kernel wrote to its input d_o"]


TRITON_FAULTS = {
    "strides ignored": (
        Edit("STRIDED: tl.constexpr):", "STRIDED: tl.constexpr):\n    steps = (heads * DIM, DIM, 1)"),
        "padded rows",
    ),
    "head stride ignored": (Edit("head.to(tl.int64) * steps[1]", "head.to(tl.int64) * DIM"), "heads outermost"),
    "O's strides for dO": (
        Edit("do_steps = (do_token, do_head, do_dim)", "do_steps = (heads * DIM_V, DIM_V, 1)"),
        "dO other than O",
    ),
    "O's strides for dO in Delta": (
        Edit("do_rows = rows // heads * do_token + rows % heads * do_head", "do_rows = rows * DIM_V"),
        "dO other than O",
    ),
    "the last stride of dO is 1": (Edit("dims.to(tl.int64)[None, :] * do_dim", "dims.to(tl.int64)[None, :]"), "a constant dO"),
}


@pytest.mark.any_device
@launchable
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", TRITON_FAULTS)
def test_a_stride_fault_of_a_real_kernel_is_found(name: str) -> None:
    edit, layout = TRITON_FAULTS[name]
    kernel = TritonVarlen(
        name="test.strides", device_code=functools.partial(planted_copy, module_of("triton.varlen", "device"), [edit])
    )
    assert verdict_of(kernel, RAGGED, DEVICE).status == "pass"
    verdict = verdict_of(kernel, replace(RAGGED, **ALL[layout]), DEVICE)
    assert {each.kind for each in verdict.failures} & {"mismatch", "nonfinite"}


def test_layouts_in_words() -> None:
    layouts = {
        "layout_q": Layout(order="htd", offset=2),
        "layout_k": Layout(expanded_heads=True, pitch=8),
        "layout_do": Layout(expanded=True),
    }
    rows = dict(describe_case(Case(kernel="k", problem=replace(RAGGED, **layouts))))
    assert rows["layout of q"] == "stored as htd, 2 elements into its allocation"
    assert rows["layout of k"] == "8 elements of padding after each row, one head shown as all (stride 0)"
    assert rows["layout of dO"] == "one element shown everywhere (stride 0)"
    assert "layout of v" not in rows
