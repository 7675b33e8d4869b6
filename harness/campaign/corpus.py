"""Failing Cases on disk: one JSON file each, versioned, written whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from attnfuzz.harness.campaign.events import Finding, Rate
from attnfuzz.harness.campaign.explain import Explanation
from attnfuzz.harness.core.files import Unreadable, decoded, read_file, write_whole
from attnfuzz.harness.core.text import dumps, one_line
from attnfuzz.harness.judge.diagnosis.model import Pattern
from attnfuzz.harness.judge.failure import Identity, Place, own_message
from attnfuzz.kernels import registry
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.support.file_target import as_options, file_target, is_readable
from attnfuzz.strategies.case import BadCase, Case, case_from_object

__all__ = [
    "UNEXPLAINED",
    "CaseFile",
    "Corpus",
    "StoredFinding",
    "again_line",
    "case_file_of",
    "content_of",
    "quoted",
    "read_case",
    "repro_line",
]


_MOST_RUNS = 1000
"""Largest number of runs in a rate: a file with more was not written here."""
_LARGEST = 64 << 20
"""Bytes of a case file: a batch of a million sequences has a few."""
_REMEDY = "give a file that `attnfuzz run` wrote"
UNEXPLAINED = "unexplained"
"""Folder of Cases whose process ended for a reason that is not known."""
_MOST_NAME = 80
"""Letters of a kernel's or a check's name in the name of a file, which may have 255."""


class StoredFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What a case file says of its failure: all that is known of it where the kernel is not at hand.

    `minimal`: no simpler Case fails alike; `seed`: of the run; `versions`: of Python and packages; `target`:
    "package.module:OBJECT", or an object in a file, where the kernel was found.
    """

    identity: Identity | None = None
    message: str = ""
    place: Place | None = None
    pattern: Pattern | None = None
    minimal: bool | None = None
    seed: int = 0
    device: str = ""
    versions: dict[str, str] = {}
    rate: Rate | None = None
    target: str | None = None
    explanation: Explanation | None = None

    @classmethod
    def of(cls, finding: Finding, seed: int) -> StoredFinding:
        """What the file of `finding` says; `seed`: of the run."""
        failure, origin = finding.failure, registry.origin(finding.case.kernel)
        return cls(
            identity=finding.identity,
            message=failure.message if failure else "",
            place=failure.place if failure else None,
            pattern=failure.pattern if failure else None,
            minimal=finding.minimal,
            seed=seed,
            device=finding.verdict.device,
            versions=finding.verdict.versions,
            rate=finding.rate,
            target=origin.target if origin else None,
            explanation=finding.explanation,
        )

    @classmethod
    def read(cls, data: Any) -> StoredFinding:
        """The finding in a file's JSON. A field that is missing or wrong counts as not known: the Case can be run without it."""
        try:
            finding = msgspec.convert(data, cls)
        except msgspec.ValidationError:
            finding = cls(**(_readable(data, cls) if isinstance(data, dict) else {}))
        if finding.target is not None and not _is_target(finding.target):
            finding = msgspec.structs.replace(finding, target=None)
        if (identity := finding.identity) is not None and (own := own_message(identity.message)) != identity.message:
            # Of a failure in the call before, which files written by earlier versions have as another one.
            finding = msgspec.structs.replace(finding, identity=msgspec.structs.replace(identity, message=own))
        failed, runs = finding.rate or (1, 2)
        return finding if 0 < failed < runs <= _MOST_RUNS else msgspec.structs.replace(finding, rate=None)

    def to_object(self) -> dict[str, Any]:
        """As JSON; empty where nothing is known."""
        if self == StoredFinding():
            return {}
        optional = ("pattern", "rate", "target", "explanation")
        data: dict[str, Any] = msgspec.to_builtins(self)
        return {name: value for name, value in data.items() if name not in optional or value is not None}


@dataclass(frozen=True, slots=True)
class CaseFile:
    """A Case read from a file or a blob, and its failure as far as that is known."""

    case: Case
    finding: StoredFinding
    path: Path

    @property
    def rate(self) -> Rate | None:
        """(runs that failed, all runs), where it did not fail every time."""
        return self.finding.rate

    def shown_by(self, identities: set[Identity]) -> bool:
        """Whether the file's failure is among these; any is where the file names none, or one that only several runs show."""
        identity = self.finding.identity
        return bool(identities) and (identity is None or identity.kind == "nondeterministic" or identity in identities)


def _readable(data: dict[str, Any], kind: type[StoredFinding]) -> dict[str, Any]:
    """Return the fields of a finding that can be read."""
    fields = {}
    for name, type_ in _types(kind):
        if name in data:
            # Infinities and NaN are strings in JSON.
            strict = name not in ("place", "pattern")
            with contextlib.suppress(msgspec.ValidationError):
                fields[name] = msgspec.convert(data[name], type_, strict=strict)
    return fields


@functools.cache
def _types(kind: type[StoredFinding]) -> tuple[tuple[str, Any], ...]:
    """Return (name, type) of each field; cached, since msgspec evaluates the annotations at every call, in half a millisecond."""
    return tuple((field.name, field.type) for field in msgspec.structs.fields(kind))


