"""The Blackwell backward: what it lowers to, that gradients are right and products waited for, and faults planted in it."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("tilelang")
pytest.importorskip("torch")

import tilelang
import torch
from msgspec.structs import replace
from tvm.ir.transform import PassContext
from tvm.target import Target

from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.faults.planted import Edit, planted_copy
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support.protocol import ProtocolFault
from attnfuzz.kernels.tilelang import sm100_backward_device as device
from attnfuzz.kernels.tilelang.build import compiled, cuda_passes, unavailable
from attnfuzz.kernels.tilelang.roles import executor
from attnfuzz.kernels.tilelang.sm100 import Sm100
from attnfuzz.kernels.tilelang.sm100_tiles import LANES, TENSOR_COLUMNS, fits, shared_bytes, tensor_columns
from attnfuzz.strategies.case import Case, Recipe

needs_compiler = pytest.mark.skipif(unavailable("cpu") is not None, reason=str(unavailable("cpu")))
SLOW = pytest.mark.slow
VARIANTS = ("ss", "ts")
each_variant = pytest.mark.parametrize("operands", VARIANTS)
THREADS = {"ss": 128, "ts": 256}
SIZES = {"tile_m": 64, "tile_n": 128, "dim_qk": 64, "dim_v": 64}
PROBLEM = Problem(
    seqlens_q=(150, 150), seqlens_k=(130, 130), packing="dense", dim_qk=64, dim_v=64, heads=2, kv_heads=1, causal="bottom_right"
)


def options(operands: str, **changes: Any) -> dict[str, Any]:
    form = {"dtype": "float16", "causal": True, "threads": THREADS[operands], "grouped": True, "strided": True}
    return {**SIZES, **form, **changes}


@functools.cache
def source(operands: str, *edits: Edit, grouped: bool = True, **sizes: int) -> str:
    """The CUDA source for sm_100a, of the device code with `edits`; neither nvcc nor a GPU is needed."""
    module = planted_copy(device.__name__, edits) if edits else device
    form = options(operands, grouped=grouped, **sizes)
    target = Target({"kind": "cuda", "arch": "sm_100a"})
    with target, PassContext(config=cuda_passes(module, form)):
        return str(tilelang.lower(getattr(module, f"backward_{operands}")(**form), target=target).kernel_source)


# what it lowers to


@pytest.mark.parametrize(("operands", "shared", "tensor"), [("ss", 5, 0), ("ts", 3, 2)])
def test_each_variant_takes_operands_from_where_its_name_says(operands: str, shared: int, tensor: int) -> None:
    text = source(operands)
    assert len(re.findall(r"tl::tcgen05mma_(?:ws_)?ss<", text)) == shared
    assert len(re.findall(r"tl::tcgen05mma_(?:ws_)?ts<", text)) == tensor
    assert "mma_sync" not in text
    assert f"__launch_bounds__({THREADS[operands]}" in text
    assert text.count("tl::tma_load(") == 4
    # each product completes on an mbarrier of its own, for which all threads wait with the parity of the step
    barriers = re.findall(r"tcgen05_mma_arrive\(\(&\((\w+)\[0\]\)\)\)", text)
    assert sorted(barriers) == ["dk_done", "dp_done", "dq_done", "dv_done", "s_done"]
    assert all(f"{each}[0].wait((step & 1));" in text for each in (*barriers, "q_full"))


@pytest.mark.parametrize(
    ("operands", "grouped"),
    [
        pytest.param("ss", True, marks=pytest.mark.slow),
        ("ts", True),
        ("ts", False),
        pytest.param("ss", False, marks=pytest.mark.slow),
    ],
)
def test_query_heads_that_share_a_key_head_add_to_it_and_others_store(operands: str, grouped: bool) -> None:
    text = source(operands, grouped=grouped)
    # dQ is always added to, by the blocks of all key tiles
    assert text.count("tl::tma_store_add(dQ_desc") == 1
    for name in ("dK", "dV"):
        assert (text.count(f"tl::tma_store_add({name}_desc"), text.count(f"tl::tma_store({name}_desc")) == (grouped, not grouped)


def regions(text: str) -> dict[str, int]:
    """Where each tile begins in a block's shared memory."""
    return {name: int(at) for name, at in re.findall(r"void\* (\w+) = \(\(void\*\)\(\(char\*\)buf_dyn_shmem \+ (\d+)\)\);", text)}


