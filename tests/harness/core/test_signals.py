"""Signals that are put off: they come after the block, once, and other blocks and threads are as before."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from attnfuzz.harness.core import signals
from attnfuzz.harness.core.signals import interrupted_once, uninterrupted


@pytest.fixture(autouse=True)
def _like_the_command_line() -> Iterator[None]:
    """SIGTERM interrupts as Ctrl-C does, and both are handled afterwards as they were."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    after = {each: signal.getsignal(each) for each in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert set(after.values()) == {signal.default_int_handler}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end_of_the_outermost_block(number: signal.Signals) -> None:
    steps = []

    @uninterrupted()
    def inner() -> None:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        steps.append("inner")

    @uninterrupted()
    def outer() -> None:
        inner()
        steps.append("outer")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert steps == ["inner", "outer"]


def test_a_signal_is_not_lost_where_the_block_fails() -> None:
    @uninterrupted()
    def block() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise OSError("planted")

    with pytest.raises(KeyboardInterrupt) as raised:
        block()
    assert isinstance(raised.value.__context__, OSError)


def test_a_signal_is_forgotten_where_that_is_asked_for() -> None:
    with uninterrupted(drop=True):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_block_without_a_signal_passes_on_what_it_raises() -> None:
    with pytest.raises(OSError, match="planted"), uninterrupted():
        raise OSError("planted")


def test_another_thread_is_left_alone() -> None:
    """Only the main thread can set handlers."""
    ended = []

    def block() -> None:
        with uninterrupted():
            ended.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert ended == [signal.default_int_handler]


def test_an_interrupt_while_handlers_are_put_back_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the loop that puts them back; the block around it does what is left."""
    before = {each: signal.getsignal(each) for each in signals._SIGNALS}
    put, pressed = signal.signal, []

    def pressing(number: signal.Signals, handler: Any) -> Any:
        if isinstance(handler, signals._Once) and not pressed and isinstance(signal.getsignal(number), signals._PutOff):
            pressed.append(number)
            signal.raise_signal(signal.SIGINT)
        return put(number, handler)

    @interrupted_once()
    def block() -> None:
        monkeypatch.setattr(signal, "signal", pressing)
        with uninterrupted():
            pass

    with pytest.raises(KeyboardInterrupt):
        block()
    assert pressed
    assert {each: signal.getsignal(each) for each in signals._SIGNALS} == before
