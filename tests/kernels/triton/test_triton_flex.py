"""`triton.flex` in the interpreter against float64, and what it must leave alone."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace
from support.flex import assert_right, dense, inputs_of, reference, run
from support.triton_mode import interpreted

from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config, Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.expressions.named import (
    MASKS,
    SCORES,
    alibi,
    bias,
    causal,
    documents,
    relative_bias,
    sliding_window,
    softcap,
)
from attnfuzz.kernels.expressions.tree import (
    KV,
    B,
    Captured,
    Expression,
    H,
    Q,
    S,
    const,
    exp,
    load,
    maximum,
    minimum,
    sigmoid,
    tanh,
    to_float,
    truth,
    where,
    whole,
)
from attnfuzz.kernels.problem import Layout, Needs
from attnfuzz.kernels.triton import flex, flex_configs, runtime
from attnfuzz.kernels.triton.assembler import assembler
from attnfuzz.kernels.triton.flex import KERNEL, PRESCALED, TF32

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

PER_ROW = Captured("per_row", ("seqlen_q",), gradient=True)
PER_KEY = Captured("per_key", ("batch", "seqlen_k"), gradient=True)
PER_EITHER = Captured("per_either", (64,), gradient=True)
BY_SCORE = Captured("by_score", (4,), gradient=True)
HARD = {
    "gradients of every kind of index": relative_bias()
    + load(PER_ROW, Q) * tanh(S)
    - load(PER_KEY, B, KV)
    + load(Captured("per_head", ("kv_heads", "heads"), gradient=True), B, H),
    "one tensor read twice": S * load(PER_ROW, Q) + load(PER_ROW, Q // 2),
    "alibi learned": alibi(gradient=True),
    "functions": where(Q % 3 <= KV % 2, sigmoid(S) * 3.0, exp(minimum(S, 2.0))) + maximum(-S, to_float(Q - KV) * 0.02),
    "no score": to_float(H - B) * 0.5,
    "a constant": const(0.25),
    "a constant once folded": where(truth(True), 1.0, S),
    "an index of the score": S + load(BY_SCORE, where(S > 0.0, whole(0), whole(1))),
    "an index of the score and the query": S + load(PER_ROW, where(S > 0.0, Q, whole(0))),
    "an index of a key once folded": S + load(PER_EITHER, where(truth(True), KV, Q)),
    "an index of nothing once folded": S + load(PER_ROW, where(truth(False), Q, whole(2))),
}


@interpreted
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    assert_right(KERNEL, inputs_of(dense(37, 45, score=SCORES[name])))


@interpreted
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    assert_right(KERNEL, inputs_of(dense(70, 90, batch=1, heads=2, kv_heads=1, mask=MASKS[name])))


@interpreted
def test_each_head_of_a_group_has_its_own_lists() -> None:
    mask = (KV - Q) * where(H % 2 < 1, whole(1), whole(-1)) >= whole(0)
    assert_right(KERNEL, inputs_of(dense(100, 100, batch=1, heads=4, kv_heads=2, mask=mask)))


@interpreted
@pytest.mark.parametrize("name", HARD)
def test_hard_scores_under_a_mask(name: str) -> None:
    assert_right(KERNEL, inputs_of(dense(45, 37, score=HARD[name], mask=documents() & causal(), softcap=3.0)))


@interpreted
@pytest.mark.parametrize("name", ["no score", "a constant", "a constant once folded"])
def test_scores_without_the_score_where_nothing_is_masked(name: str) -> None:
    """No mask gives them a tile's shape."""
    assert_right(KERNEL, inputs_of(dense(64, 32, batch=1, score=HARD[name])))


@interpreted
@pytest.mark.parametrize("lengths", [(64, 96), (33, 31), (1, 70), (70, 1)])
@pytest.mark.parametrize(("band", "window"), [(None, None), ("bottom_right", None), ("top_left", (9, None)), (None, (20, 3))])
def test_bands(lengths: tuple[int, int], band: Any, window: Any) -> None:
    assert_right(KERNEL, inputs_of(dense(*lengths, batch=1, causal=band, window=window)))


@interpreted
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype: str) -> None:
    assert_right(KERNEL, inputs_of(dense(50, 77, dtype=dtype, score=bias(), mask=sliding_window(30), slack_q=3, slack_k=2)))


@interpreted
@pytest.mark.parametrize("index", range(13))
def test_every_config(index: int) -> None:
    problem = dense(150, 130, batch=1, dtype="float16", score=alibi(), causal="bottom_right", heads=2, kv_heads=1)
    configs = [*KERNEL.configs(problem), *KERNEL.configs(replace(problem, dtype="float32"))]
    assert len(configs) == 13
    dtype = "float16" if index < 11 else "float32"
    assert_right(KERNEL, inputs_of(replace(problem, dtype=dtype)), configs[index])


