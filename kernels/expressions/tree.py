"""score_mod and mask_mod as typed trees: their operations, conversion to and from JSON data, and a readable print.

A tree is data: a Problem holds it as nested tuples (`to_data`), `parse` reads it back. There are three kinds of value:

    float  the score and what is computed from it, in fp32 or wider
    int    b, h, q_idx, kv_idx (each counted from 0 within its sequence), seqlen_q, seqlen_k, and what is computed from them
    bool   comparisons and what is computed from them

A score_mod is a float tree, a mask_mod a bool tree without the score. Python's operators build trees; `where`, `tanh` and such
are functions of this module; `Captured` is a tensor other than q, k and v, read by `load`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

from attnfuzz.kernels.errors import check_name, reject, shown

__all__ = [
    "DEEPEST",
    "INT32",
    "KV",
    "LEAVES",
    "SEQLEN_K",
    "SEQLEN_Q",
    "B",
    "Captured",
    "Data",
    "Expression",
    "Fill",
    "H",
    "Kind",
    "Q",
    "S",
    "Value",
    "absolute",
    "both",
    "captured",
    "const",
    "either",
    "exp",
    "load",
    "maximum",
    "minimum",
    "negated",
    "number",
    "parse",
    "sigmoid",
    "size_of",
    "substitute",
    "tanh",
    "to_data",
    "to_float",
    "truth",
    "where",
    "whole",
]  # fmt: skip

Kind = Literal["float", "int", "bool"]
Fill = Literal["normal", "slopes", "documents_q", "documents_k", "lengths", "numbers"]
Size: TypeAlias = int | str
Data: TypeAlias = tuple[Any, ...]
Value: TypeAlias = "Expression | float | int | bool"

LEAVES: dict[str, Kind] = {
    "score": "float", "b": "int", "h": "int", "q_idx": "int", "kv_idx": "int", "seqlen_q": "int", "seqlen_k": "int",
}  # fmt: skip
_SIZES = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "offsets")
_NUMBERS: tuple[Kind, Kind] = ("float", "int")
_SAME = {"add": _NUMBERS, "sub": _NUMBERS, "mul": _NUMBERS, "min": _NUMBERS, "max": _NUMBERS}
_COMPARISONS = ("le", "lt", "ge", "gt", "eq", "ne")
_OF_FLOAT = ("tanh", "exp", "sigmoid")
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "le": "<=", "lt": "<", "ge": ">=", "gt": ">", "eq": "==", "ne": "!=", "and": "&",
    "or": "|", "mod": "%", "div": "//",
}  # fmt: skip
_BINDS = {"<=": 1, "<": 1, ">=": 1, ">": 1, "==": 1, "!=": 1, "|": 2, "&": 3, "+": 4, "-": 4, "*": 5, "%": 5, "//": 5}
_WRITTEN: dict[str, tuple[tuple[type, ...], str]] = {
    # A JSON 1.0 may have been written as 1, and True is an int to Python, but not here.
    "const": ((float, int), "a number"), "int": ((int,), "a whole number"), "bool": ((bool,), "true or false"),
}  # fmt: skip
INT32 = range(-(2**31) + 1, 2**31)
"""Range of an index and of every intermediate whole number: int32 without its smallest, which a compiler cannot negate."""
DEEPEST = 100
"""Limit for the nesting of nodes in a tree, leaf included."""
_MOST_NODES = 1 << 15


@dataclass(frozen=True, slots=True)
class Captured:
    """A tensor that a modifier reads; its values are made from the Recipe's seed and `name`.

    `sizes`: for each dimension a number, or a name: "batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "offsets" (seqlen_q +
    seqlen_k - 1). `fill`: "normal" and "slopes" (ALiBi's 2^(-8 (h + 1) / heads)) are float32; "documents_q", "documents_k" (ids
    that grow along the sequence), "lengths" (0 to seqlen_k) and "numbers" (0 to 7) are int32. `gradient`: whether it has one.
    """

    name: str
    sizes: tuple[Size, ...]
    fill: Fill = "normal"
    gradient: bool = False

    def __post_init__(self) -> None:
        check_name("captured.name", self.name, "it names a tensor")
        if self.fill not in get_args(Fill):
            raise reject("captured.fill", self.fill, "there is no such fill", f"use one of {', '.join(get_args(Fill))}")
        if not self.sizes or any(size not in _SIZES and not (type(size) is int and size > 0) for size in self.sizes):
            raise reject("captured.sizes", self.sizes, "a size is a number or a name", f"use numbers or {', '.join(_SIZES)}")
        if self.gradient and self.kind != "float":
            raise reject("captured.gradient", True, f"{self.fill} are whole numbers", "leave it out")

    @property
    def kind(self) -> Kind:
        """The kind of its elements: float or int."""
        return "float" if self.fill in ("normal", "slopes") else "int"

    def to_data(self) -> Data:
        """(name, sizes, fill, gradient)."""
        return (self.name, self.sizes, self.fill, self.gradient)


@dataclass(frozen=True, slots=True, eq=True)
class Expression:
    """A node: `op`, its arguments, and for a constant its value, for a load its tensor."""

    op: str
    args: tuple[Expression, ...] = ()
    value: float | int | bool | Captured | None = None
    kind: Kind = "float"

    # Comparisons build trees; equality of trees is `same`. Hashing is by identity of structure, for dicts.
    def __add__(self, other: Value) -> Expression:
        return _binary("add", self, other)

    def __radd__(self, other: Value) -> Expression:
        return _binary("add", other, self)

    def __sub__(self, other: Value) -> Expression:
        return _binary("sub", self, other)

    def __rsub__(self, other: Value) -> Expression:
        return _binary("sub", other, self)

    def __mul__(self, other: Value) -> Expression:
        return _binary("mul", self, other)

    def __rmul__(self, other: Value) -> Expression:
        return _binary("mul", other, self)

    def __truediv__(self, other: float) -> Expression:
        return _binary("mul", self, 1.0 / other)

    def __mod__(self, other: Value) -> Expression:
        return node("mod", self, _lifted(other))

    def __floordiv__(self, other: Value) -> Expression:
        return node("div", self, _lifted(other))

    def __neg__(self) -> Expression:
        return node("neg", self)

    def __le__(self, other: Value) -> Expression:
        return _binary("le", self, other)

    def __lt__(self, other: Value) -> Expression:
        return _binary("lt", self, other)

    def __ge__(self, other: Value) -> Expression:
        return _binary("ge", self, other)

    def __gt__(self, other: Value) -> Expression:
        return _binary("gt", self, other)

    def __and__(self, other: Value) -> Expression:
        return both(self, other)

    def __or__(self, other: Value) -> Expression:
        return either(self, other)

    def __invert__(self) -> Expression:
        return negated(self)

    def __bool__(self) -> bool:
        raise TypeError("a tree has no truth value: use `&`, `|`, `~` and `where` instead of and, or, not and if")

    def equals(self, other: Value) -> Expression:
        """The comparison; `==` compares trees."""
        return _binary("eq", self, other)

    def differs(self, other: Value) -> Expression:
        """Not `equals`."""
        return _binary("ne", self, other)

    def walk(self) -> Iterator[Expression]:
        """Yield every node once, arguments first."""
        visited: set[Expression] = set()
        stack = [(self, False)]
        while stack:
            at, done = stack.pop()
            if done:
                yield at
            elif at not in visited:
                visited.add(at)
                stack.append((at, True))
                stack.extend((each, False) for each in reversed(at.args))

    @property
    def scored(self) -> bool:
        """Whether the tree reads the score."""
        return any(each.op == "score" for each in self.walk())

    def __str__(self) -> str:
        return _text(self)[0]


def node(op: str, *args: Expression, value: float | int | bool | Captured | None = None) -> Expression:
    """Make a node and check the kinds of its arguments.

    Raises:
        BadArgument: there is no such operation, or it takes arguments of other kinds.
    """
    return Expression(op, args, value, _kind(op, args, value))


def _kind(op: str, args: tuple[Expression, ...], value: object) -> Kind:
    kinds = tuple(each.kind for each in args)
    if op in LEAVES and not args:
        return LEAVES[op]
    if op == "load" and isinstance(value, Captured) and kinds == ("int",) * len(value.sizes):
        return value.kind
    constants: dict[str, tuple[type, Kind]] = {"const": (float, "float"), "int": (int, "int"), "bool": (bool, "bool")}
    if op in constants and not args and type(value) is constants[op][0]:
        return constants[op][1]
    if len(args) == 2 and kinds[0] == kinds[1]:
        if op in _SAME and kinds[0] in _SAME[op]:
            return kinds[0]
        if op in _COMPARISONS and kinds[0] in _NUMBERS:
            return "bool"
        if op in ("and", "or") and kinds[0] == "bool":
            return "bool"
    if op in ("mod", "div") and kinds == ("int", "int") and args[1].op == "int" and int(args[1].value) > 0:  # type: ignore[arg-type]
        return "int"
    if op in ("neg", "abs") and len(args) == 1 and kinds[0] in _NUMBERS:
        return kinds[0]
    if op in _OF_FLOAT and kinds == ("float",):
        return "float"
    if op == "float" and kinds == ("int",):
        return "float"
    if op == "not" and kinds == ("bool",):
        return "bool"
    if op == "where" and len(args) == 3 and kinds[0] == "bool" and kinds[1] == kinds[2] and kinds[1] in _NUMBERS:
        return kinds[1]
    operands = f"({', '.join((*kinds[:4], *['...'] * (len(kinds) > 4)))})" if kinds else shown(value)
    raise reject(
        "expression", op, f"no operation on {operands}", "see kernels/expressions/tree.py for the operations; `to_float` converts"
    )


def _lifted(value: Value, like: Kind = "int") -> Expression:
    if isinstance(value, Expression):
        return value
    if isinstance(value, bool):
        return node("bool", value=value)
    if isinstance(value, int) and like == "int":
        return whole(value)
    return const(float(value))


def _binary(op: str, left: Value, right: Value) -> Expression:
    like = next(each.kind for each in (left, right) if isinstance(each, Expression))
    return node(op, _lifted(left, like), _lifted(right, like))


def const(value: float) -> Expression:
    """A float constant: finite and within float32, in which kernels take it."""
    if not abs(value) <= 3.4e38:
        raise reject("expression.const", value, "a constant is a finite float32", "give a smaller number")
    # Equal trees have one spelling: -0.0 is 0.0.
    return node("const", value=float(value) + 0.0)


def whole(value: int) -> Expression:
    """An int32 constant."""
    if value not in INT32:
        raise reject(
            "expression.int", value, "an index is an int32 that can be negated", "give a number from -2^31 + 1 to 2^31 - 1"
        )
    return node("int", value=int(value))


def truth(value: bool) -> Expression:
    """A constant mask."""
    return node("bool", value=value)


S, B, H, Q, KV, SEQLEN_Q, SEQLEN_K = (node(name) for name in ("score", "b", "h", "q_idx", "kv_idx", "seqlen_q", "seqlen_k"))
"""The leaves: score, batch, head, query and key index, lengths."""


def tanh(x: Expression) -> Expression:
    """Hyperbolic tangent."""
    return node("tanh", x)


def exp(x: Expression) -> Expression:
    """e^x."""
    return node("exp", x)


def sigmoid(x: Expression) -> Expression:
    """1 / (1 + e^-x)."""
    return node("sigmoid", x)


def absolute(x: Expression) -> Expression:
    """|x|; its derivative at 0 is 1."""
    return node("abs", x)


def where(condition: Expression, yes: Value, no: Value) -> Expression:
    """`yes` where the condition holds, else `no`."""
    like: Kind = next((each.kind for each in (yes, no) if isinstance(each, Expression)), "float")
    return node("where", condition, _lifted(yes, like), _lifted(no, like))


def minimum(left: Value, right: Value) -> Expression:
    """The smaller of both; where they are equal, the derivative is `left`'s."""
    return _binary("min", left, right)


