"""Problems of a relation's other launches, and why a relation does not apply to a Case. Data only, no Hypothesis."""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec.structs import replace

from attnfuzz.kernels.contract import Capabilities, Device, Kernel
from attnfuzz.kernels.problem import LAYOUTS, ORDERS, Layout, Needs, Problem
from attnfuzz.strategies.case import RELATIONS, Case, Check

__all__ = ["SPREAD", "related_problems", "spread", "why_not_relation"]

SPREAD = 1.5
"""The largest deviation of scores at which values count as generic: a row then weighs about n / 9 of its keys."""
_DEVIATION = 0.816
"""Standard deviation of the inputs' noise (harness/trial/noise.py)."""
_LARGEST = 2**31
_TINY_ROWS = 256
_ALIGNED = 16


def related_problems(check: Check, problem: Problem, seed: int) -> tuple[Problem, ...]:
    """Return the Problems of the related launches without the Case's own; `seed` selects what the relation leaves open."""
    match check:
        case "split_batch":
            pairs = zip(problem.seqlens_q, problem.seqlens_k, strict=True)
            return tuple(replace(problem, seqlens_q=(q,), seqlens_k=(k,), slack_q=0, slack_k=0) for q, k in pairs)
        case "repeated_heads":
            return (replace(problem, kv_heads=problem.heads),)
        case "split_keys":
            cuts = tuple(_cut(keys, seed) for keys in problem.seqlens_k)
            rests = tuple(keys - cut for keys, cut in zip(problem.seqlens_k, cuts, strict=True))
            forward = Needs(outputs=("o", "lse"))
            return tuple(replace(problem, seqlens_k=part, slack_k=0, needs=forward) for part in (cuts, rests))
        case "huge_strides":
            # Another offset in each tensor: most faults are in code that tensors share.
            return tuple(_pitched(problem, name, seed + at) for at, name in enumerate(LAYOUTS))
        case _:
            return (problem,)


