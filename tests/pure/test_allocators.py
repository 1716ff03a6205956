"""What allocators reserve: hand-worked cases, and properties that hold for any program."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.allocators import ALLOCATORS, Allocator, Heap, Held, Reservation, reserve, resolve
from outcore.allocators.best_fit import NNABLA, PYTORCH, BestFit, BestFitHeap
from outcore.allocators.blocks import Pool
from outcore.allocators.expandable import _ADDRESSES, ExpandableHeap, ExpandableSegments
from outcore.allocators.first_fit import FirstFit
from outcore.allocators.ideal import Ideal
from outcore.allocators.virtual_chunks import VirtualChunks
from outcore.errors import OptionValueError, VerifyError
from outcore.ir.hardware import Tier
from outcore.ir.memory import Peak, peak
from outcore.ir.plan import make_plan
from outcore.ir.problem import Problem
from outcore.ir.program import Program
from outcore.ir.text import parse
from outcore.lower import lower
from outcore.spec import spec_text
from tests.pure.building import small_problem
from tests.pure.strategies import plans, problems

KIB, MIB = 2**10, 2**20
ENDLESS = 1 << 60

SPECS = (
    "ideal",
    "best-fit",
    "best-fit-nnabla",
    "expandable-segments",
    "expandable-segments{fraction=true}",
    "first-fit",
    "first-fit{block_bytes=16B}",
    "virtual-chunks",
    "virtual-chunks{chunk_bytes=1000B}",
    "virtual-chunks{chunk_bytes=4KiB,small_bytes=1KiB}",
)


def pytorch(capacity: int = ENDLESS) -> BestFitHeap:
    return BestFitHeap(PYTORCH, capacity)


# ---- the table, specs ----------------------------------------------------------------------------


def test_the_table_names_each_allocator_by_its_name() -> None:
    assert {name: kind.name for name, kind in ALLOCATORS.items()} == {n: n for n in ALLOCATORS}
    assert {resolve(spec).name for spec in SPECS} == set(ALLOCATORS)


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_is_read_and_written(spec: str) -> None:
    chosen = resolve(spec)
    assert resolve(spec_text(chosen)) == chosen
    assert resolve(chosen) is chosen
    assert not chosen.summary.endswith(".")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("best", "unknown allocator 'best': did you mean 'best-fit'? Known: best-fit, "),
        ("best-fit{x=1}", "unknown option 'x': it has none"),
        ("virtual-chunks{chunk_bytes=20}", "chunk_bytes=20: cannot read"),
        ("virtual-chunks{", "write a name, or a name and options as in virtual-chunks{"),
    ],
)
def test_a_wrong_spec_is_answered_with_what_would_do(spec: str, said: str) -> None:
    with pytest.raises(OptionValueError) as caught:
        resolve(spec)
    assert str(caught.value).startswith("option allocator=")
    assert said in str(caught.value)


def test_blocks_and_chunks_have_bytes() -> None:
    with pytest.raises(OptionValueError, match="chunk_bytes=0: a chunk has"):
        VirtualChunks(0)
    with pytest.raises(OptionValueError, match="block_bytes=0: a block has"):
        FirstFit(0)


# ---- best fit ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),  # rounded to 10 MiB first
        (10 * MIB + 1, 12 * MIB),
        (12 * MIB, 12 * MIB),
    ],
)
def test_segments_of_pytorch(asked: int, segment: int) -> None:
    heap = pytorch()
    heap.malloc(asked)
    assert heap.reserved_bytes == segment


@pytest.mark.parametrize(
    ("asked", "segment"),
    [(1, MIB), (MIB, MIB), (MIB + 1, MIB + 128 * KIB), (10 * MIB, 10 * MIB)],
)
def test_segments_of_nnabla(asked: int, segment: int) -> None:
    heap = BestFitHeap(NNABLA, ENDLESS)
    heap.malloc(asked)
    assert heap.reserved_bytes == segment


def test_small_requests_share_a_segment_in_steps_of_512_bytes() -> None:
    heap = pytorch()
    assert [heap.malloc(n) for n in (1, 513, 512, MIB)] == [0, 512, 1536, 2048]
    assert heap.reserved_bytes == 2 * MIB
    heap.malloc(MIB)  # the rest of the segment is 2048 bytes too small
    assert heap.reserved_bytes == 4 * MIB


def test_small_and_large_requests_have_pools_of_their_own() -> None:
    heap = pytorch()
    heap.malloc(2 * MIB)  # leaves 18 MiB free
    heap.malloc(512)
    assert heap.reserved_bytes == 22 * MIB


@pytest.mark.parametrize(("asked", "split"), [(19 * MIB, False), (19 * MIB - 512, True)])
def test_a_large_block_is_split_where_more_than_a_mebibyte_is_left(asked: int, split: bool) -> None:
    heap = pytorch()
    heap.free(heap.malloc(20 * MIB))
    heap.malloc(asked)
    assert bool(heap.large.free) is split


def test_the_smallest_block_that_fits_is_taken_and_the_lowest_among_equals() -> None:
    heap = pytorch()
    sizes = [30, 14, 12, 14]
    first, second, third, fourth = (heap.malloc(n * MIB) for n in sizes)
    for address in (fourth, first, third, second):
        heap.free(address)
    assert heap.malloc(13 * MIB) == second
    assert heap.malloc(13 * MIB) == fourth
    assert heap.malloc(13 * MIB) == first
    assert heap.malloc(12 * MIB) == third
    assert heap.reserved_bytes == 70 * MIB


def test_the_rest_of_a_split_block_serves_later_requests() -> None:
    heap = pytorch()
    addresses = [heap.malloc(n * MIB) for n in (5, 5, 6, 4)]
    assert addresses == [0, 5 * MIB, 10 * MIB, 16 * MIB]
    assert heap.reserved_bytes == 20 * MIB


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_free_neighbors_become_one_block(order: tuple[int, ...]) -> None:
    heap = pytorch()
    addresses = [heap.malloc(n * MIB) for n in (5, 9, 6)]
    for index in order:
        heap.free(addresses[index])
    assert heap.large.free == [(20 * MIB, 0)]
    assert heap.malloc(20 * MIB) == 0
    assert heap.reserved_bytes == 20 * MIB


def test_a_block_in_use_keeps_its_neighbors_apart() -> None:
    heap = pytorch()
    first, _, third = (heap.malloc(n * MIB) for n in (5, 9, 6))
    heap.free(first)
    heap.free(third)
    heap.malloc(11 * MIB)  # as much as is free
    assert heap.reserved_bytes == (20 + 12) * MIB


def test_segments_never_join() -> None:
    heap = pytorch()
    for address in [heap.malloc(10 * MIB), heap.malloc(10 * MIB)]:
        heap.free(address)
    heap.malloc(20 * MIB)
    assert heap.reserved_bytes == 40 * MIB


def test_a_full_device_gets_back_what_is_free_as_a_whole() -> None:
    heap = pytorch(40 * MIB)
    for address in [heap.malloc(10 * MIB), heap.malloc(10 * MIB)]:
        heap.free(address)
    heap.malloc(5 * MIB)  # splits the first of the two
    heap.malloc(22 * MIB)  # 20 MiB + 22 MiB is too much: the other segment is given back
    assert heap.reserved_bytes == (10 + 22) * MIB
    heap.malloc(10 * MIB)  # a request beyond the capacity is served nevertheless
    assert heap.reserved_bytes == (10 + 22 + 10) * MIB


# ---- expandable segments -------------------------------------------------------------------------


def relative(heap: ExpandableHeap, address: int) -> int:
    return address - min(heap.large.pool.blocks)


def test_a_segment_grows_by_pages_from_its_last_free_block() -> None:
    heap = ExpandableHeap(ENDLESS)
    heap.malloc(1)
    assert heap.reserved_bytes == 2 * MIB
    first = heap.malloc(5 * MIB)
    assert heap.reserved_bytes == 22 * MIB
    second = heap.malloc(16 * MIB)
    assert relative(heap, second) == 5 * MIB
    assert heap.reserved_bytes == 42 * MIB
    heap.free(first)
    heap.free(second)
    assert heap.malloc(40 * MIB) == first  # both blocks are one again
    assert heap.reserved_bytes == 42 * MIB


def test_a_block_that_could_grow_is_spared() -> None:
    heap = ExpandableHeap(ENDLESS)
    first = heap.malloc(20 * MIB)
    heap.malloc(2 * MIB)  # leaves 18 MiB that could grow
    heap.free(first)
    assert heap.malloc(17 * MIB) == first


def test_a_full_device_moves_pages_of_free_blocks() -> None:
    heap = ExpandableHeap(60 * MIB)
    first, second = heap.malloc(30 * MIB), heap.malloc(30 * MIB)
    heap.free(first)
    assert heap.retries == 0
    third = heap.malloc(40 * MIB)  # unmaps the first's whole page; maps one page too many
    assert heap.retries == 1
    assert heap.given_back_bytes == 20 * MIB
    assert relative(heap, third) == 60 * MIB
    assert heap.reserved_bytes == 80 * MIB
    assert [b.nbytes for b in heap.large.pool.blocks.values() if b.free] == [10 * MIB]
    heap.free(second)
    assert heap.large.pool.free == [(40 * MIB, third - 40 * MIB)]
    heap.free(third)
    assert heap.malloc(75 * MIB) == third - 40 * MIB
    assert heap.reserved_bytes == 80 * MIB


def test_a_gap_is_filled_before_the_segment_grows() -> None:
    heap = ExpandableHeap(40 * MIB)
    first = heap.malloc(20 * MIB)
    heap.malloc(20 * MIB)
    heap.free(first)
    heap.malloc(21 * MIB)  # unmaps the first, and finds no room there
    assert heap.reserved_bytes == 60 * MIB
    heap.malloc(19 * MIB)  # the rest of the page just mapped
    assert heap.malloc(20 * MIB) == first


def test_under_a_fraction_a_request_counts_whole() -> None:
    for fraction in (False, True):
        heap = ExpandableHeap(60 * MIB, fraction=fraction)
        heap.free(heap.malloc(15 * MIB))
        heap.malloc(30 * MIB)  # needs one page more
        assert heap.retries == 0
        heap.free(heap.malloc(10 * MIB))
        heap.malloc(25 * MIB)  # the same again, with 40 MiB reserved
        assert heap.retries == fraction


def test_what_a_process_holds_lies_where_it_does() -> None:
    heap = ExpandableHeap(200 * MIB)
    held = Held(
        small=((KIB, KIB),),
        large=((0, 5 * MIB), (8 * MIB, 20 * MIB), (70 * MIB, 10 * MIB)),
        external_bytes=7 * MIB,
    )
    heap.hold(held)
    assert held.nbytes == 35 * MIB + KIB
    assert heap.reserved_bytes == 2 * MIB + 40 * MIB + 20 * MIB + 7 * MIB
    free = [(nbytes, start - _ADDRESSES) for nbytes, start in heap.large.pool.free]
    assert free == [(3 * MIB, 5 * MIB), (10 * MIB, 60 * MIB), (12 * MIB, 28 * MIB)]
    assert heap.large.unmapped == [_ADDRESSES + 40 * MIB, _ADDRESSES + 80 * MIB]
    assert heap.small.pool.free == [(KIB, 0), (2 * MIB - 2 * KIB, 2 * KIB)]
    assert relative(heap, heap.malloc(3 * MIB)) == 5 * MIB
    assert relative(heap, heap.malloc(30 * MIB)) == 28 * MIB, "with the page after it"
    assert heap.reserved_bytes == 2 * MIB + 60 * MIB + 20 * MIB + 7 * MIB
    heap.free(_ADDRESSES + 8 * MIB)
    assert relative(heap, heap.malloc(20 * MIB)) == 8 * MIB
    assert heap.malloc(KIB) == 0


@given(
    laid=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 50)), max_size=8),
    asked=st.lists(st.integers(2, 60), min_size=1, max_size=30),
    data=st.data(),
)
def test_nothing_is_given_out_that_a_process_holds(laid, asked, data):
    blocks, end = [], 0
    for gap, nbytes in laid:
        blocks.append(((end + gap) * MIB, nbytes * MIB))
        end += gap + nbytes
    heap = ExpandableHeap(400 * MIB)
    heap.hold(Held(large=tuple(blocks)))
    pages = {
        page for at, n in blocks for page in range(at // (20 * MIB), -(-(at + n) // (20 * MIB)))
    }
    assert heap.reserved_bytes == 20 * MIB * len(pages)
    taken = [(_ADDRESSES + start, nbytes) for start, nbytes in blocks]
    for size in asked:
        address = heap.malloc(size * MIB)
        assert all(address + size * MIB <= a or a + n <= address for a, n in taken)
        taken.append((address, size * MIB))
        if data.draw(st.booleans()):
            heap.free(taken.pop(data.draw(st.integers(0, len(taken) - 1)))[0])


def test_a_program_runs_in_what_is_held() -> None:
    problem, program = donating()
    given = sum(
        slot.nbytes for slot in map(program.slots.__getitem__, program.arguments) if slot.nbytes
    )
    total = given + problem.outside_bytes
    everything, elsewhere = Held(large=((0, total),)), Held((), (), 2 * MIB, total)
    for held, more in ((everything, 0), (elsewhere, 0), (Held(), total)):
        found = reserve(problem, program, ExpandableSegments(), held=held, capacity_bytes=ENDLESS)
        alone = reserve(problem, program, ExpandableSegments(), capacity_bytes=ENDLESS)
        assert found.live.nbytes == alone.live.nbytes - given - problem.outside_bytes + more
    with pytest.raises(ValueError, match="where segments expand"):
        reserve(problem, program, BestFit(), held=Held())


# ---- first fit, chunks ---------------------------------------------------------------------------


def test_the_first_hole_that_fits_is_taken() -> None:
    heap = FirstFit().heap(ENDLESS)
    first, second, third, _ = (heap.malloc(n * KIB) for n in (4, 1, 2, 1))
    assert (first, second, third) == (0, 4 * KIB, 5 * KIB)
    heap.free(first)
    heap.free(third)
    assert heap.malloc(2 * KIB) == 0  # though the other hole is as large as this request
    assert heap.malloc(1) == 2 * KIB
    assert heap.malloc(KIB + 1) == 5 * KIB
    assert heap.reserved_bytes == 8 * KIB
    heap.malloc(2 * KIB)
    assert heap.reserved_bytes == 10 * KIB


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 0, 2), (2, 1, 0), (0, 1, 2)])
def test_holes_that_touch_become_one(order: tuple[int, ...]) -> None:
    heap = FirstFit().heap(ENDLESS)
    addresses = [heap.malloc(KIB) for _ in range(4)]
    for index in order:
        heap.free(addresses[index])
    assert heap.holes == [(0, 3 * KIB)]
    heap.free(addresses[3])
    heap.malloc(5 * KIB)  # the hole at the end grows
    assert heap.reserved_bytes == 5 * KIB


def test_chunks_are_used_again_wherever_they_lie() -> None:
    heap = VirtualChunks(100).heap(ENDLESS)
    first, _, third = heap.malloc(100), heap.malloc(101), heap.malloc(1)
    assert heap.reserved_bytes == 400
    heap.free(first)
    heap.free(third)
    heap.malloc(200)  # two chunks that are not adjacent
    assert heap.reserved_bytes == 400
    heap.malloc(1)
    assert heap.reserved_bytes == 500


def test_small_requests_may_go_to_a_caching_allocator() -> None:
    heap = VirtualChunks(20 * MIB, small_bytes=MIB).heap(ENDLESS)
    small, large = heap.malloc(MIB - 1), heap.malloc(MIB)
    assert heap.reserved_bytes == 22 * MIB
    heap.free(small)
    heap.free(large)
    heap.malloc(512)
    heap.malloc(20 * MIB)
    assert heap.reserved_bytes == 22 * MIB


# ---- any requests --------------------------------------------------------------------------------


@dataclass(slots=True)
class WatchedHeap:
    """A heap that asserts at each request that no two live blocks overlap."""

    inner: Heap
    live: dict[int, int] = field(default_factory=dict)
    most: int = 0

    @property
    def reserved_bytes(self) -> int:
        return self.inner.reserved_bytes

    @property
    def retries(self) -> int:
        return self.inner.retries

    @property
    def given_back_bytes(self) -> int:
        return self.inner.given_back_bytes

    def malloc(self, nbytes: int) -> int:
        address = self.inner.malloc(nbytes)
        for start, size in self.live.items():
            assert address + nbytes <= start or start + size <= address
        self.live[address] = nbytes
        self.most = max(self.most, len(self.live))
        assert self.reserved_bytes >= sum(self.live.values())
        return address

    def free(self, address: int) -> None:
        del self.live[address]
        self.inner.free(address)


@dataclass(frozen=True, slots=True)
class Watched:
    """An allocator whose heaps are WatchedHeaps."""

    name: ClassVar[str] = "watched"
    summary: ClassVar[str] = "for tests"
    inner: Allocator
    heaps: list[WatchedHeap] = field(default_factory=list)

    def heap(self, capacity_bytes: int) -> WatchedHeap:
        self.heaps.append(WatchedHeap(self.inner.heap(capacity_bytes)))
        return self.heaps[-1]


sizes = st.sampled_from([1, 512, 1000, KIB, MIB, MIB + 1, 2 * MIB, 5 * MIB, 13 * MIB, 40 * MIB])
requests = st.lists(st.one_of(sizes, st.integers(-20, -1)), max_size=40)
"""Sizes to request; a negative number -n frees the n-th live block from the end."""


def serve(heap: WatchedHeap, asked: list[int]) -> None:
    for request in asked:
        if request > 0:
            heap.malloc(request)
        elif -request <= len(heap.live):
            heap.free(list(heap.live)[request])


@pytest.mark.parametrize("spec", SPECS)
@given(asked=requests, capacity=st.sampled_from([ENDLESS, 60 * MIB]))
def test_no_two_blocks_overlap_and_what_lives_is_reserved(
    spec: str, asked: list[int], capacity: int
) -> None:
    serve(WatchedHeap(resolve(spec).heap(capacity)), asked)


def check_pool(pool: Pool) -> int:
    """Check a pool's lists against its blocks; return the bytes of the mapped blocks."""
    assert pool.free == sorted((b.nbytes, b.start) for b in pool.blocks.values() if b.free)
    for start, block in pool.blocks.items():
        assert block.start == start
        assert block.mapped or not block.free
        if block.after is not None:
            assert block.after.start == block.start + block.nbytes
            assert block.after.before is block
            assert not (block.free and block.after.free)
            assert block.mapped or block.after.mapped
    return sum(b.nbytes for b in pool.blocks.values() if b.mapped)


