"""Kernel: what a plan takes, as `lower` and `simulate` have it, over two tables of numbers.

`table[ROW, i]` is an int and `times[ROW, i]` seconds; rows are named below. The functions follow
`lower/expand.py`, `donate.py`, `release.py`, `prefetch.py`, `place.py` and `sync.py`, `simulate.py`
and `ir/memory.py`, where the reasons stand. Three walks do the work of all: one over the ops, one
over the copies back, one over the steps that come of them.

All compiled code is in this one file. Numba keeps what it compiled under the time stamp of a single
source file, so that after an edit in another one it would still use numbers of rows, and bodies of
functions, from before.
"""

from __future__ import annotations

from collections.abc import Sequence

from outcore.evaluate.compiled import Floats, Ints, compiled
from outcore.evaluate.kinds import KEEP, NO_HINT, OFFLOAD, RECOMPUTE, RECOMPUTE_STAY

NONE = -1
NEVER = 1 << 62
"""After all steps; and of bytes more than any sum of them."""

DONE, REFUSED, FULL = range(3)
"""The plan was evaluated; it cannot be carried out; it takes longer tables."""

# ---- rows of `table` -----------------------------------------------------------------------------

COUNT = 0
"""Figures of the plan at hand; its columns:"""

(N_STEPS, N_READS, N_WRITES, N_AFTERS, N_SLOTS, N_GROUPS, N_LEAVING, N_FREED, N_CHAIN) = range(9)
"""Lengths of lists."""
EPOCH, OLDEST, UNHURRIED, BOUNDARY_STEP, BETWEEN_HELD = range(9, 14)
"""The stamp of the latest chain; two places in the queue of what leaves; the first backward step;
bytes held between the two calls."""
LIVE, LEAVING_BYTES, UNUSED_BYTES = range(14, 17)
"""Bytes on the device: of what lives there, of what leaves, of what is passed in for nothing."""
N_FREE, N_ROOMS, EXTENT, PLAYED_LIVE, PEAK = range(17, 22)
COUNTS = 22
"""Free ranges and owned ones of the outer tier, its bytes so far; bytes on the device and most."""

FIXED = 1
"""Figures of the problem; its columns:"""

(N_OPS, N_BUFFERS, N_GAPS, N_INPUTS, N_TANGENTS, STEPS_MOST, ACCESSES_MOST) = range(7)
"""Lengths; how many steps there can be, and how many accesses of one kind (`_has_room`)."""
BOUNDARY, BUDGET_BYTES, OUTSIDE_BYTES, BETWEEN_BYTES, OFFLOADS = range(7, 12)
"""`OFFLOADS`: whether there is an outer tier."""

INPUTS, TANGENTS, READS, WRITES, DONATION_READS, DONATION_WRITES, USE_GAPS = range(2, 9)
"""Lists of the problem. Donations are places in the reads and the writes of their op; `USE_GAPS`
has for each use of a buffer the gap after it, NONE where that may not be moved."""

(READ_START, WRITE_START, DONATION_START, REPEATABLE, MUTATES, WORKSPACE_BYTES) = range(9, 15)
"""Of an op; its reads are from its `READ_START` to that of the next op."""

USE_START, PRODUCER, IS_HELD, DEVICE_BYTES, FETCHED_BYTES, OUTER_BYTES = range(15, 21)
"""Of a buffer; bytes are those of its slots."""

GAP_BUFFER, GAP_USE, GAP_AFTER, GAP_BEFORE, KIND, RELEASE, PREFETCH = range(21, 28)
"""Of a gap: what it is (`GAP_USE`: after which of the buffer's uses), and what the plan says."""

DEVICE, OUTER, NOW, PASSED, MUTATED, LAST_OFFLOAD, TEMPORARY = range(28, 35)
"""Of a buffer, at the step at hand, as in `lower/expand.py`; `TEMPORARY`: its slot in a chain."""

SEEN, WANTED, FETCHED, NEEDED, LAST_READER, RERUN = range(35, 41)
"""Of a buffer, the last of an op: the stamp of the chain that it is so in, or its last reader."""

WANTED_LIST, STACK, CHAIN = range(41, 44)
"""Lists of a chain: buffers that an op wants, buffers to look at, ops to run again."""

LEAVING_SLOT, LEAVING_DUE, LEAVING_GONE, DUE_NEXT, FREED_SLOT, FREED_AT = range(44, 50)
"""Of what leaves, in order of issue; then of its frees, in their order. `FREED_AT` is twice the
step for one before its run, and one more for one at its end."""

DUE_FIRST, DUE_LAST, OWN_STEP = range(50, 53)
"""Of an op: a list through `DUE_NEXT` of what is to be gone by then; the step of its first run."""

STEP_OP, STEP_HELD, STEP_UNUSED, STEP_READS, STEP_WRITES, STEP_AFTERS = range(53, 59)
"""Of a step: its op, bytes on the device, bytes passed in for nothing that it frees, and where its
accesses start."""

