"""Read the log of compute-sanitizer: findings of memcheck, racecheck and initcheck, equal ones counted together.

A record is a line after `=========` and the indented lines below it. Forms from 2020 to 2025 are known. They differ in words
("Address" or "Access to") and in the place of the kernel's name (before its offset, or behind file and line).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

__all__ = ["Finding", "SanitizerLog", "read_log"]

_MARK = re.compile(r"^=+ ?(.*)$")
_INVALID = re.compile(r"^Invalid (?:__(\w+)__ )?(\w+)(?: of size ([\d,]+) bytes?)?")
_UNINITIALISED = re.compile(r"^Uninitialized (?:__(\w+)__ )?memory read of size ([\d,]+) bytes?")
_RACE = re.compile(r"^(Error|Warning|Info): Race reported between (Read|Write) access at (.*)$", re.IGNORECASE)
_RACE_WITH = re.compile(r"^and (Read|Write) access at (.*?)(?: \[([\d,]+) hazards?\])?$", re.IGNORECASE)
_HAZARD = re.compile(
    r"^(Error|Warning|Warn|Info): ?(?:\([^)]*\) ?)?Potential (\w+) hazard detected at __shared__ (\S+) in block (\([^)]*\))",
    re.IGNORECASE,
)
_HAZARD_THREAD = re.compile(r"^(Read|Write) Thread (\([^)]*\)) at (.*)$", re.IGNORECASE)
_HOST = re.compile(r"^Host API memory access error at host access to (\S+) of size ([\d,]+) bytes?")
_THREAD = re.compile(r"^by thread (\([^)]*\)) in block (\([^)]*\))")
_ADDRESS = re.compile(r"^(?:Address|Access (?:to|at)) (0x[0-9a-fA-F]+)(?: (is .*))?$")
_SUMMARY = re.compile(r"^(?:ERROR SUMMARY: ([\d,]+) errors?|RACECHECK SUMMARY: ([\d,]+) hazards?)")
_NO_FINDING = (
    "COMPUTE-SANITIZER",
    "ERROR SUMMARY",
    "RACECHECK SUMMARY",
    "LEAK SUMMARY",
    "Target application",
    "Error: process didn't terminate",
    "Error: Target application",
    "Warning: Maximum number of hazards",
    "Program hit ",
)
"""First lines of other records. Program hit: an API call that failed, as every one does after an invalid access."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A report of the sanitizer, at one place of the code."""

    kind: str
    """ "invalid global write", "uninitialised global read", "race", ..."""
    kernel: str = ""
    code: str = ""
    """Function, offset, file and line."""
    size: int | None = None
    """Bytes of one access."""
    thread: str = ""
    block: str = ""
    address: str = ""
    nearest: str = ""
    """Where the address lies: misaligned, or how far from which allocation."""
    other: str = ""
    """The other access of a race."""
    severity: str = "error"
    count: int = 1
    """How often it was reported: threads, or hazards."""


class SanitizerLog(msgspec.Struct, frozen=True, kw_only=True):
    """Findings, most frequent first; the errors that the tool's summary counts; and all other lines."""

    findings: tuple[Finding, ...] = ()
    errors: int = 0
    """Count of the tool's own summary, without failed API calls."""
    notes: tuple[str, ...] = ()


def read_log(text: str) -> SanitizerLog:
    """Read the sanitizer's lines in `text`; other lines are skipped."""
    findings: dict[tuple[object, ...], Finding] = {}
    errors, notes = 0, []
    for head, details in _records(text):
        if summary := _SUMMARY.match(head):
            errors += _number(summary[1] or summary[2])
        elif head.startswith("Program hit "):
            errors -= 1
        elif (finding := _finding(head, details)) is not None:
            key = (finding.kind, finding.kernel, finding.code, finding.size, finding.severity)
            before = findings.get(key)
            findings[key] = finding if before is None else msgspec.structs.replace(before, count=before.count + finding.count)
        elif not head.startswith(_NO_FINDING):
            notes.append(head)
    ordered = sorted(findings.values(), key=lambda each: (each.severity != "error", -each.count))
    return SanitizerLog(findings=tuple(ordered), errors=max(0, errors), notes=tuple(notes))