def _cut(keys: int, seed: int) -> int:
    """Return where to cut the keys of a sequence: in the middle, anywhere, after the first, before the last, before the first."""
    choices = (keys // 2, seed // 5 % (keys + 1), 1, keys - 1, 0)
    return max(0, min(choices[seed % 5], keys))


def _pitched(problem: Problem, name: str, number: int) -> Problem:
    """Return `problem` with one tensor so wide that an offset in it is 2^31 elements or just more: `number` selects which.

    That of the last row, over all sequences; of the last sequence, where tensors have a dimension for several; or of the last
    head, where heads are stored outside tokens. The latter two are one product of an index and a stride.
    """
    by_query = name in ("layout_q", "layout_do")
    lengths = problem.seqlens_q if by_query else problem.seqlens_k
    heads = problem.heads if by_query else problem.kv_heads
    dim = problem.dim_qk if name in ("layout_q", "layout_k") else problem.dim_v
    several = problem.packing == "dense" and problem.batch > 1
    rows, order, row = max(2, sum(lengths)) - 1, None, heads * dim
    if number % 3 == 1 and heads > 1 and heads * sum(lengths) <= _TINY_ROWS and not several:
        order, row = ORDERS[problem.packing][1], dim
        rows = (heads - 1) * sum(lengths)
    elif number % 3 and several:
        rows = (problem.batch - 1) * lengths[0]
    stride = -(-_LARGEST // max(1, rows) // _ALIGNED) * _ALIGNED + _ALIGNED
    return replace(problem, **{name: Layout(order=order, pitch=max(0, stride - row))})


def spread(problem: Problem, factor: float = 1.0) -> float:
    """Return the deviation of scores of noise, where scales multiply q times k by `factor`."""
    return _DEVIATION**2 * abs(problem.scale) * math.sqrt(problem.dim_qk) * factor


def why_not_relation(kernel: Kernel, case: Case, device: Device) -> str | None:
    """Return why the relation of `case` does not apply to it, or None; the kernel must support `case`."""
    problem, can = case.problem, kernel.capabilities
    if case.check not in RELATIONS:
        return f"check={case.check!r}: no relation"
    if reason := _why_not_generic(case) or _WHY_NOT.get(case.check, _nothing)(problem, can):
        return f"check={case.check!r}: {reason}"
    for related in related_problems(case.check, problem, case.recipe.seed):
        if reason := kernel.supports(related, case.config, device):
            return f"check={case.check!r}: {kernel.name} does not support the related launch: {reason}"
    return None


def _why_not_generic(case: Case) -> str | None:
    """Return why two correct runs differ by an unknown amount, or None: it is known for plain scores of near-normal values."""
    problem, recipe = case.problem, case.recipe
    for name in ("window", "softcap", "sinks", "page_size", "score_mod", "mask_mod"):
        if getattr(problem, name):
            return f"{name}={getattr(problem, name)!r}: the size of errors is not known under it"
    for name in ("layout_q", "layout_k", "layout_v", "layout_do"):
        if getattr(problem, name) != Layout():
            return f"{name}: the Case itself is contiguous"
    if problem.needs.dlse:
        return "needs.dlse: a gradient of LSE has no part in it"
    if recipe.pattern != "normal":
        return f"pattern={recipe.pattern!r}: the size of errors is known for 'normal' only"
    if (deviation := spread(problem, recipe.q_scale * recipe.k_scale)) > SPREAD:
        return f"scores of deviation {deviation:.3g}: at most {SPREAD}"
    for name in ("v_scale", "do_scale"):
        if not 2.0**-4 <= getattr(recipe, name) <= 2.0**4:
            return f"{name}={getattr(recipe, name)!r}: 2**-4 to 2**4"
    return None if problem.total_q and problem.total_k else "no queries or no keys"


def _nothing(problem: Problem, can: Capabilities) -> str | None:  # noqa: ARG001 - the table's signature
    return None


def _split_batch(problem: Problem, can: Capabilities) -> str | None:  # noqa: ARG001
    return None if problem.batch > 1 else "one sequence has no parts"


def _without_mask(problem: Problem, can: Capabilities) -> str | None:  # noqa: ARG001
    return f"causal={problem.causal!r}: only without a mask" if problem.causal else None


def _repeated_heads(problem: Problem, can: Capabilities) -> str | None:  # noqa: ARG001
    return None if problem.groups > 1 else "every query head has its own keys already"


def _shifted_scores(problem: Problem, can: Capabilities) -> str | None:
    if problem.dim_qk < 2:
        return f"dim_qk={problem.dim_qk}: one dim moves the scores, another makes them"
    rounded = can.deviations.prescaled_q or can.deviations.half_scaled_k
    return "scores move by the rounding of the scaled q or k as well" if rounded else None


def _future_keys(problem: Problem, can: Capabilities) -> str | None:  # noqa: ARG001
    if problem.causal is None:
        return "causal=None: every key is seen by every query"
    least_q, least_k = (1, 2) if problem.causal == "top_left" else (2, 1)
    pairs = zip(problem.seqlens_q, problem.seqlens_k, strict=True)
    return None if any(q >= least_q and k >= least_k for q, k in pairs) else "every prefix of queries sees every key"


def _split_keys(problem: Problem, can: Capabilities) -> str | None:
    if not {"o", "lse"} <= set(can.outputs):
        return "parts are merged by their LSE: O and LSE are needed"
    return _without_mask(problem, can)


def _huge_strides(problem: Problem, can: Capabilities) -> str | None:
    if not can.layouts:
        return "the kernel takes contiguous tensors only"
    if problem.slack_q or problem.slack_k:
        return "slack rows would be gigabytes of NaN"
    totals = (problem.total_q, problem.total_k)
    return None if min(totals) >= 2 and max(totals) <= _TINY_ROWS else f"tokens={totals}: 2 to {_TINY_ROWS}"


_WHY_NOT: dict[Check, Callable[[Problem, Capabilities], str | None]] = {
    "split_batch": _split_batch,
    "permuted_keys": _without_mask,
    "repeated_heads": _repeated_heads,
    "shifted_scores": _shifted_scores,
    "future_keys": _future_keys,
    "split_keys": _split_keys,
    "huge_strides": _huge_strides,
}
