"""Modifiers: trees as data, their derivatives and bounds, and the oracle's attention under them beside eager flex_attention."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
import torch
from support.emulated.kernel import KERNEL, registered
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnfuzz.harness.trial import trial
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.expressions.derivative import by_load, by_score
from attnfuzz.kernels.expressions.evaluation import evaluate
from attnfuzz.kernels.expressions.named import MASKS, SCORES, bias, causal, softcap
from attnfuzz.kernels.expressions.tracing import traced
from attnfuzz.kernels.expressions.tree import (  # fmt: skip
    DEEPEST,
    INT32,
    KV,
    B,
    Captured,
    H,
    Q,
    S,
    absolute,
    exp,
    load,
    maximum,
    minimum,
    parse,
    sigmoid,
    tanh,
    to_data,
    to_float,
    where,
    whole,
)
from attnfuzz.kernels.modified import of_heads, tensors_of
from attnfuzz.kernels.problem import Needs, Problem
from attnfuzz.kernels.torch.flex_modified import modifiers_of
from attnfuzz.oracles.attention import reference, sequences
from attnfuzz.strategies.case import Case, Recipe
from attnfuzz.strategies.compiled_modifiers import pooled
from attnfuzz.strategies.shrink_steps import simpler

LEAVES = {
    "b": torch.tensor(1), "h": torch.tensor(2), "q_idx": torch.arange(6)[:, None], "kv_idx": torch.arange(5)[None],
    "seqlen_q": 6, "seqlen_k": 5,
}  # fmt: skip
WHOLE = KERNEL.capabilities
POOL = pooled(WHOLE, 48, 7)
PLAIN = {"seqlens_q": (9, 9), "seqlens_k": (7, 7), "packing": "dense", "dim_qk": 16, "dim_v": 16, "heads": 4, "kv_heads": 2}


@pytest.mark.parametrize("tree", [*MASKS.values(), *SCORES.values()], ids=[*MASKS, *SCORES])
def test_json_keeps_a_tree(tree) -> None:
    data = json.loads(msgspec.json.encode(to_data(tree)))
    problem = Problem(**PLAIN, **{"score_mod" if tree.kind == "float" else "mask_mod": data})
    assert parse(problem.score_mod or problem.mask_mod) == tree
    assert msgspec.json.decode(msgspec.json.encode(problem), type=Problem) == problem


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (softcap(20.0), "tanh(score * 0.05) * 20"),
        (causal() & (KV >= 3), "(kv_idx <= q_idx + seqlen_k - seqlen_q) & (kv_idx >= 3)"),
        (~((Q - (KV - H)) * 2 > 1), "~((q_idx - (kv_idx - h)) * 2 > 1)"),
        (bias(), "score + bias[h, q_idx, kv_idx]"),
        (S * -0.5, "score * -0.5"),
        (where(Q % 2 >= 1, S, -S), "where(q_idx % 2 >= 1, score, -score)"),
    ],
)
def test_a_person_can_read_it(tree, text: str) -> None:
    assert str(tree) == text


W = load(Captured("w", (5,), "normal", True), KV)
SMOOTH = {
    "softcap": softcap(3.0),
    "exp": exp(tanh(S) * 2.0) - S,
    "sigmoid": sigmoid(S * W) * S,
    "bent": maximum(minimum(S, 0.4), -0.3) + absolute(S - 0.1),
    "branches": where(Q >= KV, S * S, to_float(KV) - S),
}


@pytest.mark.parametrize("tree", SMOOTH.values(), ids=SMOOTH)
def test_derivatives_are_autograds(tree) -> None:
    generator = torch.Generator().manual_seed(1)
    s = torch.randn(6, 5, dtype=torch.float64, generator=generator).requires_grad_()
    w = torch.randn(5, dtype=torch.float64, generator=generator).requires_grad_()
    y = evaluate(tree, {**LEAVES, "score": s}, {"w": w}, torch.float64).expand(6, 5)
    ds, dw = torch.autograd.grad(y.sum(), (s, w), allow_unused=True, materialize_grads=True)
    actual = evaluate(by_score(tree), {**LEAVES, "score": s}, {"w": w}, torch.float64).expand(6, 5)
    torch.testing.assert_close(actual, ds, rtol=1e-12, atol=1e-12)
    of_w = evaluate(by_load(tree, W), {**LEAVES, "score": s}, {"w": w}, torch.float64).expand(6, 5).sum(0)
    torch.testing.assert_close(of_w, dw, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score_mod": ("score", 1)}, "expression"),
        ({"score_mod": ("sqrt", ("score",))}, "no operation on"),
        ({"score_mod": ("add", ("score",), ("q_idx",))}, "no operation on"),
        ({"score_mod": to_data(causal())}, "a float tree"),
        ({"mask_mod": to_data(S >= 0.0)}, "reads the score"),
        ({"mask_mod": ("float", ("q_idx",))}, "of kind float"),
        ({"score_mod": to_data(S + load(Captured("w", (6,)), KV))}, "kv_idx is 0 to 6, and the size is 6"),
        ({"score_mod": to_data(S + load(Captured("w", ("heads",)), H - 1))}, "-1 to 2"),
        ({"mask_mod": to_data(((Q - KV) % 2).equals(0))}, "may be negative"),
        ({"mask_mod": to_data(Q * 2**30 * 4 >= KV)}, "int32"),
        ({"score_mod": ("load", ("w", ("heads",), "normal"), ("h",))}, "a tensor is"),
        ({"score_mod": ("const", float("inf"))}, "finite"),
        (
            {"score_mod": to_data(S + load(Captured("w", ("heads",)), H) + load(Captured("w", ("seqlen_k",)), KV))},
            "two different",
        ),
    ],
)
def test_what_is_no_modifier_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        Problem(**PLAIN, **changes)


def nested(depth: int, leaf: tuple = ("score",)) -> tuple:
    """So many nodes inside each other."""
    return leaf if depth == 1 else ("neg", nested(depth - 1, leaf))


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (("bool", True), ("bool", 1), "expression.bool=1: true or false is expected"),
        (("int", 1), ("int", True), "expression.int=True: a whole number is expected"),
        (("int", 1), ("int", 1.0), "expression.int=1.0: a whole number is expected"),
        (("le", ("b",), ("int", 1)), ("le", ("b",), ("int", True)), "expression.int=True: a whole number is expected"),
        (("const", 1.0), ("const", True), "expression.const=True: a number is expected"),
        (("load", ("t", (1,), "normal", True), ("b",)), ("load", ("t", (1,), "normal", 1), ("b",)), "a tensor is"),
        (("load", ("t", (1,), "normal", True), ("b",)), ("load", ("t", (True,), "normal", True), ("b",)), "a size is a number"),
    ],
)
def test_what_a_tree_is_does_not_depend_on_what_was_parsed_before(right: tuple, wrong: tuple, message: str) -> None:
    """To a dict, 1 is True and 1.0."""
    for _ in range(2):
        with pytest.raises(BadArgument, match=message):
            parse(wrong)
        assert to_data(parse(right)) == right


def test_equal_constants_have_one_spelling() -> None:
    assert json.dumps([to_data(parse(("const", each))) for each in (-0.0, 0.0, 0, 1)]) == json.dumps(
        [("const", 0.0)] * 3 + [("const", 1.0)]
    )
    with pytest.raises(BadArgument, match="finite"):
        parse(("const", 10**400))


def test_a_tree_that_is_too_deep_is_refused() -> None:
    assert Problem(**PLAIN, score_mod=nested(DEEPEST)).score_mod == nested(DEEPEST)
    with pytest.raises(BadArgument, match=f"expression='score': it lies more than {DEEPEST} nodes deep in its tree"):
        Problem(**PLAIN, score_mod=nested(DEEPEST + 1))
    for depth in (DEEPEST + 5, 4 * DEEPEST):
        with pytest.raises(BadArgument, match=f"score_mod='...': it is nested more than {DEEPEST} deep"):
            Problem(**PLAIN, score_mod=nested(depth))


def test_what_the_harness_makes_of_the_deepest_tree_is_no_deeper() -> None:
    problem = Problem(**PLAIN, score_mod=nested(DEEPEST - 1, ("float", ("h",))))
    assert str(parse(of_heads(problem, 2, 2).score_mod)).count("h + 2") == 1


def test_a_tensor_that_no_memory_holds_is_refused() -> None:
    """Where the Problem is made; not where its values are."""
    held = Captured("t", (2**17, 2**17))
    assert Problem(**PLAIN, score_mod=to_data(S + load(held, H, H))).score_mod
    with pytest.raises(BadArgument, match="t would have 17,179,869,186 elements, and 17,179,869,184 is the limit"):
        Problem(**PLAIN, score_mod=to_data(S + load(Captured("t", (2, 2**33 + 1)), H // 4, H)))
    with pytest.raises(BadArgument, match=r"captured.sizes=\('seqlen_q', 1000000000, 1000000000\): t would have 9,000,"):
        Problem(**PLAIN, mask_mod=to_data(load(Captured("t", ("seqlen_q", 10**9, 10**9)), H, H, H) >= 0.0))


def test_one_rule_says_which_whole_numbers_there_are() -> None:
    for value in (INT32[0], INT32[-1]):
        assert parse(to_data(whole(value))).value == value
        assert Problem(**PLAIN, mask_mod=("le", ("kv_idx",), ("int", value))).mask_mod
    for value in (INT32[0] - 1, INT32[-1] + 1):
        with pytest.raises(BadArgument, match=r"expression.int=.*: an index is an int32"):
            Problem(**PLAIN, mask_mod=("ge", ("kv_idx",), ("int", value)))
    with pytest.raises(BadArgument, match="may pass the range of int32"):
        Problem(**PLAIN, mask_mod=to_data(KV + whole(INT32[0]) - 1 >= 0))


def test_a_tree_has_no_truth_value() -> None:
    with pytest.raises(TypeError, match="truth value"):
        bool(causal())


def test_pools_are_the_same_each_time_and_nothing_is_first() -> None:
    assert pooled(WHOLE, 48, 7) == POOL
    assert POOL[0] == ()
    assert len(set(POOL)) == len(POOL) == 48
    names = {name for each in POOL for name, _ in each}
    assert names == {"score_mod", "mask_mod", "softcap", "window"}


@pytest.mark.parametrize("changes", [*POOL[:20], *(pytest.param(each, marks=pytest.mark.slow) for each in POOL[20:])])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:return_lse is deprecated")
def test_eager_flex_is_of_the_oracles_mind(changes) -> None:
    """PyTorch's own specification of the same attention, in float64: O and LSE, rows without keys and all."""
    problem = Problem(**PLAIN, **dict(changes), dtype="float32", softmax_scale=0.5)
    inputs = materialise(problem, Recipe(seed=3), "cpu")
    tensors = dict(zip([each.name for each in tensors_of(problem)], inputs.captured, strict=True))
    score_mod, mask_mod, scale = modifiers_of(problem, tensors, "cpu")
    block_mask = None if mask_mod is None else create_block_mask(mask_mod, 2, 4, 9, 7, device="cpu")
    q, k, v = (x.double().transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    o, lse = flex_attention(q, k, v, score_mod, block_mask, scale, True, return_lse=True)
    for data in sequences(inputs):
        true = reference(problem, data)
        torch.testing.assert_close(o[data.index], true.o, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse[data.index], true.lse, rtol=1e-5, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("changes", POOL[:12])
def test_a_correct_kernel_passes(changes, dtype: str) -> None:
    """The emulated kernel under drawn modifiers, LSE's gradient and those of captured tensors."""
    problem = Problem(
        **{**PLAIN, "seqlens_q": (40, 40), "seqlens_k": (33, 33)}, **dict(changes), dtype=dtype, needs=Needs(dlse=True)
    )
    config = next(each for each in KERNEL.configs(problem) if KERNEL.supports(problem, each, "cpu") is None)
    with registered():
        verdict = trial.run_trial(Case(kernel="emulated", problem=problem, config=config), "cpu")
    assert not verdict.failures, verdict.failures


OF_HEAD_0 = S + load(Captured("bias", ("heads", "seqlen_q", "seqlen_k"), "normal", True), H * 0, Q, KV)
WRONG = {
    # what the kernel is asked for, and what the truth is of
    "mask of the next key": ({"mask_mod": KV <= Q}, {"mask_mod": KV <= Q + 1}),
    "bias of another head": ({"score_mod": bias()}, {"score_mod": OF_HEAD_0}),
    "cap of twice the size": ({"score_mod": softcap(2.0)}, {"score_mod": softcap(4.0)}),
    "documents of batch 0": ({"mask_mod": MASKS["documents"]}, {"mask_mod": MASKS["documents"] & (B >= 1)}),
    "distance off by a head": ({"score_mod": S + to_float(Q - KV) * 0.01}, {"score_mod": S + to_float(Q - KV + H) * 0.01}),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_modifier_is_found(name: str) -> None:
    """The emulated kernel given one modifier and judged by another."""
    from attnfuzz.harness.judge.judge import judge
    from attnfuzz.harness.judge.truth import truth as truth_of
    from attnfuzz.harness.trial.launch import split
    from attnfuzz.kernels.contract import Outputs

    wrong, true = ({key: to_data(tree) for key, tree in each.items()} for each in WRONG[name])
    sizes = {**PLAIN, "seqlens_q": (40, 40), "seqlens_k": (33, 33), "dtype": "float16"}
    kernel = KERNEL
    inputs = materialise(Problem(**sizes, **wrong), Recipe(), "cpu")
    built = kernel.build(inputs.problem, kernel.configs(inputs.problem)[0], "cpu")
    o, lse = built.forward(inputs)
    (dq, dk, dv), captured = split(built.backward(inputs, o, lse))
    judged = materialise(Problem(**sizes, **true), Recipe(), "cpu")
    outputs = Outputs(o=o, lse=lse, dq=dq, dk=dk, dv=dv, d_captured=captured)
    verdict = judge("emulated", judged, outputs, truth_of(judged, kernel.capabilities.deviations, "cpu"))
    assert verdict.failures


def test_a_wrong_gradient_of_a_captured_tensor_is_found() -> None:
    from attnfuzz.harness.judge.judge import judge
    from attnfuzz.harness.judge.truth import truth as truth_of
    from attnfuzz.harness.trial.launch import split
    from attnfuzz.kernels.contract import Outputs

    kernel = KERNEL
    problem = Problem(**{**PLAIN, "seqlens_q": (40, 40), "seqlens_k": (33, 33)}, score_mod=to_data(SCORES["relative_bias"]))
    inputs = materialise(problem, Recipe(), "cpu")
    built = kernel.build(problem, kernel.configs(problem)[0], "cpu")
    o, lse = built.forward(inputs)
    (dq, dk, dv), (gradient,) = split(built.backward(inputs, o, lse))
    truths = truth_of(inputs, kernel.capabilities.deviations, "cpu")

    def failures_of(*captured: torch.Tensor | None) -> list[tuple[str, str]]:
        verdict = judge("emulated", inputs, Outputs(o=o, lse=lse, dq=dq, dk=dk, dv=dv, d_captured=captured), truths)
        return [(each.kind, each.check) for each in verdict.failures]

    assert gradient is not None
    assert failures_of(gradient) == []
    assert failures_of(gradient.roll(1, -1)) == [("mismatch", "d relative")]
    one = gradient.clone()
    one[2, 30] = torch.nan
    assert failures_of(one) == [("nonfinite", "d relative")]
    assert failures_of(gradient * 1.01) == [("mismatch", "d relative")]
    assert failures_of(gradient[0]) == [("contract", "d relative")]
    assert failures_of(None) == [("contract", "d relative")]
    assert failures_of() == [("contract", "d captured")]

    rows = judge("emulated", inputs, Outputs(o=o, lse=lse, dq=dq, dk=dk, dv=dv, d_captured=(one,)), truths).captured
    assert {name: (each.elements, each.over, each.worst) for name, each in rows.items()} == {
        "relative": (one.numel(), 1, math.inf)
    }


def test_trees_shrink_to_nothing() -> None:
    problem = Problem(
        **PLAIN, score_mod=to_data(tanh(S + load(Captured("w", ("heads",)), H)) * 2.0), mask_mod=to_data(~causal() | (KV < 3))
    )
    case, steps = Case(kernel="emulated", problem=problem), 0
    actual = [each.problem for each in simpler(case, ())]
    assert any(each.score_mod is None and each.mask_mod is not None for each in actual)
    assert {str(parse(each.mask_mod)) for each in actual if each.mask_mod} >= {
        "kv_idx < 3",
        "~(kv_idx <= q_idx + seqlen_k - seqlen_q)",
    }
    assert "tanh(score) * 2" in {str(parse(each.score_mod)) for each in actual if each.score_mod}
    while (smaller := next((each for each in simpler(case, ()) if each.problem != case.problem), None)) is not None:
        case, steps = smaller, steps + 1
        assert steps < 200
    assert (case.problem.score_mod, case.problem.mask_mod) == (None, None)


TRACED = [
    (lambda score, b, h, q_idx, kv_idx: torch.tanh(score / 20) * 20, "tanh(score * 0.05) * 20"),
    (lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 256), "(q_idx >= kv_idx) & (q_idx - kv_idx < 256)"),
    (lambda score, b, h, q, k: torch.where(q % 2 == 0, score, -score), "where(q_idx % 2 == 0, score, -score)"),
    (lambda score, b, h, q, k: 1 - score + abs(q - k) * 0.5, "1 - score + float(abs(q_idx - kv_idx)) * 0.5"),
    (lambda b, h, q, k: torch.logical_or(k == q, ~(h != 0)), "(kv_idx == q_idx) | ~(h != 0)"),
]


@pytest.mark.parametrize(("function", "text"), TRACED)
def test_a_function_of_the_users_own_becomes_a_tree(function, text: str) -> None:
    assert str(traced(function)) == text


def test_a_traced_function_names_what_it_captures() -> None:
    slopes = Captured("slopes", ("heads",), "slopes")
    actual = traced(lambda score, b, h, q, k, slopes: score - slopes[h] * (q - k), {"slopes": slopes})
    assert actual == S - load(slopes, H) * to_float(Q - KV)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x, "write"),
        (lambda b, h, q, k: q if q > k else k, "truth"),
        (lambda score, b, h, q, k: torch.sqrt(score), "torch.sqrt"),
        (lambda score, b, h, q, k: score / k, "only numbers divide"),
        (lambda score, b, h, q, k: score + torch.ones(3), "name captured tensors"),
        (lambda score, b, h, q, k: score & q, "no operation on"),
    ],
)
def test_what_no_tree_can_say_is_refused(function, message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        traced(function)


@pytest.mark.parametrize("name", [*SCORES, *MASKS])
def test_what_shrinking_makes_of_an_index_stays_inside(name: str) -> None:
    part = {"score_mod": to_data(SCORES[name])} if name in SCORES else {"mask_mod": to_data(MASKS[name])}
    assert list(simpler(Case(kernel="emulated", problem=Problem(**PLAIN, **part)), ()))


def test_shrinking_passes_over_lengths_that_an_index_is_outside_of() -> None:
    tree = S + load(Captured("of_offset", ("offsets",)), whole(1))
    case = Case(kernel="emulated", problem=Problem(**{**PLAIN, "seqlens_q": (2,), "seqlens_k": (2,)}, score_mod=to_data(tree)))
    lengths = {(each.problem.seqlens_q, each.problem.seqlens_k) for each in simpler(case, ()) if each.problem.score_mod}
    assert lengths >= {((1,), (2,)), ((2,), (1,))}
    assert ((1,), (1,)) not in lengths
