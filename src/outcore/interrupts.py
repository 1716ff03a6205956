"""interrupts: raise what signal handlers raise in callbacks, which Python prints and drops.

Python runs handlers between two instructions of the main thread, and so within finalizers and
callbacks of weak references. An interrupt that comes while those run would be lost.
"""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType


@contextmanager
def keeping_interrupts() -> Iterator[None]:
    """Raise the first interrupt of this context at its end, if it came in a callback.

    An interrupt is a KeyboardInterrupt, or what a handler written in Python raises. On other
    threads than the main one, which run no handlers, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, came = sys.unraisablehook, list[BaseException]()

    def note(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        if error is not None and _is_interrupt(error):
            came.append(error)
        else:
            before(unraisable)

    sys.unraisablehook = note
    try:
        yield
    finally:
        if sys.unraisablehook is note:
            sys.unraisablehook = before
    if came:
        raise came[0]


def _is_interrupt(error: BaseException) -> bool:
    ran = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    return isinstance(error, KeyboardInterrupt) or not ran.isdisjoint(_code_of_handlers())


def _code_of_handlers() -> Iterator[CodeType]:
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        code = getattr(getattr(handler, "__func__", handler), "__code__", None)
        if code is not None:
            yield code