def maximum(left: Value, right: Value) -> Expression:
    """The larger of both; where they are equal, the derivative is `left`'s."""
    return _binary("max", left, right)


def both(left: Value, right: Value) -> Expression:
    """Logical and."""
    return node("and", _lifted(left), _lifted(right))


def either(left: Value, right: Value) -> Expression:
    """Logical or."""
    return node("or", _lifted(left), _lifted(right))


def negated(x: Expression) -> Expression:
    """Logical not."""
    return node("not", x)


def to_float(x: Expression) -> Expression:
    """A whole number as a float."""
    return node("float", x)


def load(tensor: Captured, *index: Expression) -> Expression:
    """tensor[index]; `why_outside` (kernels/expressions/ranges.py) checks whether an index may be outside."""
    return node("load", *index, value=tensor)


def number(x: Expression) -> float | int | bool | None:
    """The value of a constant, else None."""
    return x.value if x.op in ("const", "int", "bool") and not isinstance(x.value, Captured) else None


def captured(*trees: Expression | None) -> tuple[Captured, ...]:
    """The tensors that trees read, each once, in order of appearance.

    Raises:
        BadArgument: two different tensors have the same name.
    """
    tensors: dict[str, Captured] = {}
    for tree in trees:
        for each in tree.walk() if tree is not None else ():
            if isinstance(each.value, Captured) and tensors.setdefault(each.value.name, each.value) != each.value:
                raise reject("captured.name", each.value.name, "two different tensors have it", "give each its own name")
    return tuple(tensors.values())


