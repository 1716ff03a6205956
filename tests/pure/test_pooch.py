"""PoocH on Chainer's ResNet-50: the figures of its paper, and the parts of its model."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from statistics import median
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outcore.errors import InfeasibleError
from outcore.ir.hardware import Tier
from outcore.ir.liveness import liveness
from outcore.ir.memory import fits
from outcore.ir.plan import Keep, Offload, Recompute
from outcore.ir.store import digest
from outcore.ir.trace import Phase
from outcore.ir.verify import verify_trace
from outcore.lower import lower
from outcore.policies import resolve
from outcore.policies.candidates import candidates
from outcore.policies.pooch import plan as pooch_plan_module
from outcore.policies.pooch.clock import (
    backward_seconds,
    step_seconds,
    waited,
)
from outcore.policies.pooch.log import KEEP, OFFLOAD, RECOMPUTE
from outcore.policies.pooch.model import PoochModel
from outcore.policies.pooch.policy import PoochPolicy
from outcore.policies.pooch.pooch import Pooch
from outcore.policies.pooch.search import (
    delay,
    keep_from_the_output,
    offload_all,
    recompute_overhead,
    recompute_where_cheaper,
)
from outcore.policies.settle import TRIES
from outcore.policies.superneurons.superneurons import by_type
from outcore.simulate import simulate
from tests.pure.chainer_resnet import IMAGES_PER_SECOND, chainer_resnet50, table3_problem
from tests.pure.strategies import problems, traces

GB = 1e9
MIN_BYTES = 64 * 2**10


@cache
def problem_at(batch, memory_gb, link_gbps):
    return table3_problem(batch, int(memory_gb * GB), link_gbps * GB)


def model_of(problem, *, early=False):
    gaps = candidates(problem, MIN_BYTES)
    return PoochModel(problem, gaps, Tier.HOST, problem.budget_bytes, early=early)


@cache
def planned(spec, batch, memory_gb, link_gbps):
    return resolve(spec).plan(problem_at(batch, memory_gb, link_gbps))


@cache
def seconds(spec, batch, memory_gb, link_gbps):
    problem = problem_at(batch, memory_gb, link_gbps)
    program = lower(problem, planned(spec, batch, memory_gb, link_gbps), fast=True)
    assert fits(problem, program)
    return simulate(problem, program).seconds


def counts(spec, batch, memory_gb, link_gbps):
    problem, plan = (
        problem_at(batch, memory_gb, link_gbps),
        planned(spec, batch, memory_gb, link_gbps),
    )
    kinds = Counter(type(plan.choice(gap)) for gap in candidates(problem, MIN_BYTES))
    return kinds[Keep], kinds[Offload], kinds[Recompute]


# ---- the trace ----------------------------------------------------------------------------------


def test_chainers_resnet50_retains_105_maps():
    net = chainer_resnet50(1)
    verify_trace(net.trace)
    problem = table3_problem(1, 10**9, GB)
    maps = candidates(problem, 1)
    producers = Counter(kind_of(problem, gap) for gap in maps)
    assert producers == {"conv": 53, "relu": 49, "max_pool": 1, "average_pool": 1, "linear": 1}
    nbytes = sum(net.trace.buffers[gap.buffer].nbytes for gap in maps)
    assert nbytes / 1e6 == pytest.approx(79.49, abs=0.005)
    assert nbytes * 640 / GB == pytest.approx(50.87, abs=0.005)
    assert net.forward_flops / GB == pytest.approx(7.716, abs=0.0005)
    assert net.parameter_bytes / 1e6 == pytest.approx(102.2, abs=0.05)


def kind_of(problem, gap):
    producer = liveness(problem.trace).producer[gap.buffer]
    return problem.trace.ops[producer].target.removeprefix("chainer.")


def test_its_times_are_those_of_the_analytic_model():
    trace, profile = chainer_resnet50(640).trace, chainer_resnet50(640).profile
    assert sum(profile.seconds) == pytest.approx(640 / IMAGES_PER_SECOND)
    forward = sum(profile.seconds[: trace.boundary])
    assert forward == pytest.approx(0.733, abs=0.0005)
    assert sum(profile.seconds) - forward == pytest.approx(1.292, abs=0.0005)


def test_backward_functions_run_by_rank():
    trace = chainer_resnet50(1).trace
    backward = [op.target for op in trace.ops if op.phase is Phase.BACKWARD]
    first_block = [t.removeprefix("chainer.").removesuffix("_backward") for t in backward[-19:-4]]
    path = ["bn", "conv", "relu", "bn", "conv", "relu"]  # of conv3 and conv2
    ends = ["bn", "bn", "conv", "conv", "accumulate_grad"]  # bn4, bn1, conv4, conv1
    assert first_block[-12:] == ["relu", *path, *ends]


def test_the_first_39_maps_copied_out_are_21_of_convolutions_and_18_others():
    problem = problem_at(512, 15.1, 13)
    kinds = Counter(kind_of(problem, gap) == "conv" for gap in candidates(problem, MIN_BYTES)[:39])
    assert kinds == {True: 21, False: 18}


# ---- Table 3 ------------------------------------------------------------------------------------

# At 512 images: (memory in GB, link in GB/s) -> keep, offload, recompute of an independent
# implementation, which gives the rows of the paper at 15.1 GB with 13 and 75 GB/s.
REFERENCE = {
    (15.1, 12): (66, 11, 28),
    (15.1, 13): (66, 12, 27),
    (15.4, 12): (67, 11, 27),
    (15.4, 13): (67, 12, 26),
    (15.8, 12): (69, 10, 26),
    (15.8, 13): (69, 11, 25),
    (15.9, 12): (67, 11, 27),
    (15.9, 13): (67, 12, 26),
    (16.1, 12): (68, 11, 26),
    (16.1, 13): (68, 12, 25),
    (15.1, 70): (66, 36, 3),
    (15.1, 75): (66, 36, 3),
    (15.4, 70): (67, 35, 3),
    (15.4, 75): (67, 35, 3),
    (15.8, 70): (69, 34, 2),
    (15.8, 75): (69, 34, 2),
    (15.9, 70): (67, 36, 2),
    (15.9, 75): (67, 37, 1),
    (16.1, 70): (68, 35, 2),
    (16.1, 75): (68, 36, 1),
}

MISSED = {
    (15.1, 70): (66, 37, 2),
    (15.1, 75): (66, 37, 2),
    (15.4, 70): (67, 36, 2),
    (15.4, 75): (67, 36, 2),
    (15.8, 70): (69, 33, 3),
    (15.9, 70): (67, 35, 3),
    (15.9, 75): (67, 36, 2),
}
"""Our counts where they differ: one map is offloaded instead of recomputed, or the reverse."""


def test_pooch_gives_the_x86_row_of_table_3():
    assert counts("pooch", 512, 15.1, 13) == (66, 12, 27)


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="66/37/2 here, 66/36/3 in the paper: one map is offloaded, not recomputed",
)
def test_pooch_gives_the_power9_row_of_table_3():
    assert counts("pooch", 512, 15.1, 75) == (66, 36, 3)


@pytest.mark.parametrize(("memory_gb", "link_gbps"), REFERENCE)
def test_pooch_at_the_settings_of_the_reference(memory_gb, link_gbps):
    setting = memory_gb, link_gbps
    found = counts("pooch", 512, *setting)
    assert found == MISSED.get(setting, REFERENCE[setting])
    assert max(abs(a - b) for a, b in zip(found, REFERENCE[setting], strict=True)) <= 1


def test_what_step_1_leaves_is_superneurons_row_of_table_3():
    problem = problem_at(512, 15.1, 13)
    model = model_of(problem)
    left = [
        t.gap
        for t, k in zip(model.targets, keep_from_the_output(model), strict=True)
        if k is OFFLOAD
    ]
    convolutions = sum(kind_of(problem, gap) == "conv" for gap in left)
    assert (105 - len(left), convolutions, len(left) - convolutions) == (66, 21, 18)


@pytest.mark.parametrize(
    ("memory_gb", "expected"),
    [(15.1, (66, 21, 18)), (15.4, (66, 21, 18)), (15.8, (66, 21, 18)), (16.1, (68, 20, 17))],
)
def test_superneurons_row_of_table_3(memory_gb, expected):
    problem = problem_at(512, memory_gb, 13)
    kinds = Counter(by_type(problem, model_of(problem)))
    assert (kinds[KEEP], kinds[OFFLOAD], kinds[RECOMPUTE]) == expected


@pytest.mark.parametrize("memory_gb", [15.1, 16.1])
def test_superneurons_runs_out_of_memory_at_640_images(memory_gb):
    with pytest.raises(InfeasibleError, match="superneurons"):
        planned("superneurons", 640, memory_gb, 13)


@pytest.mark.parametrize(("batch", "ratio"), [(256, 1.17), (384, 1.55), (512, 1.73)])
def test_pooch_is_faster_than_superneurons(batch, ratio):
    """The paper has 1.40 to 1.73."""
    theirs, ours = (seconds(spec, batch, 16.1, 13) for spec in ("superneurons", "pooch"))
    assert theirs / ours == pytest.approx(ratio, abs=0.02)


@pytest.mark.parametrize("memory_gb", [15.1, 16.1])
@pytest.mark.parametrize("link_gbps", [12, 75])
def test_pooch_is_feasible_at_640_images(memory_gb, link_gbps):
    assert seconds("pooch", 640, memory_gb, link_gbps) < 640 / 195  # img/s: the paper's slowest


# ---- ratios: regression values of this model, not reproductions of the paper --------------------


def test_ratios_of_the_ablation_at_256_images():
    naive, swap, opt, pooch = (
        seconds(spec, 256, 15.1, 13) for spec in ("swap-all-naive", "swap-all", "swap-opt", "pooch")
    )
    assert naive / swap == pytest.approx(1.03, abs=0.015)  # paper: 1.02-1.14
    assert swap / opt == pytest.approx(2.3, abs=0.05)  # paper: 1.4-3.0
    assert opt / pooch == pytest.approx(1.63, abs=0.02)  # paper: 1.45


@pytest.mark.parametrize(
    ("batch", "memory_gb", "link_gbps", "percent"),
    [(512, 16.1, 12, 15.9), (512, 16.1, 16, 10.7), (640, 16.1, 16, 11.3), (640, 16.1, 75, 2.5)],
)
def test_degradation_against_in_core(batch, memory_gb, link_gbps, percent):
    in_core = batch / IMAGES_PER_SECOND
    found = 100 * (1 - in_core / seconds("pooch", batch, memory_gb, link_gbps))
    assert found == pytest.approx(percent, abs=1.0)


@pytest.mark.parametrize("batch", [256, 512, 640])
def test_a_plan_for_a_fast_link_is_slower_on_a_slow_one(batch):
    slow = problem_at(batch, 16.1, 12)
    program = lower(slow, planned("pooch", batch, 16.1, 75), fast=True)
    assert fits(slow, program), "memory never depends on the link"
    assert simulate(slow, program).seconds > 1.2 * seconds("pooch", batch, 16.1, 12)


@pytest.mark.parametrize("spec", ["pooch", "swap-opt", "swap-all"])
def test_fetching_as_early_as_memory_allows_is_no_slower(spec):
    early = f"{spec}{{early=true}}"
    assert seconds(early, 512, 15.1, 13) <= seconds(spec, 512, 15.1, 13) * (1 + 1e-9)


# ---- the model ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "link_gbps"), [(256, 13), (512, 13), (512, 75)])
def test_the_model_agrees_with_the_simulated_program(batch, link_gbps):
    problem = problem_at(batch, 15.1, link_gbps)
    model = model_of(problem)
    kinds = recompute_where_cheaper(model, keep_from_the_output(model))
    backward = model.rebuild(kinds)
    forward = model.sync_swapout(kinds)
    times = step_seconds(model, forward, backward, model.compact(backward), [])
    assert times[0] == pytest.approx(seconds("pooch", batch, 15.1, link_gbps), rel=0.01)


def test_all_copies_out_are_awaited_at_the_boundary():
    problem = problem_at(512, 15.1, 13)
    plan = planned("swap-all", 512, 15.1, 13)
    assert all(choice.release == problem.trace.boundary for _, choice in plan.choices)
    model = model_of(problem)
    found = waited(model, model.sync_swapout([OFFLOAD] * 105))
    assert found == sorted(found)
    assert found[-1] == 104, "the last copy out has nothing to hide behind"
    assert len(found) > 50, "13 GB/s are too few for 40 GB"


def test_keep_all_has_the_times_of_the_ops():
    problem = replace(problem_at(512, 15.1, 13), budget_bytes=10**12)
    model = model_of(problem)
    kinds = [KEEP] * 105
    backward = model.rebuild(kinds)
    times = step_seconds(model, model.sync_swapout(kinds), backward, list(range(105)), [])
    assert times[0] == pytest.approx(512 / IMAGES_PER_SECOND)
    assert keep_from_the_output(model) == kinds


def test_the_step_with_a_free_copy_is_no_slower():
    model = model_of(problem_at(512, 15.1, 13))
    kinds = keep_from_the_output(model)
    offloaded = [i for i, kind in enumerate(kinds) if kind is OFFLOAD]
    backward = model.rebuild(kinds)
    slots = model.compact(backward)
    whole, *without = step_seconds(model, model.sync_swapout(kinds), backward, slots, offloaded)
    assert all(seconds <= whole for seconds in without)
    assert min(without) < whole


def test_compact_hoists_in_order_inside_the_capacity():
    for early in (False, True):
        model = model_of(problem_at(512, 15.1, 13), early=early)
        backward = model.rebuild([OFFLOAD] * 105)
        slots = model.compact(backward)
        assert all(a <= b for a, b in pairwise(slots))
        assert all(slot <= segment for segment, slot in enumerate(slots))
        sizes = [sum(model.targets[i].fetched_bytes for i in g) for g in backward.fetched]
        for segment, peak in enumerate(backward.peak_bytes):
            ahead = sum(sizes[g] for g in range(segment + 1, len(slots)) if slots[g] <= segment)
            assert peak + ahead <= model.capacity_bytes


def test_compact_hoists_in_batches_unless_early():
    problem = problem_at(512, 15.1, 13)
    batches, early = (model_of(problem, early=early) for early in (False, True))
    backward = batches.rebuild([OFFLOAD] * 105)
    assert all(
        a >= b for a, b in zip(batches.compact(backward), early.compact(backward), strict=True)
    )
    slots = batches.compact(backward)
    for first in sorted(set(slots)):
        last = max(group for group, slot in enumerate(slots) if slot == first)
        following = min((slot for slot in slots if slot > first), default=last)
        assert following >= last, "the next batch starts when the last of this one is used"


def test_delay_costs_no_time_and_goes_no_further_than_needed():
    model = model_of(problem_at(512, 15.1, 13))
    kinds = recompute_where_cheaper(model, keep_from_the_output(model))
    backward = model.rebuild(kinds)
    early = model.compact(backward)
    late = delay(model, backward, early)
    assert backward_seconds(model, backward, late) == backward_seconds(model, backward, early)
    assert all(a <= b <= group for group, (a, b) in enumerate(zip(early, late, strict=True)))
    assert late != early
    full = [group for group, fetched in enumerate(backward.fetched) if fetched]
    assert all(late[a] <= late[b] for a, b in pairwise(full))


def test_recompute_overhead_is_the_time_of_the_ops_run_again():
    problem = problem_at(512, 15.1, 13)
    model = model_of(problem)
    relu = next(i for i, t in enumerate(model.targets) if kind_of(problem, t.gap) == "relu")
    producer = liveness(problem.trace).producer[model.targets[relu].gap.buffer]
    chain = problem.profile.seconds[producer] + problem.profile.seconds[producer - 1]  # relu, bn
    kinds = [KEEP] * 105
    kinds[relu] = OFFLOAD
    backward = model.rebuild(kinds)
    detour = model.detour(kinds, backward, relu)
    compute = sum(backward.seconds)
    exact, small = (
        PoochModel(problem, [t.gap for t in model.targets], Tier.HOST, detour.peak_bytes - less)
        for less in (0, 1)
    )
    assert recompute_overhead(exact, backward, detour, compute) == pytest.approx(chain)
    assert recompute_overhead(small, backward, detour, compute) == math.inf


def test_an_intermediate_is_made_again_each_time():
    problem = replace(problem_at(64, 15.1, 13), budget_bytes=10**12)
    model = model_of(problem)
    kinds = [KEEP] * 105
    kinds[2] = kinds[3] = RECOMPUTE  # the first convolution of the first block, and its ReLU
    seconds = problem.profile.seconds
    producers = [liveness(problem.trace).producer[model.targets[i].gap.buffer] for i in (2, 3)]
    conv, relu = (seconds[op] for op in producers)
    bn = seconds[producers[1] - 1]
    extra = sum(model.rebuild(kinds).seconds) - sum(model.rebuild([KEEP] * 105).seconds)
    assert extra == pytest.approx(conv + bn + relu + conv)


def test_a_model_that_is_too_hopeful_is_asked_again_with_less(monkeypatch):
    problem = problem_at(64, 4, 13)
    asked = []

    class Hopeful(PoochModel):
        """A model in which everything fits."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            asked.append(self.capacity_bytes)

        def fits(self, kinds):
            return True

    monkeypatch.setattr(pooch_plan_module, "PoochModel", Hopeful)
    policy = resolve("swap-opt")
    keep_all = lambda model: [KEEP] * len(model.targets)  # noqa: E731 - a decision in one line
    plan = pooch_plan_module.pooch_plan(problem, policy, 1, keep_all, pooch_plan_module.published)
    assert asked == sorted(asked, reverse=True)
    assert len(set(asked)) == TRIES
    assert fits(problem, lower(problem, plan))
    assert len(plan.choices) == 105, "in the end everything is offloaded"


