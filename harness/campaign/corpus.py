"""Failing Cases on disk: one JSON file each, versioned, written whole or not at all."""

from __future__ import annotations

import contextlib
import re
import shlex
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from attnfuzz.harness.core.files import write_whole
from attnfuzz.harness.core.text import dumps
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.problem import reject
from attnfuzz.strategies.case import BadCase, Case, case_from_object

__all__ = [
    "CaseFile",
    "Corpus",
    "again_line",
    "quoted",
    "read_case",
    "repro_line",
]


_MOST_RUNS = 1000
"""Runs that a rate may tell of: what tells of more was not written here."""
_LARGEST = 64 << 20
"""Bytes of a case file: one of a batch of a million sequences has a few."""


@dataclass(frozen=True, slots=True)
class CaseFile:
    """A Case read from disk, and what was found with it (identity, message, device, versions), where that is told."""

    case: Case
    found: dict[str, Any]
    path: Path

    @property
    def rate(self) -> tuple[int, int] | None:
        """It failed in so many of so many runs, where it did not fail every time."""
        match self.found.get("rate"):
            case [int(shown), int(runs)] if type(shown) is type(runs) is int and 0 < shown < runs <= _MOST_RUNS:
                return shown, runs
        return None


def read_case(path: Path | str) -> CaseFile:
    """Read a case file, or a bare Case.

    Raises:
        BadCase: the file is missing, broken, or of another version.
    """
    path = Path(path)
    try:
        kind = path.stat()
        # A pipe or a device would keep a reader for ever.
        if not (stat.S_ISREG(kind.st_mode) or stat.S_ISDIR(kind.st_mode)) or kind.st_size > _LARGEST:
            reason = "it is too large" if stat.S_ISREG(kind.st_mode) else "it is no plain file"
            raise BadCase(f"case={str(path)!r}: {reason}; give a file that `attnfuzz run` wrote")
        content = path.read_bytes()
    except OSError as error:
        raise BadCase(f"case={str(path)!r}: it cannot be read ({error.strerror}); give the path of a case file") from None
    except ValueError as error:  # a NUL in the path
        raise BadCase(f"case={str(path)!r}: it cannot be read ({error}); give the path of a case file") from None
    try:
        found = msgspec.json.decode(content)
        case = case_from_object(found)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadCase(f"case={str(path)!r}: not JSON ({error}); give a file that `attnfuzz run` wrote") from None
    except RecursionError:
        raise BadCase(f"case={str(path)!r}: nested too deeply; give a file that `attnfuzz run` wrote") from None
    except BadCase as error:
        raise BadCase(f"case={str(path)!r}: {error}") from None
    more = found.get("found", {})
    return CaseFile(case=case, found=more if isinstance(more, dict) else {}, path=path)


def repro_line(path: str, kernel: str, target: object = None) -> str:
    """The command that runs a case file of `kernel` again.

    It says where that kernel is found if its name alone does not tell: as it was asked for in this process, else at `target`.
    """
    return again_line(path, kernel, "attnfuzz repro", target)


def again_line(path: str, kernel: str, command: str, target: object = None) -> str:
    """`command`, which takes a case file and --kernel, for a case file of `kernel`."""
    came = registry.origin(kernel)
    where = came.target if came else target if isinstance(target, str) else None
    return f"{command} {quoted(path)}{f' --kernel {shlex.quote(where)}' if where else ''}"


def quoted(path: str) -> str:
    """`path` as one word of a command line, which is no option whatever its name."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


class Corpus:
    """The case files of one folder, `DIR/cases`."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder) / "cases"

    def check(self) -> None:
        """Find out before the first trial that Cases can be kept.

        Raises:
            BadArgument: they cannot.
        """
        parent = next(each for each in (self.folder, *self.folder.absolute().parents) if each.exists())
        try:
            with tempfile.TemporaryFile(dir=parent):
                pass
        except OSError as error:
            reason = f"failing Cases could not be written there ({error.strerror})"
            raise reject("out", str(self.folder.parent), reason, "give a folder that can be written") from None

    def write(
        self,
        case: Case,
        verdict: Verdict,
        identity: Identity,
        *,
        minimal: bool,
        seed: int,
        rate: tuple[int, int] | None = None,
    ) -> Path:
        """Write a failing Case with what was found; returns its path. A crash leaves the old file or the new one, never half."""
        failure = next((each for each in verdict.failures if each.identity == identity), verdict.failure)
        found = {
            "identity": msgspec.to_builtins(identity),
            "message": failure.message if failure else "",
            "place": msgspec.to_builtins(failure.place) if failure else None,
            **({"pattern": msgspec.to_builtins(failure.pattern)} if failure and failure.pattern else {}),
            "minimal": minimal,
            "seed": seed,
            "device": verdict.device,
            "versions": verdict.versions,
            **({"rate": list(rate)} if rate else {}),
            **({"target": came.target} if (came := registry.origin(case.kernel)) else {}),
        }
        path = (
            self.folder / f"{_slug(case.kernel)}-{_slug(identity.output or identity.check)}-{_slug(identity.kind)}-{case.id}.json"
        )
        text = dumps({**case.to_object(), "found": found})
        write_whole(path, text + "\n")
        return path

    def remove(self, path: Path) -> None:
        """Drop a case file that a smaller one replaces, if that can be done: it does no harm."""
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def of(self, kernel: str) -> Iterator[CaseFile]:
        """The stored Cases of `kernel`, by file name. A file that cannot be read is an error with its path, never passed over."""
        for path in sorted(self.folder.glob(f"{_slug(kernel)}-*.json")):
            if not path.exists():
                # Another worker has put a smaller Case in its place since the folder was listed.
                continue
            stored = read_case(path)
            if stored.case.kernel == kernel:
                yield stored


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "_", text)
