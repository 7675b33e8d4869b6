"""Translate a lowered PrimFunc into a Python function that records the steps of one role of one block.

Tile operations, mbarriers and branches on the thread index become calls of a Recorder. An operation that is on none of the lists
below is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnfuzz.kernels.support.absent import Absent
from attnfuzz.kernels.tilelang.roles.expressions import Expressions, UnsupportedByRolesError, name_of
from attnfuzz.kernels.tilelang.roles.memory import rounded

try:
    import tilelang  # noqa: F401  (makes its own tvm importable)
    from tvm import tirx
except ImportError:
    tirx = Absent("tilelang")

__all__ = ["HINTS", "Declared", "Translation", "translated"]

HINTS = frozenset(
    {
        "tl.annotate_consumer_reg_alloc",
        "tl.annotate_producer_reg_dealloc",
        "tl.fence_proxy_async",
        "tl.no_set_max_nreg",
        "tl.ptx_fence_barrier_init",
        "tl.set_max_nreg",
        "tl.sync_warp",
        "tl.tcgen05_after_thread_sync",
        "tl.tcgen05_before_thread_sync",
        "tl.warpgroup_arrive",
        "tl.warpgroup_commit_batch",
        "tl.warpgroup_fence_operand",
    }
)
"""Statements that order nothing among roles here: registers, and fences, which TileLang adds by itself where they are needed."""
_BARRIERS = ("shared.barrier", "shared.cluster_barrier")
_VARIABLE = "local.var"
_LATER_ARGUMENTS = 2
"""Arguments of tl.region before its extents."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A buffer as the PrimFunc declares it; a parameter's shape is source text, evaluated with each launch's tensors."""

    name: str
    shape: str
    dtype: str
    scope: str
    parameter: int | None = None


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


