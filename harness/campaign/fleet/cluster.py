"""A Ray cluster: joined, asked how many workers it holds, left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attnfuzz.harness.campaign.worker_count import auto_workers
from attnfuzz.harness.core.gpus import gpus
from attnfuzz.harness.core.signals import uninterrupted
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.errors import BadArgument, reject

__all__ = ["Places", "has_room", "joined", "places_in"]

_SECONDS = 10.0
"""In which a cluster answers, if it is there."""
_STEPS = 10_000
"""Ray counts a GPU in that many parts."""


@dataclass(frozen=True, slots=True)
class Places:
    """How many workers a cluster holds, the CPUs and the part of a GPU of each, and the most of them on one node."""

    count: int
    cpus: float
    gpus: float
    share: int


@contextlib.contextmanager
def joined(address: str) -> Iterator[None]:
    """Join the cluster at `address` for a block; "local" makes one of this machine.

    Raises:
        BadArgument: Ray is not installed, or there is no cluster.
    """
    try:
        import ray
    except ImportError:
        raise BadArgument("fleet: Ray is not installed here; install it by: pip install 'attnfuzz[fleet]'") from None
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        _check(address)
        # A cluster of this machine takes seconds to start; Ctrl-C meanwhile would end this process with SIGSEGV.
        with uninterrupted() if address == "local" else contextlib.nullcontext(), _own_signals():
            more: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
            ray.init(address=address, log_to_driver=False, configure_logging=False, **more)
    except (ValueError, RuntimeError, OSError, OverflowError) as error:
        reason = f"no Ray cluster can be reached there ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        raise reject("address", address, reason, "start one by: ray start --head, or give --address local") from None
    try:
        yield
    finally:
        with _own_signals():
            ray.shutdown()


def _check(address: str) -> None:
    """Raise OSError where nothing answers at HOST:PORT: Ray itself tries for more than a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS).close()


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's way of ending: Ray sets handlers of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def places_in(device: Device, address: str, per_gpu: int | None, most: int | None = None) -> Places:
    """Return how many workers the nodes of the cluster hold: one a CPU, or `per_gpu` a GPU, by default what fills one of these.

    Args:
        device: of the campaign.
        address: of the cluster, for messages.
        per_gpu: workers of a GPU.
        most: limit on all of them.

    Raises:
        BadArgument: there is no room for any.
    """
    counts, name = _counts(device), _resource(device)
    if not sum(counts):
        remedy = f"add a node with one, or give --device {'cpu' if device == 'cuda' else 'cuda'}"
        raise reject("address", address, f"the nodes of that cluster have no {name}", remedy)
    of_each = (per_gpu or max(1, auto_workers(device) // max(1, len(gpus())))) if device == "cuda" else 1
    count = sum(counts) * of_each
    return Places(
        count=count if most is None else min(count, most),
        cpus=0.0 if device == "cuda" else 1.0,
        gpus=_STEPS // of_each / _STEPS if device == "cuda" else 0.0,
        share=max(counts) * of_each,
    )


def has_room(device: Device) -> bool:
    """Whether a node of the cluster could hold a worker, now or once others have ended."""
    import ray

    try:
        return sum(_counts(device)) > 0
    except (ray.exceptions.RayError, RuntimeError):
        return False


def _counts(device: Device) -> list[int]:
    """Return the CPUs, or on CUDA the GPUs, of each living node."""
    import ray

    return [int(each["Resources"].get(_resource(device), 0)) for each in ray.nodes() if each["Alive"]]


def _resource(device: Device) -> str:
    return "GPU" if device == "cuda" else "CPU"
