"""Modifiers' trees as TIR expressions, used in device code's loops over a tile's elements.

An element's place is (b, h, q_idx, kv_idx, seqlen_q, seqlen_k), TIR numbers of int32. Captured tensors are not supported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnfuzz.kernels.errors import reject
from attnfuzz.kernels.expressions.derivative import by_score
from attnfuzz.kernels.expressions.folding import folded
from attnfuzz.kernels.expressions.tree import DEEPEST, Data, Expression, number, parse
from attnfuzz.kernels.support.absent import Absent

try:
    from tilelang import language
    from tvm import tirx
except ImportError:
    language = tirx = Absent("tilelang")

__all__ = ["PLACE", "Place", "Printed", "printed", "value"]

PLACE = ("b", "h", "q_idx", "kv_idx", "seqlen_q", "seqlen_k")
Place = tuple[Any, Any, Any, Any, Any, Any]
"""Indices and lengths in the order of PLACE."""
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Printed:
    """Trees applied to each score: `score`, its derivative `slope`, and `mask`; None where there is none."""

    score: Expression | None
    slope: Expression | None
    mask: Expression | None

    def changed(self, x: Any, place: Place) -> Any:
        """The changed score of the scaled score `x`, fp32: -inf where it is hidden, or beyond either length."""
        score = x if self.score is None else value(self.score, x, place)
        return language.if_then_else(self._visible(place), score, -language.infinity("float32"))

    def sloped(self, d: Any, x: Any, place: Place) -> Any:
        """The gradient of the scaled score `x`, from the gradient `d` of the changed one: 0 where hidden, or beyond a length.

        P is 0 there, but the slope may be infinite.
        """
        gradient = d if self.slope is None else d * value(self.slope, x, place)
        return language.if_then_else(self._visible(place), gradient, 0.0)

    def _visible(self, place: Place) -> Any:
        _, _, q_idx, kv_idx, seqlen_q, seqlen_k = place
        inside = tirx.And(kv_idx < seqlen_k, q_idx < seqlen_q)
        return inside if self.mask is None else tirx.And(inside, value(self.mask, None, place))


def printed(score: Data | None, mask: Data | None) -> Printed | None:
    """Parse and differentiate trees as a Problem holds them; None where there are none.

    Raises:
        BadArgument: they are not trees, or a constant part of one is beyond float32.
    """
    if score is None and mask is None:
        return None
    # Softcap, causal mask and window add to the depth that a Problem may have.
    tree, visible = (None if each is None else folded(parse(each, deepest=2 * DEEPEST)) for each in (score, mask))
    slope = None if tree is None else folded(by_score(tree))
    return Printed(tree, None if slope is None or number(slope) == 1.0 else slope, visible)


def value(tree: Expression, x: Any, place: Place) -> Any:
    """Make the TIR expression of `tree`: fp32, int32 or bool; `x` is the score, unused for a mask.

    Raises:
        BadArgument: it reads a captured tensor.
    """
    values: dict[Expression, Any] = {}
    leaves = {"score": x, **dict(zip(PLACE, place, strict=True))}
    for each in tree.walk():
        values[each] = leaves[each.op] if each.op in leaves else _value(each, [values[arg] for arg in each.args])
    return values[tree]


def _value(x: Expression, a: list[Any]) -> Any:
    if x.op in _CONSTANTS:
        return tirx.const(x.value, _CONSTANTS[x.op])
    if x.op in _OF_TWO:
        return getattr(tirx, _OF_TWO[x.op])(*a)
    match x.op:
        case "neg":
            return -a[0]
        case "not":
            return tirx.Not(a[0])
        case "abs":
            return language.max(a[0], -a[0])
        case "where":
            return language.if_then_else(*a)
        case "float":
            return language.cast(a[0], "float32")
        case "exp":
            return language.exp(a[0])
        case "sigmoid":
            return 1.0 / (1.0 + _power(a[0], -_LOG2_E))
        case "tanh":
            # CUDA's own has 11 bits with fast math. Beyond the range of exp2 this is 1 or -1; near 0 its error is some 2^-24.
            return 2.0 / (1.0 + _power(a[0], -2 * _LOG2_E)) - 1.0
    raise reject(f"expression.{x.op}", str(x), "TileLang kernels read no captured tensors", "leave it out, or use triton.flex")


def _power(x: Any, factor: float) -> Any:
    """2 to the power of `factor` times `x`."""
    return language.exp2(x * tirx.const(factor, "float32"))


_CONSTANTS = {"const": "float32", "int": "int32", "bool": "bool"}
_OF_TWO = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "min": "Min", "max": "Max", "le": "LE", "lt": "LT", "ge": "GE", "gt": "GT",
    "eq": "EQ", "ne": "NE", "and": "And", "or": "Or",
    # operands are not negative: toward 0 is down
    "mod": "Mod", "div": "Div",
}  # fmt: skip
