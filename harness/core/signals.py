"""Ctrl-C and SIGTERM, put off where steps belong together."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["uninterrupted"]


@contextlib.contextmanager
def uninterrupted(*, drop: bool = False) -> Iterator[None]:
    """Put SIGINT and SIGTERM off until the block has ended, in the main thread, which is the one that they interrupt.

    Args:
        drop: forget them then: what they would end has ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: handler for each in (signal.SIGINT, signal.SIGTERM) if callable(handler := signal.getsignal(each))}
    waiting: list[tuple[int, FrameType | None]] = []
    over = False

    def put_off(number: int, frame: FrameType | None) -> None:
        if over:  # it came while the handlers were put back
            before[signal.Signals(number)](number, frame)
        else:
            waiting.append((number, frame))

    try:
        for each in before:
            signal.signal(each, put_off)
        yield
    finally:
        over = True
        for each, handler in before.items():
            signal.signal(each, handler)
        if waiting and not drop:
            number, frame = waiting[0]
            before[signal.Signals(number)](number, frame)
