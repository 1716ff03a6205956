"""Signal handlers run after work in which what they raise would be lost."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from types import FrameType

import pytest

from outcore.signals_held import signals_held


class Cycle:
    """Garbage for the collector alone."""

    def __init__(self) -> None:
        self.itself = self


class Late(Exception):  # noqa: N818 - it is no error
    """Raised by a handler."""


def raise_late(number: int, frame: FrameType | None) -> None:
    raise Late


@pytest.fixture
def handlers() -> Iterator[None]:
    numbers = signal.SIGUSR1, signal.SIGUSR2
    before = {number: signal.signal(number, raise_late) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_what_is_raised_in_a_callback_is_not_lost() -> None:
    garbage = Cycle()
    seen = []

    def interrupted(_: object) -> None:
        signal.raise_signal(signal.SIGUSR1)
        seen.append("all of it ran")

    kept = weakref.ref(garbage, interrupted)
    del garbage
    with pytest.raises(Late), signals_held():
        gc.collect()
    assert kept() is None
    assert seen == ["all of it ran"]
    assert signal.getsignal(signal.SIGUSR1) is raise_late


@pytest.mark.usefixtures("handlers")
def test_every_handler_runs() -> None:
    found: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: found.append(number))

    def both_come() -> None:
        with signals_held():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR2)
            assert not found

    with pytest.raises(Late):
        both_come()
    assert found == [signal.SIGUSR2]


@pytest.mark.usefixtures("handlers")
def test_handlers_are_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), signals_held():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGUSR1) is raise_late


def test_nothing_changes_on_other_threads() -> None:
    seen = []

    def look() -> None:
        with signals_held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
