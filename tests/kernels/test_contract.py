"""Config, Capabilities and the reasons why a kernel does not take a Problem."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from attnfuzz.kernels import capabilities
from attnfuzz.kernels.contract import Capabilities, Config, Device, Kernel, why_unsupported
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Layout, Needs, Problem

PLAIN: dict[str, Any] = {"seqlens_q": (4,), "seqlens_k": (4,), "dim_qk": 64, "dim_v": 64}


def problem(**changed: Any) -> Problem:
    return Problem(**{**PLAIN, **changed})


def why(can: dict[str, Any] | None = None, device: Device = "cuda", **changed: Any) -> str | None:
    return why_unsupported(Capabilities(**(can or {})), problem(**changed), device)


def test_the_plainest_kernel_takes_the_plainest_problem() -> None:
    assert why() is None


def test_an_answer_is_that_of_its_own_problem_and_capabilities() -> None:
    """Answers are kept by the ids of objects, which others get once these are gone: here 3,000, of which 512 are kept."""
    lengths, kernels = (3, 5, 300), (Capabilities(length_max=4), Capabilities(length_max=200))
    for number in range(3000):
        length, can = lengths[number % 3], kernels[number // 3 % 2] if number % 2 else Capabilities(length_max=number)
        assert can.length_max is not None
        asked = problem(seqlens_q=(length,), seqlens_k=(length,))
        refused = length > can.length_max
        for _ in range(2):
            assert (why_unsupported(can, asked, "cuda") is not None) == refused, number
            assert why_unsupported(can, asked, "mps") is not None  # type: ignore[arg-type]
    assert len(capabilities._ANSWERS) <= 512


# name: (capabilities that refuse, what differs from the plain Problem, the reason, capabilities that accept)
REASONS: dict[str, tuple[dict[str, Any], dict[str, Any], str, dict[str, Any]]] = {
    "dtype": (
        {},
        {"dtype": "float32"},
        "dtype='float32': supports float16, bfloat16 on cuda",
        {"dtypes": ("float32",)},
    ),
    "dtype of one device": (
        {"dtypes_on": {"cuda": ("bfloat16",)}},
        {"dtype": "float16"},
        "dtype='float16': supports bfloat16 on cuda",
        {"dtypes_on": {"cpu": ("bfloat16",)}},
    ),
    "packing": (
        {},
        {"packing": "dense"},
        "packing='dense': supports ragged",
        {"packings": ("ragged", "dense")},
    ),
    "dims": (
        {"dims": ((64, 64), (192, 128))},
        {"dim_qk": 128, "dim_v": 128},
        "dim_qk, dim_v=(128, 128): supports (64, 64), (192, 128)",
        {"dims": ((128, 128),)},
    ),
    "dims that are not a multiple": (
        {"dim_multiple": 16},
        {"dim_qk": 72, "dim_v": 64},
        "dim_qk, dim_v=(72, 64): supports (64, 64) and multiples of 16 up to 256",
        {"dim_multiple": 8},
    ),
    "dims beyond the largest": (
        {"dim_multiple": 8, "dim_max": 128},
        {"dim_qk": 64, "dim_v": 136},
        "dim_qk, dim_v=(64, 136): supports (64, 64) and multiples of 8 up to 128",
        {"dim_multiple": 8, "dim_max": 136},
    ),
    "groups": (
        {"groups": (1, 4)},
        {"heads": 6, "kv_heads": 2},
        "groups=3: supports 1, 4",
        {"groups": None},
    ),
    "layout": (
        {},
        {"layout_k": Layout(pitch=8)},
        "layout_k=Layout(pitch=8): only contiguous tensors",
        {"layouts": True},
    ),
    "zero_q": (
        {"zero_k": True, "unequal": True},
        {"seqlens_q": (4, 0), "seqlens_k": (4, 2)},
        "seqlens_q=(4, 0): no sequences without queries",
        {"zero_q": True, "unequal": True},
    ),
    "zero_k": (
        {"zero_q": True, "unequal": True},
        {"seqlens_q": (4, 1), "seqlens_k": (4, 0)},
        "seqlens_k=(4, 0): no sequences without keys",
        {"zero_k": True, "unequal": True},
    ),
    "unequal": (
        {},
        {"seqlens_k": (5,)},
        "seqlens_q=(4,), seqlens_k=(5,): only equal lengths",
        {"unequal": True},
    ),
    "slack": (
        {},
        {"slack_k": 3},
        "slack_q=0, slack_k=3: no rows beyond the last sequence",
        {"slack": True},
    ),
    "length_max": (
        {"length_max": 8, "unequal": True},
        {"seqlens_k": (9,)},
        "seqlen=9: at most 8",
        {"length_max": 9, "unequal": True},
    ),
    "multiple_q": (
        {"multiple_q": 3, "unequal": True},
        {},
        "seqlens_q=(4,): only multiples of 3",
        {"multiple_q": 4},
    ),
    "multiple_k": (
        {"multiple_k": 4, "unequal": True},
        {"seqlens_k": (6,)},
        "seqlens_k=(6,): only multiples of 4",
        {"multiple_k": 3, "unequal": True},
    ),
    "batch_max": (
        {"batch_max": 2},
        {"seqlens_q": (4, 4, 4), "seqlens_k": (4, 4, 4)},
        "batch=3: at most 2",
        {"batch_max": 3},
    ),
    "heads_max": ({"heads_max": 3}, {"heads": 4, "kv_heads": 4}, "heads=4: at most 3", {"heads_max": 4}),
    "shapes": (
        {"shapes": ((1, 1, 1, 4, 8), (1, 2, 2, 4, 4))},
        {},
        "batch, heads, kv_heads, seqlen_q, seqlen_k=(1, 1, 1, 4, 4): supports (1, 1, 1, 4, 8), (1, 2, 2, 4, 4)",
        {"shapes": ((1, 1, 1, 4, 4),)},
    ),
    "shapes, ragged": (
        {"shapes": ((2, 1, 1, 4, 4),)},
        {"seqlens_q": (4, 5), "seqlens_k": (4, 5)},
        "batch, heads, kv_heads, seqlen_q, seqlen_k=((4, 5), (4, 5)): supports (2, 1, 1, 4, 4)",
        {"shapes": ()},
    ),
    "default scale": (
        {"scale_given": False},
        {"softmax_scale": 0.5},
        "softmax_scale=0.5: only the default, dim_qk ** -0.5",
        {"scale_given": True},
    ),
    "causal": (
        {"causal": (None, "top_left")},
        {"causal": "bottom_right"},
        "causal='bottom_right': supports None, 'top_left'",
        {"causal": ("bottom_right",)},
    ),
    "not causal": (
        {"causal": ("bottom_right",)},
        {},
        "causal=None: supports 'bottom_right'",
        {"causal": (None,)},
    ),
    "window": ({}, {"window": (7, None)}, "window=(7, None): not supported", {"window": True}),
    "window on one side": (
        {"window": True, "window_forms": ("both", "right")},
        {"window": (7, None)},
        "window=(7, None): supports windows of these forms: both, right",
        {"window": True, "window_forms": ("left",)},
    ),
    "window on both sides": (
        {"window": True, "window_forms": ("left", "equal")},
        {"window": (7, 6)},
        "window=(7, 6): supports windows of these forms: left, equal",
        {"window": True, "window_forms": ("both",)},
    ),
    "window beside a mask": (
        {"window": True, "window_forms": ("right",), "causal": ("bottom_right",)},
        {"window": (7, None), "causal": "bottom_right"},
        "window=(7, None): supports windows of these forms: right",
        {"window": True, "window_forms": ("equal",), "causal": ("bottom_right",)},
    ),
    "window of blocks": (
        {"window": True, "window_multiple": 4},
        {"window": (None, 6)},
        "window=(None, 6): only multiples of 4",
        {"window": True, "window_multiple": 3},
    ),
    "softcap": ({}, {"softcap": 30.0}, "softcap=30.0: not supported", {"softcap": True}),
    "score_mod": ({}, {"score_mod": ("score",)}, "score_mod=('score',): not supported", {"score_mod": True}),
    "mask_mod": ({}, {"mask_mod": ("bool", True)}, "mask_mod=('bool', True): not supported", {"mask_mod": True}),
    "negative scale": ({}, {"softmax_scale": -0.5}, "softmax_scale=-0.5: only positive scales", {"scale_any": True}),
    "zero scale": ({}, {"softmax_scale": 0.0}, "softmax_scale=0.0: only positive scales", {"scale_any": True}),
    "outputs": (
        {"outputs": ("o", "lse")},
        {},
        "needs=['dq', 'dk', 'dv']: produces o, lse",
        {"outputs": ("o", "lse", "dq", "dk", "dv")},
    ),
    "dlse": ({}, {"needs": Needs(dlse=True)}, "needs.dlse: takes no gradient of LSE", {"dlse": True}),
}


@pytest.mark.parametrize("name", REASONS)
def test_every_capability_refuses_with_its_field_and_value(name: str) -> None:
    can, changed, reason, _ = REASONS[name]
    assert why(can, **changed) == reason


@pytest.mark.parametrize("name", REASONS)
def test_every_capability_that_is_declared_is_taken(name: str) -> None:
    _, changed, _, enough = REASONS[name]
    assert why(enough, **changed) is None


def test_device() -> None:
    assert why({}, "cpu") == "device='cpu': runs on cuda only"
    assert why({"devices": ("cpu", "cuda")}, "cpu") is None


def test_a_forward_only_kernel_takes_a_forward_only_problem() -> None:
    assert why({"outputs": ("o", "lse")}, needs=Needs(outputs=("o",))) is None


def test_dims_of_the_list_are_taken_whatever_the_multiple() -> None:
    assert why({"dims": ((40, 72),), "dim_multiple": 64}, dim_qk=40, dim_v=72) is None


def test_dtypes_for() -> None:
    can = Capabilities(dtypes=("float16",), dtypes_on={"cpu": ("float32",)})
    assert can.dtypes_for("cpu") == ("float32",)
    assert can.dtypes_for("cuda") == ("float16",)


def test_config_is_a_frozen_hashable_mapping_with_sorted_names() -> None:
    config = Config({"tile_n": 32}, tile_m=64, split=True)
    assert list(config) == ["split", "tile_m", "tile_n"]
    assert config["tile_n"] == 32
    assert len(config) == 3
    assert config == Config(tile_m=64, split=True, tile_n=32)
    assert hash(config) == hash(Config(split=True, tile_n=32, tile_m=64))
    assert config != {"split": True, "tile_m": 64, "tile_n": 32}
    assert repr(config) == "Config(split=True, tile_m=64, tile_n=32)"
    assert str(config) == "split=True tile_m=64 tile_n=32"
    assert config.canonical() == '{"split": true, "tile_m": 64, "tile_n": 32}'
    with pytest.raises(TypeError):
        config["tile_m"] = 1  # type: ignore[index]


def test_an_empty_config() -> None:
    assert not Config()
    assert Config() == Config({})
    assert str(Config()) == ""
    assert Config().tile("tile_m", 64) == 64


def test_config_integers() -> None:
    config = Config(tile_m=64, variant="split")
    assert config.integer("tile_m") == 64
    assert config.tile("tile_m", 1) == 64
    assert config.tile("tile_n") == 1
    with pytest.raises(TypeError, match="config variant='split' is not an integer"):
        config.integer("variant")
    with pytest.raises(KeyError):
        config.integer("stages")


def test_config_survives_pickling_to_a_child_process() -> None:
    config = Config(tile_m=64, variant="split")
    assert pickle.loads(pickle.dumps(config)) == config


def test_kernel_is_checked_by_its_members() -> None:
    class Half:
        name, backend = "x.half", "x"

    assert not isinstance(Half(), Kernel)


def test_a_choice_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(BadArgument, match="a choice is no JSON value"):
        Config({"tile_m": object()})  # type: ignore[dict-item]
