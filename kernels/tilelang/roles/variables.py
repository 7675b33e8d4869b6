"""Local variables and parallel loops of a PrimFunc, looked at before it is translated."""

from __future__ import annotations

from typing import Any

from attnfuzz.kernels.support.absent import Absent

try:
    import tilelang  # noqa: F401  (makes its own tvm importable)
    from tvm import tirx
except ImportError:
    tirx = Absent("tilelang")

__all__ = ["VARIABLE", "parallel_loops", "variables_of_contents"]

VARIABLE = "local.var"
"""Scope of a local variable."""


def parallel_loops(op: Any) -> int:
    """Count the parallel loops of a nest."""
    from tvm.tirx.stmt_functor import post_order_visit

    loops: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.For) and node.kind in (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED):
            loops.append(node)

    post_order_visit(op, visit)
    return len(loops)


def variables_of_contents(func: Any) -> set[Any]:
    """Return the data of local variables that take a value from a buffer: they are known only when steps are executed."""
    from tvm.tirx.stmt_functor import post_order_visit

    stores: list[tuple[Any, list[Any]]] = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.BufferStore) and str(node.buffer.scope()) == VARIABLE:
            stores.append((node.buffer.data, _loads(node.value)))

    post_order_visit(func.body, visit)
    contents: set[Any] = set()
    count = -1
    while count != len(contents):
        count = len(contents)
        for data, loads in stores:
            if any(_has_contents(each, contents) for each in loads):
                contents.add(data)
    return contents


def _loads(value: Any) -> list[Any]:
    from tvm.tirx.stmt_functor import post_order_visit

    loads: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.BufferLoad):
            loads.append(node.buffer)

    post_order_visit(tirx.Evaluate(value), visit)
    return loads


def _has_contents(buffer: Any, contents: set[Any]) -> bool:
    scope = str(buffer.scope())
    if scope == VARIABLE:
        return buffer.data in contents
    return not (scope == "global" and str(buffer.dtype) in ("int32", "int64"))