@each_variant
def test_no_tile_of_the_loop_lies_in_another_ones_memory(operands: str) -> None:
    begins = regions(source(operands))
    m, n, qk, v = 64, 128, 64, 64
    sizes = {"k_tile": 2 * n * qk, "v_tile": 2 * n * v, "q_tile": 2 * m * qk, "do_tile": 2 * m * v, "ds_tile": 2 * m * n}
    sizes |= {"dq_tile": 4 * m * qk, "lse2": 4 * m, "delta": 4 * m} | ({"p_tile": 2 * m * n} if operands == "ss" else {})
    assert sizes.keys() == begins.keys() - {"dk_tile", "dv_tile"}
    # TileLang knows when statements use a tile, not how long products that they start read it
    spans = sorted((begins[name], begins[name] + size) for name, size in sizes.items())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= shared_bytes(operands, **SIZES)


UNPUBLISHED = re.compile(r"^\s*\*\(\w+\*\)\(\(\(\w+\*\)\w+_tile\)|tl::tcgen05_st_")


def unordered(text: str) -> int:
    """Count products and copies before which stores are not fenced by the threads that store, and these not synchronised."""
    state, count = "published", 0
    for line in text.splitlines():
        if UNPUBLISHED.search(line):
            state = "stored"
        elif re.match(r" {2,4}tl::fence_proxy_async\(\);", line) and state == "stored":
            state = "fenced"
        elif "__syncthreads();" in line and state == "fenced":
            state = "published"
        elif "tl::tcgen05mma_" in line or "tl::tma_store(" in line or "tl::tma_store_add(" in line:
            count += state != "published"
    return count


@pytest.mark.parametrize("operands", [pytest.param("ss", marks=pytest.mark.slow), "ts"])
def test_stores_reach_the_products_and_copies_that_another_thread_starts(operands: str) -> None:
    assert unordered(source(operands)) == unordered(source(operands, grouped=False)) == 0


PUBLISH = "                _publish()\n                "
UNORDERED = {
    "no fence": Edit("        T.fence_proxy_async()\n", ""),
    "before a product": Edit(f"{PUBLISH}T.tcgen05_gemm(p_tile", "                T.tcgen05_gemm(p_tile"),
    "before a copy": Edit(f"{PUBLISH}T.atomic_add(dQ", "                T.atomic_add(dQ"),
}


@pytest.mark.parametrize(
    ("operands", "edit"),
    [
        pytest.param(operands, edit, marks=() if (operands, edit) in {("ts", "no fence"), ("ts", "before a copy")} else SLOW)
        for operands in VARIANTS
        for edit in UNORDERED
    ],
)
def test_stores_that_do_not_reach_them_are_noticed(operands: str, edit: str) -> None:
    assert unordered(source(operands, UNORDERED[edit])) > 0


@each_variant
def test_tensor_memory_within_the_bound_is_allocated_and_freed(operands: str) -> None:
    text = source(operands)
    allocated = re.findall(r"tmem_allocate\(\(&\((\w+)\[0\]\)\), (\d+)\)", text)
    assert allocated == re.findall(r"tmem_deallocate\(\(&\((\w+)\[0\]\)\), (\d+)\)", text)
    assert sum(int(columns) for _, columns in allocated) == tensor_columns(operands, **SIZES)
    assert "__syncthreads" in text[text.rindex("tcgen05_ld_") : text.index("tmem_deallocate")]


