"""A baseline: the table of an earlier compile, and the comparison with a new one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from attnfuzz.harness.compile.compile import Row
from attnfuzz.harness.compile.figures import rank
from attnfuzz.harness.core.files import Unreadable, decoded, read_file, write_whole
from attnfuzz.harness.core.text import dumps
from attnfuzz.kernels.errors import reject, shown

__all__ = ["FORMAT", "Baseline", "Change", "Compared", "as_object", "compare", "read", "write"]

FORMAT = 1
_LARGEST = 64 << 20
"""Bytes of a baseline."""
_Key = tuple[str, str, str, str]


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a baseline file."""

    format: int
    versions: dict[str, str]
    rows: list[Row]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One function that is worse than in the baseline, or fixed."""

    kernel: str
    key: str
    arch: str
    function: str
    before: str
    now: str


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A table compared with its baseline. The first three lists of changes fail the comparison."""

    baseline: str
    new_failures: list[Change]
    new_spills: list[Change]
    lost_tensor_core: list[Change]
    new_races: list[Change]
    fixed: list[Change]
    added: int
    """Number of functions that the baseline lacks; those that fail or spill are in the lists as well."""
    missing: int
    """Number of functions of the baseline that should have been compiled and were not."""
    versions: dict[str, tuple[str, str]]
    """Compilers of another version than the baseline's: (the baseline's, ours)."""

    @property
    def worse(self) -> bool:
        """Whether the comparison fails."""
        return bool(self.new_failures or self.new_spills or self.lost_tensor_core)


def read(path: str) -> Baseline:
    """Read the baseline in a file.

    Raises:
        BadArgument: it cannot be read, or is not a baseline.
    """
    remedy = "write one with `attnfuzz compile --write FILE`"
    content = read_file(path, _LARGEST, argument="baseline", remedy=remedy)
    try:
        baseline = decoded(content, Baseline)
    except Unreadable as error:
        raise reject("baseline", path, f"it is broken ({error})", remedy) from None
    if baseline.format != FORMAT:
        raise reject("baseline", path, f"its format is {shown(baseline.format)}, and this attnfuzz reads {FORMAT}", remedy)
    return baseline


def write(path: Path, rows: Sequence[Row], versions: dict[str, str]) -> None:
    """Write the table as a baseline, whole or not at all, without what differs from run to run (time, cache, case files)."""
    kept = [msgspec.structs.replace(each, seconds=0.0, cached=False, case=None) for each in sorted(rows, key=_key)]
    baseline = Baseline(format=FORMAT, versions=versions, rows=kept)
    write_whole(path, dumps(msgspec.to_builtins(baseline)) + "\n")


def compare(
    rows: Sequence[Row], baseline: Baseline, path: str, versions: dict[str, str], chosen: Collection[tuple[str, str]]
) -> Compared:
    """Compare a table with a baseline.

    Args:
        rows: the new table.
        baseline: the baseline.
        path: its file, for the report.
        versions: versions of the compilers here.
        chosen: (kernel, architecture) of everything that should be compiled; nothing else counts as missing.
    """
    before, now = {_key(each): each for each in baseline.rows}, {_key(each): each for each in rows}
    failures: list[Change] = []
    spills: list[Change] = []
    lost: list[Change] = []
    races: list[Change] = []
    fixed: list[Change] = []
    for key, row in now.items():
        known = before.get(key)
        if not row.ok:
            if known is None or known.ok:
                failures.append(_change(row, "compiled" if known else "unknown", row.error or ""))
            continue
        if known is not None and not known.ok:
            fixed.append(_change(row, known.error or "", "compiles"))
        allowed = (known.spills if known else 0) or 0
        if (row.spills or 0) > allowed:
            spills.append(_change(row, f"{allowed} bytes" if known else "unknown", f"{row.spills} bytes"))
        if known is not None and rank(row.tensor_core) < rank(known.tensor_core):
            lost.append(_change(row, known.tensor_core or "none", row.tensor_core or "none"))
        new = [each for each in row.races or () if each not in ((known.races if known else None) or ())]
        races += [_change(row, "no such race", each) for each in new]
    differing = {name: (was, versions[name]) for name, was in baseline.versions.items() if versions.get(name, was) != was}
    return Compared(
        baseline=path,
        new_failures=failures,
        new_spills=spills,
        lost_tensor_core=lost,
        new_races=races,
        fixed=fixed,
        added=len(now.keys() - before.keys()),
        missing=sum((key[0], key[2]) in chosen for key in before.keys() - now.keys()),
        versions=differing,
    )


def _key(row: Row) -> _Key:
    return row.kernel, row.key, row.arch, row.function


def _change(row: Row, before: str, now: str) -> Change:
    return Change(kernel=row.kernel, key=row.key, arch=row.arch, function=row.function, before=before, now=now)


def as_object(compared: Compared) -> dict[str, Any]:
    """Return the comparison as `--json` has it."""
    return {**msgspec.to_builtins(compared), "worse": compared.worse}
