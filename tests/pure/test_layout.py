"""Layouts: places that do not overlap, and moves by which a best-fit allocator uses just those."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.allocators import stretch
from outcore.allocators.best_fit import MIB
from outcore.allocators.blocks import Pool, round_up
from outcore.allocators.layout import BESIDE_BYTES, Space, lacking_bytes, lay_out
from outcore.allocators.packing import Stay, lowest_bytes, pack
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


class Stretch:
    """Torch's allocator, as far as the free memory of one stream goes: best fit, and no more."""

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
    """A program whose large requests are served from the stretch, each where the layout has it."""

    def __init__(self, problem, program, layout):
        self.problem, self.program, self.layout = problem, program, layout
        self.heap, self.pieces = Stretch(layout.nbytes), {0: 0}
        self.at, self.waiting = {}, set()

    def serve(self):
        for position, instruction in enumerate(self.program.body):
            self.move(position)
            action = instruction.action
            if position in self.layout.at_home:
                assert isinstance(action, Run)
                assert self.waiting.issuperset(action.writes)
                self.waiting.difference_update(action.writes)
            elif isinstance(action, Alloc):
                self.waiting.add(action.slot)
            elif isinstance(action, Copy):
                self.ask([action.target])
            elif isinstance(action, Run):
                self.run(action)
            elif isinstance(action, Free) and action.slot in self.at:
                self.heap.free(self.at.pop(action.slot))
        assert not self.at

    def move(self, position):
        for move in self.layout.moves.get(position, ()):
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
    """The same with `scale` times the bytes."""
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
    layout = lay_out(problem, program, Space(1 << 60))
    if layout is not None:
        Served(problem, program, layout).serve()
        for slot in layout.guests:
            assert isinstance(program.body[layout.positions[slot]].action, Run)
        assert layout.peak_bytes >= peak(problem, program, Tier.DEVICE).nbytes


def test_a_little_that_is_free_before_a_place_is_held_with_what_lies_before_that():
    """Torch leaves 1 MiB and less with the block: no piece can be as small."""
    quarter = MIB // 4
    planned, heap, pieces = stretch.Stretch(80 * quarter), Stretch(80 * quarter), {0: 0}

    def ask(offset, nbytes):
        for move in planned.open([(offset * quarter, nbytes * quarter)]):
            if isinstance(move, Hold):
                pieces[move.piece] = heap.malloc(move.nbytes)
                assert pieces[move.piece] == move.offset
            else:
                heap.free(pieces.pop(move.piece))
        assert heap.malloc(nbytes * quarter) == offset * quarter
        planned.use(offset * quarter, nbytes * quarter)

    def free(offset):
        heap.free(offset * quarter)
        planned.free(offset * quarter)

    ask(0, 13)
    ask(40, 8)
    free(0)
    ask(48, 16)
    assert 0 in pieces.values()
    ask(14, 16)


@settings(deadline=None, max_examples=20)
@given(problems(), st.integers(0, 1 << 30))
def test_the_stretch_stays_beside_what_comes_after_the_step(problem, after):
    problem = large(replace(problem, budget_bytes=1 << 30), 5 << 20)
    program = lower(problem, resolve("keep-all").plan(problem))
    layout = lay_out(problem, program, Space(1 << 60, after))
    if layout is not None and layout.nbytes:
        least = (1 << 60) + lacking_bytes(problem, program, Space(1 << 60, after))
        assert resident_bytes(problem) + after + BESIDE_BYTES < least <= layout.peak_bytes
        assert lay_out(problem, program, Space(least - 1, after)) is None
        assert lay_out(problem, program, Space(layout.peak_bytes, after)) is not None


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