def all_sizes() -> Iterator[dict[str, int]]:
    for dim_qk, dim_v in ((32, 32), (64, 64), (128, 128), (64, 48), (48, 80), (96, 96), (192, 128)):
        for tile_m, tile_n in ((64, 128), (128, 128), (32, 128), (64, 64)):
            yield {"tile_m": tile_m, "tile_n": tile_n, "dim_qk": dim_qk, "dim_v": dim_v}


def test_which_tiles_fit() -> None:
    chosen = {operands: [tuple(each.values()) for each in all_sizes() if fits(operands, **each)] for operands in VARIANTS}
    assert len(chosen["ss"]) == 14
    assert len(chosen["ts"]) == 7
    assert (64, 128, 128, 128) in chosen["ts"]
    # too many columns; dQ has no product of 64 rows and 96 columns; P in tensor memory has all rows
    assert not fits("ss", tile_m=128, tile_n=128, dim_qk=128, dim_v=128)
    assert not fits("ss", tile_m=64, tile_n=128, dim_qk=96, dim_v=96)
    assert not fits("ts", tile_m=64, tile_n=64, dim_qk=64, dim_v=64)
    assert LANES == 128
    assert all(tensor_columns("ss", **each) <= TENSOR_COLUMNS for each in all_sizes() if fits("ss", **each))


@pytest.mark.slow
@each_variant
def test_what_fits_is_what_lowers(operands: str) -> None:
    for each in all_sizes():
        try:
            text = source(operands, **each)
        except Exception:  # TileLang raises unrelated types
            assert not fits(operands, **each), each
        else:
            assert fits(operands, **each), each
            columns = sum(map(int, re.findall(r"tmem_allocate\(.*, (\d+)\);", text)))
            assert columns <= tensor_columns(operands, **each)


# values


def case_of(kernel: Sm100, problem: Problem, tile_m: int = 64) -> Case:
    """A Case in the kernel's first Config with such a backward tile."""
    config = next(each for each in kernel.configs(problem) if each["back_tile_m"] == tile_m)
    return Case(kernel=kernel.name, problem=problem, recipe=Recipe(), config=config)


def lengths(n_q: int, n_k: int) -> dict[str, Any]:
    return {"seqlens_q": (n_q,) * 2, "seqlens_k": (n_k,) * 2}


@needs_compiler
@each_variant
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=SLOW)])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"causal": None, "heads": 3, **lengths(64, 128)}, marks=SLOW),
        pytest.param({"heads": 3, "kv_heads": 3, **lengths(45, 270)}, marks=SLOW),
        pytest.param({"heads": 6, "kv_heads": 2, **lengths(129, 1)}, marks=SLOW),
        pytest.param({"heads": 1, **lengths(1, 257)}, marks=SLOW),
        pytest.param({"heads": 1, "causal": None, "softmax_scale": -0.3, **lengths(65, 127)}, marks=SLOW),
        pytest.param({"dim_qk": 128, "dim_v": 128, "softmax_scale": 0.0}, marks=SLOW),
        pytest.param({"dim_v": 48, **lengths(200, 390)}, marks=SLOW),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_definition(operands: str, dtype: str, changes: dict[str, Any]) -> None:
    kernel = registry.get(f"tilelang.sm100.{operands}")
    assert isinstance(kernel, Sm100)
    problem = replace(PROBLEM, dtype=dtype, **changes)
    verdict = run_trial(case_of(kernel, problem), "cpu")
    assert verdict.status == "pass", [each.message for each in verdict.failures]
    assert {"dq", "dk", "dv"} <= verdict.figures.keys()


