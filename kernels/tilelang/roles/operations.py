"""The calls of a Recorder for operations on tiles and mbarriers, as lines of source.

An operation that is on none of the lists below is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attnfuzz.kernels.support.absent import Absent
from attnfuzz.kernels.tilelang.loading import FENCE
from attnfuzz.kernels.tilelang.roles.expressions import Expressions, UnsupportedByRolesError, name_of

try:
    import tilelang  # noqa: F401  (makes its own tvm importable)
    from tvm import tirx
except ImportError:
    tirx = Absent("tilelang")

__all__ = ["Declared", "Operations"]

_HINTS = frozenset(
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


class Operations:
    """Lines of source that call a Recorder: those of operations, and what statements have in common with them."""

    def __init__(self) -> None:
        self.code = Expressions()
        self.lines: list[str] = []
        self.indent = 1
        self.buffers: list[Declared] = []
        self.written: set[int] = set()
        """Positions of the parameters that are written."""
        self.masks: list[str] = []
        """Conditions of the parallel loops around the current statement, as functions of the Memory."""

    def out(self, line: str) -> None:
        """Add a line of source."""
        self.lines.append("    " * self.indent + line)

    def write(self, buffer: Any, indices: str, value: Any, how: str) -> None:
        """Store a value at the indices of a buffer, or add it there, where the masks of the loops around it hold."""
        slot = self.slot(buffer)
        self._note_written(slot)
        part = f"R.at({slot}, {indices}, {self.code.rank})"
        masks = f"({''.join(each + ', ' for each in self.masks)})"
        self.out(f"R.{how}({part}, {self.code.function(value)}, {masks})")

    def slot(self, buffer: Any) -> int:
        """Return the slot of a buffer that was declared."""
        if buffer.data not in self.code.slots:
            raise UnsupportedByRolesError(f"{buffer.name}: this buffer is declared by nothing that the executor of roles knows")
        return self.code.slots[buffer.data]

    def _note_written(self, slot: int) -> None:
        if (parameter := self.buffers[slot].parameter) is not None:
            self.written.add(parameter)

    def evaluate(self, op: Any) -> None:
        """Translate a statement that is an operation alone."""
        call = op.value
        if isinstance(call, tirx.IntImm):
            return
        if not isinstance(call, tirx.Call):
            raise UnsupportedByRolesError(f"{call}: the executor of roles does not know this statement")
        name = name_of(call)
        if name in _HINTS:
            return
        translate = _OPERATIONS.get(name)
        if translate is None:
            known = ", ".join(sorted(_HINTS | _OPERATIONS.keys()))
            raise UnsupportedByRolesError(f"{name}: the executor of roles does not know this operation; known are {known}")
        translate(self, call)

    def region(self, call: Any) -> str:
        """A tl.region, or a single element, as a Part."""
        if isinstance(call, tirx.BufferLoad):
            return f"R.at({self.slot(call.buffer)}, {self.code.indices(call)}, 0)"
        load, mask = call.args[0], int(call.args[1])
        slot = self.slot(load.buffer)
        if mask & 2:
            self._note_written(slot)
        extents = "".join(f"{self.code.recorded(each)}, " for each in call.args[_LATER_ARGUMENTS:])
        return f"R.block({slot}, {self.code.indices(load)}, ({extents}))"

    def barrier(self, node: Any) -> str:
        """An mbarrier: an element of its array, or an access pointer to one."""
        if isinstance(node, tirx.BufferLoad):
            return f"R.barrier({self.slot(node.buffer)}, {self.code.recorded(node.indices[0])})"
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
        self.write(load.buffer, self.code.indices(load), call.args[1], "add")

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

    def external(self, call: Any) -> None:
        """A fence of loading.py: loads are complete here when their statement is."""
        if call.args[0] != FENCE:
            raise UnsupportedByRolesError(f"the executor of roles does not know the external function {call.args[0]}")

    def release(self, call: Any) -> None:
        """tl.deallocate_tmem: no access may follow, nor still run."""
        slot = self.code.slots[call.args[0].args[1]] if name_of(call.args[0]) == "tirx.tvm_access_ptr" else None
        if slot is None:
            raise UnsupportedByRolesError("tl.deallocate_tmem: the executor of roles does not know this form of its argument")
        self.out(f"R.release({slot})")


_OPERATIONS: dict[str, Callable[[Operations, Any], None]] = {
    "tirx.call_extern": Operations.external,
    "tirx.ptx_arrive_barrier": Operations.arrive,
    "tirx.ptx_arrive_barrier_expect_tx": Operations.expect,
    "tirx.tvm_storage_sync": Operations.sync,
    "tl.atomic_add_elem_op": Operations.atomic_add_element,
    "tl.deallocate_tmem": Operations.release,
    "tl.mbarrier_expect_tx": Operations.expect,
    "tl.mbarrier_wait_parity": Operations.wait,
    "tl.named_barrier_arrive": Operations.signal,
    "tl.tcgen05_mma_arrive": Operations.commit,
    "tl.tileop.atomicadd": Operations.atomic_add,
    "tl.tileop.copy": Operations.copy,
    "tl.tileop.fill": Operations.fill,
    "tl.tileop.gemm": Operations.gemm,
    "tl.tileop.reduce": Operations.reduce,
    "tl.tileop.tcgen05_gemm": Operations.gemm,
    "tl.tileop.tma_copy": Operations.tma_copy,
    "tl.tileop.wgmma_gemm": Operations.gemm,
    "tl.wait_wgmma": Operations.drain,
    "tl.warpgroup_wait": Operations.drain,
}