def test_what_may_hide_scores_has_small_blocks_first() -> None:
    problem = dense(150, 130, dtype="float16")
    blocks = {
        "all": KERNEL.configs(problem),
        "causal": KERNEL.configs(replace(problem, causal="bottom_right")),
        "window": KERNEL.configs(replace(problem, window=(30, None))),
        "mask": KERNEL.configs(dense(150, 130, dtype="float16", mask=sliding_window(30))),
    }
    assert {name: actual[0]["block"] for name, actual in blocks.items()} == {"all": 128, "causal": 64, "window": 64, "mask": 64}
    assert len({frozenset(actual) for actual in blocks.values()}) == 1


@interpreted
@pytest.mark.parametrize("dims", [(1, 1), (40, 72), (17, 256)])
def test_dims(dims: tuple[int, int]) -> None:
    problem = dense(35, 37, batch=1, dim_qk=dims[0], dim_v=dims[1], causal="bottom_right", heads=3, kv_heads=1)
    assert_right(KERNEL, inputs_of(problem))


@interpreted
@pytest.mark.parametrize("scale", [0.0, -0.3, 1.7])
@pytest.mark.parametrize("score", [None, softcap(2.0)])
def test_any_scale(scale: float, score: Any) -> None:
    assert_right(KERNEL, inputs_of(dense(33, 40, batch=1, score=score, causal="top_left", softmax_scale=scale)))


@interpreted
@pytest.mark.parametrize("split", [1, 3])
def test_rows_without_keys_are_exact(split: int) -> None:
    problem = dense(60, 40, mask=(Q % 7).differs(3) & (KV < Q), score=relative_bias())
    config = next(each for each in KERNEL.configs(problem) if each["split"] == split)
    inputs = inputs_of(problem)
    expected, actual = reference(inputs), run(KERNEL, inputs, config)
    dead = expected["lse"] == -math.inf
    assert dead[0, 0, :12].sum() == 3
    assert (actual["lse"][dead] == -math.inf).all()
    for name in ("o", "dq"):
        assert (actual[name].transpose(1, 2)[dead] == 0).all(), name
    assert_right(KERNEL, inputs, config)


@interpreted
@pytest.mark.parametrize("lengths", [(0, 0), (0, 40), (40, 0)])
@pytest.mark.parametrize("mask", [None, documents()])
def test_without_queries_or_keys(lengths: tuple[int, int], mask: Any) -> None:
    problem = dense(*lengths, mask=mask, score=bias(), slack_q=1, slack_k=1)
    actual = run(KERNEL, inputs_of(problem))
    assert (actual["lse"] == -math.inf).all()
    for name in ("o", "dq", "dk", "dv", "d bias"):
        assert (actual[name] == 0).all(), name
        assert actual[name].shape == reference(inputs_of(problem))[name].shape


@interpreted
@pytest.mark.parametrize("order", ["bhsd", "sbhd"])
def test_other_layouts(order: Any) -> None:
    layouts = {"layout_q": Layout(order=order, pitch=3), "layout_k": Layout(order=order, offset=5)}
    layouts |= {"layout_v": Layout(expanded_heads=True), "layout_do": Layout(expanded=True)}
    problem = dense(40, 50, score=alibi(), causal="bottom_right", slack_q=2, slack_k=1, dtype="float16", **layouts)
    assert_right(KERNEL, inputs_of(problem))


BEYOND = exp(to_float(KV - Q) * 5.0)


@interpreted
@pytest.mark.parametrize("score", [S * BEYOND, S + load(Captured("per_head", ("heads",), gradient=True), H) * BEYOND])
@pytest.mark.parametrize("hides", [{"mask": KV <= Q}, {"causal": "top_left"}, {"mask": KV <= Q, "causal": "top_left"}])
def test_hidden_scores_may_be_beyond_all_bounds(score: Any, hides: dict[str, Any]) -> None:
    """They overflow float32, and so do their slopes: neither they nor what they give to captured tensors may be seen."""
    inputs = inputs_of(dense(40, 40, batch=1, score=score, **hides))
    assert all(each.isfinite().all() for name, each in reference(inputs).items() if name != "lse")
    assert_right(KERNEL, inputs)


@interpreted
def test_slack_rows_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(math.nan))
    problem = dense(40, 37, slack_q=3, slack_k=5, causal="bottom_right")
    inputs = inputs_of(problem)
    for config in KERNEL.configs(problem):
        built = KERNEL.build(problem, config, "cpu")
        o, lse = built.forward(inputs)
        dq, dk, dv = built.backward(inputs, o, lse)[:3]
        rows = {"o": (o, 40), "lse": (lse.transpose(1, 2), 40), "dq": (dq, 40), "dk": (dk, 37), "dv": (dv, 37)}
        for name, (output, length) in rows.items():
            assert output[:, length:].isnan().all(), name
            assert not output[:, :length].isnan().any(), name


