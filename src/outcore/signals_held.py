"""signals_held: hold back signal handlers during work that would swallow what they raise.

Python runs handlers between two instructions of the main thread, and so within finalizers and
callbacks of weak references. What is raised there is printed and dropped: an interrupt is lost.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType


@contextmanager
def signals_held() -> Iterator[None]:
    """On the main thread, run handlers of signals that come meanwhile at the end.

    What they raise is raised from there. On other threads, which run no handlers, this does
    nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with ExitStack() as later, ExitStack() as afterwards:  # both go on if a handler raises
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                afterwards.callback(signal.signal, number, handler)
                signal.signal(number, _holding(handler, later))
        yield


def _holding(
    handler: Callable[[int, FrameType | None], object], later: ExitStack
) -> Callable[[int, FrameType | None], None]:
    """A handler that leaves a signal to `handler`, to be run `later`."""

    def hold(number: int, frame: FrameType | None) -> None:
        later.callback(handler, number, frame)

    return hold
