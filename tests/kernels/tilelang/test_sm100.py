"""The Blackwell kernels: which functions a variant has, what they lower to, and that they are right where no GPU is needed."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("tilelang")
pytest.importorskip("torch")

import tilelang
from msgspec.structs import replace
from tvm.ir.transform import PassContext
from tvm.target import Target

from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import BuildError
from attnfuzz.kernels.faults.planted import Edit, planted_copy
from attnfuzz.kernels.problem import Layout, Problem
from attnfuzz.kernels.tilelang import sm100, sm100_forward_device, subject
from attnfuzz.kernels.tilelang.build import cuda_passes, unavailable
from attnfuzz.kernels.tilelang.sm100 import SS, TS, VARIANTS, WASP, Sm100
from attnfuzz.strategies.case import Case, Recipe

needs_compiler = pytest.mark.skipif(unavailable("cpu") is not None, reason=str(unavailable("cpu")))
KERNELS = {"ss": SS, "ts": TS, "wasp": WASP}
DEVICE = "attnfuzz.kernels.tilelang.sm100_forward_device"
PROBLEM = Problem(seqlens_q=(150, 150), seqlens_k=(290, 290), packing="dense", dim_qk=64, dim_v=48, heads=4, kv_heads=2)
FORM = {"dim_qk": 64, "dim_v": 64, "dtype": "float16", "causal": True, "tile_m": 128, "tile_n": 128, "strided": True}

each_variant = pytest.mark.parametrize("variant", KERNELS)


@functools.cache
def source(factory: str) -> str:
    """The CUDA source that a forward lowers to for sm_100a; neither nvcc nor a GPU is needed."""
    target = Target({"kind": "cuda", "arch": "sm_100a"})
    with target, PassContext(config=cuda_passes(sm100_forward_device, FORM)):
        return str(tilelang.lower(getattr(sm100_forward_device, factory)(**FORM), target=target).kernel_source)


# variants


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="variant='tss': no forward of sm100 has that name; give one of ss, ts, wasp"):
        Sm100("tilelang.sm100.tss", "tss")


def test_heads_that_are_not_divided_by_key_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_heads=3"):
        replace(PROBLEM, heads=4, kv_heads=3)


@pytest.mark.parametrize(
    ("variant", "threads", "shared", "tensor"),
    [("ss", 128, 2, 0), ("ts", 256, 1, 1), ("wasp", 192, 1, 1)],
)
def test_each_name_lowers_to_its_own_variant(variant: str, threads: int, shared: int, tensor: int) -> None:
    text = source(VARIANTS[variant].forward)
    assert f"sm100_forward_{variant}_kernel" in text
    assert f"__launch_bounds__({threads}" in text
    # products with the left operand in shared memory, and with it in tensor memory
    assert text.count("tl::tcgen05mma_ss<") == shared
    assert text.count("tl::tcgen05mma_ts<") == tensor
    assert "mma_sync" not in text
    assert text.count("tl::tma_load(") == 3


@each_variant
def test_the_functions_of_a_kernel_are_those_of_its_variant(variant: str) -> None:
    kernel = KERNELS[variant]
    for heads, grouped in ((2, False), (4, True)):
        problem = replace(PROBLEM, heads=heads)
        config = kernel.configs(problem)[0]
        functions = kernel.functions(problem, config, "cuda")
        operands = "ss" if variant == "ss" else "ts"
        assert [each.factory for each in functions.values()] == [
            f"forward_{variant}", "preprocess", f"backward_{operands}", "postprocess",
        ]  # fmt: skip
        assert functions["backward"].options["grouped"] is grouped
        assert kernel.compile_key(problem, config).endswith(f"grouped={grouped}")
        assert kernel.supports(problem, config, "cpu") is None


@each_variant
def test_all_dims_have_a_config(variant: str) -> None:
    kernel = KERNELS[variant]
    for dim_qk, dim_v in kernel.capabilities.dims:
        problem = replace(PROBLEM, dim_qk=dim_qk, dim_v=dim_v)
        assert kernel.configs(problem), (dim_qk, dim_v)
    assert not kernel.configs(replace(PROBLEM, dim_qk=96, dim_v=96))


def test_tensor_memory_is_freed_only_when_all_warps_are_done_with_it() -> None:
    for variant in VARIANTS.values():
        text = source(variant.forward)
        allocated = re.findall(r"tmem_allocate\(\(&\((\w+)\[0\]\)\), (\d+)\)", text)
        assert allocated == re.findall(r"tmem_deallocate\(\(&\((\w+)\[0\]\)\), (\d+)\)", text)
        assert sum(int(columns) for _, columns in allocated) <= 512
        behind = text[text.rindex("tcgen05_ld_") : text.index("tmem_deallocate")]
        assert "__syncthreads" in behind


def test_every_stage_of_wasp_is_primed_before_the_roles_wait() -> None:
    text = source("forward_wasp")
    for name in ("s_free", "k_free", "v_free"):
        stages = re.findall(rf"{name}\[(\d)\]\.init\(", text)
        (loop,) = re.findall(rf"for \(int (\w+) = 0; \1 < (\d); \+\+\1\) \{{[^}}]*{name}\[\1\]\.arrive\(\)", text)
        assert [int(loop[1])] * 2 == [len(stages), sm100_forward_device.STAGES], name


def test_no_block_of_wasp_ends_before_all_products_have_arrived_at_their_barriers() -> None:
    text = source("forward_wasp")
    products = set(re.findall(r"tcgen05_mma_arrive\(\(&\((\w+)\[", text))
    assert products == {"s_full", "o_full", "k_free", "v_free"}
    behind_copies = text[text.rindex("v_full[", 0, text.index("q_full[0].wait")) : text.index("q_full[0].wait")]
    loop = behind_copies[behind_copies.index("for (int unused") :]
    assert [name for name in sorted(products) if f"{name}[(unused & 1)].wait(" in loop] == ["k_free", "v_free"]
    # each thread of the softmax has waited for the last S and O
    softmax = text[: text.index("q_full[0].expect_transaction")]
    assert softmax.count("o_full[0].wait(") == 2
    assert softmax.count("s_full[(step & 1)].wait(") == 1


# where they run


@each_variant
@pytest.mark.parametrize(
    ("capability", "reason"),
    [(None, "needs an sm_100 GPU: torch sees no CUDA device"), ((9, 0), "needs an sm_100 GPU, and this one is sm_90"),
     ((12, 0), "needs an sm_100 GPU, and this one is sm_120"), ((10, 0), None)],
)  # fmt: skip
def test_the_gpu_that_they_need(
    monkeypatch: pytest.MonkeyPatch, variant: str, capability: tuple[int, int] | None, reason: str | None
) -> None:
    monkeypatch.setattr(subject, "unavailable", lambda _: "torch sees no CUDA device" if capability is None else None)
    monkeypatch.setattr(sm100, "gpu_capability", lambda: capability)
    assert KERNELS[variant].unavailable("cuda") == reason
    assert KERNELS[variant].capabilities.architectures == ("sm_100a",)


def without_roles(monkeypatch: pytest.MonkeyPatch, broken: str = "forward_wasp") -> list[str]:
    """Let the compile of one function fail; return the list to which each kernel's forward is added."""
    forwards: list[str] = []

    def compiled(self: Sm100, *arguments: Any) -> dict[str, Any]:
        functions = self.functions(*arguments)
        forwards.append(functions["forward"].factory)
        if any(each.factory == broken for each in functions.values()):
            raise BuildError("no layout\nat line 1")
        return dict.fromkeys(functions)

    monkeypatch.setattr(subject.TileLangKernel, "compiled", compiled)
    return forwards


