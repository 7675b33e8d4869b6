"""Capture of what compilers print, at this process's file descriptors: C++ code ignores Python's sys.stderr."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["captured"]


@contextmanager
def captured() -> Iterator[Path]:
    """Send this process's stdout and stderr to a file during the context; yields the file."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "compiler.log"
        saved = [(fd, os.dup(fd)) for fd in (1, 2)]
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            for fd, _ in saved:
                os.dup2(target, fd)
            yield log
        finally:
            for fd, copy in saved:
                os.dup2(copy, fd)
                os.close(copy)
            os.close(target)
