"""The Case in flight, on disk before it is launched: a run that dies, or a machine, leaves its last Case behind.

One small file per process, written in place and synchronised, in two slots alternately, so that a torn write spoils neither the
other slot nor the run; a third slot says which Case of several runs now. The process that owns the file holds a lock on it; a
file without that lock was left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from attnfuzz.harness.core.files import write_whole
from attnfuzz.strategies.case import BadCase, Case, case_from_json

__all__ = ["Journal", "LeftBehind", "copy_left_behind", "left_behind"]

_SLOT = 1 << 20
_SLOTS, _PASSING = 3, 2
"""Two slots for what is synchronised, alternately, and one for what is not."""
_RESERVED = 1 << 15
"""Bytes of a slot that are reserved on the disk: more than an entry usually has."""
_HEAD = struct.Struct("32sQ")
"""SHA-256 of the content, and its length."""
_created: set[Path] = set()
"""Folders that this process has made, and takes away when they are empty."""


class _Entry(msgspec.Struct, frozen=True):
    number: int
    case: str
    """Canonical JSON; empty where nothing is in flight."""
    deaths: int = 0
    more: tuple[str, ...] = ()
    """The other Cases of a batch, which are in flight together, or follow."""
    boot: str = ""
    """The machine's boot. What is not synchronised outlives a process, but not the machine."""
    died: bool = True
    """Whether a run that leaves this behind has died of it: one that ended by an error of attnfuzz has not."""


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """A Case that was in flight when its run died, how many runs have died of it, and its journal file."""

    case: Case
    deaths: int
    path: Path
    last: bool = True
    """Whether it is the last of the file's Cases: the file is not needed any more once this one is tried again."""
    alone: bool = True
    """Whether it is the file's only Case."""

    @property
    def pid(self) -> int:
        """Return the id of the process that had it in flight."""
        return int(self.path.name.partition("-")[0])


