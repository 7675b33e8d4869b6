"""The ledger: known failures, each with an issue and a last day. Nothing else lets a failure through, and no entry stays.

An entry that expires lets nothing through any more; one whose failure does not show again, where it was looked for, may not stay.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

from attnfuzz.harness.gate.result import Finding, KernelGate, Outcome, Part, PartName, Waiver
from attnfuzz.harness.judge.failure import KINDS, OUTPUT_TITLES
from attnfuzz.kernels.problem import OUTPUT_NAMES, BadArgument, OutputName, reject

__all__ = ["DEFAULT", "Entry", "Ledger", "let_through", "read_ledger", "spent"]

DEFAULT = "attnfuzz-ledger.toml"
_MOST = timedelta(days=366)
_REQUIRED = ("kernel", "issue", "expires")
_FIELDS = ("kernel", "part", "kind", "output", "check", "message", "case", "issue", "expires")
_ISSUE = re.compile(r"#\d+|[\w.-]+/[\w.-]+#\d+|https?://\S+/\S+")

_BY_PART: tuple[PartName, ...] = ("accuracy", "determinism", "compile", "speed")


@dataclass(frozen=True, slots=True)
class Entry:
    """One known failure: of a `kind` that Trials tell (and perhaps output, check, message), or of a whole `part` of the gate."""

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
    case: Path | None = None
    """Its case file: what is replayed to see whether it shows still."""

    def covers(self, finding: Finding) -> bool:
        """Whether `finding` is what the entry tells of."""
        if finding.kernel != self.kernel:
            return False
        if self.part is not None and (finding.part != self.part or finding.kind not in (None, "nondeterministic")):
            # A wrong output is no matter of accuracy, though it may be met there first.
            return False
        if self.kind is not None and finding.kind != self.kind:
            return False
        told = ((self.output, finding.output), (self.check, finding.check))
        if any(asked is not None and asked != found for asked, found in told):
            return False
        return self.message is None or self.message in finding.message

    def expired(self, today: date) -> bool:
        """Whether its last day is over."""
        return today > self.expires

    @property
    def plea(self) -> Waiver:
        """What reports tell of it."""
        return Waiver(self.number, self.issue, self.expires.isoformat())

    def __str__(self) -> str:
        what = self.kind or self.part
        where = f" in {OUTPUT_TITLES[self.output]}" if self.output else ""
        return f"entry {self.number} ({self.kernel}: {what}{where}, {self.issue})"


@dataclass(frozen=True, slots=True)
class Ledger:
    """The entries of one file, in order."""

    path: Path
    entries: tuple[Entry, ...] = ()


def read_ledger(path: Path, today: date) -> Ledger:
    """The ledger in `path`.

    Raises:
        BadArgument: it cannot be read, is no TOML, or has an entry that is not complete, not sound or there twice; the text gives
            the entry's number and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise _broken(path, f"it cannot be read ({error.strerror})", "give the path of a ledger") from None
    except UnicodeDecodeError as error:
        raise _broken(path, f"it is no UTF-8 ({error.reason} at byte {error.start})", "write it as UTF-8") from None
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _broken(path, f"it is no TOML: {error}", "see docs/gate.md for one that is") from None
    except RecursionError:
        raise _broken(path, "it is nested too deeply", "a ledger holds [[known]] entries only") from None
    if unknown := sorted(found.keys() - {"known"}):
        raise _broken(path, f"it has {unknown[0]!r}, which means nothing", "a ledger holds [[known]] entries only")
    tables = found.get("known", [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise _broken(path, "known is no list of tables", "begin each entry with [[known]]")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*known\s*\]\]", line)]
    entries: dict[tuple[Any, ...], Entry] = {}
    for number, table in enumerate(tables, 1):
        line = lines[number - 1] if len(lines) == len(tables) else 0
        entry = _Reader(path, number, line, table).entry(today)
        key = tuple(getattr(entry, name) for name in ("kernel", "kind", "part", "output", "check", "message"))
        if key in entries:
            raise _Reader(path, number, line, table).wrong(f"it says the same as entry {entries[key].number}", "keep one of them")
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
                raise self.wrong(f"it has {name!r}, which means nothing", f"an entry has {', '.join(_FIELDS)}")
        for name in _REQUIRED:
            if name not in table:
                raise self.wrong(f"it has no {name}", f"every entry needs {', '.join(_REQUIRED)}, and a kind or a part")
        for name, value in table.items():
            if name != "expires" and not (isinstance(value, str) and value.strip()):
                raise self.wrong(f"{name}={value!r} is no text", f'write {name} = "..."')
        if ("kind" in table) == ("part" in table):
            reason = "it has a kind and a part" if "kind" in table else "it has neither a kind nor a part"
            raise self.wrong(
                reason, f"give the kind of a failure ({', '.join(KINDS[:3])}, ...) or a part ({', '.join(_BY_PART)})"
            )
        case = table.get("case")
        if case is not None and "part" in table:
            raise self.wrong("a part has no case", "leave case out, or give the kind of the failure in place of part")
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
            case=None if case is None else self._case(case),
        )

    def wrong(self, reason: str, remedy: str) -> BadArgument:
        where = f"entry {self.number}" + (f" (line {self.line})" if self.line else "")
        return _broken(self.path, f"{where}: {reason}", remedy)

    def _one_of(self, name: str, allowed: Sequence[str]) -> Any:
        value = self.table.get(name)
        if value is not None and value not in allowed:
            raise self.wrong(f"{name}={value!r} is none", f"use one of {', '.join(allowed)}")
        return value

    def _output(self) -> OutputName | None:
        value = self.table.get("output")
        found = next((name for name in OUTPUT_NAMES if value is not None and name == value.lower()), None)
        if value is not None and found is None:
            raise self.wrong(f"output={value!r} is none", f"use one of {', '.join(OUTPUT_TITLES.values())}")
        return found

    def _issue(self) -> str:
        issue = str(self.table["issue"]).strip()
        if not _ISSUE.fullmatch(issue):
            raise self.wrong(f"issue={issue!r} names no issue", "give its URL, #12 or owner/repository#12")
        return issue

    def _expires(self, today: date) -> date:
        value = self.table["expires"]
        if isinstance(value, str):
            try:
                value = date.fromisoformat(value)
            except ValueError:
                value = None
        if not isinstance(value, date) or isinstance(value, datetime):
            raise self.wrong(f"expires={self.table['expires']!r} is no day", "write expires = 2026-12-31")
        if value - today > _MOST:
            raise self.wrong(f"expires={value} is more than a year ahead", f"give {today + timedelta(days=365)} or a day before")
        return value

    def _case(self, name: str) -> Path:
        path = self.path.parent / name
        if not path.is_file():
            raise self.wrong(f"case={name!r}: there is no such file", "give its path, relative to the ledger's folder")
        return path


