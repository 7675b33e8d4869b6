"""A baseline: what `attnfuzz gate --write FILE` measured of kernels, to compare with where there is no git history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from attnfuzz.harness.campaign.corpus import write_whole
from attnfuzz.harness.core.text import dumps
from attnfuzz.harness.gate.measured import Errors, Measurement
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.problem import OutputName, reject
from attnfuzz.strategies.case import BadCase, Case, case_from_object

__all__ = ["FORMAT", "Baseline", "Recorded", "read_baseline", "recorded", "write_baseline"]

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
