"""tracing: patch torch while a step is traced for outcore."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from outcore.capture.compiler.layouts import layouts
from outcore.capture.compiler.undecomposed import whole_ops

_patching, _patches = threading.Lock(), ExitStack()
_within: list[threading.Thread] = []
"""Threads that need torch patched: the first one to enter patches it, the last one to leave undoes
it."""


@contextmanager
def as_kernels() -> Iterator[None]:
    """Let torch trace the ops whose kernels will run, with the layouts that these will return."""
    with _patching:
        if not _within:
            with ExitStack() as entered:  # both, or none
                entered.enter_context(layouts())
                entered.enter_context(whole_ops())
                _patches.push(entered.pop_all())
        _within.append(threading.current_thread())
    try:
        yield
    finally:
        with _patching:
            _within.remove(threading.current_thread())
            if not _within:
                _patches.close()
