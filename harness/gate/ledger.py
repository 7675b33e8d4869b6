"""The ledger: known failures, each with an issue and a last day, for `attnfuzz gate` and `attnfuzz run --ledger`.

An entry that has expired, or whose failure did not show where it was looked for, fails.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

from attnfuzz.harness.campaign.corpus import CaseFile, read_case
from attnfuzz.harness.core.environment import versions
from attnfuzz.harness.core.files import Unreadable, decoded_toml, read_file
from attnfuzz.harness.gate.result import Finding, KernelGate, Outcome, Part, PartName, Waiver
from attnfuzz.harness.judge.failure import KINDS, OUTPUT_TITLES, Failure
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.errors import BadArgument, reject, shown
from attnfuzz.kernels.problem import OUTPUT_NAMES, OutputName

__all__ = [
    "DEFAULT",
    "Entry",
    "Ledger",
    "case_of",
    "check_kernels",
    "knows",
    "let_through",
    "part_through",
    "read_ledger",
    "spent",
]

DEFAULT = "attnfuzz-ledger.toml"
_MOST = timedelta(days=366)
_LARGEST = 4 << 20
"""Bytes of a ledger."""
_MOST_ISSUE = 500
"""Letters of a reference to an issue."""
_REQUIRED = ("kernel", "issue", "expires")
_FIELDS = ("kernel", "part", "kind", "output", "check", "message", "device", "case", "versions", "issue", "expires")
_SAME = ("kernel", "kind", "part", "output", "check", "message", "device", "versions")
"""Fields in which no two entries may agree."""
_ISSUE = re.compile(r"#\d+|[\w.-]+/[\w.-]+#\d+|https?://\S+/\S+")

_BY_PART: tuple[PartName, ...] = ("accuracy", "determinism", "compile", "speed")
_DEVICES: tuple[Device, ...] = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Entry:
    """One known failure: of a `kind` (and perhaps output, check, message), or of a whole `part` of the gate."""

    number: int
    line: int
    kernel: str
    issue: str
    expires: date
    kind: str | None = None
    part: PartName | None = None
    output: OutputName | None = None
    check: str | None = None
    message: str | None = None
    """A part of the failure's message, where the kind alone would let too much through."""
    device: Device | None = None
    """The device on which the failure shows in this way; None: any. Runs on another device leave the entry out."""
    case: Path | None = None
    """Its case file, which is replayed to see whether the failure still shows."""
    versions: tuple[tuple[str, str], ...] = ()
    """(package, version): the entry holds only with all of these; with others it may be fixed, or another one."""

    def covers(self, finding: Finding) -> bool:
        """Return whether `finding` is the entry's failure."""
        if finding.kernel != self.kernel:
            return False
        if self.part is not None and (finding.part != self.part or finding.kind not in (None, "nondeterministic")):
            # Accuracy may be the first part to meet a wrong output, but an entry for accuracy does not excuse one.
            return False
        if self.kind is not None and finding.kind != self.kind:
            return False
        fields = ((self.output, finding.output), (self.check, finding.check))
        if any(wanted is not None and wanted != value for wanted, value in fields):
            return False
        return self.message is None or self.message in finding.message

    def expired(self, today: date) -> bool:
        """Return whether its last day is over."""
        return today > self.expires

    @property
    def missing_versions(self) -> str:
        """Those of `versions` that are not installed here, as text."""
        return ", ".join(f"{package} {version}" for package, version in self.versions if _installed(package) != version)

    @property
    def waiver(self) -> Waiver:
        """What reports show of it."""
        return Waiver(self.number, self.issue, self.expires.isoformat())

    def __str__(self) -> str:
        what = self.kind or self.part
        where = f" in {OUTPUT_TITLES[self.output]}" if self.output else ""
        where += f" on {self.device}" if self.device else ""
        return f"entry {self.number} ({self.kernel}: {what}{where}, {self.issue})"


@dataclass(frozen=True, slots=True)
class Ledger:
    """The entries of one file, in order."""

    path: Path
    entries: tuple[Entry, ...] = ()

    def on(self, device: Device, today: date) -> Ledger:
        """Return a copy for a run on `device`: without the entries of another device, unless they have expired."""
        entries = (each for each in self.entries if each.device in (None, device) or each.expired(today))
        return dataclasses.replace(self, entries=tuple(entries))

    def in_force(self, today: date) -> tuple[Entry, ...]:
        """Return the entries that have not expired and hold with the versions installed here."""
        return tuple(each for each in self.entries if not each.expired(today) and not each.missing_versions)


