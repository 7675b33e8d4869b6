"""Rewrite a built TileLang PrimFunc, written for a GPU, into one that TileLang's C target takes.

The source of the kernel stays as it is: on-chip buffers, tensor memory among them, become plain local arrays, parallel loops
become serial ones, asynchronous copies and products (WGMMA, tcgen05) become plain ones, tile operations lose their GPU
annotations, and synchronisation, which one thread does not need, is removed. The C target has no bfloat16: such buffers are
stored as float32 and every value stored is rounded to bfloat16 (to nearest, ties to even). A memory, an operation or an
annotation that is on none of the lists below is refused, never dropped.

This cannot show races, missing synchronisation, errors of pipeline phases and layouts, or the limit of shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnfuzz.kernels.contract import BuildError
from attnfuzz.kernels.support.absent import Absent
from attnfuzz.kernels.tilelang.cpu_floats import exactly, rounded_to_bfloat16, survives_printing

try:
    import tilelang  # noqa: F401  (makes its own tvm importable)
    from tvm import ir, tirx
except ImportError:
    ir = tirx = Absent("tilelang")

__all__ = ["NO_OPS", "CpuFunc", "UnsupportedOnCpuError", "to_cpu"]

KEPT_SCOPES = frozenset({"", "global", "local", "local.var"})
ON_CHIP_SCOPES = frozenset({"local.fragment", "shared", "shared.barrier", "shared.dyn", "shared.tmem"})
"""Memories of one block: fragments, shared memory, mbarriers, tensor memory."""

RENAMED = {
    "tl.tileop.async_copy": "tl.tileop.copy",
    "tl.tileop.tcgen05_gemm": "tl.tileop.gemm",
    "tl.tileop.tma_copy": "tl.tileop.copy",
    "tl.tileop.wgmma_gemm": "tl.tileop.gemm",
}
GEMM_ARGUMENTS = 13
"""Arguments of a plain gemm; the asynchronous forms append a barrier."""

TILE_OPS = frozenset({"tl.tileop.copy", "tl.tileop.fill", "tl.tileop.gemm", "tl.tileop.reduce"})

ANNOTATIONS = frozenset(
    {
        "barrier",
        "coalesced_width",
        "eviction_policy",
        "is_tcgen05",
        "is_tma_copy",
        "leader_scope_threads",
        "memory_order",
        "parallel_loop_layout",
        "use_tma",
        "wg_wait",
    }
)
"""Annotations of tile operations that say how a GPU does it. Those of several blocks (`use_2cta`, `cluster_mask`) say what."""

NO_OPS = frozenset(
    {
        "tirx.ptx_arrive_barrier",
        "tirx.ptx_arrive_barrier_expect_tx",
        "tirx.ptx_commit_group",
        "tirx.ptx_init_barrier_thread_count",
        "tirx.ptx_wait_barrier",
        "tirx.ptx_wait_group",
        "tirx.tvm_storage_sync",
        "tl.annotate_consumer_reg_alloc",
        "tl.annotate_producer_reg_dealloc",
        "tl.deallocate_tmem",
        "tl.fence_proxy_async",
        "tl.mbarrier_expect_tx",
        "tl.mbarrier_wait_parity",
        "tl.named_barrier_arrive",
        "tl.no_set_max_nreg",
        "tl.pdl_sync",
        "tl.pdl_trigger",
        "tl.ptx_fence_barrier_init",
        "tl.set_max_nreg",
        "tl.sync_warp",
        "tl.tcgen05_after_thread_sync",
        "tl.tcgen05_before_thread_sync",
        "tl.tcgen05_mma_arrive",
        "tl.tma_store_arrive",
        "tl.tma_store_wait",
        "tl.wait_wgmma",
        "tl.warpgroup_arrive",
        "tl.warpgroup_commit_batch",
        "tl.warpgroup_fence_operand",
        "tl.warpgroup_wait",
    }
)
"""Statements that have no effect where one thread runs everything in order."""

_MATH = (
    "acos asin atan bitwise_and bitwise_not bitwise_or bitwise_xor ceil copysign cos cosh erf exp exp2 floor hypot if_then_else "
    "isnan log log10 log1p log2 nearbyint round rsqrt sigmoid sin sinh sqrt tan tanh trunc"
)
KEPT = frozenset(f"tirx.{name}" for name in _MATH.split()) | {
    "tl.access_ptr",
    "tl.atomic_add_elem_op",
    "tl.infinity",
    "tl.launch_thread_idx",
    "tl.region",
}
"""Calls that the C target takes as they are."""

_BF16 = "bfloat16"
_WRITES = 2
"""The bit of tl.region's access mask for "written"."""