READ_SLOT, WRITE_SLOT, WRITE_GIVEN, AFTER_SOURCE, AFTER_SLOT = range(59, 64)
"""Of an access. `WRITE_GIVEN`: the slot whose memory is taken over. An action after the run is a
copy out of `AFTER_SOURCE`, or a free where that is NONE; none at all without `AFTER_SLOT`."""

SLOT_BUFFER, SLOT_BYTES, SLOT_OUTER, SLOT_START, SLOT_STOP, SLOT_OFFSET = range(64, 70)
"""Of a slot: the steps it is made and freed at, NONE for the caller's and for never."""

GROUP_STEP, GROUP_SOURCE, GROUP_TARGET, GROUP_FREES, GROUP_GAP, GROUP_AT = range(70, 76)
"""Of a copy back: the step that needs it, and the one it is issued before (`GROUP_AT`); whether it
frees its source; the gap whose hint it has."""

FREE_START, FREE_STOP, ROOM_START, ROOM_STOP, ROOM_OWNER = range(76, 81)
"""Of a range of the outer tier: what is free, and who was the latest owner (`ir/rooms.py`)."""

ROWS = 81

# ---- rows of `times` -----------------------------------------------------------------------------

CLOCK = 0
"""Columns: compute and the outward link as `release` has them, then the streams as played."""

RELEASE_CLOCK, LINK_FREE, COMPUTE, OUT, IN = range(5)
CLOCKS = 5

SECONDS, OUT_SECONDS, IN_SECONDS, LEAVING_DONE = range(1, 5)
"""Of an op, of a buffer (both ways), and of what leaves."""

WRITE_DONE, READ_DONE = range(5, 7)
"""Of a slot: when its latest write is done, and a copy out that reads it."""

TIME_ROWS = 7


# ---- the whole -----------------------------------------------------------------------------------


@compiled
def run(
    table: Ints,
    times: Floats,
    kinds: Sequence[int],
    release: Sequence[int],
    prefetch: Sequence[int],
) -> tuple[int, float, int, int]:
    """Evaluate a plan: DONE, REFUSED or FULL, seconds, bytes on the device and in the outer tier.

    Of each gap its kind, and hints, which count where it is offloaded.
    """
    _forget(table, times)
    for gap in range(table[FIXED, N_GAPS]):
        table[KIND, gap] = kinds[gap]
        table[RELEASE, gap], table[PREFETCH, gap] = release[gap], prefetch[gap]
        if not _allowed(table, gap):
            return REFUSED, 0.0, 0, 0
        if kinds[gap] == OFFLOAD:
            buffer = table[GAP_BUFFER, gap]
            table[LAST_OFFLOAD, buffer] = max(table[LAST_OFFLOAD, buffer], table[GAP_USE, gap])
    status = _expand(table, times)
    if status != DONE:
        return status, 0.0, 0, 0
    _prefetch(table)
    _play(table, times)
    seconds = max(times[CLOCK, COMPUTE], times[CLOCK, OUT], times[CLOCK, IN])
    return DONE, seconds, table[COUNT, PEAK], table[COUNT, EXTENT]


@compiled
def _forget(table: Ints, times: Floats) -> None:
    """Forget the plan before."""
    epoch = table[COUNT, EPOCH]
    for i in range(COUNTS):
        table[COUNT, i] = 0
    for i in range(CLOCKS):
        times[CLOCK, i] = 0.0
    table[COUNT, EPOCH] = epoch
    table[COUNT, BOUNDARY_STEP] = NEVER
    for buffer in range(table[FIXED, N_BUFFERS]):
        table[DEVICE, buffer] = table[OUTER, buffer] = table[TEMPORARY, buffer] = NONE
        table[MUTATED, buffer] = table[LAST_OFFLOAD, buffer] = NONE
        table[NOW, buffer] = KEEP
        table[PASSED, buffer] = 0
    for op in range(table[FIXED, N_OPS]):
        table[DUE_FIRST, op] = NONE


@compiled
def _allowed(table: Ints, gap: int) -> bool:
    """Whether `verify_plan` allows what the plan says of `gap`."""
    kind = table[KIND, gap]
    if kind == OFFLOAD:
        hints_fit = _hint_fits(table, gap, RELEASE) and _hint_fits(table, gap, PREFETCH)
        return hints_fit and table[FIXED, OFFLOADS] == 1
    if kind in (RECOMPUTE, RECOMPUTE_STAY):
        producer = table[PRODUCER, table[GAP_BUFFER, gap]]
        return producer != NONE and table[REPEATABLE, producer] == 1
    return kind == KEEP


@compiled
def _hint_fits(table: Ints, gap: int, row: int) -> bool:
    op = table[row, gap]
    return op == NO_HINT or table[GAP_AFTER, gap] < op <= table[GAP_BEFORE, gap]


# ---- expand: original runs -----------------------------------------------------------------------


