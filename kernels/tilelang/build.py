"""Compile TileLang PrimFuncs: for CUDA by TileLang's own target, for the CPU through `cpu.to_cpu` and a C++ compiler.

A device module lists in `BY_ROLES` the functions whose warps have roles; on the CPU these run in the executor of `roles`.

Each function is compiled once per process; across processes TileLang's own cache on disk (`TILELANG_CACHE_DIR`), keyed by the
PrimFunc itself, saves the compiler's time.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from attnfuzz.kernels.contract import BuildError, Device
from attnfuzz.kernels.support.compiler_output import captured
from attnfuzz.kernels.support.installed_torch import sees_cuda
from attnfuzz.kernels.tilelang.loading import copying_warp_waits, marked

__all__ = ["Launch", "compile_counts", "compiled", "cuda_passes", "unavailable"]

Launch = Callable[..., None]
"""A compiled PrimFunc: called with its parameters in order, tensors and numbers; writes its output tensors."""

CPU_FLAGS = ("-O2", "-ffp-contract=fast")
"""A product and a sum are rounded once, as on a GPU: a maximum of -1e38 does not cancel. No -ffast-math, which has no -inf."""
CPU_FEATURES = ("avx2", "f16c", "fma")
"""Used where the machine has them: without F16C, fp16 conversions are a software routine; without FMA, products are rounded."""
CUDA_PASSES = {"tl.enable_fast_math": True, "tl.force_let_inline": True}
"""Fast exp2 and division of the hardware: 2 units off, subnormal float32 flushed, which every budget allows for. Lets inlined:
otherwise a tile's atomic addition under a condition lacks the definitions of lengths."""
WARPGROUP = 128
"""Threads of the warpgroup that TileLang reserves for loading. Blocks of fewer threads load without one: with one, which had no
guard then (loading.py), they hung."""
TEXT_MAX = 4000
"""Characters of an error, and of the compiler's output, that a BuildError holds: TileLang appends whole sources."""

_compiled: dict[tuple[ModuleType, str, str, str], Launch] = {}
_counts: dict[str, int] = {}
_lock = threading.RLock()


def unavailable(device: Device) -> str | None:
    """The package, compiler or device that TileLang kernels lack here, or None."""
    for package in ("torch", "tilelang"):
        if importlib.util.find_spec(package) is None:
            return f"the Python package {package} is not installed"
    if device == "cpu":
        return None if shutil.which("g++") else "no g++ on PATH: TileLang's C target needs a C++ compiler"
    return None if sees_cuda() else "torch sees no CUDA device"


def compile_counts() -> dict[str, int]:
    """Count each function's compiles in this process (TileLang's cache on disk included).

    The names are `"<device module>.<factory> <compile key> on <device>"`.
    """
    with _lock:
        return dict(_counts)


def compiled(module: ModuleType, factory: str, options: dict[str, Any], device: Device, *, by_roles: bool = False) -> Launch:
    """Compile `module.<factory>(**options)` for `device`, or take it from this process's cache.

    With `by_roles` it runs in the executor of roles, whose launches take a `schedule` as well.

    The cache distinguishes modules by identity, so that an edited copy of a module is another source.

    Raises:
        BuildError: the kernel could not be traced, lowered or compiled; the text is the compiler's.
    """
    options_text = " ".join(f"{name}={value}" for name, value in sorted(options.items()))
    by_roles = by_roles or (device == "cpu" and factory in getattr(module, "BY_ROLES", ()))
    key = (module, factory, options_text, "roles" if by_roles else device)
    with _lock:
        if key not in _compiled:
            name = f"{module.__name__}.{factory} {options_text} on {key[-1]}"
            _counts[name] = _counts.get(name, 0) + 1
            compiler = _compiler(module, options, device, by_roles=by_roles)
            _compiled[key] = _compile(getattr(module, factory), options, name, compiler)
        return _compiled[key]


def _compiler(module: ModuleType, options: dict[str, Any], device: Device, *, by_roles: bool) -> Callable[[Any], Launch]:
    """What makes a PrimFunc of `module` runnable."""
    if device == "cuda" or by_roles:
        return functools.partial(_by_roles if by_roles else _for_cuda, passes=cuda_passes(module, options))
    return _for_cpu


def _compile(factory: Callable[..., Any], options: dict[str, Any], name: str, compiler: Callable[[Any], Launch]) -> Launch:
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    with captured() as log:
        try:
            return compiler(factory(**options))
        except Exception as error:
            said = (f"{type(error).__name__}: {error}"[:TEXT_MAX], log.read_text(errors="replace").strip()[-TEXT_MAX:])
            raise BuildError("\n".join((name, *filter(None, said)))) from error


def cuda_passes(module: ModuleType, options: dict[str, Any]) -> dict[str, bool]:
    """TileLang's compiler options for a device function of `module`, made with `options`.

    TileLang divides the warps of a block into roles itself, except where the block has no warpgroup to spare, and where the
    module has `ROLES_BY_HAND`. A module's `block_threads(options)` says how many threads a block has, if not `threads`.
    """
    threads = getattr(module, "block_threads", lambda named: named.get("threads", WARPGROUP))(options)
    by_hand = threads < WARPGROUP or getattr(module, "ROLES_BY_HAND", False)
    return {**CUDA_PASSES, **({"tl.disable_warp_specialized": True} if by_hand else {})}


def _for_cuda(func: Any, passes: dict[str, bool]) -> Launch:
    import tilelang

    with copying_warp_waits():
        launch: Launch = tilelang.compile(marked(func), target="cuda", pass_configs=passes)
    return launch


def _by_roles(func: Any, passes: dict[str, bool]) -> Launch:
    """Make a PrimFunc runnable whose warps have roles of their own, which the C target's one thread cannot have."""
    from attnfuzz.kernels.tilelang.roles.executor import executable

    return executable(func, passes)


def _for_cpu(func: Any) -> Launch:
    import tilelang
    from tvm.target import Target

    from attnfuzz.kernels.tilelang.cpu import to_cpu

    rewritten = to_cpu(func)
    with Target("c"):
        kernel: Launch = tilelang.compile(
            rewritten.func,
            target="c",
            target_host="c",
            execution_backend="cython",
            pass_configs={"tirx.disable_vectorize": True},
            compile_flags=[*CPU_FLAGS, *(f"-m{feature}" for feature in CPU_FEATURES if feature in _cpu_features())],
        )
    return _Widened(kernel, rewritten.widened, rewritten.written) if rewritten.widened else kernel


class _Widened:
    """A kernel whose bfloat16 parameters became float32; called with bfloat16 tensors."""

    def __init__(self, kernel: Launch, widened: frozenset[int], written: frozenset[int]) -> None:
        self._kernel = kernel
        self._widened = widened
        self._written = widened & written

    def __call__(self, *arguments: Any) -> None:
        wide = [argument.float() if i in self._widened else argument for i, argument in enumerate(arguments)]
        self._kernel(*wide)
        for i in self._written:
            arguments[i].copy_(wide[i])


def _cpu_features() -> frozenset[str]:
    """The x86 instruction sets of this machine, as named in /proc/cpuinfo; empty where it does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())
