"""out_of_process: make plans in another process, to save memory in the one that trains.

What a policy loads (a compiler needs 150 MB) is then not held by the process that trains, whose
memory the budget bounds. The training process gets only the plan back.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from outcore.policies.defragment import Defragment
from outcore.policies.search import Search

log = logging.getLogger("outcore")
search_log = logging.getLogger("outcore.search")

HEAVY = (Search, Overridden, Defragment)
"""Policies that load much. A policy of another package can set `out_of_process = True` instead."""

CORES_EACH = 2
"""A search runs two walks at a time."""

NO_PROCESS = "outcore: planning in this process: cannot start a planning process (%s)"

_SERVE = "from outcore.out_of_process import serve; serve()"


def plan_out_of_process(policy: Policy, problem: Problem) -> Plan:
    """Return `policy.plan(problem)`, made in another process if that is worthwhile and possible.

    Raises as `ask`.
    """
    if not (isinstance(policy, HEAVY) or getattr(policy, "out_of_process", False)):
        return ask(policy, problem)
    try:
        answer = _ask(policy, problem)
    except Exception as error:  # noqa: BLE001 - whatever it was, planning here works too
        log.info(NO_PROCESS, error)
        if isinstance(error, subprocess.CalledProcessError):
            log.debug(
                "outcore: the planning process wrote: %s", error.stderr.decode(errors="replace")
            )
        return ask(policy, problem)
    if isinstance(answer, OutcoreError):
        try:
            raise answer
        finally:
            del answer  # its traceback's frames would hold it, and with it the step's tensors
    return answer


def plan_and_place(
    policy: Policy, problems: Sequence[Problem], space: Space
) -> Generator[Tried, None, None]:
    """For each of `problems`, the plan of `policy`, with a layout within `space` if it has one.

    Other processes make them, several at a time if there are enough cores, and are ended once the
    iterator is closed. It ends before the first problem that has no plan. Raises as `ask` does,
    except for that.
    """
    questions = [PlanAndPlaces(policy, problem, space) for problem in problems]
    with closing(worker.ask_each(_SERVE, questions, _tell, _at_once())) as answers:
        for question in questions:
            try:
                answer = next(answers, None) or _answer(question)  # None: it has raised before
            except Exception as error:  # noqa: BLE001 - as above
                log.info(NO_PROCESS, error)
                answer = _answer(question)
            if isinstance(answer, InfeasibleError):
                return
            if isinstance(answer, OutcoreError):
                try:
                    raise answer
                finally:
                    del answer  # as above
            yield answer


def place_out_of_process(problem: Problem, program: Program, space: Space) -> Layout | None:
    """Return `lay_out` of a program, computed in another process if possible."""
    question = Places(problem, program, space)
    try:
        found: Layout | None = worker.ask(_SERVE, question, _tell)
    except Exception as error:  # noqa: BLE001 - as above
        log.info(NO_PROCESS, error)
        return question.found()
    return found


@dataclass(frozen=True, slots=True)
class Places:
    """The question where the tensors of a program should lie in memory, for the other process."""

    problem: Problem
    program: Program
    space: Space

    def found(self) -> Layout | None:
        """Return the answer."""
        return lay_out(self.problem, self.program, self.space)


class Tried(NamedTuple):
    """A plan, and where its tensors should lie."""

    plan: Plan
    lacking_bytes: int
    """Bytes that every layout of it lacks; zero or less if there may be a layout."""
    layout: Layout | None
    """The layout; None if none was found."""


@dataclass(frozen=True, slots=True)
class PlanAndPlaces:
    """The question for a plan and where its tensors should lie, for the other process."""

    policy: Policy
    problem: Problem
    space: Space

    def found(self) -> Tried:
        """Return the answer. Raises as `ask`."""
        plan = ask(self.policy, self.problem)
        program = lower(self.problem, plan, fast=True)
        lacking = lacking_bytes(self.problem, program, self.space)
        layout = lay_out(self.problem, program, self.space) if lacking <= 0 else None
        return Tried(plan, lacking, layout)


def _at_once() -> int:
    """How many searches may run at a time."""
    usable = getattr(os, "sched_getaffinity", None)
    cores = len(usable(0)) if usable is not None else os.cpu_count() or 1
    return max(1, cores // CORES_EACH)


def _ask(policy: Policy, problem: Problem) -> Plan | OutcoreError:
    """Return the other process's answer.

    For a policy of another package, a new process is started each time: its code may be changing.
    """
    asking = worker.ask if _is_ours(policy) else worker.ask_once
    answer: Plan | OutcoreError = asking(_SERVE, (policy, problem), _tell)
    return answer


def _is_ours(policy: Policy) -> bool:
    inner = policy.policy if isinstance(policy, Overridden) else policy
    return type(inner).__module__.startswith("outcore.")


def _tell(said: str) -> None:
    search_log.info("%s", said)


def serve() -> None:
    """Answer questions, in the other process."""
    worker.serve(_answer, search_log)


def _answer(question: Any) -> Any:
    """Answer one question, in the other process; an OutcoreError is returned, not raised."""
    try:
        with gc_paused():
            if isinstance(question, Places | PlanAndPlaces):
                return question.found()
            policy, problem = question
            return ask(policy, problem)
    except OutcoreError as error:
        return error
