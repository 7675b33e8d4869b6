"""A function of tensors, element by element, as C: it is called once with stand-ins that note each operation.

Operations are those of torch, with its rules for NaN and -0. Products and sums are rounded one by one, as torch does it, so that
results are equal to the last bit; exp, expm1 and log are the device's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

__all__ = ["Program", "Value", "traced"]

Kind: TypeAlias = Literal["double", "bool", "long long"]
_INFINITE = "__longlong_as_double(0x7ff0000000000000LL)"
_NAN = "__longlong_as_double(0x7ff8000000000000LL)"
_METHODS: dict[str, tuple[Kind, str]] = {
    "abs": ("double", "::fabs({0})"),
    "add": ("double", "__dadd_rn({0}, {1})"),
    "sub": ("double", "__dadd_rn({0}, -({1}))"),
    "mul": ("double", "__dmul_rn({0}, {1})"),
    "div": ("double", "{0} / {1}"),
    "square": ("double", "__dmul_rn({0}, {0})"),
    "sqrt": ("double", "::sqrt({0})"),
    "exp": ("double", "::exp({0})"),
    "expm1": ("double", "::expm1({0})"),
    "log": ("double", "::log({0})"),
    "log1p": ("double", "::log1p({0})"),
    "log2": ("double", "::log2({0})"),
    "hypot": ("double", "::hypot({0}, {1})"),
    "round": ("double", "::rint({0})"),
    "ceil": ("double", "::ceil({0})"),
    "floor": ("double", "::floor({0})"),
    "sign": ("double", "(double)(({0} > 0) - ({0} < 0))"),
    # Of two numbers; NaN stays NaN.
    "minimum": ("double", "({0} != {0} || {0} < {1}) ? {0} : {1}"),
    "maximum": ("double", "({0} != {0} || {0} > {1}) ? {0} : {1}"),
    "at_least": ("double", "{0} < {1} ? {1} : {0}"),
    "at_most": ("double", "{0} > {1} ? {1} : {0}"),
    "chosen": ("double", "{0} ? {1} : {2}"),
    "isfinite": ("bool", f"::fabs({{0}}) < {_INFINITE}"),
    "isinf": ("bool", f"::fabs({{0}}) == {_INFINITE}"),
    "isnan": ("bool", "{0} != {0}"),
    "lt": ("bool", "{0} < {1}"),
    "le": ("bool", "{0} <= {1}"),
    "gt": ("bool", "{0} > {1}"),
    "ge": ("bool", "{0} >= {1}"),
    "eq": ("bool", "{0} == {1}"),
    "ne": ("bool", "{0} != {1}"),
    "logical_and": ("bool", "{0} && {1}"),
    "logical_or": ("bool", "{0} || {1}"),
    "logical_not": ("bool", "!{0}"),
    "bits": ("long long", "__double_as_longlong({0})"),
    "of_bits": ("double", "__longlong_as_double({0})"),
    "to_double": ("double", "(double){0}"),
}
"""Methods by name: the kind of the result, and its C, of this value and the arguments."""


@dataclass(slots=True)
class Program:
    """The operations noted so far: C statements, each of which names one value."""

    lines: list[str] = field(default_factory=list)
    names: dict[tuple[Kind, str], str] = field(default_factory=dict)

    def value(self, kind: Kind, expression: str) -> Value:
        """Return the value of an expression; equal ones are computed once."""
        if (kind, expression) not in self.names:
            name = f"t{len(self.names)}"
            self.names[kind, expression] = name
            self.lines.append(f"const {kind} {name} = {expression};")
        return Value(self, kind, self.names[kind, expression])

    def code(self, name: str, inputs: Sequence[str], scalars: Sequence[str], outputs: Sequence[Value]) -> str:
        """Return a C++ template of the whole: arguments are inputs, scalars and outputs, in this order."""
        arguments = [f"T {each}" for each in (*inputs, *scalars)] + [f"T& out{at}" for at in range(len(outputs))]
        results = [f"out{at} = {each.name};" for at, each in enumerate(outputs)]
        body = "\n  ".join([*self.lines, *results])
        return f"template <typename T> void {name}({', '.join(arguments)}) {{\n  {body}\n}}"


def traced(
    function: Callable[..., Any], name: str, arguments: Sequence[Any], tensors: Sequence[int], scalars: Sequence[int]
) -> tuple[str, list[Kind], bool]:
    """Return the C++ of `function`, the kinds of its results, and whether it returns a tuple.

    Args:
        function: a function of tensors, numbers and constants.
        name: of the C++ function.
        arguments: what it is called with.
        tensors: numbers of the arguments that are tensors, of float64 or bool.
        scalars: numbers of those that are numbers, given at each call.
    """
    program = Program()
    called = list(arguments)
    for at in (*tensors, *scalars):
        is_bool = isinstance(arguments[at], torch.Tensor) and arguments[at].dtype == torch.bool
        one = Value(program, "double", f"x{at}", own=False)
        if is_bool:
            one = one != 0.0
            one.own = False
        called[at] = one
    results = function(*called)
    several = isinstance(results, tuple)
    outputs = [_as_value(program, each) for each in (results if several else (results,))]
    code = program.code(name, [f"x{at}" for at in tensors], [f"x{at}" for at in scalars], outputs)
    return code, [each.kind for each in outputs], several


def _as_value(program: Program, x: Any) -> Value:
    if isinstance(x, Value):
        return x
    if isinstance(x, bool):
        return Value(program, "bool", "true" if x else "false")
    return Value(program, "double", _literal(float(x)))


def _literal(x: float) -> str:
    if math.isnan(x):
        return _NAN
    if math.isinf(x):
        return _INFINITE if x > 0 else f"(-{_INFINITE})"
    return repr(x) if x >= 0 and not (x == 0 and math.copysign(1, x) < 0) else f"({x!r})"


class Value:
    """Stands for a tensor: one element of it, a variable of the program. In-place methods give this object a new value."""

    def __init__(self, program: Program, kind: Kind, name: str, *, own: bool = True) -> None:
        self.program, self.kind, self.name = program, kind, name
        self.own = own
        """Whether the function made it: arguments must not be changed in place."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Do what a function of torch does, by the method of its name."""
        name = getattr(function, "__name__", "")
        if name == "where":
            return args[0]._chosen(*args[1:])
        first = (
            args[0] if isinstance(args[0], Value) else _as_value(next(x.program for x in args if isinstance(x, Value)), args[0])
        )
        return getattr(first, name)(*args[1:], **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        """Return a method of `_METHODS`, or the in-place form of any method: `add_` of `add`."""
        if name in _METHODS:
            return lambda *args: self._do(name, *args)
        plain = name.removesuffix("_")
        if name.startswith("__") or plain == name or not (plain in _METHODS or hasattr(type(self), plain)):
            raise AttributeError(f"{name} has no C here: add it to oracles/fused/trace.py")
        return lambda *args, **kwargs: self._become(getattr(self, plain)(*args, **kwargs))

    def _do(self, method: str, *args: Any) -> Value:
        kind, expression = _METHODS[method]
        return self.program.value(kind, expression.format(self.name, *(_as_value(self.program, each).name for each in args)))

    def _chosen(self, one: Any, other: Any) -> Value:
        """Return `one` where this is true, else `other`."""
        if any(isinstance(each, Value) and each.kind == "bool" for each in (one, other)):
            raise NotImplementedError("a choice of bools has no C here: use & and |")
        return self._do("chosen", one, other)

    def _become(self, other: Value) -> Value:
        if not self.own:
            raise ValueError(f"argument {self.name} is changed in place: it is the caller's")
        self.kind, self.name = other.kind, other.name
        return self

    def __add__(self, other: Any) -> Value:
        return self._do("add", other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Value:
        return self._do("sub", other)

    def __rsub__(self, other: Any) -> Value:
        return _as_value(self.program, other)._do("sub", self)

    def __mul__(self, other: Any) -> Value:
        return self._do("mul", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Value:
        return self._do("div", other)

    def __rtruediv__(self, other: Any) -> Value:
        return _as_value(self.program, other)._do("div", self)

    def __abs__(self) -> Value:
        return self._do("abs")

    def __lt__(self, other: Any) -> Value:
        return self._do("lt", other)

    def __le__(self, other: Any) -> Value:
        return self._do("le", other)

    def __gt__(self, other: Any) -> Value:
        return self._do("gt", other)

    def __ge__(self, other: Any) -> Value:
        return self._do("ge", other)

    def __eq__(self, other: object) -> Value:  # type: ignore[override]
        return self._do("eq", other)

    def __ne__(self, other: object) -> Value:  # type: ignore[override]
        return self._do("ne", other)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("a value is not known while a function is traced: use torch.where")

    def __and__(self, other: Any) -> Value:
        return self._do("logical_and", other)

    def __or__(self, other: Any) -> Value:
        return self._do("logical_or", other)

    def __iadd__(self, other: Any) -> Value:
        return self._become(self + other)

    def __isub__(self, other: Any) -> Value:
        return self._become(self - other)

    def __imul__(self, other: Any) -> Value:
        return self._become(self * other)

    def __itruediv__(self, other: Any) -> Value:
        return self._become(self / other)

    def __ior__(self, other: Any) -> Value:
        return self._become(self | other)

    def __iand__(self, other: Any) -> Value:
        return self._become(self & other)

    def __invert__(self) -> Value:
        return self._do("logical_not")

    def add(self, other: Any, *, alpha: float = 1.0) -> Value:
        """Return this + alpha other."""
        return self + (other if alpha == 1.0 else _as_value(self.program, other) * alpha)

    def addcmul(self, one: Value, other: Value, *, value: float = 1.0) -> Value:
        """Return this + value one other."""
        return self + (one * other if value == 1.0 else one * value * other)

    def lerp(self, end: Value, weight: Value) -> Value:
        """Return this + weight (end - this), from the nearer side."""
        gap = end - self
        return (abs(weight) < 0.5)._do("chosen", self + weight * gap, end - gap * (1 - weight))

    def clamp(self, min: Any = None, max: Any = None) -> Value:  # noqa: A002
        """Return this within limits; NaN stays NaN."""
        low = self if min is None else self._do("at_least", min)
        return low if max is None else low._do("at_most", max)

    def nan_to_num(self, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Value:
        """Return this, or a number in place of NaN and of the infinities."""
        largest = float(torch.finfo(torch.float64).max)
        high, low = largest if posinf is None else posinf, -largest if neginf is None else neginf
        finite = (self == math.inf)._do("chosen", high, (self == -math.inf)._do("chosen", low, self))
        return self._do("isnan")._do("chosen", nan, finite)

    def masked_fill(self, mask: Value, value: float) -> Value:
        """Return `value` where `mask`, else this."""
        return mask._chosen(value, self)

    def zeros_like(self) -> Value:
        """Return 0."""
        return _as_value(self.program, 0.0)

    def view(self, dtype: torch.dtype) -> Value:
        """Return the bits of a float64 as an int64, or the reverse."""
        return self._do("bits" if dtype == torch.int64 else "of_bits")

    def bitwise_and(self, mask: int) -> Value:
        """Return an int64 & `mask`."""
        return self.program.value("long long", f"{self.name} & {mask:#x}LL")

    def to(self, dtype: torch.dtype) -> Value:
        """Return a bool as 0 or 1."""
        if dtype != torch.float64:
            raise NotImplementedError(f"a conversion to {dtype} has no C here")
        return self._do("to_double")
