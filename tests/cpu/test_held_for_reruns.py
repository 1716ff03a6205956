"""Buffers held for recomputations alone, as shown for files, in explanations and in the log."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest

from outcore.cli.words import headline
from outcore.ir.plan import Plan, make_plan
from outcore.ir.problem import Problem
from outcore.lower import lower
from outcore.planfile import PlanFile, Versions, make_file, save_plans, saved_plan
from outcore.policies import resolve
from outcore.preflight.forecast import forecast
from outcore.preflight.words import rows
from outcore.presets import preset
from outcore.runtime.budget.announce import announcement
from outcore.runtime.graphs.planned import Planned
from outcore.simulate import simulate
from tests.pure.building import dense_plan, dense_problem

PROBLEM = dense_problem()
PLAN = dense_plan(PROBLEM)


@dataclass(frozen=True, slots=True)
class ByHand:
    """A policy for dense steps."""

    name: ClassVar[str] = "by-hand"
    summary: ClassVar[str] = "for tests"

    def plan(self, problem: Problem) -> Plan:
        return dense_plan(problem)


def file_of(plan: Plan) -> PlanFile:
    return make_file([saved_plan(PROBLEM, plan)], Versions("0.1.0"))


@pytest.fixture
def path(tmp_path) -> str:
    save_plans(file_of(PLAN), tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


@pytest.fixture
def narrow(outcore, monkeypatch):
    """A terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    return outcore


def flat(text: str) -> str:
    """`text` without table frames and line ends."""
    return " ".join(text.replace("│", " ").split())


def test_show(narrow, path):
    run = narrow("plan", "show", path)
    assert run.exit_code == 0, run.output
    assert max(map(len, run.stdout.splitlines()[-20:])) <= 80
    for said in ("7 of 7 that are moved or held for reruns", "for reruns", "y0 (buffer 1)"):
        assert said in flat(run.stdout)


def test_the_headline_counts_them_apart():
    file = file_of(PLAN)
    rows = list(headline(file, file.plans[0]))
    assert ("keep", "1 of 1.00 KiB, for reruns") in rows
    assert ("recompute", "4 of 10.0 KiB") in rows
    assert ("recompute", "1 of 1.00 KiB, for reruns") in rows


def test_explain_a_file(narrow, path):
    run = narrow("plan", "explain", path)
    assert run.exit_code == 0, run.output
    assert "if dropped, the step takes 40.0 ms longer" in flat(run.stdout)
    assert "for reruns" in run.stdout


def test_diff(outcore, path, tmp_path):
    dropped = make_plan({gap: choice for gap, choice in PLAN.choices if not gap.dead})
    save_plans(file_of(dropped), tmp_path / "dropped.json")
    run = outcore("plan", "diff", "--actions", str(tmp_path / "dropped.json"), path)
    assert run.exit_code == 1, run.output
    (row,) = (line for line in run.stdout.splitlines() if "y0 (buffer 1)" in line)
    assert [cell.strip() for cell in row.split("│")[3:6]] == ["action", "drop", "keep"]


def test_explain(narrow, monkeypatch):
    comparison = SimpleNamespace(
        problem=lambda nbytes: PROBLEM, naming_budgets=lambda nbytes: nullcontext()
    )
    step = SimpleNamespace(
        title="a dense step",
        on_machine="a dense step, on none",
        budget_bytes=lambda text: PROBLEM.budget_bytes,
        traced_comparison=lambda status: comparison,
    )
    policy = SimpleNamespace(name="stub", plan=lambda problem: PLAN)
    monkeypatch.setattr("outcore.cli.commands.explain.subject", lambda *given, real: step)
    monkeypatch.setattr("outcore.policies.resolve", lambda spec: policy)
    run = narrow("explain")
    assert run.exit_code == 0, run.output
    assert max(map(len, run.stdout.splitlines()[3:])) <= 80
    assert "7 of 7 gaps that are moved or held for reruns, by bytes x idle" in flat(run.stdout)
    assert "if dropped, the step takes" in flat(run.stdout)
    (row,) = (line for line in run.stdout.splitlines() if "y0 (buffer 1)" in line)
    assert row.split("│")[3].strip() == "keep"


def test_the_log_says_how_many():
    program, kept = lower(PROBLEM, PLAN), lower(PROBLEM, make_plan({}))
    timelines = simulate(PROBLEM, program), simulate(PROBLEM, kept)
    planned = Planned(PROBLEM, PLAN, program, *timelines)
    assert not planned.everything_kept
    assert "0 kept, 3 held for reruns" in announcement(planned, resolve("search"), 1)


def test_the_log_says_why_something_is_moved_although_everything_would_fit():
    """When it was planned, other calls were thought to need more room."""
    roomy = replace(PROBLEM, budget_bytes=1 << 40)
    program, kept = lower(roomy, PLAN), lower(roomy, make_plan({}))
    planned = Planned(roomy, PLAN, program, simulate(roomy, program), simulate(roomy, kept))
    (head, *_) = announcement(planned, resolve("search"), 1).splitlines()
    assert head.endswith("as it is; planned by by hand, to leave room for other calls")


def test_before_training():
    unknown = (replace(op, target="test.f") for op in PROBLEM.trace.ops)
    trace = replace(PROBLEM.trace, ops=tuple(unknown))
    found = forecast(trace, preset("titan-xp"), 12 << 10, ByHand(), 0)
    assert found.planned is not None
    assert found.planned.held == 3
    chosen = {moved.name: moved.choice for moved in found.planned.moved}
    assert chosen["cat4"] == "recompute"
    assert chosen["y0"] == "keep for reruns"
    assert dict(rows(found))["moved"].endswith("0 kept, 3 held for reruns")
