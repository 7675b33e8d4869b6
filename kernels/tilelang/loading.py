"""Have only the warp that issues copies wait for them, in kernels whose warps TileLang divides into roles.

TileLang 0.1.15 reserves a warpgroup for loading. One thread of its first warp issues the copies, but all four warps wait for each
barrier that says a stage is free, and only the first has a part in what comes after: nothing keeps the other three within one
phase of it. A wait is for a parity. A warp that is not run while two phases complete waits for a later one, then for one that
never comes, and the block never ends (docs/kernels.md says where that was seen).

The guard is added behind TileLang's own pass, where the roles are explicit and the copies whole.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from attnfuzz.kernels.contract import BuildError

__all__ = ["copying_warp_waits", "marked"]

WARP = 32
MARK = "attnfuzz.copying_warp_waits"
"""An attribute of a PrimFunc that is compiled so: TileLang's cache on disk distinguishes it from code without."""
_PASS = "ProducerConsumerWarpSpecialized"
_ROLES = "kWarpSpecializationScope"
_WAIT, _COPY = "tl.mbarrier_wait_parity", "tl.tileop.tma_copy"
_lock = threading.RLock()


def marked(func: Any) -> Any:
    """Return the PrimFunc `func` with the mark."""
    return func.with_attr(MARK, 1)


@contextlib.contextmanager
def copying_warp_waits() -> Iterator[None]:
    """Add the guard to what TileLang lowers meanwhile; other threads that come here wait.

    Raises:
        BuildError: TileLang has no such pass.
    """
    import tilelang
    from tilelang.cuda import transform
    from tvm import tirx

    with _lock:
        own: Callable[[], Any] | None = getattr(transform, _PASS, None)
        if own is None:
            raise BuildError(
                f"TileLang {tilelang.__version__} has no pass {_PASS}, whose code may wait without end: install 0.1.15"
            )

        def guarded() -> Callable[[Any], Any]:
            divide, guard = own(), tirx.transform.prim_func_pass(_guarded, opt_level=0, name="attnfuzz.CopyingWarpWaits")
            return lambda module: guard(divide(module))

        setattr(transform, _PASS, guarded)
        try:
            yield
        finally:
            setattr(transform, _PASS, own)


def _guarded(func: Any, *_: Any) -> Any:
    """Return `func` with the guard around what its warps for loading do."""
    from tvm import tirx
    from tvm.tirx.stmt_functor import ir_transform

    def guard(node: Any) -> Any:
        branch = node.body
        if node.attr_key != _ROLES or not isinstance(branch, tirx.IfThenElse) or not isinstance(branch.condition, tirx.LT):
            return None
        if not _only_copies(branch.then_case):
            return None
        thread = branch.condition.a
        first = tirx.IfThenElse(thread < WARP, branch.then_case, None)
        return tirx.AttrStmt(node.node, node.attr_key, node.value, tirx.IfThenElse(branch.condition, first, branch.else_case))

    return func.with_body(ir_transform(func.body, None, guard, ["tirx.AttrStmt"]))


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
