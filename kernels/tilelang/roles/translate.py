"""Translate a lowered PrimFunc into a Python function that records the steps of one role of one block.

Statements become Python's; operations (operations.py) and branches on the thread index become calls of a Recorder. A statement
that is not known is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnfuzz.kernels.support.absent import Absent
from attnfuzz.kernels.tilelang.roles.expressions import UnsupportedByRolesError
from attnfuzz.kernels.tilelang.roles.memory import rounded
from attnfuzz.kernels.tilelang.roles.operations import Declared, Operations
from attnfuzz.kernels.tilelang.roles.variables import VARIABLE, parallel_loops, variables_of_contents

try:
    import tilelang  # noqa: F401  (makes its own tvm importable)
    from tvm import tirx
except ImportError:
    tirx = Absent("tilelang")

__all__ = ["Translation", "translated"]

_BARRIERS = ("shared.barrier", "shared.cluster_barrier")


@dataclass(slots=True)
class Translation:
    """The recording function of a PrimFunc, and what its caller must provide."""

    name: str
    source: str
    record: Callable[..., None]
    """`record(R, block, P)`: the Recorder, the block's indices, and the numbers by name."""
    grid: str
    """Source text of the grid, a tuple of three, in terms of P."""
    threads: int
    buffers: list[Declared]
    barriers: dict[int, tuple[str, list[int]]]
    """Name and arrivals of each array of mbarriers, by slot."""
    numbers: dict[int, tuple[str, str]]
    """Name and dtype of the parameters that are numbers, by position."""
    extents: list[tuple[str, int, int]]
    """Names bound to the extents of parameters: name, position, axis."""
    written: set[int] = field(default_factory=set)
    """Positions of the parameters that are written."""
    branches: bool = True
    """Whether threads take different branches; else there is one role."""


def translated(func: Any) -> Translation:
    """Translate `func`, as `lowering.lowered` returns it.

    Raises:
        UnsupportedByRolesError: an operation or a construct that the executor of roles does not know; it is named.
    """
    return _Translator(func).translation()


def _namespace(constants: list[tuple[str, float, str]]) -> dict[str, Any]:
    def towards_zero(a: Any, b: Any) -> Any:
        return np.trunc(np.divide(a, b)).astype(np.int64)

    return {
        "np": np,
        "rounded": rounded,
        "_to_float": lambda x: np.asarray(x, dtype=np.float32),
        "_to_int": lambda x: np.trunc(x).astype(np.int64),
        "_rsqrt": lambda x: np.float32(1) / np.sqrt(x),
        "_sigmoid": lambda x: np.float32(1) / (np.float32(1) + np.exp(-x)),
        "_towards_zero": towards_zero,
        "_remainder": lambda a, b: a - towards_zero(a, b) * b,
        **{name: np.float32(rounded(np.float32(value), dtype)) for name, value, dtype in constants},
    }


