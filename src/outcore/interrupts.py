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
from functools import partial
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
        here = threading.current_thread() is threading.main_thread()
        if error is not None and here and _is_interrupt(error):
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
            raise came[0]  # an error of the body is its context


def _is_interrupt(error: BaseException) -> bool:
    ran = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    return isinstance(error, KeyboardInterrupt) or not ran.isdisjoint(_code_of_handlers())


def _code_of_handlers() -> Iterator[CodeType]:
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        while isinstance(handler, partial):
            handler = handler.func
        of_class = (vars(kind).get("__call__") for kind in type(handler).__mro__)
        for each in (handler, *of_class):
            code = getattr(each, "__code__", None)
            if code is not None:
                yield code
