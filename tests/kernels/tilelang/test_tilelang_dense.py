"""The dense TileLang kernels: what they lower to for sm_90a, which strides they read as they are, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tilelang")
torch = pytest.importorskip("torch")

import tilelang  # noqa: E402
from msgspec.structs import replace  # noqa: E402
from tvm.ir.transform import PassContext  # noqa: E402
from tvm.target import Target  # noqa: E402

from attnfuzz.harness.core.clock import Clock  # noqa: E402
from attnfuzz.harness.trial.bench import Bench  # noqa: E402
from attnfuzz.harness.trial.trial import run_trial  # noqa: E402
from attnfuzz.kernels import registry  # noqa: E402
from attnfuzz.kernels.contract import Config  # noqa: E402
from attnfuzz.kernels.problem import Layout, Problem  # noqa: E402
from attnfuzz.kernels.tilelang import dense, dense_device  # noqa: E402
from attnfuzz.kernels.tilelang.build import cuda_passes  # noqa: E402
from attnfuzz.kernels.tilelang.dense import GQA_ATOMIC, GQA_SPLIT, MHA, MHA_PIPELINED  # noqa: E402
from attnfuzz.kernels.tilelang.hopper import CONFIGS  # noqa: E402
from attnfuzz.strategies.case import Case, Recipe  # noqa: E402

DENSE = (MHA, GQA_ATOMIC, GQA_SPLIT)
SMALL = CONFIGS[-1]
PROBLEM = Problem(seqlens_q=(45, 45), seqlens_k=(70, 70), packing="dense", dim_qk=64, dim_v=64, heads=4, kv_heads=2)
FORM = {"dim_qk": 128, "dim_v": 128, "dtype": "float16", "causal": True, "strided": True}


def source(factory: str, **options: Any) -> str:
    """The CUDA source that a function of the device code lowers to for sm_90a; no GPU is needed."""
    target = Target({"kind": "cuda", "arch": "sm_90a"})
    with target, PassContext(config=cuda_passes(dense_device, options)):
        return tilelang.lower(getattr(dense_device, factory)(**options), target=target).kernel_source


def test_the_forward_uses_the_tensor_memory_accelerator_and_warpgroup_products() -> None:
    text = source("forward", **FORM, tile_m=128, tile_n=128, threads=256, stages=1)
    assert text.count("tma_load") >= 3
    assert "tma_store" in text
    assert "wgmma" in text
    assert "mma_sync" not in text


@pytest.mark.slow
@pytest.mark.parametrize("tile", [32, 64])
def test_blocks_of_less_than_a_warpgroup_load_for_themselves(tile: int) -> None:
    text = source("forward", **FORM, tile_m=tile, tile_n=tile, threads=128, stages=1)
    # A warpgroup set apart for loading waits at barriers that it may miss: tests/kernels/tilelang/test_tilelang_hangs.py.
    assert ("mbarrier" in text) == (tile == 64)
    assert f"__launch_bounds__({2 * tile + 128 * (tile == 64)}" in text


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["none", "atomic", "split"])
def test_the_backward_uses_them_as_well(reduction: str) -> None:
    text = source("backward", **FORM, tile_m=64, tile_n=128, threads=256, stages=1, reduction=reduction, pipelined=False)
    assert text.count("tma_load") >= 6
    assert "wgmma" in text
    assert "mma_sync" not in text
    # dQ, and the groups' dK and dV
    assert text.count("tma_store_add") == (3 if reduction == "atomic" else 1)


@pytest.mark.slow
def test_the_pipelined_backward_gives_tiles_back_behind_its_last_wait() -> None:
    text = source("backward", **FORM, tile_m=64, tile_n=128, threads=256, stages=2, reduction="none", pipelined=True)
    assert text.count("wait_wgmma<1>") == 2
    loop = text[: text.index("wait_wgmma<0>")]
    behind = text[len(loop) :]
    given_back = [line for line in text.splitlines() if line.strip().startswith("mbarrier[") and line.endswith(".arrive();")]
    # LSE and Delta, which are read at once, before; q and dO after.
    assert [line in behind for line in given_back] == [False, False, True, True]


@pytest.mark.parametrize(
    "changes",
    [
        {"causal": "bottom_right", "seqlens_k": (31, 31)},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"causal": "top_left", "dtype": "bfloat16", "slack_q": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_pipelined_backward_is_right(changes: dict) -> None:
    problem = replace(PROBLEM, heads=2, **changes)
    for config in MHA_PIPELINED.configs(problem)[-1:]:
        case = Case(kernel=MHA_PIPELINED.name, problem=problem, recipe=Recipe(), config=config)
        verdict = run_trial(case, "cpu")
        assert verdict.status == "pass", [each.message for each in verdict.failures]
    assert "dtype=" in (MHA_PIPELINED.supports(replace(problem, dtype="float32"), SMALL, "cpu") or "")
    assert "config=" in (MHA_PIPELINED.supports(problem, SMALL, "cpu") or "")


@pytest.mark.parametrize(
    "kernel",
    [pytest.param(MHA, marks=pytest.mark.slow), pytest.param(GQA_ATOMIC, marks=pytest.mark.slow), GQA_SPLIT],
    ids=lambda kernel: kernel.name,
)
@pytest.mark.parametrize(
    "changes",
    [
        {"causal": "top_left", "slack_q": 3, "slack_k": 2},
        {"causal": "bottom_right", "seqlens_k": (31, 31), "softmax_scale": -0.3},
        {"softmax_scale": 0.0, "causal": "bottom_right"},
        {"seqlens_k": (0, 0), "slack_k": 1},
        {"seqlens_q": (0, 0), "slack_q": 1},
        {"layout_q": Layout(order="bhsd", offset=3), "layout_v": Layout(expanded_heads=True), "layout_do": Layout(expanded=True)},
        {"layout_k": Layout(packed=True, pitch=5), "layout_v": Layout(packed=True, pitch=5), "slack_q": 1},
    ],
    ids=str,
)
def test_masks_scales_empty_sides_and_layouts(kernel: dense.TileLangDense, changes: dict) -> None:
    problem = replace(PROBLEM, **changes, **({"heads": 2} if kernel is MHA else {}))
    verdict = run_trial(Case(kernel=kernel.name, problem=problem, recipe=Recipe(), config=SMALL), "cpu")
    assert verdict.status == "pass", [each.message for each in verdict.failures]


def test_shares_are_summed_in_single_precision_whatever_the_groups() -> None:
    problem = replace(PROBLEM, heads=16, kv_heads=1, seqlens_q=(33, 33))
    outputs = []
    for kernel in (GQA_ATOMIC, GQA_SPLIT):
        bench = Bench(Case(kernel=kernel.name, problem=problem, recipe=Recipe(), config=SMALL), kernel, "cpu", Clock())
        outputs.append(bench.launch(bench.ready(), bench.inputs()))
    for name in ("dk", "dv"):
        one, other = (getattr(each, name) for each in outputs)
        # On the CPU atomics come in the order of the heads, as the sum does.
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_which_strides_are_read_as_they_are() -> None:
    x = torch.zeros(2, 40, 3, 64, dtype=torch.float16)
    for fitting in (x, x[:, :33], x.transpose(1, 2).contiguous().transpose(1, 2), x[..., :32]):
        assert dense._by_strides(fitting)
    odd = torch.zeros(2 * 40 * 3 * 65, dtype=torch.float16)
    for other in (
        x.transpose(2, 3),
        x[:, :, :1].expand(-1, -1, 3, -1),
        odd.view(2, 40, 3, 65)[..., :64],
        odd[1 : x.numel() + 1].view(x.shape),
    ):
        assert not dense._by_strides(other)


def test_configs_fit_the_shared_memory() -> None:
    wide = replace(PROBLEM, dim_qk=192, dim_v=128, heads=2)
    single = replace(wide, dtype="float32")
    for problem, large in ((PROBLEM, ()), (wide, CONFIGS[:1]), (single, CONFIGS[:3])):
        assert not set(large) & set(MHA.configs(problem))
        assert set(CONFIGS) - set(large) <= set(MHA.configs(problem))
        assert all("config=" in (MHA.supports(replace(problem, kv_heads=problem.heads), each, "cpu") or "") for each in large)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"packing": "ragged"}, "packing='ragged'"),
        ({"dim_qk": 40, "dim_v": 40}, "dim_qk, dim_v=(40, 40)"),
        ({"window": (3, 0)}, "window="),
    ],
)
def test_what_is_refused(changes: dict, reason: str) -> None:
    message = GQA_SPLIT.supports(replace(PROBLEM, **changes), SMALL, "cpu")
    assert message is not None
    assert reason in message
    assert "groups=2" in (MHA.supports(PROBLEM, SMALL, "cpu") or "")
    assert "config=" in (GQA_SPLIT.supports(PROBLEM, Config(tile_m=7), "cpu") or "")


def test_they_are_listed() -> None:
    assert {each.name for each in DENSE} <= set(registry.names())