# ---- shortcuts: each against the plain algorithm ------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlainPooch(PoochPolicy):
    """PoocH as in its own code: each question is answered by computing a whole pass."""

    name: ClassVar[str] = "pooch"
    summary: ClassVar[str] = "PoocH without short cuts"

    def decide(self, model):
        return plain_recompute_where_cheaper(model, plain_keep_from_the_output(model))


def plain_keep_from_the_output(model):
    kinds = [OFFLOAD] * len(model.targets)

    def keep(target):
        kinds[target] = KEEP
        if not model.fits(kinds):
            kinds[target] = OFFLOAD
        return kinds[target] is KEEP

    if model.fits(kinds):
        for target in reversed(waited(model, model.sync_swapout(kinds))):
            if not keep(target):
                break
        for target in reversed([i for i, kind in enumerate(kinds) if kind is OFFLOAD]):
            keep(target)
    return kinds


def plain_recompute_where_cheaper(model, kinds):
    kinds = list(kinds)
    contest = [i for i, kind in enumerate(kinds) if kind is OFFLOAD and model.fits(kinds)]
    while contest:
        ratios = {i: r for i, r in plain_ratios(model, kinds, contest).items() if r < 1}
        if not ratios:
            break
        best = min(ratios, key=ratios.__getitem__)
        kinds[best] = RECOMPUTE
        contest = [i for i in ratios if i != best]
    return kinds