@interpreted
def test_the_largest_p_is_exactly_one() -> None:
    problem = dense(40, 33, batch=1, dtype="float16", softmax_scale=0.37, mask=Q.equals(KV))
    inputs = inputs_of(problem, q_scale=4.0)
    o = run(KERNEL, inputs)["o"][:, :33]
    expected = inputs.v.repeat_interleave(2, 2)
    assert torch.equal(o, expected)


@interpreted
def test_two_calls_of_one_problem_do_not_share_masks_of_captured_tensors() -> None:
    problem = dense(40, 40, mask=documents())
    for seed in (1, 2):
        assert_right(KERNEL, inputs_of(problem, seed=seed))
    inputs = inputs_of(problem, seed=4)
    run(KERNEL, inputs)
    for each in inputs.captured:
        each.add_(torch.arange(40, dtype=torch.int32) // 11)
    assert_right(KERNEL, inputs)


@interpreted
def test_gradients_without_dlse() -> None:
    assert_right(KERNEL, inputs_of(dense(40, 33, score=bias(), needs=Needs())))


@interpreted
@pytest.mark.parametrize("rows_safe", [False, True])
def test_prescaled_is_right_within_its_deviation(rows_safe: bool) -> None:
    problem = dense(50, 40, dtype="float16", mask=None if rows_safe else causal())
    config = next(each for each in PRESCALED.configs(problem) if each.get("rows_safe", False) == rows_safe)
    # q is rounded once more: scores, and with them LSE, are off by some 2^-11.
    assert_right(PRESCALED, inputs_of(problem), config, lse=1e-3)


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        ((90, (12, 8)), "ptxas 12.8 makes wrong code of it: set TRITON_PTXAS_PATH"),
        (None, "is unknown: use triton.flex"),
        ((90, (12, 9)), None),
        ((90, (13, 0)), None),
        ((80, (12, 8)), None),
        ((100, (12, 8)), None),
    ],
)
def test_prescaled_needs_a_ptxas_that_gets_it_right(
    actual: tuple[int, tuple[int, int]] | None, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "assembler", lambda: actual)
    monkeypatch.setattr(runtime, "unavailable", lambda _: None)
    for kernel, expected in ((PRESCALED, message), (KERNEL, None), (TF32, None)):
        reason = kernel.unavailable("cuda")
        assert reason is None if expected is None else expected in (reason or "")
        assert kernel.unavailable("cpu") is None
        assert kernel.cannot_lower() is None


@interpreted
def test_triton_is_asked_which_ptxas_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.load("cpu")
    compiler = importlib.import_module("triton.backends.nvidia.compiler")
    for capability in (80, 90, 100):
        version = compiler.get_ptxas(capability).version
        assert assembler(capability) == (capability, tuple(map(int, version.split("."))))
    tool = tmp_path / "ptxas"
    tool.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 99.7, V99.7.1'\n")
    tool.chmod(0o755)
    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        monkeypatch.setenv(name, str(tool))
    assert assembler(90) == (90, (99, 7))
    if not torch.cuda.is_available():
        assert assembler() is None
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    monkeypatch.setenv("TRITON_PTXAS_PATH", "changed")
    assert assembler(90) is None


def table(name: str, **options: Any) -> Captured:
    return Captured(name, ("heads", "seqlen_q", "seqlen_k"), **options)


def at_scores(tensor: Captured) -> Expression:
    return load(tensor, H, Q, KV)


LOADS = (
    (S + 1.0, None, (0, 0)),
    (bias(), None, (1, 1)),
    (relative_bias(), None, (1, 1)),
    (S * at_scores(table("t")), None, (1, 2)),
    (tanh(S * at_scores(table("t")) + at_scores(table("u"))), None, (2, 4)),
    (S + at_scores(table("t")) * at_scores(table("t")), None, (1, 1)),
    (bias(), at_scores(table("t")) < 0.5, (2, 2)),
    (alibi(), documents(), (0, 0)),
)
"""A score_mod, a mask_mod, and loads of a value for each score, in forward and backward."""


