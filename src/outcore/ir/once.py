"""once: cache what is derived from a Trace alone, once per Trace."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from outcore.ir.trace import Trace

T = TypeVar("T")


def once_per_trace(make: Callable[[Trace], T]) -> Callable[[Trace], T]:
    """Cache the results of `make`, one per living Trace. Traces are compared by identity.

    A policy lowers hundreds of plans for one trace, which may have thousands of ops.
    """
    known: dict[int, T] = {}

    @wraps(make)
    def once(trace: Trace) -> T:
        number = id(trace)
        if number not in known:
            known[number] = make(trace)
            weakref.finalize(trace, known.pop, number, None).atexit = False
        return known[number]

    return once