def _records(text: str) -> Iterator[tuple[str, list[str]]]:
    """(first line, lines below it) of each record, without marks and indents."""
    head, details = "", list[str]()
    for line in text.splitlines():
        marked = _MARK.match(line.rstrip())
        if not line.startswith("=====") or marked is None:
            continue
        content = marked[1]
        if content.startswith("   "):
            details.append(content.strip())
            continue
        if head:
            yield head, details
        head, details = content.strip(), []
    if head:
        yield head, details


def _finding(head: str, details: list[str]) -> Finding | None:
    if race := _RACE.match(head):
        return _race(race, details)
    if hazard := _HAZARD.match(head):
        return _hazard(hazard, details)
    if host := _HOST.match(head):
        where = next((each for each in details if each.startswith("Uninitialized access")), "")
        return Finding(kind="uninitialised host copy", size=_number(host[2]), address=host[1], nearest=where)
    if invalid := _INVALID.match(head):
        size = _number(invalid[3]) if invalid[3] else None
        return _access(" ".join(filter(None, ("invalid", invalid[1], invalid[2]))), size, details)
    if unwritten := _UNINITIALISED.match(head):
        kind = " ".join(filter(None, ("uninitialised", unwritten[1], "read")))
        return _access(kind, _number(unwritten[2]), details)
    if not head.startswith(_NO_FINDING) and any(_THREAD.match(each) for each in details):
        return _access(head, None, details)  # a kind that is not known here
    return None


def _access(kind: str, size: int | None, details: list[str]) -> Finding:
    """One access of one thread."""
    code = next((each[3:] for each in details if each.startswith("at ")), "")
    frames = [each.partition(":")[2].strip() for each in details if each.startswith("Device Frame:")]
    thread = next((match for each in details if (match := _THREAD.match(each))), None)
    address = next((match for each in details if (match := _ADDRESS.match(each))), None)
    near = next((each.removeprefix("and ") for each in details if "nearest allocation" in each), "")
    return Finding(
        kind=kind,
        kernel=_function(frames[-1] if frames else code),
        code=code,
        size=size,
        thread=thread[1] if thread else "",
        block=thread[2] if thread else "",
        address=address[1] if address else "",
        nearest=near or (address[2] or "" if address else ""),
    )


def _race(head: re.Match[str], details: list[str]) -> Finding:
    others = [match for each in details if (match := _RACE_WITH.match(each))]
    other = "; ".join(f"{match[1].lower()} at {match[2]}" for match in others)
    return Finding(
        kind=f"race of a {head[2].lower()}",
        kernel=_function(head[3]),
        code=head[3],
        other=other,
        severity=_severity(head[1]),
        count=max(1, sum(_number(match[3] or "1") for match in others)),
    )


def _hazard(head: re.Match[str], details: list[str]) -> Finding:
    threads = [match for each in details if (match := _HAZARD_THREAD.match(each))]
    first = threads[0] if threads else None
    return Finding(
        kind=f"{head[2]} hazard",
        kernel=_function(first[3]) if first else "",
        code=first[3] if first else "",
        thread=first[2] if first else "",
        block=head[4],
        address=head[3],
        other="; ".join(f"{match[1].lower()} by thread {match[2]} at {match[3]}" for match in threads[1:]),
        severity=_severity(head[1]),
    )


def _severity(word: str) -> str:
    return "error" if word.lower() == "error" else "warning"


def _function(code: str) -> str:
    """The function's name of "f(int *)+0x10 in a.cu:3", "0x10 in a.cu:3:f(int *)" or "0x10 in f(int *)"."""
    if code.startswith("0x"):
        code = re.sub(r"^(?:.*/)?[^ :]*\.\w+:\d+:", "", code.partition(" in ")[2])
    elif re.match(r"^\S+:\d+:", code):
        code = re.sub(r"^\S+:\d+:", "", code)
    code = re.split(r"\+0x[0-9a-fA-F]+", code)[0]
    code = re.sub(r"^void ", "", code.split(" in ")[0])
    return re.split(r"[(<]", code, maxsplit=1)[0].strip() or code.strip()


def _number(text: str) -> int:
    return int(text.replace(",", ""))
