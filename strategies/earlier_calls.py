"""Problems of the calls before a Case's own: equal to it, or with other lengths, another scale or another mask.

They follow from the Case alone, so that a Case is all that is needed to repeat a Trial. No Hypothesis here, as in case.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from attnfuzz.kernels.contract import Config, Device, Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import CALLS, Case, Check

__all__ = ["earlier_problems", "other_problems", "takes_call", "why_not_call"]

_WHAT = {"other_shape": "lengths", "other_scale": "softmax_scale", "other_mask": "mask"}


def earlier_problems(kernel: Kernel, case: Case, device: Device) -> tuple[Problem, ...]:
    """Return the Problems of the calls before the Case's own, in order, without its own last call.

    Raises:
        BadArgument: the kernel takes no such other Problem; `why_not_call` gives the reason beforehand.
    """
    problem = case.problem
    if case.check == "twice":
        return (problem,)
    others = other_problems(kernel, case.check, problem, case.config, device)
    if not others:
        raise BadArgument(f"case: {why_not_call(kernel, case, device)}")
    other = others[_hashed(case) % len(others)]
    # Other lengths also come first: in the order A, B, A a workspace kept from the first call would fit the Case's own.
    return (other, problem, other) if case.check == "other_shape" else (other,)


def why_not_call(kernel: Kernel, case: Case, device: Device) -> str | None:
    """Return why the Case's check, one of CALLS, does not apply to its kernel and Problem, or None."""
    assert case.check in CALLS
    if takes_call(kernel, case.check, case.problem, case.config, device):
        return None
    return f"check={case.check!r}: {kernel.name} takes no Problem that differs from this one in its {_WHAT[case.check]}"


def takes_call(kernel: Kernel, check: Check, problem: Problem, config: Config, device: Device) -> bool:
    """Whether `kernel` takes `problem` under `check`, one of CALLS: it takes a Problem of the earlier call too."""
    return check == "twice" or any(True for _ in _others(kernel, check, problem, config, device))


def other_problems(kernel: Kernel, check: Check, problem: Problem, config: Config, device: Device) -> tuple[Problem, ...]:
    """Return every Problem of a call before one of `problem` under `check`, among those the kernel takes with `config`."""
    return tuple(dict.fromkeys(_others(kernel, check, problem, config, device)))


def _others(kernel: Kernel, check: Check, problem: Problem, config: Config, device: Device) -> Iterator[Problem]:
    makers = {"other_shape": _other_lengths, "other_scale": _other_scales, "other_mask": _other_masks}
    for changes in makers[check](kernel, problem, config):
        try:
            other = replace(problem, **changes)
        except BadArgument:  # a scale beyond float32, say
            continue
        if other != problem and kernel.supports(other, config, device) is None:
            yield other


def _other_lengths(_: Kernel, problem: Problem, config: Config) -> Iterator[dict[str, Any]]:
    """Yield longer and shorter lengths, then a sequence more and one fewer. The totals differ."""
    # Up to a tile: often past the end of the last one, and hardly more expensive than the Case's own.
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
    """Return half of it, rounded up, so that it is empty only if `length` is."""
    return -(-length // 2)


def _other_scales(_: Kernel, problem: Problem, __: Config) -> Iterator[dict[str, Any]]:
    """Yield scales so different from the Problem's that results of one are wrong for the other."""
    scale = problem.scale
    for other in (2.0 * scale, 0.25 * scale, -scale) if scale else (0.25, 1.0):
        yield {"softmax_scale": other}


def _other_masks(kernel: Kernel, problem: Problem, _: Config) -> Iterator[dict[str, Any]]:
    can = kernel.capabilities
    for causal in can.causal:
        yield {"causal": causal}
    if can.window:
        yield {"window": None if problem.window else can.least_window}


def _digest(problem: Problem, config: Config) -> str:
    return hashlib.sha256(msgspec.json.encode([problem, config.canonical()])).hexdigest()[:8]


def _hashed(case: Case) -> int:
    """Return a number that follows from the Case."""
    return int(case.id[:8], 16)