def plain_ratios(model, kinds, contest):
    backward = plain_rebuild(model, kinds)
    slots = plain_compact(model, backward)
    times = step_seconds(model, model.sync_swapout(kinds), backward, slots, contest)
    ratios = {}
    for target, without in zip(contest, times[1:], strict=True):
        tried = recomputing(kinds, target)
        if times[0] > without and model.targets[target].recomputable and model.fits(tried):
            more = sum(plain_rebuild(model, tried).seconds) - sum(backward.seconds)
            ratios[target] = more / (times[0] - without)
    return ratios


def plain_rebuild(model, kinds):
    model.backwards.chains.known.clear()
    return model.rebuild(kinds)


def plain_compact(model, backward):
    sizes = [sum(model.targets[i].fetched_bytes for i in group) for group in backward.fetched]
    slots: list[int] = []
    for point in range(len(sizes)):
        if len(slots) > point + 1 and not model.early:
            continue
        if len(slots) <= point:
            slots.append(point)
        while len(slots) < len(sizes):
            ahead = [p + sum(sizes[i + 1 : len(slots) + 1]) for i, p in peaks_from(backward, point)]
            if max(ahead[: len(slots) - point]) > model.capacity_bytes:
                break
            slots.append(point)
    return slots


def peaks_from(backward, point):
    return list(enumerate(backward.peak_bytes))[point:]


