"""Two guards for kernels whose warps TileLang divides into roles: who waits for a free stage, and when a stage is free.

TileLang 0.1.15 reserves a warpgroup for loading. One thread of its first warp issues the copies, but all four warps wait for each
barrier that says a stage is free, and only the first has a part in what comes after: nothing keeps the other three within one
phase of it. A wait is for a parity. A warp that is not run while two phases complete waits for a later one, then for one that
never comes, and the block never ends (docs/tilelang-kernels.md says where that was seen). So only the first warp waits.

The warps that compute say that a stage is free by an arrival right behind the last statement that reads it. Where that reads by
ldmatrix or plain loads, as `mma.sync` does in single precision, the arrival is issued while they still run: nothing in TileLang's
source orders the two, and ptxas does not wait for a load before the first use of its result. The next tile may then be in shared
memory before the last load of this one has read it. A fence before each arrival waits for all loads of its thread.

The guards are added behind TileLang's own pass, where the roles are explicit and the copies whole.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from attnfuzz.kernels.contract import BuildError

__all__ = ["FENCE", "copying_warp_waits", "marked"]

WARP = 32
MARK = "attnfuzz.copying_warp_waits"
"""An attribute of a PrimFunc that is to be compiled so: TileLang's cache on disk distinguishes it from code without."""
_VERSION = 2
"""Of the guards: another one is another attribute, so that TileLang's cache has no code of it."""
_PASS = "ProducerConsumerWarpSpecialized"
_ROLES = "kWarpSpecializationScope"
_WAIT, _COPY, _ARRIVE = "tl.mbarrier_wait_parity", "tl.tileop.tma_copy", "tirx.ptx_arrive_barrier"
FENCE = "__threadfence_block"
"""CUDA's fence among the threads of a block: ptxas has a thread's loads complete before it, which it does neither for
`fence.proxy.async` nor for a barrier (nvcc 13.0, sm_90a)."""
_TEXT_MAX = 1000
_lock = threading.RLock()


def marked(func: Any) -> Any:
    """Return the PrimFunc `func` with the mark, without which it has no guards."""
    return func.with_attr(MARK, _VERSION)


@contextlib.contextmanager
def copying_warp_waits() -> Iterator[None]:
    """Add the guards to marked PrimFuncs that TileLang lowers meanwhile, by any thread; other threads that come here wait.

    Raises:
        BuildError: TileLang has no such pass.
    """
    import tilelang
    from tilelang.cuda import transform

    with _lock:
        own: Callable[[], Any] | None = getattr(transform, _PASS, None)
        if own is None:
            raise BuildError(
                f"TileLang {tilelang.__version__} has no pass {_PASS}, whose code may wait without end: install 0.1.15"
            )

        def guarded() -> Callable[[Any], Any]:
            divide = own()
            return lambda module: _guarded_module(divide(module))

        setattr(transform, _PASS, guarded)
        try:
            yield
        finally:
            setattr(transform, _PASS, own)


def _guarded_module(module: Any) -> Any:
    from tvm import IRModule

    return IRModule({name: _guarded(func) for name, func in module.functions.items()}, attrs=module.attrs)


def _guarded(func: Any) -> Any:
    """Return `func`, if it is marked, with a guard around what its warps for loading do, and fences before other warps' arrivals.

    Raises:
        BuildError: they do something else than to wait and copy, for which the other warps may be needed.
    """
    from tvm import tirx
    from tvm.tirx.stmt_functor import ir_transform

    if func.attrs is None or MARK not in func.attrs:
        return func
    others: list[Any] = []

    def guard(node: Any) -> Any:
        if node.attr_key != _ROLES:
            return None
        branch = node.body
        known = isinstance(branch, tirx.IfThenElse) and isinstance(branch.condition, tirx.LT)
        if not known or not _only_copies(branch.then_case):
            others.append(branch)
            return None
        first = tirx.IfThenElse(branch.condition.a < WARP, branch.then_case, None)
        rest = None if branch.else_case is None else _fenced(branch.else_case)
        return tirx.AttrStmt(node.node, node.attr_key, node.value, tirx.IfThenElse(branch.condition, first, rest))

    body = ir_transform(func.body, None, guard, ["tirx.AttrStmt"])
    if others:
        # Not within the transformation, which would raise it as an error of its own.
        name = func.attrs["global_symbol"]
        raise BuildError(f"{name}: warps for loading do something else than to wait and copy: {str(others[0])[:_TEXT_MAX]}")
    return func.with_body(body)


def _fenced(body: Any) -> Any:
    """Return `body` with a fence before each arrival at an mbarrier: by then a thread has read the tile that it gives back."""
    from tvm import tirx
    from tvm.tirx.stmt_functor import ir_transform

    def fence(node: Any) -> Any:
        if getattr(getattr(node.value, "op", None), "name", "") != _ARRIVE:
            return None
        return tirx.SeqStmt([tirx.Evaluate(tirx.call_extern("handle", FENCE)), node])

    return ir_transform(body, None, fence, ["tirx.Evaluate"])


def _only_copies(body: Any) -> bool:
    """Whether `body` does nothing but wait, copy and set variables of its own: no other warp than the first is needed."""
    from tvm import tirx
    from tvm.tirx.stmt_functor import post_order_visit

    effects: list[bool] = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.Evaluate):
            effects.append(getattr(getattr(node.value, "op", None), "name", "") in (_WAIT, _COPY))
        elif isinstance(node, tirx.BufferStore):
            effects.append(node.buffer.scope() in ("local", "local.var"))

    post_order_visit(body, visit)
    return all(effects)
