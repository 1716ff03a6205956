"""window, Sony's scheduler: the variable sequence, the window, the published code's schedule."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import accumulate

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outcore.errors import InfeasibleError, PolicyError
from outcore.ir.hardware import Hardware, Tier
from outcore.ir.liveness import gaps
from outcore.ir.memory import fits, peak
from outcore.ir.plan import KEEP_ALL, Offload
from outcore.ir.problem import Problem
from outcore.ir.trace import Phase, Ref, Role
from outcore.lower import lower
from outcore.policies import floor, resolve
from outcore.policies.window.schedule import Absence, schedule, window_ends
from outcore.policies.window.sequence import VariableSequence, variable_sequence
from outcore.policies.window.window import Window
from outcore.simulate import simulate
from tests.pure.building import TraceBuilder, small_problem
from tests.pure.chainer_resnet import IMAGES_PER_SECOND, table3_problem
from tests.pure.strategies import problems

drawn = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])

# ---- by hand: schedules -------------------------------------------------------------------------


def sequence(*functions: str, sizes: dict[str, int] | None = None) -> VariableSequence:
    """A sequence of one function per word and one variable per letter.

    A variable has one byte unless `sizes` says otherwise. The first function that has it makes it.
    """
    names = sorted(set("".join(functions)))
    order = [names.index(letter) for word in functions for letter in word]
    later = [[p for p in range(i + 1, len(order)) if order[p] == v] for i, v in enumerate(order)]
    made = {v: next(i for i, w in enumerate(functions) if n in w) for v, n in enumerate(names)}
    return VariableSequence(
        order=tuple(order),
        starts=tuple(accumulate(map(len, functions), initial=0)),
        ops=tuple(range(len(functions))),
        nbytes=tuple((sizes or {}).get(name, 1) for name in names),
        born=tuple(made[v] for v in range(len(names))),
        next_use=tuple(positions[0] if positions else None for positions in later),
        beside_bytes=(0,) * len(functions),
        fixed_bytes=0,
    )


CHAIN = sequence("a", "ab", "bc", "cd", "dc", "cb", "ba")
"""Four layers, then their backward passes."""


def test_nothing_leaves_where_all_fits():
    assert schedule(CHAIN, 4, 6) == ()


def test_what_was_leaving_stays_when_the_window_reaches_it_before_anyone_needs_its_memory():
    """`a` begins to leave after function 1, beyond a window of two bytes; that is canceled."""
    assert schedule(CHAIN, 4, 2) == ()


def test_the_oldest_is_waited_for_by_whoever_needs_memory():
    """Function 3 makes `d` and waits for `a` to leave; `a` comes back once `d` is gone."""
    (away,) = schedule(CHAIN, 3, 4.5) or ()
    assert (CHAIN.order[away.position], away.released) == (0, 3)
    assert away.fetched == 5, "at function 4, d and c and b are there"


def test_a_narrow_window_brings_back_late():
    roomy = sequence("ay", "bcde", "f", "f", "f", "ay")
    assert [t.fetched for t in schedule(roomy, 4, 10) or ()] == [2, 2]
    assert [t.fetched for t in schedule(roomy, 4, 2) or ()] == [2, 5], "f and a, not y"
    assert [t.fetched for t in schedule(roomy, 4, 1) or ()] == [5, 5]


def test_a_window_holds_a_repeated_variable_once():
    """The window counts distinct bytes: three uses of `f` leave room for `a`."""
    again = sequence("a", "bcd", "f", "f", "f", "a")
    assert [t.fetched for t in schedule(again, 3, 2) or ()] == [2]


def test_a_fetch_that_would_leave_a_later_function_no_memory_is_put_off():
    """At function 2 the window has room for `a`, but function 3 makes two bytes."""
    busy = sequence("a", "bcd", "e", "fg", "h", "a")
    assert [t.fetched for t in schedule(busy, 3, 9) or ()] == [2]
    assert [
        t.fetched for t in schedule(replace(busy, nbytes=(2, *busy.nbytes[1:])), 3, 9) or ()
    ] == [4]


def test_a_use_at_the_next_function_still_leaves_where_its_memory_is_needed_between():
    """The window of function 1 ends before the next use of `a`, so `a` leaves until function 2."""
    assert schedule(sequence("ab", "bc", "ac"), 2, 2) == (Absence(0, 1, 2),)


def test_a_function_that_does_not_fit_has_no_schedule():
    assert schedule(CHAIN, 1, 9) is None
    assert schedule(CHAIN, 2, 9) is not None


def test_the_window_holds_its_function_even_if_that_is_larger():
    assert schedule(CHAIN, 4, 0.5) is not None


# ---- against the published order of events ------------------------------------------------------


class Published:
    """The schedule of the published code, which postpones prefetches one by one and restarts."""

    def __init__(self, seq: VariableSequence, capacity: int, window: float) -> None:
        self.seq, self.capacity, self.window = seq, capacity, window
        self.stopper = [0] * len(seq.order)
        self.restarts = 0

    def run(self) -> tuple[Absence, ...] | None:
        while True:
            self.state = ["none"] * len(self.seq.nbytes)
            self.count = [0] * len(self.seq.nbytes)
            self.left: dict[int, int] = {}
            self.waited: dict[int, int] = {}
            self.found: list[Absence] = []
            self.head = self.tail = self.inside = self.out = self.ahead = 0
            done = self.once()
            if done != "restart":
                return tuple(self.found) if done == "done" else None
            self.restarts += 1

    def once(self) -> str:
        for f in range(len(self.seq.ops)):
            self.swap_in(f)
            stopped = self.reserve(f)
            if stopped:
                return stopped
            if self.head < self.seq.starts[f + 1]:
                return "out of memory"
            self.swap_out(f)
        return "done"

    def swap_in(self, f: int) -> None:
        room = self.capacity - self.seq.beside_bytes[f]
        while self.head < len(self.seq.order) and self.stopper[self.head] <= f:
            v = self.seq.order[self.head]
            b = self.seq.nbytes[v]
            if not self.count[v]:
                inside = self.head < self.seq.starts[f + 1]
                if not inside and (self.ahead + b > self.window or self.inside + b > room):
                    return
                self.ahead += b
                if self.state[v] == "out":
                    self.state[v] = "in"
                    self.out -= b
                    self.inside += b
                elif self.state[v] == "none":
                    self.state[v] = "unprefetched"
                else:
                    assert self.state[v] == "waited"
                    while self.inside + self.out + b > room and self.tail < self.seq.starts[f]:
                        self.wait(f)
                    self.found.append(Absence(self.left[v], self.waited[v], f))
                    self.state[v] = "in"
                    self.inside += b
            self.count[v] += 1
            self.head += 1

    def reserve(self, f: int) -> str:
        variables = [self.seq.order[p] for p in self.seq.positions(f)]
        new = [v for v in variables if self.state[v] == "unprefetched"]
        needed = sum(self.seq.nbytes[v] for v in new)
        room = self.capacity - self.seq.beside_bytes[f]
        while room - self.inside - self.out < needed:
            if self.tail == self.seq.starts[f]:
                return self.backtrack(f, needed, room - self.inside - self.out)
            self.wait(f)
        self.inside += needed
        for v in new:
            self.state[v] = "in"
        return ""

    def backtrack(self, f: int, needed: int, available: int) -> str:
        count, position = list(self.count), self.head
        while position > self.seq.starts[f + 1]:
            position -= 1
            v = self.seq.order[position]
            if count[v] == 1:
                available += self.seq.nbytes[v] * (self.state[v] == "in")
                self.stopper[position] = f + 1
            if available >= needed:
                return "restart"
            count[v] -= 1
        return "out of memory"

    def wait(self, f: int) -> None:
        v = self.seq.order[self.tail]
        if self.state[v] == "out" and self.left[v] == self.tail:
            self.state[v] = "waited"
            self.waited[v] = f
            self.out -= self.seq.nbytes[v]
        self.tail += 1

    def swap_out(self, f: int) -> None:
        for p in self.seq.positions(f):
            v = self.seq.order[p]
            if self.count[v] == 1:
                assert self.state[v] == "in"
                self.inside -= self.seq.nbytes[v]
                self.ahead -= self.seq.nbytes[v]
                self.state[v] = "cleared"
                if self.seq.next_use[p] is not None:
                    self.state[v] = "out"
                    self.left[v] = p
                    self.out += self.seq.nbytes[v]
            self.count[v] -= 1


def least_bytes(seq: VariableSequence) -> int:
    """The most bytes that a function needs for itself."""
    own = (sum(seq.nbytes[seq.order[p]] for p in seq.positions(f)) for f in range(len(seq.ops)))
    return max(0, *(sum(both) for both in zip(own, seq.beside_bytes, strict=True)))


@st.composite
def scheduled(draw):
    """A sequence, a capacity between a little too small and ample, and a window."""
    seq = variable_sequence(draw(problems()), 1)
    capacity = int(least_bytes(seq) * draw(st.sampled_from([1.0, 1.05, 1.1, 1.2, 1.5, 2.0, 0.9])))
    return seq, capacity, capacity * draw(st.sampled_from([0.1, 0.7, 1.0, 1.5, 4.0]))


@drawn
@given(case=scheduled())
def test_one_walk_gives_the_schedule_that_the_restarts_end_with(case):
    assert schedule(*case) == Published(*case).run()


def test_restarts_are_many_where_one_walk_will_do():
    problem = table3_problem(512, 16 * 10**9, 13e9)
    seq = variable_sequence(problem, 1)
    capacity = problem.budget_bytes - seq.fixed_bytes
    published = Published(seq, capacity, 5.0 * capacity)
    assert schedule(seq, capacity, 5.0 * capacity) == published.run()
    assert published.restarts > 10


@drawn
@given(case=scheduled())
def test_every_function_has_its_memory_and_its_variables(case):
    seq, capacity, _ = case
    trips = schedule(*case)
    if trips is None:
        return
    away = {trip.position: trip for trip in trips}
    assert len(away) == len(trips)
    for f in range(len(seq.ops)):
        held = seq.beside_bytes[f]
        for position, v in enumerate(seq.order):
            later = seq.next_use[position]
            first, past = position < seq.starts[f + 1], position < seq.starts[f]
            if not first or (past and (later is None or later < seq.starts[f])):
                continue
            if past and later is not None and later < seq.starts[f + 1]:
                continue  # counted where it is used
            trip = away.get(position)
            gone = past and trip is not None and trip.released <= f < trip.fetched
            held += 0 if gone else seq.nbytes[v]
        assert held <= capacity
    for trip in trips:
        later = seq.next_use[trip.position]
        assert later is not None
        assert trip.released <= trip.fetched
        assert seq.starts[trip.released] > trip.position
        assert seq.starts[trip.fetched] <= later


@drawn
@given(case=scheduled())
def test_windows_never_end_further_than_later_ones(case):
    seq, capacity, _ = case
    ends = window_ends(seq, capacity)
    if ends is not None:
        assert ends == sorted(ends)
        assert all(end >= start for end, start in zip(ends, seq.starts[1:], strict=True))


# ---- the sequence -------------------------------------------------------------------------------


def test_the_sequence_has_what_may_leave_and_temporaries_with_the_pause_between():
    problem = replace(small_problem(), between_bytes=300, outside_bytes=50)
    trace = problem.trace
    seq = variable_sequence(problem, 1)
    names = {b.id: b.name or str(b.id) for b in trace.buffers}
    words = [[names.get(seq.order[p], "") for p in seq.positions(f)] for f in range(len(seq.ops))]
    assert words[:7] == [
        ["conv", ""],
        ["conv", "dropped", ""],
        ["dropped", "curved", ""],
        ["curved", "conv", "mixed", ""],
        ["mixed", ""],  # out is returned: it stays
        [""],
        ["tangent", "mixed", "9", ""],
    ]
    assert seq.ops == (0, 1, 2, 3, 4, 5, 5, 6, 7, 8)
    temporary = [seq.nbytes[seq.order[seq.starts[f + 1] - 1]] for f in range(len(seq.ops))]
    assert temporary == [128] * 5 + [300] + [128] * 4
    assert seq.fixed_bytes == 50 + 1024 + 256 + 256
    # From op 4 on `out`; in the pause the tangent; weights' gradients once made; op 6 writes
    # its result over its argument.
    assert seq.beside_bytes == (0, 0, 0, 0, 256, 256 + 256, 512, 512 - 1024, 512, 768)


def test_smaller_buffers_stay():
    seq = variable_sequence(small_problem(), 512)
    tangent = next(b.id for b in small_problem().trace.buffers if b.name == "tangent")
    assert tangent not in seq.order
    assert seq.beside_bytes[5:7] == (512, 256 + 256 + 256)


def test_gaps_are_those_of_the_trace():
    problem = small_problem()
    seq = variable_sequence(problem, 1)
    buffers = len(problem.trace.buffers)
    own = [p for p, v in enumerate(seq.order) if v < buffers and seq.next_use[p] is not None]
    idle, found = set(gaps(problem.trace)), {seq.gap(p) for p in own}
    assert found >= idle
    assert all(gap.before == gap.after + 1 for gap in found - idle), "in those nothing runs"
    with pytest.raises(ValueError, match="is not used after"):
        seq.gap(len(seq.order) - 1)


# ---- plans --------------------------------------------------------------------------------------


def plain(problem: Problem) -> Problem:
    """The problem with ops of one variant, on a machine whose copies need no padding."""
    hardware: Hardware = replace(problem.hardware, fetch_padding_bytes=0)
    profile = replace(problem.profile, alternatives=())
    return replace(problem, hardware=hardware, profile=profile)


def passed_bytes(problem: Problem) -> int:
    """What is on the device before the step starts: no plan changes it."""
    passed = problem.trace.value_buffers(tuple(map(Ref, problem.trace.inputs)))
    sizes = (problem.trace.buffers[b].nbytes for b in passed)
    device = Tier.DEVICE
    slots = (problem.hardware.slot_bytes(device, n, copied=False) for n in sizes)
    return problem.outside_bytes + sum(slots)


@drawn
@given(problem=problems(), more=st.sampled_from([1.0, 1.1, 1.2, 1.5]))
def test_what_is_scheduled_fits_and_is_the_plan(problem, more):
    seq = variable_sequence(problem, 1)
    capacity = int(least_bytes(seq) * more)
    problem = replace(plain(problem), budget_bytes=seq.fixed_bytes + capacity)
    trips = schedule(seq, capacity, 1.5 * capacity)
    assert trips is not None
    if passed_bytes(problem) > problem.budget_bytes:
        return
    plan = Window(min_bytes=1).plan(problem)
    movable = gaps(problem.trace)
    found = {gap: (choice.release, choice.prefetch) for gap, choice in plan.choices}
    scheduled_hints = {
        seq.gap(t.position): (seq.ops[t.released], seq.ops[t.fetched]) for t in trips
    }
    assert found == {gap: hints for gap, hints in scheduled_hints.items() if gap in movable}


@drawn
@given(problem=problems())
def test_its_smallest_budget_is_the_floor(problem):
    """The floor of any plan, if copies need no padding and ops have one variant."""
    lowest = floor(plain(problem)).nbytes
    at_floor = replace(plain(problem), budget_bytes=lowest)
    assert Window(min_bytes=1).plan(at_floor).policy == "window{min_bytes=1B}"
    with pytest.raises(InfeasibleError) as caught:
        Window(min_bytes=1).plan(replace(at_floor, budget_bytes=lowest - 1))
    assert caught.value.floor_bytes == lowest


@drawn
@given(problem=problems())
def test_what_fits_is_kept(problem):
    """To the byte: if ops write in place, a program needs less than its variable sequence."""
    kept = lower(problem, KEEP_ALL)
    exact = replace(problem, budget_bytes=max(1, peak(problem, kept, Tier.DEVICE).nbytes))
    assert Window(min_bytes=1).plan(exact).choices == ()


def skipping(budget_bytes: int) -> Problem:
    """`a0` is read by the next op and, four ops later in the forward pass, by an addition."""
    t = TraceBuilder()
    x = t.new(1, Role.INPUT, borrowed=True)
    skip, *inner, out = (t.new(256, Role.ACTIVATION, name=f"a{i}") for i in range(6))
    t.op("test.f", (Ref(x),), (skip,))
    read = skip
    for made in inner:
        t.op("test.f", (Ref(read),), (made,))
        read = made
    t.op("test.add", (Ref(read), Ref(skip)), (out,))
    tangent, grad = t.new(1, Role.GRAD), t.new(1, Role.GRAD)
    t.op("test.b", (Ref(tangent), Ref(read)), (grad,), Phase.BACKWARD)
    trace = t.trace([x], (), [tangent], (Ref(grad),))
    base, n = small_problem(), len(trace.ops)
    workspace = (0, 0, 0, 1024, *[0] * (n - 4))
    profile = replace(base.profile, seconds=(1e-3,) * n, workspace_bytes=workspace)
    return Problem(trace, profile, base.hardware, budget_bytes)


def test_a_skip_connection_leaves_inside_the_forward_pass():
    """Op 3 fills the device with what it reads, what it makes and its workspace."""
    problem = skipping(3 * 1024 + 4)
    plan = Window(min_bytes=1).plan(problem)
    assert [(gap.buffer, gap.after, gap.before) for gap, _ in plan.choices] == [(1, 1, 5)]
    assert plan.choices[0][1] == Offload(Tier.HOST, release=3, prefetch=4)
    assert fits(problem, lower(problem, plan))
    assert Window(min_bytes=1).plan(skipping(4 * 1024 + 4)).choices == ()
    with pytest.raises(InfeasibleError) as caught:
        Window(min_bytes=1).plan(skipping(3 * 1024 + 3))
    assert caught.value.floor_bytes == 3 * 1024 + 4


@pytest.mark.parametrize("lookahead", [0.0, -1.0, float("nan")])
def test_a_window_of_nothing_is_refused(lookahead):
    with pytest.raises(PolicyError, match="it is a number above 0"):
        Window(lookahead=lookahead)


def test_padding_of_copies_is_found_out_by_lowering_and_room_is_made():
    problem = small_problem(budget_bytes=5500)
    exact = Window(min_bytes=1).plan(problem)
    assert exact.choices
    padded = replace(problem, hardware=replace(problem.hardware, fetch_padding_bytes=200))
    plan = Window(min_bytes=1).plan(padded)
    assert fits(padded, lower(padded, plan))


# ---- ResNet-50 ----------------------------------------------------------------------------------


@cache
def images_per_second(
    spec: str, batch: int, memory_gb: float, link_gbps: float, in_core: float = IMAGES_PER_SECOND
) -> float:
    problem = table3_problem(batch, int(memory_gb * 1e9), link_gbps * 1e9)
    scaled = tuple(s * IMAGES_PER_SECOND / in_core for s in problem.profile.seconds)
    problem = replace(problem, profile=replace(problem.profile, seconds=scaled))
    plan = resolve(spec).plan(problem)
    kinds = Counter(type(choice) for _, choice in plan.choices)
    assert set(kinds) <= {Offload}
    program = lower(problem, plan, fast=True)
    assert fits(problem, program)
    return batch / simulate(problem, program).seconds


@pytest.mark.parametrize(
    ("batch", "measured"), [(512, 446), (928, 409), (1120, 398), (1248, 347), (1440, 321)]
)
def test_table_1_lies_between_links_of_50_and_75_gbps(batch, measured):
    """581 img/s in core, 16 GB, two NVLinks; the paper's own figures ("Schedule + VA")."""
    slow, fast = (images_per_second("window", batch, 16, link, 581) for link in (50, 75))
    assert slow < measured < fast


def test_it_trains_what_policies_of_gaps_across_the_boundary_cannot():
    with pytest.raises(InfeasibleError):
        images_per_second("swap-opt", 1440, 16, 50, 581)
    assert images_per_second("window", 1440, 16, 50, 581) == pytest.approx(263, abs=5)


@pytest.mark.parametrize(("batch", "link_gbps"), [(256, 13), (384, 13), (512, 13), (640, 75)])
def test_it_is_faster_than_step_1_of_pooch(batch, link_gbps):
    """Regression values of this model: no paper compares the two."""
    ours, theirs = (
        images_per_second(spec, batch, 16.1, link_gbps) for spec in ("window", "swap-opt")
    )
    assert theirs < ours <= IMAGES_PER_SECOND * (1 + 1e-9)


def test_host_tier_is_named_where_it_is_too_small():
    problem = replace(table3_problem(512, 16 * 10**9, 13e9), host_budget_bytes=10**9)
    with pytest.raises(InfeasibleError) as caught:
        Window().plan(problem)
    assert caught.value.tier == Tier.HOST.value
