"""out_of_process: planning in a process of its own.

What a policy loads (a compiler takes 150 MB) is then not held by the process that trains, whose
memory is what a budget is about. That process gets back a plan and nothing else.
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
"""Policies that load much. Another package's sets the attribute `out_of_process = True`."""

_SERVE = "from outcore.out_of_process import serve; serve()"


def plan_out_of_process(policy: Policy, problem: Problem) -> Plan:
    """`policy.plan(problem)`: in another process where that is worth it and can be had.

    Raises as `ask`.
    """
    if not (isinstance(policy, HEAVY) or getattr(policy, "out_of_process", False)):
        return ask(policy, problem)
    try:
        answer = _ask(policy, problem)
    except Exception as error:  # noqa: BLE001 - whatever it was, planning here works too
        log.info("outcore: planning in this process: could not start another (%s)", error)
        if isinstance(error, subprocess.CalledProcessError):
            log.debug("outcore: that one said: %s", error.stderr.decode(errors="replace"))
        return ask(policy, problem)
    if isinstance(answer, OutcoreError):
        try:
            raise answer
        finally:
            del answer  # whose frames hold it, and what the step made
    return answer


def place_out_of_process(problem: Problem, program: Program, space: Space) -> Layout | None:
    """`lay_out` in another process, where one can be had."""
    question = Places(problem, program, space)
    try:
        found: Layout | None = worker.ask(_SERVE, question, _tell)
    except Exception as error:  # noqa: BLE001 - as above
        log.info("outcore: planning in this process: could not start another (%s)", error)
        return question.found()
    return found


@dataclass(frozen=True, slots=True)
class Places:
    """The question where the tensors of a program are to lie."""

    problem: Problem
    program: Program
    space: Space

    def found(self) -> Layout | None:
        """The answer."""
        return lay_out(self.problem, self.program, self.space)


def _ask(policy: Policy, problem: Problem) -> Plan | OutcoreError:
    """What another process answers: for a policy of another package a new one each time.

    Somebody may be at work on that.
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
    """Answer as the other process."""
    worker.serve(_answer, search_log)


def _answer(question: tuple[Policy, Problem] | Places) -> Plan | Layout | OutcoreError | None:
    try:
        with gc_paused():
            if isinstance(question, Places):
                return question.found()
            policy, problem = question
            return ask(policy, problem)
    except OutcoreError as error:
        return error
