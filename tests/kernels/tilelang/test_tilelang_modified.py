"""tilelang.modified: trees as TIR against float64, attention under them, what it lowers to, what it refuses."""

from __future__ import annotations

import functools
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("tilelang")
torch = pytest.importorskip("torch")

import tilelang  # noqa: E402
from msgspec.structs import replace  # noqa: E402
from support import tilelang_trees as support_tilelang_trees  # noqa: E402
from support.tilelang_trees import HIDING, PROBLEM  # noqa: E402
from tvm.ir.transform import PassContext  # noqa: E402
from tvm.target import Target  # noqa: E402

from attnfuzz.harness.trial.trial import run_trial  # noqa: E402
from attnfuzz.kernels import registry  # noqa: E402
from attnfuzz.kernels.contract import Config  # noqa: E402
from attnfuzz.kernels.errors import BadArgument  # noqa: E402
from attnfuzz.kernels.expressions.derivative import by_score  # noqa: E402
from attnfuzz.kernels.expressions.folding import folded  # noqa: E402
from attnfuzz.kernels.expressions.named import MASKS, SCORES, alibi, causal, documents, sliding_window, softcap  # noqa: E402
from attnfuzz.kernels.expressions.tree import (  # noqa: E402
    KV,
    SEQLEN_K,
    SEQLEN_Q,
    B,
    H,
    Q,
    S,
    absolute,
    captured,
    const,
    exp,
    maximum,
    minimum,
    parse,
    sigmoid,
    tanh,
    to_data,
    to_float,
    truth,
    where,
)
from attnfuzz.kernels.faults.planted import Edit, planted_copy  # noqa: E402
from attnfuzz.kernels.problem import Problem  # noqa: E402
from attnfuzz.kernels.tilelang import dense_device  # noqa: E402
from attnfuzz.kernels.tilelang.build import compile_counts, compiled, cuda_passes  # noqa: E402
from attnfuzz.kernels.tilelang.dense import GQA_ATOMIC  # noqa: E402
from attnfuzz.kernels.tilelang.hopper import CONFIGS  # noqa: E402
from attnfuzz.kernels.tilelang.modified import KERNEL  # noqa: E402
from attnfuzz.kernels.tilelang.printer import printed  # noqa: E402
from attnfuzz.oracles.tree_errors import evaluated  # noqa: E402
from attnfuzz.strategies.case import Case, Recipe  # noqa: E402
from attnfuzz.strategies.compiled_modifiers import pooled  # noqa: E402
from attnfuzz.strategies.variants import MODIFIED, all_variants, modified  # noqa: E402

SMALL = CONFIGS[-1]
PLAIN = replace(PROBLEM, score_mod=None, mask_mod=None, softmax_scale=None)
FORM = {"dim_qk": 128, "dim_v": 128, "dtype": "float16", "strided": True}
FORWARD = {"tile_m": 128, "tile_n": 128, "threads": 256, "stages": 1}
BACKWARD = {"tile_m": 64, "tile_n": 128, "threads": 256, "stages": 1, "reduction": "atomic", "pipelined": False}
POOL = pooled(KERNEL.capabilities, 40, 5)
needs_compiler = pytest.mark.skipif(KERNEL.unavailable("cpu") is not None, reason=str(KERNEL.unavailable("cpu")))


