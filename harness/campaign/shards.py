"""Failures that the shards of one test share, in whatever processes they run: the first shard that finds one shrinks it."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from attnfuzz.harness.core.files import write_whole
from attnfuzz.harness.judge.failure import Identity

__all__ = ["Holder", "SharedFailures", "drop_shared_failures", "shared_failures"]

_FOLDER = "shards"
_OLD = 24 * 3600.0
"""Seconds after which what a killed session left behind is removed."""


class Holder(msgspec.Struct, frozen=True):
    """The shard that keeps a failure, and the case file of that failure, once it has one."""

    shard: str
    path: str | None = None


@dataclass(frozen=True, slots=True)
class SharedFailures:
    """The failures that some shard of a test keeps, one small file each.

    Where the folder cannot be written, nothing is shared: each shard keeps its failures, as one alone does.

    Args:
        folder: of the test, the same for all of its shards; made with the first failure.
        shard: this one's name.
    """

    folder: Path
    shard: str

    def holder(self, identity: Identity) -> Holder | None:
        """Return which other shard keeps a failure; None: none does, and this shard keeps it from now on."""
        path = self._path(identity)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.write(msgspec.json.encode(Holder(self.shard)))
        except FileExistsError:
            held = self._read(path)
            return None if held.shard == self.shard else held
        except OSError:
            return None
        return None

    def latest(self, identity: Identity) -> Holder:
        """Return which shard keeps a failure, with the case file that it has by now."""
        return self._read(self._path(identity))

    def keep(self, identities: Iterable[Identity], path: str | None) -> None:
        """Keep failures that belong to one minimal Case, and say where its case file is; another shard's stay its own."""
        for each in identities:
            if self.holder(each) is None:
                with contextlib.suppress(OSError):
                    write_whole(self._path(each), msgspec.json.encode(Holder(self.shard, path)))

    def _path(self, identity: Identity) -> Path:
        return self.folder / f"{hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:32]}.json"

    @staticmethod
    def _read(path: Path) -> Holder:
        try:
            return msgspec.json.decode(path.read_bytes(), type=Holder)
        except (OSError, msgspec.MsgspecError):
            # Another shard writes it at this moment.
            return Holder("another shard")


def shared_failures(out: Path | str, session: str, test: str, shard: str) -> SharedFailures:
    """Return what the shards of a test share.

    Args:
        out: the folder of case files.
        session: the same for all processes of a session, and for no other session.
        test: the test's name, without the shard.
        shard: the shard's name.
    """
    return SharedFailures(Path(out) / _FOLDER / session / hashlib.sha256(test.encode()).hexdigest()[:16], shard)


def drop_shared_failures(out: Path | str, session: str) -> None:
    """Remove what a session's shards have shared, and what sessions left that were killed a day ago or earlier."""
    folder, now = Path(out) / _FOLDER, time.time()
    shutil.rmtree(folder / session, ignore_errors=True)
    with contextlib.suppress(OSError):
        for each in folder.iterdir():
            if now - each.stat().st_mtime > _OLD:
                shutil.rmtree(each, ignore_errors=True)
        folder.rmdir()