def size_of(size: Size, sizes: dict[str, int]) -> int:
    """A dimension of a captured tensor, at least 1; `sizes`: "batch", "heads", "kv_heads", "seqlen_q", "seqlen_k"."""
    if size == "offsets":
        return max(1, sizes["seqlen_q"] + sizes["seqlen_k"] - 1)
    return max(1, sizes[size]) if isinstance(size, str) else size


def substitute(tree: Expression, leaf: str, by: Expression) -> Expression:
    """Replace every leaf of that name in `tree` by `by`."""
    replaced: dict[Expression, Expression] = {}
    for each in tree.walk():
        replaced[each] = by if each.op == leaf else node(each.op, *(replaced[arg] for arg in each.args), value=each.value)
    return replaced[tree]


def to_data(tree: Expression) -> Data:
    """Convert to nested tuples: (op,), (op, value), (op, argument, ...), ("load", (name, sizes, fill, gradient), index, ...)."""
    head = () if tree.value is None else (tree.value.to_data() if isinstance(tree.value, Captured) else tree.value,)
    return (tree.op, *head, *(to_data(each) for each in tree.args))


def parse(data: Data, *, deepest: int = DEEPEST) -> Expression:
    """Read a tree from `to_data`'s tuples, nested at most `deepest` deep.

    Raises:
        BadArgument: the data is not a tree, or too deep; the text says where.
    """
    _check(data, deepest)
    return _parsed(data)


