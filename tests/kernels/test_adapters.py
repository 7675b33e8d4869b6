"""Functions with flash-attention's signature as kernels: what is read from the signature, what is passed, what comes back."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support import adapters as support

from attnfuzz.harness.isolation.kernel_ref import shipped, unpacked
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.adapters import Adapted, dense, varlen
from attnfuzz.kernels.contract import Capabilities, Config, Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Layout, Needs, Problem
from attnfuzz.strategies.case import Case

SMALL: dict[str, Any] = {"dims": ((8, 8),), "dtypes": ("float32",), "devices": ("cpu",)}
WIDE: dict[str, Any] = {**SMALL, "groups": None, "unequal": True}
FLASH = dense(support.flash, name="theirs.flash", **WIDE, zero_q=True, zero_k=True, scale_any=True, dlse=True, layouts=True)
VARLEN = varlen(support.flash_varlen, name="theirs.varlen", **WIDE, zero_q=True, zero_k=True, slack=True)
BHSD = dense(support.flash_bhsd, name="theirs.bhsd", layout="bhsd", **WIDE)


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def problem(kernel: Adapted, **changes: Any) -> Problem:
    plain: dict[str, Any] = {"seqlens_q": (5, 5), "seqlens_k": (5, 5), "dim_qk": 8, "dim_v": 8, "dtype": "float32"}
    needs = Needs(outputs=kernel.capabilities.outputs)
    return Problem(**{**plain, "packing": kernel.capabilities.packings[0], "needs": needs, **changes})


def failures(kernel: Adapted, **changes: Any) -> list[str]:
    case = Case(kernel=kernel.name, problem=problem(kernel, **changes))
    registry.register(kernel)
    return [each.message for each in run_trial(case, "cpu").failures]


# --- what is read from a signature


def test_an_adapter_in_one_line_declares_the_plainest_kernel() -> None:
    kernel = dense(support.only_forward, gradients=False)
    assert isinstance(kernel, Kernel)
    assert (kernel.name, kernel.backend, kernel.files) == ("only_forward", "torch", (support.__file__,))
    plain = Capabilities(packings=("dense",), causal=(None, "bottom_right"), outputs=("o",), compiles_on=(), scale_given=False)
    assert kernel.capabilities == plain


def package(folder: Path, name: str, **modules: str) -> ModuleType:
    """Write and import a package; returns its module `attention`."""
    (folder / name).mkdir()
    for module, text in {"__init__": "", **modules}.items():
        (folder / name / f"{module}.py").write_text(text)
    return importlib.import_module(f"{name}.attention")


DEVICE_CODE = "import triton\n@triton.jit\ndef copy(x_ptr, o_ptr):\n    pass\n"
CALLS = {
    "its own module": {"attention": DEVICE_CODE + "def attention(q, k, v):\n    copy[(1,)](q, k)\n"},
    "a module": {
        "attention": "from {0} import device\ndef attention(q, k, v):\n    device.copy[(1,)](q, k)\n",
        "device": DEVICE_CODE,
    },
    "a name": {
        "attention": "from {0}.device import copy\ndef attention(q, k, v):\n    copy[(1,)](q, k)\n",
        "device": DEVICE_CODE,
    },
    "a function": {
        "attention": "from {0}.op import op\ndef attention(q, k, v):\n    return op(q, k)\n",
        "op": "from {0} import device\ndef op(q, k):\n    device.copy[(1,)](q, k)\n",
        "device": DEVICE_CODE,
    },
    "a class": {
        "attention": "from {0}.op import Op\ndef attention(q, k, v):\n    return Op.apply(q, k)\n",
        "op": "import torch\nfrom {0} import device\nclass Op(torch.autograd.Function):\n    pass\n",
        "device": DEVICE_CODE,
    },
}


@pytest.mark.parametrize("how", CALLS)
def test_a_function_that_reaches_triton_functions_is_a_triton_kernel(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(tmp_path)
    name = f"reaches_{how.replace(' ', '_')}"
    module = package(tmp_path, name, **{each: text.format(name) for each, text in CALLS[how].items()})
    wrapped = functools.partial(module.attention)
    for function in (module.attention, wrapped):
        kernel = dense(function, name="mine", gradients=False)
        assert kernel.backend == "triton"
        of = "attention" if how == "its own module" else "device"
        assert kernel.files == tuple(dict.fromkeys(str(tmp_path / name / f"{each}.py") for each in ("attention", of)))
    assert dense(module.attention, name="mine", gradients=False, backend="torch").backend == "torch"


def test_a_function_beside_one_of_another_package_with_triton_functions_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that is imported is looked at; what it imports of others is not."""
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(tmp_path)
    package(tmp_path, "with_triton", attention=DEVICE_CODE)
    package(tmp_path, "between_both", attention="from with_triton import attention as far\n")
    text = "from between_both import attention as near\ndef attention(q, k, v):\n    return q\n"
    assert dense(package(tmp_path, "without_triton", attention=text).attention, gradients=False).backend == "torch"


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (
            {"configs": ((32, 32), (64, 64))},
            r"configs=\(32, 32\): each choice is a dict of keyword arguments; give a tuple of dicts",
        ),
        ({"configs": ("tile_m",)}, "configs='tile_m': each choice is a dict"),
        ({"dims": (64, 128)}, r"dims=\(64, 128\): each is a pair \(dim_qk, dim_v\); give pairs: \(\(64, 64\), \(128, 128\)\)"),
        ({"dims": ((64, 64, 64),)}, "each is a pair"),
    ],
)
def test_declarations_of_another_form_are_refused_in_words(declared: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        dense(support.only_forward, gradients=False, **declared)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (FLASH, {"causal": (None, "bottom_right"), "window": True, "softcap": True, "outputs": ("o", "lse", "dq", "dk", "dv")}),
        (BHSD, {"causal": (None, "bottom_right"), "window": False, "softcap": False, "outputs": ("o", "dq", "dk", "dv")}),
        (VARLEN, {"packings": ("ragged",), "window": False, "outputs": ("o", "lse", "dq", "dk", "dv")}),
        (dense(lambda q, k, v: q, name="bare", files=[__file__]), {"causal": (None,), "outputs": ("o", "dq", "dk", "dv")}),
        (dense(lambda q, k, v: q, name="both", lse=True, files=[__file__]), {"outputs": ("o", "lse", "dq", "dk", "dv")}),
        (dense(support.flash, lse=False), {"outputs": ("o", "dq", "dk", "dv")}),
    ],
    ids=["flash", "bhsd", "varlen", "bare", "lse always", "lse never"],
)
def test_features_are_those_of_the_signature(kernel: Adapted, expected: dict[str, Any]) -> None:
    assert {name: getattr(kernel.capabilities, name) for name in expected} == expected


