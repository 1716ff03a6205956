"""Layouts: places that do not overlap, and moves that make a best-fit allocator use them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.allocators import placed_range
from outcore.allocators.best_fit import MIB
from outcore.allocators.blocks import Pool, round_up
from outcore.allocators.layout import BESIDE_BYTES, Space, lacking_bytes, lay_out
from outcore.allocators.packing import Stay, lowest_bytes, pack
from outcore.allocators.requests import MOST_GUEST_BYTES
from outcore.errors import InfeasibleError
from outcore.ir.hardware import Tier
from outcore.ir.layout import Hold
from outcore.ir.memory import peak
from outcore.ir.program import Alloc, Copy, Free, Run
from outcore.ir.totals import resident_bytes
from outcore.lower import lower
from outcore.policies import resolve
from tests.pure.strategies import problems

pytestmark = pytest.mark.xdist_group("compiled")

HUGE = 1 << 60


class Stretch:
    """A model of torch's allocator: best fit in the free memory of one stream, nothing else."""

    def __init__(self, nbytes: int) -> None:
        self.pool = Pool()
        self.pool.add(0, nbytes)

    def malloc(self, nbytes: int) -> int:
        size = round_up(nbytes, 512)
        index = self.pool.fitting(size)
        assert index < len(self.pool.free), f"no room for {nbytes}"
        block = self.pool.take(index)
        if block.nbytes > size:
            self.pool.put(self.pool.cut(block, size))
        return block.start

    def free(self, address: int) -> None:
        self.pool.put(self.pool.blocks[address])


class Served:
    """Serves a program's large requests from the stretch; asserts that each gets its place."""

    def __init__(self, problem, program, layout):
        self.problem, self.program, self.layout = problem, program, layout
        self.heap, self.pieces = Stretch(layout.nbytes), {0: 0}
        self.at, self.waiting = {}, set()

    def serve(self):
        for position, instruction in enumerate(self.program.body):
            if position == self.program.boundary:
                self.pause()
            self.move(self.layout.moves.get(position, ()))
            action = instruction.action
            if position in self.layout.at_home:
                self.leave(action)
            elif isinstance(action, Alloc):
                self.waiting.add(action.slot)
            elif isinstance(action, Copy):
                self.ask([action.target])
            elif isinstance(action, Run):
                self.run(action)
            elif isinstance(action, Free) and action.slot in self.at:
                self.heap.free(self.at.pop(action.slot))
        assert not self.at

    def leave(self, action):
        """Serve an op outside the stretch: its results are new memory and outlive the program."""
        assert isinstance(action, Run)
        assert not action.donate
        assert self.waiting.issuperset(action.writes)
        made = [self.program.slots[slot].nbytes for slot in action.writes]
        assert max(made) > MOST_GUEST_BYTES
        freed = {x.action.slot for x in self.program.body if isinstance(x.action, Free)}
        heirs = dict(d for x in self.program.body for d in getattr(x.action, "donate", ()))
        for slot in action.writes:
            last = slot
            while last in heirs:
                last = heirs[last]
            assert last not in freed
        self.waiting.difference_update(action.writes)

    def pause(self):
        """Between the calls, the caller's code can have all memory that no slot uses."""
        self.move(self.layout.pause)
        assert not self.pieces
        used = sum(round_up(self.program.slots[slot].nbytes, 512) for slot in self.at)
        assert sum(size for size, _ in self.heap.pool.free) == self.layout.nbytes - used
        self.move(self.layout.resume)

    def move(self, moves):
        for move in moves:
            if isinstance(move, Hold):
                assert move.nbytes > MIB
                self.pieces[move.piece] = self.heap.malloc(move.nbytes)
                assert self.pieces[move.piece] == move.offset
            else:
                self.heap.free(self.pieces.pop(move.piece))

    def run(self, run):
        self.ask(run.writes)
        workspace = self.problem.profile.cost(run.op, run.variant).workspace_bytes
        if workspace > MIB:
            self.heap.free(self.heap.malloc(workspace))
        for source, target in run.donate:
            if source in self.at:
                self.at[target] = self.at.pop(source)
        for slot in self.layout.guests.intersection(self.at):
            self.heap.free(self.at.pop(slot))

    def ask(self, slots):
        for slot in dict.fromkeys(slots):
            if slot in self.waiting and slot in self.layout.offsets:
                self.at[slot] = self.heap.malloc(self.program.slots[slot].nbytes)
                assert self.at[slot] == self.layout.offsets[slot]
            self.waiting.discard(slot)


def large(problem, scale):
    """The problem with all bytes multiplied by `scale`."""
    trace = problem.trace
    buffers = tuple(replace(b, nbytes=b.nbytes * scale) for b in trace.buffers)
    profile = problem.profile
    workspaces = tuple(n * scale for n in profile.workspace_bytes)
    return replace(
        problem,
        trace=replace(trace, buffers=buffers),
        profile=replace(profile, workspace_bytes=workspaces),
        budget_bytes=problem.budget_bytes * scale,
        outside_bytes=problem.outside_bytes * scale,
        between_bytes=problem.between_bytes * scale,
    )