class Journal:
    """This process's file in `folder`. Made when the first Case is launched, gone when it is closed.

    Args:
        folder: of the run.
        durable: keep a Case even where this machine goes down with it.
    """

    def __init__(self, folder: Path | str, *, durable: bool = True) -> None:
        self._durable = durable
        self._folder = Path(folder) / "inflight"
        self._path: Path | None = None
        self._file = -1
        self._number = self._slot = 0
        self._entry: _Entry | None = None
        self._group: frozenset[Case] = frozenset()

    @property
    def path(self) -> Path | None:
        """Return the file, also once it is left behind; None before the first Case."""
        return self._path

    def launch_next(self, cases: Sequence[Case]) -> None:
        """The first of `cases` is about to run, then the others: synchronised once for all, as long as nothing else runs.

        After the death of this process the first one is known to have been in flight, after that of the machine all.
        """
        if cases[0] not in self._group:
            self.launch(*cases)
            self._group = frozenset(cases)
        self._entry = _Entry(self._number + 1, cases[0].canonical(), boot=_boot())
        self._write(self._entry, _PASSING)

    def launch(self, *cases: Case, deaths: int = 0) -> None:
        """`cases` are about to run; `deaths`: runs that have ended with them in flight. On disk when this returns."""
        if self._file < 0:
            self._open()
        first, *more = (each.canonical() for each in cases)
        self._group = frozenset()
        self._entry = _Entry(self._number + 1, first, deaths, tuple(more), _boot())
        self._slot = 1 - self._slot
        self._write(self._entry, self._slot)
        if self._durable:
            os.fdatasync(self._file)

    def landed(self, *failing: Case) -> None:
        """The Cases in flight have their verdicts; those `failing` are left behind until this or `launch` is called again.

        Not synchronised: at worst a Case that passed is tried once more.
        """
        if self._file >= 0:
            first, *more = [each.canonical() for each in failing] or [""]
            entry = _Entry(self._number + 1, first, more=tuple(more), boot=_boot(), died=False)
            self._entry = entry if failing else None
            self._write(entry, _PASSING)

    def close(self) -> None:
        """Nothing is in flight any more."""
        if self._file >= 0 and self._path is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1
            for folder in (self._folder, self._folder.parent):
                if folder in _created:
                    with contextlib.suppress(OSError):
                        folder.rmdir()

    def abandon(self) -> None:
        """Leave the Case in flight for the next run, without counting a death."""
        if self._entry is None:
            self.discard()
        elif self._file >= 0:
            with contextlib.suppress(OSError):  # a full disk: then it counts as a death
                entry = self._entry
                left = _Entry(self._number + 1, entry.case, entry.deaths, entry.more, _boot(), died=False)
                self._write(left, _PASSING)
            os.close(self._file)
            self._file, self._entry = -1, None

    def leave(self) -> None:
        """Leave the Cases in flight for another worker or the next run, as the death of this process would."""
        if self._entry is None:
            self.discard()
        else:
            os.close(self._file)
            self._file, self._entry = -1, None

    def discard(self) -> None:
        """Close and remove the file, whether or not it can still be written."""
        with contextlib.suppress(OSError):
            self.close()

    def _open(self) -> None:
        _created.update(each for each in (self._folder, self._folder.parent) if not each.exists())
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        hidden = self._folder / f".{name}"
        self._path = hidden
        self._file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.ftruncate(self._file, _SLOTS * _SLOT)
        for slot in range(_SLOTS):
            # On a disk that fills later, the Case in flight is written still.
            os.posix_fallocate(self._file, slot * _SLOT, _RESERVED)
        # Seen by other runs only once it is locked: a file without a lock is one that was left behind.
        self._path = hidden.rename(self._folder / name)
        os.fsync(self._file)
        folder = os.open(self._folder, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def _write(self, entry: _Entry, slot: int) -> None:
        self._number = entry.number
        content = msgspec.json.encode(entry)
        if len(content) > _SLOT - _HEAD.size:
            # A batch of a hundred thousand sequences: better no entry than one that spoils the other slot.
            content = msgspec.json.encode(_Entry(entry.number, ""))
        record = _HEAD.pack(hashlib.sha256(content).digest(), len(content)) + content
        os.pwrite(self._file, record, slot * _SLOT)


def left_behind(folder: Path | str) -> Iterator[LeftBehind]:
    """Cases whose run ended while they were in flight, of all kernels, each once. Files without such a Case are removed."""
    entries: dict[Case, LeftBehind] = {}
    paths: list[Path] = []
    for path in sorted((Path(folder) / "inflight").glob("*-*")):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                # Its run is alive.
                continue
            entry = _latest(file.read())
            cases = _cases_of(entry)
            if entry is None or not cases:
                path.unlink(missing_ok=True)
                continue
            paths.append(path)
            for case in cases:
                left = LeftBehind(case, entry.deaths + entry.died, path)
                known = entries.get(case)
                entries[case] = left if known is None else max(left, known, key=lambda each: each.deaths)
    of_file = {path: [each for each in entries.values() if each.path == path] for path in paths}
    for path, left_there in of_file.items():
        if not left_there:
            path.unlink(missing_ok=True)
    for each in entries.values():
        shared = of_file[each.path]
        yield replace(each, last=each is shared[-1], alone=len(shared) == 1)


def copy_left_behind(source: Path | str, target: Path | str) -> list[Case]:
    """Copy the files of `source` whose run ended with Cases in flight into `target`; returns those Cases."""
    copied: list[Case] = []
    for path in sorted((Path(source) / "inflight").glob("*-*")):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                # Its run is alive.
                continue
            content = file.read()
            if cases := _cases_of(_latest(content)):
                write_whole(Path(target) / "inflight" / path.name, content)
                copied += cases
    return copied


def _cases_of(entry: _Entry | None) -> list[Case]:
    """Return the Cases of an entry that can be read."""
    cases = []
    for text in (entry.case, *entry.more) if entry else ():
        with contextlib.suppress(BadCase):
            cases += [case_from_json(text)] if text else []
    return cases


def _latest(content: bytes) -> _Entry | None:
    """Return the latest entry; where the machine was down since, with the Cases that were synchronised before it."""
    entries = []
    for slot in range(_SLOTS):
        start = slot * _SLOT
        if len(content) < start + _HEAD.size:
            continue
        digest, length = _HEAD.unpack_from(content, start)
        text = content[start + _HEAD.size : start + _HEAD.size + length] if length < _SLOT else b""
        if text and hashlib.sha256(text).digest() == digest:
            entries.append((slot, msgspec.json.decode(text, type=_Entry)))
    slot, last = max(entries, key=lambda each: each[1].number, default=(0, None))
    before = max((each for at, each in entries if at != _PASSING), key=lambda each: each.number, default=None)
    if last is None or before is None or slot != _PASSING or not last.boot or last.boot == _boot():
        return last
    synchronised = tuple(each for each in (before.case, *before.more) if each != last.case)
    return _Entry(last.number, last.case, before.deaths, (*last.more, *synchronised), last.boot, last.died)


@functools.cache
def _boot() -> str:
    """Return what differs from one start of this machine to the next; empty where it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