class UnsupportedOnCpuError(BuildError):
    """Error for a PrimFunc that uses something without a counterpart on the C target."""


@dataclass(frozen=True, slots=True)
class CpuFunc:
    """A rewritten PrimFunc, and the parameters that its caller must treat specially."""

    func: Any
    widened: frozenset[int]
    """Parameters that were bfloat16 and are now float32."""
    written: frozenset[int]
    """Parameters that the function stores to."""


def to_cpu(func: Any) -> CpuFunc:
    """Rewrite `func` for the C target.

    Raises:
        UnsupportedOnCpuError: an operation, or a use of bfloat16, that has no counterpart there.
    """
    rewrite = _ToCpu()
    buffers = {parameter: rewrite.parameter(buffer) for parameter, buffer in func.buffer_map.items()}
    body = rewrite.visit_stmt(func.body)
    data = {parameter: buffer.data for parameter, buffer in func.buffer_map.items()}
    index = {position: data.get(parameter) for position, parameter in enumerate(func.params)}
    return CpuFunc(
        func=tirx.PrimFunc(func.params, body, func.ret_type, buffers, func.attrs, func.span),
        widened=frozenset(i for i, var in index.items() if var is not None and var in rewrite.widened),
        written=frozenset(i for i, var in index.items() if var is not None and var in rewrite.written),
    )


