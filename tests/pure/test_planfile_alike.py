"""Plan files with several plans for one trace, for graphs of the same structure."""

from __future__ import annotations

from outcore.ir.hardware import Tier
from outcore.ir.liveness import gaps
from outcore.ir.plan import Offload, Plan, Recompute, make_plan
from outcore.ir.store import digest
from outcore.planfile import (
    PlanFile,
    Versions,
    diff_files,
    find,
    find_all,
    make_file,
    saved_plan,
)
from tests.pure.strategies import small_problem

VERSIONS = Versions("0.1.0", "3.11.2", "2.13.0")
PROBLEM = small_problem()
CONV = next(gap for gap in gaps(PROBLEM.trace) if gap.buffer == 3)
OFFLOADED = make_plan({CONV: Offload(Tier.HOST)})
RECOMPUTED = make_plan({CONV: Recompute()})
KEPT = make_plan({})


def file_of(*plans: Plan) -> PlanFile:
    return make_file([saved_plan(PROBLEM, plan) for plan in plans], VERSIONS)


def test_each_graph_has_its_own_and_further_ones_the_last() -> None:
    file, trace = file_of(OFFLOADED, RECOMPUTED), digest(PROBLEM.trace)
    assert find_all(file, trace) == file.plans
    assert [find(file, trace, earlier) for earlier in range(3)] == [*file.plans, file.plans[-1]]
    assert find_all(file, "another") == ()
    assert find(file, "another", 1) is None


def test_a_file_and_itself_do_not_differ() -> None:
    file = file_of(OFFLOADED, RECOMPUTED, KEPT)
    found = diff_files(file, file)
    assert not found.differs
    assert [(plan.before, plan.after) for plan in found.plans] == [(p, p) for p in file.plans]


def test_they_are_paired_in_order_and_what_is_left_stands_alone() -> None:
    one, other = file_of(OFFLOADED, RECOMPUTED, KEPT), file_of(OFFLOADED, KEPT)
    pairs = [(plan.before, plan.after) for plan in diff_files(one, other).plans]
    assert pairs == [*zip(one.plans, other.plans, strict=False), (one.plans[2], None)]
    back = [(plan.before, plan.after) for plan in diff_files(other, one).plans]
    assert back == [(after, before) for before, after in pairs]
