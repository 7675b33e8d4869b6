"""What all parts of the measurement are given: kernels, device, workers, time, rounds, and how progress is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.errors import reject
from throughput.campaigns import NotMeasured
from throughput.processes import cold_caches, lists_option

__all__ = ["KERNELS", "Plan", "runnable"]

KERNELS: Mapping[Device, tuple[str, ...]] = {
    "cpu": ("torch.reference_cpu", "triton.varlen", "tilelang.gqa_varlen.atomic", "tilelang.gqa_varlen.split"),
    "cuda": ("triton.varlen", "tilelang.gqa_varlen.atomic", "tilelang.gqa_varlen.split"),
}
"""Kernels that are measured where none is named."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One call of the benchmark."""

    device: Device
    kernels: tuple[str, ...]
    workers: tuple[str, ...] = ("1",)
    """Of `attnfuzz run --workers`: numbers, or "auto"."""
    seconds: float = 30.0
    """Of each contestant in each round."""
    rounds: int = 3
    cold: bool = False
    say: Callable[[str], None] = lambda _: None
    more: tuple[str, ...] = ()
    """Further options of `attnfuzz run`, which come last."""

    @property
    def caches(self) -> str:
        """The state of the compilers' caches when a contestant starts."""
        return "cold" if self.cold else "warm"

    @contextmanager
    def folder(self, *, cold: bool | None = None) -> Iterator[tuple[Path, dict[str, str]]]:
        """Make a folder for one process, and the variables that give it the caches asked for (default: the plan's)."""
        with TemporaryDirectory(prefix="throughput-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            yield folder, cold_caches(folder) if (self.cold if cold is None else cold) else {}

    def options(self, workers: str, **more: str) -> dict[str, str]:
        """Return options of `attnfuzz run`, by name: --workers only where there is one."""
        return {**more, **({"workers": workers} if lists_option("--workers") else {})}

    def attempt(self, what: str, work: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Return the rows of one measurement; none where it failed, which is said: the others must not be lost with it."""
        try:
            return work()
        except NotMeasured as error:
            self.say(f"{what}: not measured: {error}")
            return []

    @property
    def workers_here(self) -> tuple[str, ...]:
        """The workers that can be asked for: one process draws and one judges where `attnfuzz run` has no --workers."""
        return self.workers if lists_option("--workers") else ("1",)


def runnable(names: tuple[str, ...], device: Device) -> tuple[tuple[str, ...], list[str]]:
    """Return the kernels that can run here, and for the others why not.

    Raises:
        BadArgument: there is no such kernel, or none can run.
    """
    chosen, refused = [], []
    for name in names or KERNELS[device]:
        kernel = registry.get(name)
        reason = kernel.unavailable(device) if device in kernel.capabilities.devices else f"it does not run on {device}"
        if reason:
            refused.append(f"{name}: left out: {reason}")
        else:
            chosen.append(name)
    if not chosen:
        raise reject("kernel", ", ".join(names), f"none can run on {device} here ({'; '.join(refused)})", "name others")
    return tuple(chosen), refused
