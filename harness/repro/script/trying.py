"""Run a script in a fresh process, as its reader will, and say whether it shows a failure."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Ran", "run_script"]

_MOST_OUTPUT = 1 << 20


@dataclass(frozen=True, slots=True)
class Ran:
    """The end of a script: its exit code, negative for a signal, None at the deadline; its stdout and stderr."""

    code: int | None
    out: str
    err: str


def run_script(text: str, deadline: float) -> Ran:
    """Run a script for at most `deadline` seconds; its processes end with the call."""
    with tempfile.TemporaryDirectory(prefix="attnfuzz-script-") as folder:
        path, out, err = Path(folder, "script.py"), Path(folder, "out"), Path(folder, "err")
        path.write_text(text, encoding="utf-8")
        # It finds what this process finds: a kernel's folder may have been put on sys.path by name.
        places = [os.path.abspath(each) for each in sys.path]  # noqa: PTH100 - "" is the current folder
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
        environment.pop("PYTHONSAFEPATH", None)
        with out.open("wb") as to_out, err.open("wb") as to_err:
            process = subprocess.Popen(
                [sys.executable, "-P", str(path)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=to_out,
                stderr=to_err,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(timeout=deadline)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return Ran(code, _end(out), _end(err))


def _end(path: Path) -> str:
    """The last part of a file: a kernel may print without end."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MOST_OUTPUT))
        return file.read().decode(errors="replace")
