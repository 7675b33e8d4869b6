"""Failures that the shards of one test share, in whatever processes they run: the first shard that finds one shrinks it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from attnfuzz.harness.core.files import write_whole
from attnfuzz.harness.judge.failure import Identity

__all__ = ["Claim", "SharedFailures", "drop_shared_failures", "shared_failures"]

_FOLDER = "shards"
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems without hard links."""
_WRITING = 0.1
"""Seconds in which a file that was created is written, where it is not a link."""
_OLD = 24 * 3600.0
"""Seconds without a failure after which what a killed session left behind is removed."""


class Claim(msgspec.Struct, frozen=True):
    """The test that keeps a failure, and the case file of that failure.

    `shrunk`: its Case is not shrunk further; another file replaces one that is.
    """

    test: str
    path: str | None = None
    shrunk: bool = False


@dataclass(frozen=True, slots=True)
class SharedFailures:
    """The failures that the shards of a test keep, one small file each.

    Where such a file cannot be written or read, that failure is not shared: each shard keeps it, as one alone does.

    Args:
        folder: of all shards of the test; made with the first failure.
        test: the name of this shard's test.
    """

    folder: Path
    test: str

    def claim(self, identity: Identity) -> Claim | None:
        """Claim a failure for this shard; returns the claim of another shard that was earlier, else None."""
        path = self._path(identity)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _create(path, msgspec.json.encode(Claim(self.test)))
        except FileExistsError:
            claim = self._once_written(identity)
            return None if claim is None or claim.test == self.test else claim
        except OSError:
            return None
        return None

    def _once_written(self, identity: Identity) -> Claim | None:
        """Return the claim of a failure, also of one whose file is being written; None: it cannot be read."""
        end = time.monotonic() + _WRITING
        while (claim := self.latest(identity)) is None and time.monotonic() < end:
            time.sleep(_WRITING / 20)
        return claim

    def latest(self, identity: Identity) -> Claim | None:
        """Return the claim of a failure, with the case file that it has by now; None: there is none that can be read."""
        try:
            return msgspec.json.decode(self._path(identity).read_bytes(), type=Claim)
        except (OSError, msgspec.MsgspecError):
            return None

    def note(self, identities: Iterable[Identity], path: str | None, *, shrunk: bool) -> None:
        """Say where the case file of a failure is; all of these belong to its Case, and are claimed where no other shard has."""
        for each in identities:
            if self.claim(each) is None:
                with contextlib.suppress(OSError):
                    write_whole(self._path(each), msgspec.json.encode(Claim(self.test, path, shrunk)))

    def _path(self, identity: Identity) -> Path:
        return self.folder / f"{hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:32]}.json"


def _create(path: Path, content: bytes) -> None:
    """Create a file that is not there yet.

    Raises:
        FileExistsError: it is there.
        OSError: it cannot be written.
    """
    new = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        new.write_bytes(content)
        # A link is there with its content or not at all, and does not replace another.
        os.link(new, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with path.open("xb") as file:
            file.write(content)
    finally:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)


def shared_failures(out: Path | str, session: str, name: str, test: str) -> SharedFailures:
    """Return what the shards of a test share.

    Args:
        out: the folder of case files.
        session: the same for all processes of a session, and for no other session.
        name: the name that all shards of the test have in common.
        test: the name of this shard's test.
    """
    return SharedFailures(Path(out) / _FOLDER / session / hashlib.sha256(name.encode()).hexdigest()[:16], test)


def drop_shared_failures(out: Path | str, session: str) -> None:
    """Remove what a session's shards have shared, and what killed sessions left a day ago or earlier."""
    folder, now = Path(out) / _FOLDER, time.time()
    shutil.rmtree(folder / session, ignore_errors=True)
    with contextlib.suppress(OSError):
        for each in folder.iterdir():
            if now - max(inner.stat().st_mtime for inner in (each, *each.iterdir())) > _OLD:
                shutil.rmtree(each, ignore_errors=True)
        folder.rmdir()
