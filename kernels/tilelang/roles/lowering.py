"""Lower a PrimFunc up to the point at which warp roles and mbarriers are explicit and tile operations are still whole.

TileLang's own CUDA pipeline runs, up to and including its automatic warp specialisation and the guard of loading.py. A function
whose roles are written by hand passes it without a change; every later pass is skipped.
"""

from __future__ import annotations

import os
from typing import Any

from attnfuzz.kernels.contract import BuildError
from attnfuzz.kernels.support.absent import Absent
from attnfuzz.kernels.tilelang.loading import copying_warp_waits, marked

try:
    import tilelang
    from tvm import IRModule, tirx
    from tvm.ir.instrument import pass_instrument
    from tvm.target import Target
except ImportError:
    tilelang = tirx = IRModule = pass_instrument = Target = Absent("tilelang")

__all__ = ["lowered"]

NEXT_PASS = "tl.LowerBlackwell2SM"
"""The pass behind warp specialisation in TileLang 0.1.15."""
BY_HAND = "tl.tileop.tcgen05_gemm"
"""An operation of Blackwell, whose kernels have their roles written by hand."""


def lowered(func: Any, passes: dict[str, Any]) -> Any:
    """Return `func` with explicit roles, mbarriers and thread indices.

    Args:
        func: the PrimFunc of a device code's factory.
        passes: TileLang's compiler options.

    Raises:
        BuildError: TileLang's passes refuse it, or no longer have the one at which to stop.
    """
    from tilelang.cuda.pipeline import CUDAPassPipelineBodyPrologue

    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    by_hand = _uses(func, BY_HAND)
    stop = _Stop()
    target = Target({"kind": "cuda", "arch": "sm_100a" if by_hand else "sm_90a"})
    options = {**passes, **({"tl.disable_warp_specialized": True} if by_hand else {})}
    context = tilelang.transform.PassContext(opt_level=3, config=options, instruments=[_instrument(stop)])
    with context, target, copying_warp_waits():
        CUDAPassPipelineBodyPrologue(IRModule({func.attrs["global_symbol"]: marked(func)}), target)
    if stop.module is None:
        raise BuildError(f"TileLang {tilelang.__version__} has no pass {NEXT_PASS}: roles cannot be executed; install 0.1.15")
    (result,) = stop.module.functions.values()
    return result


class _Stop:
    """Keeps the module as it is before `NEXT_PASS`, and skips the passes from there on."""

    def __init__(self) -> None:
        self.module: Any = None

    def should_run(self, module: Any, info: Any) -> bool:
        """Whether a pass runs."""
        if self.module is None and info.name == NEXT_PASS:
            self.module = module
        return self.module is None


def _instrument(stop: _Stop) -> Any:
    @pass_instrument
    class Instrument:
        """TVM's form of `_Stop`."""

        def should_run(self, module: Any, info: Any) -> bool:
            """Whether a pass runs."""
            return stop.should_run(module, info)

    return Instrument()


def _uses(func: Any, name: str) -> bool:
    from tvm.tirx.stmt_functor import post_order_visit

    calls: list[str] = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.Call):
            calls.append(str(getattr(node.op, "name", "")))

    post_order_visit(func.body, visit)
    return name in calls
