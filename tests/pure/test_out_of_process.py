"""out_of_process: planning in another process gives the same results as planning here."""

from __future__ import annotations

import contextlib
import gc
import signal
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from outcore import out_of_process, worker
from outcore.allocators import Space, lacking_bytes, lay_out
from outcore.errors import InfeasibleError
from outcore.lower import lower
from outcore.out_of_process import (
    place_out_of_process,
    plan_and_place,
    plan_out_of_process,
)
from outcore.policies import floor, resolve
from outcore.policies.search.search import Search
from tests.pure.test_policies import chain

QUICK = Search(min_bytes=1, effort=0.01)
"""A short search: it compiles only what the tests of the search compile too."""

pytestmark = pytest.mark.xdist_group("compiled")


def test_it_gives_the_same_plan():
    problem = chain((64,) * 6)
    assert plan_out_of_process(QUICK, problem) == QUICK.plan(problem)


def test_it_gives_the_same_places():
    problem = chain((4 << 10,) * 6)
    program = lower(problem, resolve("keep-all").plan(problem))
    for space in (Space(1 << 40), Space(1 << 40, 1 << 40), Space(1 << 20)):
        assert place_out_of_process(problem, program, space) == lay_out(problem, program, space)
    assert place_out_of_process(problem, program, Space(1 << 40)) is not None


def test_a_long_wait_is_explained_once(monkeypatch, caplog):
    monkeypatch.setattr(out_of_process, "SLOW_SECONDS", 0.0)
    out_of_process._tell_slow.cache_clear()
    for _ in range(2):
        with out_of_process._telling_if_slow():
            time.sleep(0.2)
    assert [record.message for record in caplog.records] == [out_of_process.SLOW]
    monkeypatch.setattr(out_of_process, "SLOW_SECONDS", 0.1)
    out_of_process._tell_slow.cache_clear()
    with out_of_process._telling_if_slow():
        pass
    time.sleep(0.3)
    assert len(caplog.records) == 1, "it was over before"


@pytest.mark.parametrize("kind", [TimeoutError, ValueError, KeyboardInterrupt])
def test_what_a_signal_handler_raises_ends_planning(monkeypatch, kind):
    def asked(*_):
        time.sleep(0.5)

    def handler(*_):
        raise kind

    monkeypatch.setattr(worker, "ask", asked)
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(kind):
            plan_out_of_process(QUICK, chain((64,) * 6))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_it_plans_here_if_there_are_too_many_threads(monkeypatch):
    def submit(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    problem, held = chain((64,) * 6), Path("what the caller's frame holds")

    def planned():
        held_here = Held(held)
        assert plan_out_of_process(QUICK, problem) == QUICK.plan(problem)
        return weakref.ref(held_here)

    gc.collect()
    gc.disable()
    try:
        assert planned()() is None
    finally:
        gc.enable()


@dataclass
class Held:
    what: object


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("executable", [sys.executable, "/nowhere/python"])
def test_it_gives_the_same_plans_with_places(monkeypatch, executable, at_once):
    """It ends before the third problem, which has no plan."""
    monkeypatch.setattr(sys, "executable", executable)
    problem = chain((4 << 10,) * 6)
    budgets = (1 << 40, floor(problem).nbytes, 1000, 1 << 40)
    problems = [replace(problem, budget_bytes=nbytes) for nbytes in budgets]
    found = list(plan_and_place(QUICK, problems, Space(1 << 40), at_once))
    assert [tried.plan for tried in found] == [QUICK.plan(each) for each in problems[:2]]
    for tried, each in zip(found, problems, strict=False):
        program = lower(each, tried.plan)
        assert tried.layout == lay_out(each, program, Space(1 << 40))
        assert tried.layout is not None
        assert tried.lacking_bytes == lacking_bytes(each, program, Space(1 << 40))


def test_places_are_sought_only_if_there_may_be_some(monkeypatch):
    sought = []
    monkeypatch.setattr(out_of_process, "lay_out", lambda *_: sought.append(True))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    problem = chain((4 << 10,) * 6)
    for space, lacks in ((Space(1 << 20), True), (Space(1 << 40), False)):
        (tried,) = plan_and_place(QUICK, [problem], space, 1)
        assert (tried.lacking_bytes > 0) == lacks
        assert len(sought) == (not lacks)


def test_an_error_here_is_raised_as_it_is(monkeypatch):
    """It is not taken for one of the other process."""
    calls = []

    def broken(*_):
        calls.append(True)
        raise ZeroDivisionError

    monkeypatch.setattr(out_of_process, "lacking_bytes", broken)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ZeroDivisionError) as error:
        list(plan_and_place(QUICK, [chain()], Space(1 << 40), 1))
    assert calls == [True]
    assert error.value.__context__ is None


