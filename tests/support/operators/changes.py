"""Operators: small changes of an expression or a statement of device code, such as a programmer's slip makes.

Each takes a node of the syntax tree and yields changes of its text. What no operator makes: the dtype of an accumulator's first
value alone, as the interpreter keeps none of it beyond the first step; hints for the compiler, such as `num_stages`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import libcst as cst
import libcst.matchers as m

__all__ = ["HINTS", "OPERATORS", "Change", "Source"]

HINTS = frozenset({"num_stages", "threads", "policy", "input_precision"})
"""Arguments that say how to compute, not what."""
_REPLACED: dict[type[Any], type[Any]] = {
    cst.LessThan: cst.LessThanEqual,
    cst.LessThanEqual: cst.LessThan,
    cst.GreaterThan: cst.GreaterThanEqual,
    cst.GreaterThanEqual: cst.GreaterThan,
    cst.Equal: cst.NotEqual,
    cst.NotEqual: cst.Equal,
    cst.Add: cst.Subtract,
    cst.Subtract: cst.Add,
    cst.AddAssign: cst.SubtractAssign,
    cst.SubtractAssign: cst.AddAssign,
}
_PAIRS = (("minimum", "maximum"), ("min", "max"), ("reduce_min", "reduce_max"))
_EXTREMES = {**dict(_PAIRS), **{high: low for low, high in _PAIRS}}
_INDEX = re.compile(
    r"(begin|start|end|offset|rows|cols|key)(_[a-z0-9]+)?|middle|at|block|tiles?|head|h|b|seq|row|row_0|n_[qk]|tokens|last|groups|index"
    r"|\w+_(begin|offsets|rows|blocks|tiles|head)"
)
"""Names that hold an index or a length."""
_ALIKE = [
    re.compile(r"(q|k|v|do)_(token|head|dim|batch)"),
    re.compile(
        r"(begin|start|seqlen|rows)_[a-z]+|b|h|seq|head|kv_head|heads|kv_heads|groups|member|lse_stride|(q|k)_(tiles|blocks)|tile|at"
        r"|begin|end|middle|masked|width|low|high|block|blocks|length|part|list_(batch|head)|sizes\[\d\]|max_[qk]"
    ),
    re.compile(r"(DIM|PAD|TILE|BLOCK|PER)(_[A-Z]+)?|(dim|tile)_[a-z]+"),
    re.compile(r"rows|cols|q_idx|kv_idx|near_[qk]"),
    re.compile(r"dims(_[a-z]+)?"),
    re.compile(r"\w+_steps|own"),
    re.compile(r"\w+_(offsets|step)"),
]
"""Index, length and stride arguments: those that one pattern matches may be swapped without another type or shape."""
_ACCUMULATOR = re.compile(r"acc(_\w+)?|row_sum|d[qkv]")
_FACTORS = {"scale", "scale_log2", "LOG2_E", "LN_2"}
_INFINITY = m.UnaryOperation(m.Minus(), m.Call(m.Attribute(attr=m.Name("infinity")))) | m.Call(m.Name("float"))
_SENTINEL = "-10000.0"
_NARROW = ("float16", "bfloat16")


class Change(NamedTuple):
    """Replace the characters `start` to `end` of a source, which are `old`, by `new`."""

    start: int
    end: int
    old: str
    new: str


class Source:
    """Text of the nodes of one module.

    Args:
        text: the module's source, in ASCII.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        wrapper = cst.metadata.MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        self.module = wrapper.module
        self._spans: Any = wrapper.resolve(cst.metadata.ByteSpanPositionProvider)

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return where a node begins and ends, without parentheses around it."""
        span = self._spans[node]
        return span.start, span.start + span.length

    def of(self, node: cst.CSTNode) -> str:
        """Return the text of a node, without parentheses around it."""
        start, end = self.span(node)
        return self.text[start:end]

    def change(self, first: cst.CSTNode, new: str, last: cst.CSTNode | None = None) -> Change:
        """Replace the text of a node, or of all from `first` to `last`."""
        start, end = self.span(first)[0], self.span(last or first)[1]
        return Change(start, end, self.text[start:end], new)

    def with_changes(self, node: Any, **fields: Any) -> Change:
        """Replace a node by itself with other fields."""
        if hasattr(node, "lpar"):
            fields |= {"lpar": (), "rpar": ()}
        return self.change(node, self.module.code_for_node(node.with_changes(**fields)))


Operator = Callable[[Source, cst.CSTNode], Iterator[Change]]


def compare(source: Source, node: cst.CSTNode) -> Iterator[Change]:
    """Yield `<` as `<=`, `>` as `>=`, `==` as `!=`, and the other way round."""
    if isinstance(node, cst.Comparison) and len(node.comparisons) == 1:
        target = node.comparisons[0]
        if other := _other(target.operator):
            yield source.with_changes(node, comparisons=[target.with_changes(operator=other)])


def sign(source: Source, node: cst.CSTNode) -> Iterator[Change]:
    """Yield `+` as `-`, and the other way round."""
    if isinstance(node, (cst.BinaryOperation, cst.AugAssign)) and (other := _other(node.operator)):
        yield source.with_changes(node, operator=other)


def extreme(source: Source, node: cst.CSTNode) -> Iterator[Change]:
    """Yield a minimum as a maximum, and the other way round."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and (other := _EXTREMES.get(node.func.attr.value)):
        yield source.with_changes(node, func=node.func.with_changes(attr=cst.Name(other)))


