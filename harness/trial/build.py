"""Compiling: one process at a time for each compile key, so that the others use the backends' disk caches.

Once it has been compiled, processes load its code at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from attnfuzz.harness.core import environment
from attnfuzz.harness.trial.defaults import of_kernel
from attnfuzz.harness.trial.errors import MEMORY_TAKEN, describe_exception, may_catch
from attnfuzz.harness.trial.gpu_memory import is_out_of_memory, is_own_need, when_free
from attnfuzz.harness.trial.supports import compile_key_of
from attnfuzz.kernels.contract import BuildError, Built, Config, Device, Kernel, protocol_of
from attnfuzz.kernels.errors import BadArgument, WrongProcess
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support import cache, process_setup

__all__ = ["build_by_roles", "build_kernel", "compile_here"]

_ready: set[tuple[str, str, Device]] = set()


def build_kernel(kernel: Kernel, problem: Problem, config: Config, device: Device) -> Built:
    """Call `kernel.build`; the first build of a compile key waits for another process that compiles the same.

    Raises:
        BuildError: the compiler failed, or the kernel's build raised anything else.
        BadArgument: the kernel does not support it, or this process cannot build for the device.
        MemoryError: other processes hold the memory of the GPU, so that the code cannot be loaded.
    """
    compile_key = compile_key_of(kernel, problem, config, device)
    if compile_key is None or device not in kernel.capabilities.compiles_on:
        return _build(kernel, problem, config, device, supported=compile_key is not None)
    key = (kernel.name, compile_key, device)
    if key in _ready:
        return _build(kernel, problem, config, device)
    # The variables of this kernel, not of the one before, are part of the stamp.
    process_setup.enter(kernel, device)
    with _locked(key, _stamp(kernel)):
        result = _build(kernel, problem, config, device)
    _ready.add(key)
    return result


def build_by_roles(kernel: Kernel, problem: Problem, config: Config, schedule: tuple[int, ...]) -> Built:
    """Call `kernel.protocol`, which compiles nothing: its warp roles run on the CPU under `schedule`.

    Raises:
        BuildError: the build raised anything.
        BadArgument: the kernel does not support it.
    """
    protocol = protocol_of(kernel)
    assert protocol is not None
    return _build(kernel, problem, config, "cpu", make=lambda: protocol(problem, config, schedule))


def _build(
    kernel: Kernel,
    problem: Problem,
    config: Config,
    device: Device,
    *,
    supported: bool = True,
    make: Callable[[], Built] | None = None,
) -> Built:
    """Call the kernel's build, or `make`; `supported`: supports() has nothing against it, so that a refusal is a failure."""
    process_setup.enter(kernel, device)
    if reason := process_setup.why_not_set_up(kernel, device):
        raise BuildError(f"its set_up() raised {reason}")
    try:
        with of_kernel():
            return make() if make is not None else kernel.build(problem, config, device)
    except BadArgument as error:
        if isinstance(error, WrongProcess) or not supported:
            raise
        raise BuildError(f"{describe_exception(error)}; its supports() had said that it takes this Problem") from error
    except BuildError as error:
        if error.__cause__ is not None:
            _blame_others(error.__cause__, device)
        raise
    except BaseException as error:  # a compiler's Python side may raise anything: that is a finding
        if not may_catch(error):
            raise
        _blame_others(error, device)
        raise BuildError(describe_exception(error)) from error


def _blame_others(error: BaseException, device: Device) -> None:
    """Raise a MemoryError if other processes hold the GPU's memory."""
    if is_out_of_memory(error) and not is_own_need(error, device):
        raise MemoryError(f"{MEMORY_TAKEN}: {describe_exception(error)}") from error


def compile_here(kernel: Kernel, problem: Problem, config: Config, device: Device) -> tuple[float, str | None]:
    """Compile in this process; return (seconds, the compiler's error or None)."""
    start = time.perf_counter()
    environment.prepare(device)
    try:
        when_free(lambda: build_kernel(kernel, problem, config, device), device)
    except BuildError as error:
        return time.perf_counter() - start, str(error)
    return time.perf_counter() - start, None


@contextlib.contextmanager
def _locked(key: tuple[str, str, Device], stamp: str) -> Iterator[None]:
    """Keep other processes from compiling the same; those that only load code which has been compiled keep no one out.

    Changed sources, and another ptxas, have another `stamp`, and a lock of their own.
    """
    name = hashlib.sha256(repr((key, stamp)).encode()).hexdigest()[:16]
    with (cache.folder("locks") / name).open("a") as handle:
        compiled = os.fstat(handle.fileno()).st_size > 0
        fcntl.flock(handle, fcntl.LOCK_SH if compiled else fcntl.LOCK_EX)
        yield
        if not os.fstat(handle.fileno()).st_size:
            handle.write("compiled")


def _stamp(kernel: Kernel) -> str:
    """Return what changes with the kernel's files, the compilers and the variables that they read."""
    files = []
    for path in getattr(kernel, "files", ()):
        with contextlib.suppress(OSError):
            state = Path(path).stat()
            files.append((str(path), state.st_size, state.st_mtime_ns))
    parts = (files, sorted(environment.versions().items()), sorted(environment.compiler_variables().items()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()