@tirx.functor.mutator
class _ToCpu(tirx.PyStmtExprMutator):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[Any, Any] = {}
        self.variables: dict[Any, Any] = {}
        self.widened: set[Any] = set()
        self.written: set[Any] = set()
        self.from_bfloat16 = False
        """Whether the current tile operation copies values that are rounded already."""
        self.to_round: list[Any] = []
        """Buffers that the current tile operation writes and that must be rounded afterwards."""

    # buffers

    def parameter(self, buffer: Any) -> Any:
        """The buffer that replaces a parameter's."""
        return self._moved(buffer, buffer.scope()) if buffer.dtype == _BF16 else buffer

    def _allocated(self, buffer: Any) -> Any:
        if buffer.scope() not in KEPT_SCOPES | ON_CHIP_SCOPES:
            known = ", ".join(sorted(filter(None, KEPT_SCOPES | ON_CHIP_SCOPES)))
            raise UnsupportedOnCpuError(
                f"{buffer.name}: memory {buffer.scope()!r} has no counterpart on the C target; known are {known}"
            )
        if buffer.scope() in KEPT_SCOPES and buffer.dtype != _BF16:
            return buffer
        return self._moved(buffer, buffer.scope() if buffer.scope() in KEPT_SCOPES else "local")

    def _moved(self, buffer: Any, scope: str) -> Any:
        if buffer.dtype == _BF16:
            self.widened.add(buffer.data)
        dtype = "float32" if buffer.dtype == _BF16 else str(buffer.dtype)
        self.variables[buffer.data] = tirx.Var(buffer.data.name, ir.PointerType(ir.PrimType(dtype), scope))
        return self._buffer(buffer)

    def _buffer(self, buffer: Any) -> Any:
        if buffer not in self.buffers:
            data = self.variables.get(buffer.data)
            self.buffers[buffer] = buffer if data is None else _redeclared(buffer, data)
        return self.buffers[buffer]

    def _region(self, region: Any) -> Any:
        ranges = [ir.Range.from_min_extent(self.visit_expr(r.min), self.visit_expr(r.extent)) for r in region.region]
        return tirx.BufferRegion(self._buffer(region.buffer), ranges)

    # statements

    def visit_sblock_(self, op: Any) -> Any:
        allocated = [self._allocated(buffer) for buffer in op.alloc_buffers]
        return tirx.SBlock(
            op.iter_vars,
            [self._region(region) for region in op.reads],
            [self._region(region) for region in op.writes],
            op.name_hint,
            self.visit_stmt(op.body),
            None if op.init is None else self.visit_stmt(op.init),
            allocated,
            [tirx.MatchBufferRegion(self._buffer(m.buffer), self._region(m.source)) for m in op.match_buffers],
            {},
        )

    def visit_alloc_buffer_(self, op: Any) -> Any:
        return tirx.AllocBuffer(self._allocated(op.buffer), op.annotations)

    def visit_for_(self, op: Any) -> Any:
        kind = op.kind if op.kind == tirx.ForKind.THREAD_BINDING else tirx.ForKind.SERIAL
        low, extent = self.visit_expr(op.min), self.visit_expr(op.extent)
        return tirx.For(op.loop_var, low, extent, kind, self.visit_stmt(op.body), op.thread_binding, {}, op.step)

    def visit_bind_(self, op: Any) -> Any:
        value = self.visit_expr(op.value)
        if op.var.dtype == _BF16:
            self.variables[op.var] = tirx.Var(op.var.name, "float32")
        return tirx.Bind(self.variables.get(op.var, op.var), value)

    def visit_buffer_store_(self, op: Any) -> Any:
        self.written.add(op.buffer.data)
        buffer, indices = self._buffer(op.buffer), [self.visit_expr(i) for i in op.indices]
        if not (op.value.dtype == _BF16 and isinstance(op.value, tirx.Cast)):
            return tirx.BufferStore(buffer, self.visit_expr(op.value), indices, op.predicate)
        # in two steps: rounding repeats its operand several times, too often for a large expression
        raw = tirx.BufferStore(buffer, _as_float32(self.visit_expr(op.value.value)), indices, op.predicate)
        rounded = rounded_to_bfloat16(tirx.BufferLoad(buffer, indices))
        return tirx.SeqStmt([raw, tirx.BufferStore(buffer, rounded, indices, op.predicate)])

    def visit_evaluate_(self, op: Any) -> Any:
        call = op.value
        if not isinstance(call, tirx.Call):
            return tirx.Evaluate(self.visit_expr(call))
        name = _name(call)
        if name in NO_OPS:
            return tirx.Evaluate(0)
        target = RENAMED.get(name, name)
        if target not in TILE_OPS | {"tl.tileop.atomicadd"}:
            return tirx.Evaluate(self.visit_expr(call))
        _check_annotations(name, call)
        if target == "tl.tileop.atomicadd":
            return self._added(*call.args[:2])
        self.from_bfloat16 = target == "tl.tileop.copy" and call.args[0].args[0].buffer.data in self.widened
        arguments = call.args[:GEMM_ARGUMENTS] if target == "tl.tileop.gemm" else call.args
        # annotations (use_tma, coalesced_width, memory order) are for GPUs
        plain = tirx.Call(call.dtype, ir.Op.get(target), [self._argument(argument) for argument in arguments])
        return self._then_round(tirx.Evaluate(plain))

    def _added(self, source: Any, target: Any) -> Any:
        """Add a tile to a region of a tensor, element by element, without those beyond the tensor."""
        (start, _, *extents), (of_start, _, *of_extents) = source.args, target.args
        tensor = of_start.buffer
        self.written.add(tensor.data)
        if tensor.data in self.widened:
            raise UnsupportedOnCpuError(f"{tensor.name}: tiles are added to a bfloat16 tensor; add to a float32 one")
        loops = [tirx.Var(f"a{axis}", "int32") for axis, extent in enumerate(extents) if int(extent) > 1]
        here = _along([self.visit_expr(i) for i in start.indices], extents, loops)
        there = _along([self.visit_expr(i) for i in of_start.indices], of_extents, loops)
        total = tirx.BufferLoad(self._buffer(tensor), there) + tirx.BufferLoad(self._buffer(start.buffer), here)
        body = tirx.BufferStore(self._buffer(tensor), total, there)
        for index, size in zip(there, tensor.shape, strict=True):
            body = tirx.IfThenElse(index < tirx.Cast(index.dtype, size), body, None)
        for loop, extent in reversed(list(zip(loops, (e for e in extents if int(e) > 1), strict=True))):
            body = tirx.For(loop, 0, extent, tirx.ForKind.SERIAL, body)
        return body

    def _then_round(self, statement: Any) -> Any:
        buffers, self.to_round = self.to_round, []
        return tirx.SeqStmt([statement, *map(_round_all, buffers)]) if buffers else statement

    # expressions

    def _argument(self, argument: Any) -> Any:
        return self.visit_expr(argument) if isinstance(argument, tirx.PrimExpr) else argument

    def visit_call_(self, op: Any) -> Any:
        name = _name(op)
        if name not in KEPT:
            raise UnsupportedOnCpuError(f"{name}: this operation has no counterpart on the C target; known are {_known()}")
        if name == "tl.region":
            return self._region_call(op)
        if name == "tl.access_ptr":
            self._note_access(op)
        arguments = [self._argument(argument) for argument in op.args]
        if op.dtype != _BF16:
            return tirx.Call(op.dtype, op.op, arguments, op.annotations)
        wide = tirx.Call("float32", op.op, arguments, op.annotations)
        return wide if name == "tirx.if_then_else" else rounded_to_bfloat16(wide)

    def _region_call(self, op: Any) -> Any:
        load, mask = op.args[0], int(op.args[1])
        if mask & _WRITES:
            self.written.add(load.buffer.data)
            if load.buffer.data in self.widened:
                if load.buffer.scope() not in KEPT_SCOPES:
                    self.to_round.append(self._buffer(load.buffer))
                elif not self.from_bfloat16:
                    raise UnsupportedOnCpuError(
                        f"{load.buffer.name}: a tile operation rounds into this bfloat16 tensor; copy to a bfloat16 tile first"
                    )
        return tirx.Call(op.dtype, op.op, [self._argument(argument) for argument in op.args])

    def _note_access(self, op: Any) -> None:
        buffer = op.args[0].buffer
        self.written.add(buffer.data)
        if buffer.data in self.widened:
            raise UnsupportedOnCpuError(f"{buffer.name}: a bfloat16 tensor is accessed through a pointer")

    def visit_buffer_load_(self, op: Any) -> Any:
        return tirx.BufferLoad(self._buffer(op.buffer), [self.visit_expr(i) for i in op.indices], op.predicate)

    def visit_cast_(self, op: Any) -> Any:
        value = self.visit_expr(op.value)
        if op.dtype == _BF16:
            return rounded_to_bfloat16(_as_float32(value))
        return value if op.dtype == value.dtype else tirx.Cast(op.dtype, value)

    def visit_float_imm_(self, op: Any) -> Any:
        if op.dtype not in ("float32", _BF16) or survives_printing(op.value):
            return tirx.FloatImm("float32", op.value) if op.dtype == _BF16 else op
        return exactly(op.value)

    def _arithmetic(self, op: Any) -> Any:
        wide = type(op)(self.visit_expr(op.a), self.visit_expr(op.b))
        return rounded_to_bfloat16(wide) if op.dtype == _BF16 else wide

    visit_add_ = visit_sub_ = visit_mul_ = visit_div_ = _arithmetic

    def visit_var_(self, op: Any) -> Any:
        return self.variables.get(op, op)