def plain_delay(model, backward, slots):
    late = list(slots)
    limit = backward_seconds(model, backward, late)
    following = len(late) - 1
    for group in reversed([i for i, fetched in enumerate(backward.fetched) if fetched]):
        for slot in range(min(group, following), late[group], -1):
            moved = [*late[:group], slot, *late[group + 1 :]]
            if backward_seconds(model, backward, moved) <= limit:
                late = moved
                break
        following = late[group]
    return late


def recomputing(kinds, target):
    return [*kinds[:target], RECOMPUTE, *kinds[target + 1 :]]


drawn = settings(max_examples=50, suppress_health_check=list(HealthCheck))


@st.composite
def tight_problems(draw):
    """Problems with a budget between PoocH's least and what keeping everything needs."""
    problem = draw(problems(draw(traces(max_forward_ops=40))))
    problem = replace(problem, budget_bytes=1, host_budget_bytes=None, disk_budget_bytes=None)
    least, most = needed_bytes("pooch{min_bytes=1B}", problem), needed_bytes("keep-all", problem)
    share = draw(st.sampled_from([0.0, 0.1, 0.3, 0.6]))
    return replace(problem, budget_bytes=max(least, int(least + share * (most - least))))


def needed_bytes(spec, problem):
    try:
        resolve(spec).plan(problem)
    except InfeasibleError as error:
        return error.floor_bytes
    return problem.budget_bytes