@needs_compiler
def test_preprocess_and_postprocess_write_rows_of_any_count() -> None:
    torch.manual_seed(0)
    o, d_o = (torch.randn(2, 37, 3, 48).half() for _ in range(2))
    lse = torch.randn(2, 3, 37)
    lse[0, 1, 5] = -torch.inf
    delta, lse2 = torch.full_like(lse, torch.nan), torch.full_like(lse, torch.nan)
    compiled(device, "preprocess", {"dim_v": 48, "dtype": "float16", "strided": False}, "cpu")(o, d_o, lse, delta, lse2)
    expected = (o.double() * d_o.double()).sum(-1).transpose(1, 2)
    assert (delta - expected).abs().max() < 1e-4
    assert lse2[0, 1, 5] == torch.inf
    lse[0, 1, 5] = lse2[0, 1, 5] = 0.0
    assert torch.allclose(lse2, lse * device.LOG2_E)
    total, out = torch.randn(2, 37, 3, 48), torch.full_like(o, torch.nan)
    compiled(device, "postprocess", {"dim": 48, "dtype": "float16", "strided": False}, "cpu")(total, 0.25, out)
    assert torch.equal(out, (total * 0.25).half())


FAULTS = {
    "no Delta": (Edit("p[j, i] * (ds[j, i] - delta[i])", "p[j, i] * ds[j, i]"), "dq"),
    "mask by one": (Edit("key_0 + j <= row_0 + i + offset", "key_0 + j < row_0 + i + offset"), "dv"),
    "mask without offset": (Edit("key_0 + j <= row_0 + i + offset", "key_0 + j <= row_0 + i"), "dk"),
    "a tile less": (
        Edit("T.serial(T.ceildiv(n_q, tile_m) - begin)", "T.serial(T.max(1, T.ceildiv(n_q, tile_m) - begin - 1))"),
        "dk",
    ),
    "scale twice": (Edit("dk[j, d] = dk[j, d] * scale", "dk[j, d] = dk[j, d] * scale * scale"), "dk"),
    "no scale": (Edit("dk[j, d] = dk[j, d] * scale", "dk[j, d] = dk[j, d]"), "dk"),
    "last tile only": (Edit("dv_acc, clear_accum=step == 0", "dv_acc, clear_accum=True"), "dv"),
    "base e": (Edit("scale_log2 = exponent * LOG2_E", "scale_log2 = exponent"), "dv"),
    "another head's keys": (Edit("kv_head = head // groups", "kv_head = 0"), "dk"),
}
"""Planted in the backward, and an output that shows each."""


@pytest.fixture
def planted() -> Iterator[Any]:
    """Make a kernel with an edited backward, known in this process until the test ends."""
    names: list[str] = []

    def plant(operands: str, edit: Edit) -> Sm100:
        copy = functools.partial(planted_copy, device.__name__, [edit])
        kernel = Sm100(f"tilelang.planted.{operands}", operands, backward_code=copy)
        names.append(registry.register(kernel).name)
        return kernel

    yield plant
    for name in names:
        registry.unregister(name)


@needs_compiler
@pytest.mark.parametrize(
    ("operands", "fault"),
    [
        pytest.param(operands, fault, marks=() if (operands, fault) in {("ss", "no Delta"), ("ts", "a tile less")} else SLOW)
        for operands in VARIANTS
        for fault in FAULTS
    ],
)
def test_a_fault_in_the_backward_is_found(planted: Any, operands: str, fault: str) -> None:
    edit, output = FAULTS[fault]
    problem = replace(PROBLEM, heads=4, kv_heads=2, **lengths(200, 230))
    verdict = run_trial(case_of(planted(operands, edit), problem), "cpu")
    assert output in {each.identity.output for each in verdict.failures}, verdict
    assert not {"o", "lse"} & {each.identity.output for each in verdict.failures}


