"""Policies: the registry, specs as text, what every policy's plan promises, and floors."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outcore.errors import InfeasibleError, PolicyError
from outcore.ir.hardware import Hardware, Link, Tier
from outcore.ir.liveness import gaps, liveness
from outcore.ir.memory import fits
from outcore.ir.plan import Offload, Recompute
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile, Source
from outcore.ir.store import digest
from outcore.ir.trace import Effect, Phase, Ref, Role
from outcore.lower import lower
from outcore.policies import (
    POLICIES,
    Floor,
    floor,
    floor_plan,
    parse_policy,
    reruns,
    resolve,
    spec_text,
)
from outcore.policies.candidates import candidates, ops_again, recomputable
from outcore.policies.floor import plan_floor
from outcore.policies.keep_all import KeepAll
from outcore.policies.pooch.log import KEEP, OFFLOAD, RECOMPUTE
from outcore.policies.pooch.model import PoochModel
from outcore.policies.pooch.plan import choices_of, one_ahead, published
from outcore.policies.pooch.pooch import Pooch
from outcore.policies.recompute_all import RecomputeAll
from outcore.policies.settle import settle
from outcore.policies.superneurons.cost_aware import Recomputation
from outcore.policies.workspaces import Algorithms
from outcore.simulate import simulate
from outcore.spec import SpecParser
from tests.pure.building import TraceBuilder, small_problem
from tests.pure.strategies import problems, traces

DOCS = Path(__file__).parents[2] / "docs" / "policies"

SPECS = (
    "keep-all",
    "swap-all-naive{min_bytes=1B}",
    "swap-all{min_bytes=1B}",
    "swap-all{min_bytes=1B,early=true}",
    "recompute-all{min_bytes=1B}",
    "recompute-all{min_bytes=1B,max_ops=3,stay=true}",
    "swap-opt{min_bytes=1B}",
    "swap-opt{min_bytes=1B,early=true}",
    "pooch{min_bytes=1B}",
    "pooch{min_bytes=1B,early=true}",
    "pooch-paper{min_bytes=1B}",
    "pooch-paper{min_bytes=1B,leaves=3}",
    "vdnn-all{min_bytes=1B}",
    "vdnn-all{min_bytes=1B,algorithms=performance}",
    "vdnn-conv{min_bytes=1B}",
    "vdnn-conv{min_bytes=1B,algorithms=performance}",
    "vdnn-dyn{min_bytes=1B}",
    "superneurons{min_bytes=1B}",
    "superneurons-cost-aware{min_bytes=1B}",
    "superneurons-cost-aware{min_bytes=1B,cache=false}",
    "superneurons-cost-aware{min_bytes=1B,workspaces=false}",
    "superneurons-cost-aware{min_bytes=1B,replay=none}",
    "superneurons-cost-aware{min_bytes=1B,replay=memory-centric}",
    "lms{min_bytes=1B}",
    "lms{min_bytes=1B,threshold=2,ahead=1,groupby=0,sync=1}",
    "window{min_bytes=1B}",
    "window{min_bytes=1B,lookahead=0.3}",
    "cheap{min_bytes=1B}",
    "cheap{min_bytes=1B,early=true}",
    "chen-sqrt{min_bytes=1B}",
    "chen-sqrt{min_bytes=1B,greedy=true}",
    "search{min_bytes=1B,effort=0.002}",
    "search{min_bytes=1B,effort=0.0}",
)
"""Every policy, deciding on buffers as small as those of the drawn traces."""

drawn = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])


# ---- the registry -------------------------------------------------------------------------------


def test_the_table_names_each_policy_by_its_name():
    assert {name: kind.name for name, kind in POLICIES.items()} == {n: n for n in POLICIES}


def test_every_policy_is_tested_here():
    assert {parse_policy(spec).name for spec in SPECS} == set(POLICIES)


@pytest.mark.parametrize("kind", POLICIES.values(), ids=POLICIES)
def test_a_policy_is_a_frozen_slotted_dataclass_with_a_summary_and_a_page(kind):
    policy = kind()
    assert not hasattr(policy, "__dict__")
    with pytest.raises((AttributeError, TypeError)):
        policy.min_bytes = 1
    assert kind.summary
    assert "\n" not in kind.summary
    assert not kind.summary.endswith(".")
    assert (DOCS / f"{kind.name}.md").read_text(encoding="utf-8").startswith(f"# {kind.name}\n")


@pytest.mark.parametrize("kind", POLICIES.values(), ids=POLICIES)
def test_the_page_of_a_policy_names_its_options(kind):
    page = (DOCS / f"{kind.name}.md").read_text(encoding="utf-8")
    assert all(f"`{field.name}`" in page for field in fields(kind))


# ---- specs --------------------------------------------------------------------------------------

_VALUES = {
    "int": st.integers(1, 2**40),
    "bool": st.booleans(),
    "float": st.floats(1e-3, 1e3),
    "Recomputation": st.sampled_from(Recomputation),
    "Algorithms": st.sampled_from(Algorithms),
}
_RANGES = {"sync": st.integers(0, 3)}
"""Options that accept fewer values than their type has."""


@st.composite
def policies(draw):
    kind = draw(st.sampled_from(list(POLICIES.values())))
    values = {f.name: _RANGES.get(f.name, _VALUES[f.type]) for f in fields(kind)}
    return kind(**{name: draw(value) for name, value in values.items()})


@given(policies())
def test_parsing_a_spec_undoes_printing_it(policy):
    assert parse_policy(spec_text(policy)) == policy


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_without_options_prints_as_its_name(name):
    assert spec_text(parse_policy(name)) == name


def test_options_are_printed_in_the_largest_unit_that_is_exact():
    assert spec_text(Pooch(min_bytes=128 * 2**10)) == "pooch{min_bytes=128KiB}"
    assert spec_text(Pooch(min_bytes=1000, early=True)) == "pooch{min_bytes=1000B,early=true}"


def test_spaces_and_empty_braces_are_read():
    assert parse_policy(" pooch { min_bytes = 1MiB , early = true } ") == Pooch(2**20, early=True)
    assert parse_policy("pooch{}") == Pooch()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("poch", "policy 'poch': unknown policy 'poch': did you mean 'pooch'? Known: cheap, "),
        ("", "unknown policy '': Known: cheap, "),
        ("Pooch", "did you mean 'pooch'?"),
        ("pooch{min_byte=1KiB}", "unknown option 'min_byte': did you mean 'min_bytes'?"),
        ("keep-all{min_bytes=1KiB}", "unknown option 'min_bytes': it has none"),
        (
            "pooch{min_bytes=64}",
            "min_bytes=64: cannot read '64' as a size: 64 of what? Write 64GiB, or",
        ),
        ("pooch{min_bytes=0B}", "min_bytes=0B: '0B' is 0 bytes: a size is at least one byte"),
        ("pooch{early=yes}", "early=yes: write true or false"),
        ("window{lookahead=wide}", "lookahead=wide: write a number"),
        ("recompute-all{max_ops=few}", "max_ops=few: write a whole number"),
        ("recompute-all{max_ops=-1}", "max_ops=-1: it is a number of ops, or 0 for no limit"),
        (
            "superneurons-cost-aware{replay=fast}",
            "replay=fast: write one of none, speed-centric, memory-centric, cost-aware",
        ),
        ("pooch{early}", "cannot read 'early': write option=value"),
        ("pooch{early=true,early=true}", "option early is given twice"),
        ("pooch{", "it is not a spec: write a name, or a name and options as in pooch{"),
        ("pooch{}x", "it is not a spec"),
    ],
)
def test_a_wrong_spec_is_answered_with_what_would_do(spec, said):
    with pytest.raises(PolicyError) as caught:
        parse_policy(spec)
    assert said in str(caught.value)


@dataclass(frozen=True)
class Within:
    """What a package may register: a limit that need not be given."""

    name: ClassVar[str] = "within"
    depth: int | None = 3
    limit_bytes: int | None = None


def test_an_option_may_be_none():
    def wrong(spec, reason):
        return PolicyError(policy=spec, reason=reason)

    parser = SpecParser("policy", "within{depth=1}", {"within": Within}, wrong)
    assert parser.parse("within") == Within()
    assert parser.parse("within{depth=none,limit_bytes=2MiB}") == Within(None, 2**21)
    for policy in (Within(), Within(None, 1000), Within(7, None)):
        assert parser.parse(spec_text(policy)) == policy
    for option, wanted in (("depth=deep", "write a whole number"), ("limit_bytes=3", "3 of what")):
        with pytest.raises(PolicyError, match=wanted):
            parser.parse(f"within{{{option}}}")


def test_a_policy_made_by_hand_is_checked_too():
    with pytest.raises(PolicyError, match="at least 1B"):
        Pooch(min_bytes=0)


def test_resolve_takes_a_spec_or_a_policy():
    assert resolve("pooch{early=true}") == Pooch(early=True)
    policy = KeepAll()
    assert resolve(policy) is policy


# ---- plans --------------------------------------------------------------------------------------


def needed(policy, problem) -> tuple[str, int]:
    """The tier and the bytes that the policy needs; the device budget if it has a plan."""
    try:
        policy.plan(problem)
    except InfeasibleError as error:
        return error.tier, error.floor_bytes
    return "device", problem.budget_bytes


@pytest.mark.parametrize("spec", SPECS)
@drawn
@given(problem=problems())
def test_a_policy_gives_a_plan_that_fits_or_the_budget_that_would_do(spec, problem):
    policy = parse_policy(spec)
    tier, floor_bytes = needed(policy, problem)
    assert tier == "device"
    assert floor_bytes >= problem.budget_bytes
    problem = replace(problem, budget_bytes=floor_bytes)
    plan = policy.plan(problem)
    program = lower(problem, plan)
    assert fits(problem, program)
    assert plan.policy == spec_text(policy)
    assert plan.problem_digest == digest(problem)
    assert plan.trace_digest == digest(problem.trace)
    costs = (problem.profile.cost(op.id, plan.variant(op.id)) for op in problem.trace.ops)
    keeping = sum(cost.seconds for cost in costs)  # of keeping all, with its variants
    assert simulate(problem, program).seconds >= keeping * (1 - 1e-9)


CHOOSING = {"vdnn-all", "vdnn-conv", "vdnn-dyn", "superneurons-cost-aware", "search"}
"""Policies that choose among variants: superneurons-cost-aware with `workspaces`, search if its
start does (the floor's plan has the smallest workspaces)."""


@drawn
@given(
    problem=problems(),
    spec=st.sampled_from(
        [s for s in SPECS if parse_policy(s).name not in CHOOSING or "workspaces=false" in s]
    ),
)
def test_alternatives_are_nothing_to_policies_that_do_not_choose(problem, spec):
    plain = replace(problem, profile=replace(problem.profile, alternatives=()))
    policy = parse_policy(spec)
    found: list[object] = []
    for each in (problem, plain):
        try:
            plan = policy.plan(each)
        except InfeasibleError as error:
            found.append((error.tier, error.floor_bytes))
        else:
            assert plan.variants == ()
            found.append(plan.choices)
    assert found[0] == found[1]


@drawn
@given(problem=problems())
def test_keep_all_takes_the_time_of_its_ops_and_moves_nothing(problem):
    roomy = replace(problem, budget_bytes=1 << 40)
    plan = KeepAll().plan(roomy)
    assert plan.choices == ()
    seconds = simulate(roomy, lower(roomy, plan)).seconds
    assert seconds == pytest.approx(sum(problem.profile.seconds))


@drawn
@given(problem=problems(), spec=st.sampled_from(SPECS))
def test_planning_is_deterministic(problem, spec):
    roomy = replace(problem, budget_bytes=1 << 20)
    assert parse_policy(spec).plan(roomy) == parse_policy(spec).plan(roomy)


@drawn
@given(problem=problems())
def test_policies_do_what_their_names_say(problem):
    roomy = replace(problem, budget_bytes=1 << 40)
    crossing = set(candidates(roomy, 1))
    again = recomputable(roomy, crossing)
    for spec in ("swap-all-naive{min_bytes=1B}", "swap-all{min_bytes=1B}"):
        choices = parse_policy(spec).plan(roomy).by_gap
        assert set(choices) == crossing
        assert all(isinstance(choice, Offload) for choice in choices.values())
    choices = RecomputeAll(min_bytes=1).plan(roomy).by_gap
    assert {gap for gap, choice in choices.items() if isinstance(choice, Recompute)} == again
    assert set(choices) == crossing
    for spec in ("swap-opt{min_bytes=1B}", "pooch{min_bytes=1B}"):
        assert parse_policy(spec).plan(roomy).choices == (), "what fits is kept"


@given(problem=problems(), mutating=traces(mutates=True))
def test_recomputable_is_what_every_op_to_run_again_allows(problem, mutating):
    for trace in (problem.trace, mutating):
        live = liveness(trace)
        mutated = {
            b: op.id for op in trace.ops if Effect.MUTATES in op.effects for b in trace.reads[op.id]
        }

        def sound(op, trace=trace, mutated=mutated):
            if op is None or not trace.ops[op].repeatable:
                return False
            return all(mutated.get(b, -1) <= op for b in trace.reads[op])

        every = gaps(trace)
        expected = {gap for gap in every if all(map(sound, ops_again(trace, live, gap)))}
        assert recomputable(replace(problem, trace=trace), every) == expected


@drawn
@given(problem=problems(), data=st.data())
def test_what_poochs_model_says_fits_does_fit(problem, data):
    crossing = candidates(problem, 1)
    again = recomputable(problem, crossing)
    if not crossing:
        return
    kinds = [
        data.draw(st.sampled_from([KEEP, OFFLOAD, *([RECOMPUTE] * (gap in again))]))
        for gap in crossing
    ]
    tier = problem.hardware.outer
    schedule = data.draw(st.sampled_from([published, one_ahead, None]))
    model = PoochModel(problem, crossing, tier, problem.budget_bytes, early=schedule is None)
    if model.fits(kinds):
        settle(problem, choices_of(model, kinds, tier, schedule), Pooch())


# ---- the floor ----------------------------------------------------------------------------------


@drawn
@given(problem=problems())
def test_the_floor_plan_fits_at_the_floor_and_not_below(problem):
    lowest = floor(problem)
    at_floor = replace(problem, budget_bytes=max(1, lowest.nbytes))
    plan = floor_plan(at_floor)
    assert fits(at_floor, lower(at_floor, plan))
    below = replace(problem, budget_bytes=lowest.nbytes - 1)
    with pytest.raises(InfeasibleError) as caught:
        floor_plan(below)
    assert caught.value.floor_bytes == lowest.nbytes
    assert caught.value.op == lowest.op
    assert caught.value.weights_bytes <= lowest.nbytes


@drawn
@given(problem=problems(), spec=st.sampled_from(SPECS))
def test_no_plan_needs_less_than_the_floor(problem, spec):
    roomy = replace(problem, budget_bytes=1 << 40)
    # Without padding and donations. With them, other plans may need less than the floor's plan:
    # a copy needs room to align, and a donation needs a dying argument.
    plain = replace(roomy, hardware=replace(roomy.hardware, fetch_padding_bytes=0))
    bare = replace(plain, trace=replace(plain.trace, donations=()))
    plan = parse_policy(spec).plan(bare)
    assert floor(bare).nbytes <= plan_floor(bare, plan).nbytes


# ---- by hand ------------------------------------------------------------------------------------

KIB = 1024


def chain(sizes=(64, 64, 64, 64), effects=None, *, in_place=False) -> Problem:
    """x -> a -> b -> ... forward, each read again by its own backward op in reverse order.

    `sizes` are KiB per activation, `effects` by position; `in_place`: the last forward op writes x.
    """
    t = TraceBuilder()
    x = t.new(64 * 256, Role.INPUT, borrowed=True, name="x")
    made = [x]
    for i, size in enumerate(sizes):
        out = t.new(size * 256, Role.ACTIVATION, name=f"a{i}")
        t.op("test.f", (Ref(made[-1]),), (out,), effects=(effects or {}).get(i, ()))
        made.append(out)
    loss = t.new(256, Role.ACTIVATION, name="loss")
    t.op("test.loss", (Ref(made[-1]),), (loss,))
    if in_place:
        t.op("test.copy_", (Ref(x), Ref(loss)), (None,), effects=[Effect.MUTATES])
    grad = t.new(256, Role.GRAD, name="tangent")
    tangent = grad
    for value in reversed(made[1:]):
        new = t.new(256, Role.GRAD)
        t.op("test.b", (Ref(grad), Ref(value)), (new,), Phase.BACKWARD)
        grad = new
    trace = t.trace([x], (Ref(loss),), [tangent], (Ref(grad),))
    return problem_of(trace, budget_bytes=1 << 30)


def problem_of(trace, budget_bytes, host_bytes=1 << 30) -> Problem:
    link = Link(1e9)
    hardware = Hardware(
        "hand",
        ((Tier.DEVICE, 1 << 30), (Tier.HOST, host_bytes)),
        ((Tier.DEVICE, Tier.HOST, link), (Tier.HOST, Tier.DEVICE, link)),
    )
    n = len(trace.ops)
    return Problem(trace, Profile((1e-3,) * n, (0,) * n, Source.ESTIMATED), hardware, budget_bytes)


def buffers_of(gaps_):
    return [gap.buffer for gap in gaps_]


def test_candidates_cross_the_boundary_and_are_large_enough():
    problem = chain((64, 63, 64, 64))
    assert buffers_of(candidates(problem, 64 * KIB)) == [1, 3, 4]
    assert buffers_of(candidates(problem, 1)) == [1, 2, 3, 4]


def test_candidates_come_in_order_of_their_last_forward_use():
    t = TraceBuilder()
    x = t.new(64, Role.INPUT, borrowed=True)
    early, late, out = (t.new(64, Role.ACTIVATION) for _ in range(3))
    t.op("test.f", (Ref(x),), (late,))
    t.op("test.f", (Ref(late),), (early,))
    t.op("test.add", (Ref(early), Ref(late)), (out,))
    tangent, grad = (t.new(64, Role.GRAD) for _ in range(2))
    t.op("test.b", (Ref(tangent), Ref(late), Ref(early)), (grad,), Phase.BACKWARD)
    problem = problem_of(t.trace([x], (Ref(out),), [tangent], (Ref(grad),)), 1 << 20)
    buffer = [problem.trace.values[v].buffer for v in (early, late)]
    assert buffers_of(candidates(problem, 1)) == buffer, (
        "both last used by add: its arguments' order"
    )


def test_what_an_unrepeatable_op_made_is_no_start_for_recomputation():
    problem = chain(effects={1: [Effect.UNREPEATABLE]})
    assert sorted(buffers_of(recomputable(problem, candidates(problem, 1)))) == [1, 3, 4]


def test_a_random_op_may_run_again():
    problem = chain(effects={1: [Effect.RANDOM]})
    assert len(recomputable(problem, candidates(problem, 1))) == 4


def test_what_is_computed_from_a_buffer_that_is_mutated_later_is_not_recomputed():
    problem = chain(in_place=True)
    assert sorted(buffers_of(recomputable(problem, candidates(problem, 1)))) == [2, 3, 4]


def test_ops_again_grows_with_what_was_dropped():
    problem = chain()
    trace, live = problem.trace, liveness(problem.trace)
    last = candidates(problem, 1)[-1]
    assert ops_again(trace, live, last) == {3}
    dropped = {gap.buffer: gap.before for gap in candidates(problem, 1)[1:]}
    assert ops_again(trace, live, last, dropped) == {1, 2, 3}


def test_recompute_all_bounds_the_ops_of_a_recomputation():
    problem = chain((64,) * 7)
    plan = RecomputeAll(max_ops=2).plan(problem)
    offloaded = [gap.buffer for gap, c in plan.choices if isinstance(c, Offload)]
    assert offloaded == [3, 6]
    runs = [step for step in lower(problem, plan).body if getattr(step.action, "again", False)]
    assert len(runs) == 2 + 1 + 2 + 1 + 1, "each recomputed buffer drops what it passes through"
    stay = RecomputeAll(max_ops=2, stay=True).plan(problem)
    runs = [step for step in lower(problem, stay).body if getattr(step.action, "again", False)]
    assert len(runs) == 5, "each op once"


def test_recompute_all_of_a_deep_network_is_a_program_that_memory_holds(monkeypatch):
    problem = chain((64,) * 40)
    deep = RecomputeAll().plan(problem)
    monkeypatch.setattr(reruns, "MOST_AGAIN", 100)
    limited = RecomputeAll().plan(problem)
    counts = [
        sum(getattr(step.action, "again", False) for step in lower(problem, plan).body)
        for plan in (deep, limited)
    ]
    assert counts[0] > 700
    assert 50 < counts[1] <= 200
    assert (
        RecomputeAll(stay=True).plan(problem).by_gap
        == RecomputeAll(stay=True, max_ops=999).plan(problem).by_gap
    )


@pytest.mark.parametrize("spec", ["superneurons", "cheap"])
def test_what_is_recomputed_by_a_rule_is_a_program_that_memory_holds(spec, monkeypatch):
    deep = chain((64,) * 80)
    profile = replace(deep.profile, seconds=(1e-6,) * len(deep.trace.ops))
    problem = replace(deep, budget_bytes=40 * 64 * KIB, profile=profile)
    plans = [resolve(spec).plan(problem)]
    monkeypatch.setattr(reruns, "MOST_AGAIN", 100)
    plans.append(resolve(spec).plan(problem))
    free, limited = (
        sum(getattr(step.action, "again", False) for step in lower(problem, plan).body)
        for plan in plans
    )
    assert free > 700
    assert 50 < limited <= 200


def test_without_an_outer_tier_nothing_is_offloaded():
    problem = problem_of(chain().trace, 1 << 30, host_bytes=0)
    for spec in ("swap-all", "swap-opt", "pooch"):
        assert parse_policy(spec).plan(problem).choices == ()
    choices = RecomputeAll().plan(problem).by_gap.values()
    assert choices
    assert all(isinstance(choice, Recompute) for choice in choices)
    problem = problem_of(chain((64,) * 8).trace, 1 << 30, host_bytes=0)
    assert floor(problem).nbytes < plan_floor(problem, KeepAll().plan(problem)).nbytes
    tight = replace(problem, budget_bytes=floor(problem).nbytes)
    assert any(isinstance(choice, Recompute) for _, choice in floor_plan(tight).choices)


def test_an_outer_tier_that_is_too_small_is_named():
    problem = replace(chain(), host_budget_bytes=130 * KIB)
    with pytest.raises(InfeasibleError, match="no plan fits a host budget of 130 KiB") as caught:
        parse_policy("swap-all").plan(problem)
    assert caught.value.tier == "host"
    assert caught.value.floor_bytes == 256 * KIB
    enough = replace(problem, host_budget_bytes=caught.value.floor_bytes)
    assert fits(enough, lower(enough, parse_policy("swap-all").plan(enough)))


def test_a_policy_that_cannot_meet_the_budget_says_which_and_what_it_needs():
    problem = replace(chain(), budget_bytes=200 * KIB)
    with pytest.raises(InfeasibleError) as caught:
        KeepAll().plan(problem)
    assert caught.value.policy == "keep-all"
    assert caught.value.op.startswith("op 5 test.b at")
    assert "needs 323 KiB (330752 bytes) at once under policy keep-all" in str(caught.value)
    assert caught.value.floor_bytes == 323 * KIB


def test_what_fails_first_is_named_and_then_the_outer_tier_that_would():
    effects = {i: [Effect.UNREPEATABLE] for i in range(4)}
    problem = replace(chain(effects=effects), budget_bytes=100 * KIB, host_budget_bytes=64 * KIB)
    with pytest.raises(InfeasibleError, match="no plan fits a device budget of 100 KiB") as caught:
        resolve("superneurons").plan(problem)
    assert caught.value.floor_bytes == 192 * KIB
    assert caught.value.at_least, "it takes more than that on the device as well"
    (note,) = caught.value.__notes__
    assert note.startswith("outcore: with that budget, no plan fits a host budget of 64.0 KiB")


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("spec", SPECS)
def test_an_error_keeps_nothing_of_its_callers_alive(spec):
    """As one does that lies in a list of a function that it came through."""

    class Held:
        pass

    def refused(_: object) -> None:
        with suppress(InfeasibleError):
            resolve(spec).plan(replace(chain(), budget_bytes=1))

    held = Held()
    alive = weakref.ref(held)
    refused(held)
    del held
    assert alive() is None


def test_weights_are_told_that_no_batch_makes_fewer():
    problem = small_problem(budget_bytes=100)
    weights = [b for b in problem.trace.buffers if b.role is Role.PARAM]
    with pytest.raises(InfeasibleError) as caught:
        KeepAll().plan(problem)
    assert caught.value.weights_bytes == 2 * sum(b.nbytes for b in weights), "and their gradients"
    assert len(weights) == 2


def test_the_floor_names_its_op():
    assert floor(chain()) == Floor(192 * KIB, "op 1 test.f at layers.1 (net.py:11)", 192 * KIB)


def test_the_floor_counts_what_is_outside_and_between():
    problem = replace(chain(), outside_bytes=KIB, between_bytes=1000 * KIB)
    pause = "the pause between the forward and the backward call"
    assert floor(problem) == Floor(1067 * KIB, pause, 1066 * KIB)


def test_the_floor_plan_prefers_few_copies():
    problem = chain((64, 64, 64, 64))
    assert set(floor_plan(problem).by_gap) == set(candidates(problem, 64 * KIB))
    small = chain((60, 60, 60, 60))
    tight = replace(small, budget_bytes=floor(small).nbytes)
    assert set(floor_plan(tight).by_gap) == set(gaps(small.trace))
