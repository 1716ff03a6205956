"""Whether calls end, here or in a forked process, and threads."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable

import pytest

from outcore.execute.link import Barrier, CopyJob, Spill
from outcore.gauges import OWN_THREADS

PATIENCE_SECONDS = 20
"""A call that takes longer counts as one that never ends."""


def ends(call: Callable[[], object]) -> bool:
    """Whether `call` returns, without an error."""
    returned: list[object] = []
    thread = threading.Thread(target=lambda: returned.append(call()), daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    return bool(returned)


def ends_in_a_fork(call: Callable[[], object]) -> bool:
    """As `ends`, in a process forked from this one."""
    with warnings.catch_warnings():
        # Python 3.12 warns of forking with threads, which is what this is about.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if ends(call) else 1
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def workers() -> set[threading.Thread]:
    """The threads that copy for drivers. Those of earlier tests may end at any moment."""
    return {thread for thread in threading.enumerate() if thread.name.startswith(OWN_THREADS)}


def workers_end(before: set[threading.Thread]) -> bool:
    """Whether all `workers` end that were not there `before`.

    A driver that the garbage collector closes on one of its own threads cannot wait for it.
    """
    newer = workers() - before
    for thread in newer:
        thread.join(PATIENCE_SECONDS)
    return not any(thread.is_alive() for thread in newer)


def closes_before_each_job(spill: Spill, name: str, patch: pytest.MonkeyPatch) -> None:
    """Close `spill` just before anything is put into its queue `name`."""
    queue = getattr(spill, name)

    class Closing:
        def put(self, job: CopyJob | Barrier) -> None:
            spill.close()
            queue.put(job)

    patch.setattr(spill, name, Closing())
