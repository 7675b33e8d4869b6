"""Limits on shapes that a kernel declares: what is within them must work, what is beyond them may."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnfuzz.kernels.contract import Capabilities, shape_fields
from attnfuzz.strategies.variants import Variant

__all__ = ["limits"]

_MOST_SHAPES = 4
Tried = tuple[str, str, bool, dict[str, Any], list[dict[str, Any]]]
"""As in features.py: name, how it is declared, whether it is, the fields that would declare it, changes of the plain Problem."""


def limits(can: Capabilities, _: Variant) -> Iterator[Tried]:
    """Yield the limits that are declared: the Cases at their edge, and one beyond."""
    if can.shapes:
        yield "shapes of the pool", "shapes", True, {}, [shape_fields(each) for each in can.shapes[:_MOST_SHAPES]]
        beyond = list(_beyond_shapes(can))
        yield "shapes beyond the pool", "shapes=()", False, {"shapes": ()}, beyond
        return
    step_q, step_k = can.multiples
    if (step_q, step_k) != (1, 1):
        spelled = f"multiple_q={can.multiple_q}, multiple_k={can.multiple_k}"
        at_edge = [{"seqlens_q": (n * step_q,), "seqlens_k": (n * step_k,)} for n in (1, 3)]
        yield "lengths in multiples", spelled, True, {}, [each for each in at_edge if can.unequal or step_q == step_k]
        n = step_k + 1
        other = {"multiple_q": 1, "multiple_k": 1}
        yield "lengths beside multiples", "no multiple_q, multiple_k", False, other, [{"seqlens_q": (n,), "seqlens_k": (n,)}]
    if can.batch_max is not None:
        most = can.batch_max
        yield f"batch of {most}", f"batch_max={most}", True, {}, [_batch(can, most)]
        yield f"batch of {most + 1}", "no batch_max", False, {"batch_max": None}, [_batch(can, most + 1)]
    if can.heads_max is not None:
        groups = min(can.groups or (1,))
        most = can.heads_max // groups * groups
        for heads, declared in ((most, True), (most + groups, False)):
            spelled = f"heads_max={can.heads_max}" if declared else "no heads_max"
            change = {"heads": heads, "kv_heads": heads // groups}
            yield f"{heads} heads", spelled, declared, {} if declared else {"heads_max": None}, [change]


def _batch(can: Capabilities, size: int) -> dict[str, Any]:
    _, _, _, n_q, n_k = can.least_shape
    return {"seqlens_q": (n_q,) * size, "seqlens_k": (n_k,) * size}


def _beyond_shapes(can: Capabilities) -> Iterator[dict[str, Any]]:
    """Yield the first shape with one token, and with one sequence, more."""
    batch, heads, kv_heads, n_q, n_k = can.shapes[0]
    for shape in ((batch, heads, kv_heads, n_q + 1, n_k + 1), (batch + 1, heads, kv_heads, n_q, n_k)):
        if shape not in can.shapes:
            yield shape_fields(shape)
