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
import re
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from attnfuzz.harness.core.files import Unreadable, decoded, opened, read_at_most, write_whole
from attnfuzz.strategies.case import BadCase, Case, case_from_object

__all__ = ["Journal", "LeftBehind", "Unread", "copy_left_behind", "left_behind"]

Unread = Callable[[Path, str], None]
"""Is called with a file that cannot be read, or not all of it, and why."""

_SLOT = 1 << 20
_SLOTS, _PASSING = 3, 2
"""Two slots for what is synchronised, alternately, and one for what is not."""
_RESERVED = 1 << 15
"""Bytes of a slot that are reserved on the disk: more than an entry usually has."""
_HEAD = struct.Struct("32sQ")
"""SHA-256 of the content, and its length."""
_NAME = re.compile(r"[0-9]+-.+", re.DOTALL)
"""Journals are named by their process; nothing else in their folder is touched."""
_created: set[Path] = set()
"""Folders that this process has made, and takes away when they are empty."""


class _Entry(msgspec.Struct, frozen=True):
    number: int
    case: str
    """Canonical JSON; empty where nothing is in flight."""
    deaths: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
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


def left_behind(folder: Path | str, unread: Unread = lambda *_: None) -> Iterator[LeftBehind]:
    """Cases whose run ended while they were in flight, of all kernels, each once. Files without such a Case are removed.

    A file that cannot be read is renamed, so that it stops no later run, and is reported to `unread`.
    """
    entries: dict[Case, LeftBehind] = {}
    paths: list[Path] = []
    for path in _journals(folder):
        try:
            content = _content(path, fcntl.LOCK_EX)
            entry = None if content is None else _latest(content)
            cases = _cases_of(entry, path, unread)
        except Unreadable as error:
            unread(path, f"{error}; {_set_aside(path)}")
            continue
        if content is None:
            # Its run is alive, or has ended meanwhile.
            continue
        if entry is None or not cases:
            _remove(path)
            continue
        paths.append(path)
        for case in cases:
            left = LeftBehind(case, entry.deaths + entry.died, path)
            known = entries.get(case)
            entries[case] = left if known is None else max(left, known, key=lambda each: each.deaths)
    of_file = {path: [each for each in entries.values() if each.path == path] for path in paths}
    for path, left_there in of_file.items():
        if not left_there:
            _remove(path)
    for each in entries.values():
        shared = of_file[each.path]
        yield replace(each, last=each is shared[-1], alone=len(shared) == 1)


def copy_left_behind(source: Path | str, target: Path | str, unread: Unread = lambda *_: None) -> list[Case]:
    """Copy the files of `source` whose run ended with Cases in flight into `target`; returns those Cases.

    A file that cannot be read is left out, and is reported to `unread`.
    """
    copied: list[Case] = []
    for path in _journals(source):
        try:
            content = _content(path, fcntl.LOCK_SH)
            cases = [] if content is None else _cases_of(_latest(content), path, unread)
        except Unreadable as error:
            unread(path, str(error))
            continue
        if content is not None and cases:
            write_whole(Path(target) / "inflight" / path.name, content)
            copied += cases
    return copied


def _journals(folder: Path | str) -> list[Path]:
    return sorted(path for path in (Path(folder) / "inflight").glob("*-*") if _NAME.fullmatch(path.name))


def _content(path: Path, lock: int) -> bytes | None:
    """Return what is in a journal whose run has ended, read under `lock`; None where it lives, or has removed the file since.

    Raises:
        Unreadable: it is not a regular file, may not be read, or is too large.
    """
    try:
        with opened(path) as file:
            try:
                fcntl.flock(file, lock | fcntl.LOCK_NB)
            except OSError:
                return None
            return read_at_most(file, _SLOTS * _SLOT)
    except Unreadable:
        if not os.path.lexists(path):
            return None
        raise


def _set_aside(path: Path) -> str:
    """Rename a file or folder so that it is not taken for a journal again; returns what was done, in words."""
    for name in (f"broken.{path.name}", f"broken.{secrets.token_hex(8)}"):
        with contextlib.suppress(OSError):
            if not os.path.lexists(path.parent / name):
                return f"it is kept as {path.rename(path.parent / name)}"
    return "remove it: it cannot be renamed"


def _remove(path: Path) -> None:
    # At worst it is read once more.
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _cases_of(entry: _Entry | None, path: Path, unread: Unread) -> list[Case]:
    """Return the Cases of an entry.

    Raises:
        Unreadable: none of them can be read.
    """
    texts = [text for text in (entry.case, *entry.more) if text] if entry else []
    cases: list[Case] = []
    reasons: list[str] = []
    for text in texts:
        try:
            cases.append(case_from_object(decoded(text)))
        except (BadCase, Unreadable) as error:
            reasons.append(str(error))
    if reasons and not cases:
        raise Unreadable(f"the Case in it cannot be read: {reasons[0]}")
    if reasons:
        unread(path, f"{len(reasons)} of its {len(texts)} Cases cannot be read: {reasons[0]}")
    return cases


def _latest(content: bytes) -> _Entry | None:
    """Return the latest entry; where the machine was down since, with the Cases that were synchronised before it.

    Raises:
        Unreadable: something else was written than entries.
    """
    entries = []
    for slot in range(_SLOTS):
        start = slot * _SLOT
        if len(content) < start + _HEAD.size:
            continue
        digest, length = _HEAD.unpack_from(content, start)
        text = content[start + _HEAD.size : start + _HEAD.size + length] if length < _SLOT else b""
        if text and hashlib.sha256(text).digest() == digest:
            entries.append((slot, decoded(text, _Entry)))
    if not entries and any(content):
        raise Unreadable("it holds no entry that is whole")
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
