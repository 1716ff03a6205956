"""LMS: levels, swaps, the replay of memory, tuning, and plans for which the replay is wrong."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outcore.errors import InfeasibleError, PolicyError
from outcore.ir.hardware import Tier
from outcore.ir.memory import fits
from outcore.ir.plan import Gap, make_plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile, Source
from outcore.ir.trace import Donation, Phase, Ref, Role
from outcore.lower import lower
from outcore.policies import parse_policy
from outcore.policies.floor import plan_floor
from outcore.policies.lms.levels import levels
from outcore.policies.lms.lms import Lms
from outcore.policies.lms.replay import Replay
from outcore.policies.lms.swaps import Setting, choices, edges
from outcore.policies.lms.tune import TUNED, largest, tighten, tune
from tests.pure.building import TraceBuilder, small_hardware
from tests.pure.strategies import problems

drawn = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def step(text: str, donations=(), *, borrowed=True) -> Problem:
    """A step of one op per word: `c:100<a,b` makes c, of 100 bytes, from a and b.

    `|` separates forward from backward ops. `x` is the caller's input and `t` the tangent, 4 bytes
    each. Each call returns what its last op makes. `donations`: (source, target) by name.
    """
    t = TraceBuilder()
    value = {"x": t.new(1, Role.INPUT, borrowed=borrowed), "t": t.new(1, Role.GRAD)}
    forward, backward = (part.split() for part in text.split("|"))
    last = {}
    words = [(Phase.FORWARD, w) for w in forward] + [(Phase.BACKWARD, w) for w in backward]
    made_by = {}
    for phase, word in words:
        made, reads = word.split("<")
        name, nbytes = made.split(":")
        value[name] = t.new(int(nbytes) // 4, Role.ACTIVATION, name=name)
        args = tuple(Ref(value[r]) for r in reads.split(",") if r)
        made_by[name] = t.op("test.f", args, (value[name],), phase)
        last[phase] = value[name]
    t.donations += [Donation(made_by[b], value[a], value[b]) for a, b in donations]
    results = (Ref(last[Phase.FORWARD]),), [value["t"]], (Ref(last[Phase.BACKWARD]),)
    trace = t.trace([value["x"]], *results)
    n = len(trace.ops)
    profile = Profile((1e-3,) * n, (0,) * n, Source.ESTIMATED)
    return Problem(trace, profile, small_hardware(), budget_bytes=1 << 40)


def swapped(problem: Problem, setting: Setting) -> dict:
    """The offloads of `setting`, by buffer name and the ops around the gap."""
    found = choices(edges(problem.trace, 1), setting, Tier.HOST)
    name = {b.id: b.name for b in problem.trace.buffers}
    return {(name[gap.buffer], gap.after, gap.before): choice for gap, choice in found.items()}


SKIP = step("a:100<x b:100<a c:100<b d:100<a,c l:4<d | e:100<t,d f:100<e,c g:100<f,a")
"""Levels 0 1 2 3 4, the pause 5, then 6 7 8."""


# ---- levels --------------------------------------------------------------------------------------


def test_levels_are_the_longest_paths():
    found = levels(SKIP.trace)
    assert found.level.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    branches = step("a:4<x b:4<x c:4<b d:4<a,c | e:4<t f:4<e,a g:4<t")
    assert levels(branches.trace).level.tolist() == [0, 0, 1, 2, 3, 4, 5, 4]


def test_all_backward_ops_are_above_all_forward_ops():
    found = levels(step("a:4<x b:4<a c:4<b d:4<x | e:4<x f:4<e,d").trace)
    assert found.level.tolist() == [0, 1, 2, 0, 3, 4, 5]
    assert found.count == 6


def test_a_step_without_a_backward_pass_ends_with_the_pause():
    t = TraceBuilder()
    x, a = t.new(1, Role.INPUT, borrowed=True), t.new(1, Role.ACTIVATION)
    t.op("test.f", (Ref(x),), (a,))
    assert levels(t.trace([x], (Ref(a),))).level.tolist() == [0, 1]


def test_an_ancestor_is_reached_by_a_longest_path():
    found = levels(step("a:4<x b:4<x c:4<b d:4<a,c | e:4<t f:4<e,a g:4<t h:4<g,f").trace)
    last = np.array([found.node(7)])
    path = [int(found.ancestors(last, steps)[0]) for steps in range(7)]
    assert path == [8, 6, 5, 4, 3, 2, 1], "h, f, e, the pause, d, c, b: a is no longest way to d"
    assert [found.op_after(node) for node in path[1:]] == [6, 5, 4, 4, 3, 2]


@drawn
@given(problem=problems())
def test_each_op_is_above_what_it_reads_and_right_above_its_ancestor(problem):
    trace, found = problem.trace, levels(problem.trace)
    made_by = {b: op for op, writes in enumerate(trace.writes) for b in writes}
    for op, reads in enumerate(trace.reads):
        node = found.node(op)
        below = [found.node(made_by[b]) for b in reads if b in made_by]
        assert all(found.level[n] < found.level[node] for n in below)
        if found.level[node]:
            before = int(found.ancestors(np.array([node]), 1)[0])
            assert found.level[before] == found.level[node] - 1
            assert before in below or before == found.pause


# ---- swaps ---------------------------------------------------------------------------------------


def test_a_use_further_than_the_threshold_is_swapped_and_one_as_far_is_not():
    assert set(swapped(SKIP, Setting(7, 1, 0, 0))) == {("a", 3, 7)}, "a: levels 0 and 8"
    assert swapped(SKIP, Setting(8, 1, 0, 0)) == {}


def test_the_distance_is_to_the_op_that_makes_it():
    assert set(swapped(SKIP, Setting(3, 1, 0, 0))) == {("a", 3, 7), ("c", 3, 6)}
    assert set(swapped(SKIP, Setting(2, 1, 0, 0))) == {
        ("a", 1, 3),
        ("a", 3, 7),
        ("c", 3, 6),
        ("d", 4, 5),
    }


@pytest.mark.parametrize(("groupby", "shared"), [(0, False), (4, False), (5, True)])
def test_uses_share_a_copy_that_are_no_more_than_groupby_levels_apart(groupby, shared):
    found = swapped(SKIP, Setting(2, 1, groupby, 0))  # a is read at levels 3 and 8
    assert ("a", 1, 3) in found
    assert (("a", 3, 7) not in found) is shared


def test_with_groupby_0_uses_on_one_level_do_not_share():
    problem = step("a:100<x b:100<a l:4<b | e:4<t f:4<t,a g:4<e h:4<t,a i:4<f,g,h")
    assert set(swapped(problem, Setting(2, 1, 1, 0))) == {("a", 1, 4)}
    assert set(swapped(problem, Setting(2, 1, 0, 0))) == {("a", 1, 4), ("a", 4, 6)}


@pytest.mark.parametrize(
    ("ahead", "prefetch"), [(0, 7), (1, 6), (2, 5), (3, 5), (4, 4), (5, 4), (6, 4), (7, 7), (99, 7)]
)
def test_a_copy_back_is_issued_after_an_op_as_many_levels_ahead(ahead, prefetch):
    """Op 5 is at level 6, after the pause. From 4 levels on, the start of the gap is the limit.

    From 7 on, no level is left between the maker and the reader: the copy back is issued right
    before the reader.
    """
    assert swapped(SKIP, Setting(7, ahead, 0, 0))["a", 3, 7].prefetch == prefetch


def test_with_ahead_0_a_copy_back_is_issued_on_the_spot():
    """Right before the reader, op 6, not when its last other argument is made, by op 4."""
    problem = step("a:100<x b:4<a l:4<b | e:4<t f:4<e g:4<t h:4<f,a i:4<g,h")
    assert swapped(problem, Setting(5, 0, 0, 0))["a", 1, 6].prefetch == 6


@pytest.mark.parametrize(
    ("sync", "hints"),
    [(0, (3, None, 6)), (1, (None, 4, 6)), (2, (3, None, 7)), (3, (None, 4, 7))],
)
def test_sync_waits_for_copies(sync, hints):
    choice = swapped(SKIP, Setting(7, 1, 0, sync))["a", 3, 7]
    assert (choice.depart, choice.release, choice.prefetch) == hints


def test_a_copy_out_runs_beside_the_last_near_use_but_not_beside_the_op_that_makes_it():
    found = swapped(step("a:100<x b:100<a l:4<b | e:4<t f:4<e,b g:4<f,a"), Setting(1, 1, 0, 0))
    assert found["a", 1, 5].depart == 1
    far = step("a:100<x b:4<x c:4<b d:4<c,a l:4<d | e:4<t")
    assert swapped(far, Setting(1, 1, 0, 0))["a", 0, 3].depart is None


def test_a_near_use_that_comes_late_in_the_trace_is_waited_for():
    problem = step("a:100<x b:4<a c:4<b d:4<c,a e:4<a l:4<d,e | f:4<t g:4<f,a")
    found = swapped(problem, Setting(2, 1, 0, 0))  # d (op 3) is 3 levels up; e (op 4), only one
    assert {key for key in found if key[0] == "a"} == {("a", 4, 7)}


def test_what_the_caller_passes_in_stays():
    problem = step("a:100<x l:4<a | e:4<t f:4<e,x", borrowed=False)
    assert swapped(problem, Setting(0, 1, 0, 0)) == {}


def test_small_buffers_stay():
    problem = step("a:100<x b:104<a l:4<b | e:4<t,b f:4<e,a")
    assert set(choices(edges(problem.trace, 104), Setting(0, 1, 0, 0), Tier.HOST)) == {
        gap for gap in edges(problem.trace, 1).idle if problem.trace.buffers[gap.buffer].name == "b"
    }


@drawn
@given(problem=problems(), threshold=st.integers(0, 9), groupby=st.integers(0, 9))
def test_less_is_swapped_the_larger_groupby_and_without_it_the_larger_the_threshold(
    problem, threshold, groupby
):
    def swapped_gaps(threshold: int, groupby: int) -> set[Gap]:
        setting = Setting(threshold, 1, groupby, 0)
        return set(choices(edges(problem.trace, 1), setting, Tier.HOST))

    assert swapped_gaps(threshold + 1, 0) <= swapped_gaps(threshold, 0)
    assert swapped_gaps(threshold, groupby + 1) <= swapped_gaps(threshold, groupby)


# ---- the replay ----------------------------------------------------------------------------------

CHAIN = step("a:100<x b:100<a c:100<b l:4<c | gc:100<t,c gb:100<gc,b ga:100<gb,a")
"""Levels 0 1 2 3, the pause 4, then 5 6 7. x, l and ga stay; t is held until gc has run."""

NOTHING = Setting(8, 1, 0, 0)


def replay(problem: Problem, setting: Setting) -> int:
    return Replay(problem, edges(problem.trace, 1)).peak_bytes(setting)


def with_workspace(problem: Problem, op: int, nbytes: int) -> Problem:
    workspace = [nbytes * (i == op) for i in range(len(problem.trace.ops))]
    return replace(problem, profile=replace(problem.profile, workspace_bytes=tuple(workspace)))


def test_the_replay_of_a_chain_by_hand():
    assert replay(CHAIN, NOTHING) == 4 * 100 + 12, "a b c and gc; x l t, while gc runs"
    assert replay(CHAIN, Setting(6, 1, 0, 0)) == 4 * 100 + 8, "a is back while gb runs, t is gone"
    assert replay(CHAIN, Setting(6, 2, 0, 0)) == 4 * 100 + 12, "a is back while gc runs"
    assert replay(CHAIN, Setting(6, 1, 0, 2)) == 3 * 100 + 12, "a is back when ga runs"


@pytest.mark.parametrize(("sync", "held"), [(0, 300), (1, 200), (2, 300), (3, 200)])
def test_a_copy_out_takes_one_op_where_it_is_not_waited_for(sync, held):
    busy = with_workspace(CHAIN, 2, 1000)  # while c is made; a was last read by the op before
    assert replay(busy, Setting(6, 1, 0, sync)) == 1000 + held + 4


def test_the_replay_counts_what_is_held_besides():
    outside = replace(CHAIN, outside_bytes=50)
    assert replay(outside, NOTHING) == replay(CHAIN, NOTHING) + 50
    between = replace(CHAIN, between_bytes=1000)
    assert replay(between, NOTHING) == 1000 + 3 * 100 + 12, "a b c; x l t"
    padded = replace(CHAIN, hardware=replace(CHAIN.hardware, fetch_padding_bytes=8))
    assert replay(padded, Setting(6, 1, 0, 0)) == 4 * 100 + 8 + 8


def test_the_replay_holds_the_callers_input_before_it_is_read():
    problem = step("a:100< b:4<a,x l:4<b | p:4<t,a")
    assert replay(with_workspace(problem, 0, 1000), NOTHING) == 1000 + 100 + 4


def test_a_group_has_one_copy_until_its_last_reader():
    problem = step("a:100<x b:4<a l:4<b | p:4<t,a q:4<p r:4<q,a")
    busy = with_workspace(problem, 4, 1000)  # q, between two readers of a
    assert replay(busy, Setting(2, 1, 2, 2)) == 1000 + 100 + 4 * 4, "a; x l p q"
    assert replay(busy, Setting(2, 1, 1, 2)) == 1000 + 4 * 4


def test_the_replay_passes_at_its_peak_and_not_below():
    at_peak = replace(CHAIN, budget_bytes=412)
    assert Replay(at_peak, edges(CHAIN.trace, 1)).passes(NOTHING)
    below = replace(CHAIN, budget_bytes=411)
    assert not Replay(below, edges(CHAIN.trace, 1)).passes(NOTHING)


@st.composite
def paths(draw):
    """Steps whose levels are in trace order: each op reads what the op before it made."""
    sizes = st.sampled_from([4, 40, 400])
    count = draw(st.integers(2, 8))
    words, made = [f"a0:{draw(sizes)}<x"], ["a0"]
    for i in range(1, 2 * count):
        words += ["|"] * (i == count)
        older = draw(st.lists(st.sampled_from(made), max_size=2))
        near = "t" if i == count else made[-1]
        words.append(f"a{i}:{draw(sizes)}<" + ",".join(dict.fromkeys([near, *older])))
        made.append(f"a{i}")
    return step(" ".join(words))


@drawn
@given(paths(), st.integers(0, 16), st.integers(0, 5))
def test_where_levels_are_the_order_the_replay_is_the_plan_without_overlap(
    problem, threshold, groupby
):
    setting = Setting(threshold, 1, groupby, 3)
    plan = make_plan(choices(edges(problem.trace, 1), setting, Tier.HOST))
    assert replay(problem, setting) == plan_floor(problem, plan).nbytes


# ---- tuning --------------------------------------------------------------------------------------

ALL = Setting(TUNED, TUNED, TUNED, 0)


def bounded(threshold: int = 99, ahead: int = 99, groupby: int = 99, sync: int = 0):
    """A test that settings pass up to these numbers, with at least this `sync`."""

    def passes(s: Setting) -> bool:
        small = s.threshold <= threshold and s.ahead <= ahead and s.groupby <= groupby
        return small and s.sync >= sync

    return passes


def test_each_number_is_tuned_after_the_one_before_it():
    seen = []

    def passes(s: Setting) -> bool:
        seen.append(s)
        return s.threshold <= 5 and s.ahead <= 3 and s.groupby <= 2

    assert tune(passes, ALL, 10) == Setting(5, 3, 2, 0)
    of_threshold = [s for s in seen if (s.ahead, s.groupby) == (1, 0)]
    assert [s.threshold for s in of_threshold] == [1, 5, 8, 6]
    of_groupby = [s.groupby for s in seen if s.groupby]
    assert of_groupby == [10, 5, 2], "everything; then the first that passes"


def test_groupby_takes_in_everything_where_that_passes():
    assert tune(bounded(5, 3), ALL, 10) == Setting(5, 3, 10, 0)
    assert tune(bounded(5, 3, 0), ALL, 10) == Setting(5, 3, 0, 0)


def test_sync_rises_until_the_least_threshold_passes():
    assert tune(bounded(5, 3, 99, sync=1), ALL, 10) == Setting(5, 3, 10, 1)
    assert tune(bounded(5, 3, 99, sync=3), ALL, 10) == Setting(5, 1, 0, 3)
    waited = tune(bounded(5, 3, 99, sync=2), ALL, 10)
    assert waited == Setting(5, 1, 0, 2), "copies back are waited for: nothing else to tune"


def test_where_nothing_passes_all_copies_are_waited_for():
    assert tune(bounded(0), ALL, 10) == Setting(10, 1, 0, 3)


def test_what_is_given_is_not_tuned():
    assert tune(bounded(5, 3), Setting(4, TUNED, 0, 0), 10) == Setting(4, 3, 0, 0)
    assert tune(bounded(5, 3), Setting(TUNED, 2, 1, 0), 10) == Setting(5, 2, 1, 0)
    assert tune(bounded(0), Setting(4, 2, 1, 0), 10) == Setting(4, 2, 1, 0)
    assert tune(bounded(5, 3), Setting(7, TUNED, 0, 0), 10) == Setting(7, 1, 0, 3)


@given(st.sets(st.integers(1, 40)))
def test_what_tuning_finds_has_passed(thresholds):
    def passes(s: Setting) -> bool:
        return s.threshold in thresholds | {1}

    assert passes(tune(passes, ALL, 40))


@given(st.integers(1, 40))
def test_bisection_finds_the_largest_where_a_larger_one_needs_more(most):
    found = largest(bounded(threshold=most), Setting(1, 1, 0, 0), "threshold", 30)
    assert found.threshold == min(most, 30)


def test_a_setting_that_does_not_fit_is_made_tighter_step_by_step():
    found = Setting(6, 2, 9, 1)
    assert tighten(bounded(), found, ALL) == found
    assert tighten(bounded(groupby=3), found, ALL) == Setting(6, 2, 0, 1)
    assert tighten(bounded(threshold=4, groupby=3), found, ALL) == Setting(4, 2, 0, 1)
    assert tighten(bounded(threshold=0), found, ALL) == Setting(1, 2, 0, 1)
    given_threshold = Setting(6, TUNED, TUNED, 0)
    assert tighten(bounded(threshold=4), found, given_threshold) == Setting(6, 2, 0, 1)
    assert tighten(bounded(threshold=4), found, found) == found


# ---- the policy ----------------------------------------------------------------------------------


def names(problem: Problem, plan) -> set[str]:
    return {problem.trace.buffers[gap.buffer].name for gap, _ in plan.choices}


def test_what_fits_is_kept():
    problem = replace(CHAIN, budget_bytes=412)
    assert Lms(1).plan(problem).choices == ()
    assert Lms(1, threshold=6).plan(problem).choices, "a threshold that is given is obeyed"


def test_under_the_peak_what_is_read_last_leaves():
    problem = replace(CHAIN, budget_bytes=411)
    plan = Lms(1).plan(problem)
    assert [gap for gap, _ in plan.choices] == [Gap(2, 1, 6)], "a, between b and ga"
    assert fits(problem, lower(problem, plan))


def test_the_setting_is_the_tuned_one():
    problem = replace(CHAIN, budget_bytes=408)
    assert Lms(1).plan(problem).by_gap == choices(
        edges(problem.trace, 1), Setting(6, 1, 8, 0), Tier.HOST
    )


EARLY = step("a:400<x s:4<x u:4<s v:4<u b:400<v w:4<b y:4<a,u l:4<w,y | e:4<t,s")
"""By level, y (level 2) reads a before b (level 3) is made; in the trace, it reads a after."""


def test_where_the_replay_passes_and_the_plan_does_not_fit_the_threshold_falls():
    problem = replace(EARLY, budget_bytes=500)
    found = edges(problem.trace, 1)
    assert Replay(problem, found).passes(Setting(found.levels.count, 1, 0, 0))
    assert plan_floor(problem, make_plan({})).nbytes > 500
    plan = Lms(1).plan(problem)
    assert "a" in names(problem, plan)
    assert fits(problem, lower(problem, plan))


DONATING = step("a:100<x b:100<a l:4<b | p:400<t q:400<p r:4<q,b s:4<r,a", donations=[("p", "q")])
"""p and q need 400 bytes together; the replay, which ignores donations, counts 800."""


def test_what_fits_without_the_replay_knowing_is_kept():
    text = "a:400<x b:400<a l:4<b | p:400<t q:400<p r:4<q,b s:4<r,a"
    problem = step(text, donations=[("p", "q")])
    problem = replace(problem, budget_bytes=plan_floor(problem, make_plan({})).nbytes)
    found = Replay(problem, edges(problem.trace, 1))
    assert not found.passes(NOTHING)
    assert found.passes(Setting(1, 1, 0, 0)), "tuning would swap"
    assert Lms(1).plan(problem).choices == ()


def test_where_no_replay_passes_the_plan_decides():
    problem = replace(DONATING, budget_bytes=520)
    found = edges(problem.trace, 1)
    assert not Replay(problem, found).passes(Setting(1, 1, 0, 3))
    assert plan_floor(problem, make_plan({})).nbytes > 520
    plan = Lms(1).plan(problem)
    assert names(problem, plan) == {"a"}, "the largest threshold that fits"
    (gap, choice), *_ = plan.choices
    assert (choice.release, choice.prefetch) == (gap.after + 1, gap.before)


def test_below_what_it_can_meet_it_names_the_smallest_budget():
    with pytest.raises(InfeasibleError, match="lms") as caught:
        Lms(1).plan(replace(CHAIN, budget_bytes=100))
    lowest = caught.value.floor_bytes
    assert Lms(1).plan(replace(CHAIN, budget_bytes=lowest)).choices
    with pytest.raises(InfeasibleError):
        Lms(1).plan(replace(CHAIN, budget_bytes=lowest - 1))


def test_the_smallest_budget_may_be_that_of_keeping_everything():
    hardware = replace(CHAIN.hardware, fetch_padding_bytes=400)
    problem = replace(CHAIN, hardware=hardware, budget_bytes=411)
    with pytest.raises(InfeasibleError) as caught:
        Lms(1).plan(problem)
    assert caught.value.floor_bytes == 412


def test_without_an_outer_tier_everything_is_kept():
    hardware = replace(CHAIN.hardware, capacity_bytes=((Tier.DEVICE, 1 << 20),))
    problem = replace(CHAIN, hardware=hardware)
    assert Lms(1, threshold=0).plan(problem).choices == ()


def test_a_host_that_is_too_small_is_named():
    with pytest.raises(InfeasibleError) as caught:
        Lms(1, threshold=6).plan(replace(CHAIN, host_budget_bytes=50))
    assert caught.value.tier == "host"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("lms{threshold=-2}", "threshold=-2: it is a number of levels, or -1"),
        ("lms{groupby=-5}", "groupby=-5: it is a number of levels, or -1"),
        ("lms{sync=4}", "sync=4: it is 0, 1 (out), 2 (back) or 3 (both)"),
    ],
)
def test_a_wrong_option_is_answered(spec, said):
    with pytest.raises(PolicyError) as caught:
        parse_policy(spec)
    assert said in str(caught.value)
