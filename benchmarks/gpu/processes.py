"""processes: Trainers in separate processes. One has always loaded its libraries already.

To load them takes seconds, in which the device would have nothing to do.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

from benchmarks.gpu.trainer import Trainer, unmade
from benchmarks.gpu.workloads import Workload
from benchmarks.kit.benchmark import Patience
from benchmarks.kit.modes import Mode
from benchmarks.kit.worker import Worker, WorkerError

LONGEST_ANSWER = 180.0
"""Seconds after which a process counts as hanging. To warm up takes longest, if plans are left."""


class Process(Worker[Trainer]):
    """A process for a Trainer, for as long as `patience` has time."""

    def __init__(self) -> None:
        self.patience = Patience()
        super().__init__(unmade)

    def answer_seconds(self) -> float:
        """The longest that any request may take."""
        return min(LONGEST_ANSWER, self.patience.left_seconds())

    def lives(self) -> bool:
        """Whether the process has not ended."""
        return self._process.is_alive()


_spares: list[Future[Process]] = []
"""The process that is next, if it was begun."""


def trainer(
    patience: Patience,
    workload: Workload,
    mode: Mode,
    device: str,
    cap_bytes: int | None,
    *,
    offloads_state: bool,
) -> Process:
    """Make a Trainer in the process that is ready, and begin another one. Raises as Worker."""
    process = _taken(patience)
    try:
        if not process.lives():  # idle processes are what the system ends first
            process.close()
            process = _taken(patience)
        process.ask(Trainer.__init__, workload, mode, device, cap_bytes, offloads_state)
    except BaseException:
        process.close()
        raise
    return process


def await_spare(patience: Patience) -> None:
    """Wait until the next process has loaded its libraries: nothing is timed meanwhile."""
    if _spares:
        wait(_spares, timeout=min(LONGEST_ANSWER, patience.left_seconds()))


def close_spares() -> None:
    """End the process that nobody took."""
    while _spares:
        with suppress(Exception):
            _spares.pop().result().close()


def _taken(patience: Patience) -> Process:
    if not _spares:
        _spares.append(_begun())
    await_spare(patience)
    current = _spares[0]
    if not current.done():
        raise WorkerError("Timeout", "no process was ready in time")
    _spares[:] = [_begun()]
    process = current.result()
    process.patience = patience
    return process


def _begun() -> Future[Process]:
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(Process)
    finally:
        pool.shutdown(wait=False)