class _Translator(Operations):
    def __init__(self, func: Any) -> None:
        super().__init__()
        self.func = func
        self.barriers: dict[int, tuple[str, list[int]]] = {}
        self.grid = ["1", "1", "1"]
        self.thread_count = 1
        self.known: set[str] = set()
        self.contents = variables_of_contents(func)
        self.branches = False

    def translation(self) -> Translation:
        """Translate the function."""
        extents, numbers = self._parameters()
        self.statement(self.func.body)
        source = "def record(R, block, P):\n" + "\n".join(self.lines) + "\n"
        names = _namespace(self.code.constants)
        exec(compile(source, f"<roles of {self._name()}>", "exec"), names)
        return Translation(
            name=self._name(),
            source=source,
            record=names["record"],
            grid=f"({', '.join(self.grid)},)",
            threads=self.thread_count,
            buffers=self.buffers,
            barriers=self.barriers,
            numbers=numbers,
            extents=extents,
            written=self.written,
            branches=self.branches,
        )

    def _name(self) -> str:
        return str(self.func.attrs["global_symbol"]) if "global_symbol" in self.func.attrs else "function"

    # declarations

    def _parameters(self) -> tuple[list[tuple[str, int, int]], dict[int, tuple[str, str]]]:
        extents: list[tuple[str, int, int]] = []
        numbers: dict[int, tuple[str, str]] = {}
        for position, parameter in enumerate(self.func.params):
            if parameter not in self.func.buffer_map:
                name = self._new(parameter)
                numbers[position] = (name, str(parameter.dtype))
                self.out(f"{name} = P[{name!r}]")
                continue
            for axis, extent in enumerate(self.func.buffer_map[parameter].shape):
                if isinstance(extent, tirx.Var) and extent not in self.code.names:
                    name = self._new(extent)
                    extents.append((name, position, axis))
                    self.out(f"{name} = P[{name!r}]")
        for position, parameter in enumerate(self.func.params):
            if parameter in self.func.buffer_map:
                self._declare(self.func.buffer_map[parameter], position)
        return extents, numbers

    def _new(self, var: Any, source: str | None = None) -> str:
        """Name a variable; `source` replaces the name."""
        name = "".join(letter if letter.isalnum() else "_" for letter in str(var.name))
        while name in self.known or name in ("R", "M", "P", "np", "block"):
            name += "_"
        self.known.add(name)
        self.code.names[var] = source or name
        return name

    def _declare(self, buffer: Any, parameter: int | None = None) -> None:
        if buffer.data in self.code.slots or buffer.data in self.code.variables:
            return
        scope, dtype = str(buffer.scope()), str(buffer.dtype)
        if scope == VARIABLE and buffer.data not in self.contents:
            name = self._new(buffer.data)
            self.code.variables[buffer.data] = name
            self.out(f"{name} = [0]")
            return
        slot = len(self.buffers)
        shape = f"({''.join(self.code.recorded(extent) + ', ' for extent in buffer.shape)})"
        self.code.slots[buffer.data] = slot
        self.buffers.append(Declared(str(buffer.name), shape, dtype, scope or "global", parameter))

    def _block(self, block: Any) -> None:
        counts = block.annotations.get("barrier_init", {})
        by_data = {data: [int(count) for count in each] for data, each in counts.items()}
        for buffer in block.alloc_buffers:
            self._declare(buffer)
            if buffer.scope() in _BARRIERS:
                slot = self.code.slots[buffer.data]
                self.barriers[slot] = (str(buffer.name), by_data[buffer.data])
        self.statement(block.body)

    # statements

    def statement(self, op: Any) -> None:
        """Translate one statement."""
        kind = type(op).__name__
        known = {
            "AttrStmt": self._attribute, "For": self._loop, "IfThenElse": self._branch, "BufferStore": self._store,
            "Evaluate": self.evaluate, "Bind": self._bind, "SBlock": self._block,
        }  # fmt: skip
        if kind == "SeqStmt":
            for each in op.seq:
                self.statement(each)
        elif kind == "SBlockRealize":
            self.statement(op.block)
        elif kind == "AllocBuffer":
            self._declare(op.buffer)
        elif kind in known:
            known[kind](op)
        else:
            raise UnsupportedByRolesError(f"{kind}: the executor of roles does not know this statement")

    def _attribute(self, op: Any) -> None:
        if op.attr_key == "thread_extent":
            tag, var = str(op.node.thread_tag), op.node.var
            if tag == "threadIdx.x":
                self._new(var, "R.threads")
                self.code.threads.add(var)
                self.thread_count = int(op.value)
            elif tag.startswith("threadIdx"):
                self._new(var, "0")
            else:
                axis = "xyz".index(tag[-1])
                self._new(var, f"block[{axis}]")
                self.grid[axis] = self.code.recorded(op.value)
        self.statement(op.body)

    def _bind(self, op: Any) -> None:
        name = self._new(op.var)
        self.out(f"{name} = {self.code.recorded(op.value)}")

    def _loop(self, op: Any) -> None:
        if op.kind in (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED):
            self._parallel(op)
            return
        if op.kind not in (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED):
            raise UnsupportedByRolesError(f"loop over {op.loop_var}: the executor of roles does not know its kind {op.kind}")
        low, extent = self.code.recorded(op.min), self.code.recorded(op.extent)
        name = self._new(op.loop_var)
        self.out(f"for {name} in range({low}, {low} + {extent}):")
        self._nested(f"R.loops.append(({name!r}, {name}))", op.body, "R.loops.pop()")

    def _nested(self, first: str, body: Any, last: str) -> None:
        self.indent += 1
        self.out(first)
        self.statement(body)
        self.out(last)
        self.indent -= 1

    def _parallel(self, op: Any) -> None:
        outermost = not self.code.axes
        if outermost:
            self.code.rank = parallel_loops(op)
        axis = len(self.code.axes)
        name = self._new(op.loop_var)
        low, extent = self.code.recorded(op.min), self.code.recorded(op.extent)
        self.out(f"{name} = R.axis({low}, {extent}, {axis}, {self.code.rank})")
        self.code.axes.add(op.loop_var)
        self.statement(op.body)
        if outermost:
            self.code.axes.clear()
            self.code.rank = 0

    def _branch(self, op: Any) -> None:
        condition = op.condition
        if self.code.axes and (self.code.on_axes(condition) or self.code.on_contents(condition)):
            self._masked(self.code.function(condition), op.then_case)
            if op.else_case is not None:
                self._masked(self.code.function(tirx.Not(condition)), op.else_case)
        elif self.code.on_threads(condition):
            text = self.code.recorded(condition)
            self._by_threads(text, op.then_case)
            if op.else_case is not None:
                self._by_threads(f"np.logical_not({text})", op.else_case)
        else:
            self.out(f"if {self.code.recorded(condition)}:")
            self._nested("pass", op.then_case, "pass")
            if op.else_case is not None:
                self.out("else:")
                self._nested("pass", op.else_case, "pass")

    def _masked(self, condition: str, body: Any) -> None:
        self.masks.append(condition)
        self.statement(body)
        self.masks.pop()

    def _by_threads(self, condition: str, body: Any) -> None:
        self.branches = True
        self.out(f"if R.enter({condition}):")
        self._nested("pass", body, "pass")
        self.out("R.leave()")

    def _store(self, op: Any) -> None:
        data = op.buffer.data
        if data in self.code.variables:
            self.out(f"{self.code.variables[data]}[0] = {self.code.recorded(op.value)}")
            return
        self.write(op.buffer, self.code.indices(op), op.value, "store")
