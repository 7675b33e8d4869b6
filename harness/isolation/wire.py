"""Shared by parent and child: messages over a socket, and a page of memory where the child writes its stage.

Standard library only: a child imports this before anything else.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import select
import struct
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["STAGES", "Board", "connect", "receive", "send", "wait"]

STAGES = ("start", "compile", "inputs", "kernel", "oracle", "judge", "end")
_HEAD = struct.Struct("qB")
_TIME = struct.Struct("d")
_SIZE = 4096
_ITEM = struct.Struct("q")
_ITEM_AT = 16
_TIMES_AT = 64
_LONGEST = 64 << 20


class Board:
    """A page of memory that outlives its writer: task, stage and its start time (CLOCK_MONOTONIC, the same in all processes).

    The time of a stage is written before the stage itself, so that a reader never sees a stage with the time of another.
    """

    def __init__(self, descriptor: int) -> None:
        self._page = mmap.mmap(descriptor, _SIZE)

    @staticmethod
    def create() -> int:
        """Create a page and return its descriptor."""
        descriptor = os.memfd_create("attnfuzz-board", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _SIZE)
        return descriptor

    def begin(self, task: int) -> None:
        """Write that `task` has started."""
        _TIME.pack_into(self._page, _TIMES_AT, time.monotonic())
        _ITEM.pack_into(self._page, _ITEM_AT, 0)
        _HEAD.pack_into(self._page, 0, task, 0)

    def enter(self, stage: str, item: int | None = None) -> None:
        """Write that the task enters `stage`, with number `item` of what it works on, if that is another."""
        index = STAGES.index(stage)
        if item is not None:
            _ITEM.pack_into(self._page, _ITEM_AT, item)
        _TIME.pack_into(self._page, _TIMES_AT + 8 * index, time.monotonic())
        self._page[8] = index

    @property
    def item(self) -> int:
        """Return the number of what the task works on; any number where a kernel has overwritten the page."""
        return int(_ITEM.unpack_from(self._page, _ITEM_AT)[0])

    def read(self, task: int) -> tuple[str, float] | None:
        """Return (stage, start time) of `task`; None if it has not started yet.

        A kernel may have overwritten the page: then the stage is "kernel", and the time may be NaN or in the future.
        """
        current, index = _HEAD.unpack_from(self._page, 0)
        if not 0 <= current <= task or index >= len(STAGES):
            return "kernel", math.nan
        if current != task:
            return None
        return STAGES[index], _TIME.unpack_from(self._page, _TIMES_AT + 8 * index)[0]

    def close(self) -> None:
        """Unmap the page."""
        self._page.close()


def wait(descriptors: Iterable[int], seconds: float) -> set[int]:
    """Wait up to `seconds` and return those of `descriptors` that can be read or are at their end."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(math.ceil(seconds * 1000))}


def connect(descriptor: int) -> Connection:
    """Return a connection over one end of a socket pair."""
    return Connection(descriptor)


def send(connection: Connection, message: dict[str, Any]) -> None:
    """Send one message.

    Raises:
        OSError: the other side is gone.
    """
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """Receive the next message.

    Raises:
        EOFError, OSError: the other side is gone.
        ValueError, TypeError: the content is not a message.
    """
    return dict(json.loads(connection.recv_bytes(_LONGEST)))