@compiled
def _expand(table: Ints, times: Floats) -> int:
    """Walk the ops once; DONE, REFUSED or FULL."""
    table[COUNT, LIVE] = table[FIXED, OUTSIDE_BYTES]
    _arrive(table, INPUTS, table[FIXED, N_INPUTS])
    for op in range(table[FIXED, N_OPS]):
        if op == table[FIXED, BOUNDARY]:
            table[COUNT, BOUNDARY_STEP] = table[COUNT, N_STEPS]
            _arrive(table, TANGENTS, table[FIXED, N_TANGENTS])
            between = table[COUNT, LIVE] + table[FIXED, BETWEEN_BYTES]
            _make_room(table, times, between, 2 * table[COUNT, N_STEPS] - 1)
            table[COUNT, BETWEEN_HELD] = between + table[COUNT, LEAVING_BYTES]
        status = _bring(table, times, op)
        if status == DONE and not _has_room(table, op):
            status = FULL
        if status != DONE:
            return status
        _original(table, times, op)
    while table[COUNT, OLDEST] < table[COUNT, N_LEAVING]:
        _let_go(table, times, table[COUNT, OLDEST], 2 * table[COUNT, N_STEPS] - 1)
    return DONE


@compiled
def _slot(table: Ints, buffer: int, nbytes: int, outer: int) -> int:
    """A new slot, alive from the current step on."""
    slot = table[COUNT, N_SLOTS]
    table[COUNT, N_SLOTS] += 1
    table[SLOT_BUFFER, slot] = buffer
    table[SLOT_BYTES, slot] = nbytes
    table[SLOT_OUTER, slot] = outer
    table[SLOT_START, slot] = table[COUNT, N_STEPS]
    table[SLOT_STOP, slot] = NONE
    if outer == 0:
        table[DEVICE, buffer] = slot
        table[COUNT, LIVE] += nbytes
    return slot


@compiled
def _arrive(table: Ints, row: int, length: int) -> None:
    """The caller passes the buffers of `row`."""
    for i in range(length):
        buffer = table[row, i]
        slot = _slot(table, buffer, table[DEVICE_BYTES, buffer], 0)
        table[SLOT_START, slot] = NONE  # the caller's own, at no step
        if table[USE_START, buffer] == table[USE_START, buffer + 1] and table[IS_HELD, buffer] == 0:
            table[COUNT, UNUSED_BYTES] += table[DEVICE_BYTES, buffer]


@compiled
def _original(table: Ints, times: Floats, op: int) -> None:
    first = table[COUNT, N_AFTERS]
    for i in range(table[READ_START, op], table[READ_START, op + 1]):
        table[READ_SLOT, table[COUNT, N_READS]] = table[DEVICE, table[READS, i]]
        table[COUNT, N_READS] += 1
    for i in range(table[WRITE_START, op], table[WRITE_START, op + 1]):
        _write(table, table[WRITES, i])
    for i in range(table[READ_START, op], table[READ_START, op + 1]):
        if table[MUTATES, op] == 1:
            table[MUTATED, table[READS, i]] = op
        _leave(table, table[READS, i])
    for i in range(table[WRITE_START, op], table[WRITE_START, op + 1]):
        _leave(table, table[WRITES, i])
    table[OWN_STEP, op] = table[COUNT, N_STEPS]
    due = table[DUE_FIRST, op]
    while due != NONE:
        if table[LEAVING_GONE, due] == 0:
            _let_go(table, times, due, 2 * table[COUNT, N_STEPS])
        due = table[DUE_NEXT, due]
    _emit(table, times, op, first)


@compiled
def _has_room(table: Ints, op: int) -> bool:
    """Whether the tables can take one more run of `op`."""
    longest = max(table[COUNT, N_READS], table[COUNT, N_WRITES], table[COUNT, N_AFTERS])
    reads = table[READ_START, op + 1] - table[READ_START, op]
    writes = table[WRITE_START, op + 1] - table[WRITE_START, op]
    fits = longest + reads + 2 * writes <= table[FIXED, ACCESSES_MOST]
    return fits and table[COUNT, N_STEPS] < table[FIXED, STEPS_MOST]


@compiled
def _write(table: Ints, buffer: int) -> int:
    """A slot on the device for what the coming run makes."""
    slot = _slot(table, buffer, table[DEVICE_BYTES, buffer], 0)
    table[WRITE_SLOT, table[COUNT, N_WRITES]] = slot
    table[WRITE_GIVEN, table[COUNT, N_WRITES]] = NONE
    table[COUNT, N_WRITES] += 1
    return slot


@compiled
def _after(table: Ints, source: int, slot: int) -> None:
    table[AFTER_SOURCE, table[COUNT, N_AFTERS]] = source
    table[AFTER_SLOT, table[COUNT, N_AFTERS]] = slot
    table[COUNT, N_AFTERS] += 1


@compiled
def _leave(table: Ints, buffer: int) -> None:
    """What happens to `buffer` after a use."""
    table[PASSED, buffer] += 1
    if table[IS_HELD, buffer] == 1:
        return
    last = table[USE_START, buffer] + table[PASSED, buffer] - 1
    if last + 1 < table[USE_START, buffer + 1]:
        gap = table[USE_GAPS, last]
        kind = KEEP if gap == NONE else table[KIND, gap]
        table[NOW, buffer] = kind
        if kind == KEEP:
            return
        if kind == OFFLOAD and table[OUTER, buffer] == NONE:
            outer = _slot(table, buffer, table[OUTER_BYTES, buffer], 1)
            table[OUTER, buffer] = outer
            _after(table, table[DEVICE, buffer], outer)
            table[DEVICE, buffer] = NONE
            return
    _after(table, NONE, table[DEVICE, buffer])
    table[DEVICE, buffer] = NONE