def read_ledger(path: Path, today: date) -> Ledger:
    """Read the ledger in `path`.

    Raises:
        BadArgument: it cannot be read, is not TOML, or has an incomplete, invalid or repeated entry; the message has the entry's
            number and line.
    """
    content = read_file(path, _LARGEST, argument="ledger", remedy="give the path of a ledger")
    try:
        document = decoded_toml(content)
    except Unreadable as error:
        raise _broken(path, str(error), "write [[known]] entries, as UTF-8; see docs/gate.md for an example") from None
    if unknown := sorted(document.keys() - {"known"}):
        raise _broken(path, f"{shown(unknown[0])} is not a field of a ledger", "a ledger holds [[known]] entries only")
    tables = document.get("known", [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise _broken(path, "known must be a list of tables", "begin each entry with [[known]]")
    text = content.decode()
    lines = [number for number, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*known\s*\]\]", line)]
    entries: dict[tuple[Any, ...], Entry] = {}
    for number, table in enumerate(tables, 1):
        line = lines[number - 1] if len(lines) == len(tables) else 0
        entry = _Reader(path, number, line, table).entry(today)
        key = tuple(getattr(entry, name) for name in _SAME)
        if key in entries:
            raise _Reader(path, number, line, table).wrong(f"it repeats entry {entries[key].number}", "keep one of them")
        entries[key] = entry
    return Ledger(path, tuple(entries.values()))


@dataclass(frozen=True, slots=True)
class _Reader:
    path: Path
    number: int
    line: int
    table: dict[str, Any]

    def entry(self, today: date) -> Entry:
        table = self.table
        for name in table:
            if name not in _FIELDS:
                raise self.wrong(f"{shown(name)} is not a field of an entry", f"an entry has {', '.join(_FIELDS)}")
        for name in _REQUIRED:
            if name not in table:
                raise self.wrong(f"it has no {name}", f"every entry needs {', '.join(_REQUIRED)}, and a kind or a part")
        for name, value in table.items():
            if name not in ("expires", "versions") and not _is_text(value):
                raise self.wrong(f"{name}={shown(value)} must be a text that is not empty", f'write {name} = "..."')
        if ("kind" in table) == ("part" in table):
            reason = "it has a kind and a part" if "kind" in table else "it has neither a kind nor a part"
            raise self.wrong(
                reason, f"give the kind of a failure ({', '.join(KINDS[:3])}, ...) or a part ({', '.join(_BY_PART)})"
            )
        case = table.get("case")
        if case is not None and "part" in table:
            raise self.wrong("a part cannot have a case", "leave case out, or give the kind of the failure in place of part")
        return Entry(
            number=self.number,
            line=self.line,
            kernel=table["kernel"],
            issue=self._issue(),
            expires=self._expires(today),
            kind=self._one_of("kind", KINDS),
            part=self._one_of("part", _BY_PART),
            output=self._output(),
            check=table.get("check"),
            message=table.get("message"),
            device=self._one_of("device", _DEVICES),
            case=None if case is None else self._case(case),
            versions=self._versions(),
        )

    def wrong(self, reason: str, remedy: str) -> BadArgument:
        where = f"entry {self.number}" + (f" (line {self.line})" if self.line else "")
        return _broken(self.path, f"{where}: {reason}", remedy)

    def _one_of(self, name: str, allowed: Sequence[str]) -> Any:
        value = self.table.get(name)
        if value is not None and value not in allowed:
            raise self.wrong(f"{name}={shown(value)}: there is no such {name}", f"use one of {', '.join(allowed)}")
        return value

    def _output(self) -> OutputName | None:
        value = self.table.get("output")
        output = next((name for name in OUTPUT_NAMES if value is not None and name == value.lower()), None)
        if value is not None and output is None:
            raise self.wrong(f"output={shown(value)}: there is no such output", f"use one of {', '.join(OUTPUT_TITLES.values())}")
        return output

    def _issue(self) -> str:
        issue = str(self.table["issue"]).strip()
        if len(issue) > _MOST_ISSUE or not _ISSUE.fullmatch(issue):
            raise self.wrong(f"issue={shown(issue)} is not a reference to an issue", "give its URL, #12 or owner/repository#12")
        return issue

    def _expires(self, today: date) -> date:
        value = self.table["expires"]
        if isinstance(value, str):
            try:
                value = date.fromisoformat(value)
            except ValueError:
                value = None
        if not isinstance(value, date) or isinstance(value, datetime):
            raise self.wrong(f"expires={shown(self.table['expires'])} is not a day", "write expires = 2026-12-31")
        if value - today > _MOST:
            raise self.wrong(f"expires={value} is more than a year ahead", f"give {today + timedelta(days=365)} or a day before")
        return value

    def _case(self, name: str) -> Path:
        path = self.path.parent / name
        if not os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises for a name that is too long
            raise self.wrong(f"case={shown(name)}: there is no such file", "give its path, relative to the ledger's folder")
        return path

    def _versions(self) -> tuple[tuple[str, str], ...]:
        value = self.table.get("versions")
        if value is None:
            return ()
        if not isinstance(value, dict) or not value or not all(map(_is_text, (*value, *value.values()))):
            raise self.wrong(f"versions={shown(value)} must be a table of texts", 'write versions = { torch = "2.11.0" }')
        return tuple(sorted(value.items()))


def _installed(package: str) -> str | None:
    try:
        return versions().get(package) or metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def check_kernels(ledger: Ledger, chosen: Container[str]) -> None:
    """Refuse entries of kernels that are neither in `chosen` nor known here: they would never be in use, and stay.

    Raises:
        BadArgument: with the entry's number and line.
    """
    for entry in ledger.entries:
        if entry.kernel in chosen or entry.kernel in registry.names():
            continue
        try:
            registry.get(entry.kernel)
        except BadArgument as error:
            where = f"line {entry.line}: " if entry.line else ""
            reason = f"{where}{entry}: there is no such kernel here ({error})"
            raise _broken(ledger.path, reason, "remove the entry, or name the kernel by --kernel as well") from None


def case_of(entry: Entry) -> CaseFile | None:
    """Read the entry's case file, if it has one.

    Raises:
        BadArgument: the file cannot be read, or is a Case of another kernel.
    """
    if entry.case is None:
        return None
    stored = read_case(entry.case)
    if stored.case.kernel != entry.kernel:
        reason = f"it is of {stored.case.kernel}, and named by the ledger's {entry}"
        raise reject("case", str(entry.case), reason, "give a case of the entry's kernel")
    return stored


def knows(entries: Sequence[Entry], failure: Failure) -> bool:
    """Return whether one of `entries` covers a Trial's failure."""
    finding = Finding.of("campaign", failure.identity, failure.message)
    return any(each.covers(finding) for each in entries)


def let_through(gated: KernelGate, ledger: Ledger, today: date) -> KernelGate:
    """Return a copy with the findings marked that entries in force cover; a part with nothing else is "known"."""
    in_force = ledger.in_force(today)
    return dataclasses.replace(gated, parts=tuple(part_through(part, in_force) for part in gated.parts))


def part_through(part: Part, in_force: Sequence[Entry]) -> Part:
    """Return one part as `let_through` does."""
    if part.outcome != "fail":
        return part
    findings = tuple(_marked(each, in_force) for each in part.findings)
    outcome: Outcome = "known" if findings and all(each.waiver for each in findings) else "fail"
    return dataclasses.replace(part, findings=findings, outcome=outcome)


def _marked(finding: Finding, in_force: Sequence[Entry]) -> Finding:
    entry = next((each for each in in_force if each.covers(finding)), None)
    return finding if entry is None else dataclasses.replace(finding, waiver=entry.waiver)


def spent(ledger: Ledger, gated: Sequence[KernelGate], today: date) -> tuple[tuple[tuple[str, int], ...], tuple[str, ...]]:
    """Return what is wrong with the ledger's entries: (failures as (text, line in its file), notes that fail nothing)."""
    wrong: list[tuple[str, int]] = []
    notes: list[str] = []
    by_name = {each.kernel: each for each in gated}
    for entry in ledger.entries:
        kernel = by_name.get(entry.kernel)
        if entry.expired(today):
            text = f"{entry}: it expired on {entry.expires}; fix the kernel, or renew it with its issue"
            wrong.append((text, entry.line))
        elif kernel is not None and entry.missing_versions:
            notes.append(f"{entry}: not used: it holds for {entry.missing_versions}, which is not installed here")
        elif kernel is not None and (gone := _shows_no_more(entry, kernel)) is not None:
            why, certain = gone
            if certain:
                wrong.append((f"{entry}: {why}; take the entry out", entry.line))
            else:
                notes.append(f"{entry}: {why}; give the entry its case file, which decides this")
    return tuple(wrong), tuple(notes)


def _shows_no_more(entry: Entry, gated: KernelGate) -> tuple[str, bool] | None:
    """Return (why the entry's failure seems gone, whether that is certain); None where it showed or was not looked for."""
    if any(entry.covers(each) for each in gated.findings):
        return None
    parts = {each.name: each for each in gated.parts if each.outcome in ("pass", "fail", "known")}
    if entry.part is not None:
        part = parts.get(entry.part)
        if part is None or (entry.part == "speed" and not part.complete):
            return None
        return f"{entry.part} passes (or what it is compared with has the same failure)", True
    replay, campaign = parts.get("replay"), parts.get("campaign")
    if entry.case is not None and replay is not None:
        skipped = any(each.startswith(f"{entry.case.name}: ") for each in replay.figures.get("skipped", ()))
        return None if skipped else (f"its case {entry.case.name} does not show it", True)
    if replay is None or campaign is None:
        return None
    return "it did not show in the corpus nor in the campaign", campaign.complete


def _broken(path: Path, reason: str, remedy: str) -> BadArgument:
    return reject("ledger", str(path), reason, remedy)