def test_wasp_is_replaced_by_ts_only_where_it_cannot_be_built_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    config = WASP.configs(PROBLEM)[0]
    forwards = without_roles(monkeypatch)
    with pytest.warns(RuntimeWarning, match=r"wasp: forward_wasp cannot be built \(no layout\); forward_ts runs instead"):
        WASP.build_any(PROBLEM, config, "cuda")
    assert forwards == ["forward_wasp", "forward_ts"]
    with pytest.raises(BuildError, match="no layout"):
        WASP.build_any(PROBLEM, config, "cpu")


def test_no_other_error_changes_the_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    config = WASP.configs(PROBLEM)[0]
    forwards = without_roles(monkeypatch, broken="backward_ts")
    with pytest.raises(BuildError, match="no layout"):
        WASP.build_any(PROBLEM, config, "cuda")
    assert "forward_ss" not in forwards
    forwards = without_roles(monkeypatch, broken="nothing")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        WASP.build_any(PROBLEM, config, "cuda")
    assert forwards == ["forward_wasp"]


@each_variant
def test_other_variants_have_no_replacement(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    assert (VARIANTS[variant].instead is None) == (variant != "wasp")
    if variant != "wasp":
        without_roles(monkeypatch, broken=f"forward_{variant}")
        with pytest.raises(BuildError, match="no layout"):
            KERNELS[variant].build_any(PROBLEM, KERNELS[variant].configs(PROBLEM)[0], "cuda")


# values


def case_of(kernel: Sm100, problem: Problem, number: int = 0, **recipe: Any) -> Case:
    """A Case of `problem` in the kernel's Config of that number."""
    return Case(kernel=kernel.name, problem=problem, recipe=Recipe(**recipe), config=kernel.configs(problem)[number])


SLOW = pytest.mark.slow


@needs_compiler
@each_variant
@pytest.mark.parametrize(
    ("number", "changes"),
    [
        (1, {"causal": "bottom_right", "heads": 6}),
        pytest.param(0, {"causal": "bottom_right", "seqlens_k": (31, 31), "softmax_scale": -0.3}, marks=SLOW),
        pytest.param(0, {"softmax_scale": 0.0, "heads": 2, "dtype": "bfloat16", "slack_q": 3, "slack_k": 2}, marks=SLOW),
        pytest.param(0, {"seqlens_k": (0, 0), "slack_k": 1}, marks=SLOW),
        pytest.param(0, {"seqlens_q": (0, 0), "slack_q": 1}, marks=SLOW),
        pytest.param(1, {"layout_q": Layout(order="bhsd", offset=3), "layout_do": Layout(expanded=True)}, marks=SLOW),
        pytest.param(0, {"dim_qk": 32, "dim_v": 32, "seqlens_q": (1, 1), "seqlens_k": (257, 257)}, marks=SLOW),
        pytest.param(0, {"dim_qk": 128, "dim_v": 128, "causal": "bottom_right", "dtype": "bfloat16"}, marks=SLOW),
    ],
    ids=str,
)
def test_outputs_are_those_of_the_definition(variant: str, number: int, changes: dict[str, Any]) -> None:
    verdict = run_trial(case_of(KERNELS[variant], replace(PROBLEM, **changes), number), "cpu")
    assert verdict.status == "pass", [each.message for each in verdict.failures]


FAULTS = {
    "mask": (Edit("key_0 + j <= row_0 + i + offset,", "key_0 + j < row_0 + i + offset,"), "o"),
    "rescale": (Edit("acc[i, d] = acc[i, d] * rescale[i]", "acc[i, d] = acc[i, d]"), "o"),
    "LSE": (Edit("m[i] * exponent + T.log(total[i])", "m[i] * exponent + T.log2(total[i])"), "lse"),
}
"""Planted in the forward, and the output that shows each."""


@pytest.fixture
def planted() -> Iterator[Any]:
    """Make a kernel with an edited forward, known in this process until the test ends."""
    names: list[str] = []

    def plant(variant: str, edit: Edit) -> Sm100:
        kernel = Sm100(f"tilelang.planted.{variant}", variant, functools.partial(planted_copy, DEVICE, [edit]))
        names.append(registry.register(kernel).name)
        return kernel

    yield plant
    for name in names:
        registry.unregister(name)


@needs_compiler
@pytest.mark.parametrize(
    ("variant", "fault"),
    [
        pytest.param(
            variant, fault, marks=() if (variant, fault) in {("ss", "mask"), ("ts", "LSE"), ("wasp", "rescale")} else SLOW
        )
        for variant in KERNELS
        for fault in FAULTS
    ],
)
def test_a_fault_in_the_forward_is_found(planted: Any, variant: str, fault: str) -> None:
    edit, output = FAULTS[fault]
    kernel = planted(variant, edit)
    problem = replace(PROBLEM, causal="bottom_right", dim_v=64)
    verdict = run_trial(case_of(kernel, problem), "cpu")
    assert {each.identity.output for each in verdict.failures} & {output}, verdict