# ---- expand: bringing back -----------------------------------------------------------------------


@compiled
def _bring(table: Ints, times: Floats, op: int) -> int:
    """Make all that `op` reads live on the device again."""
    missing = 0
    for i in range(table[READ_START, op], table[READ_START, op + 1]):
        if table[DEVICE, table[READS, i]] == NONE:
            table[WANTED_LIST, missing] = table[READS, i]
            missing += 1
    if missing == 0:
        return DONE
    if not _chain(table, missing):
        return REFUSED
    _sort_chain(table, table[COUNT, N_CHAIN])
    _find_last_readers(table)
    for i in range(table[COUNT, N_CHAIN]):
        if not _has_room(table, table[CHAIN, i]):
            return FULL
        _again(table, times, table[CHAIN, i])
    for i in range(missing):
        if table[DEVICE, table[WANTED_LIST, i]] == NONE:
            _fetch(table, table[WANTED_LIST, i])
    return DONE


@compiled
def _find_last_readers(table: Ints) -> None:
    """Of what the chain reads."""
    for i in range(table[COUNT, N_CHAIN]):
        op = table[CHAIN, i]
        for j in range(table[READ_START, op], table[READ_START, op + 1]):
            table[NEEDED, table[READS, j]] = table[COUNT, EPOCH]
            table[LAST_READER, table[READS, j]] = op


@compiled
def _chain(table: Ints, missing: int) -> bool:
    """Find the ops to run again for what is wanted, and mark what to fetch; False if refused.

    Where nothing runs again the fetches are made here, in the order they are found.
    """
    found = 0
    table[COUNT, EPOCH] += 1
    table[COUNT, N_CHAIN] = 0
    epoch = table[COUNT, EPOCH]
    for i in range(missing):
        table[STACK, i] = table[WANTED_LIST, i]
        table[SEEN, table[STACK, i]] = table[WANTED, table[STACK, i]] = epoch
    left = missing
    while left > 0:
        left -= 1
        buffer = table[STACK, left]
        if table[OUTER, buffer] != NONE:
            table[FETCHED, buffer] = epoch
            found += 1
            continue
        producer = table[PRODUCER, buffer]
        if not _runs_again(table, producer):
            return False
        if table[RERUN, producer] != epoch:
            table[RERUN, producer] = epoch
            table[CHAIN, table[COUNT, N_CHAIN]] = producer
            table[COUNT, N_CHAIN] += 1
        for i in range(table[READ_START, producer], table[READ_START, producer + 1]):
            read = table[READS, i]
            if table[DEVICE, read] == NONE and table[SEEN, read] != epoch:
                table[SEEN, read] = epoch
                table[STACK, left] = read
                left += 1
    if table[COUNT, N_CHAIN] == 0:
        for i in range(found):
            _fetch(table, table[WANTED_LIST, found - 1 - i])
    return True


@compiled
def _runs_again(table: Ints, producer: int) -> bool:
    """Whether an op makes it, and would make the same of what is there now."""
    if producer == NONE or table[REPEATABLE, producer] == 0:
        return False
    for i in range(table[READ_START, producer], table[READ_START, producer + 1]):
        if table[MUTATED, table[READS, i]] > producer:
            return False
    return True


