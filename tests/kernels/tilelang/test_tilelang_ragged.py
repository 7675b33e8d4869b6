"""The ragged TileLang kernels for Hopper: what they lower to for sm_90a, lengths of every kind, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tilelang")
torch = pytest.importorskip("torch")

import tilelang  # noqa: E402
from msgspec.structs import replace  # noqa: E402
from tvm.ir.transform import PassContext  # noqa: E402
from tvm.target import Target  # noqa: E402

from attnfuzz.harness.trial.trial import run_trial  # noqa: E402
from attnfuzz.kernels import registry  # noqa: E402
from attnfuzz.kernels.problem import Problem  # noqa: E402
from attnfuzz.kernels.tilelang import ragged_device  # noqa: E402
from attnfuzz.kernels.tilelang.build import cuda_passes  # noqa: E402
from attnfuzz.kernels.tilelang.hopper import CONFIGS  # noqa: E402
from attnfuzz.kernels.tilelang.ragged import ATOMIC, SPLIT, TileLangRagged  # noqa: E402
from attnfuzz.strategies.case import Case, Recipe  # noqa: E402

RAGGED = (ATOMIC, SPLIT)
SMALL = CONFIGS[-1]
PROBLEM = Problem(seqlens_q=(45, 0, 7, 64), seqlens_k=(70, 3, 9, 64), dim_qk=64, dim_v=64, heads=6, kv_heads=2)
FORM = {"dim_qk": 128, "dim_v": 128, "dtype": "float16", "causal": True, "threads": 256, "stages": 1}


def source(factory: str, **options: Any) -> str:
    """The CUDA source that a function of the device code lowers to for sm_90a; no GPU is needed."""
    target = Target({"kind": "cuda", "arch": "sm_90a"})
    with target, PassContext(config=cuda_passes(ragged_device, options)):
        return tilelang.lower(getattr(ragged_device, factory)(**options), target=target).kernel_source


@pytest.mark.slow
def test_whole_tiles_go_through_the_tensor_memory_accelerator() -> None:
    text = source("backward", **FORM, tile_m=64, tile_n=128, reduction="atomic")
    assert text.count("tma_load") >= 6
    assert text.count("tma_store_add") == 3
    assert "wgmma" in text
    assert "mma_sync" not in text


@pytest.mark.slow
def test_small_tiles_of_a_causal_backward_lower_with_registers_moved() -> None:
    text = source("backward", **{**FORM, "dim_qk": 64, "dim_v": 64, "threads": 128}, tile_m=64, tile_n=64, reduction="split")
    assert "wgmma" in text
    assert "warpgroup_reg_dealloc<24>" in text
    assert "warpgroup_reg_alloc<240>" in text


@pytest.mark.slow
def test_the_forwards_do_as_well() -> None:
    text = source("forward", **FORM, tile_m=128, tile_n=128)
    assert text.count("tma_load") >= 3
    assert "wgmma" in text
    assert "mma_sync" not in text


@pytest.mark.parametrize("kernel", RAGGED, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": "bottom_right", "slack_q": 3, "slack_k": 2},
        {"causal": "top_left", "seqlens_k": (31, 0, 64, 1), "softmax_scale": -0.3},
        {"causal": "bottom_right", "seqlens_q": (70, 1, 33, 0), "seqlens_k": (1, 0, 33, 5), "softmax_scale": 0.0},
        {"seqlens_q": (0, 0), "seqlens_k": (5, 0), "slack_q": 1},
        {"seqlens_q": (3, 5), "seqlens_k": (0, 0), "slack_k": 1},
        {"seqlens_q": (1,) * 9, "seqlens_k": (1, 33, 2, 1, 65, 1, 1, 3, 1), "heads": 2, "kv_heads": 2},
    ],
    ids=str,
)
def test_lengths_masks_and_scales(kernel: TileLangRagged, changes: dict) -> None:
    case = Case(kernel=kernel.name, problem=replace(PROBLEM, **changes), recipe=Recipe(), config=SMALL)
    verdict = run_trial(case, "cpu")
    assert verdict.status == "pass", [each.message for each in verdict.failures]


def test_configs_fit_the_shared_memory() -> None:
    # The atomic kernel's tiles of dK and dV lie beside those of the loop.
    wide = replace(PROBLEM, dim_qk=192, dim_v=128)
    large = CONFIGS[1]
    assert large in SPLIT.configs(wide)
    assert large not in ATOMIC.configs(wide)
    assert "config=" in (ATOMIC.supports(wide, large, "cpu") or "")


def test_what_is_refused() -> None:
    for changes, reason in (
        ({"packing": "dense", "seqlens_q": (5, 5), "seqlens_k": (6, 6)}, "packing='dense'"),
        ({"dim_qk": 40, "dim_v": 40}, "dim_qk, dim_v=(40, 40)"),
        ({"window": (3, 0)}, "window="),
    ):
        assert reason in (ATOMIC.supports(replace(PROBLEM, **changes), SMALL, "cpu") or "")
    assert {each.name for each in RAGGED} <= set(registry.names())
