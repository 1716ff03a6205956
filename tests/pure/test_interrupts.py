"""What signal handlers raise while garbage is collected is not lost."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType

import pytest

from outcore.interrupts import keeping_interrupts


class Cycle:
    """Garbage for the collector alone."""

    def __init__(self) -> None:
        self.itself = self


class Late(Exception):  # noqa: N818 - it is no error
    """Raised by a handler."""


def raise_late(number: int, frame: FrameType | None) -> None:
    raise Late


@pytest.fixture
def collecting() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Collects a cycle, and calls a function in the callback of a weak reference to it."""
    handlers = {signal.SIGUSR1: raise_late, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    collects = gc.isenabled()
    gc.disable()

    def collect(then: Callable[[], None]) -> None:
        garbage = Cycle()
        kept = weakref.ref(garbage, lambda _: then())
        del garbage
        with keeping_interrupts():
            gc.collect()
        assert kept() is None

    yield collect
    for number, handler in before.items():
        signal.signal(number, handler)
    if collects:
        gc.enable()


class Handler:
    """A handler that is an object."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise Late


def named(name: str, number: int, frame: FrameType | None) -> None:
    raise Late(name)


@pytest.mark.parametrize("handler", [Handler(), partial(named, "late")])
def test_a_handler_of_any_kind(collecting, handler) -> None:
    signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(Late):
        collecting(interrupt)


def test_an_interrupt_is_not_lost_if_the_body_fails(collecting) -> None:
    garbage = Cycle()
    kept = weakref.ref(garbage, lambda _: interrupt())
    del garbage
    with pytest.raises(Late) as caught, keeping_interrupts():  # noqa: PT012 - the body fails, too
        gc.collect()
        raise RuntimeError
    assert kept() is None
    assert isinstance(caught.value.__context__, RuntimeError)


def test_what_another_thread_says_is_not_raised_here(capsys) -> None:
    def collect() -> None:
        garbage = Cycle()
        kept = weakref.ref(garbage, lambda _: raise_late(0, None))
        del garbage
        gc.collect()
        assert kept() is None

    before = signal.signal(signal.SIGUSR1, raise_late)
    said: list[object] = []
    hook, sys.unraisablehook = sys.unraisablehook, said.append
    try:
        with keeping_interrupts():
            thread = threading.Thread(target=collect)
            thread.start()
            thread.join()
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGUSR1, before)
    assert len(said) == 1


def interrupt() -> None:
    signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize(
    ("then", "kind"),
    [(interrupt, Late), (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt)],
)
def test_an_interrupt_is_raised_at_the_end(
    collecting: Callable[[Callable[[], None]], None],
    then: Callable[[], None],
    kind: type[BaseException],
) -> None:
    hook = sys.unraisablehook
    with pytest.raises(kind):
        collecting(then)
    assert sys.unraisablehook is hook


def test_other_errors_go_where_they_went(
    collecting: Callable[[Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: found.append(told.exc_type))
    collecting(lambda: {}["missing"])
    assert found == [KeyError]


def test_an_error_within_is_raised() -> None:
    hook = sys.unraisablehook
    with pytest.raises(ZeroDivisionError), keeping_interrupts():
        raise ZeroDivisionError
    assert sys.unraisablehook is hook


def test_nothing_changes_on_other_threads() -> None:
    hook, seen = sys.unraisablehook, []

    def look() -> None:
        with keeping_interrupts():
            seen.append(sys.unraisablehook)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [hook]
