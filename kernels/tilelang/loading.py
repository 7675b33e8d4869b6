"""Have only the warp that issues copies wait for them, in kernels whose warps TileLang divides into roles.

TileLang 0.1.15 reserves a warpgroup for loading. One thread of its first warp issues the copies, but all four warps wait for each
barrier that says a stage is free, and only the first has a part in what comes after: nothing keeps the other three within one
phase of it. A wait is for a parity. A warp that is not run while two phases complete waits for a later one, then for one that
never comes, and the block never ends (docs/tilelang-kernels.md says where that was seen).

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
"""An attribute of a PrimFunc that is to be compiled so: TileLang's cache on disk distinguishes it from code without."""
_VERSION = 1
"""Of the guard: another one is another attribute, so that TileLang's cache has no code of it."""
_PASS = "ProducerConsumerWarpSpecialized"
_ROLES = "kWarpSpecializationScope"
_WAIT, _COPY = "tl.mbarrier_wait_parity", "tl.tileop.tma_copy"
_TEXT_MAX = 1000
_lock = threading.RLock()


def marked(func: Any) -> Any:
    """Return the PrimFunc `func` with the mark, without which it has no guard."""
    return func.with_attr(MARK, _VERSION)


@contextlib.contextmanager
def copying_warp_waits() -> Iterator[None]:
    """Add the guard to marked PrimFuncs that TileLang lowers meanwhile, by any thread; other threads that come here wait.

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
    """Return `func`, if it is marked, with the guard around what its warps for loading do.

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
        return tirx.AttrStmt(node.node, node.attr_key, node.value, tirx.IfThenElse(branch.condition, first, branch.else_case))

    body = ir_transform(func.body, None, guard, ["tirx.AttrStmt"])
    if others:
        # Not within the transformation, which would raise it as an error of its own.
        name = func.attrs["global_symbol"]
        raise BuildError(f"{name}: warps for loading do something else than to wait and copy: {str(others[0])[:_TEXT_MAX]}")
    return func.with_body(body)


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
