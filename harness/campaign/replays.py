"""Which stored Cases a run replays where it has no time for all: the newest, alternately with those not replayed for longest.

`DIR/replayed.json` holds, of each kernel, the names of case files in the order of their latest replay. It is there only after a
run that could not replay all of them; without it, or where it cannot be read, no file counts as replayed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from attnfuzz.harness.campaign.corpus import CaseFile
from attnfuzz.harness.core.files import Unreadable, decoded, opened, read_at_most, write_whole

__all__ = ["SHARE", "ReplayRecord", "in_turn", "most_replays"]

SHARE = 0.25
"""The part of a run's time and of its Cases that stored Cases may take."""
_FILE = "replayed.json"
_LARGEST = 16 << 20
"""Bytes of the record: a hundred thousand names have a half of that."""


def most_replays(most: int | None) -> int | None:
    """Return how many stored Cases are replayed of a run that is limited to `most` Cases; None: no limit."""
    return None if most is None else math.ceil(most * SHARE)


def in_turn(stored: Sequence[CaseFile], replayed: Sequence[str]) -> list[CaseFile]:
    """Return the order in which case files are replayed, wherever the run stops.

    The first is the one not replayed for the longest, the second the newest, and so on. Files that were never replayed
    come before all others, the newest of them first.

    Args:
        stored: case files of one kernel.
        replayed: names of those that were replayed, the latest last.
    """
    newest = sorted(stored, key=lambda each: (-_written(each.path), each.path.name))
    when = {name: number for number, name in enumerate(replayed)}
    longest_ago = sorted(newest, key=lambda each: when.get(each.path.name, -1))
    alternating = (each for pair in zip(longest_ago, newest, strict=True) for each in pair)
    return list({each.path: each for each in alternating}.values())


def _written(path: Path) -> int:
    """Return when a file was written, in nanoseconds; 0 where it is gone."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


class ReplayRecord:
    """The record of one folder.

    Args:
        folder: DIR.
    """

    def __init__(self, folder: Path | str) -> None:
        self._path = Path(folder) / _FILE
        self._names = self._read()

    def of(self, kernel: str) -> Sequence[str]:
        """Return the names of a kernel's case files that were replayed, the latest last."""
        return self._names.get(kernel, ())

    def update(self, replayed: Mapping[str, Collection[str]], not_replayed: Collection[str]) -> None:
        """Note what a run has replayed, by kernel; the names of kernels that are not in `not_replayed` are dropped.

        What cannot be written costs the order of the next run only.
        """
        # Another run may have written it since.
        names, before = self._read(), self._names
        for kernel, latest in replayed.items():
            if kernel in not_replayed:
                kept = dict.fromkeys(names.get(kernel, ()))
                names[kernel] = [*(each for each in kept if each not in set(latest)), *latest]
            else:
                names.pop(kernel, None)
        self._names = {kernel: each for kernel, each in names.items() if each}
        with contextlib.suppress(OSError):
            if self._names and self._names != before:
                write_whole(self._path, msgspec.json.encode(self._names))
            elif not self._names:
                self._path.unlink(missing_ok=True)

    def _read(self) -> dict[str, list[str]]:
        try:
            with opened(self._path) as descriptor:
                return decoded(read_at_most(descriptor, _LARGEST), dict[str, list[str]])
        except Unreadable:
            return {}
