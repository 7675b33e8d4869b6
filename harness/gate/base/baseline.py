"""A baseline: what `attnfuzz gate --write FILE` measured of kernels, to compare with where there is no git history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from attnfuzz.harness.core.files import write_whole
from attnfuzz.harness.core.text import dumps
from attnfuzz.harness.gate.base.base import Before, Progress
from attnfuzz.harness.gate.measured import Errors, Measurement
from attnfuzz.harness.gate.side import Side
from attnfuzz.harness.gate.subjects import Subject, fingerprint
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.problem import OutputName, reject
from attnfuzz.strategies.case import BadCase, Case, case_from_object

__all__ = ["FORMAT", "Baseline", "FromFile", "Recorded", "read_baseline", "recorded", "write_baseline"]

FORMAT = 1


class _Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    case: dict[str, Any]
    errors: dict[OutputName, Errors]


class Recorded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel: SHA-256 of the files that it is made of, what it declares deterministic, its errors, its compile table."""

    fingerprint: str
    deterministic: tuple[OutputName, ...]
    measured: tuple[_Measured, ...]
    compile: list[dict[str, Any]] | None = None

    @property
    def errors(self) -> dict[Case, Mapping[OutputName, Errors]]:
        """By Case."""
        return {case_from_object(each.case): each.errors for each in self.measured}


class Baseline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All kernels of one file, and what they were measured on."""

    format: int
    device: Device
    environment: dict[str, Any]
    kernels: dict[str, Recorded]


def recorded(
    fingerprint: str, deterministic: Sequence[OutputName], found: Sequence[Measurement], table: list[dict[str, Any]] | None
) -> Recorded:
    """One kernel's part of a baseline."""
    return Recorded(
        fingerprint=fingerprint,
        deterministic=tuple(deterministic),
        measured=tuple(_Measured(case=each.case.to_object(), errors=each.errors) for each in found if each.errors),
        compile=table,
    )


def write_baseline(path: Path, device: Device, environment: Mapping[str, Any], kernels: Mapping[str, Recorded]) -> None:
    """Write the file whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    made = Baseline(format=FORMAT, device=device, environment=dict(environment), kernels=dict(kernels))
    write_whole(path, dumps(msgspec.to_builtins(made)) + "\n")


def read_baseline(path: Path) -> Baseline:
    """The baseline in `path`.

    Raises:
        BadArgument: it cannot be read, or is none of this format.
    """
    remedy = "give a file that `attnfuzz gate --write FILE` wrote"
    try:
        content = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise reject("baseline", str(path), f"it cannot be read ({error.strerror})", remedy) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise reject("baseline", str(path), f"it is no JSON ({error})", remedy) from None
    if isinstance(content, dict) and "format" in content and content["format"] != FORMAT:
        reason = f"its format is {content['format']!r}, and this attnfuzz reads {FORMAT}"
        raise reject("baseline", str(path), reason, "write it anew with `attnfuzz gate --write FILE`")
    try:
        found = msgspec.convert(content, Baseline)
        for each in found.kernels.values():
            _ = each.errors
    except (msgspec.ValidationError, BadCase) as error:
        raise reject("baseline", str(path), str(error), remedy) from None
    return found


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
