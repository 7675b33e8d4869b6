"""Dense attention with modifiers in float64, by its definition and by autograd, and how far off a kernel is from it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels.contract import Config, Inputs, Kernel
from attnfuzz.kernels.expressions.evaluation import evaluate
from attnfuzz.kernels.expressions.tree import Expression, to_data
from attnfuzz.kernels.modified import tensors_of
from attnfuzz.kernels.problem import OUTPUT_NAMES, Needs, Problem
from attnfuzz.strategies.case import Recipe

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

TOLERANCE = {"float16": 4e-3, "bfloat16": 2.5e-2, "float32": 1e-5}
LSE_TOLERANCE = 3e-6


def dense(
    seqlen_q: int,
    seqlen_k: int,
    *,
    batch: int = 2,
    score: Expression | None = None,
    mask: Expression | None = None,
    **fields: Any,
) -> Problem:
    """Two sequences of four heads in two groups, with dLSE."""
    plain: dict[str, Any] = {
        "seqlens_q": (seqlen_q,) * batch, "seqlens_k": (seqlen_k,) * batch, "packing": "dense", "heads": 4, "kv_heads": 2,
        "dim_qk": 16, "dim_v": 32, "dtype": "float32", "needs": Needs(dlse=True),
        "score_mod": None if score is None else to_data(score), "mask_mod": None if mask is None else to_data(mask),
    }  # fmt: skip
    return Problem(**{**plain, **fields})


def inputs_of(problem: Problem, **recipe: Any) -> Inputs:
    return materialise(problem, Recipe(**{"seed": 3, **recipe}), "cpu")


def visible(problem: Problem, leaves: dict[str, Any], captured: dict[str, torch.Tensor]) -> torch.Tensor:
    """(batch, heads, seqlen_q, seqlen_k), by the words of Problem."""
    i, j, n_q, n_k = leaves["q_idx"], leaves["kv_idx"], leaves["seqlen_q"], leaves["seqlen_k"]
    seen = torch.ones(problem.batch, problem.heads, n_q, n_k, dtype=torch.bool)
    diagonal = i + (0 if problem.causal == "top_left" else n_k - n_q)
    if problem.causal is not None:
        seen &= j <= diagonal
    left, right = problem.window or (None, None)
    if left is not None:
        seen &= j >= diagonal - left
    if right is not None:
        seen &= j <= diagonal + right
    if problem.mask_mod is not None:
        from attnfuzz.kernels.expressions.tree import parse

        seen &= evaluate(parse(problem.mask_mod), leaves, captured, torch.float64)
    return seen


def reference(inputs: Inputs) -> dict[str, torch.Tensor]:
    """O, LSE, dQ, dK, dV and by "d <name>" gradients of captured tensors; slack rows left out."""
    from attnfuzz.kernels.expressions.tree import parse

    p = inputs.problem
    n_q, n_k = p.seqlens_q[0], p.seqlens_k[0]
    q, k, v = (x.double().requires_grad_() for x in (inputs.q[:, :n_q], inputs.k[:, :n_k], inputs.v[:, :n_k]))
    tensors = tensors_of(p)
    captured = {
        each.name: x.double().requires_grad_() if each.gradient else x for each, x in zip(tensors, inputs.captured, strict=True)
    }
    shapes = {"b": (-1, 1, 1, 1), "h": (1, -1, 1, 1), "q_idx": (1, 1, -1, 1), "kv_idx": (1, 1, 1, -1)}
    leaves: dict[str, Any] = {
        name: torch.arange(size).view(shapes[name]) for name, size in zip(shapes, (p.batch, p.heads, n_q, n_k), strict=True)
    }
    leaves |= {"seqlen_q": n_q, "seqlen_k": n_k}
    heads_k, heads_v = (x.repeat_interleave(p.groups, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, heads_k) * p.scale
    if p.softcap:
        s = p.softcap * torch.tanh(s / p.softcap)
    if p.score_mod is not None:
        s = evaluate(parse(p.score_mod), {**leaves, "score": s}, captured, torch.float64).expand(s.shape)
    seen = visible(p, leaves, captured)
    blind = ~seen.any(-1)
    lse = torch.logsumexp(s.masked_fill(~seen, -math.inf).masked_fill(blind[..., None], 0.0), -1)
    # Masked before exp as well: what is hidden may be beyond all bounds, and infinity times 0 would be a gradient of NaN.
    weights = torch.exp((s - lse[..., None]).masked_fill(~seen, 0.0)).masked_fill(~seen, 0.0)
    o = torch.einsum("bhij,bjhd->bihd", weights, heads_v)
    loss = (o * inputs.d_o[:, :n_q].double()).sum()
    if inputs.d_lse is not None:
        loss = loss + (lse * inputs.d_lse[..., :n_q].double()).masked_fill(blind, 0.0).sum()
    taking = {f"d {each.name}": captured[each.name] for each in tensors if each.gradient}
    gradients = torch.autograd.grad(loss, (q, k, v, *taking.values()), allow_unused=True, materialize_grads=True)
    found = {"o": o.detach(), "lse": lse.detach().masked_fill(blind, -math.inf)}
    return {**found, **dict(zip(("dq", "dk", "dv", *taking), gradients, strict=True))}


def run(kernel: Kernel, inputs: Inputs, config: Config | None = None) -> dict[str, torch.Tensor]:
    """The same of a kernel."""
    p = inputs.problem
    n_q, n_k = p.seqlens_q[0], p.seqlens_k[0]
    built = kernel.build(p, config or kernel.configs(p)[0], "cpu")
    o, lse = built.forward(inputs)
    assert lse is not None
    assert o.shape == (*inputs.q.shape[:-1], p.dim_v)
    assert lse.shape == (p.batch, p.heads, inputs.q.shape[1])
    assert lse.dtype == torch.float32
    dq, dk, dv, *rest = built.backward(inputs, o, lse)
    found = {"o": o[:, :n_q], "lse": lse[..., :n_q], "dq": dq[:, :n_q], "dk": dk[:, :n_k], "dv": dv[:, :n_k]}
    tensors = tensors_of(p)
    given = rest[0] if rest else (None,) * len(tensors)
    for each, gradient in zip(tensors, given, strict=True):
        assert each.gradient == (gradient is not None), each
        if gradient is not None:
            assert gradient.dtype == torch.float32
            found[f"d {each.name}"] = gradient
    return found


def worst(expected: torch.Tensor, got: torch.Tensor) -> float:
    """The largest error over the largest value; infinite where -inf or NaN do not agree."""
    if expected.shape != got.shape or not torch.equal(expected.isfinite(), got.isfinite()):
        return math.inf
    error = (expected - got.double()).nan_to_num(0.0).abs()
    return float(error.max() / expected.nan_to_num(0.0, neginf=0.0).abs().max().clamp(min=1e-3)) if error.numel() else 0.0


def errors(kernel: Kernel, inputs: Inputs, config: Config | None = None) -> dict[str, float]:
    expected, found = reference(inputs), run(kernel, inputs, config)
    assert list(expected) == list(found)
    assert list(expected)[:5] == list(OUTPUT_NAMES)
    return {name: worst(expected[name], found[name]) for name in expected}


def assert_right(kernel: Kernel, inputs: Inputs, config: Config | None = None, *, lse: float = LSE_TOLERANCE) -> None:
    found = errors(kernel, inputs, config)
    assert found.pop("lse") <= lse, found
    assert max(found.values()) <= TOLERANCE[inputs.problem.dtype], found
