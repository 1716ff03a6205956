"""out_of_process: make plans in another process, to save memory in the one that trains.

What a policy loads (a compiler needs 150 MB) is then not held by the process that trains, whose
memory the budget bounds. The training process gets only the plan back.
"""

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

from outcore import worker
from outcore.allocators import Space, lacking_bytes, lay_out
from outcore.errors import InfeasibleError, OutcoreError
from outcore.gc_paused import gc_paused
from outcore.ir.layout import Layout
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Program
from outcore.lower import lower
from outcore.planfile import Overridden
from outcore.policies import Policy, ask
from outcore.policies.search.defragment import Defragment
from outcore.policies.search.search import Search

log = logging.getLogger("outcore")
search_log = logging.getLogger("outcore.search")

HEAVY = (Search, Overridden, Defragment)
"""Policies that load much. A policy of another package can set `out_of_process = True` instead."""

_SERVE = "from outcore.out_of_process import serve; serve()"

SLOW_SECONDS = 10.0
"""How long to wait for an answer before saying what may take so long."""

SLOW = (
    "outcore: still planning; in a new installation the planner is compiled first, once, which "
    "takes 10 to 40 s"
)


def prepare() -> None:
    """Let the other process load what `search` needs, in the background.

    In a new installation that takes half a minute (`compile_entries`).
    """
    worker.prepare(_SERVE, _ToPrepare())


def plan_out_of_process(policy: Policy, problem: Problem) -> Plan:
    """Return `policy.plan(problem)`, made in another process if that is worthwhile and possible.

    Raises as `ask`.
    """
    if not (isinstance(policy, HEAVY) or getattr(policy, "out_of_process", False)):
        return ask(policy, problem)
    plan: Plan = _answered(_ToPlan(policy, problem), _asking(policy))
    return plan


def place_out_of_process(problem: Problem, program: Program, space: Space) -> Layout | None:
    """Return `lay_out` of a program, computed in another process if possible."""
    layout: Layout | None = _answered(_ToPlace(problem, program, space), worker.ask)
    return layout


class Tried(NamedTuple):
    """A plan, and where its tensors should lie."""

    plan: Plan
    lacking_bytes: int
    """Bytes that every layout of it lacks; zero or less if there may be a layout."""
    layout: Layout | None
    """The layout; None if none was found."""


def plan_and_place(
    policy: Policy, problems: Sequence[Problem], space: Space, at_once: int
) -> Generator[Tried, None, None]:
    """For each of `problems`, the plan of `policy`, with a layout within `space` if it has one.

    Other processes make them, up to `at_once` at a time, and are ended once the generator is
    closed. It ends before the first problem that has no plan. Raises as `ask`, except for that.
    """
    questions = [_ToPlanAndPlace(policy, problem, space) for problem in problems]
    answers = worker.ask_each(_SERVE, questions, _tell, at_once, _asking(policy))
    with closing(answers):
        for question in questions:
            try:
                tried: Tried = _next_found(question, answers)
            except InfeasibleError:
                return
            yield tried


class Question(Protocol):
    """What another process is asked."""

    def found(self) -> Any:
        """Return the answer. Raises as `ask`."""
        ...


@dataclass(frozen=True, slots=True)
class _ToPrepare:
    def found(self) -> None:
        from outcore.allocators import places  # noqa: F401, PLC0415 - loads numba
        from outcore.evaluate import kernel  # noqa: F401, PLC0415 - as above
        from outcore.jit import compile_entries  # noqa: PLC0415 - as above

        compile_entries()


@dataclass(frozen=True, slots=True)
class _ToPlan:
    policy: Policy
    problem: Problem

    def found(self) -> Plan:
        return ask(self.policy, self.problem)


@dataclass(frozen=True, slots=True)
class _ToPlace:
    problem: Problem
    program: Program
    space: Space

    def found(self) -> Layout | None:
        return lay_out(self.problem, self.program, self.space)


@dataclass(frozen=True, slots=True)
class _ToPlanAndPlace:
    policy: Policy
    problem: Problem
    space: Space

    def found(self) -> Tried:
        plan = ask(self.policy, self.problem)
        program = lower(self.problem, plan, fast=True)
        lacking = lacking_bytes(self.problem, program, self.space)
        layout = lay_out(self.problem, program, self.space) if lacking <= 0 else None
        return Tried(plan, lacking, layout)


def _answered(question: Question, asking: Callable[..., Any]) -> Any:
    """As `_found`. Another thread asks, so that what a signal handler raises is raised here."""
    answers = worker.ask_each(_SERVE, [question], _tell, 1, asking)
    with closing(answers), _telling_if_slow():
        return _next_found(question, answers)


def _next_found(question: Question, answers: Iterator[Future[Any]]) -> Any:
    """As `_found`, for the next of `answers`."""
    first = [next(answers)]
    return _found(question, lambda: first.pop().result())  # no frame holds an error's future


def _found(question: Question, answer: Callable[[], Any]) -> Any:
    """The `answer` of another process, or if it gives none, that of this one. Raises as `ask`."""
    try:
        found = answer()
    except Exception as error:  # noqa: BLE001 - whatever it was, planning here works too
        log.info("outcore: planning in this process: %s", _why(error))
        if isinstance(error, subprocess.CalledProcessError):
            log.debug(
                "outcore: the planning process wrote: %s", error.stderr.decode(errors="replace")
            )
        found = question
    if found is question:
        return question.found()
    if isinstance(found, OutcoreError):
        try:
            raise found
        finally:
            del found  # its traceback's frames would hold it, and with it the step's tensors
    return found


def _why(error: Exception) -> str:
    """Why there is no answer. An error that this process ended the other one for says more."""
    cause = error.__cause__
    by_itself = cause is None or isinstance(cause, EOFError | OSError)
    return f"the planning process gave no answer ({error if by_itself else cause})"


@contextmanager
def _telling_if_slow() -> Iterator[None]:
    """Log, once in this process, that it takes long; nothing else is seen of it while it lasts."""
    timer = threading.Timer(SLOW_SECONDS, _tell_slow)
    timer.daemon, timer.name = True, "outcore-slow"
    with suppress(RuntimeError):  # there are too many threads
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@cache
def _tell_slow() -> None:
    log.warning("%s", SLOW)


def _asking(policy: Policy) -> Callable[..., Any]:
    """How to ask the other process for a plan.

    For a policy of another package, a new process is started each time: its code may be changing.
    """
    inner = policy.policy if isinstance(policy, Overridden) else policy
    ours = type(inner).__module__.startswith("outcore.")
    return worker.ask if ours else worker.ask_once


def _tell(said: str) -> None:
    search_log.info("%s", said)


def serve() -> None:
    """Answer questions, in the other process."""
    worker.serve(answer, search_log)


def answer(question: Question) -> Any:
    """Answer one question, in the other process; an OutcoreError is returned, not raised."""
    try:
        with gc_paused():
            return question.found()
    except OutcoreError as error:
        return error