@settings(deadline=None, max_examples=60)
@given(
    problems(),
    st.sampled_from(["keep-all", "recompute-all", "swap-all", "lms", "chen-sqrt"]),
    st.sampled_from([17 << 10, 300 << 10, 5 << 20, 200 << 20]),
)
def test_every_request_gets_its_place(problem, policy, scale):
    problem = large(replace(problem, budget_bytes=1 << 30), scale)
    try:
        plan = resolve(policy).plan(problem)
    except InfeasibleError:
        return
    program = lower(problem, plan)
    layout = lay_out(problem, program, Space(HUGE))
    if layout is not None:
        Served(problem, program, layout).serve()
        for slot in layout.guests:
            assert isinstance(program.body[layout.positions[slot]].action, Run)
        assert layout.peak_bytes >= peak(problem, program, Tier.DEVICE).nbytes


QUARTER = MIB // 4


class Quarters:
    """A stretch of 20 MiB and an allocator that follows its moves; units are quarters of a MiB."""

    def __init__(self):
        self.planned, self.heap = placed_range.PlacedRange(80 * QUARTER), Stretch(80 * QUARTER)
        self.pieces = {0: 0}

    def ask(self, offset, nbytes):
        for move in self.planned.open([(offset * QUARTER, nbytes * QUARTER)]):
            if isinstance(move, Hold):
                assert move.nbytes > MIB
                self.pieces[move.piece] = self.heap.malloc(move.nbytes)
                assert self.pieces[move.piece] == move.offset
            else:
                self.heap.free(self.pieces.pop(move.piece))
        assert self.heap.malloc(nbytes * QUARTER) == offset * QUARTER
        self.planned.use(offset * QUARTER, nbytes * QUARTER)

    def free(self, offset):
        self.heap.free(offset * QUARTER)
        self.planned.free(offset * QUARTER)

    def holds(self, offset):
        return offset * QUARTER in self.pieces.values()


def test_a_little_that_is_free_before_a_place_is_held_with_what_lies_before_that():
    """Torch does not split a rest of 1 MiB or less from a block, so no piece can be that small."""
    quarters = Quarters()
    quarters.ask(0, 13)
    quarters.ask(40, 8)
    quarters.free(0)
    quarters.ask(48, 16)
    assert quarters.holds(0)
    assert quarters.holds(13)
    quarters.ask(14, 16)


def test_a_little_that_is_free_after_a_place_is_held_with_what_lies_after_that():
    quarters = Quarters()
    quarters.ask(0, 40)
    quarters.ask(40, 16)
    quarters.ask(56, 16)
    quarters.free(40)
    quarters.ask(72, 8)
    quarters.free(72)
    quarters.free(0)
    quarters.free(56)
    quarters.ask(20, 19)


@pytest.mark.parametrize(("offset", "nbytes"), [(3, 16), (24, 14)])
def test_a_little_beside_what_is_in_use_is_a_misfit(offset, nbytes):
    """At the start of the stretch, and before a block in use: no piece is adjacent."""
    quarters = Quarters()
    quarters.ask(40, 8)
    with pytest.raises(placed_range.MisfitError):
        quarters.ask(offset, nbytes)


def test_a_little_between_two_places_is_a_misfit():
    with pytest.raises(placed_range.MisfitError):
        list(
            placed_range.PlacedRange(80 * QUARTER).open(
                [(0, 16 * QUARTER), (18 * QUARTER, 16 * QUARTER)]
            )
        )


@settings(deadline=None, max_examples=20)
@given(problems(), st.integers(0, 1 << 50))
def test_the_stretch_stays_beside_what_comes_after_the_step(problem, after):
    problem = large(replace(problem, budget_bytes=1 << 30), 5 << 20)
    program = lower(problem, resolve("keep-all").plan(problem))
    layout = lay_out(problem, program, Space(HUGE))
    if layout is None:
        return
    within = layout.peak_bytes - layout.nbytes
    beside = max(within, resident_bytes(problem) + after + BESIDE_BYTES)
    lowest = HUGE - within + lacking_bytes(problem, program, Space(HUGE))
    assert lowest <= layout.nbytes
    assert lacking_bytes(problem, program, Space(beside + lowest, after)) == 0
    assert lay_out(problem, program, Space(beside + lowest - 1, after)) is None
    assert lay_out(problem, program, Space(beside + layout.nbytes, after)) is not None


@pytest.mark.parametrize("seed", range(5))
def test_what_lives_at_once_does_not_overlap(seed):
    draws = random.Random(seed)
    stays = []
    for _ in range(60):
        first = draws.randrange(100)
        stays.append(Stay(first, first + draws.randint(1, 30), draws.randint(1, 50)))
    least = lowest_bytes(stays)
    offsets = pack(stays, least * 5 // 4, seed)
    assert offsets is not None
    ends = [offset + stay.nbytes for offset, stay in zip(offsets, stays, strict=True)]
    assert max(ends) <= least * 5 // 4
    for one, (a, lies) in enumerate(zip(stays, offsets, strict=True)):
        for b, other in zip(stays[:one], offsets[:one], strict=True):
            if a.first < b.last and b.first < a.last:
                assert lies + a.nbytes <= other or other + b.nbytes <= lies


def test_less_than_what_lives_at_once_is_never_enough():
    stays = [Stay(0, 3, 10), Stay(2, 4, 7), Stay(3, 5, 1)]
    assert lowest_bytes(stays) == 17
    assert pack(stays, 16) is None
    assert pack(stays, 17) is not None
    assert pack([], 0) == ()
