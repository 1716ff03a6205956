"""floor_holdings: what is held at the floor, each byte once, with a reason."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from outcore.ir.liveness import liveness
from outcore.ir.trace import Role
from outcore.lower.donate import donate
from outcore.lower.draft import occupancy
from outcore.lower.expand import expand
from outcore.policies.floor import floor, leanest, plan_floor
from outcore.policies.holdings import Holding, Why, floor_holdings
from outcore.policies.summit import device_slots, summit
from tests.pure.strategies import problems
from tests.pure.test_policies import KIB, chain

drawn = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@drawn
@given(problem=problems())
def test_the_parts_add_up_to_the_floor(problem):
    found = floor_holdings(problem)
    assert found.floor == floor(problem)
    held = sum(each.nbytes for each in found.holdings)
    rest = found.workspace_bytes + found.between_bytes + found.outside_bytes
    assert held + rest == found.floor.nbytes
    sizes = [each.nbytes for each in found.holdings]
    assert sizes == sorted(sizes, reverse=True)
    assert all(each.buffers > 0 for each in found.holdings)


@drawn
@given(problem=problems())
def test_what_is_on_the_device_is_what_lowering_counts(problem):
    """At the peak of the leanest plan, the slots add up to the bytes that lowering counts."""
    lowest, plan = leanest(problem)
    assert plan_floor(problem, plan) == lowest
    draft = donate(problem.trace, expand(problem, plan))
    most = summit(problem, draft)
    slots = device_slots(draft, most)
    nbytes = sum(draft.slots[s].nbytes for s in slots) + problem.outside_bytes
    op = most.op(draft)
    if op is not None:
        nbytes += problem.profile.cost(op, plan.variant(op)).workspace_bytes
        assert nbytes == max(occupancy(problem, draft).steps)
    if most.paused:
        assert nbytes + problem.between_bytes == occupancy(problem, draft).between
    there = {draft.slots[s].buffer for s in slots}
    assert op is None or set(problem.trace.reads[op]) <= there
    held = liveness(problem.trace).held
    given_buffers = {draft.slots[s].buffer for s in draft.arguments}
    assert {buffer for buffer in given_buffers if held[buffer]} <= there


def test_by_hand():
    """chain(): op 1 reads one map and writes the next; the caller's x stays."""
    found = floor_holdings(chain())
    assert found.op == 1
    assert set(found.holdings) == {
        Holding(Why.READ, Role.ACTIVATION, 1, 64 * KIB),
        Holding(Why.WRITTEN, Role.ACTIVATION, 1, 64 * KIB),
        Holding(Why.HELD, Role.INPUT, 1, 64 * KIB),
    }
    assert (found.workspace_bytes, found.between_bytes, found.outside_bytes) == (0, 0, 0)


def test_the_pause_by_hand():
    """Only the caller's x, the output and its tangent are held; nothing is read or written."""
    found = floor_holdings(replace(chain(), outside_bytes=KIB, between_bytes=1000 * KIB))
    assert found.op is None
    assert {each.why for each in found.holdings} <= {Why.HELD, Why.WAITS}
    assert (found.between_bytes, found.outside_bytes) == (1000 * KIB, KIB)
    assert sum(each.nbytes for each in found.holdings) == 66 * KIB


def test_the_workspace_of_the_op_that_sets_the_floor():
    problem = chain()
    spaces = tuple(1 << 20 if op == 3 else 0 for op in range(len(problem.trace.ops)))
    found = floor_holdings(
        replace(problem, profile=replace(problem.profile, workspace_bytes=spaces))
    )
    assert (found.op, found.workspace_bytes) == (3, 1 << 20)


@pytest.mark.parametrize("outside", [0, 7])
def test_what_lies_outside_moves_the_floor_alone(outside):
    plain = floor_holdings(chain())
    moved = floor_holdings(replace(chain(), outside_bytes=outside))
    assert moved.floor.nbytes == plain.floor.nbytes + outside
    assert (moved.holdings, moved.op) == (plain.holdings, plain.op)