@needs_compiler
@each_variant
@pytest.mark.parametrize("masked", [True, pytest.param(False, marks=SLOW)])
def test_keys_beyond_the_end_stay_out_however_low_the_scores(operands: str, masked: bool) -> None:
    # a key of zeros has the score 0; where all others have -512, its P would be infinite, and its share NaN
    edit = Edit("T.if_then_else(key_0 + j < n_k, p[j, i], -T.infinity(ACC))", "p[j, i]")
    module = device if masked else planted_copy(device.__name__, [edit])
    form = options(operands, causal=False, grouped=False, strided=False)
    q, k = torch.full((1, 3, 1, 64), -8.0).half(), torch.full((1, 5, 1, 64), 8.0).half()
    d_o, v = torch.ones_like(q), torch.ones_like(k)
    lse2 = torch.full((1, 1, 3), -512 * device.LOG2_E + math.log2(5))
    dq, dk, dv = torch.zeros(1, 3, 1, 64), torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
    launch = compiled(module, f"backward_{operands}", form, "cpu")
    launch(q, k, v, d_o, lse2, torch.full_like(lse2, 60.0), 1, 0, 0.125, 0.125, dq, dk, dv)
    assert dq.isfinite().all() == masked
    assert dk.isfinite().all()
    assert torch.allclose(dv.float(), torch.tensor(3 / 5), atol=1e-3)


# waits


def run_roles(operands: str, edits: tuple[Edit, ...] = (), schedule: tuple[int, ...] = ()) -> None:
    """Run the backward as roles, two key tiles and three query tiles."""
    torch.manual_seed(0)
    module = planted_copy(device.__name__, edits) if edits else device
    form = options(operands)
    func = getattr(module, f"backward_{operands}")(**form)
    q, d_o = (torch.randn(1, 150, 2, 64).half() for _ in range(2))
    k, v = (torch.randn(1, 130, 1, 64).half() for _ in range(2))
    rows = [torch.randn(1, 2, 150) for _ in range(2)]
    sums = [torch.zeros(1, n, heads, 64) for n, heads in ((150, 2), (130, 1), (130, 1))]
    executor.run(func, (q, k, v, d_o, *rows, 2, -20, 0.125, 0.125, *sums), schedule, cuda_passes(module, form))


SCHEDULES = ((), (1, 2, 3, 1, 1), tuple(range(7)) * 5, (5, 0, 3) * 11)


@each_variant
@pytest.mark.parametrize("schedule", SCHEDULES, ids=range(len(SCHEDULES)))
def test_every_product_and_copy_is_waited_for(operands: str, schedule: tuple[int, ...]) -> None:
    run_roles(operands, schedule=schedule)


WAITS = {
    "S is read before it is there": (Edit("                _wait(s_done, step)\n", ""), "early-read", "s_done"),
    "dP is read before it is there": (Edit("                _wait(dp_done, step)\n", ""), "early-read", "dp_done"),
    "dQ is read before it is there": (Edit("                _wait(dq_done, step)\n", ""), "early-read", "dq_done"),
    "Q has not come": (Edit("                T.mbarrier_wait_parity(q_full, step % 2)\n", ""), "early-read", "q_full"),
    "K has not come": (Edit("            T.mbarrier_wait_parity(kv_full, 0)\n", ""), "early-read", "kv_full"),
    "the other phase": (Edit("_wait_parity(done, step % 2)", "_wait_parity(done, (step + 1) % 2)"), "wrong-phase", "s_done"),
    "the first phase always": (Edit("_wait_parity(done, step % 2)", "_wait_parity(done, 0)"), "wrong-phase", "s_done"),
    "an old phase of Q": (Edit("_wait_parity(q_full, step % 2)", "_wait_parity(q_full, 0)"), "wrong-phase", "q_full"),
    "nobody arrives": (Edit("                T.mbarrier_arrive(q_full)\n", ""), "deadlock", "q_full"),
}


@each_variant
@pytest.mark.parametrize("fault", WAITS)
def test_a_lost_wait_is_found(operands: str, fault: str) -> None:
    edit, kind, barrier = WAITS[fault]
    with pytest.raises(ProtocolFault) as found:
        run_roles(operands, (edit,))
    assert (found.value.kind, found.value.barrier) == (kind, barrier)
