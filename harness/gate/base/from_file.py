"""Base as a baseline file: the figures that `attnfuzz gate --write FILE` has put there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from attnfuzz.harness.gate.base.base import Before, Progress
from attnfuzz.harness.gate.base.baseline import Recorded, read_baseline
from attnfuzz.harness.gate.measured import Errors
from attnfuzz.harness.gate.side import Side
from attnfuzz.harness.gate.subjects import Subject, fingerprint
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.problem import OutputName, reject
from attnfuzz.strategies.case import Case

__all__ = ["FromFile"]


class FromFile:
    """A baseline's figures: no code of then is run, so that nothing can be timed."""

    def __init__(self, path: Path, device: Device) -> None:
        self._found = read_baseline(path)
        if self._found.device != device:
            reason = f"it was written on {self._found.device}, and this runs on {device}"
            raise reject("baseline", str(path), reason, f"use --device {self._found.device}, or write one on {device}")
        self.told = str(path)
        self.root: Path | None = None

    def __enter__(self) -> FromFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing to give back."""

    def will_run(self, backends: Sequence[str]) -> None:
        """Nothing runs."""

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels that it has figures of."""
        return tuple(self._found.kernels)

    def why_changed(self, subject: Subject) -> str | None:
        """Whether its files are others than then; a kernel without figures counts as changed."""
        found = self._of(subject)
        if found is None:
            return "the baseline does not have it"
        return None if found.fingerprint == fingerprint(subject.kernel) else "its files are others than the baseline's"

    def place(self, subject: Subject) -> tuple[str, int]:
        """Its first file, by the current folder if it lies there."""
        first = next((Path(each).resolve() for each in subject.kernel.files), None)
        if first is None:
            return "", 1
        here = Path.cwd().resolve()
        return (first.relative_to(here).as_posix() if first.is_relative_to(here) else str(first)), 1

    def had(self, asked: str) -> bool:
        """Whether it has figures of a kernel of that name."""
        return asked in self._found.kernels

    def before(self, subject: Subject) -> Before:
        """As it was written."""
        found = self._of(subject)
        if found is None:
            return Before(missing=f"it is new: {self.told} does not have it", new=True)
        return Before(deterministic=found.deterministic)

    def errors(
        self,
        subject: Subject,
        cases: Sequence[Case],  # noqa: ARG002 - the protocol's signature
        *,
        memory_check: bool,  # noqa: ARG002
        progress: Progress,  # noqa: ARG002
    ) -> Mapping[Case, Mapping[OutputName, Errors]]:
        """As they were written."""
        found = self._of(subject)
        return found.errors if found else {}

    def sample(self, subject: Subject) -> tuple[Case, ...] | None:
        """The Cases that were measured."""
        found = self._of(subject)
        return tuple(found.errors) if found else None

    def table(self, subject: Subject, architectures: Sequence[str]) -> list[dict[str, Any]] | None:
        """As it was written, for `architectures` (none: all)."""
        found = self._of(subject)
        if found is None or found.compile is None:
            return None
        return [row for row in found.compile if not architectures or row.get("arch") in architectures]

    def side(self, subject: Subject) -> Side | None:  # noqa: ARG002 - the protocol's signature
        """None: times of two runs do not compare."""
        return None

    def _of(self, subject: Subject) -> Recorded | None:
        return self._found.kernels.get(subject.name)
