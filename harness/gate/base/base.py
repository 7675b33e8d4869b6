"""What a kernel is compared with, whatever that is: a commit (commit.py) or a baseline's figures (from_file.py)."""

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

__all__ = ["Base", "Before", "Progress"]

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Before:
    """One kernel as it was: what it declared deterministic, or why nothing can be compared with it."""

    deterministic: tuple[OutputName, ...] | None = None
    missing: str = ""
    new: bool = False
    """There was no such kernel."""


class Base(Protocol):
    """The other side. A context: what it needs of processes and folders is given back at its end."""

    told: str
    root: Path | None
    """The checkout, where there is one."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def will_run(self, backends: Sequence[str]) -> None:
        """Backends of the kernels to come."""

    def why_changed(self, subject: Subject) -> str | None:
        """Which file of the kernel changed; None: none."""

    def place(self, subject: Subject) -> tuple[str, int]:
        """File (relative to the checkout) and line that an annotation of the kernel belongs to."""

    def had(self, asked: str) -> bool:
        """Whether there was a kernel that could be asked for so."""

    def before(self, subject: Subject) -> Before:
        """The kernel as it was."""

    def errors(
        self, subject: Subject, cases: Sequence[Case], *, memory_check: bool, progress: Progress
    ) -> Mapping[Case, Mapping[OutputName, Errors]]:
        """Errors over budgets of the kernel as it was, on those of `cases` that it took and got right."""

    def sample(self, subject: Subject) -> tuple[Case, ...] | None:
        """The Cases that there are figures of; None: any."""

    def table(self, subject: Subject, architectures: Sequence[str]) -> list[dict[str, Any]] | None:
        """Its compile table; None: it is not known."""

    def side(self, subject: Subject) -> Side | None:
        """What can be timed; None: nothing can."""
