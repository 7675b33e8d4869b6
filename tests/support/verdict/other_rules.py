"""Three other rules by which attention kernels are usually accepted, for the same outputs as the verdict.

- `close`: every |error| <= 1e-2 + 1e-2 |reference|, the default of many test suites.
- `twice`: flash-attention's: max |error| <= 2 max |error of a low-precision reference| + 2 max |(ref + 0.3 - 0.3) - ref|.
- `mean`: that of PyTorch's flex attention: mean |error| <= 1.1 mean |error of a low-precision reference|, against float64.

All three look at O, dQ, dK and dV; none at LSE. The low-precision references are emulated here: half after every operation
(flash-attention's attention_ref without upcast), and half products with a float32 softmax (eager flex attention).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple

import torch

from attnfuzz.kernels.contract import Inputs, Outputs
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.oracles.attention import SequenceData, sequences, visible_keys

Rule = Literal["close", "twice", "mean"]
TITLES: Final[dict[Rule, str]] = {"close": "1e-2", "twice": "FA", "mean": "flex"}

_JUDGED: tuple[OutputName, ...] = ("o", "dq", "dk", "dv")
_TOLERANCE, _TIMES, _SHIFT, _FUDGE = 1e-2, 2.0, 0.3, 1.1
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_Parts = dict[OutputName, torch.Tensor]


class Compared(NamedTuple):
    """One output and what a rule holds it against, heads first, float64: `got` in the dtype's values, `exact` of float64,

    `nearest` = `exact` rounded to `dtype`, and the two low-precision references.
    """

    dtype: torch.dtype
    got: torch.Tensor
    exact: torch.Tensor
    nearest: torch.Tensor
    rounded_steps: torch.Tensor
    half_products: torch.Tensor


def close(x: Compared) -> bool:
    """Whether |got - ref| <= 1e-2 + 1e-2 |ref| everywhere, the reference in the dtype."""
    return bool(torch.allclose(x.got, x.nearest, rtol=_TOLERANCE, atol=_TOLERANCE))


def twice(x: Compared) -> bool:
    """Whether the largest error is at most twice the reference's, plus what adding and taking 0.3 away does in the dtype."""
    if not x.got.numel():
        return True
    ref = x.nearest.to(x.dtype)
    slack = ((ref + _SHIFT - _SHIFT).double() - x.nearest).abs().max()
    error, allowed = (x.got - x.nearest).abs().max(), (x.rounded_steps - x.nearest).abs().max()
    return bool(error <= _TIMES * allowed + _TIMES * slack)


def mean(x: Compared) -> bool:
    """Whether the mean error is at most 1.1 times the reference's."""
    if not x.got.numel():
        return True
    error, allowed = (x.got - x.exact).abs().mean(), (x.half_products - x.exact).abs().mean()
    return bool(error <= _FUDGE * allowed)


RULES: Final[dict[Rule, Callable[[Compared], bool]]] = {"close": close, "twice": twice, "mean": mean}


def alarms(outputs: Mapping[OutputName, Compared]) -> frozenset[Rule]:
    """The rules that some of the outputs break."""
    return frozenset(name for name, rule in RULES.items() if not all(rule(each) for each in outputs.values()))


class References(NamedTuple):
    """What the rules need beside a kernel's outputs, the same for every kernel."""

    inputs: Inputs
    exact: _Parts
    nearest: _Parts
    rounded_steps: _Parts
    half_products: _Parts


def references(inputs: Inputs, exact: Mapping[OutputName, torch.Tensor]) -> References:
    """The low-precision references beside the float64 one, `exact` (heads, tokens, dim) over the whole batch."""
    dtype = _DTYPES[inputs.problem.dtype]
    exact = {name: exact[name] for name in _JUDGED}
    nearest = {name: x.to(dtype).double() for name, x in exact.items()}
    data = list(sequences(inputs))
    return References(
        inputs,
        exact,
        nearest,
        _joined([_low_precision(inputs.problem, each, in_half=True) for each in data]),
        _joined([_low_precision(inputs.problem, each, in_half=False) for each in data]),
    )


def compared(outputs: Outputs, against: References) -> dict[OutputName, Compared]:
    """A kernel's outputs beside the references."""
    problem = against.inputs.problem
    pairs = {}
    for name in _JUDGED:
        got: torch.Tensor = getattr(outputs, name)
        lengths = problem.seqlens_q if name in ("o", "dq") else problem.seqlens_k
        pairs[name] = Compared(
            _DTYPES[problem.dtype],
            _heads_first(problem, got, lengths),
            against.exact[name],
            against.nearest[name],
            against.rounded_steps[name],
            against.half_products[name],
        )
    return pairs


def _heads_first(problem: Problem, x: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """(heads, tokens, dim) float64 of a kernel's output, slack rows left out."""
    x = x[:, : lengths[0]].flatten(0, 1) if problem.packing == "dense" else x[: sum(lengths)]
    return x.transpose(0, 1).double()


def _joined(parts: list[_Parts]) -> _Parts:
    return {name: torch.cat([each[name] for each in parts], 1).double() for name in _JUDGED}


def _low_precision(problem: Problem, data: SequenceData, *, in_half: bool) -> _Parts:
    """O, dQ, dK, dV of one sequence by whole matrices: every step rounded to the dtype, or products alone."""
    dtype, scale, groups = data.q.dtype, problem.scale, problem.groups

    def half(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).float()

    q, d_o = data.q.float(), data.d_o.float()
    k, v = (x.float().repeat_interleave(groups, 0) for x in (data.k, data.v))
    mask = visible_keys(problem, data.index)
    blind = ~mask.any(-1, keepdim=True)
    scaled_k = half(k * scale) if in_half else k
    s = half(q @ scaled_k.mT) * (1.0 if in_half else scale)
    s = s.masked_fill(~(mask | blind), -torch.inf)
    p = torch.softmax(s, -1).masked_fill(blind, 0.0)
    p_half = half(p)
    d_p = half(d_o @ v.mT)
    p_back = p_half if in_half else p
    d_s = p_back * (d_p - (d_p * p_back).sum(-1, keepdim=True))
    d_s = half(d_s if in_half else d_s * scale)
    dk = half(d_s.mT @ q)
    if in_half:
        dk = half(dk * scale)

    def of_group(x: torch.Tensor) -> torch.Tensor:
        return half(x.unflatten(0, (problem.kv_heads, groups)).sum(1))

    return {"o": half(p_half @ v), "dq": half(d_s @ scaled_k), "dk": of_group(dk), "dv": of_group(half(p_half.mT @ d_o))}
