"""apart: planning in a process of its own.

What a policy loads (a compiler takes 150 MB) is then not held by the process that trains, whose
memory is what a budget is about. That process gets back a plan and nothing else.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys

from outcore.errors import InfeasibleError
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.policies import Policy
from outcore.policies.search import Search

log = logging.getLogger("outcore")

APART = (Search,)
"""Policies that load much."""

_SERVE = "from outcore.apart import serve; serve()"


def plan_apart(policy: Policy, problem: Problem) -> Plan:
    """`policy.plan(problem)`: in another process where that is worth it and can be had.

    Raises what the policy raises.
    """
    if not isinstance(policy, APART):
        return policy.plan(problem)
    try:
        answer = _ask(policy, problem)
    except Exception as error:  # noqa: BLE001 - whatever it was, planning here works too
        log.info("outcore: planning in this process: no other one can be had (%s)", error)
        if isinstance(error, subprocess.CalledProcessError):
            log.debug("outcore: that one said: %s", error.stderr.decode(errors="replace"))
        return policy.plan(problem)
    if isinstance(answer, InfeasibleError):
        raise answer
    return answer


def _ask(policy: Policy, problem: Problem) -> Plan | InfeasibleError:
    """What another process answers. It imports from where this one does, in that order."""
    path = os.pathsep.join(str(entry) for entry in sys.path if entry)
    done = subprocess.run(  # noqa: S603 - our own interpreter, our own code
        [sys.executable, "-P", "-c", _SERVE],
        input=pickle.dumps((policy, problem)),
        capture_output=True,
        env=os.environ | {"PYTHONPATH": path},
        check=True,
    )
    answer: Plan | InfeasibleError = pickle.loads(done.stdout)  # noqa: S301 - from our own process
    return answer


def serve() -> None:
    """Answer the one question on standard input, on standard output."""
    policy, problem = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that asks
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing else goes there
    answer: Plan | InfeasibleError
    try:
        answer = policy.plan(problem)
    except InfeasibleError as error:
        answer = error
    pickle.dump(answer, answers.buffer)
    answers.flush()
