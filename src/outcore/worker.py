"""worker: another process of this interpreter, which answers questions.

To begin takes it about a second. So it stays for a while, for whoever has more to ask; where its
memory would be missing, it is dismissed.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pickle
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

IDLE_SECONDS = 15.0
"""How long it is kept for another question."""

LAST_SECONDS = 1.0
"""How long one that says no more is waited for."""


class Worker:
    """One that runs `code`, which is to call `serve`; it imports from where this process does.

    Raises OSError or TypeError where it cannot be begun.
    """

    def __init__(self, code: str) -> None:
        self.surroundings = command, environment = _surroundings(code)
        with tempfile.TemporaryFile() as said:  # a pipe that nobody reads would fill up
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter, our own code
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env=environment,
            )
            self._said = os.fdopen(os.dup(said.fileno()), "rb")

    def serves(self, code: str) -> bool:
        """Whether it is still there, and one that began now would be no other."""
        return self.surroundings == _surroundings(code) and self._process.poll() is None

    def ask(self, question: object, tell: Callable[[str], None]) -> Any:
        """Its answer; what it has to say meanwhile goes to `tell`.

        Raises CalledProcessError, with what it wrote to stderr, where it gives none. After an
        error it has ended.
        """
        asking, answering = self._process.stdin, self._process.stdout
        assert asking is not None  # noqa: S101 - as it was begun
        assert answering is not None  # noqa: S101 - as above
        try:
            pickle.dump(question, asking)
            asking.flush()
            over = False
            while not over:
                over, said = pickle.load(answering)  # noqa: S301 - from our own process
                if not over:
                    tell(said)
        except Exception as error:
            if isinstance(error, EOFError):  # it is about to end, with a code of its own
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(LAST_SECONDS)
            wrote, code = self.end(), self._process.returncode
            command, _ = self.surroundings
            raise subprocess.CalledProcessError(code, command, stderr=wrote) from error
        except BaseException:
            self.end()
            raise
        return said

    def end(self) -> bytes:
        """End it, whatever it is at; gives what it wrote to stderr."""
        self._process.kill()
        self._process.communicate()
        with self._said as stream:
            stream.seek(0)
            return stream.read()


def _surroundings(code: str) -> tuple[list[str], dict[str, str]]:
    """The command for one, and its environment: it imports in the same order."""
    path = os.pathsep.join(str(entry) or str(Path.cwd()) for entry in sys.path)
    return [sys.executable, "-P", "-c", code], os.environ | {"PYTHONPATH": path}


_waiting: dict[Worker, threading.Timer] = {}
"""The one that waits for another question, if one does, and what ends it."""

_of_parent: list[Worker] = []
"""What a forked process may not ask."""

_lock = threading.Lock()


def ask(code: str, question: object, tell: Callable[[str], None]) -> Any:
    """The answer of an assistant that runs `code`: of the one that waits, if that would be alike.

    Raises as `Assistant` and `Assistant.ask`.
    """
    worker = _take(code)
    if worker is not None:
        with contextlib.suppress(subprocess.CalledProcessError):  # somebody has ended it
            return _asked(worker, question, tell)
    return _asked(Worker(code), question, tell)


def ask_once(code: str, question: object, tell: Callable[[str], None]) -> Any:
    """The answer of a new one, which ends then. Raises as `ask`."""
    worker = Worker(code)
    answer = worker.ask(question, tell)
    worker.end()
    return answer


def _asked(worker: Worker, question: object, tell: Callable[[str], None]) -> Any:
    answer = worker.ask(question, tell)
    timer = threading.Timer(IDLE_SECONDS, _end, [worker])
    timer.daemon, timer.name = True, "outcore-worker"
    with _lock:
        others = list(_waiting)
        _waiting[worker] = timer
    timer.start()
    for each in others:
        _end(each)
    return answer


def _take(code: str) -> Worker | None:
    """The one that waits, if it would do."""
    with _lock:
        found, timer = _waiting.popitem() if _waiting else (None, None)
    if found is None or timer is None:
        return None
    timer.cancel()
    if found.serves(code):
        return found
    found.end()
    return None


def _end(worker: Worker) -> None:
    """End it, unless somebody has taken it."""
    with _lock:
        timer = _waiting.pop(worker, None)
    if timer is not None:
        timer.cancel()
        worker.end()


@atexit.register
def dismiss() -> None:
    """End the one that waits, if one does."""
    for worker in list(_waiting):
        _end(worker)


def _forget() -> None:
    """In a forked process: what waits is the parent's, and who held the lock is not here."""
    global _lock  # noqa: PLW0603 - the module is the state
    _lock = threading.Lock()
    _of_parent.extend(_waiting)
    _waiting.clear()


os.register_at_fork(after_in_child=_forget)


class _Telling(logging.Handler):
    """Sends what is logged to whoever asked."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__()
        self.stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        _send(self.stream, self.format(record), over=False)


def serve(answer: Callable[[Any], object], told: logging.Logger) -> None:
    """Answer what comes in, for as long as there is somebody to ask.

    `told`: what is logged there goes to who asked, at once.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else goes there
    told.addHandler(_Telling(answers))
    told.setLevel(logging.INFO)
    questions = sys.stdin.buffer
    # A forked process of who asks holds the pipe open, too.
    while select.select([questions], [], [], 2 * IDLE_SECONDS)[0]:
        try:
            question = pickle.load(questions)  # noqa: S301 - from the process that asks
        except EOFError:
            return
        _send(answers, answer(question), over=True)


def _send(stream: IO[bytes], what: object, *, over: bool) -> None:
    pickle.dump((over, what), stream)
    stream.flush()
