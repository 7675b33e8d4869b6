"""Which process compiles a generated kernel: one, while others do without it. Later ones load it from PyTorch's folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

__all__ = ["claim", "folder"]


def folder() -> Path:
    """Return the folder in which PyTorch keeps its compiled kernels."""
    if own := os.environ.get("PYTORCH_KERNEL_CACHE_PATH"):
        return Path(own)
    caches = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or "/nonexistent", ".cache")
    return Path(caches, "torch", "kernels")


def claim(code: str) -> AbstractContextManager[None] | None:
    """Return a context to compile `code` in, or None while another process is in one.

    A file of the code's name is locked meanwhile, and written to at the end: then it is compiled, and no one waits for a lock.
    Where no file can be made, every process compiles.
    """
    path = folder() / f"attnfuzz-{hashlib.sha256(code.encode()).hexdigest()[:32]}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return nullcontext()
    try:
        if os.fstat(file).st_size:
            os.close(file)
            return nullcontext()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    except OSError:
        os.close(file)
        return nullcontext()
    return _held(file)


@contextmanager
def _held(file: int) -> Iterator[None]:
    try:
        yield
        os.write(file, b"compiled")
    finally:
        os.close(file)
