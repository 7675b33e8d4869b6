"""Problems of calls that come before a Case's own: the same, or one that differs in its lengths, its scale or its mask.

They follow from the Case alone: a Case stays all that is needed to do a Trial again. No Hypothesis here, as in case.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec.structs import replace

from attnfuzz.kernels.contract import Config, Device, Kernel
from attnfuzz.kernels.problem import BadArgument, Problem
from attnfuzz.strategies.case import CALLS, Case, Check

__all__ = ["drawn_call", "earlier_problems", "other_problems", "why_not_call"]

_WHAT = {"other_shape": "lengths", "other_scale": "softmax_scale", "other_mask": "mask"}


def earlier_problems(kernel: Kernel, case: Case, device: Device) -> tuple[Problem, ...]:
    """The Problems of the calls before the Case's own, in order; the Case's own is always the last call and is not among them.

    Raises:
        BadArgument: the kernel takes no such other Problem; `why_not_call` tells before.
    """
    problem = case.problem
    if case.check == "twice":
        return (problem,)
    if reason := why_not_call(kernel, case, device):
        raise BadArgument(f"case: {reason}")
    found = other_problems(kernel, case.check, problem, case.config, device)
    other = found[_hashed(case) % len(found)]
    # The other lengths come first as well: what is kept of a first call would serve the Case's own in the order A, B, A.
    return (other, problem, other) if case.check == "other_shape" else (other,)


def why_not_call(kernel: Kernel, case: Case, device: Device) -> str | None:
    """Why the Case's check, one of CALLS, makes no sense for its kernel and Problem, or None."""
    assert case.check in CALLS
    if case.check == "twice" or other_problems(kernel, case.check, case.problem, case.config, device):
        return None
    return f"check={case.check!r}: {kernel.name} takes no Problem that differs from this one in its {_WHAT[case.check]}"


def other_problems(kernel: Kernel, check: Check, problem: Problem, config: Config, device: Device) -> tuple[Problem, ...]:
    """Every Problem that a call before one of `problem` may have under `check`, which the kernel takes with the same Config."""
    makers = {"other_shape": _other_lengths, "other_scale": _other_scales, "other_mask": _other_masks}
    found: dict[Problem, None] = {}
    for changes in makers[check](kernel, problem, config):
        try:
            other = replace(problem, **changes)
        except BadArgument:  # a scale beyond float32, say
            continue
        if other != problem and kernel.supports(other, config, device) is None:
            found[other] = None
    return tuple(found)


def _other_lengths(_: Kernel, problem: Problem, config: Config) -> Iterator[dict[str, Any]]:
    """Longer, shorter, and, in a ragged batch, a sequence more and one less. The totals differ."""
    # Up to a tile: past the end of the last one often, and no larger a Problem than the Case's own in kind.
    by = 1 + int(_digest(problem, config), 16) % config.tile("tile_m", 16)
    pairs = tuple(zip(problem.seqlens_q, problem.seqlens_k, strict=True))
    ways = [tuple((n_q + by, n_k + by) for n_q, n_k in pairs), tuple((_half(n_q), _half(n_k)) for n_q, n_k in pairs)]
    ways.append((*pairs, *pairs[:1]))
    if len(pairs) > 1:
        ways.append(pairs[1:])
    for way in ways:
        seqlens_q, seqlens_k = tuple(pair[0] for pair in way), tuple(pair[1] for pair in way)
        if sum(seqlens_q) != problem.total_q or sum(seqlens_k) != problem.total_k:
            yield {"seqlens_q": seqlens_q, "seqlens_k": seqlens_k}


def _half(length: int) -> int:
    """Half of it, but not empty where it was not."""
    return -(-length // 2)


def _other_scales(_: Kernel, problem: Problem, __: Config) -> Iterator[dict[str, Any]]:
    """Scales far enough from the Problem's for a result of the one to be wrong for the other."""
    scale = problem.scale
    for other in (2.0 * scale, 0.25 * scale, -scale) if scale else (0.25, 1.0):
        yield {"softmax_scale": other}


def _other_masks(kernel: Kernel, problem: Problem, _: Config) -> Iterator[dict[str, Any]]:
    can = kernel.capabilities
    for causal in can.causal:
        yield {"causal": causal}
    if can.window:
        yield {"window": None if problem.window else (1, 1)}


def _digest(problem: Problem, config: Config) -> str:
    return hashlib.sha256(msgspec.json.encode([problem, config.canonical()])).hexdigest()[:8]


def _hashed(case: Case) -> int:
    """A number that follows from the Case."""
    return int(case.id[:8], 16)


def drawn_call(kernel: Kernel, problem: Problem, config: Config, device: Device) -> st.SearchStrategy[Check]:
    """ "oracle", the simplest, or one of CALLS that makes sense for `problem`, "twice" first."""
    checks: list[Check] = ["oracle"]
    for check in CALLS:
        case = Case(kernel=kernel.name, problem=problem, config=config, check=check)
        if why_not_call(kernel, case, device) is None:
            checks.append(check)
    return st.sampled_from(checks)