def trees() -> list:
    """Every operation, every name, what campaigns draw, and the derivatives of all of them."""
    ops = [
        where((Q > KV) | ~(H >= 1), S - 0.1, -S), minimum(S, 0.3) + maximum(-S, to_float(B)), absolute(S * 3.7),
        exp(tanh(S)) * sigmoid(S * -2.0), tanh(S * 40.0), sigmoid(S * 40.0), to_float(absolute(Q - KV) % 5 + KV // 3),
        to_float(minimum(Q, SEQLEN_K - 3) * maximum(KV, SEQLEN_Q - 9)), where(S >= 0.25, S * 2.0, S + 0.25),
        (Q % 4).equals(KV % 4) & (Q + 1).differs(KV), (Q < 9) & truth(True), where(S < -1.0, S, to_float(Q)),
    ]  # fmt: skip
    of_pool = [parse(data) for chosen in POOL for name, data in chosen if name in ("score_mod", "mask_mod")]
    all_of = [*ops, *SCORES.values(), *MASKS.values(), *of_pool]
    own = [folded(each) for each in all_of if not captured(each)]
    slopes = [folded(by_score(each)) for each in own if each.kind == "float"]
    return list(dict.fromkeys([*own, *slopes]))


@needs_compiler
def test_trees_as_tir_are_what_they_are_in_float64() -> None:
    all_trees, (rows, columns) = trees(), (24, 20)
    b, h, n_q, n_k = 1, 3, 24, 20
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 3
    out = torch.empty(len(all_trees), rows, columns)
    options = {"trees": tuple(to_data(each) for each in all_trees), "rows": rows, "columns": columns}
    compiled(sys.modules["support.tilelang_trees"], "evaluated_trees", options, "cpu")(x, b, h, n_q, n_k, out)
    leaves = {
        "score": x.double(), "q_idx": torch.arange(rows)[:, None], "kv_idx": torch.arange(columns)[None],
        "b": torch.tensor(b), "h": torch.tensor(h), "seqlen_q": torch.tensor(n_q), "seqlen_k": torch.tensor(n_k),
    }  # fmt: skip
    for tree, got in zip(all_trees, out, strict=True):
        expected, error = evaluated(tree, leaves, {}, torch.zeros((), dtype=torch.float64))
        if tree.kind == "bool":
            assert torch.equal(expected.expand(rows, columns), got.bool()), str(tree)
        else:
            assert ((got - expected).abs() <= error + 1e-30).all(), str(tree)
    assert len(all_trees) > 60


def test_captured_tensors_are_refused_before_anything_is_built() -> None:
    for changes, names in (({"score_mod": to_data(alibi())}, "slopes"), ({"mask_mod": to_data(documents())}, "documents_q")):
        problem = replace(PLAIN, **changes)
        message = KERNEL.supports(problem, SMALL, "cpu") or ""
        assert names in message
        assert "captured tensors are not supported" in message
    with pytest.raises(BadArgument, match=r"no captured tensors.*triton\.flex"):
        support_tilelang_trees.evaluated_trees(trees=(to_data(alibi()),), rows=2, columns=2)


def test_what_is_drawn_for_it_reads_no_tensor() -> None:
    variants = modified(all_variants(KERNEL, "cpu")[:8], KERNEL, "cpu", 3)
    assert len(variants) >= MODIFIED
    assert variants[0].modifiers == ()
    problems = [each.problem(KERNEL.capabilities) for each in variants]
    assert all(KERNEL.supports(p, each.config, "cpu") is None for p, each in zip(problems, variants, strict=True))
    names = {name for each in variants for name, _ in each.modifiers or ()}
    assert names == {"score_mod", "mask_mod", "softcap", "window"}
    assert registry.get("triton.flex").capabilities.captured


def test_a_compile_key_tells_trees_apart() -> None:
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"softcap": 5.0},
        {"softcap": 5.000001},
        {"window": (3, 0)},
        {"window": (3, 1)},
        {"window": (3, 0), "causal": "top_left"},
        {"window": (3, 0), "causal": "bottom_right"},
        {"causal": "bottom_right"},
        {"score_mod": to_data(S * 0.5)},
        {"score_mod": to_data(S * 0.5), "softcap": 5.0},
        {"score_mod": to_data(where(Q >= KV, S, S * 0.5))},
        {"mask_mod": to_data(Q >= KV)},
        {"mask_mod": to_data(KV >= Q)},
        {"mask_mod": to_data(sliding_window(3))},
    )
    problems = [replace(PLAIN, **each) for each in changes]
    keys = [KERNEL.compile_key(each, SMALL) for each in problems]
    assert len(set(keys)) == len(keys)
    for problem, key in zip(problems, keys, strict=True):
        other = replace(problem, seqlens_q=(7,), seqlens_k=(9,), softmax_scale=-2.0, heads=6)
        assert KERNEL.compile_key(other, SMALL) == key
    # What a process has compiled is found by the options' text.
    texts = {str(sorted(KERNEL.functions(each, SMALL, "cpu")["forward"].options.items())) for each in problems}
    assert len(texts) == len(problems)


def test_without_trees_the_code_is_that_of_the_dense_kernel() -> None:
    for problem in (PLAIN, replace(PLAIN, causal="top_left"), replace(PLAIN, window=(None, None))):
        functions = KERNEL.functions(problem, SMALL, "cuda")
        assert functions["forward"] == GQA_ATOMIC.functions(problem, SMALL, "cuda")["forward"]
        assert not {"score", "mask"} & set(functions["backward"].options)


@functools.cache
def without_trees() -> ModuleType:
    """The dense device code with every statement about trees taken out of its text."""
    text = Path(str(dense_device.__file__)).read_text()
    blocks = re.findall(r"                if changed:\n(?:                    .*\n)+(?=                elif causal:\n)", text)
    assert len(blocks) == 2
    line = r"(?:                    .*\n)+"
    both = list(re.finditer(rf"                if changed:\n{line}                else:\n({line})", text))
    assert len(both) == 1
    return planted_copy(
        dense_device.__name__,
        [
            *(Edit(each, "") for each in blocks),
            *(Edit(each[0], textwrap.indent(textwrap.dedent(each[1]), " " * 16)) for each in both),
            Edit("                elif causal:\n", "                if causal:\n", times=2),
            Edit("(1.0 if changed else exponent)", "exponent", times=3),
            Edit("(ds[j, i] if changed else ds[j, i] - delta[i])", "(ds[j, i] - delta[i])"),
            Edit(" and not changed\n", "\n"),
            Edit("    trees = printed(score, mask)\n    changed = trees is not None\n", "", times=2),
        ],
    )


