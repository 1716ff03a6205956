"""chen-sqrt: articulation points, and segments between checkpoints."""

from dataclasses import replace

import pytest

from outcore.errors import InfeasibleError
from outcore.ir.hardware import Tier
from outcore.ir.plan import Recompute
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile, Source
from outcore.ir.program import Run
from outcore.ir.trace import Phase, Ref, Role
from outcore.lower import lower
from outcore.policies import resolve
from outcore.policies.checkpoints import articulation_points
from outcore.simulate import simulate
from tests.pure.building import TraceBuilder, small_hardware

LAYERS, MAP_BYTES = 16, 1024
GREEDY = "chen-sqrt{min_bytes=512B,greedy=true}"


def network(*, skips: bool, read_back: int = 1) -> Problem:
    """A chain of maps; with `skips`, odd layers from 3 on also read the map before the last.

    Backward reads every `read_back`th map.
    """
    t = TraceBuilder()
    x = t.new(1, Role.INPUT, borrowed=True)
    made = [x]
    for layer in range(LAYERS):
        out = t.new(MAP_BYTES // 4, Role.ACTIVATION, name=f"a{layer}")
        beside = (Ref(made[-2]),) if skips and layer % 2 and layer > 1 else ()
        t.op("test.f", (Ref(made[-1]), *beside), (out,))
        made.append(out)
    loss, tangent = t.new(1, Role.ACTIVATION), t.new(1, Role.GRAD)
    t.op("test.loss", (Ref(made[-1]),), (loss,))
    grad = tangent
    for value in reversed(made[read_back::read_back]):
        before, grad = grad, t.new(1, Role.GRAD)
        t.op("test.b", (Ref(before), Ref(value)), (grad,), Phase.BACKWARD)
    trace = t.trace([x], (Ref(loss),), [tangent], (Ref(grad),))
    n = len(trace.ops)
    profile = Profile((1e-3,) * n, (0,) * n, Source.ESTIMATED)
    return Problem(trace, profile, small_hardware(), budget_bytes=1 << 40)


def named(problem: Problem, buffers: tuple[int, ...]) -> list[str]:
    return [problem.trace.buffers[b].name for b in buffers]


def test_in_a_chain_every_map_is_one():
    problem = network(skips=False)
    assert named(problem, articulation_points(problem)) == [f"a{i}" for i in range(LAYERS)]


def test_beside_a_skip_only_its_ends_are():
    problem = network(skips=True)
    found = named(problem, articulation_points(problem))
    assert found == ["a0", *(f"a{i}" for i in range(1, LAYERS, 2))]


def test_every_fourth_of_sixteen_is_kept_and_each_op_runs_again_once():
    problem = network(skips=False)
    plan = resolve("chen-sqrt{min_bytes=512B}").plan(problem)
    dropped = [gap.buffer for gap, choice in plan.choices if isinstance(choice, Recompute)]
    names = named(problem, tuple(dropped))
    assert names == [f"a{i}" for i in range(LAYERS) if i % 4 != 3]
    again = [x.action for x in lower(problem, plan).body if isinstance(x.action, Run)]
    assert sum(run.again for run in again) == len(dropped)


def peak(problem: Problem, spec: str) -> int:
    return simulate(problem, lower(problem, resolve(spec).plan(problem))).peak(Tier.DEVICE)


def test_memory_is_that_of_a_segment_and_the_checkpoints():
    problem = network(skips=False)
    most, root = peak(problem, "keep-all"), peak(problem, "chen-sqrt{min_bytes=512B}")
    assert most >= LAYERS * MAP_BYTES
    assert root <= (4 + 4 + 2) * MAP_BYTES


def reruns(problem: Problem, spec: str) -> int:
    actions = (x.action for x in lower(problem, resolve(spec).plan(problem)).body)
    return sum(isinstance(action, Run) and action.again for action in actions)


def test_the_greedy_one_runs_less_again_where_there_is_more_room():
    problem = network(skips=False)
    most = peak(problem, "keep-all")
    found = []
    for share in (0.55, 0.7, 0.9, 1.1):
        tight = replace(problem, budget_bytes=int(most * share))
        assert peak(tight, GREEDY) <= tight.budget_bytes
        found.append(reruns(tight, GREEDY))
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] == 0


def test_what_backward_does_not_read_is_no_checkpoint():
    """Such maps do not cross to backward. Of the maps that do, every k-th is kept."""
    problem = network(skips=False, read_back=2)
    plan = resolve("chen-sqrt{min_bytes=512B}").plan(problem)
    dropped = {gap.buffer for gap, choice in plan.choices if isinstance(choice, Recompute)}
    crossing = [f"a{i}" for i in range(1, LAYERS, 2)]
    kept = [n for n in crossing if n not in named(problem, tuple(dropped))]
    assert kept == crossing[1::2]  # eight cross: every second is kept


def test_no_plan_names_the_leanest():
    problem = replace(network(skips=False), budget_bytes=2 * MAP_BYTES)
    with pytest.raises(InfeasibleError, match="chen-sqrt") as caught:
        resolve(GREEDY).plan(problem)
    roomy = replace(problem, budget_bytes=caught.value.floor_bytes)
    assert resolve(GREEDY).plan(roomy).choices
