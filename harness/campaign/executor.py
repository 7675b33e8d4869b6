"""The executor that a campaign's settings ask for: child processes, or this one."""

from __future__ import annotations

from collections.abc import Sequence

from attnfuzz.harness.campaign.settings import Settings
from attnfuzz.harness.isolation.child_variables import child_variables
from attnfuzz.harness.isolation.executors import Executor, InProcess
from attnfuzz.harness.isolation.forkserver import Forkserver
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.isolation.root import Root
from attnfuzz.harness.isolation.tasks import preloads
from attnfuzz.kernels.contract import Kernel

__all__ = ["executor_for", "executor_of"]


def executor_for(kernels: Sequence[Kernel], settings: Settings) -> Executor:
    """Make the executor that `settings` ask for: child processes, or this one. Close it after use."""
    return executor_of([kernel.backend for kernel in kernels], settings)


def executor_of(backends: Sequence[str], settings: Settings, *, spares: int | None = None, root: Root | None = None) -> Executor:
    """Make the executor for kernels of `backends`.

    Args:
        backends: of the kernels.
        settings: of the campaign.
        spares: children that are kept ready, by default as Isolated has it.
        root: forks the template process of the children, if it has imported the same.
    """
    if settings.in_process:
        return InProcess(settings.device, memory_check=settings.memory_check)
    forkserver = None if root is None else Forkserver(preloads(settings.device, backends), child_variables(settings.device), root)
    return Isolated(
        settings.device,
        backends=backends,
        deadline=settings.deadline,
        memory=settings.memory,
        memory_check=settings.memory_check,
        spares=spares,
        forkserver=forkserver,
    )