def read_case(path: Path | str) -> CaseFile:
    """Read a case file, or a bare Case.

    Raises:
        BadCase: the file is missing, broken, or of another version.
    """
    path = Path(path)
    content = content_of(path)
    try:
        return case_file_of(content, path)
    except Unreadable as error:
        raise BadCase(f"case={str(path)!r}: {error}; {_REMEDY}") from None
    except BadCase as error:
        raise BadCase(f"case={str(path)!r}: {error}") from None


def content_of(path: Path) -> bytes:
    """Return the content of a case file.

    Raises:
        BadCase: it cannot be read.
    """
    try:
        return read_file(path, _LARGEST, argument="case", remedy="give the path of a case file")
    except BadArgument as error:
        raise BadCase(str(error)) from None


def case_file_of(content: bytes, path: Path) -> CaseFile:
    """Return the Case in the JSON of a case file or a blob, and what it says of the failure.

    Raises:
        Unreadable: it is not JSON.
        BadCase: it is not a Case.
    """
    data = decoded(content)
    case = case_from_object(data)
    return CaseFile(case, StoredFinding.read(data.get("found")), path)


def repro_line(path: str, kernel: str, target: str | None = None) -> str:
    """The command that runs a case file of `kernel` again; it says where the kernel is if its name alone does not find it."""
    return again_line(path, kernel, "attnfuzz repro", target)


def again_line(path: str, kernel: str, command: str, target: str | None = None) -> str:
    """`command`, which takes a case file and --kernel, for a case file of `kernel`."""
    origin = registry.origin(kernel)
    where = origin.target if origin else target
    return f"{command} {quoted(path)}{f' {as_options(where)}' if where else ''}"


def quoted(path: str) -> str:
    """`path` as one word of a command line, never read as an option; as bash's $'...' where a screen would spell it."""
    word = f"./{path}" if path.startswith("-") else path
    if one_line(word) == word:
        return shlex.quote(word)
    return f"$'{''.join(map(_in_dollar_quotes, word))}'"


def _in_dollar_quotes(sign: str) -> str:
    if one_line(sign) != sign:
        return "".join(f"\\x{each:02x}" for each in os.fsencode(sign))
    return f"\\{sign}" if sign in "\\'" else sign


def _is_target(text: str) -> bool:
    """Whether `text` is package.module:OBJECT, or an object in a file: nothing else goes into a line to copy."""
    if (file := file_target(text)) is not None:
        return one_line(text) == text and is_readable(file)
    return re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", text, re.ASCII) is not None


def _is_there(path: Path) -> bool:
    """Whether something has that name, a link to nothing included, which cannot become a folder.

    Raises:
        OSError: the name is too long, or goes round in links.
        ValueError: it holds a NUL.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


class Corpus:
    """The case files of one folder, `DIR/cases`."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder) / "cases"

    def check(self) -> None:
        """Find out before the first trial that Cases can be kept.

        Raises:
            BadArgument: they cannot.
        """
        try:
            parent = next(each for each in (self.folder, *self.folder.absolute().parents) if _is_there(each))
            with tempfile.TemporaryFile(dir=parent):
                pass
        except (OSError, ValueError) as error:
            # ValueError: a NUL, from a project's settings.
            reason = f"failing Cases could not be written there ({getattr(error, 'strerror', None) or error})"
            raise reject("out", str(self.folder.parent), reason, "give a folder that can be written") from None

    def write(self, finding: Finding, seed: int) -> Path:
        """Write the case file of a finding; returns its path. A crash leaves the old file or the new one, never half."""
        case, identity = finding.case, finding.identity
        parts = (_slug(case.kernel), _slug(identity.output or identity.check)[:_MOST_NAME], identity.kind)
        path = self.folder / f"{'-'.join(parts)}-{case.id}.json"
        text = dumps({**case.to_object(), "found": StoredFinding.of(finding, seed).to_object()})
        write_whole(path, text + "\n")
        return path

    def write_unexplained(self, case: Case) -> Path:
        """Write a Case whose process ended for a reason that is not known, to `DIR/unexplained`; returns its path."""
        path = self.folder.parent / UNEXPLAINED / f"{_slug(case.kernel)}-{case.id}.json"
        origin = registry.origin(case.kernel)
        known = StoredFinding(target=origin.target if origin else None).to_object()
        write_whole(path, dumps({**case.to_object(), **({"found": known} if known else {})}) + "\n")
        return path

    def remove(self, path: Path) -> None:
        """Drop a case file that a smaller one replaces, if that can be done: it does no harm."""
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def of_all(self, kernels: Sequence[str]) -> dict[str, list[CaseFile]]:
        """Return the stored Cases of `kernels`, by file name: the folder is listed once.

        Raises:
            BadCase: a file of theirs cannot be read.
        """
        paths = sorted(self.folder.glob("*.json"))
        return {kernel: list(self._read(kernel, paths)) for kernel in kernels}

    def of(self, kernel: str) -> Iterator[CaseFile]:
        """The stored Cases of `kernel`, by file name. A file that cannot be read is an error with its path, never passed over."""
        yield from self._read(kernel, sorted(self.folder.glob("*.json")))

    def _read(self, kernel: str, paths: Iterable[Path]) -> Iterator[CaseFile]:
        prefix = f"{_slug(kernel)}-"
        for path in paths:
            if not path.name.startswith(prefix) or not os.path.lexists(path):
                # Another worker has put a smaller Case in its place since the folder was listed.
                continue
            stored = read_case(path)
            if stored.case.kernel == kernel:
                yield stored


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "_", text)[:_MOST_NAME]