def bound(source: Source, node: cst.CSTNode) -> Iterator[Change]:
    """Yield an index or a length that is one more or one less."""
    if isinstance(node, cst.Call) and source.of(node.func).rpartition(".")[2] in ("range", "serial", "Pipelined"):
        for each in [each for each in node.args if each.keyword is None][:2]:
            yield from _one_more_and_less(source, each.value)
    elif isinstance(node, cst.Comparison) and len(node.comparisons) == 1:
        right = node.comparisons[0].comparator
        if isinstance(node.comparisons[0].operator, (cst.LessThan, cst.GreaterThanEqual)):
            yield _added(source, right, "- 1")
        elif isinstance(node.comparisons[0].operator, (cst.LessThanEqual, cst.GreaterThan)):
            yield _added(source, right, "+ 1")
    elif isinstance(node, cst.Index) and isinstance(node.value, cst.Integer):
        value = int(node.value.value)
        yield from (source.change(node.value, str(other)) for other in (value + 1, value - 1) if other >= 0)
    elif isinstance(node, cst.Assign) and m.matches(node, m.Assign(targets=[m.AssignTarget(m.Name())])):
        if _INDEX.fullmatch(source.of(node.targets[0].target)) and not isinstance(node.value, (cst.Integer, cst.Tuple)):
            yield from _one_more_and_less(source, node.value)
    elif isinstance(node, cst.Return) and isinstance(node.value, cst.BinaryOperation):
        yield from _one_more_and_less(source, node.value)


def swap(source: Source, node: cst.CSTNode) -> Iterator[Change]:
    """Yield two index, length or stride arguments in the other order."""
    if isinstance(node, cst.Subscript):
        indices = [each.slice.value if isinstance(each.slice, cst.Index) else None for each in node.slice]
        dims = [None if each is None or m.matches(each, m.Name("None")) else each for each in indices]
        yield from (_swapped(source, a, b) for a, b in itertools.pairwise(dims) if a and b)
        return
    values: Sequence[Any] = ()
    if isinstance(node, cst.Call):
        values = [each.value for each in node.args if each.keyword is None]
    elif isinstance(node, cst.Tuple):
        values = [each.value for each in node.elements]
    for a, b in itertools.pairwise(values):
        texts = source.of(a), source.of(b)
        if texts[0] != texts[1] and any(all(map(alike.fullmatch, texts)) for alike in _ALIKE):
            yield _swapped(source, a, b)


def drop(source: Source, node: cst.CSTNode) -> Iterator[Change]:
    """Yield a statement without which the function still runs as `pass`: no first value of a name."""
    if not isinstance(node, cst.FunctionDef):
        return
    names = {each.name.value for each in m.findall(node.params, m.Param()) if isinstance(each, cst.Param)}
    statements = m.findall(node.body, m.OneOf(m.Assign(), m.AnnAssign(), m.AugAssign(), m.Expr(m.Call()), m.Return(value=None)))
    for each in sorted(statements, key=source.span):
        targets = _targets(each)
        if names.issuperset(targets):
            yield source.change(each, "pass")
        names.update(targets)


def constant(source: Source, node: cst.CSTNode) -> Iterator[Change]:
    """Yield a factor one per cent larger, an integer twice as large, 0 as 1, and infinity as a large number."""
    if m.matches(node, _INFINITY):
        yield source.change(node, _SENTINEL)
    elif isinstance(node, cst.Float):
        value = float(node.value)
        yield source.change(node, repr(value * 1.01 or 1.0))
    elif isinstance(node, cst.BinaryOperation):
        for each in (node.left, node.right):
            if isinstance(each, cst.Integer):
                yield source.change(each, str(int(each.value) * 2 or 1))
            elif isinstance(each, cst.Name) and each.value in _FACTORS and isinstance(node.operator, cst.Multiply):
                yield source.change(each, f"({each.value} * 1.01)")
    elif m.matches(node, m.Call(m.Attribute(attr=m.Name("fill") | m.Name("cast")))):
        yield from (source.change(each, "1") for each in m.findall(node, m.Integer("0")))