def let_through(gated: KernelGate, ledger: Ledger, today: date) -> KernelGate:
    """The same with every finding that an entry in force covers marked so; a part whose findings all are is "known"."""
    in_force = [each for each in ledger.entries if not each.expired(today)]
    return dataclasses.replace(gated, parts=tuple(part_through(part, in_force) for part in gated.parts))


def part_through(part: Part, in_force: Sequence[Entry]) -> Part:
    """One part, as `let_through` has it."""
    if part.outcome != "fail":
        return part
    findings = tuple(_marked(each, in_force) for each in part.findings)
    outcome: Outcome = "known" if findings and all(each.plea for each in findings) else "fail"
    return dataclasses.replace(part, findings=findings, outcome=outcome)


def _marked(finding: Finding, in_force: Sequence[Entry]) -> Finding:
    entry = next((each for each in in_force if each.covers(finding)), None)
    return finding if entry is None else dataclasses.replace(finding, plea=entry.plea)


def spent(ledger: Ledger, gated: Sequence[KernelGate], today: date) -> tuple[tuple[tuple[str, int], ...], tuple[str, ...]]:
    """(what fails the gate, as (text, line of the ledger), and what is only worth a note) of entries that may not stay."""
    wrong: list[tuple[str, int]] = []
    notes: list[str] = []
    by_name = {each.kernel: each for each in gated}
    for entry in ledger.entries:
        if entry.expired(today):
            text = f"{entry}: it expired on {entry.expires}; mend the kernel, or renew it with its issue"
            wrong.append((text, entry.line))
        elif (found := by_name.get(entry.kernel)) is not None and (gone := _shows_no_more(entry, found)) is not None:
            why, certain = gone
            if certain:
                wrong.append((f"{entry}: {why}; take the entry out", entry.line))
            else:
                notes.append(f"{entry}: {why}; give the entry its case file, so that this can be told")
    return tuple(wrong), tuple(notes)


def _shows_no_more(entry: Entry, gated: KernelGate) -> tuple[str, bool] | None:
    """(how it is known that the entry's failure is gone, whether that is certain); None where it shows, or was not looked for."""
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
        return f"its case {entry.case.name} passes", True
    if replay is None or campaign is None:
        return None
    return "it did not show in the corpus nor in the campaign", campaign.complete


def _broken(path: Path, reason: str, remedy: str) -> BadArgument:
    return reject("ledger", str(path), reason, remedy)
