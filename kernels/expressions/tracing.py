"""Trees from a user's own score_mod or mask_mod, written as for flex_attention: the function is called once, with stand-ins.

    traced(lambda score, b, h, q_idx, kv_idx: torch.tanh(score / 20) * 20)
    traced(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 256))

Python's operators, including `==`, and torch's functions of the same meaning are recorded. A tensor that the function reads must
be named: `tensors={"bias": Captured("bias", ("heads",), gradient=True)}` passes it as a keyword, to be indexed as usual.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.expressions import tree
from attnfuzz.kernels.expressions.tree import Captured, Expression

__all__ = ["traced"]


def traced(function: Callable[..., Any], tensors: Mapping[str, Captured] | None = None) -> Expression:
    """Trace a score_mod(score, b, h, q_idx, kv_idx) or a mask_mod(b, h, q_idx, kv_idx) into a tree.

    Args:
        function: it may use Python's operators and torch's tanh, exp, sigmoid, abs, where, minimum, maximum, logical_and,
            logical_or, logical_not; no branches on values, no loops over them.
        tensors: captured tensors, by the names of the function's other parameters.

    Raises:
        BadArgument: the function takes other arguments, or uses an operation that trees do not have; the text names it.
    """
    named = dict(tensors or {})
    names = [name for name in inspect.signature(function).parameters if name not in named]
    leaves = {5: (tree.S, tree.B, tree.H, tree.Q, tree.KV), 4: (tree.B, tree.H, tree.Q, tree.KV)}.get(len(names))
    if leaves is None:
        raise reject(
            "function", function, f"it takes {', '.join(names)}", "write (score, b, h, q_idx, kv_idx) or (b, h, q_idx, kv_idx)"
        )
    stand_ins: dict[str, Any] = {name: _StandIn(leaf) for name, leaf in zip(names, leaves, strict=True)}
    stand_ins.update({name: _Tensor(each) for name, each in named.items()})
    try:
        result = function(**stand_ins)
    except BadArgument:
        raise
    except (TypeError, AttributeError, IndexError) as error:
        raise reject(
            "function", function, f"trees cannot express it: {error}", "use what kernels/expressions/tracing.py lists"
        ) from error
    return _tree(result)


def _tree(x: Any) -> Expression:
    if isinstance(x, _StandIn):
        return x.tree
    if isinstance(x, bool):
        return tree.truth(x)
    if isinstance(x, int):
        return tree.whole(x)
    if isinstance(x, float):
        return tree.const(x)
    raise reject(
        "function", type(x).__name__, "a tree is made of its arguments and of numbers", "name captured tensors in `tensors`"
    )


def _pair(left: Any, right: Any) -> tuple[Expression, Expression]:
    """Both as trees of one kind: where one is a float, an int becomes a float."""
    one, other = _tree(left), _tree(right)
    if {one.kind, other.kind} == {"int", "float"}:
        one, other = (_as_float(each) for each in (one, other))
    return one, other


def _as_float(x: Expression) -> Expression:
    if x.kind != "int":
        return x
    value = tree.number(x)
    return tree.to_float(x) if value is None else tree.const(float(value))


class _StandIn:
    """Stand-in for a tensor, which records the operations on it."""

    def __init__(self, x: Expression) -> None:
        self.tree = x

    def _with(self, op: str, other: Any, *, turned: bool = False) -> _StandIn:
        pair = _pair(other, self) if turned else _pair(self, other)
        return _StandIn(tree.node(op, *pair))

    def __add__(self, other: Any) -> _StandIn:
        return self._with("add", other)

    def __radd__(self, other: Any) -> _StandIn:
        return self._with("add", other, turned=True)

    def __sub__(self, other: Any) -> _StandIn:
        return self._with("sub", other)

    def __rsub__(self, other: Any) -> _StandIn:
        return self._with("sub", other, turned=True)

    def __mul__(self, other: Any) -> _StandIn:
        return self._with("mul", other)

    def __rmul__(self, other: Any) -> _StandIn:
        return self._with("mul", other, turned=True)

    def __truediv__(self, other: Any) -> _StandIn:
        if isinstance(other, bool) or not isinstance(other, int | float) or other == 0:
            raise TypeError("only numbers divide, and not 0")
        return _StandIn(tree.node("mul", _as_float(self.tree), tree.const(1.0 / other)))

    def __mod__(self, other: Any) -> _StandIn:
        return self._with("mod", other)

    def __floordiv__(self, other: Any) -> _StandIn:
        return self._with("div", other)

    def __neg__(self) -> _StandIn:
        return _StandIn(-self.tree)

    def __abs__(self) -> _StandIn:
        return _StandIn(tree.absolute(self.tree))

    def __le__(self, other: Any) -> _StandIn:
        return self._with("le", other)

    def __lt__(self, other: Any) -> _StandIn:
        return self._with("lt", other)

    def __ge__(self, other: Any) -> _StandIn:
        return self._with("ge", other)

    def __gt__(self, other: Any) -> _StandIn:
        return self._with("gt", other)

    def __eq__(self, other: object) -> _StandIn:  # type: ignore[override]
        return self._with("eq", other)

    def __ne__(self, other: object) -> _StandIn:  # type: ignore[override]
        return self._with("ne", other)

    __hash__ = None  # type: ignore[assignment]

    def __and__(self, other: Any) -> _StandIn:
        return self._with("and", other)

    __rand__ = __and__

    def __or__(self, other: Any) -> _StandIn:
        return self._with("or", other)

    __ror__ = __or__

    def __invert__(self) -> _StandIn:
        return _StandIn(tree.negated(self.tree))

    def __bool__(self) -> bool:
        raise TypeError("its truth is not known yet: use &, |, ~ and torch.where instead of and, or, not and if")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> _StandIn:
        name = getattr(function, "__name__", str(function))
        operation = _FUNCTIONS.get(name)
        if operation is None or kwargs:
            raise TypeError(f"trees have no torch.{name}")
        return operation(*args)


class _Tensor:
    """A captured tensor, to be indexed."""

    def __init__(self, tensor: Captured) -> None:
        self._tensor = tensor

    def __getitem__(self, index: Any) -> _StandIn:
        at = index if isinstance(index, tuple) else (index,)
        return _StandIn(tree.load(self._tensor, *(_tree(each) for each in at)))


def _of_float(op: str) -> Callable[[Any], _StandIn]:
    return lambda x: _StandIn(tree.node(op, _as_float(_tree(x))))


def _of_two(op: str) -> Callable[[Any, Any], _StandIn]:
    return lambda x, y: _StandIn(tree.node(op, *_pair(x, y)))


_FUNCTIONS: dict[str, Callable[..., _StandIn]] = {
    "tanh": _of_float("tanh"), "exp": _of_float("exp"), "sigmoid": _of_float("sigmoid"),
    "abs": lambda x: abs(x), "minimum": _of_two("min"), "maximum": _of_two("max"),
    "logical_and": _of_two("and"), "logical_or": _of_two("or"), "logical_not": lambda x: ~x,
    "where": lambda condition, yes, no: _StandIn(tree.node("where", _tree(condition), *_pair(yes, no))),
    **{name: _of_two(op) for name, op in (("add", "add"), ("sub", "sub"), ("mul", "mul"))},
}  # fmt: skip