def _as_float32(value: Any) -> Any:
    return value if value.dtype == "float32" else tirx.Cast("float32", value)


def _redeclared(buffer: Any, data: Any) -> Any:
    return tirx.decl_buffer(
        buffer.shape,
        "float32" if buffer.dtype == _BF16 else buffer.dtype,
        buffer.name,
        data=data,
        strides=buffer.strides,
        elem_offset=buffer.elem_offset,
        scope=data.type_annotation.storage_scope,
        data_alignment=buffer.data_alignment,
        offset_factor=buffer.offset_factor,
    )


def _along(starts: list[Any], extents: list[Any], loops: list[Any]) -> list[Any]:
    """The indices of a region's element: a loop's variable for each axis of more than one element."""
    left = iter(loops)
    return [start + next(left) if int(extent) > 1 else start for start, extent in zip(starts, extents, strict=True)]


def _round_all(buffer: Any) -> Any:
    """Round every element of `buffer`; elements that are bfloat16 values already stay."""
    indices = [tirx.Var(f"r{axis}", "int32") for axis in range(len(buffer.shape))]
    body = tirx.BufferStore(buffer, rounded_to_bfloat16(tirx.BufferLoad(buffer, indices)), indices)
    for index, extent in reversed(list(zip(indices, buffer.shape, strict=True))):
        body = tirx.For(index, 0, extent, tirx.ForKind.SERIAL, body)
    return body


def _check_annotations(name: str, call: Any) -> None:
    if unknown := sorted({*map(str, call.annotations or {})} - ANNOTATIONS):
        known = ", ".join(sorted(ANNOTATIONS))
        raise UnsupportedOnCpuError(
            f"{name}: its annotation {unknown[0]!r} has no counterpart on the C target; known are {known}"
        )


def _name(call: Any) -> str:
    return str(getattr(call.op, "name", call.op))


def _known() -> str:
    return ", ".join(sorted(KEPT | TILE_OPS | RENAMED.keys() | {"tl.tileop.atomicadd"}))