@st.composite
def models(draw):
    """A model, and kinds that may or may not fit."""
    problem = draw(problems(draw(traces(max_forward_ops=30))))
    gaps = candidates(problem, 1)
    early = draw(st.booleans())
    capacity = problem.budget_bytes
    model = PoochModel(problem, gaps, problem.hardware.outer, capacity, early=early)
    return model, [
        draw(st.sampled_from([OFFLOAD, KEEP, *[RECOMPUTE] * target.recomputable]))
        for target in model.targets
    ]


@drawn
@given(problem=tight_problems(), early=st.booleans())
def test_the_search_plans_what_the_plain_search_plans(problem, early):
    plans = [kind(1, early).plan(problem) for kind in (Pooch, PlainPooch)]
    assert digest(plans[0]) == digest(plans[1])


@pytest.mark.parametrize(("memory_gb", "link_gbps"), [(15.1, 13), (16.1, 75), (9, 5)])
def test_it_does_so_on_resnet50(memory_gb, link_gbps):
    problem = problem_at(512, memory_gb, link_gbps)
    for early in (False, True):
        plans = [kind(MIN_BYTES, early).plan(problem) for kind in (Pooch, PlainPooch)]
        assert digest(plans[0]) == digest(plans[1])


@settings(drawn, max_examples=200)
@given(drawn_model=models())
def test_a_detour_is_what_working_out_the_whole_pass_gives(drawn_model):
    model, kinds = drawn_model
    backward = model.rebuild(kinds)
    for target in contestants(model, kinds):
        detour = model.detour(kinds, backward, target)
        whole = model.rebuild(recomputing(kinds, target))
        span = slice(detour.start, detour.stop)
        assert detour.seconds == whole.seconds[span]
        assert detour.peak_bytes == max(whole.peak_bytes[span])
        assert detour.total_seconds(backward) == sum(whole.seconds)
        for column in ("needs", "seconds", "peak_bytes", "missing_bytes"):
            ours, theirs = getattr(whole, column), getattr(backward, column)
            assert ours[: detour.start] == theirs[: detour.start]
            assert ours[detour.stop :] == theirs[detour.stop :]