class _Translator:
    def __init__(self, func: Any) -> None:
        self.func = func
        self.code = Expressions()
        self.lines: list[str] = []
        self.indent = 1
        self.buffers: list[Declared] = []
        self.barriers: dict[int, tuple[str, list[int]]] = {}
        self.grid = ["1", "1", "1"]
        self.thread_count = 1
        self.written: set[int] = set()
        self.masks: list[str] = []
        """Conditions of the parallel loops around the current statement, as functions of the Memory."""
        self.known: set[str] = set()
        self.contents = _variables_of_contents(func)
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
        if scope == _VARIABLE and buffer.data not in self.contents:
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

    def out(self, line: str) -> None:
        """Add a line of source."""
        self.lines.append("    " * self.indent + line)

    def statement(self, op: Any) -> None:
        """Translate one statement."""
        kind = type(op).__name__
        known = {
            "AttrStmt": self._attribute, "For": self._loop, "IfThenElse": self._branch, "BufferStore": self._store,
            "Evaluate": self._evaluate, "Bind": self._bind, "SBlock": self._block,
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
            self.code.rank = _parallel_loops(op)
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
        self._write(op.buffer, self.code.indices(op), op.value, "store")

    def _write(self, buffer: Any, indices: str, value: Any, how: str) -> None:
        slot = self._slot(buffer)
        self._note_written(slot)
        part = f"R.at({slot}, {indices}, {self.code.rank})"
        masks = f"({''.join(each + ', ' for each in self.masks)})"
        self.out(f"R.{how}({part}, {self.code.function(value)}, {masks})")

    def _slot(self, buffer: Any) -> int:
        if buffer.data not in self.code.slots:
            raise UnsupportedByRolesError(f"{buffer.name}: this buffer is declared by nothing that the executor of roles knows")
        return self.code.slots[buffer.data]

    def _note_written(self, slot: int) -> None:
        if (parameter := self.buffers[slot].parameter) is not None:
            self.written.add(parameter)

    # operations

    def _evaluate(self, op: Any) -> None:
        call = op.value
        if isinstance(call, tirx.IntImm):
            return
        if not isinstance(call, tirx.Call):
            raise UnsupportedByRolesError(f"{call}: the executor of roles does not know this statement")
        name = name_of(call)
        if name in HINTS:
            return
        translate = _OPERATIONS.get(name)
        if translate is None:
            known = ", ".join(sorted(HINTS | _OPERATIONS.keys()))
            raise UnsupportedByRolesError(f"{name}: the executor of roles does not know this operation; known are {known}")
        translate(self, call)

    def region(self, call: Any) -> str:
        """A tl.region, or a single element, as a Part."""
        if isinstance(call, tirx.BufferLoad):
            return f"R.at({self._slot(call.buffer)}, {self.code.indices(call)}, 0)"
        load, mask = call.args[0], int(call.args[1])
        slot = self._slot(load.buffer)
        if mask & 2:
            self._note_written(slot)
        extents = "".join(f"{self.code.recorded(each)}, " for each in call.args[_LATER_ARGUMENTS:])
        return f"R.block({slot}, {self.code.indices(load)}, ({extents}))"

    def barrier(self, node: Any) -> str:
        """An mbarrier: an element of its array, or an access pointer to one."""
        if isinstance(node, tirx.BufferLoad):
            return f"R.barrier({self._slot(node.buffer)}, {self.code.recorded(node.indices[0])})"
        if isinstance(node, tirx.Call) and name_of(node) == "tl.region":
            return self.barrier(node.args[0])
        if isinstance(node, tirx.Call) and name_of(node) == "tirx.tvm_access_ptr":
            return f"R.barrier({self.code.slots[node.args[1]]}, {self.code.recorded(node.args[2])})"
        raise UnsupportedByRolesError(f"{node}: the executor of roles does not know this form of an mbarrier")

    def copy(self, call: Any) -> None:
        """tl.tileop.copy: complete when it returns."""
        self.out(f"R.copy({self.region(call.args[0])}, {self.region(call.args[1])})")

    def tma_copy(self, call: Any) -> None:
        """tl.tileop.tma_copy from global to shared memory."""
        if "barrier" not in call.annotations:
            raise UnsupportedByRolesError("tl.tileop.tma_copy: the executor of roles knows it only with an mbarrier, as a load")
        arrives = "emit_arrive" in call.annotations and bool(int(call.annotations["emit_arrive"]))
        barrier = self.barrier(call.annotations["barrier"])
        self.out(f"R.tma_copy({self.region(call.args[0])}, {self.region(call.args[1])}, {barrier}, arrives={arrives})")

    def fill(self, call: Any) -> None:
        """tl.tileop.fill."""
        self.out(f"R.fill({self.region(call.args[0])}, {self.code.recorded(call.args[1])})")

    def gemm(self, call: Any) -> None:
        """A product, by any of its three names."""
        a, b, c = (self.region(each) for each in call.args[:3])
        flags = ", ".join(self.code.recorded(call.args[i]) for i in (3, 4, 9))
        barrier = self.barrier(call.args[10]) if not isinstance(call.args[10], tirx.IntImm) else "None"
        self.out(f"R.gemm({name_of(call).rpartition('.')[2]!r}, {a}, {b}, {c}, {flags}, {barrier})")

    def reduce(self, call: Any) -> None:
        """tl.tileop.reduce."""
        how = str(call.args[2].value)
        clear = self.code.recorded(call.args[4])
        self.out(f"R.reduce({self.region(call.args[0])}, {self.region(call.args[1])}, {how!r}, {int(call.args[3])}, {clear})")

    def atomic_add(self, call: Any) -> None:
        """tl.tileop.atomicadd of a tile."""
        self.out(f"R.atomic_add({self.region(call.args[0])}, {self.region(call.args[1])})")

    def atomic_add_element(self, call: Any) -> None:
        """tl.atomic_add_elem_op: an addition to one element, which an access pointer names."""
        load = call.args[0].args[0]
        self._write(load.buffer, self.code.indices(load), call.args[1], "add")

    def wait(self, call: Any) -> None:
        """Wait for a parity."""
        self.out(f"R.wait({self.barrier(call.args[0])}, {self.code.recorded(call.args[1])})")

    def arrive(self, call: Any) -> None:
        """Arrive at an mbarrier with every thread that executes this."""
        self.out(f"R.arrive({self.barrier(call.args[0])})")

    def expect(self, call: Any) -> None:
        """Expect bytes at an mbarrier, and arrive there where the operation says so."""
        self.out(f"R.expect({self.barrier(call.args[0])}, {self.code.recorded(call.args[1])})")
        if name_of(call) == "tirx.ptx_arrive_barrier_expect_tx":
            self.arrive(call)

    def commit(self, call: Any) -> None:
        """tl.tcgen05_mma_arrive."""
        self.out(f"R.commit({self.barrier(call.args[0])})")

    def drain(self, call: Any) -> None:
        """tl.wait_wgmma and tl.warpgroup_wait."""
        self.out(f"R.drain({self.code.recorded(call.args[0])})")

    def sync(self, call: Any) -> None:
        """A barrier of the whole block, or a named one of some threads."""
        arguments = [self.code.recorded(each) for each in call.args[1:]]
        self.out(f"R.sync({', '.join(arguments)})")

    def signal(self, call: Any) -> None:
        """tl.named_barrier_arrive."""
        self.out(f"R.signal({', '.join(self.code.recorded(each) for each in call.args)})")

    def release(self, call: Any) -> None:
        """tl.deallocate_tmem: no access may follow, nor still run."""
        slot = self.code.slots[call.args[0].args[1]] if name_of(call.args[0]) == "tirx.tvm_access_ptr" else None
        if slot is None:
            raise UnsupportedByRolesError("tl.deallocate_tmem: the executor of roles does not know this form of its argument")
        self.out(f"R.release({slot})")


_OPERATIONS: dict[str, Callable[[_Translator, Any], None]] = {
    "tirx.ptx_arrive_barrier": _Translator.arrive,
    "tirx.ptx_arrive_barrier_expect_tx": _Translator.expect,
    "tirx.tvm_storage_sync": _Translator.sync,
    "tl.atomic_add_elem_op": _Translator.atomic_add_element,
    "tl.deallocate_tmem": _Translator.release,
    "tl.mbarrier_expect_tx": _Translator.expect,
    "tl.mbarrier_wait_parity": _Translator.wait,
    "tl.named_barrier_arrive": _Translator.signal,
    "tl.tcgen05_mma_arrive": _Translator.commit,
    "tl.tileop.atomicadd": _Translator.atomic_add,
    "tl.tileop.copy": _Translator.copy,
    "tl.tileop.fill": _Translator.fill,
    "tl.tileop.gemm": _Translator.gemm,
    "tl.tileop.reduce": _Translator.reduce,
    "tl.tileop.tcgen05_gemm": _Translator.gemm,
    "tl.tileop.tma_copy": _Translator.tma_copy,
    "tl.tileop.wgmma_gemm": _Translator.gemm,
    "tl.wait_wgmma": _Translator.drain,
    "tl.warpgroup_wait": _Translator.drain,
}


def _parallel_loops(op: Any) -> int:
    """Count the parallel loops of a nest."""
    from tvm.tirx.stmt_functor import post_order_visit

    loops: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.For) and node.kind in (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED):
            loops.append(node)

    post_order_visit(op, visit)
    return len(loops)


def _variables_of_contents(func: Any) -> set[Any]:
    """Return the data of local variables that take a value from a buffer: they are known only when steps are executed."""
    from tvm.tirx.stmt_functor import post_order_visit

    stores: list[tuple[Any, list[Any]]] = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.BufferStore) and str(node.buffer.scope()) == _VARIABLE:
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
    if scope == _VARIABLE:
        return buffer.data in contents
    return not (scope == "global" and str(buffer.dtype) in ("int32", "int64"))
