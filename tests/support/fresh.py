"""Python texts run in fresh processes: forked from one that has imported torch alone, so that each takes a tenth of a second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from attnfuzz.harness.repro.script.trying import Ran

_PROGRAM = """
import json, os, signal, sys, time, traceback
import torch
import torch.nn.functional
import torch._inductor.config  # by use_deterministic_algorithms, in seconds

torch.zeros(1).sum()
assert not any(name.startswith("attnfuzz") for name in sys.modules)

for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(asked["folder"] + "/" + name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.path[:0] = asked["places"]
        code = 0
        try:
            exec(compile(asked["text"], "script.py", "exec"), {"__name__": "__main__"})
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
            code = 1
        harness = [name for name in sys.modules if name.startswith("attnfuzz.harness")]
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(99 if harness else code)
    end = time.monotonic() + asked["deadline"]
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            status = None
            break
        time.sleep(0.01)
    print(json.dumps(None if status is None else os.waitstatus_to_exitcode(status)), flush=True)
"""


class Fresh:
    """Runs texts one after the other. Exit code 99: the text imported the harness."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # No pool of threads survives a fork.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(self, text: str, deadline: float = 60.0, *places: Path) -> Ran:
        """Run a text with `places` in front of sys.path."""
        pipes = self._process
        assert pipes.stdin is not None
        assert pipes.stdout is not None
        asked: dict[str, Any] = {"text": text, "deadline": deadline, "folder": str(self._folder), "places": [*map(str, places)]}
        pipes.stdin.write(json.dumps(asked) + "\n")
        pipes.stdin.flush()
        code = json.loads(pipes.stdout.readline())
        return Ran(code, *((self._folder / name).read_text(errors="replace") for name in ("out", "err")))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