@pytest.mark.parametrize(
    ("causal", "dtype"),
    [
        (True, "float16"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((False, "float16"), (True, "float32"), (False, "float32"))),
    ],
)
def test_the_kernels_without_trees_are_what_they_were(causal: bool, dtype: str) -> None:
    form = {**FORM, "dtype": dtype, "causal": causal}
    variants: list[tuple[str, dict[str, Any]]] = [("forward", FORWARD)]
    variants += [
        ("backward", {**BACKWARD, "reduction": each, "pipelined": flag}) for each, flag in (("none", True), ("atomic", False))
    ]
    for factory, options in variants:
        now, before = (getattr(module, factory)(**form, **options).script() for module in (dense_device, without_trees()))
        assert now == before


def source(factory: str, **options: Any) -> str:
    """The CUDA source for sm_90a of a function with trees; no GPU is needed."""
    target = Target({"kind": "cuda", "arch": "sm_90a"})
    both = {"score": to_data(softcap(20.0)), "mask": to_data(causal() & (KV % 3 >= 1))}
    with target, PassContext(config=cuda_passes(dense_device, options)):
        return tilelang.lower(getattr(dense_device, factory)(**FORM, **both, causal=True, **options), target=target).kernel_source


@pytest.mark.slow
def test_the_forward_lowers_for_hopper() -> None:
    text = source("forward", **FORWARD)
    assert text.count("tma_load") >= 3
    assert "wgmma" in text
    assert "mma_sync" not in text
    # tanh by way of the exponential: the hardware's own has 11 bits
    assert "tanh" not in text


@pytest.mark.slow
def test_the_backward_lowers_for_hopper() -> None:
    text = source("backward", **BACKWARD)
    assert text.count("tma_load") >= 6
    assert text.count("tma_store_add") == 3
    assert "wgmma" in text
    assert "mma_sync" not in text


def verdict(kernel: str, problem: Problem, config: Config = SMALL) -> Any:
    return run_trial(Case(kernel=kernel, problem=problem, recipe=Recipe(), config=config), "cpu")


@needs_compiler
@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(PROBLEM, id="hidden tiles and rows"),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                replace(PLAIN, softcap=5.0, window=(20, 3), dtype="bfloat16"),
                replace(PLAIN, window=(5, 0), causal="top_left", slack_q=3, slack_k=2, softmax_scale=-0.3),
                replace(PROBLEM, causal="bottom_right", seqlens_k=(31, 31), dtype="float32"),
                replace(PLAIN, mask_mod=to_data(truth(False))),
                replace(
                    PLAIN,
                    mask_mod=to_data((Q > 40) | (KV > 66)),
                    score_mod=to_data(S + to_float(Q - KV) * 0.5),
                    softmax_scale=0.0,
                ),
                support_tilelang_trees.RISING,
            )
        ),
    ],
)
def test_it_is_right(problem: Problem) -> None:
    actual = verdict(KERNEL.name, problem)
    assert actual.status == "pass", [each.message for each in actual.failures]


@needs_compiler
@pytest.mark.slow
def test_equal_trees_share_one_compile_whatever_the_lengths() -> None:
    counts = []
    for problem in (PROBLEM, replace(PROBLEM, seqlens_q=(50,), seqlens_k=(64,), heads=6, softmax_scale=None)):
        assert verdict(KERNEL.name, problem).status == "pass"
        counts.append(compile_counts())
    assert counts[0] == counts[1]
    assert any("dense_device.forward" in name and str(PROBLEM.mask_mod) in name for name in counts[0])


@needs_compiler
@pytest.mark.parametrize("by", [-65504.0, -1e9, -1e38])
def test_hidden_keys_before_the_one_that_is_seen(by: float) -> None:
    problem = replace(HIDING, score_mod=to_data(where(KV >= Q, S, S + const(by))))
    actual = verdict(KERNEL.name, problem)
    assert actual.status == "pass", [each.message for each in actual.failures]
    assert actual.figures
    assert actual.figures["o"].elements > 0
    assert not actual.figures["o"].unjudged


def test_a_slope_of_one_costs_nothing() -> None:
    actual = printed(to_data(S + 1.0), None)
    assert actual is not None
    assert actual.slope is None
    assert printed(None, None) is None
