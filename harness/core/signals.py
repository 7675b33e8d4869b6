"""Ctrl-C and SIGTERM: put off where steps belong together, and heard once, so that a second one spoils nothing that ends."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

__all__ = ["drop_interrupts", "ending", "interrupted_once", "uninterrupted"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_UNHEARD = 5.0
"""Seconds after which an interrupt counts as lost (in a callback, say) if nothing has called `ending` since."""


class _Once:
    """Handlers of SIGINT and SIGTERM that raise once.

    Args:
        before: the handlers that it stands for.
    """

    def __init__(self, before: dict[signal.Signals, Callable[[int, FrameType | None], Any]]) -> None:
        self.before = before
        self.ending = False
        self._raised: float | None = None

    @property
    def raised(self) -> bool:
        """Whether a signal has interrupted this process."""
        return self._raised is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal as it was handled before, unless what it would end is ending already."""
        now = time.monotonic()
        if self.ending or (self._raised is not None and now - self._raised < _UNHEARD):
            return
        self._raised = now
        self.before[signal.Signals(number)](number, frame)
        self._raised = None  # that handler only took note of it


class _PutOff:
    """Handlers of SIGINT and SIGTERM that note a signal while a block runs, and pass it on once it is over.

    Args:
        before: the handlers that it stands for.
    """

    def __init__(self, before: dict[signal.Signals, Callable[[int, FrameType | None], Any]]) -> None:
        self.before = before
        self.waiting: list[tuple[int, FrameType | None]] = []
        self.over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.over:  # it came while the handlers were put back
            self.before[signal.Signals(number)](number, frame)
        else:
            self.waiting.append((number, frame))


def _original(number: signal.Signals) -> Any:
    """The handler of a signal, behind those of blocks that an interrupt ended before they had put it back."""
    handler: Any = signal.getsignal(number)
    while isinstance(handler, _PutOff) and handler.over:
        handler = handler.before[number]
    return handler


_current: _Once | None = None
"""Of the outermost `interrupted_once` block."""


@contextlib.contextmanager
def interrupted_once() -> Iterator[None]:
    """Have SIGINT and SIGTERM interrupt the block once; those that follow are dropped until the outermost such block has ended.

    One that nothing has answered by `ending` within 5 s counts as lost, and the next is heard. Outside the main thread, and for
    signals that are ignored or end the process, nothing changes.
    """
    global _current
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if _current is not None:
        before = _current.ending
        try:
            yield
        finally:
            if not _current.raised:
                # It has ended by itself: what follows it can be interrupted.
                _current.ending = before
        return
    handlers = {each: handler for each in _SIGNALS if callable(handler := signal.getsignal(each))}
    _current = _Once(handlers)
    try:
        for each in handlers:
            signal.signal(each, _current)
        yield
    finally:
        for each, handler in handlers.items():
            if _original(each) is _current:  # else the block has set another for what follows
                signal.signal(each, handler)
        _current = None


def ending() -> None:
    """Drop SIGINT and SIGTERM until the `interrupted_once` block has ended: it is ending, whatever comes now.

    Call it within the `try` whose KeyboardInterrupt is caught, as its last step, and in that `except`.
    """
    if _current is not None and threading.current_thread() is threading.main_thread():
        _current.ending = True


def drop_interrupts() -> Callable[[], None]:
    """Drop SIGINT from now on, beyond any block: only a summary is still to be printed. Returns what restores it as it was."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    handler = signal.getsignal(signal.SIGINT)
    before = handler.before[signal.SIGINT] if isinstance(handler, _Once) else handler
    # Not SIG_IGN, which processes that are started from here would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)

    def restore() -> None:
        signal.signal(signal.SIGINT, before)

    return restore


@contextlib.contextmanager
def uninterrupted(*, drop: bool = False) -> Iterator[None]:
    """Put SIGINT and SIGTERM off until the block has ended, in the main thread, which is the one that they interrupt.

    Args:
        drop: forget them then: what they would end has ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    put_off = _PutOff({each: handler for each in _SIGNALS if callable(handler := signal.getsignal(each))})
    try:
        for each in put_off.before:
            signal.signal(each, put_off)
        yield
    finally:
        put_off.over = True
        for each, handler in put_off.before.items():
            signal.signal(each, handler)
        if put_off.waiting and not drop:
            number, frame = put_off.waiting[0]
            put_off.before[signal.Signals(number)](number, frame)
