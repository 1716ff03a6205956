"""out_of_process: make plans in another process, to save memory in the one that trains.

What a policy loads (a compiler needs 150 MB) is then not held by the process that trains, whose
memory the budget bounds. The training process gets only the plan back.
"""

from __future__ import annotations

import logging
import subprocess
from dataclasses import dataclass

from outcore import worker
from outcore.allocators import Space, lay_out
from outcore.errors import OutcoreError
from outcore.gc_paused import gc_paused
from outcore.ir.layout import Layout
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Program
from outcore.planfile import Overridden
from outcore.policies import Policy, ask
from outcore.policies.defragment import Defragment
from outcore.policies.search import Search

log = logging.getLogger("outcore")
search_log = logging.getLogger("outcore.search")

HEAVY = (Search, Overridden, Defragment)
"""Policies that load much. A policy of another package can set `out_of_process = True` instead."""

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
        log.info("outcore: planning in this process: cannot start a planning process (%s)", error)
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


def place_out_of_process(problem: Problem, program: Program, space: Space) -> Layout | None:
    """Return `lay_out` of a program, computed in another process if possible."""
    question = Places(problem, program, space)
    try:
        found: Layout | None = worker.ask(_SERVE, question, _tell)
    except Exception as error:  # noqa: BLE001 - as above
        log.info("outcore: planning in this process: cannot start a planning process (%s)", error)
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


def _answer(question: tuple[Policy, Problem] | Places) -> Plan | Layout | OutcoreError | None:
    """Answer one question, in the other process; an OutcoreError is returned, not raised."""
    try:
        with gc_paused():
            if isinstance(question, Places):
                return question.found()
            policy, problem = question
            return ask(policy, problem)
    except OutcoreError as error:
        return error
