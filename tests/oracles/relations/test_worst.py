"""Ratios of many Differences: those of a straightforward computation for each, whatever is compared together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels.contract import Deviations
from attnfuzz.kernels.problem import Problem
from attnfuzz.oracles.attention import sequences, visible_keys
from attnfuzz.oracles.relations import worst
from attnfuzz.oracles.relations.difference import Difference
from attnfuzz.oracles.relations.sizes import Noise, Seeing
from attnfuzz.strategies.case import Recipe


def plainly(difference: Difference) -> float:
    """Element by element, in Python."""
    got, expected = difference.got, difference.expected
    allowed = difference.allowed.expand_as(got)
    heads, rows = got.shape[:2]
    scaled = [[[] for _ in range(rows)] for _ in range(heads)]
    for head in range(heads):
        for row in range(rows):
            parts = zip(*(each[head, row].reshape(-1).tolist() for each in (got, expected, allowed)), strict=True)
            scaled[head][row] = [one(*part, difference.output == "lse") for part in parts]
    ratios = [x / (worst.limit(1) if difference.noise else 1.0) for of_head in scaled for row in of_head for x in row]
    if difference.noise and ratios:
        dims = len(scaled[0][0])
        squares = [[sum(x * x for x in row) / dims for row in of_head] for of_head in scaled]
        terms = difference.terms.tolist() if isinstance(difference.terms, torch.Tensor) else [difference.terms or dims] * rows
        errors = [min(dims, max(4, x)) for x in terms]
        ratios += [math.sqrt(x) / worst.limit(n) for of_head in squares for x, n in zip(of_head, errors, strict=True)]
        ratios += [math.sqrt(sum(of_head) / rows) / worst.limit(sum(errors)) for of_head in squares]
    return max(ratios, default=0.0)


def one(got: float, expected: float, allowed: float, is_lse: bool) -> float:
    if got == expected and (is_lse or math.isfinite(got)):
        return 0.0
    if not all(map(math.isfinite, (got, expected, allowed))):
        return math.inf
    return abs(got - expected) / allowed if allowed else math.inf


def drawn(number: int) -> list[Difference]:
    """Differences of all kinds: small and large, empty, bit by bit, with limits that broadcast, with NaN and infinity."""
    generator = torch.Generator().manual_seed(number)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    differences = []
    for at in range(40):
        shape = (1 + at % 3, (0, 1, 5, 17)[at % 4], (1, 3, 16)[at % 3])
        noise, exact, is_lse = at % 5 < 3, at % 7 == 0, at % 6 == 0
        shape = shape[:2] if is_lse else shape
        expected = normal(*shape)
        allowed = torch.zeros(()) if exact else normal(*shape[:2], *(1 for _ in shape[2:])).abs()
        got = expected.clone() if exact and at % 2 else expected + allowed * normal(*shape) * 2.0 ** (at % 4 - 2)
        if at % 8 == 3 and got.numel():
            (got, expected, allowed)[at // 8 % 3].view(-1)[at % 2 if allowed.numel() > 1 else 0] = (math.nan, math.inf)[at % 2]
        if is_lse and got.numel():
            got.view(-1)[0] = expected.view(-1)[0] = -math.inf
        terms = (None, 1.0, 4.0, torch.arange(1.0, shape[1] + 1, dtype=torch.float64))[at // 3 % 4]
        output = "lse" if is_lse else "o"
        differences.append(Difference(output, 0, got, expected, allowed, noise=noise and not is_lse, terms=terms))
    return differences


def test_a_row_of_one_term_may_be_off_farther_than_a_row_of_many() -> None:
    """One rounding of dS is the error of a whole row of dK where a key is seen by one query."""
    one = torch.ones((1, 1, 192), dtype=torch.float64)
    shared = Difference("dk", 0, 3 * one, 0 * one, one, noise=True, terms=1.0)
    assert [each.value < 1 for each in worst.ratios([shared, dataclasses.replace(shared, terms=192.0)])] == [True, False]
    (ratio,) = worst.ratios([dataclasses.replace(shared, got=4 * one)])
    assert 1 < ratio.value < 4 / 3.5, "by its row: one element may be off by 6"


def test_terms_of_a_row_are_the_keys_or_the_queries_that_it_sums() -> None:
    problem = Problem(seqlens_q=(3,), seqlens_k=(5,), heads=4, kv_heads=2, dim_qk=16, dim_v=16, causal="bottom_right")
    for causal, by_query, by_key in (("bottom_right", [3, 4, 5], [6, 6, 6, 4, 2]), (None, 5, 6)):
        inputs = materialise(replace(problem, causal=causal), Recipe(), "cpu")
        (part,) = sequences(inputs)
        noise = Noise(inputs.problem, part, Deviations(), "cpu")
        for name, wanted, rows in (("o", by_query, 3), ("dq", by_query, 3), ("dk", by_key, 5), ("dv", by_key, 5)):
            values = torch.zeros((2 if name in ("dk", "dv") else 4, rows, 16), dtype=torch.float64)
            terms = noise.difference(name, values, values).terms
            assert (terms.tolist() if isinstance(terms, torch.Tensor) else terms) == wanted


@pytest.mark.parametrize("together", [1 << 17, 300, 0])
@pytest.mark.parametrize("number", range(4))
def test_ratios_are_those_of_a_straightforward_computation(number: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worst, "_AT_ONCE", together)
    differences = drawn(number)
    values = worst.ratios(iter(differences))
    assert {True, False} <= {each.value <= 1 for each in values}
    for difference, ratio in zip(differences, values, strict=True):
        assert (ratio.output, ratio.elements) == (difference.output, difference.got.numel())
        assert ratio.value == pytest.approx(plainly(difference), rel=1e-12)
        placed = worst.worst(difference)
        assert (placed.ratio if placed else 0.0) == pytest.approx(ratio.value, rel=1e-12)


def test_the_place_of_the_worst_is_where_a_fault_is() -> None:
    whole = [each for each in drawn(1) if each.got.numel() and each.got.dim() == 3]
    finite = [each for each in whole if torch.isfinite(each.expected).all() and torch.isfinite(each.allowed).all()]
    assert len(finite) > 10
    for difference in finite:
        head, row, dim = (size - 1 for size in difference.got.shape)
        got = difference.expected.clone()
        got[head, row, dim] += 1e9
        placed = worst.worst(dataclasses.replace(difference, got=got))
        assert placed is not None
        assert (placed.head, placed.bad_row, placed.dim, placed.over) == (head, row, dim, 1)
        assert (placed.got, placed.expected) == (got[head, row, dim], difference.expected[head, row, dim])


class Waits(TorchDispatchMode):
    """Refuses what waits for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name.split("::")[1] not in ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero")
        return func(*args, **(kwargs or {}))


def test_ratios_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    shipped: Callable[..., list[float]] = torch.Tensor.tolist
    differences = drawn(2)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: (reads.append(tensor), shipped(tensor))[1])
    with Waits():
        worst.ratios(differences)
    assert len(reads) == 1


@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize("lengths", [(5, 9), (9, 5), (1, 1), (4, 0), (0, 4)])
def test_sums_over_the_rows_that_see_a_key(causal: str | None, lengths: tuple[int, int]) -> None:
    problem = Problem(seqlens_q=lengths[:1], seqlens_k=lengths[1:], dim_qk=16, dim_v=16, causal=causal)
    seeing, visible = Seeing(problem, 0, torch.device("cpu")), visible_keys(problem, 0).double()
    by_row = torch.rand((3, lengths[0], 2), dtype=torch.float64)
    summed = torch.where(seeing.touched != 0, seeing.sums(by_row), 0.0)
    torch.testing.assert_close(summed, torch.einsum("hid,ij->hjd", by_row, visible))
    assert torch.equal(seeing.counts[:, 0], visible.sum(1))
    assert torch.equal(seeing.touched[:, 0], visible.any(0).double())
    assert torch.equal(seeing.rows_from, visible.sum(0).clamp(min=1.0))