@pytest.mark.parametrize(("score", "mask", "loads"), LOADS)
def test_configs_leave_room_for_what_modifiers_load(score: Expression, mask: Expression | None, loads: tuple[int, int]) -> None:
    plain, loading = dense(256, 256, dtype="float16"), dense(256, 256, dtype="float16", score=score, mask=mask)
    for dims in ((128, 128), (64, 64), (192, 128)):
        without, with_loads = (replace(each, dim_qk=dims[0], dim_v=dims[1]) for each in (plain, loading))
        assert flex_configs._tile_loads(with_loads.score_mod, with_loads.mask_mod) == loads
        left = KERNEL.configs(with_loads)
        assert set(left) <= set(KERNEL.configs(without))
        assert all(flex_configs.shared(with_loads, each, loads) <= 227 * 1024 for each in left)
        # The default's tiles are not too large for any of these.
        assert tile_size(left[0]) == tile_size(KERNEL.configs(without)[0])


def tile_size(config: Config) -> int:
    return config.integer("tile_m") * config.integer("tile_n")


def test_a_config_that_an_h200_refused_is_left_out() -> None:
    """233,472 bytes asked for, of 232,448: found by a campaign of seed 7."""
    problem = replace(dense(1, 1, dtype="float16", score=relative_bias()), dim_qk=128, dim_v=128)
    refused = {"tile_m": 64, "tile_n": 128, "dkv_tile_n": 128, "back_stages": 3}
    assert any(refused.items() <= dict(each).items() for each in KERNEL.configs(replace(problem, score_mod=None)))
    assert not any(refused.items() <= dict(each).items() for each in KERNEL.configs(problem))


def test_where_nothing_fits_the_smallest_is_left() -> None:
    score: Expression = S
    for number in range(40):
        score = score + at_scores(table(f"t{number}"))
    problem = replace(dense(1, 1, dtype="float16", score=score), dim_qk=256, dim_v=256)
    left = KERNEL.configs(problem)
    assert left
    assert min(map(tile_size, left)) == min(map(tile_size, KERNEL.configs(replace(problem, score_mod=None))))


def test_fulfils_the_contract() -> None:
    problem = dense(40, 50, dtype="float16")
    for kernel in (KERNEL, PRESCALED, TF32):
        assert isinstance(kernel, Kernel)
        assert registry.get(kernel.name) is kernel
        assert all(Path(file).is_file() for file in kernel.files)
    for config in KERNEL.configs(problem):
        assert KERNEL.supports(problem, config, "cpu") is None
        edges = [value for name, value in config.items() if "_tile_" in name or name.startswith("tile_")]
        assert len(edges) == 6
        assert not [edge for edge in edges if config.integer("block") % int(edge)]
    assert "packing" in str(KERNEL.supports(replace(problem, packing="ragged"), KERNEL.configs(problem)[0], "cpu"))
    with pytest.raises(BadArgument, match="ask supports"):
        KERNEL.build(replace(problem, packing="ragged"), KERNEL.configs(problem)[0], "cpu")
    assert "not among" in str(KERNEL.supports(problem, Config(tile_m=48), "cpu"))
    assert "score_mod" in str(PRESCALED.supports(dense(4, 5, dtype="float16", score=bias(gradient=False)), Config(), "cpu"))
    assert "rows_safe" not in "".join(map(str, PRESCALED.configs(replace(problem, causal="top_left"))))


def test_compile_key_holds_all_that_the_code_depends_on() -> None:
    problem = dense(40, 50)

    def key(**changes: Any) -> str:
        return KERNEL.compile_key(replace(problem, **changes), KERNEL.configs(problem)[0])

    same: list[dict[str, Any]] = [
        {},
        {"seqlens_q": (41, 41)},
        {"heads": 2, "kv_heads": 1},
        {"softmax_scale": -1.0},
        {"slack_k": 1},
        {"needs": Needs()},
        {"seqlens_q": (64, 64)},
        {"seqlens_k": (64, 64)},
    ]
    assert len({key(**changes) for changes in same}) == 1
    assert key(window=(3, None)) == key(window=(900, 4)) == key(causal="bottom_right") == key(causal="top_left")
    other: list[dict[str, Any]] = [{"dim_qk": 48}, {"dim_v": 40}, {"dtype": "float16"}, {"causal": "top_left"}, {"softcap": 2.0}]
    other += [{"seqlens_q": (64, 64), "seqlens_k": (32, 32)}, {"layout_q": Layout(pitch=8)}]
    other += [{"score_mod": dense(1, 1, score=bias()).score_mod}, {"mask_mod": dense(1, 1, mask=causal()).mask_mod}]
    assert len({key(**changes) for changes in [{}, *other]}) == 1 + len(other)


def test_a_block_that_is_no_whole_tiles_is_refused() -> None:
    problem = dense(64, 64)
    config = Config({**KERNEL.configs(problem)[0], "block": 64, "tile_m": 128})
    with pytest.raises(BadArgument, match="tile_m=128: it does not divide a block of 64; give a divisor"):
        KERNEL.build_any(problem, config, "cpu")
