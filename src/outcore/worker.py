"""worker: answer questions in another process of this interpreter, kept for a while.

Starting one takes about a second. So it stays for a while after an answer, for further questions,
and it can be started before there is one. If its memory is needed elsewhere, it can be dismissed.
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
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

IDLE_SECONDS = 15.0
"""How long a worker is kept for another question."""

PREPARING_SECONDS = 120.0
"""How long a question waits for the worker that is prepared."""

ORPHAN_SECONDS = 30.0
"""How often a worker that waits looks whether the process that asks is still there."""

TORCH = ("TORCH", "_TORCH", "TRITON", "KINETO")
"""How the names of variables begin that torch sets as it compiles, and no worker reads."""

LAST_SECONDS = 1.0
"""How long to wait for a worker that has stopped answering to exit by itself."""

Hear: TypeAlias = Callable[[str], object]
"""Gets what a worker logs while it works on a question."""


class Worker:
    """A process that runs `code`, which must call `serve`. It imports from where this process does.

    Raises OSError or TypeError if it cannot be started.
    """

    def __init__(self, code: str) -> None:
        self.surroundings, environment = _surroundings(code)
        self.taken = 0
        """How often it was taken for another question."""
        with tempfile.TemporaryFile() as said:  # a pipe that nothing reads would fill up
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter, our own code
                self.surroundings.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env=environment,
            )
            self._said = os.fdopen(os.dup(said.fileno()), "rb")

    def serves(self, code: str) -> bool:
        """Whether it is alive, and a worker started now for `code` would be the same."""
        surroundings, _ = _surroundings(code)
        return self.surroundings == surroundings and self._process.poll() is None

    def ask(self, question: object, tell: Hear) -> Any:
        """Return its answer; what it logs meanwhile goes to `tell`.

        Raises CalledProcessError, with its stderr, if it gives no answer. After an error the worker
        has ended.
        """
        asking, answering = self._process.stdin, self._process.stdout
        assert asking is not None  # noqa: S101 - it was started with pipes
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
            if isinstance(error, EOFError):  # it is about to exit: wait for its own exit code
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(LAST_SECONDS)
            wrote, code = self.end(), self._process.returncode
            command = self.surroundings.command
            raise subprocess.CalledProcessError(code, command, stderr=wrote) from error
        except BaseException:
            self.end()
            raise
        return said

    def kill(self) -> None:
        """Kill it, whatever it is doing; who asks then gets no answer."""
        self._process.kill()

    def end(self) -> bytes:
        """Kill it, whatever it is doing; return what it wrote to stderr."""
        self._process.kill()
        self._process.communicate()
        with self._said as stream:
            stream.seek(0)
            return stream.read()


class _Surroundings(NamedTuple):
    """What a worker depends on: its command, and the environment without what torch sets."""

    command: list[str]
    environment: dict[str, str]


def _surroundings(code: str) -> tuple[_Surroundings, dict[str, str]]:
    """Return a worker's surroundings and its whole environment.

    It imports from the same places as this process, in the same order. An interrupt from the
    terminal, which all processes there get, does not end it: who asks ends it, if need be.
    """
    path = ascii([str(entry) or str(Path.cwd()) for entry in sys.path])
    before = "import signal, sys\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    command = [sys.executable, "-P", "-c", f"{before}sys.path[:] = {path}\n{code}"]
    environment = dict(os.environ)
    own = {name: value for name, value in environment.items() if not name.startswith(TORCH)}
    return _Surroundings(command, own), environment


_waiting: dict[Worker, threading.Timer] = {}
"""The worker that waits for another question, if there is one, and the timer that ends it."""

_of_parent: list[Worker] = []
"""Workers of the parent process, which a forked process must not use."""

_preparing: tuple[threading.Thread, _Crew] | None = None
"""The thread that has a worker prepared, and the crew which consists of that worker."""

_lock = threading.Lock()


def prepare(code: str, question: object) -> None:
    """Have a worker answer a first question in the background. Later questions wait for that.

    Does nothing while another one is prepared. If it fails, later questions are the first.
    """
    global _preparing  # noqa: PLW0603 - the module is the state

    def asked() -> None:
        with contextlib.suppress(Exception):
            ask(code, question, lambda _: None, crew.add)

    crew = _Crew(lambda _: None)
    thread = threading.Thread(target=asked, name="outcore-preparing", daemon=True)
    with _lock:
        if _preparing is not None and _preparing[0].is_alive():
            return
        _preparing = None
        with contextlib.suppress(RuntimeError):  # there are too many threads
            thread.start()
            _preparing = thread, crew


def _await_prepared() -> None:
    """Wait for the worker that is prepared, if there is one. End it if it takes too long."""
    global _preparing  # noqa: PLW0603 - the module is the state
    preparing = _preparing
    if preparing is None or preparing[0] is threading.current_thread():
        return
    thread, crew = preparing
    thread.join(PREPARING_SECONDS)
    if thread.is_alive():
        crew.dismiss()
    with _lock:
        if _preparing is preparing:
            _preparing = None


def ask(
    code: str, question: object, tell: Hear, found: Callable[[Worker], object] = lambda _: None
) -> Any:
    """Return the answer of a worker that runs `code`: the waiting one if it would be the same.

    Waits for the worker that is prepared, if there is one. `found` is called with the worker before
    it is asked. Raises as `Worker` and `Worker.ask`.
    """
    worker = _take(code)
    if worker is not None:
        found(worker)
        with contextlib.suppress(subprocess.CalledProcessError):  # it was ended from outside
            return _asked(worker, question, tell)
    worker = Worker(code)
    found(worker)
    return _asked(worker, question, tell)


def ask_once(
    code: str, question: object, tell: Hear, found: Callable[[Worker], object] = lambda _: None
) -> Any:
    """Return the answer of a new worker, which then ends. `found` and errors are as in `ask`."""
    worker = Worker(code)
    found(worker)
    answer = worker.ask(question, tell)
    worker.end()
    return answer


def ask_each(
    code: str,
    questions: Sequence[object],
    tell: Hear,
    at_once: int,
    asking: Callable[..., Any] = ask,
) -> Generator[Future[Any], None, None]:
    """Yield the answers to `questions`, in order; up to `at_once` workers answer at a time.

    `asking` is `ask` or `ask_once`, whose errors the answers raise. `tell` gets what the worker
    logs whose answer is the next one. Workers that have not answered once the generator is closed
    are ended.
    """
    _await_prepared()  # here, where it can be interrupted
    crew, answers = _Crew(tell), deque[Future[Any]]()
    with ThreadPoolExecutor(max(1, min(at_once, len(questions))), "outcore-asking") as threads:
        try:
            for number, question in enumerate(questions):
                hear = partial(crew.tell, number)
                answers.append(_submitted(threads, asking, code, question, hear, crew.add))
                if len(answers) == at_once:
                    yield crew.next(answers)
            while answers:
                yield crew.next(answers)
        finally:
            crew.dismiss()


def _submitted(
    threads: ThreadPoolExecutor, call: Callable[..., Any], *arguments: object
) -> Future[Any]:
    """The future of the call; if no thread can be started for it, that is its error."""
    try:
        return threads.submit(call, *arguments)
    except RuntimeError as error:
        failed: Future[Any] = Future()
        failed.set_exception(error.with_traceback(None))  # its frames hold `failed`, and the step
        return failed


class _Crew:
    """Workers that are asked at the same time."""

    def __init__(self, tell: Hear) -> None:
        self._tell = tell
        self._next = 0
        """The number of the question whose answer is the next one."""
        self._workers: list[tuple[Worker, int]] = []
        """Each with the times that it had been taken by then."""
        self._dismissed = False
        self._lock = threading.Lock()

    def next(self, answers: deque[Future[Any]]) -> Future[Any]:
        """Take the first of `answers` once it is there."""
        wait((answers[0],))
        self._next += 1
        return answers.popleft()

    def tell(self, number: int, said: str) -> None:
        """Pass on what the worker says that answers the question of that number, if it is next."""
        if number == self._next:
            self._tell(said)

    def add(self, worker: Worker) -> None:
        """Add a worker. If the crew is dismissed by now, end it and raise CancelledError."""
        with self._lock:
            if not self._dismissed:
                self._workers.append((worker, worker.taken))
                return
        worker.end()
        raise CancelledError

    def dismiss(self) -> None:
        """End those that have not answered. Others may be asked by another thread by now."""
        with self._lock:
            self._dismissed = True
        with _lock:
            for worker, taken in self._workers:
                if worker not in _waiting and worker.taken == taken:
                    worker.kill()


def _asked(worker: Worker, question: object, tell: Hear) -> Any:
    """Ask a worker, and keep it for further questions; a worker that waited before is ended."""
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
    """Take the waiting worker if it fits; end it if it does not."""
    _await_prepared()
    with _lock:
        found, timer = _waiting.popitem() if _waiting else (None, None)
        if found is None or timer is None:
            return None
        found.taken += 1
    timer.cancel()
    serves = False
    try:
        serves = found.serves(code)
    finally:
        if not serves:
            found.end()
    return found if serves else None


def _end(worker: Worker) -> None:
    """End a waiting worker, unless it has been taken."""
    with _lock:
        timer = _waiting.pop(worker, None)
    if timer is not None:
        timer.cancel()
        worker.end()


def dismiss() -> None:
    """End the waiting worker, if there is one."""
    for worker in list(_waiting):
        _end(worker)


@atexit.register
def _leave() -> None:
    """End the waiting worker and the one that is prepared."""
    if _preparing is not None and _preparing[0].is_alive():
        thread, crew = _preparing
        crew.dismiss()
        thread.join(LAST_SECONDS)
    dismiss()


def _forget() -> None:
    """Forget the waiting worker in a forked process: it is the parent's.

    The thread that may have held the lock does not exist in the fork.
    """
    global _lock, _preparing
    _lock, _preparing = threading.Lock(), None
    _of_parent.extend(_waiting)
    _waiting.clear()


os.register_at_fork(after_in_child=_forget)


class _Telling(logging.Handler):
    """Sends log messages to the process that asks."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__()
        self.stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        _send(self.stream, self.format(record), over=False)


def serve(answer: Callable[[Any], object], logger: logging.Logger) -> None:
    """Answer questions for as long as there is a process that asks.

    What is logged to `logger` goes to that process at once.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the pipe is for answers only
    logger.addHandler(_Telling(answers))
    logger.setLevel(logging.INFO)
    questions = sys.stdin.buffer
    # Besides EOF the parent counts: a process that the asking one forked keeps the pipe open, too.
    parent = os.getppid()
    while os.getppid() == parent:
        if not select.select([questions], [], [], ORPHAN_SECONDS)[0]:
            continue
        try:
            question = pickle.load(questions)  # noqa: S301 - from the process that asks
        except EOFError:
            return
        _send(answers, answer(question), over=True)


def _send(stream: IO[bytes], what: object, *, over: bool) -> None:
    pickle.dump((over, what), stream)
    stream.flush()