def _check(data: Data, deepest: int) -> None:
    """Check what `_parsed` cannot: its cache takes 1, True and 1.0 for one key, and deep data would exhaust the stack."""
    stack: list[tuple[Any, int]] = [(data, 1)]
    nodes = 0
    while stack:
        at, depth = stack.pop()
        nodes += 1
        if nodes > _MOST_NODES:
            reason = f"its tree has more than {_MOST_NODES} nodes, beyond what compilers take"
            raise reject("expression", str(data[0]), reason, "write a smaller tree")
        if not isinstance(at, tuple):
            raise reject("expression", at, "an argument is a node", 'write ("const", 1.0) for a number')
        if not at or not isinstance(at[0], str):
            raise reject("expression", at, "a node is (op, ...)", 'write ("add", ("score",), ("const", 1.0)), say')
        if depth > deepest:
            reason = f"it lies more than {deepest} nodes deep in its tree, beyond what compilers can nest"
            raise reject("expression", at[0], reason, "write a flatter tree")
        op, rest = at[0], at[1:]
        if op in _WRITTEN and len(rest) == 1:
            types, expected = _WRITTEN[op]
            if type(rest[0]) not in types:
                raise reject(
                    f"expression.{op}", rest[0], f"{expected} is expected", 'write ("const", 1.0), ("int", 1) or ("bool", True)'
                )
            continue
        if op == "load" and rest:
            _tensor(rest[0])
            rest = rest[1:]
        # modified.of_heads adds an offset to head numbers; it must not make a tree too deep.
        shifted = op == "add" and rest[:1] == (("h",),) and isinstance(rest[-1], tuple) and rest[-1][:1] == ("int",)
        stack.extend((each, depth + (not shifted)) for each in reversed(rest))


@lru_cache(maxsize=4096)
def _parsed(data: Data) -> Expression:
    op, rest = data[0], data[1:]
    if op == "const" and len(rest) == 1:
        return const(rest[0])
    if op == "int" and len(rest) == 1:
        return whole(rest[0])
    if op == "bool" and len(rest) == 1:
        return truth(rest[0])
    if op == "load" and rest:
        return node("load", *map(_parsed, rest[1:]), value=_tensor(rest[0]))
    return node(op, *map(_parsed, rest))


def _tensor(data: Any) -> Captured:
    match data:
        case (str() as name, tuple() as sizes, str() as fill, bool() as gradient):
            return Captured(name, sizes, fill, gradient)  # type: ignore[arg-type]
    raise reject("expression.load", data, "a tensor is (name, sizes, fill, gradient)", "see Captured")


def _text(x: Expression) -> tuple[str, int]:
    """Readable text, and the strength with which its operator binds."""
    if x.op in _INFIX:
        sign = _INFIX[x.op]
        binds = _BINDS[sign]
        (left, of_left), (right, of_right) = map(_text, x.args)
        left = f"({left})" if of_left < binds or binds == of_left == 1 else left
        # A negative number needs no brackets after an operator.
        right = f"({right})" if of_right <= binds and not (sign == "*" and number(x.args[1]) is not None) else right
        return f"{left} {sign} {right}", binds
    if x.op == "load" and isinstance(x.value, Captured):
        return f"{x.value.name}[{', '.join(_text(each)[0] for each in x.args)}]", 9
    value = number(x)
    if value is not None:
        return (f"{value:.6g}" if isinstance(value, float) else str(value)), 4 if isinstance(value, float) and value < 0 else 9
    if x.op in ("neg", "not"):
        inner, binds = _text(x.args[0])
        return ("-" if x.op == "neg" else "~") + (inner if binds > 5 else f"({inner})"), 6
    return (f"{x.op}({', '.join(_text(each)[0] for each in x.args)})" if x.args else x.op), 9