@drawn
@given(drawn_model=models())
def test_a_detour_stays_as_it_is_when_one_that_it_does_not_meet_is_taken(drawn_model):
    model, kinds = drawn_model
    backward = model.rebuild(kinds)
    detours = {i: model.detour(kinds, backward, i) for i in contestants(model, kinds)}
    for taken in list(detours)[:4]:
        after = recomputing(kinds, taken)
        changed = model.rebuild(after)
        for target, detour in detours.items():
            if not detour.meets(detours[taken]):
                assert model.detour(after, changed, target) == detour


def contestants(model, kinds):
    offloaded = [i for i, kind in enumerate(kinds) if kind is OFFLOAD]
    return [i for i in offloaded if model.targets[i].recomputable]


@drawn
@given(drawn_model=models())
def test_what_is_kept_is_what_asking_the_whole_model_each_time_keeps(drawn_model):
    model, _ = drawn_model
    assert keep_from_the_output(model) == plain_keep_from_the_output(model)


@drawn
@given(drawn_model=models())
def test_schedules_are_those_of_the_plain_loops(drawn_model):
    model, kinds = drawn_model
    backward = model.rebuild(kinds)
    slots = model.compact(backward)
    assert slots == plain_compact(model, backward)
    assert delay(model, backward, slots) == plain_delay(model, backward, slots)


@pytest.mark.parametrize("decide", [offload_all, keep_from_the_output])
@pytest.mark.parametrize("link_gbps", [13, 75])
def test_schedules_on_resnet50_are_those_of_the_plain_loops(decide, link_gbps):
    for early in (False, True):
        model = model_of(problem_at(256, 15.1, link_gbps), early=early)
        backward = model.rebuild(decide(model))
        slots = model.compact(backward)
        assert slots == plain_compact(model, backward)
        assert delay(model, backward, slots) == plain_delay(model, backward, slots)


def test_a_detour_on_resnet50_passes_few_segments():
    model = model_of(problem_at(512, 15.1, 13))
    kinds = keep_from_the_output(model)
    backward = model.rebuild(kinds)
    detours = [model.detour(kinds, backward, i) for i in contestants(model, kinds)]
    lengths = [detour.stop - detour.start for detour in detours]
    assert median(lengths) <= 5
