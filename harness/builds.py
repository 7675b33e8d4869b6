"""Compiling: one process at a time per compile key, so that the backends' disk caches serve the others; pools in parallel."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

from attnfuzz.harness import environment
from attnfuzz.kernels import cache, registry
from attnfuzz.kernels.contract import BuildError, Built, Config, Device, Kernel
from attnfuzz.kernels.problem import BadArgument, Problem
from attnfuzz.strategies.shapes import Variant

__all__ = ["Compiled", "built", "compile_pool"]

_ready: set[tuple[str, str, Device]] = set()


@dataclass(frozen=True, slots=True)
class Compiled:
    """One variant of a kernel was compiled: seconds it took, or the compiler's error."""

    kernel: str
    key: str
    seconds: float
    error: str | None = None


def built(kernel: Kernel, problem: Problem, config: Config, device: Device) -> Built:
    """`kernel.build(...)`; the first build of a compile key waits for other processes that compile the same.

    Raises:
        BuildError: the compiler refused, or the kernel's build raised anything else.
    """
    key = (kernel.name, kernel.compile_key(problem, config), device)
    if key in _ready or device not in kernel.capabilities.compiles_on:
        return _build(kernel, problem, config, device)
    with _locked(key):
        found = _build(kernel, problem, config, device)
    _ready.add(key)
    return found


def _build(kernel: Kernel, problem: Problem, config: Config, device: Device) -> Built:
    try:
        return kernel.build(problem, config, device)
    except (BuildError, BadArgument):
        raise
    except Exception as error:  # a compiler's Python side may raise anything: that is the finding
        raise BuildError(f"{type(error).__name__}: {error}") from error


def compile_pool(kernel: Kernel, variants: Sequence[Variant], device: Device, jobs: int | None = None) -> Iterator[Compiled]:
    """Compile `variants` in child processes, as many at once as there are cores, and say so as each is done.

    A kernel that only this process knows (registered at run time) is compiled here, one variant after the other.
    """
    can = kernel.capabilities
    by_key = {kernel.compile_key(each.problem(can), each.config): each for each in variants}
    if device not in can.compiles_on:
        return
    if registry.is_local(kernel.name):
        for key, each in by_key.items():
            seconds, error = _compile(kernel.name, each.problem(can), dict(each.config), device)
            yield Compiled(kernel=kernel.name, key=key, seconds=seconds, error=error)
        return
    workers = max(1, min(jobs or len(os.sched_getaffinity(0)), len(by_key)))
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        futures: dict[Future[tuple[float, str | None]], str] = {
            pool.submit(_compile, kernel.name, each.problem(can), dict(each.config), device): key for key, each in by_key.items()
        }
        for future in as_completed(futures):
            seconds, error = future.result()
            yield Compiled(kernel=kernel.name, key=futures[future], seconds=seconds, error=error)
    finally:
        # After Ctrl-C what has not begun is not begun any more.
        pool.shutdown(wait=True, cancel_futures=True)


def _compile(name: str, problem: Problem, config: dict[str, int | str | bool], device: Device) -> tuple[float, str | None]:
    start = time.perf_counter()
    environment.prepare(device)
    try:
        built(registry.get(name), problem, Config(config), device)
    except BuildError as error:
        return time.perf_counter() - start, str(error)
    return time.perf_counter() - start, None


@contextmanager
def _locked(key: tuple[str, str, Device]) -> Iterator[None]:
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    with (cache.folder("locks") / name).open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