@compiled
def _sort_chain(table: Ints, length: int) -> None:
    """Shell sort: in place, and quick on chains, which are found backwards."""
    for i in range(length // 2):
        last = length - 1 - i
        table[CHAIN, i], table[CHAIN, last] = table[CHAIN, last], table[CHAIN, i]
    step = 1
    while step < length:
        step = 3 * step + 1
    while step > 0:
        for i in range(step, length):
            item, at = table[CHAIN, i], i
            while at >= step and table[CHAIN, at - step] > item:
                table[CHAIN, at] = table[CHAIN, at - step]
                at -= step
            table[CHAIN, at] = item
        step //= 3


@compiled
def _fetch(table: Ints, buffer: int) -> None:
    group = table[COUNT, N_GROUPS]
    table[COUNT, N_GROUPS] += 1
    table[GROUP_STEP, group] = table[COUNT, N_STEPS]
    table[GROUP_SOURCE, group] = table[OUTER, buffer]
    table[GROUP_TARGET, group] = _slot(table, buffer, table[FETCHED_BYTES, buffer], 0)
    gap = table[USE_GAPS, table[USE_START, buffer] + table[PASSED, buffer] - 1]
    table[GROUP_GAP, group] = gap if table[NOW, buffer] == OFFLOAD else NONE
    table[GROUP_FREES, group] = 0
    if _drops_copy(table, buffer):
        table[GROUP_FREES, group] = 1
        table[OUTER, buffer] = NONE


@compiled
def _drops_copy(table: Ints, buffer: int) -> bool:
    """Whether the outer copy of `buffer`, now on the device, is of no more use."""
    return table[OUTER, buffer] != NONE and table[LAST_OFFLOAD, buffer] < table[PASSED, buffer]


@compiled
def _again(table: Ints, times: Floats, op: int) -> None:
    """Run `op` again, for the chain at hand."""
    epoch, first = table[COUNT, EPOCH], table[COUNT, N_AFTERS]
    for i in range(table[READ_START, op], table[READ_START, op + 1]):
        buffer = table[READS, i]
        if table[FETCHED, buffer] == epoch and table[DEVICE, buffer] == NONE:
            _fetch(table, buffer)
        slot = table[TEMPORARY, buffer]
        table[READ_SLOT, table[COUNT, N_READS]] = table[DEVICE, buffer] if slot == NONE else slot
        table[COUNT, N_READS] += 1
    for i in range(table[WRITE_START, op], table[WRITE_START, op + 1]):
        _keep_or_drop(table, table[WRITES, i], epoch)
    for i in range(table[READ_START, op], table[READ_START, op + 1]):
        buffer = table[READS, i]
        if table[TEMPORARY, buffer] != NONE and table[LAST_READER, buffer] == op:
            _after(table, NONE, table[TEMPORARY, buffer])
            table[TEMPORARY, buffer] = NONE
    _emit(table, times, op, first)


@compiled
def _keep_or_drop(table: Ints, buffer: int, epoch: int) -> None:
    """Make `buffer` once more, for its next use, for this chain, or for nothing."""
    there = table[DEVICE, buffer]
    slot = _write(table, buffer)
    uses = table[USE_START, buffer + 1] - table[USE_START, buffer]
    stays = table[PASSED, buffer] < uses and table[NOW, buffer] == RECOMPUTE_STAY
    if there == NONE and (table[WANTED, buffer] == epoch or stays):
        if _drops_copy(table, buffer):
            _after(table, NONE, table[OUTER, buffer])
            table[OUTER, buffer] = NONE
        return
    table[DEVICE, buffer] = there
    if there == NONE and table[NEEDED, buffer] == epoch:
        table[TEMPORARY, buffer] = slot
    else:
        _after(table, NONE, slot)


# ---- donate, release: one step -------------------------------------------------------------------


@compiled
def _emit(table: Ints, times: Floats, op: int, first: int) -> None:
    """End a step whose actions after the run begin at `first`."""
    step = table[COUNT, N_STEPS]
    table[STEP_OP, step] = op
    _donate(table, op, first)
    table[COUNT, LIVE] -= table[COUNT, UNUSED_BYTES]
    table[STEP_UNUSED, step] = table[COUNT, UNUSED_BYTES]
    table[COUNT, UNUSED_BYTES] = 0
    held = table[COUNT, LIVE] + table[WORKSPACE_BYTES, op]
    _let_go_of_what_is_done(table, times, 2 * step)
    _make_room(table, times, held, 2 * step)
    table[STEP_HELD, step] = held + table[COUNT, LEAVING_BYTES]
    times[CLOCK, RELEASE_CLOCK] += times[SECONDS, op]
    for i in range(first, table[COUNT, N_AFTERS]):
        slot = table[AFTER_SLOT, i]
        if slot == NONE:
            continue
        if table[AFTER_SOURCE, i] != NONE:
            _start(table, times, table[AFTER_SOURCE, i])
        elif table[SLOT_OUTER, slot] == 1:
            table[SLOT_STOP, slot] = step
        else:
            table[COUNT, LIVE] -= table[SLOT_BYTES, slot]
    table[COUNT, N_STEPS] += 1
    table[STEP_READS, step + 1] = table[COUNT, N_READS]
    table[STEP_WRITES, step + 1] = table[COUNT, N_WRITES]
    table[STEP_AFTERS, step + 1] = table[COUNT, N_AFTERS]


@compiled
def _donate(table: Ints, op: int, first: int) -> None:
    """Let results of the step take over the memory of arguments that it frees."""
    step = table[COUNT, N_STEPS]
    for i in range(table[DONATION_START, op], table[DONATION_START, op + 1]):
        source = table[READ_SLOT, table[STEP_READS, step] + table[DONATION_READS, i]]
        write = table[STEP_WRITES, step] + table[DONATION_WRITES, i]
        target = table[WRITE_SLOT, write]
        crosses = 0 <= table[SLOT_START, source] < table[COUNT, BOUNDARY_STEP] <= step
        if crosses or table[SLOT_BYTES, source] != table[SLOT_BYTES, target]:
            continue
        for j in range(first, table[COUNT, N_AFTERS]):
            freed = table[AFTER_SOURCE, j] == NONE and table[AFTER_SLOT, j] == source
            if freed and table[WRITE_GIVEN, write] == NONE:
                table[AFTER_SLOT, j] = NONE
                table[WRITE_GIVEN, write] = source
                table[COUNT, LIVE] -= table[SLOT_BYTES, target]
                break


# ---- release: what leaves ------------------------------------------------------------------------


@compiled
def _start(table: Ints, times: Floats, source: int) -> None:
    """The copy out of `source` is issued now."""
    index = table[COUNT, N_LEAVING]
    table[COUNT, N_LEAVING] += 1
    buffer, nbytes = table[SLOT_BUFFER, source], table[SLOT_BYTES, source]
    table[COUNT, LEAVING_BYTES] += nbytes
    table[COUNT, LIVE] -= nbytes
    start = max(times[CLOCK, RELEASE_CLOCK], times[CLOCK, LINK_FREE])
    times[CLOCK, LINK_FREE] = start + times[OUT_SECONDS, buffer]
    table[LEAVING_SLOT, index] = source
    times[LEAVING_DONE, index] = times[CLOCK, LINK_FREE]
    table[LEAVING_GONE, index] = table[LEAVING_DUE, index] = 0
    gap = table[USE_GAPS, table[USE_START, buffer] + table[PASSED, buffer] - 1]
    hint = table[RELEASE, gap]
    if hint != NO_HINT:
        table[LEAVING_DUE, index] = 1
        table[DUE_NEXT, index] = NONE
        if table[DUE_FIRST, hint] == NONE:
            table[DUE_FIRST, hint] = index
        else:
            table[DUE_NEXT, table[DUE_LAST, hint]] = index
        table[DUE_LAST, hint] = index


@compiled
def _let_go(table: Ints, times: Floats, index: int, at: int) -> None:
    """Wait for a copy out, and free its source at `at` (`FREED_AT`)."""
    slot = table[LEAVING_SLOT, index]
    times[CLOCK, RELEASE_CLOCK] = max(times[CLOCK, RELEASE_CLOCK], times[LEAVING_DONE, index])
    table[COUNT, LEAVING_BYTES] -= table[SLOT_BYTES, slot]
    table[LEAVING_GONE, index] = 1
    table[FREED_SLOT, table[COUNT, N_FREED]] = slot
    table[FREED_AT, table[COUNT, N_FREED]] = at
    table[COUNT, N_FREED] += 1
    oldest = table[COUNT, OLDEST]
    while oldest < table[COUNT, N_LEAVING] and table[LEAVING_GONE, oldest] == 1:
        oldest += 1
    table[COUNT, OLDEST] = oldest


@compiled
def _let_go_of_what_is_done(table: Ints, times: Floats, at: int) -> None:
    """Free what has left by the clock, up to the first that has not and has no hint."""
    while table[COUNT, UNHURRIED] < table[COUNT, N_LEAVING]:
        index = table[COUNT, UNHURRIED]
        if table[LEAVING_DUE, index] == 0 and table[LEAVING_GONE, index] == 0:
            if times[LEAVING_DONE, index] > times[CLOCK, RELEASE_CLOCK]:
                break
            _let_go(table, times, index, at)
        table[COUNT, UNHURRIED] += 1


@compiled
def _make_room(table: Ints, times: Floats, other_bytes: int, at: int) -> None:
    """Let go of the oldest until what is left fits beside `other_bytes`."""
    room = table[FIXED, BUDGET_BYTES] - other_bytes
    while table[COUNT, OLDEST] < table[COUNT, N_LEAVING] and table[COUNT, LEAVING_BYTES] > room:
        _let_go(table, times, table[COUNT, OLDEST], at)


# ---- prefetch ------------------------------------------------------------------------------------


@compiled
def _prefetch(table: Ints) -> None:
    """Issue each copy back as early as memory allows, or where its hint says."""
    budget, boundary = table[FIXED, BUDGET_BYTES], table[COUNT, BOUNDARY_STEP]
    room_between = budget - table[COUNT, BETWEEN_HELD]
    earliest = 0
    for group in range(table[COUNT, N_GROUPS]):
        step, source = table[GROUP_STEP, group], table[GROUP_SOURCE, group]
        nbytes = table[SLOT_BYTES, table[GROUP_TARGET, group]]
        low = max(earliest, table[SLOT_START, source] + 1, _hint(table, group))
        if low < boundary <= step and nbytes > room_between:
            low = boundary
        at = step
        while at > low and table[STEP_HELD, at - 1] + nbytes <= budget:
            at -= 1
            table[STEP_HELD, at] += nbytes
        if at < boundary <= step:
            room_between -= nbytes
        table[GROUP_AT, group] = at
        if table[GROUP_FREES, group] == 1:
            table[SLOT_STOP, source] = at
        earliest = at


@compiled
def _hint(table: Ints, group: int) -> int:
    """The first step before which the plan wants the copy issued."""
    gap = table[GROUP_GAP, group]
    op = NO_HINT if gap == NONE else table[PREFETCH, gap]
    return 0 if op == NO_HINT else table[OWN_STEP, op - 1] + 1


# ---- place, simulate, memory ---------------------------------------------------------------------


@compiled
def _play(table: Ints, times: Floats) -> None:
    """Walk the steps once, with three clocks, the bytes on the device and the outer tier's rooms.

    What stands on a stream waits for the two others only: its own order implies the rest. So a slot
    needs the time of its latest write and that of a copy out that reads it. Hazards that
    `lower/sync.py` leaves out as implied are over no later than those it names.
    """
    group, free = 0, 0
    _enter(table, times)
    for step in range(table[COUNT, N_STEPS]):
        if step == table[COUNT, BOUNDARY_STEP]:
            _enter_backward(table)
        free = _free_what_left(table, times, free, 2 * step)
        table[COUNT, PLAYED_LIVE] -= table[STEP_UNUSED, step]
        while group < table[COUNT, N_GROUPS] and table[GROUP_AT, group] == step:
            _copy_back(table, times, group)
            group += 1
        _run(table, times, step)
        _play_after(table, times, step)
        free = _free_what_left(table, times, free, 2 * step + 1)


@compiled
def _enter(table: Ints, times: Floats) -> None:
    """The caller passes the inputs, and all slots are still to be written."""
    live = table[FIXED, OUTSIDE_BYTES]
    for i in range(table[FIXED, N_INPUTS]):
        live += table[DEVICE_BYTES, table[INPUTS, i]]
    table[COUNT, PLAYED_LIVE] = live
    table[COUNT, PEAK] = live if table[COUNT, N_STEPS] > 0 else 0
    table[COUNT, N_FREE] = 1
    table[FREE_START, 0], table[FREE_STOP, 0] = 0, NEVER
    for slot in range(table[COUNT, N_SLOTS]):
        times[WRITE_DONE, slot] = times[READ_DONE, slot] = 0.0


@compiled
def _enter_backward(table: Ints) -> None:
    for i in range(table[FIXED, N_TANGENTS]):
        table[COUNT, PLAYED_LIVE] += table[DEVICE_BYTES, table[TANGENTS, i]]
    between = table[COUNT, PLAYED_LIVE] + table[FIXED, BETWEEN_BYTES]
    table[COUNT, PEAK] = max(table[COUNT, PEAK], between)


@compiled
def _play_after(table: Ints, times: Floats, step: int) -> None:
    """What a step does after its run."""
    for i in range(table[STEP_AFTERS, step], table[STEP_AFTERS, step + 1]):
        slot, source = table[AFTER_SLOT, i], table[AFTER_SOURCE, i]
        if slot == NONE:
            continue
        if source != NONE:
            _copy_out(table, times, source, slot)
        elif table[SLOT_OUTER, slot] == 1:
            _free_outer(table, times, slot)
        else:
            _free(table, times, slot)


@compiled
def _allocate(table: Ints, slot: int) -> None:
    table[COUNT, PLAYED_LIVE] += table[SLOT_BYTES, slot]
    table[COUNT, PEAK] = max(table[COUNT, PEAK], table[COUNT, PLAYED_LIVE])


@compiled
def _free(table: Ints, times: Floats, slot: int) -> None:
    """Compute gives memory back, once what reads and writes there is done."""
    now = times[CLOCK, COMPUTE]
    times[CLOCK, COMPUTE] = max(now, times[WRITE_DONE, slot], times[READ_DONE, slot])
    table[COUNT, PLAYED_LIVE] -= table[SLOT_BYTES, slot]


@compiled
def _free_what_left(table: Ints, times: Floats, free: int, at: int) -> int:
    while free < table[COUNT, N_FREED] and table[FREED_AT, free] == at:
        _free(table, times, table[FREED_SLOT, free])
        free += 1
    return free


@compiled
def _run(table: Ints, times: Floats, step: int) -> None:
    """Compute waits for what the run reads, and for copies out of memory that it takes over."""
    op, now = table[STEP_OP, step], times[CLOCK, COMPUTE]
    for i in range(table[STEP_READS, step], table[STEP_READS, step + 1]):
        now = max(now, times[WRITE_DONE, table[READ_SLOT, i]])
    for i in range(table[STEP_WRITES, step], table[STEP_WRITES, step + 1]):
        given = table[WRITE_GIVEN, i]
        if given == NONE:
            _allocate(table, table[WRITE_SLOT, i])
        else:
            now = max(now, times[READ_DONE, given])
    now += times[SECONDS, op]
    for i in range(table[STEP_WRITES, step], table[STEP_WRITES, step + 1]):
        times[WRITE_DONE, table[WRITE_SLOT, i]] = now
    times[CLOCK, COMPUTE] = now
    inside = table[COUNT, PLAYED_LIVE] + table[WORKSPACE_BYTES, op]
    table[COUNT, PEAK] = max(table[COUNT, PEAK], inside)


@compiled
def _copy_back(table: Ints, times: Floats, group: int) -> None:
    source, target = table[GROUP_SOURCE, group], table[GROUP_TARGET, group]
    _allocate(table, target)
    start = max(times[CLOCK, IN], times[WRITE_DONE, source], times[CLOCK, COMPUTE])
    done = start + times[IN_SECONDS, table[SLOT_BUFFER, source]]
    times[CLOCK, IN] = times[WRITE_DONE, target] = done
    if table[GROUP_FREES, group] == 1:
        _free_outer(table, times, source)


@compiled
def _copy_out(table: Ints, times: Floats, source: int, target: int) -> None:
    now = max(times[CLOCK, OUT], _take(table, times, target))
    start = max(now, times[WRITE_DONE, source])
    done = start + times[OUT_SECONDS, table[SLOT_BUFFER, source]]
    times[CLOCK, OUT] = times[WRITE_DONE, target] = times[READ_DONE, source] = done


@compiled
def _free_outer(table: Ints, times: Floats, slot: int) -> None:
    """The inward stream gives back room in the outer tier, to others unless it crossed."""
    now = max(times[CLOCK, IN], times[WRITE_DONE, slot])
    times[CLOCK, IN] = times[WRITE_DONE, slot] = now
    crosses = table[SLOT_START, slot] < table[COUNT, BOUNDARY_STEP] <= table[SLOT_STOP, slot]
    if not crosses and table[SLOT_BYTES, slot] > 0:
        _give(table, table[SLOT_OFFSET, slot], table[SLOT_BYTES, slot])


# ---- place: rooms in the outer tier --------------------------------------------------------------


@compiled
def _take(table: Ints, times: Floats, slot: int) -> float:
    """First fit for `slot`; returns when the owners before are done with it."""
    nbytes, index = table[SLOT_BYTES, slot], 0
    while table[FREE_STOP, index] - table[FREE_START, index] < nbytes:
        index += 1
    start = table[FREE_START, index]
    table[FREE_START, index] = start + nbytes
    if table[FREE_START, index] == table[FREE_STOP, index]:
        _move_ranges(table, index + 1, -1)
    table[SLOT_OFFSET, slot] = start
    table[COUNT, EXTENT] = max(table[COUNT, EXTENT], start + nbytes)
    return _rob(table, times, start, start + nbytes, slot)


@compiled
def _give(table: Ints, start: int, nbytes: int) -> None:
    """Free a range, merged with its neighbours."""
    stop, length = start + nbytes, table[COUNT, N_FREE]
    at = _count_before(table, FREE_START, length, start)
    joins_left = at > 0 and table[FREE_STOP, at - 1] == start
    joins_right = at < length and table[FREE_START, at] == stop
    if joins_left and joins_right:
        table[FREE_STOP, at - 1] = table[FREE_STOP, at]
        _move_ranges(table, at + 1, -1)
    elif joins_left:
        table[FREE_STOP, at - 1] = stop
    elif joins_right:
        table[FREE_START, at] = start
    else:
        _move_ranges(table, at, 1)
        table[FREE_START, at], table[FREE_STOP, at] = start, stop


@compiled
def _move_ranges(table: Ints, first: int, by: int) -> None:
    """Shift the free ranges from `first` on by `by` places."""
    last = table[COUNT, N_FREE] - 1
    for i in range(last - first + 1):
        at = last - i if by > 0 else first + i
        table[FREE_START, at + by] = table[FREE_START, at]
        table[FREE_STOP, at + by] = table[FREE_STOP, at]
    table[COUNT, N_FREE] += by


@compiled
def _count_before(table: Ints, row: int, length: int, position: int) -> int:
    """How many of the first `length` of `row`, which ascend, are before `position`."""
    low, high = 0, length
    while low < high:
        middle = (low + high) // 2
        if table[row, middle] < position:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _rob(table: Ints, times: Floats, start: int, stop: int, slot: int) -> float:
    """Make `slot` the owner of a range; returns when those it takes bytes from are done."""
    length = table[COUNT, N_ROOMS]
    low = _count_before(table, ROOM_START, length, start + 1)
    if low > 0 and table[ROOM_STOP, low - 1] > start:
        low -= 1
    high = max(low, _count_before(table, ROOM_START, length, stop))
    done = 0.0
    for i in range(low, high):
        done = max(done, times[WRITE_DONE, table[ROOM_OWNER, i]])
    _replace_rooms(table, low, high, start, stop, slot)
    return done


@compiled
def _replace_rooms(table: Ints, low: int, high: int, start: int, stop: int, slot: int) -> None:
    """One room of `slot` for those from `low` to `high`, of which the ends may be left."""
    left = 1 if high > low and table[ROOM_START, low] < start else 0
    right = 1 if high > low and table[ROOM_STOP, high - 1] > stop else 0
    right_stop, right_owner = table[ROOM_STOP, high - 1], table[ROOM_OWNER, high - 1]
    _move_rooms(table, high, low + left + 1 + right - high)
    if left == 1:
        table[ROOM_STOP, low] = start
    _set_room(table, low + left, start, stop, slot)
    if right == 1:
        _set_room(table, low + left + 1, stop, right_stop, right_owner)


@compiled
def _set_room(table: Ints, at: int, start: int, stop: int, owner: int) -> None:
    table[ROOM_START, at], table[ROOM_STOP, at], table[ROOM_OWNER, at] = start, stop, owner


@compiled
def _move_rooms(table: Ints, first: int, by: int) -> None:
    """Shift the rooms from `first` on by `by` places."""
    last = table[COUNT, N_ROOMS] - 1
    for i in range(last - first + 1 if by != 0 else 0):
        at = last - i if by > 0 else first + i
        _set_room(
            table, at + by, table[ROOM_START, at], table[ROOM_STOP, at], table[ROOM_OWNER, at]
        )
    table[COUNT, N_ROOMS] += by
