"""A third party's kernel imported in a child process first: a module may end the process that imports it, or never return.

The child only says whether it survived. What a module raises is seen when this process imports it, in the same words.
While the child imports torch, so does this process: a trial costs little more than the module's own time.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import IO

from attnfuzz.kernels.errors import reject
from attnfuzz.kernels.support.file_target import file_target

__all__ = ["SECONDS", "located", "why_fatal"]

SECONDS = "ATTNFUZZ_IMPORT_SECONDS"
"""Variable: seconds that importing one module may take; 0: no module is tried in a child."""
_SECONDS = 600.0
"""Some modules compile their extensions at import."""
_CHILD = Path(__file__).with_name("import_child.py")
_STEP = 0.05
_LAST_LINES, _TAIL = 3, 4000
_STACK = "most recent call first"
"""Of faulthandler's."""
_PLACE = re.compile(r'File "(.+)", line (\d+) in <module>')
_State = tuple[str, int, int]
_fatal: dict[tuple[str, _State | None], str | None] = {}
"""Why a target ends its process, None where it does not, by target and state of its module's file."""


def located(module: str) -> ModuleSpec | None:
    """Return the spec of a module without importing its packages, as importlib.util.find_spec does; None: there is none."""
    spec, path = None, None
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        try:
            spec = _spec(name, path)
        except Exception:  # a finder of a third party
            return None
        if spec is None:
            return None
        path = spec.submodule_search_locations
        if path is None and length < len(parts):
            return None
    return spec


def why_fatal(targets: Sequence[str]) -> dict[str, str]:
    """Make the kernels at `targets` (as of `targets.load`) in a child process; return why for those that ended it.

    A module that this process has imported is not tried, and one whose file has not changed since it was tried is not again.

    Raises:
        BadArgument: the variable ATTNFUZZ_IMPORT_SECONDS is not a number.
    """
    limit = _limit()
    states = {each: _state(each) for each in targets if limit}
    left = [each for each in states if not _is_imported(each) and (each, states[each]) not in _fatal]
    while left:
        survived, why = _tried(left, limit)
        for each in left[:survived]:
            _fatal[each, states[each]] = None
        if survived < len(left):
            _fatal[left[survived], states[left[survived]]] = why
        left = left[survived + 1 :]
    reasons = {each: _fatal.get((each, state)) for each, state in states.items() if not _is_imported(each)}
    return {each: reason for each, reason in reasons.items() if reason is not None}


def _spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


def _limit() -> float:
    text = os.environ.get(SECONDS, "")
    try:
        seconds = float(text) if text else _SECONDS
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise reject(SECONDS, text, "it is not a number of seconds", "give such as 600, or 0 for no trial")
    return seconds


def _is_imported(target: str) -> bool:
    """Whether this process has the module of a target."""
    file = file_target(target)
    if file is None:
        return target.partition(":")[0] in sys.modules
    path = str(Path(file.file).absolute())
    return any(getattr(each, "__file__", None) == path for each in list(sys.modules.values()))


def _state(target: str) -> _State | None:
    """Return the path, time and size of the file of a target's module; None where it has none."""
    file = file_target(target)
    spec = located(target.partition(":")[0]) if file is None else None
    if file is None and (spec is None or not spec.has_location):
        return None
    path = file.file if file is not None else spec.origin if spec is not None else None
    if path is None:
        return None
    try:
        status = Path(path).stat()
    except OSError:
        return path, 0, 0
    return path, status.st_mtime_ns, status.st_size


def _tried(targets: Sequence[str], limit: float) -> tuple[int, str]:
    """Return how many of `targets`, from the first, a child survived, and how the next one ended it."""
    with _Child(targets) as child:
        try:
            child.follow(limit)
        except TimeoutError:
            return child.survived, f"it does not end within {limit:g} s ({SECONDS}){child.output()}"
        code = child.process.wait()
    return child.survived, f"it ended the process, {_how(code)}{child.output()}"


def _how(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"


@dataclass
class _Child:
    """A process that makes the kernels at `targets`, and writes a line for each that it survived; a context that ends it."""

    targets: Sequence[str]
    survived: int = 0
    _log: IO[bytes] = field(default_factory=tempfile.TemporaryFile)

    def __enter__(self) -> _Child:
        self._read, write = os.pipe()
        settings = {"parent": os.getpid(), "report": write, "path": sys.path, "targets": list(self.targets)}
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(_CHILD), json.dumps(settings)],
                pass_fds=[write],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # A terminal's Ctrl-C is for this process, which ends the child.
                start_new_session=True,
            )
        except BaseException:
            os.close(self._read)
            raise
        finally:
            os.close(write)
        return self

    def __exit__(self, *_: object) -> None:
        # Also what the module has started.
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._read)

    def follow(self, limit: float) -> None:
        """Count the targets that it survives, until the last or its end.

        Raises:
            TimeoutError: one took longer than `limit` seconds.
        """
        begin, text = time.monotonic(), ""
        while self.survived < len(self.targets):
            left = begin + limit - time.monotonic()
            if left <= 0:
                raise TimeoutError
            # In short steps: the end of the pipe need not come with that of the process, whose children may hold it.
            ended = self.process.poll() is not None
            if not select.select([self._read], [], [], min(left, _STEP))[0]:
                if ended:
                    return
                continue
            received = os.read(self._read, 4096).decode()
            if not received:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(left)
                    return
                raise TimeoutError
            *lines, text = (text + received).split("\n")
            for line in lines:
                if line == "torch":
                    _import_torch()
                else:
                    self.survived, begin = self.survived + 1, time.monotonic()

    def output(self) -> str:
        """Return the last lines that it printed, to follow a reason."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _TAIL))
        lines = [each.strip() for each in self._log.read().decode("utf-8", "replace").splitlines() if each.strip()]
        if any(_STACK in each for each in lines):
            place = next((match for each in lines if (match := _PLACE.search(each))), None)
            return "" if place is None else f" ({Path(place[1]).name}:{place[2]})"
        return f"; its last output: {' | '.join(lines[-_LAST_LINES:])}" if lines else ""


def _import_torch() -> None:
    if "torch" not in sys.modules:
        with contextlib.suppress(Exception):  # the kernel's own import reports it
            importlib.import_module("torch")