def guard(source: Source, node: cst.CSTNode) -> Iterator[Change]:
    """Yield a load or store without its mask, a choice without its condition, and a condition without one of its parts."""
    if isinstance(node, cst.Call):
        kept = [each for each in node.args if each.keyword is None or each.keyword.value not in ("mask", "other")]
        if any(each.keyword and each.keyword.value == "mask" for each in node.args):
            yield source.with_changes(node, args=[*kept[:-1], kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)])
        elif source.of(node.func) in ("tl.where", "T.if_then_else"):
            _, first, second = (each.value for each in node.args)
            yield source.change(node, _in_parentheses(source, second if _is_constant(first) else first))
    elif isinstance(node, (cst.BinaryOperation, cst.BooleanOperation)) and isinstance(node.operator, (cst.BitAnd, cst.And)):
        yield from (source.change(node, _in_parentheses(source, each)) for each in (node.left, node.right))
    elif isinstance(node, cst.If) and _is_guard(source, node):
        yield source.change(node.test, "True")


def narrow(source: Source, node: cst.CSTNode) -> Iterator[Change]:
    """Yield an accumulator, or a factor of a sum, that keeps the digits of half precision only."""
    for dtype in _NARROW:
        if m.matches(node, m.Call(m.Attribute(attr=m.Name("to")), [m.Arg(m.Attribute(m.Name("tl"), m.Name("float32")))])):
            assert isinstance(node, cst.Call)
            yield source.change(node.args[0].value, f"tl.{dtype}")
        elif isinstance(node, cst.Call) and re.fullmatch(r"T\.(alloc_\w+|cast)", source.of(node.func)):
            yield from (source.change(each, f'"{dtype}"') for each in m.findall(node, m.Name("ACC")) if _is_argument(node, each))
        elif isinstance(node, cst.Assign) and _accumulates(source, node):
            yield source.change(node.value, f"({source.of(node.value)}).to(tl.{dtype}).to(tl.float32)")


OPERATORS: dict[str, Operator] = {
    each.__name__: each for each in (compare, bound, swap, drop, constant, guard, narrow, sign, extreme)
}
"""The operators by their names."""


def _other(operator: Any) -> Any:
    kind = _REPLACED.get(type(operator))
    return kind and kind(whitespace_before=operator.whitespace_before, whitespace_after=operator.whitespace_after)


def _added(source: Source, node: cst.BaseExpression, more: str) -> Change:
    return source.change(node, f"{_in_parentheses(source, node)} {more}")


def _one_more_and_less(source: Source, node: cst.BaseExpression) -> Iterator[Change]:
    if isinstance(node, cst.Integer):
        return (source.change(node, str(int(node.value) + more)) for more in (1, -1))
    return (_added(source, node, more) for more in ("+ 1", "- 1"))


def _in_parentheses(source: Source, node: cst.CSTNode) -> str:
    simple = isinstance(node, (cst.Name, cst.Call, cst.Subscript, cst.Integer, cst.Float, cst.Attribute))
    return source.of(node) if simple else f"({source.of(node)})"


def _swapped(source: Source, a: cst.CSTNode, b: cst.CSTNode) -> Change:
    between = source.text[source.span(a)[1] : source.span(b)[0]]
    return source.change(a, source.of(b) + between + source.of(a), b)


def _targets(statement: cst.CSTNode) -> set[str]:
    """Return the names to which a statement gives their value; those whose elements it sets are none."""
    targets: Sequence[cst.CSTNode] = ()
    if isinstance(statement, cst.Assign):
        targets = [each.target for each in statement.targets]
    elif isinstance(statement, cst.AnnAssign):
        targets = [statement.target]
    names: set[str] = set()
    for each in targets:
        elements = [element.value for element in each.elements] if isinstance(each, cst.Tuple) else [each]
        names.update(element.value for element in elements if isinstance(element, cst.Name))
    return names


def _is_guard(source: Source, node: cst.If) -> bool:
    """Return whether a statement runs for some values only: not an early return, nor a choice by constants."""
    runtime = isinstance(node.test, cst.Comparison) and not source.of(node.test).isupper()
    return runtime and node.orelse is None and not m.findall(node.body, m.Return())


def _accumulates(source: Source, node: cst.Assign) -> bool:
    """Return whether a statement adds to a sum, or scales it."""
    name = source.of(node.targets[0].target)
    value = isinstance(node.value, (cst.Call, cst.BinaryOperation)) and m.findall(node.value, m.Name(name))
    return bool(value and _ACCUMULATOR.fullmatch(name))


def _is_constant(node: cst.CSTNode) -> bool:
    return isinstance(node, (cst.Float, cst.Integer, cst.UnaryOperation)) or m.matches(node, m.Call(m.Name("float")))


def _is_argument(call: cst.Call, node: cst.CSTNode) -> bool:
    return any(each.value is node for each in call.args)
