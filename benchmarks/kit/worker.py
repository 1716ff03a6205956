"""Worker: an object in a separate process, which is called through a pipe.

A fresh process has its own malloc, resident memory and profiler. Between calls it does nothing, so
workers can take turns on a machine step by step, and noise affects all of them alike.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from outcore.errors import OutcoreError
from outcore.measure import ran_out

OUT_OF_MEMORY = "OutOfMemoryError"
"""The `kind` of all out-of-memory errors: some have other class names."""

_TAIL_BYTES = 2000
_SCORE = Path("/proc/self/oom_score_adj")

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


class WorkerError(Exception):
    """A worker failed. `kind` names the exception; `details` are for people at the terminal."""

    def __init__(self, kind: str, details: str) -> None:
        super().__init__(kind, details)
        self.kind, self.details = kind, details

    def __str__(self) -> str:
        return f"{self.kind}\n{self.details}"


class Worker(Generic[T]):
    """`make(*args)` in a fresh process. Returns once it is made, and raises what it raised.

    Errors of outcore arrive as they are, all others as WorkerError. What the process prints is
    kept, for the details of an error.
    """

    def __init__(self, make: Callable[..., T], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, args), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `method(object, ...)` in the worker. Raises the same errors as the constructor."""
        try:
            self._pipe.send((method, args, kwargs))
        except OSError as error:
            raise self._died() from error
        answer: R = self._answer()
        return answer

    def close(self) -> None:
        """End the process. Calling this more than once is fine."""
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def answer_seconds(self) -> float:
        """How long to wait for an answer. Only a worker that hangs takes longer."""
        return 3600.0

    def _answer(self) -> Any:
        seconds = self.answer_seconds()
        if not self._pipe.poll(seconds):
            raise WorkerError("Timeout", f"no answer within {seconds:.0f} s")
        try:
            fine, answer = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._died() from error
        if not fine:
            raise answer
        return answer

    def _died(self) -> WorkerError:
        self._process.join()
        return WorkerError("Died", f"exit code {self._process.exitcode}")


def _serve(pipe: Connection, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with contextlib.suppress(OSError):  # the kernel should kill this process first
        _SCORE.write_text("500")
    with tempfile.TemporaryFile() as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        fine, made = _attempt(log, make, args, {})
        pipe.send((fine, None if fine else made))
        while fine:
            try:
                method, more, kwargs = pipe.recv()
            except EOFError:
                return
            pipe.send(_attempt(log, method, (made, *more), kwargs))


def _attempt(
    log: IO[bytes], call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, Any]:
    try:
        return True, call(*args, **kwargs)
    except OutcoreError as error:
        return False, error
    except Exception as error:  # noqa: BLE001 - the caller decides
        kind = OUT_OF_MEMORY if ran_out(error) else type(error).__name__
        return False, WorkerError(kind, f"{traceback.format_exc()}{_tail(log)}")


def _tail(log: IO[bytes]) -> str:
    """What the process printed last."""
    size = os.fstat(log.fileno()).st_size
    tail = os.pread(log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    return tail.decode(errors="replace")
