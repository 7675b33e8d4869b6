"""Which scores a mask_mod leaves in doubt: all of which float32 may answer otherwise, and nothing that is exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from support.doubt import ALL, MASKS_IN_DOUBT, TIES

from attnfuzz.kernels.expressions.evaluation import evaluate
from attnfuzz.kernels.expressions.folding import folded
from attnfuzz.kernels.expressions.named import MASKS
from attnfuzz.kernels.expressions.tree import (
    KV,
    B,
    Captured,
    Expression,
    H,
    Q,
    absolute,
    both,
    const,
    either,
    exp,
    load,
    maximum,
    minimum,
    node,
    sigmoid,
    tanh,
    to_float,
    truth,
    where,
    whole,
)
from attnfuzz.oracles.mask_doubt import doubtful
from attnfuzz.oracles.modifiers import leaves_of
from attnfuzz.strategies.modifiers import masks

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

HEADS, ROWS, KEYS = 3, 40, 50
LEAVES = leaves_of(
    torch.tensor(1), torch.arange(HEADS)[:, None, None], torch.arange(ROWS)[:, None], torch.arange(KEYS)[None, :], ROWS, KEYS
)
LEVEL, OTHER = (load(Captured(name, ("heads", "seqlen_k")), H, KV) for name in ("level", "other"))
TENSORS = {
    name: torch.randn(HEADS, KEYS, generator=torch.Generator().manual_seed(at)) for at, name in enumerate(("level", "other"))
}
EXACT = {
    "small whole numbers": to_float(Q) <= to_float(KV),
    "powers of two": to_float(Q) * 0.25 + 1.5 <= to_float(KV - Q) * 8.0,
    "products of whole numbers": to_float(Q) * to_float(KV) >= to_float(B + H) * 3.0 - 1.0,
    "captured floats": LEVEL >= OTHER,
    "captured floats, turned": absolute(-LEVEL) <= maximum(OTHER, 0.5),
    "times a power of two": to_float(KV) * 0.0625 >= LEVEL * 0.5,
    "nothing of what is not exact": to_float(Q) * 0.0 <= const(0.1) * to_float(whole(0)),
    "a choice": where(Q <= KV, to_float(Q), to_float(KV) * 0.5) <= 20.0,
    "beside what decides it": (Q < 0) & TIES,
    "beside what decides it the other way": (Q >= 0) | TIES,
    "an untaken branch": where(Q >= 0, to_float(KV), to_float(KV) * 0.1) <= 3.0,
    "far apart": to_float(Q) * 0.1 <= to_float(KV) * 0.3 + 0.05,
    "indices of what is exact": load(Captured("level", ("heads", "seqlen_k")), H, where(to_float(Q) <= 5.0, whole(0), KV)) >= 0.0,
}


def doubted(mask: Expression) -> torch.Tensor:
    doubt = doubtful(mask, LEAVES, TENSORS)
    assert doubt is not None
    return doubt.expand(HEADS, ROWS, KEYS)


def answer(mask: Expression, dtype: torch.dtype) -> torch.Tensor:
    return evaluate(mask, LEAVES, TENSORS, dtype).expand(HEADS, ROWS, KEYS)


@pytest.mark.parametrize("name", MASKS)
def test_masks_by_name_compare_no_floats(name: str) -> None:
    assert doubtful(MASKS[name], LEAVES, {}) is None


@seed(20250312)
@settings(max_examples=100, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(mask=masks(reads=True))
def test_drawn_masks_compare_no_floats(mask: Expression) -> None:
    assert all(each.kind != "float" for each in mask.walk())


@pytest.mark.parametrize("name", EXACT)
def test_what_is_exact_is_not_in_doubt(name: str) -> None:
    assert not doubted(EXACT[name]).any()
    assert torch.equal(answer(EXACT[name], torch.float32), answer(EXACT[name], torch.float64))


@pytest.mark.parametrize("name", MASKS_IN_DOUBT)
def test_all_that_float32_answers_otherwise_is_in_doubt(name: str) -> None:
    mask = MASKS_IN_DOUBT[name]
    other = answer(mask, torch.float32) != answer(mask, torch.float64)
    assert doubted(mask)[other].all()
    assert doubted(mask).any()


def test_equal_sides_are_in_doubt_and_no_others() -> None:
    q, k = LEAVES["q_idx"], LEAVES["kv_idx"]
    # 0 times anything is 0.
    assert torch.equal(doubted(TIES)[0], (q == 3 * k) & (q > 0))
    assert (answer(TIES, torch.float32) != answer(TIES, torch.float64)).any()
    assert doubted(ALL).all()


@pytest.mark.parametrize(
    ("mask", "where_"),
    [
        (TIES & (H >= 1), "h"),
        (TIES | (H < 1), "h"),
        (~(TIES & (H >= 1)), "h"),
        (where(TIES, whole(1), whole(1)) >= 1, "none"),
        (where(TIES, whole(1), whole(0)) >= 1, "all"),
        (where(TIES, to_float(Q), to_float(Q)) >= 1.0, "none"),
        (where(TIES, LEVEL, OTHER) >= 0.0, "all"),
        (load(Captured("level", ("heads", "seqlen_k")), H, where(TIES, KV, whole(0))) >= 0.0, "moved"),
    ],
    ids=str,
)
def test_doubt_goes_where_the_answer_depends_on_it(mask: Expression, where_: str) -> None:
    expected = doubted(TIES).clone()
    if where_ == "h":
        expected[0] = False
    if where_ == "none":
        expected[:] = False
    if where_ == "moved":
        expected &= LEAVES["kv_idx"] > 0
    assert torch.equal(doubted(mask), expected)


@pytest.mark.parametrize(
    "mask",
    [
        exp(to_float(Q + 89) * 1.5) >= exp(to_float(KV + 89)),
        exp(-to_float(Q + 150)) > 0.0,
        to_float(Q + 1) * 1e-30 * 1e-30 > 0.0,
        exp(exp(to_float(Q + 10))) > to_float(KV),
        exp(to_float(Q + 800)) - exp(to_float(KV + 800)) > 0.0,
    ],
    ids=str,
)
def test_what_leaves_the_range_of_float32_is_in_doubt(mask: Expression) -> None:
    assert doubted(mask)[answer(mask, torch.float32) != answer(mask, torch.float64)].all()
    assert doubted(mask).any()


def _numbers() -> st.SearchStrategy[Expression]:
    constant = st.sampled_from((0.1, 0.3, 0.5, 1.0, -3.0, 0.0625, 0.7, 1e-3, 2.0**-20, 1e30, 1e-30)).map(const)
    leaf = st.sampled_from((to_float(Q), to_float(KV), to_float(Q - KV), to_float(Q * 3 + H), LEVEL, OTHER)) | constant

    def grown(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
        pairs = st.tuples(inner, inner)
        return st.one_of(
            st.tuples(st.sampled_from(("add", "sub", "mul", "mul")), pairs).map(lambda x: node(x[0], *x[1])),
            pairs.map(lambda x: minimum(*x)),
            pairs.map(lambda x: maximum(*x)),
            st.tuples(st.sampled_from((tanh, sigmoid, exp, absolute)), inner).map(lambda x: x[0](x[1])),
            st.tuples(inner, inner, pairs).map(lambda x: where(x[0] <= x[1], *x[2])),
        )

    return st.recursive(leaf, grown, max_leaves=6)


def _comparisons() -> st.SearchStrategy[Expression]:
    pair = st.tuples(st.sampled_from(("le", "lt", "ge", "gt", "eq", "ne")), _numbers(), _numbers())
    one = pair.map(lambda x: node(x[0], x[1], x[2])) | st.sampled_from((Q <= KV, truth(True)))
    joined = st.tuples(st.sampled_from((both, either)), one, one).map(lambda x: x[0](x[1], x[2]))
    return one | joined | joined.map(lambda x: ~x)


@seed(20250311)
@settings(max_examples=300, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(mask=_comparisons())
def test_random_masks_are_in_doubt_wherever_float32_answers_otherwise(mask: Expression) -> None:
    """Evaluated as it is, and with constants folded, as kernels print it."""
    doubt = doubtful(mask, LEAVES, TENSORS)
    truth_ = answer(mask, torch.float64)
    for each in (mask, _folded(mask)):
        other = answer(each, torch.float32) != truth_
        assert not other.any() if doubt is None else doubt.expand_as(other)[other].all()


def _folded(mask: Expression) -> Expression:
    try:
        return folded(mask)
    except ValueError:
        return mask
