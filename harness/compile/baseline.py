"""The table of an earlier compile, and what has become worse since."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from attnfuzz.harness.compile.compile import Row
from attnfuzz.harness.compile.figures import rank
from attnfuzz.harness.core.files import write_whole
from attnfuzz.harness.core.text import dumps
from attnfuzz.kernels.problem import reject

__all__ = ["FORMAT", "Baseline", "Change", "Compared", "as_object", "compare", "read", "write"]

FORMAT = 1
_Key = tuple[str, str, str, str]


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """What a baseline file holds."""

    format: int
    versions: dict[str, str]
    rows: list[Row]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One function that is worse, or failed and does no more."""

    kernel: str
    key: str
    arch: str
    function: str
    before: str
    now: str


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A table against its baseline. The first three make it fail."""

    baseline: str
    new_failures: list[Change]
    new_spills: list[Change]
    lost_tensor_core: list[Change]
    new_races: list[Change]
    fixed: list[Change]
    added: int
    """Functions that the baseline does not know; one that fails, or spills, is in the lists as well."""
    missing: int
    """Functions of the baseline that were to be compiled, and are no more."""
    versions: dict[str, tuple[str, str]]
    """Compilers of another version than the baseline's: (the baseline's, ours)."""

    @property
    def worse(self) -> bool:
        """Whether the gate is to fail."""
        return bool(self.new_failures or self.new_spills or self.lost_tensor_core)


def read(path: str) -> Baseline:
    """The baseline in a file.

    Raises:
        BadArgument: it cannot be read, or is none.
    """
    remedy = "write one with `attnfuzz compile --write FILE`"
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise reject("baseline", path, f"it cannot be read ({error.strerror})", remedy) from None
    try:
        found = msgspec.json.decode(content, type=Baseline)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise reject("baseline", path, f"it is broken ({error})", remedy) from None
    if found.format != FORMAT:
        raise reject("baseline", path, f"it is of format {found.format}, and this attnfuzz reads {FORMAT}", remedy)
    return found


def write(path: Path, rows: Sequence[Row], versions: dict[str, str]) -> None:
    """Write the table as a baseline, whole or not at all: what differs from run to run (time, cache, case files) left out."""
    kept = [msgspec.structs.replace(each, seconds=0.0, cached=False, case=None) for each in sorted(rows, key=_key)]
    found = Baseline(format=FORMAT, versions=versions, rows=kept)
    write_whole(path, dumps(msgspec.to_builtins(found)) + "\n")


def compare(
    rows: Sequence[Row], baseline: Baseline, path: str, versions: dict[str, str], chosen: Collection[tuple[str, str]]
) -> Compared:
    """What is worse than in the baseline.

    Args:
        rows: what was compiled now.
        baseline: what to compare with.
        path: its file, for the report.
        versions: of our compilers.
        chosen: (kernel, architecture) of all that was to be compiled: of others, nothing is missing.
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


def as_object(found: Compared) -> dict[str, Any]:
    """For `--json`."""
    return {**msgspec.to_builtins(found), "worse": found.worse}
