"""Printed modifiers in the interpreter against the same trees evaluated in float64, and what the text looks like."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.triton_mode import interpreted

from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.expressions.derivative import by_score
from attnfuzz.kernels.expressions.evaluation import evaluate
from attnfuzz.kernels.expressions.folding import folded
from attnfuzz.kernels.expressions.named import MASKS, SCORES, alibi, bias, causal, relative_bias, softcap
from attnfuzz.kernels.expressions.tree import (
    KV,
    SEQLEN_K,
    B,
    Captured,
    Expression,
    H,
    Q,
    S,
    absolute,
    captured,
    const,
    exp,
    load,
    maximum,
    minimum,
    number,
    sigmoid,
    tanh,
    to_float,
    truth,
    where,
    whole,
)
from attnfuzz.kernels.triton import runtime
from attnfuzz.kernels.triton.printer import load_source, source, taking_gradients

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

LOG2_E = 1.4426950408889634
SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen_q": 16, "seqlen_k": 32}
CUBE = Captured("cube", ("kv_heads", "seqlen_q", 3), gradient=True)
MORE_SCORES = {
    "constant": const(-1.5),
    "scalar": to_float(H * 3 - B) * 0.25,
    "integers": to_float(minimum(Q * 2, KV) // 3 + maximum(KV % 5, whole(2)) - (-Q)) * 0.1 + S,
    "cube": S + load(CUBE, H // 2, Q, KV % 3) * load(CUBE, whole(1), whole(2), whole(0)),
    "all functions": tanh(S) + sigmoid(S * 2.0) - exp(minimum(S, const(1.0))) * absolute(S - 0.5),
    "where": where((Q >= KV) & ~(H.equals(2)) | (KV < 3), -S, where(truth(True), S * S, const(0.0))),
    "lengths": S * to_float(SEQLEN_K),
}
MORE_MASKS = {"all": truth(True), "none": truth(False), "head": (H >= 2) & truth(True), "turned": whole(3).__le__(KV) | (Q < 1)}
_DRIVER = """
import triton
import triton.language as tl


@triton.jit
def drive(
    scores, out, slopes, tensors, batch, heads, kv_heads, seqlen_q, seqlen_k, F: tl.constexpr, G: tl.constexpr, M: tl.constexpr
):
    h = tl.program_id(0)
    b = tl.program_id(1)
    q_idx = tl.arange(0, 16)[:, None]
    kv_idx = tl.arange(0, 32)[None, :]
    sizes = (batch, heads, kv_heads, seqlen_q, seqlen_k)
    at = (b * heads + h) * 512 + q_idx * 32 + kv_idx
    if M is not None:
        seen = M(b, h, q_idx, kv_idx, sizes, tensors)
        tl.store(out + at, tl.where(seen, 1.0, 0.0))
    else:
        score = tl.load(scores + at)
        tl.store(out + at, F(score, b, h, q_idx, kv_idx, sizes, tensors))
        tl.store(slopes + at, G(score * 0.0 + 2.0, score, b, h, q_idx, kv_idx, sizes, tensors))
"""


def values_of(tensors: tuple[Captured, ...]) -> dict[str, torch.Tensor]:
    generator, shapes = torch.Generator().manual_seed(5), {**SIZES, "offsets": 47}
    values = {}
    for each in tensors:
        shape = [size if isinstance(size, int) else shapes[size] for size in each.sizes]
        whole_numbers = torch.randint(0, 3, shape, generator=generator, dtype=torch.int32)
        values[each.name] = torch.randn(shape, generator=generator) if each.kind == "float" else whole_numbers
    return values


def leaves_of(scores: torch.Tensor) -> dict[str, Any]:
    shapes = {"b": (-1, 1, 1, 1), "h": (1, -1, 1, 1), "q_idx": (1, 1, -1, 1), "kv_idx": (1, 1, 1, -1)}
    counts = zip(shapes.items(), (2, 4, 16, 32), strict=True)
    indices = {name: torch.arange(size).view(shape) for (name, shape), size in counts}
    return {**indices, "seqlen_q": 16, "seqlen_k": 32, "score": scores.double()}


def driven(score: Expression | None, mask: Expression | None, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the printed functions give at every place: the score (or the mask), and twice its slope."""
    tensors = captured(score, mask)
    runtime.load("cpu")
    printed, driver = load_source(source(score, mask, tensors)), load_source(_DRIVER)
    out, slopes = torch.full_like(scores, torch.nan), torch.full_like(scores, torch.nan)
    functions = [getattr(printed, name, None) for name in ("score_mod", "score_gradient", "mask_mod")]
    arguments = tuple(values_of(tensors).values()) or (scores,)
    driver.drive[(4, 2)](scores, out, slopes, arguments, *SIZES.values(), *functions)
    return out, slopes


