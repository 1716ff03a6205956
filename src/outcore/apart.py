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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from outcore.errors import OutcoreError
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.planfile import Overridden
from outcore.policies import Policy, ask
from outcore.policies.search import Search

log = logging.getLogger("outcore")
search_log = logging.getLogger("outcore.search")

APART = (Search, Overridden)
"""Policies that load much. One of another package says so by an attribute: `apart = True`."""

_TOLD = "outcore.search: "
"""What a line begins with that tells how far the search is."""

_SERVE = "from outcore.apart import serve; serve()"


def plan_apart(policy: Policy, problem: Problem) -> Plan:
    """`policy.plan(problem)`: in another process where that is worth it and can be had.

    Raises as `ask`.
    """
    if not (isinstance(policy, APART) or getattr(policy, "apart", False)):
        return ask(policy, problem)
    try:
        answer = _ask(policy, problem)
    except Exception as error:  # noqa: BLE001 - whatever it was, planning here works too
        log.info("outcore: planning in this process: could not start another (%s)", error)
        if isinstance(error, subprocess.CalledProcessError):
            log.debug("outcore: that one said: %s", error.stderr.decode(errors="replace"))
        return ask(policy, problem)
    if isinstance(answer, OutcoreError):
        raise answer
    return answer


def _ask(policy: Policy, problem: Problem) -> Plan | OutcoreError:
    """What another process answers. It imports from where this one does, in that order."""
    path = os.pathsep.join(str(entry) or str(Path.cwd()) for entry in sys.path)
    command = [sys.executable, "-P", "-c", _SERVE]
    theirs, ours = os.pipe()
    with ThreadPoolExecutor(1) as listener:
        said = listener.submit(_listen, theirs)
        try:
            done = subprocess.run(  # noqa: S603 - our own interpreter, our own code
                command,
                input=pickle.dumps((policy, problem)),
                stdout=subprocess.PIPE,
                stderr=ours,
                env=os.environ | {"PYTHONPATH": path},
                check=False,
            )
        finally:
            os.close(ours)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, said.result())
    answer: Plan | OutcoreError = pickle.loads(done.stdout)  # noqa: S301 - from our own process
    return answer


def _listen(descriptor: int) -> bytes:
    """What the other process says; how far its search is goes to the log at once."""
    said = bytearray()
    with open(descriptor, "rb") as stream:
        for line in stream:
            text = line.decode(errors="replace").strip()
            if text.startswith(_TOLD):
                search_log.info("%s", text.removeprefix(_TOLD))
            else:
                said += line
    return bytes(said)


def serve() -> None:
    """Answer the one question on standard input, on standard output."""
    policy, problem = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that asks
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing else goes there
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_TOLD + "%(message)s"))
    search_log.addHandler(handler)
    search_log.setLevel(logging.INFO)
    answer: Plan | OutcoreError
    try:
        answer = ask(policy, problem)
    except OutcoreError as error:
        answer = error
    pickle.dump(answer, answers.buffer)
    answers.flush()
