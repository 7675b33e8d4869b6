"""What a kernel is compared with: a commit (commit.py) or the figures of a file (baseline.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from attnfuzz.harness.gate.measured import Errors
from attnfuzz.harness.gate.side import Side
from attnfuzz.harness.gate.subjects import Subject
from attnfuzz.kernels.problem import OutputName
from attnfuzz.strategies.case import Case

__all__ = ["Base", "BaseKernel", "Progress"]

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class BaseKernel:
    """One kernel in base: the outputs that it declares deterministic, or why nothing can be compared with it."""

    deterministic: tuple[OutputName, ...] | None = None
    missing: str = ""
    new: bool = False
    """Base has no such kernel."""


class Base(Protocol):
    """The other side of a comparison. A context: its processes and folders are removed at its end."""

    label: str
    """Name for reports: "3f2a91c4d0 (main)", or the file."""
    root: Path | None
    """The checkout, if there is one."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def preload(self, backends: Sequence[str]) -> None:
        """Name the backends of the kernels to run."""

    def why_changed(self, subject: Subject) -> str | None:
        """Say which file of the kernel changed; None: none."""

    def place(self, subject: Subject) -> tuple[str, int]:
        """Return the file (relative to the checkout) and the line for annotations of the kernel."""

    def has(self, target: str) -> bool:
        """Whether base has the kernel of a name or package.module:OBJECT."""

    def kernel(self, subject: Subject) -> BaseKernel:
        """Return what base says of the kernel."""

    def errors(
        self, subject: Subject, cases: Sequence[Case], *, memory_check: bool, progress: Progress
    ) -> Mapping[Case, Mapping[OutputName, Errors]]:
        """Return errors over budgets of base's kernel, on those of `cases` that it takes and computes correctly."""

    def sample(self, subject: Subject) -> tuple[Case, ...] | None:
        """Return the Cases that have figures; None: any can be measured."""

    def table(self, subject: Subject, architectures: Sequence[str]) -> list[dict[str, Any]] | None:
        """Return base's compile table; None: unknown."""

    def side(self, subject: Subject) -> Side | None:
        """Return the side that can be timed; None: there is none."""