@given(asked=requests, capacity=st.sampled_from([ENDLESS, 60 * MIB]))
def test_the_blocks_of_best_fit_tile_what_it_reserves(asked: list[int], capacity: int) -> None:
    heap = pytorch(capacity)
    serve(WatchedHeap(heap), asked)
    assert check_pool(heap.small) + check_pool(heap.large) == heap.reserved_bytes


@given(asked=requests, capacity=st.sampled_from([ENDLESS, 60 * MIB, 1]))
def test_the_blocks_of_a_stretch_tile_what_is_mapped(asked: list[int], capacity: int) -> None:
    heap = ExpandableHeap(capacity)
    serve(WatchedHeap(heap), asked)
    mapped = 0
    for stretch in (heap.small, heap.large):
        mapped += check_pool(stretch.pool)
        gaps = [b for b in stretch.pool.blocks.values() if not b.mapped]
        assert stretch.unmapped == sorted(b.start for b in gaps)
        assert all(b.start % stretch.page == b.nbytes % stretch.page == 0 for b in gaps)
    assert mapped == heap.reserved_bytes


@given(asked=requests)
def test_first_fit_reaches_no_further_than_all_requests_together(asked: list[int]) -> None:
    heap = FirstFit().heap(ENDLESS)
    serve(WatchedHeap(heap), asked)
    assert heap.reserved_bytes <= sum(-(-n // KIB) * KIB for n in asked if n > 0)
    ends = [edge for hole in heap.holes for edge in hole]
    assert ends == sorted(set(ends))


# ---- programs ------------------------------------------------------------------------------------


@st.composite
def served(draw: st.DrawFn) -> tuple[Problem, Program]:
    """A problem, and a program lowered from any plan that can be carried out."""
    problem = draw(problems())
    try:
        return problem, lower(problem, draw(plans(problem)), fast=True)
    except VerifyError:  # the plan recomputes from a buffer that is lost
        return problem, lower(problem, make_plan({}), fast=True)


@given(drawn=served())
def test_the_ideal_is_the_programs_own_peak(drawn: tuple[Problem, Program]) -> None:
    problem, program = drawn
    found = reserve(problem, program, Ideal(), steps=1)
    assert found.live == found.reserved == peak(problem, program, Tier.DEVICE)
    assert found.fragmentation == 1
    assert reserve(problem, program, Ideal(), steps=3).live == found.live


@pytest.mark.parametrize("spec", SPECS)
@given(drawn=served())
def test_what_a_program_has_alive_is_reserved(spec: str, drawn: tuple[Problem, Program]) -> None:
    problem, program = drawn
    watched = Watched(resolve(spec))
    found = reserve(problem, program, watched)
    assert found.live == peak(problem, program, Tier.DEVICE)
    assert found.reserved.nbytes >= found.live.nbytes
    assert found.fragmentation >= 1
    held = {s for s in program.results if s in program.arguments and program.slots[s].nbytes}
    (heap,) = watched.heaps
    assert len(heap.live) == len(held) + bool(problem.outside_bytes)


@given(drawn=served())
def test_chunks_waste_less_than_one_for_each_tensor_alive(drawn: tuple[Problem, Program]) -> None:
    """Sony section 4, equation 2."""
    problem, program = drawn
    watched = Watched(VirtualChunks(1000))
    found = reserve(problem, program, watched)
    assert found.reserved.nbytes - found.live.nbytes < 1000 * watched.heaps[0].most


DONATING = """
program boundary 3
slot s0 buffer 2 device 1024 B
slot s1 buffer 2 device 1024 B
slot s2 buffer 2 device 4096 B
arguments s0
0: compute alloc s2
1: compute free s2
2: compute run 0 s0 -> s1 donate s0:s1
3: compute free s1
"""


def donating() -> tuple[Problem, Program]:
    problem = small_problem()
    profile = replace(problem.profile, workspace_bytes=(3000,) * len(problem.trace.ops))
    return replace(problem, profile=profile, between_bytes=5000), parse(DONATING, Program)


def test_a_donated_block_is_handed_on_and_freed_once() -> None:
    problem, program = donating()
    watched = Watched(Ideal())
    found = reserve(problem, program, watched, steps=2)
    assert not watched.heaps[0].live
    assert found.live == Peak(1024 + 5000, 3)


def test_workspaces_and_what_is_between_the_calls_go_through_the_allocator() -> None:
    problem, program = donating()
    found = reserve(problem, program, "first-fit", capacity_bytes=6 * KIB)
    # 1 KiB for the argument; then 4, 3 and, between the calls, 5 blocks in the same place
    assert found.reserved == Peak(6 * KIB, 3)
    assert found.met
    assert found.fragmentation == pytest.approx(6 * KIB / 6024)
    assert not reserve(problem, program, "first-fit", capacity_bytes=6 * KIB - 1).met


def test_bytes_outside_the_trace_are_a_block() -> None:
    problem, program = donating()
    outside = replace(problem, outside_bytes=100)
    found = reserve(outside, program, "virtual-chunks{chunk_bytes=1KiB}", capacity_bytes=ENDLESS)
    assert found.reserved.nbytes == (1 + 1 + 5) * KIB
    assert found.allocator == "virtual-chunks{chunk_bytes=1KiB}"


def test_blocks_of_other_code_at_the_same_position_all_count() -> None:
    problem, program = donating()
    others = [(3, 7 * KIB), (3, 2 * KIB), (0, KIB)]
    found = reserve(problem, program, "ideal", others=others, capacity_bytes=ENDLESS)
    assert found.live == found.reserved == Peak(1024 + 10 * KIB, 3)
    watched = Watched(Ideal())
    assert reserve(problem, program, watched, others=[(3, 1), (3, 1)], steps=2).live.nbytes
    assert not watched.heaps[0].live


def test_the_capacity_is_the_devices_unless_given() -> None:
    problem, program = donating()
    found = reserve(problem, program)
    assert found.allocator == "best-fit"
    assert found.capacity_bytes == problem.hardware.capacity(Tier.DEVICE) == 16384
    assert found.reserved.nbytes == 2 * MIB
    assert not found.met


def test_nothing_asked_for_is_nothing_reserved() -> None:
    nothing = reserve(small_problem(), Program((), (), 0, (), (), ()), BestFit())
    assert nothing == Reservation(
        allocator="best-fit",
        capacity_bytes=16384,
        live=Peak(0, 0),
        reserved=Peak(0, 0),
        retries=0,
        given_back_bytes=0,
    )
    assert nothing.fragmentation == 1
