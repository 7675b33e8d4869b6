"""LSE in other forms than the contract's: each is converted by one keyword, right ones pass, and a wrong one is found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import adapters as support

from attnfuzz.harness.audit.conformance.check import check_adapter
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.adapters import Adapted, dense, varlen
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Needs, Problem
from attnfuzz.strategies.case import Case

SMALL: dict[str, Any] = {"dims": ((8, 8),), "dtypes": ("float32",), "devices": ("cpu",), "groups": None, "unequal": True}


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def padded_to(x: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    """`x` with rows of 7 behind it up to a multiple: any number there is ignored."""
    shape = list(x.shape)
    shape[dim] = -x.shape[dim] % multiple
    return torch.cat([x, x.new_full(shape, 7.0)], dim)


def flash_in(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def attention(q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: bool = False) -> Any:
        o, lse, _ = support.flash(q, k, v, softmax_scale=softmax_scale, causal=causal, return_attn_probs=True)
        return o, change(lse)

    return attention


def varlen_in(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def attention(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, causal: bool = False
    ) -> Any:
        o, lse = support.flash_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal, return_lse=True
        )
        return o, change(lse, cu_seqlens_q)

    return attention


def by_sequence(lse: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    lengths = (ends[1:] - ends[:-1]).tolist()
    out = lse.new_full((len(lengths), lse.shape[0], max(lengths)), 7.0)
    for i, n in enumerate(lengths):
        out[i, :, :n] = lse[:, int(ends[i]) : int(ends[i]) + n]
    return out


DENSE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, Any]]] = {
    "base 2": (lambda lse: lse / math.log(2), {"lse_base": 2}),
    "tokens before heads": (lambda lse: lse.mT.contiguous(), {"lse_layout": "bsh"}),
    "padded": (lambda lse: padded_to(lse, 2, 16), {"lse_multiple": 16}),
    "all three": (
        lambda lse: padded_to(lse.mT / math.log(2), 1, 128),
        {"lse_base": 2, "lse_layout": "bsh", "lse_multiple": 128},
    ),
}
RAGGED: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dict[str, Any]]] = {
    "base 2": (lambda lse, ends: lse / math.log(2), {"lse_base": 2}),
    "tokens before heads": (lambda lse, ends: lse.mT.contiguous(), {"lse_layout": "th"}),
    "padded total": (lambda lse, ends: padded_to(lse, 1, 64), {"lse_multiple": 64}),
    "a row of heads for each sequence": (by_sequence, {"lse_layout": "bhs"}),
    "sequences, base 2, padded": (
        lambda lse, ends: padded_to(by_sequence(lse, ends).mT / math.log(2), 1, 128),
        {"lse_base": 2, "lse_layout": "bsh", "lse_multiple": 128},
    ),
}


def failures(kernel: Adapted, **changes: Any) -> list[str]:
    plain: dict[str, Any] = {"seqlens_q": (5, 5), "seqlens_k": (9, 9), "dim_qk": 8, "dim_v": 8, "dtype": "float32"}
    needs = Needs(outputs=kernel.capabilities.outputs, dlse=kernel.capabilities.dlse)
    problem = Problem(
        **{**plain, "packing": kernel.capabilities.packings[0], "heads": 4, "kv_heads": 2, "needs": needs, **changes}
    )
    registry.register(kernel)
    assert kernel.supports(problem, Config(), "cpu") is None
    return [each.message for each in run_trial(Case(kernel=kernel.name, problem=problem), "cpu").failures]


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("changes", [{}, {"causal": "bottom_right", "seqlens_q": (9, 9), "seqlens_k": (5, 5)}])
def test_a_dense_lse_is_converted_with_its_gradient(name: str, changes: dict[str, Any]) -> None:
    change, keywords = DENSE[name]
    kernel = dense(flash_in(change), name="theirs", lse=True, dlse=not changes, **keywords, **SMALL)
    assert failures(kernel, **changes) == []


@pytest.mark.parametrize("name", RAGGED)
def test_a_ragged_lse_is_converted(name: str) -> None:
    change, keywords = RAGGED[name]
    kernel = varlen(varlen_in(change), name="theirs", lse=True, dlse=True, slack=True, zero_q=True, **keywords, **SMALL)
    assert failures(kernel, seqlens_q=(5, 0, 17), seqlens_k=(9, 3, 4), slack_q=3, slack_k=2) == []


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("planted", [lambda lse: lse + 1e-3, lambda lse: lse.roll(1, 1), lambda lse: lse.roll(1, 2)])
def test_a_wrong_lse_is_found_in_every_form(name: str, planted: Callable[[torch.Tensor], torch.Tensor]) -> None:
    change, keywords = DENSE[name]
    kernel = dense(flash_in(lambda lse: change(planted(lse))), name="theirs", lse=True, gradients=False, **keywords, **SMALL)
    assert any("LSE" in each for each in failures(kernel))


@pytest.mark.parametrize("name", DENSE)
def test_a_form_that_is_not_declared_is_found(name: str) -> None:
    kernel = dense(flash_in(DENSE[name][0]), name="theirs", lse=True, gradients=False, **SMALL)
    assert any("LSE" in each for each in failures(kernel))


def test_another_shape_than_declared_is_said_in_words() -> None:
    kernel = dense(flash_in(lambda lse: lse), name="theirs", lse=True, lse_multiple=16, gradients=False, **SMALL)
    (message,) = failures(kernel)
    assert "LSE has the shape (2, 4, 5) where (2, 4, 16) is expected of lse_layout='bhs', lse_multiple=16" in message


def test_an_own_backward_gets_the_functions_own_lse() -> None:
    shapes: list[tuple[int, ...]] = []

    def backward(d_o: Any, q: Any, k: Any, v: Any, o: Any, lse: torch.Tensor, causal: bool = False, **_: Any) -> Any:
        shapes.append(tuple(lse.shape))
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            return torch.autograd.grad(support.flash(*leaves, causal=causal), leaves, d_o)

    kernel = dense(
        flash_in(lambda lse: padded_to(lse, 2, 16)), name="theirs", lse=True, lse_multiple=16, backward=backward, **SMALL
    )
    assert failures(kernel) == []
    assert shapes == [(2, 4, 16)]


def test_check_adapter_says_how_lse_is_read() -> None:
    change, keywords = DENSE["all three"]
    kernel = dense(flash_in(change), name="theirs.lse", lse=True, **keywords, **SMALL)
    registry.register(kernel)
    done = check_adapter("theirs.lse", "cpu", in_process=True)
    assert [each for each in done.rows if each.status in ("wrong", "not run")] == []
    (row,) = [each for each in done.rows if each.check == "form of LSE"]
    assert row.found == "read as bsh, logarithm to the base 2, padded to multiples of 128"
    registry.register(dense(flash_in(change), name="theirs.lse", lse=True, **{**keywords, "lse_base": math.e}, **SMALL))
    done = check_adapter("theirs.lse", "cpu", in_process=True)
    (row,) = [each for each in done.rows if each.check == "O and LSE"]
    assert (row.status, "lse_base" in row.remedy) == ("wrong", True)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"lse_base": 1}, "lse_base=1: the base of a logarithm is a number beyond 1"),
        ({"lse_base": math.nan}, "lse_base=nan"),
        ({"lse_multiple": 0}, "lse_multiple=0: rows are padded to a multiple of 1 or more"),
        ({"lse_layout": "th"}, "lse_layout='th': a dense LSE has no such order; use 'bhs' or 'bsh'"),
        ({"lse": False, "lse_base": 2}, "a form of LSE is given, and the function returns none"),
    ],
)
def test_forms_that_cannot_be_are_refused_in_words(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        dense(flash_in(lambda lse: lse), **{"lse": True, **keywords}, **SMALL)


def test_a_padded_lse_has_no_slack_rows_of_its_own() -> None:
    with pytest.raises(BadArgument, match="a padded LSE has no slack rows of its own"):
        varlen(varlen_in(by_sequence), lse=True, lse_layout="bhs", slack=True, slack_rows="untouched", **SMALL)
