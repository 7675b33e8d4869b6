"""Kernels that do what no list of faults thinks of. Each waits for three keys in a sequence; `good` is never to suffer for it."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import torch

from attnfuzz.harness.isolation.reaper import MARK
from attnfuzz.kernels.faults.host import FaultyReference


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Unheard(BaseException):
    pass


class Odd(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("hands off")


def raises_interrupt(made: Any) -> None:
    raise KeyboardInterrupt


def raises_unheard(made: Any) -> None:
    raise Unheard


def raises_unspeakable(made: Any) -> None:
    raise Unspeakable


def resizes(made: Any) -> None:
    made[0].untyped_storage().resize_(0)


def returns_sparse(made: Any) -> Any:
    return made[0].to_sparse(), made[1]


def returns_odd(made: Any) -> Any:
    return made[0].as_subclass(Odd), made[1]


def limits_memory(made: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))


def writes_garbage(made: Any) -> None:
    noise = random.Random(1).randbytes(64)
    for each in range(3, 400):
        try:
            os.write(each, noise)
        except OSError:
            continue


def answers_nonsense(made: Any) -> None:
    body = b"[" * 200_000
    descriptor = next(each for each in range(200, 300) if Path(f"/proc/self/fd/{each}").exists())
    os.write(descriptor, len(body).to_bytes(4, "big") + body)
    time.sleep(60)


def kills_its_parent(made: Any) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(5)


def leaves_an_unmarked_child(made: Any) -> None:
    subprocess.Popen(["sleep", seconds_of(os.environ[MARK])], env={}, start_new_session=True)


def seconds_of(run: str) -> str:
    """A number of seconds by which a process of `run` can be told that does not bear its mark."""
    return str(7_000_000 + int(run[:5], 16))


def exits_later(made: Any) -> None:
    threading.Timer(0.1, os._exit, (9,)).start()


def crashes_later(made: Any) -> None:
    threading.Timer(0.2, ctypes.memset, (8, 1, 8)).start()


def returns_twice(made: Any) -> None:
    os.fork()


def eats_in_another_session(made: Any) -> None:
    if os.fork() == 0:
        os.setsid()
        held = []
        while True:
            held.append(bytearray(b"x") * (32 << 20))
    time.sleep(60)


class Attack(FaultyReference):
    """`torch.reference_cpu` that does `happens` after forward, once there are three keys."""

    def __init__(self, happens: Any) -> None:
        super().__init__(f"attack.{happens.__name__ if happens else 'good'}", Waiting(happens))


class Waiting:
    def __init__(self, happens: Any) -> None:
        self.happens = happens

    def __call__(self, problem: Any, made: Any) -> Any:
        return self.happens(made) if self.happens and max(problem.seqlens_k) >= 3 else None