def test_partials_and_decorators_are_looked_through() -> None:
    @functools.wraps(support.flash)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return support.flash(*args, **kwargs)

    for function in (functools.partial(support.flash, dropout_p=0.0), wrapped):
        kernel = dense(function)
        assert kernel.name == "flash"
        assert kernel.files == (support.__file__,)
        assert kernel.capabilities.window


def hungry(q, k, v, tiles):
    return q


REFUSED: dict[str, tuple[Any, str]] = {
    "no function": (lambda: dense(3), "function=3: it cannot be called; give the function itself"),
    "two tensors": (lambda: dense(lambda q, k: q), "q, k and v come first, one after the other"),
    "no signature": (lambda: dense(max), "function='max': its signature cannot be read"),
    "a parameter without default": (lambda: dense(hungry), "its parameter tiles has no default; bind it with functools.partial"),
    "dense as varlen": (lambda: varlen(support.flash), "it has no parameter cu_seqlens_q"),
    "varlen as dense": (lambda: dense(support.flash_varlen), "its parameter cu_seqlens_q has no default"),
    "no such capability": (lambda: dense(support.flash, grops=None), "capabilities='grops': Capabilities have no such field"),
    "a window it has not": (
        lambda: dense(support.flash_bhsd, window=True),
        "window=True: flash_bhsd has no parameter window_size",
    ),
    "a mask it has not": (lambda: dense(lambda q, k, v: q, causal=(None, "top_left")), "has no parameter causal"),
    "LSE it has not": (lambda: dense(support.flash_bhsd, outputs=("o", "lse")), "the adapter gets only o, dq, dk, dv of it"),
    "another packing": (lambda: dense(support.flash, packings=("ragged",)), "this adapter calls it dense"),
    "slack in a dense batch": (lambda: dense(support.flash, slack=True), "a dense function is not passed how many rows count"),
    "score functions": (lambda: dense(support.flash, score_mod=True), "these adapters pass no functions"),
    "no config": (lambda: dense(support.flash, configs=()), "a kernel has at least its default"),
    "an unknown choice": (lambda: dense(support.flash, configs=({"stages": 2},)), "flash has no such parameter"),
    "a config that is no sequence": (
        lambda: dense(support.flash, configs=5),
        "configs=5: it is no sequence; give a tuple of dicts",
    ),
    "a name that is no text": (lambda: dense(support.flash, name=3), "name=3: it is no text; give a dotted one"),
    "a backend that is no text": (lambda: dense(support.flash, backend=3), "backend=3: it is no text; leave it out"),
    "an unknown layout": (
        lambda: dense(support.flash, layout="sbhd"),
        "layout='sbhd': q has no such order; use 'bshd' or 'bhsd'",
    ),
    "an unknown word for LSE": (lambda: dense(support.flash, lse="always"), "lse='always': it is neither True, False nor 'auto'"),
    "gradients by a word": (lambda: dense(support.flash, gradients="no"), "gradients='no': it is neither True nor False"),
    "a backward that is no function": (lambda: dense(support.flash, backward=True), "backward=True: it cannot be called"),
    "sinks by a word": (
        lambda: varlen(support.flash_varlen, sinks_in_dtype="no"),
        "sinks_in_dtype='no': it is neither True nor False",
    ),
    "one file": (lambda: dense(support.flash, files="flash.py"), "files='flash.py': it is no sequence of paths; give a tuple"),
    "a file that is no path": (lambda: dense(support.flash, files=(3,)), "files=(3,): it is no sequence of paths; give a tuple"),
    "a name with a colon": (lambda: dense(support.flash, name="a:b"), "a kernel's name has no spaces, colons or slashes"),
    "no source": (lambda: dense(eval("lambda q, k, v: q")), "name the files that make it up"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_adapted_is_refused_in_words(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(BadArgument) as caught:
        make()
    assert message in str(caught.value)


# --- what is passed, and what comes back: judged by the oracle

CASES: dict[str, tuple[Adapted, dict[str, Any]]] = {
    "plain": (FLASH, {}),
    "causal": (FLASH, {"causal": "bottom_right", "seqlens_q": (7, 7)}),
    "rows without keys": (FLASH, {"causal": "bottom_right", "seqlens_q": (9, 9)}),
    "window": (FLASH, {"window": (2, 1)}),
    "a window open to the left": (FLASH, {"window": (None, 1), "seqlens_k": (8, 8)}),
    "softcap": (FLASH, {"softcap": 1.5}),
    "scale": (FLASH, {"softmax_scale": 0.7}),
    "scale 0": (FLASH, {"softmax_scale": 0.0}),
    "groups": (FLASH, {"heads": 6, "kv_heads": 2}),
    "no queries": (FLASH, {"seqlens_q": (0, 0)}),
    "no keys": (FLASH, {"seqlens_k": (0, 0)}),
    "gradient of LSE": (FLASH, {"needs": Needs(dlse=True)}),
    "strides": (FLASH, {"layout_q": Layout(order="bhsd"), "layout_do": Layout(expanded=True)}),
    "bhsd": (BHSD, {"causal": "bottom_right", "seqlens_k": (6, 6), "heads": 4, "kv_heads": 2, "softmax_scale": 0.7}),
    "ragged": (VARLEN, {"seqlens_q": (3, 0, 5), "seqlens_k": (4, 2, 0), "causal": "bottom_right", "heads": 2}),
    "ragged with slack": (VARLEN, {"slack_q": 3, "slack_k": 1}),
    "given backward": (dense(support.flash, name="given", backward=support.given_backward, **WIDE), {"causal": "bottom_right"}),
    "forward only": (dense(support.only_forward, name="forward", gradients=False, **WIDE), {"seqlens_k": (3, 3)}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_right_is_judged_right(name: str) -> None:
    kernel, changes = CASES[name]
    assert failures(kernel, **changes) == []


def upside_down(q, k, v, causal=False):
    return support.flash(q, k.flip(1), v, causal=causal)


def half_scale(q, k, v, softmax_scale=None):
    return support.flash(q, k, v, softmax_scale=q.shape[-1] ** -0.5)


WRONG: dict[str, tuple[Adapted, dict[str, Any], str]] = {
    "wrong values": (dense(upside_down, **SMALL), {}, "O: "),
    "a scale that is not looked at": (dense(half_scale, **SMALL), {"softmax_scale": 1.0}, "O: "),
    "the wrong alignment": (
        dense(support.flash, causal=(None, "top_left"), **WIDE),
        {"causal": "top_left", "seqlens_k": (8, 8)},
        "O: ",
    ),
    "O and LSE where O alone is expected": (
        dense(lambda q, k, v: (support.flash(q, k, v), None), name="pair", lse=True, files=[__file__], **SMALL),
        {},
        "LSE has type None where a tensor is expected",
    ),
    "no graph": (dense(support.only_forward, **SMALL), {}, "adapt it with gradients=False, or give it a backward"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_judged_wrong(name: str) -> None:
    kernel, changes, message = WRONG[name]
    assert any(message in each for each in failures(kernel, **changes)), failures(kernel, **changes)


def test_an_lse_of_plus_infinity_is_forgiven_only_where_no_key_is_seen() -> None:
    def always(q, k, v, return_lse=False):
        o = support.flash(q, k, v)
        return o, torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.inf)

    kernel = dense(always, name="always", files=[__file__], **SMALL)
    assert any("LSE" in each for each in failures(kernel))


def tiled(q, k, v, block=16):
    assert block in (16, 32)
    return support.flash(q, k, v)


def test_configs_are_passed_by_name() -> None:
    kernel = dense(tiled, configs=({"block": 16, "tile_m": 16}, {"block": 32, "tile_m": 32}), **SMALL)
    assert kernel.configs(problem(kernel)) == (Config(block=16, tile_m=16), Config(block=32, tile_m=32))
    registry.register(kernel)
    for config in kernel.configs(problem(kernel)):
        assert not run_trial(Case(kernel=kernel.name, problem=problem(kernel), config=config), "cpu").failures
    assert "supports" in str(kernel.supports(problem(kernel), Config(block=64), "cpu"))
    with pytest.raises(BadArgument, match="ask supports"):
        kernel.build(problem(kernel), Config(block=64), "cpu")


def test_a_scale_without_a_parameter_for_it_is_not_supported() -> None:
    kernel = dense(tiled, **SMALL)
    reason = kernel.supports(problem(kernel, softmax_scale=0.5), Config(), "cpu")
    assert reason == "softmax_scale=0.5: only the default, dim_qk ** -0.5"


def all_said(q, k, v, softmax_scale, causal, window_size):
    return support.flash(q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size)


@pytest.mark.parametrize("changes", [{}, {"causal": "bottom_right", "window": (2, None), "softmax_scale": 0.25}])
def test_parameters_without_defaults_are_always_passed(changes: dict[str, Any]) -> None:
    assert failures(dense(all_said, **SMALL), **changes) == []


def test_where_it_can_run() -> None:
    assert FLASH.unavailable("cpu") is None
    assert FLASH.unavailable("cuda") == "device='cuda': theirs.flash is declared for cpu only"


@pytest.mark.parametrize("kernel", [FLASH, VARLEN], ids=["dense", "varlen"])
def test_adapters_of_a_test_module_travel_to_a_child(kernel: Adapted) -> None:
    registry.register(kernel)
    actual = unpacked(shipped(kernel.name))
    assert actual.capabilities == kernel.capabilities
    other = replace(problem(kernel), heads=2, kv_heads=1)
    assert actual.compile_key(other, Config()) == kernel.compile_key(other, Config())
