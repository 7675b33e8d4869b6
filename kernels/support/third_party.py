"""Code of third parties in this process: whatever it raises is an error to catch, and what it prints goes to stderr."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

__all__ = ["ThirdPartyError", "described", "guarded", "stdout_to_stderr"]

_T = TypeVar("_T")
_LONGEST = 2000


class ThirdPartyError(Exception):
    """Error for anything that third-party code raised: `error`, which need not be an Exception (SystemExit, pytest.exit)."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(described(error))
        self.error = error


def guarded(call: Callable[[], _T]) -> _T:
    """Return what `call` does, which runs third-party code; its output goes to stderr.

    Raises:
        ThirdPartyError: it raised something, be it SystemExit or a KeyboardInterrupt of its own.
        KeyboardInterrupt: the user interrupted it, whatever it made of that.
    """
    with _interrupts() as interrupts:
        try:
            with stdout_to_stderr():
                result = call()
        except BaseException as error:
            if not interrupts:
                raise ThirdPartyError(error) from error
        else:
            if not interrupts:
                return result
    raise KeyboardInterrupt


def described(error: BaseException) -> str:
    """Return type and message of `error`, at most 2,000 characters; its message may raise."""
    try:
        message = str(error)
    except BaseException as broken:  # the error's own code
        message = f"(its message cannot be made: {type(broken).__name__})"
    return f"{type(error).__name__}: {message}"[:_LONGEST].strip(": ")


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Yield the signals that interrupted the block: a KeyboardInterrupt without one is the third party's own."""
    interrupts: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = {each: handler for each in (signal.SIGINT, signal.SIGTERM) if callable(handler := signal.getsignal(each))}

    def note(number: int, frame: FrameType | None) -> None:
        try:
            before[signal.Signals(number)](number, frame)
        except KeyboardInterrupt:
            interrupts.append(number)
            raise

    try:
        for each in before:
            signal.signal(each, note)
        yield interrupts
    finally:
        # Also where the third party has installed handlers of its own: Ctrl-C must end a run.
        for each, handler in before.items():
            signal.signal(each, handler)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what the block prints to stderr, from Python and from C, so that stdout holds nothing but a command's result."""
    stdout = sys.stdout
    _flush(stdout, sys.__stdout__)
    with contextlib.ExitStack() as stack:
        try:
            kept = os.dup(1)
        except OSError:  # it is closed
            pass
        else:
            stack.callback(_put_back, kept)
            _to_stderr()
        sys.stdout = sys.stderr
        try:
            yield
        finally:
            replaced, sys.stdout = sys.stdout, stdout
            # What Python and C still hold back must go where it was meant to before the descriptor is put back.
            _flush(replaced, sys.__stdout__)
            ctypes.CDLL(None).fflush(None)


def _to_stderr() -> None:
    try:
        os.dup2(2, 1)
    except OSError:  # it is closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


def _put_back(kept: int) -> None:
    os.dup2(kept, 1)
    os.close(kept)


def _flush(*streams: object) -> None:
    for each in streams:
        with contextlib.suppress(Exception):
            each.flush()  # type: ignore[attr-defined]
