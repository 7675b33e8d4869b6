"""The temporary folder of a run, and those that runs left behind of which no process lived on to clean up.

A run holds a lock on a file of its folder while it lives: a folder whose lock can be had is of a run that is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

from attnfuzz.harness.isolation import reaper

__all__ = ["clear_if_gone", "clear_left_behind", "folder_of", "make_folder"]

_PREFIX, _OWNER = "attnfuzz-", ".owner"
_LONGEST = 64


def folder_of(run: str) -> str:
    """Return where the temporary folder of `run` is to be: its random number is in the name, so that nothing is there."""
    return f"{tempfile.gettempdir()}/{_PREFIX}{run}"


def make_folder(run: str) -> int:
    """Make the temporary folder of `run`; returns the descriptor of its lock, to be closed when the folder is gone."""
    folder = folder_of(run)
    Path(folder).mkdir(0o700)
    descriptor = os.open(f"{folder}/{_OWNER}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    # Where there are no locks, the file stays empty, and another run leaves the folder alone.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, run.encode())
    return descriptor


def clear_left_behind() -> int:
    """Kill what is left of runs that were killed together with their reaper, and remove their folders; returns how many."""
    count = 0
    try:
        names = [each for each in os.scandir(tempfile.gettempdir()) if each.name.startswith(_PREFIX)]
    except OSError:
        return 0
    for each in names:
        with contextlib.suppress(OSError):
            if each.is_dir(follow_symlinks=False) and each.stat(follow_symlinks=False).st_uid == os.getuid():
                count += clear_if_gone(each.path)
    return count


def clear_if_gone(folder: str, keep: int = 0) -> bool:
    """Clear a run that is gone, except for the process `keep`; returns whether it was.

    Raises:
        OSError: the folder has no file with a lock, or the run holds it.
    """
    descriptor = os.open(f"{folder}/{_OWNER}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        run = os.read(descriptor, _LONGEST).decode("ascii", "replace")
        if not run.isalnum():
            return False
        reaper.clear(run, folder, keep)
        return True
    finally:
        os.close(descriptor)
