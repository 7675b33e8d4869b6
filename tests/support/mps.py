"""A stand-in for CUDA's MPS: a program that makes its pipe, ends when it is told to, and keeps what it was told."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from attnfuzz.harness.isolation.outcomes import Reply, Task
from attnfuzz.harness.isolation.sharing import CONTROL, VARIABLES
from attnfuzz.harness.isolation.supervisor import Supervisor
from attnfuzz.kernels.faults.host import FaultyReference
from attnfuzz.kernels.problem import Problem

_PROGRAM = """#!/bin/sh
here=$(dirname "$0")
if [ "$1" = -f ]; then
    echo "start ${CUDA_VISIBLE_DEVICES-all}" >> "$here/calls"
    echo $$ > "$here/pid"
    touch "$CUDA_MPS_PIPE_DIRECTORY/control"
    while [ -e "$CUDA_MPS_PIPE_DIRECTORY/control" ]; do sleep 0.05; done
elif read line; then
    # Nothing came where Ctrl-C ended the one who began to say it.
    echo "$line" >> "$here/calls"
    rm -f "$CUDA_MPS_PIPE_DIRECTORY/control"
fi
"""
START, QUIT = "start all", "quit -t 1"
DEADLINES = {"kernel": 20.0, "start": 20.0, "end": 20.0}


class FakeServer:
    """The program, first on the PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, program: str = _PROGRAM) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        (folder / CONTROL).write_text(program)
        (folder / CONTROL).chmod(0o700)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    @property
    def calls(self) -> list[str]:
        """What it was told, in order."""
        calls = self._folder / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    @property
    def pid(self) -> int:
        """The number of the process that was started last."""
        return int((self._folder / "pid").read_text())


def _die_where_shared(_: Problem, __: Any) -> None:
    if VARIABLES[0] in os.environ:
        os._exit(3)


DIES_WHERE_SHARED = FaultyReference("test.dies_where_shared", _die_where_shared)
"""Ends a process that shares the GPU, and is right in others."""
DIES_WHERE_SHARED.files = (__file__,)


def _wait_for_three_keys(problem: Problem, _: Any) -> None:
    if max(problem.seqlens_k) == 3:
        time.sleep(1.0)


SLOW_AT_THREE_KEYS = FaultyReference("test.slow_at_three_keys", _wait_for_three_keys)
"""Takes a second where there are three keys, and no time else."""
SLOW_AT_THREE_KEYS.files = (__file__,)


def task(name: str, kernel: float = 20.0, **payload: object) -> Task:
    return Task(f"support.tasks:{name}", payload, {**DEADLINES, "kernel": kernel})


def mps_variables(supervisor: Supervisor) -> dict[str, str]:
    reply = supervisor.run(task("variables"))
    assert isinstance(reply, Reply)
    return {name: value for name, value in reply.result.items() if name in VARIABLES}