def test_the_numbers_of_a_refusal_come_back():
    problem = chain()
    tight = type(problem)(problem.trace, problem.profile, problem.hardware, 1000)
    with pytest.raises(InfeasibleError) as here:
        QUICK.plan(tight)
    with pytest.raises(InfeasibleError) as there:
        plan_out_of_process(QUICK, tight)
    assert str(there.value) == str(here.value)


def planned(problem):
    plan_out_of_process(QUICK, problem)


def placed(problem):
    assert not list(plan_and_place(QUICK, [problem], Space(1 << 40), 1))


@pytest.mark.parametrize("call", [planned, placed])
def test_a_refusal_holds_nothing_once_it_is_caught(call):
    """Else its traceback would hold the step's frames, and so the batch, until a collection."""

    class Held:
        pass

    def refused(held):
        problem = replace(chain(), budget_bytes=1000)
        with contextlib.suppress(InfeasibleError):
            call(problem)
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        found = refused(Held())
        assert found() is None
    finally:
        gc.enable()


def test_how_far_it_is_goes_to_the_log(monkeypatch, caplog):
    code = """
from outcore import out_of_process, worker
from outcore.policies.search import walks as search_walks
search_walks.TOLD_EVERY = 0.0
out_of_process.serve()
"""
    monkeypatch.setattr(out_of_process, "_SERVE", code)
    problem = chain((64,) * 6)
    tight = replace(problem, budget_bytes=floor(problem).nbytes)
    with caplog.at_level("INFO", "outcore.search"):
        plan_out_of_process(QUICK, tight)
    assert "100 % done, the best plan takes" in caplog.messages[-1]


def test_what_is_prepared_is_what_a_search_calls():
    """Another type of an argument would be compiled anew."""
    code = """
from outcore import jit, out_of_process
from outcore.allocators.packing import Stay, pack
from outcore.policies.search.search import Search
from dataclasses import dataclass, replace
from tests.pure.building import small_problem
out_of_process._ToPrepare().found()
before = [list(function.signatures) for function, _ in jit.ENTRIES]
assert [len(each) for each in before] == [1, 1, 1]
Search(min_bytes=1, effort=0.01).plan(replace(small_problem(), budget_bytes=6000))
pack([Stay(0, 2, 5), Stay(1, 3, 6)], 11)
assert before == [list(function.signatures) for function, _ in jit.ENTRIES]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_loads_little_stays_here(monkeypatch):
    monkeypatch.setattr(out_of_process, "_found", None)
    assert plan_out_of_process(resolve("swap-all"), chain()) == resolve("swap-all").plan(chain())


def test_a_path_that_is_none_is_passed_over(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, Path("somewhere")])
    assert plan_out_of_process(QUICK, chain()) == QUICK.plan(chain())


@pytest.mark.parametrize("executable", ["", None, "/nowhere/python", "/bin/false", "/bin/echo"])
def test_without_another_process_it_is_done_here(monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    assert plan_out_of_process(QUICK, chain()) == QUICK.plan(chain())


def test_this_process_loads_no_compiler():
    code = """
import sys
from outcore.allocators import Space, lay_out
from outcore.out_of_process import place_out_of_process, plan_out_of_process
from outcore.policies.search.search import Search
from dataclasses import dataclass, replace
from tests.pure.building import small_problem
problem = replace(small_problem(), budget_bytes=6000)
assert plan_out_of_process(Search(min_bytes=1, effort=0.01), problem).choices
assert "numba" not in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