@interpreted
@pytest.mark.parametrize("name", [*SCORES, *MORE_SCORES])
def test_scores_and_slopes(name: str) -> None:
    tree = {**SCORES, **MORE_SCORES}[name]
    scores = torch.randn(2, 4, 16, 32, generator=torch.Generator().manual_seed(1)) * 4
    out, slopes = driven(tree, None, scores)
    leaves, tensors = leaves_of(scores), values_of(captured(tree))
    expected = evaluate(tree, leaves, tensors, torch.float64).expand(scores.shape)
    torch.testing.assert_close(out.double(), expected * LOG2_E, rtol=1e-6, atol=4e-6)
    leaves["score"].requires_grad_()
    value = evaluate(tree, leaves, tensors, torch.float64)
    slope = torch.autograd.grad(value.sum(), leaves["score"], materialize_grads=True)[0] if tree.scored else 0 * leaves["score"]
    torch.testing.assert_close(slopes.double(), 2 * slope.detach(), rtol=1e-6, atol=4e-6)


@interpreted
@pytest.mark.parametrize("name", [*MASKS, *MORE_MASKS])
def test_masks(name: str) -> None:
    tree = {**MASKS, **MORE_MASKS}[name]
    scores = torch.zeros(2, 4, 16, 32)
    expected = evaluate(tree, leaves_of(scores), values_of(captured(tree)), torch.float64).expand(scores.shape)
    assert torch.equal(driven(None, tree, scores)[0].bool(), expected)


@interpreted
def test_functions_do_not_overflow_and_are_right_near_zero() -> None:
    scores = torch.zeros(2, 4, 16, 32)
    scores.view(-1)[:9] = torch.tensor([-3e38, -1e4, -90.0, -1e-6, 1e-6, 1e-3, 90.0, 1e4, 3e38])
    for tree, function in ((tanh(S), torch.tanh), (sigmoid(S), torch.sigmoid)):
        actual = driven(tree, None, scores)[0].double() / LOG2_E
        assert actual.isfinite().all()
        assert (actual - function(scores.double())).abs().max() < 3 * 2.0**-24


def test_a_statement_per_node_each_node_once() -> None:
    shared = tanh(S * 0.5)
    text = source(shared * shared + shared, None, ())
    body = text.split("def score_gradient")[0]
    assert body.count("exp2") == 1
    assert len({line.split(" = ")[0] for line in body.splitlines() if " = " in line}) == body.count(" = ")


def test_the_softmax_base_melts_into_constants() -> None:
    body = source(softcap(20.0), None, ()).split("def score_gradient")[0]
    assert f"* {20 * LOG2_E!r}" in body
    assert body.count(" = ") == 3


def test_lengths_are_no_constants() -> None:
    text = source(alibi(), causal(), captured(alibi()))
    assert "sizes[4]" in text
    assert text == source(alibi(), causal(), captured(alibi()))


def test_only_tensors_that_take_a_gradient_get_one() -> None:
    both = relative_bias() + load(Captured("fixed", ("seqlen_k",)), KV) * load(Captured("slope", ("heads",), gradient=True), H)
    tensors = captured(both)
    assert [each.name for each in taking_gradients(tensors)] == ["relative", "slope"]
    text = source(both, None, tensors).split("def captured_gradients")[1]
    assert text.count("tl.atomic_add(gradients[0]") == text.count("tl.atomic_add(gradients[1]") == 1
    # All lanes add to one element of the slope: they are added up first.
    assert text.count("tl.sum(tl.sum(") == 1
    assert "captured_gradients" not in source(bias(gradient=False), None, captured(bias(gradient=False)))


def test_the_file_is_named_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = "answer = 42  # test_the_file_is_named_by_its_content\n"
    first = load_source(text)
    assert first is load_source(text)
    assert first.answer == 42
    assert Path(str(first.__file__)).read_text() == text
    assert len(list((tmp_path / "attnfuzz" / "triton").glob("*.py"))) == 1
    assert load_source(text.replace("42", "43")).answer == 43


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (const(2.0) * const(3.0) + S, 6.0 + S),
        (S * 1.0 + 0.0, S),
        ((S * 0.5) * 4.0, S * 2.0),
        ((S * 0.5) * 2.0, S),
        (where(whole(3) <= whole(4), S, -S), S),
        (truth(False) | (KV < Q), KV < Q),
        ((KV < Q) & truth(False), truth(False)),
        (to_float(whole(7) // whole(2)), const(3.0)),
        (Q + 0, Q),
        (S * 1e-30 * 1e-30, S * 1e-30 * 1e-30),
    ],
)
def test_constants_are_folded(tree: Expression, expected: Expression) -> None:
    assert folded(tree) == expected


def test_constants_beyond_float32_are_refused() -> None:
    with pytest.raises(BadArgument, match="float32 cannot hold"):
        folded(S + exp(const(500.0)))


def test_slopes_of_a_softcap_have_no_needless_factors() -> None:
    assert not [each for each in folded(by_score(softcap(20.0))).walk() if number(each) == 20.0]
