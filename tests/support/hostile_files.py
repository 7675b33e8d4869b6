"""Hostile files, the command line that is given them in this process, and what must hold of every answer."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from attnfuzz.harness.cli.main import main

MARK = "EXECUTED"
"""The file that all code in hostile files would make."""
CODE = f"open('{MARK}', 'w')"
SECONDS, MEMORY = 30, 1 << 30
"""How long a row may take on a busy machine, and the bytes that it may add to the process."""
FAULTS = ("Traceback", "internal error", "fault of attnfuzz", "INTERNALERROR")
PROBLEM: dict[str, Any] = {"seqlens_q": [3], "seqlens_k": [3], "dim_qk": 16, "dim_v": 16, "dtype": "float32"}


@contextlib.contextmanager
def apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of its own, and an end to what hangs, eats memory or runs code."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("ATTNFUZZ_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def late(*_: object) -> None:
        raise AssertionError(f"it did not end within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert not list(folder.rglob(MARK)), "code of the input ran"


def attnfuzz(*arguments: str) -> Result:
    """Run a command in this process."""
    sys.argv = ["attnfuzz", *arguments]
    result = CliRunner().invoke(main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert not any(fault in result.output for fault in FAULTS), result.output
    return result


def refused(result: Result, *reasons: str) -> str:
    """Exit code 2, and the reasons in the error's first line, where nobody has to look for them; returns the error."""
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: "), result.stderr
    for reason in reasons:
        assert reason in result.stderr[:1500], result.stderr[:3000]
    return result.stderr


def case(**changed: Any) -> dict[str, Any]:
    """A Case of a kernel that always runs."""
    return {"format": 1, "kernel": "torch.reference_cpu", "problem": PROBLEM, **changed}


def problem(**changed: Any) -> dict[str, Any]:
    """The same with another Problem."""
    return case(problem={**PROBLEM, **changed})


def digits(count: int) -> str:
    """A text that `written` writes as a number of so many digits."""
    return f"@digits{count}@"


def nested(depth: int, what: str = "[]") -> str:
    """A text that `written` writes as arrays or objects of that depth."""
    return f"@nested{depth}{what}@"


def written(value: Any) -> bytes:
    """JSON of a value, with numbers and depths that Python would not write."""
    text = json.dumps(value)
    while (start := text.find('"@')) >= 0:
        end = text.index('@"', start)
        word = text[start + 2 : end]
        if word.startswith("digits"):
            new = "9" * int(word.removeprefix("digits"))
        elif word.endswith("[]"):
            depth = int(word[6:-2])
            new = "[" * depth + "]" * depth
        else:
            depth = int(word[6:-2])
            new = '{"a":' * depth + "1" + "}" * depth
        text = text[:start] + new + text[end + 2 :]
    return text.encode()


def fifo(path: Path) -> None:
    """A pipe that nobody writes to: to open it for reading waits forever."""
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    """A socket, bound by a relative name, since an absolute one may be too long."""
    bound = socket.socket(socket.AF_UNIX)
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        bound.bind(path.name)
    finally:
        os.chdir(here)
        bound.close()


def huge(path: Path) -> None:
    """A terabyte that takes no room."""
    with path.open("wb") as file:
        file.truncate(1 << 40)


def link_to(target: str) -> Callable[[Path], None]:
    """A link."""
    return lambda path: path.symlink_to(target)


NO_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a pipe": (fifo, "it is not a regular file"),
    "a socket": (unix_socket, "it is not a regular file"),
    "a folder": (Path.mkdir, "it cannot be read (Is a directory)"),
    "a link to a device without end": (link_to("/dev/zero"), "it is not a regular file"),
    "a link to a device without content": (link_to("/dev/null"), "it is not a regular file"),
    "a link to a terminal": (link_to("/dev/tty"), "it is not a regular file"),
    "a link to this process's memory": (link_to("/proc/self/mem"), "it cannot be read ("),
    "a link to nothing": (link_to("nowhere"), "it cannot be read (No such file or directory)"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "it cannot be read (Too many levels of symbolic links)"),
    "a terabyte": (huge, "it is too large"),
}
"""What may stand where a file is expected: how it is made, and why it cannot be read."""
