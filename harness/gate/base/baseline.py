"""A baseline: figures of kernels that `attnfuzz gate --write FILE` measured, for comparison without git history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from attnfuzz.harness.core.files import Unreadable, decoded, read_file, write_whole
from attnfuzz.harness.core.text import dumps
from attnfuzz.harness.gate.base.base import BaseKernel, Progress
from attnfuzz.harness.gate.measured import Errors, Measurement
from attnfuzz.harness.gate.side import Side
from attnfuzz.harness.gate.subjects import Subject, fingerprint
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.errors import reject, shown
from attnfuzz.kernels.problem import OutputName
from attnfuzz.strategies.case import BadCase, Case, case_from_object

__all__ = ["FORMAT", "Baseline", "FromFile", "Recorded", "read_baseline", "recorded", "write_baseline"]

FORMAT = 1
_LARGEST = 64 << 20
"""Bytes of a baseline."""


class _Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    case: dict[str, Any]
    errors: dict[OutputName, Errors]


class Recorded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel: SHA-256 of its files, the outputs that it declares deterministic, its errors, its compile table."""

    fingerprint: str
    deterministic: tuple[OutputName, ...]
    measured: tuple[_Measured, ...]
    compile: list[dict[str, Any]] | None = None

    @property
    def errors(self) -> dict[Case, Mapping[OutputName, Errors]]:
        """Errors by Case."""
        return {case_from_object(each.case): each.errors for each in self.measured}


class Baseline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All kernels of one file, and the device and environment that they were measured on."""

    format: int
    device: Device
    environment: dict[str, Any]
    kernels: dict[str, Recorded]


def recorded(
    fingerprint: str, deterministic: Sequence[OutputName], results: Sequence[Measurement], table: list[dict[str, Any]] | None
) -> Recorded:
    """Make one kernel's part of a baseline."""
    return Recorded(
        fingerprint=fingerprint,
        deterministic=tuple(deterministic),
        measured=tuple(_Measured(case=each.case.to_object(), errors=each.errors) for each in results if each.errors),
        compile=table,
    )


def write_baseline(path: Path, device: Device, environment: Mapping[str, Any], kernels: Mapping[str, Recorded]) -> None:
    """Write the file whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    baseline = Baseline(format=FORMAT, device=device, environment=dict(environment), kernels=dict(kernels))
    write_whole(path, dumps(msgspec.to_builtins(baseline)) + "\n")


def read_baseline(path: Path) -> Baseline:
    """Read the baseline in `path`.

    Raises:
        BadArgument: it cannot be read, or is not a baseline of this format.
    """
    remedy = "give a file that `attnfuzz gate --write FILE` wrote"
    try:
        content = decoded(read_file(path, _LARGEST, argument="baseline", remedy=remedy))
    except Unreadable as error:
        raise reject("baseline", str(path), str(error), remedy) from None
    if isinstance(content, dict) and "format" in content and content["format"] != FORMAT:
        reason = f"its format is {shown(content['format'])}, and this attnfuzz reads {FORMAT}"
        raise reject("baseline", str(path), reason, "write it again with `attnfuzz gate --write FILE`")
    try:
        baseline = msgspec.convert(content, Baseline)
        for each in baseline.kernels.values():
            _ = each.errors
    except (msgspec.ValidationError, BadCase) as error:
        raise reject("baseline", str(path), str(error), remedy) from None
    return baseline


_JUDGING = ("attnfuzz", "torch", "triton", "tilelang")
"""Packages on whose versions errors depend."""


def _versions(environment: Mapping[str, Any]) -> Mapping[str, Any]:
    versions = environment.get("versions")
    return versions if isinstance(versions, Mapping) else {}


class FromFile:
    """A base of figures from a file: none of its code runs, so that nothing can be timed."""

    def __init__(self, path: Path, device: Device) -> None:
        self._baseline = read_baseline(path)
        if self._baseline.device != device:
            reason = f"it was written on {self._baseline.device}, and this runs on {device}"
            raise reject("baseline", str(path), reason, f"use --device {self._baseline.device}, or write one on {device}")
        self.label = str(path)
        self.root: Path | None = None

    def __enter__(self) -> FromFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Do nothing: there is nothing to close."""

    def preload(self, backends: Sequence[str]) -> None:
        """Do nothing: no code runs."""

    def other_versions(self, here: Mapping[str, Any]) -> str | None:
        """Say which packages had other versions when it was written; None: it was the same ones."""
        then, now = (_versions(each) for each in (self._baseline.environment, here))
        names = [name for name in _JUDGING if then.get(name) != now.get(name)]
        if not now or not names:
            return None
        listed = ", ".join(f"{name} {then.get(name, 'none')} (here {now.get(name, 'none')})" for name in names)
        return (
            f"{self.label} was written with {listed}: errors may have changed with that; write it again to compare like with like"
        )

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels that it has figures of."""
        return tuple(self._baseline.kernels)

    def why_changed(self, subject: Subject) -> str | None:
        """Say whether its files differ from the baseline's; a kernel without figures counts as changed."""
        kernel = self._of(subject)
        if kernel is None:
            return "the baseline does not have it"
        return None if kernel.fingerprint == fingerprint(subject.kernel) else "its files differ from the baseline's"

    def place(self, subject: Subject) -> tuple[str, int]:
        """Return its first file, relative to the current folder if it lies there."""
        first = next((Path(each).resolve() for each in subject.kernel.files), None)
        if first is None:
            return "", 1
        here = Path.cwd().resolve()
        return (first.relative_to(here).as_posix() if first.is_relative_to(here) else str(first)), 1

    def has(self, target: str) -> bool:
        """Whether it has figures of a kernel of that name."""
        return target in self._baseline.kernels

    def kernel(self, subject: Subject) -> BaseKernel:
        """Return what the file says of the kernel."""
        kernel = self._of(subject)
        if kernel is None:
            return BaseKernel(missing=f"it is new: {self.label} does not have it", new=True)
        return BaseKernel(deterministic=kernel.deterministic)

    def errors(
        self,
        subject: Subject,
        cases: Sequence[Case],  # noqa: ARG002 - the protocol's signature
        *,
        memory_check: bool,  # noqa: ARG002
        progress: Progress,  # noqa: ARG002
    ) -> Mapping[Case, Mapping[OutputName, Errors]]:
        """Return the errors in the file."""
        kernel = self._of(subject)
        return kernel.errors if kernel else {}

    def sample(self, subject: Subject) -> tuple[Case, ...] | None:
        """Return the Cases that were measured."""
        kernel = self._of(subject)
        return tuple(kernel.errors) if kernel else None

    def table(self, subject: Subject, architectures: Sequence[str]) -> list[dict[str, Any]] | None:
        """Return the table in the file, for `architectures` (none: all)."""
        kernel = self._of(subject)
        if kernel is None or kernel.compile is None:
            return None
        return [row for row in kernel.compile if not architectures or row.get("arch") in architectures]

    def side(self, subject: Subject) -> Side | None:  # noqa: ARG002 - the protocol's signature
        """Return None: times of two runs cannot be compared."""
        return None

    def _of(self, subject: Subject) -> Recorded | None:
        return self._baseline.kernels.get(subject.name)
