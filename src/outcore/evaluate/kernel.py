"""kernel: evaluate a plan as `lower` and `simulate` do, over two tables of numbers.

`table[ROW, i]` is an int and `times[ROW, i]` is in seconds. Rows are named below. The functions
follow `lower/expand.py`, `donate.py`, `release.py`, `prefetch.py`, `place.py` and `sync.py`,
`simulate.py` and `ir/memory.py`; the reasons are given there. Three passes do all the work: over
the ops, over the copies back, and over the resulting steps. Only the parts of a program that decide
its seconds and bytes are tracked:

- A step holds most memory while its op runs: frees before it come first, frees after it last. The
  only other place to check is between the two calls.
- Streams wait for each other only where a copy begins or ends. Compute waits for a copy back at
  the first run that reads the result, and for a copy out where its source is freed. All other
  hazards are within one stream, or already satisfied.

All compiled code is in this file. Numba caches compiled code under the time stamp of one source
file. With two files, an edit of one would leave the other with old row numbers and function bodies.

Two words are used below: a group is a copy back (alloc, copy, free of the outer slot), and an away
is a copy out with the outer slot that it fills.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from math import inf, log

from outcore.evaluate.kinds import KEEP, NO_HINT, OFFLOAD, RECOMPUTE, RECOMPUTE_STAY
from outcore.jit import Floats, Ints, compiled, entry

NONE = -1
"""No such op, gap, slot or copy."""
NEVER = 1 << 62
"""A step after all others; as bytes, more than any sum of them."""

DONE, REFUSED, FULL, WORSE = range(4)
"""Results: evaluated; cannot be carried out; the tables are too short; the plan is over a limit."""

# ---- rows of `table` -----------------------------------------------------------------------------

COUNT = 0
"""Row: figures of the plan that is evaluated. Its columns:"""

N_STEPS, N_SLOTS, N_GROUPS, N_AWAY, N_LEAVING, N_FREED, N_DROPPED, N_CHAIN = range(8)
"""Lengths of the lists so far: steps, device slots, copies back, copies out, those copies out that
are issued (the first of them), freed sources (`FREED`), `DROPPED`, `CHAIN`."""
EPOCH, OLDEST, UNHURRIED, BOUNDARY_STEP = range(8, 12)
"""The stamp of the latest chain; the oldest away whose source is not freed; the next away to be
freed when its copy is done by the clock; the first step of the backward call."""
LIVE, LEAVING_BYTES, UNUSED_BYTES, BETWEEN_HELD, PEAK = range(12, 17)
"""Bytes on the device: of live slots; of sources being copied out; of slots that the caller passes
and nothing uses; of everything between the two calls; the most of everything so far."""
N_FREE, N_ROOMS, EXTENT, NEEDS = range(17, 21)
"""Lengths of the lists of free and of owned ranges in the outer tier; its extent so far in bytes;
the last copy back (a group) that the next run waits for, or NONE."""
COUNTS = 21
"""Columns of COUNT in use."""

FIXED = 1
"""Row: figures of the problem. Its columns:"""

N_OPS, N_BUFFERS, N_GAPS, N_INPUTS, N_TANGENTS, STEPS_MOST, SLOTS_MOST = range(7)
"""Lengths of lists; the most steps the tables have room for, and the most slots, those of copies
back not counted."""
BOUNDARY, BUDGET_BYTES, OUTSIDE_BYTES, BETWEEN_BYTES, OFFLOADS = range(7, 12)
"""The first op of the backward call; bytes as in Problem; whether there is an outer tier (1 or
0)."""
DEVICE_LIMIT, OUTER_LIMIT = range(12, 14)
"""The most bytes that a plan may use, on the device and in the outer tier."""

INPUTS, TANGENTS, READS, WRITES, DONATION_READS, DONATION_WRITES, USE_GAPS = range(2, 9)
"""Lists of the problem. The first four hold buffers; donations are indices into the reads and the
writes of their op. `USE_GAPS`: per use of a buffer, the gap after it; NONE if it is not movable."""

READ_START, WRITE_START, DONATION_START, REPEATABLE, MUTATES, WORKSPACE_BYTES = range(9, 15)
"""Per op. The reads of an op are from its `READ_START` to the `READ_START` of the next op; writes
and donations likewise. `REPEATABLE` and `MUTATES` are 1 or 0."""

USE_START, PRODUCER, IS_HELD, DEVICE_BYTES, FETCHED_BYTES, OUTER_BYTES = range(15, 21)
"""Per buffer: where its uses start in `USE_GAPS`; the op that makes it, or NONE; whether it is held
to the end (1 or 0); bytes of its slots: on the device, on the device if a copy fills it, in the
outer tier."""

GAP_BUFFER, GAP_USE, GAP_AFTER, GAP_BEFORE, KIND, RELEASE, PREFETCH = range(21, 28)
"""Per gap: its buffer, the index of the use that it follows, its first and last op; and the plan's
choice: kind, and hints as op ids or NO_HINT."""

DEVICE, OUTER, NOW, PASSED, MUTATED, LAST_OFFLOAD, TEMPORARY, LATE = range(28, 36)
"""Per buffer, at the current step, as in `lower/expand.py`: its device slot; its outer copy (an
away); the kind of the gap that it is in; how many uses are done; the last op that mutated it; the
index of its last use that an offload follows; its slot within a chain of reruns; its copy back (a
group) until a run waits for it. NONE if there is none."""

SEEN, WANTED, FETCHED, NEEDED, LAST_READER, RERUN = range(36, 42)
"""Per buffer, the stamp of the latest chain in which it was visited, wanted by the op, fetched,
read by a rerun; and the last op of the chain that reads it. `RERUN`: per op, the same stamp."""

WANTED_LIST, STACK, CHAIN = range(42, 45)
"""Lists of a chain: buffers that an op wants, buffers still to visit, ops to run again."""

DUE_FIRST, DUE_LAST, OWN_STEP = range(45, 48)
"""Per op: the first and last away whose source must be freed by then, a list linked by `AWAY_NEXT`;
the step of the op's first run."""

STEP_OP, STEP_HELD, STEP_NEEDS = range(48, 51)
"""Per step: its op, bytes on the device, the last copy back that its run waits for, or NONE."""

READ_SLOT, WRITE_SLOT = range(51, 53)
"""Per read and per write of the current step: its device slot."""

SLOT_BYTES, SLOT_START, SLOT_STOP = range(53, 56)
"""Per device slot: its bytes; the step that makes it, NONE for the caller; the step after whose run
it is freed, NONE if later, TAKEN if a donation takes over its memory."""

TAKEN = -2
"""Value of SLOT_STOP: a result was written over this slot."""

ROUNDING = 1e-9
"""The fraction by which a limit is extended before a plan is given up, because sums round."""

AWAY_BUFFER, AWAY_SOURCE, AWAY_START, AWAY_STOP, AWAY_OFFSET = range(56, 61)
"""Per away, in order of issue: its buffer; the device slot that it copies; the step after which it
is issued; the step at which its outer slot is freed; where that lies, in bytes."""

AWAY_DUE, AWAY_GONE, AWAY_NEXT = range(61, 64)
"""Per away: whether a hint says when its source is freed (1 or 0); whether it was freed (1 or 0);
the next away due at the same op, or NONE."""

FREED, FREED_AT, DROPPED = range(64, 67)
"""Aways in the order in which their sources are freed; when that is, as twice the step if before
its run, plus one if at its end. `DROPPED`: aways whose outer slot is freed after a run, not with a
copy back, in order."""

GROUP_STEP, GROUP_SOURCE, GROUP_SLOT, GROUP_BYTES = range(67, 71)
GROUP_FREES, GROUP_GAP, GROUP_AT = range(71, 74)
"""Per copy back: the step that needs it; the away that it reads; its device slot; bytes of that;
whether it frees the outer slot (1 or 0); the gap whose hint applies, or NONE; the step before which
it is issued (`GROUP_AT`)."""

FREE_START, FREE_STOP, ROOM_START, ROOM_STOP, ROOM_OWNER = range(74, 79)
"""Free ranges of the outer tier, and ranges with their latest owner, an away (`ir/rooms.py`);
bytes."""

GAP_DEAD, DEAD_START, DEAD = range(79, 82)
"""Per gap, whether it is dead (1 or 0). Per op, where its entries in `DEAD` start: the dead gaps
that end with it."""

ROWS = 82
"""Rows of `table`."""

# ---- rows of `times` -----------------------------------------------------------------------------

CLOCK = 0
"""Row: clocks. Its columns:"""

RELEASE_CLOCK, LINK_FREE, COMPUTE, OUT, IN, PLAYED, SPARE = range(7)
CLOCKS = 7
"""Compute and the link out, as `lower/release.py` simulates them; then the three streams as
`simulate` plays them. `PLAYED`: seconds of all runs so far. `SPARE`: seconds that the limit leaves
for reruns and stalls."""

SECONDS, OUT_SECONDS, IN_SECONDS = range(1, 4)
"""Seconds per op, and per buffer for its copy out and back."""

LEAVING_DONE, OUT_DONE, ROOM_DONE, GROUP_DONE = range(4, 8)
"""When a copy out is done, as `release` simulates it and as played; when its outer slot is filled
or, later, free; when a copy back is done."""

TIME_ROWS = 8
"""Rows of `times`."""


# ---- the whole -----------------------------------------------------------------------------------


@entry("i8[:, ::1], f8[:, ::1], i1[::1], i8[::1], i8[::1], f8")
def run(
    table: Ints,
    times: Floats,
    kinds: Sequence[int],
    release: Sequence[int],
    prefetch: Sequence[int],
    limit: float,
) -> tuple[int, float, int, int]:
    """Evaluate a plan: status, seconds, bytes on the device, bytes in the outer tier.

    `kinds`, `release` and `prefetch` have one entry per gap; hints count only for offloaded gaps.
    With a finite `limit` the status is WORSE as soon as it is clear that the step takes longer than
    that, or exceeds the byte limits.
    """
    _forget(table, times)
    times[CLOCK, SPARE] = limit * (1 + ROUNDING)
    for op in range(table[FIXED, N_OPS] if limit < inf else 0):
        times[CLOCK, SPARE] -= times[SECONDS, op]
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
    if limit < inf and table[COUNT, PEAK] > table[FIXED, DEVICE_LIMIT]:
        return WORSE, 0.0, 0, 0
    if not _play(table, times):
        return WORSE, 0.0, 0, 0
    seconds = max(times[CLOCK, COMPUTE], times[CLOCK, OUT], times[CLOCK, IN])
    if limit < inf and (seconds > limit or table[COUNT, EXTENT] > table[FIXED, OUTER_LIMIT]):
        return WORSE, 0.0, 0, 0
    return DONE, seconds, table[COUNT, PEAK], table[COUNT, EXTENT]


@compiled
def _forget(table: Ints, times: Floats) -> None:
    """Reset what the previous plan left in the tables."""
    epoch = table[COUNT, EPOCH]
    for i in range(COUNTS):
        table[COUNT, i] = 0
    for i in range(CLOCKS):
        times[CLOCK, i] = 0.0
    table[COUNT, EPOCH] = epoch
    table[COUNT, BOUNDARY_STEP] = NEVER
    table[COUNT, NEEDS] = NONE
    for buffer in range(table[FIXED, N_BUFFERS]):
        table[DEVICE, buffer] = table[OUTER, buffer] = table[TEMPORARY, buffer] = NONE
        table[MUTATED, buffer] = table[LAST_OFFLOAD, buffer] = NONE
        table[LATE, buffer] = NONE
        table[NOW, buffer] = KEEP
        table[PASSED, buffer] = 0
    for op in range(table[FIXED, N_OPS]):
        table[DUE_FIRST, op] = NONE


@compiled
def _allowed(table: Ints, gap: int) -> bool:
    """Whether `verify_plan` allows the plan's choice for `gap`."""
    kind = table[KIND, gap]
    if kind == OFFLOAD:
        hints_fit = _hint_fits(table, gap, RELEASE) and _hint_fits(table, gap, PREFETCH)
        return hints_fit and table[FIXED, OFFLOADS] == 1
    if kind == RECOMPUTE_STAY or (kind == RECOMPUTE and table[GAP_DEAD, gap] == 0):
        producer = table[PRODUCER, table[GAP_BUFFER, gap]]
        return producer != NONE and table[REPEATABLE, producer] == 1
    return kind in (KEEP, RECOMPUTE)


@compiled
def _hint_fits(table: Ints, gap: int, row: int) -> bool:
    op = table[row, gap]
    return op == NO_HINT or table[GAP_AFTER, gap] < op <= table[GAP_BEFORE, gap]


# ---- expand: original runs -----------------------------------------------------------------------


@compiled
def _expand(table: Ints, times: Floats) -> int:
    """Walk the ops once; returns the status."""
    table[COUNT, LIVE] = table[FIXED, OUTSIDE_BYTES]
    _arrive(table, INPUTS, table[FIXED, N_INPUTS])
    table[COUNT, PEAK] = table[COUNT, LIVE] if table[FIXED, N_OPS] > 0 else 0
    for op in range(table[FIXED, N_OPS]):
        if op == table[FIXED, BOUNDARY]:
            table[COUNT, BOUNDARY_STEP] = table[COUNT, N_STEPS]
            _arrive(table, TANGENTS, table[FIXED, N_TANGENTS])
            between = table[COUNT, LIVE] + table[FIXED, BETWEEN_BYTES]
            _make_room(table, times, between, 2 * table[COUNT, N_STEPS] - 1)
            table[COUNT, BETWEEN_HELD] = between + table[COUNT, LEAVING_BYTES]
        status = _bring(table, times, op)
        if status == DONE and times[CLOCK, SPARE] < 0.0:
            status = WORSE
        if status == DONE and not _has_room(table, op):
            status = FULL
        if status != DONE:
            return status
        _original(table, times, op)
    while table[COUNT, OLDEST] < table[COUNT, N_LEAVING]:
        _free_source(table, times, table[COUNT, OLDEST], 2 * table[COUNT, N_STEPS] - 1)
    return DONE


@compiled
def _slot(table: Ints, nbytes: int) -> int:
    """A new device slot, live from the current step on."""
    slot = table[COUNT, N_SLOTS]
    table[COUNT, N_SLOTS] = slot + 1
    table[SLOT_BYTES, slot] = nbytes
    table[SLOT_START, slot] = table[COUNT, N_STEPS]
    table[SLOT_STOP, slot] = NONE
    table[COUNT, LIVE] += nbytes
    return slot


@compiled
def _free(table: Ints, slot: int) -> None:
    """Free `slot` after the run of the current step."""
    table[SLOT_STOP, slot] = table[COUNT, N_STEPS]
    table[COUNT, LIVE] -= table[SLOT_BYTES, slot]


@compiled
def _arrive(table: Ints, row: int, length: int) -> None:
    """Make slots for the buffers in `row`, which the caller passes."""
    for i in range(length):
        buffer = table[row, i]
        slot = _slot(table, table[DEVICE_BYTES, buffer])
        table[DEVICE, buffer] = slot
        table[SLOT_START, slot] = NONE
        if table[USE_START, buffer] == table[USE_START, buffer + 1] and table[IS_HELD, buffer] == 0:
            table[COUNT, UNUSED_BYTES] += table[DEVICE_BYTES, buffer]


@compiled
def _original(table: Ints, times: Floats, op: int) -> None:
    away, reads = table[COUNT, N_AWAY], table[READ_START, op]
    for i in range(reads, table[READ_START, op + 1]):
        table[READ_SLOT, i - reads] = table[DEVICE, table[READS, i]]
        _need(table, table[READS, i])
    for i in range(table[WRITE_START, op], table[WRITE_START, op + 1]):
        table[DEVICE, table[WRITES, i]] = _write(table, op, i)
    for i in range(table[DEAD_START, op], table[DEAD_START, op + 1]):
        _end_dead(table, table[GAP_BUFFER, table[DEAD, i]])
    held = _held(table, op)
    for i in range(reads, table[READ_START, op + 1]):
        if table[MUTATES, op] == 1:
            table[MUTATED, table[READS, i]] = op
        _leave(table, table[READS, i])
    for i in range(table[WRITE_START, op], table[WRITE_START, op + 1]):
        _leave(table, table[WRITES, i])
    table[OWN_STEP, op] = table[COUNT, N_STEPS]
    due = table[DUE_FIRST, op]
    while due != NONE:
        if table[AWAY_GONE, due] == 0:
            _free_source(table, times, due, 2 * table[COUNT, N_STEPS])
        due = table[AWAY_NEXT, due]
    _emit(table, times, op, held)
    for i in range(away, table[COUNT, N_AWAY]):
        _start(table, times, i)


@compiled
def _end_dead(table: Ints, buffer: int) -> None:
    """Free what was held only for recomputations up to the current op."""
    table[NOW, buffer] = KEEP
    if table[DEVICE, buffer] != NONE:
        _free(table, table[DEVICE, buffer])
        table[DEVICE, buffer] = NONE
    if table[OUTER, buffer] != NONE:
        _drop_copy(table, buffer)


@compiled
def _has_room(table: Ints, op: int) -> bool:
    """Whether the tables have room for one more run of `op`."""
    slots = table[COUNT, N_SLOTS] + table[WRITE_START, op + 1] - table[WRITE_START, op]
    return table[COUNT, N_STEPS] < table[FIXED, STEPS_MOST] and slots <= table[FIXED, SLOTS_MOST]


@compiled
def _write(table: Ints, op: int, write: int) -> int:
    """A device slot for what the next run of `op` makes."""
    slot = _slot(table, table[DEVICE_BYTES, table[WRITES, write]])
    table[WRITE_SLOT, write - table[WRITE_START, op]] = slot
    return slot


@compiled
def _held(table: Ints, op: int) -> int:
    """Bytes while `op` runs, without what donations save and what is being copied out."""
    table[COUNT, LIVE] -= table[COUNT, UNUSED_BYTES]
    table[COUNT, UNUSED_BYTES] = 0
    return table[COUNT, LIVE] + table[WORKSPACE_BYTES, op]


@compiled
def _leave(table: Ints, buffer: int) -> None:
    """Carry out the plan's choice for `buffer` after a use."""
    table[PASSED, buffer] += 1
    if table[IS_HELD, buffer] == 1:
        return
    last = table[USE_START, buffer] + table[PASSED, buffer] - 1
    gap = table[USE_GAPS, last]
    table[NOW, buffer] = KEEP
    if gap != NONE or last + 1 < table[USE_START, buffer + 1]:
        kind = KEEP if gap == NONE else table[KIND, gap]
        table[NOW, buffer] = kind
        if kind == KEEP:
            return
        if kind == OFFLOAD and table[OUTER, buffer] == NONE:
            away = table[COUNT, N_AWAY]
            table[COUNT, N_AWAY] = away + 1
            table[AWAY_BUFFER, away] = buffer
            table[AWAY_SOURCE, away] = table[DEVICE, buffer]
            table[AWAY_START, away] = table[COUNT, N_STEPS]
            table[AWAY_STOP, away] = NONE
            table[OUTER, buffer] = away
            table[DEVICE, buffer] = NONE
            return
    _free(table, table[DEVICE, buffer])
    table[DEVICE, buffer] = NONE


# ---- expand: bringing back -----------------------------------------------------------------------


@compiled
def _bring(table: Ints, times: Floats, op: int) -> int:
    """Make sure that all that `op` reads is live on the device; returns the status."""
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
    """The last reader in the chain, for each buffer that the chain reads."""
    for i in range(table[COUNT, N_CHAIN]):
        op = table[CHAIN, i]
        for j in range(table[READ_START, op], table[READ_START, op + 1]):
            table[NEEDED, table[READS, j]] = table[COUNT, EPOCH]
            table[LAST_READER, table[READS, j]] = op


@compiled
def _chain(table: Ints, missing: int) -> bool:
    """Find the ops to run again for what is wanted, and mark what to fetch; False if refused.

    If no op has to run again, the fetches are made here, in the order in which they are found.
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
    """Whether the buffer has a producer that can run again, on the data that it read before."""
    if producer == NONE or table[REPEATABLE, producer] == 0:
        return False
    for i in range(table[READ_START, producer], table[READ_START, producer + 1]):
        if table[MUTATED, table[READS, i]] > producer:
            return False
    return True


@compiled
def _sort_chain(table: Ints, length: int) -> None:
    """Shell sort: in place, and fast on chains, which are found in reverse order."""
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
    table[LATE, buffer] = group
    table[GROUP_SOURCE, group] = table[OUTER, buffer]
    table[GROUP_BYTES, group] = table[FETCHED_BYTES, buffer]
    table[DEVICE, buffer] = _slot(table, table[FETCHED_BYTES, buffer])
    table[GROUP_SLOT, group] = table[DEVICE, buffer]
    gap = table[USE_GAPS, table[USE_START, buffer] + table[PASSED, buffer] - 1]
    table[GROUP_GAP, group] = gap if table[NOW, buffer] == OFFLOAD else NONE
    table[GROUP_FREES, group] = 0
    if _drops_copy(table, buffer):
        table[GROUP_FREES, group] = 1
        table[OUTER, buffer] = NONE


@compiled
def _need(table: Ints, buffer: int) -> None:
    """Let the next run wait for the copy back of `buffer`, if no run has waited for it yet."""
    if table[LATE, buffer] != NONE:
        table[COUNT, NEEDS] = max(table[COUNT, NEEDS], table[LATE, buffer])
        table[LATE, buffer] = NONE


@compiled
def _drops_copy(table: Ints, buffer: int) -> bool:
    """Whether the outer copy of `buffer`, which is now on the device, is not needed again."""
    return table[OUTER, buffer] != NONE and table[LAST_OFFLOAD, buffer] < table[PASSED, buffer]


@compiled
def _drop_copy(table: Ints, buffer: int) -> None:
    """Free the outer copy of `buffer` after the run of the current step."""
    table[DROPPED, table[COUNT, N_DROPPED]] = table[OUTER, buffer]
    table[COUNT, N_DROPPED] += 1
    table[AWAY_STOP, table[OUTER, buffer]] = table[COUNT, N_STEPS]
    table[OUTER, buffer] = NONE


@compiled
def _again(table: Ints, times: Floats, op: int) -> None:
    """Run `op` again, for the current chain."""
    epoch, reads = table[COUNT, EPOCH], table[READ_START, op]
    for i in range(reads, table[READ_START, op + 1]):
        buffer = table[READS, i]
        slot = table[TEMPORARY, buffer]
        if table[FETCHED, buffer] == epoch and table[DEVICE, buffer] == NONE and slot == NONE:
            _fetch(table, buffer)
        table[READ_SLOT, i - reads] = table[DEVICE, buffer] if slot == NONE else slot
        if slot == NONE:
            _need(table, buffer)
    for i in range(table[WRITE_START, op], table[WRITE_START, op + 1]):
        _write(table, op, i)
    held = _held(table, op)
    for i in range(table[WRITE_START, op], table[WRITE_START, op + 1]):
        _keep_or_drop(table, table[WRITES, i], table[WRITE_SLOT, i - table[WRITE_START, op]])
    times[CLOCK, SPARE] -= times[SECONDS, op]
    for i in range(reads, table[READ_START, op + 1]):
        buffer = table[READS, i]
        if table[TEMPORARY, buffer] != NONE and table[LAST_READER, buffer] == op:
            _free(table, table[TEMPORARY, buffer])
            table[TEMPORARY, buffer] = NONE
    _emit(table, times, op, held)


@compiled
def _keep_or_drop(table: Ints, buffer: int, slot: int) -> None:
    """`buffer` was recomputed in `slot`: keep it for its next use or this chain, or free it."""
    missing, epoch = table[DEVICE, buffer] == NONE, table[COUNT, EPOCH]
    if missing and (table[WANTED, buffer] == epoch or table[NOW, buffer] == RECOMPUTE_STAY):
        table[DEVICE, buffer] = slot
        if _drops_copy(table, buffer):
            _drop_copy(table, buffer)
        return
    if missing and table[NEEDED, buffer] == epoch:
        table[TEMPORARY, buffer] = slot
    else:
        _free(table, slot)


# ---- donate, release: one step -------------------------------------------------------------------


@compiled
def _emit(table: Ints, times: Floats, op: int, held: int) -> None:
    """End a step that holds `held` bytes, before donations, and without what is copied out."""
    step = table[COUNT, N_STEPS]
    table[STEP_OP, step], table[STEP_NEEDS, step] = op, table[COUNT, NEEDS]
    table[COUNT, NEEDS] = NONE
    other = held - _donate(table, op, step)
    _let_go_of_what_is_done(table, times, 2 * step)
    _make_room(table, times, other, 2 * step)
    table[STEP_HELD, step] = other + table[COUNT, LEAVING_BYTES]
    times[CLOCK, RELEASE_CLOCK] += times[SECONDS, op]
    table[COUNT, N_STEPS] = step + 1


@compiled
def _donate(table: Ints, op: int, step: int) -> int:
    """Write results over arguments that are freed in this step; returns the bytes saved."""
    saved = 0
    for i in range(table[DONATION_START, op], table[DONATION_START, op + 1]):
        source = table[READ_SLOT, table[DONATION_READS, i]]
        target = table[WRITE_SLOT, table[DONATION_WRITES, i]]
        if target == NONE or table[SLOT_STOP, source] != step:
            continue
        crosses = 0 <= table[SLOT_START, source] < table[COUNT, BOUNDARY_STEP] <= step
        if not crosses and table[SLOT_BYTES, source] == table[SLOT_BYTES, target]:
            saved += table[SLOT_BYTES, source]
            table[SLOT_STOP, source] = TAKEN
            table[WRITE_SLOT, table[DONATION_WRITES, i]] = NONE
    return saved


# ---- release: what leaves ------------------------------------------------------------------------


@compiled
def _start(table: Ints, times: Floats, away: int) -> None:
    """Issue a copy out now."""
    buffer, nbytes = table[AWAY_BUFFER, away], table[SLOT_BYTES, table[AWAY_SOURCE, away]]
    table[COUNT, N_LEAVING] = away + 1
    table[COUNT, LEAVING_BYTES] += nbytes
    table[COUNT, LIVE] -= nbytes
    start = max(times[CLOCK, RELEASE_CLOCK], times[CLOCK, LINK_FREE])
    times[CLOCK, LINK_FREE] = times[LEAVING_DONE, away] = start + times[OUT_SECONDS, buffer]
    table[AWAY_GONE, away] = table[AWAY_DUE, away] = 0
    gap = table[USE_GAPS, table[USE_START, buffer] + table[PASSED, buffer] - 1]
    hint = table[RELEASE, gap]
    if hint != NO_HINT:
        table[AWAY_DUE, away], table[AWAY_NEXT, away] = 1, NONE
        if table[DUE_FIRST, hint] == NONE:
            table[DUE_FIRST, hint] = away
        else:
            table[AWAY_NEXT, table[DUE_LAST, hint]] = away
        table[DUE_LAST, hint] = away


@compiled
def _free_source(table: Ints, times: Floats, away: int, at: int) -> None:
    """Wait for a copy out, and free its source at time `at` (as in `FREED_AT`)."""
    times[CLOCK, RELEASE_CLOCK] = max(times[CLOCK, RELEASE_CLOCK], times[LEAVING_DONE, away])
    table[COUNT, LEAVING_BYTES] -= table[SLOT_BYTES, table[AWAY_SOURCE, away]]
    table[AWAY_GONE, away] = 1
    table[FREED, table[COUNT, N_FREED]] = away
    table[FREED_AT, table[COUNT, N_FREED]] = at
    table[COUNT, N_FREED] += 1
    oldest = table[COUNT, OLDEST]
    while oldest < table[COUNT, N_LEAVING] and table[AWAY_GONE, oldest] == 1:
        oldest += 1
    table[COUNT, OLDEST] = oldest


@compiled
def _let_go_of_what_is_done(table: Ints, times: Floats, at: int) -> None:
    """Free sources that are copied by the clock, up to the first that is not and has no hint."""
    while table[COUNT, UNHURRIED] < table[COUNT, N_LEAVING]:
        index = table[COUNT, UNHURRIED]
        if table[AWAY_DUE, index] == 0 and table[AWAY_GONE, index] == 0:
            if times[LEAVING_DONE, index] > times[CLOCK, RELEASE_CLOCK]:
                break
            _free_source(table, times, index, at)
        table[COUNT, UNHURRIED] += 1


@compiled
def _make_room(table: Ints, times: Floats, other_bytes: int, at: int) -> None:
    """Free sources, the oldest copy first, until the rest fits next to `other_bytes`."""
    room = table[FIXED, BUDGET_BYTES] - other_bytes
    while table[COUNT, OLDEST] < table[COUNT, N_LEAVING] and table[COUNT, LEAVING_BYTES] > room:
        _free_source(table, times, table[COUNT, OLDEST], at)


# ---- prefetch ------------------------------------------------------------------------------------


@compiled
def _prefetch(table: Ints) -> None:
    """Issue each copy back as early as memory allows, or at its hint."""
    budget, boundary = table[FIXED, BUDGET_BYTES], table[COUNT, BOUNDARY_STEP]
    between = table[COUNT, BETWEEN_HELD]
    earliest = 0
    for group in range(table[COUNT, N_GROUPS]):
        step, source = table[GROUP_STEP, group], table[GROUP_SOURCE, group]
        nbytes = table[GROUP_BYTES, group]
        low = max(earliest, table[AWAY_START, source] + 1, _hint(table, group))
        taken = table[SLOT_STOP, table[GROUP_SLOT, group]] == TAKEN
        if low < boundary <= step and (taken or between + nbytes > budget):
            low = boundary
        at = step
        while at > low and table[STEP_HELD, at - 1] + nbytes <= budget:
            at -= 1
            table[STEP_HELD, at] += nbytes
        if at < boundary <= step:
            between += nbytes
        table[GROUP_AT, group] = at
        if table[GROUP_FREES, group] == 1:
            table[AWAY_STOP, source] = at
        earliest = at
    peak = max(table[COUNT, PEAK], between)
    for step in range(table[COUNT, N_STEPS]):
        peak = max(peak, table[STEP_HELD, step])
    table[COUNT, PEAK] = peak


@compiled
def _hint(table: Ints, group: int) -> int:
    """The first step before which the plan wants the copy issued; 0 without a hint."""
    gap = table[GROUP_GAP, group]
    op = NO_HINT if gap == NONE else table[PREFETCH, gap]
    return 0 if op == NO_HINT else table[OWN_STEP, op - 1] + 1


# ---- place, simulate -----------------------------------------------------------------------------


@compiled
def _play(table: Ints, times: Floats) -> bool:
    """Walk the steps once, with three clocks and the ranges of the outer tier.

    Returns False as soon as compute has waited longer than the limit allows.
    """
    group, free, away, dropped = 0, 0, 0, 0
    table[COUNT, N_FREE] = 1
    table[FREE_START, 0], table[FREE_STOP, 0] = 0, NEVER
    for step in range(table[COUNT, N_STEPS]):
        free = _wait_for_copies_out(table, times, free, 2 * step)
        while group < table[COUNT, N_GROUPS] and table[GROUP_AT, group] == step:
            _copy_back(table, times, group)
            group += 1
        now = times[CLOCK, COMPUTE]
        if table[STEP_NEEDS, step] != NONE:
            now = max(now, times[GROUP_DONE, table[STEP_NEEDS, step]])
        if now - times[CLOCK, PLAYED] > times[CLOCK, SPARE]:
            return False
        times[CLOCK, PLAYED] += times[SECONDS, table[STEP_OP, step]]
        now += times[SECONDS, table[STEP_OP, step]]
        times[CLOCK, COMPUTE] = now
        while dropped < table[COUNT, N_DROPPED] and _dropped_at(table, dropped) == step:
            _give_up(table, times, table[DROPPED, dropped])
            dropped += 1
        while away < table[COUNT, N_AWAY] and table[AWAY_START, away] == step:
            _copy_out(table, times, away)
            away += 1
        free = _wait_for_copies_out(table, times, free, 2 * step + 1)
    return True


@compiled
def _dropped_at(table: Ints, dropped: int) -> int:
    return table[AWAY_STOP, table[DROPPED, dropped]]


@compiled
def _wait_for_copies_out(table: Ints, times: Floats, free: int, at: int) -> int:
    """Wait for the copies whose sources are freed at `at`, from the `free`-th on."""
    while free < table[COUNT, N_FREED] and table[FREED_AT, free] == at:
        times[CLOCK, COMPUTE] = max(times[CLOCK, COMPUTE], times[OUT_DONE, table[FREED, free]])
        free += 1
    return free


@compiled
def _copy_back(table: Ints, times: Floats, group: int) -> None:
    source = table[GROUP_SOURCE, group]
    start = max(times[CLOCK, IN], times[ROOM_DONE, source], times[CLOCK, COMPUTE])
    done = start + times[IN_SECONDS, table[AWAY_BUFFER, source]]
    times[CLOCK, IN] = times[GROUP_DONE, group] = done
    if table[GROUP_FREES, group] == 1:
        _give_up(table, times, source)


@compiled
def _copy_out(table: Ints, times: Floats, away: int) -> None:
    """Copy out. The stream waits for the place in the outer tier, and for the run before it."""
    start = max(times[CLOCK, OUT], _take(table, times, away))
    start = max(start, times[CLOCK, COMPUTE])
    done = start + times[OUT_SECONDS, table[AWAY_BUFFER, away]]
    times[CLOCK, OUT] = times[OUT_DONE, away] = times[ROOM_DONE, away] = done


@compiled
def _give_up(table: Ints, times: Floats, away: int) -> None:
    """Free an outer slot on the stream of copies back. Its place is reused unless it crossed."""
    now = max(times[CLOCK, IN], times[ROOM_DONE, away])
    times[CLOCK, IN] = times[ROOM_DONE, away] = now
    nbytes = table[OUTER_BYTES, table[AWAY_BUFFER, away]]
    crosses = table[AWAY_START, away] < table[COUNT, BOUNDARY_STEP] <= table[AWAY_STOP, away]
    if not crosses and nbytes > 0:
        _give(table, table[AWAY_OFFSET, away], nbytes)


# ---- place: rooms in the outer tier --------------------------------------------------------------


@compiled
def _take(table: Ints, times: Floats, away: int) -> float:
    """Place an outer slot by first fit; returns when the previous owners are done with it."""
    nbytes, index = table[OUTER_BYTES, table[AWAY_BUFFER, away]], 0
    while table[FREE_STOP, index] - table[FREE_START, index] < nbytes:
        index += 1
    start = table[FREE_START, index]
    table[FREE_START, index] = start + nbytes
    if table[FREE_START, index] == table[FREE_STOP, index]:
        _move_ranges(table, index + 1, -1)
    table[AWAY_OFFSET, away] = start
    table[COUNT, EXTENT] = max(table[COUNT, EXTENT], start + nbytes)
    return _claim(table, times, start, start + nbytes, away)


@compiled
def _give(table: Ints, start: int, nbytes: int) -> None:
    """Free a range, and merge it with adjacent free ranges."""
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
    """Shift the free ranges from index `first` on by `by` places."""
    last = table[COUNT, N_FREE] - 1
    for i in range(last - first + 1):
        at = last - i if by > 0 else first + i
        table[FREE_START, at + by] = table[FREE_START, at]
        table[FREE_STOP, at + by] = table[FREE_STOP, at]
    table[COUNT, N_FREE] += by


@compiled
def _count_before(table: Ints, row: int, length: int, position: int) -> int:
    """How many of the first `length` entries of `row`, which ascend, are below `position`."""
    low, high = 0, length
    while low < high:
        middle = (low + high) // 2
        if table[row, middle] < position:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _claim(table: Ints, times: Floats, start: int, stop: int, slot: int) -> float:
    """Make `slot` the owner of a range; returns when the previous owners are done with it."""
    if start == stop:
        return 0.0
    length = table[COUNT, N_ROOMS]
    low = _count_before(table, ROOM_START, length, start + 1)
    if low > 0 and table[ROOM_STOP, low - 1] > start:
        low -= 1
    high = max(low, _count_before(table, ROOM_START, length, stop))
    done = 0.0
    for i in range(low, high):
        done = max(done, times[ROOM_DONE, table[ROOM_OWNER, i]])
    _replace_rooms(table, low, high, start, stop, slot)
    return done


@compiled
def _replace_rooms(table: Ints, low: int, high: int, start: int, stop: int, slot: int) -> None:
    """Replace the owned ranges from `low` to `high` by one of `slot`; keep what sticks out."""
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
    """Shift the owned ranges from index `first` on by `by` places."""
    last = table[COUNT, N_ROOMS] - 1
    for i in range(last - first + 1 if by != 0 else 0):
        at = last - i if by > 0 else first + i
        _set_room(
            table, at + by, table[ROOM_START, at], table[ROOM_STOP, at], table[ROOM_OWNER, at]
        )
    table[COUNT, N_ROOMS] += by


# ---- a walk from plan to plan --------------------------------------------------------------------

COUNTED, MOVABLE, OPTION_START, OPTIONS, GROUP_START, GROUP, CHANGED, BEFORE = range(8)
"""Rows of a space, the table of a walk. A place is a gap that may change. `COUNTED`: figures, see
below. Per place: its gap, and where its allowed kinds start in `OPTIONS`. Per group of places with
the same structure: where its places start in `GROUP`. Per changed gap of the current move: the gap
(`CHANGED`) and its previous kind (`BEFORE`)."""
SPACE_ROWS = 8
"""Rows of a space."""

N_PLACES, N_GROUPED, N_CHANGED, STEP = range(4)
"""Columns of `COUNTED`: places, groups, gaps changed by the current move, the next step."""

AT, LEAST, HEAT, COOLING, GROUP_MOVES = range(5)
"""The state (mood) of a walk: seconds of the current plan and of the best one; the temperature in
seconds; its factor per step; the fraction of moves that change a row (a stretch of a group)."""

DRAWS = 8
"""Random numbers per step, each at least 0 and below 1."""

SINGLE, TRADE, FEW = 0.45, 0.67, 0.83
"""Which move is made, if not of a row: a draw below `SINGLE` changes one place, below `TRADE` swaps
two, below `FEW` changes a few neighbors; any other draw swaps two that are near."""

LIKE_ONE = 0.5
"""Below this draw, a move of a row copies the kinds of one layer, if there are `MANY_LAYERS`."""

MANY_LAYERS = 6
"""The fewest layers in a group for which copying a layer is worth trying."""

NEAR = 6
"""The most places between two places that are near."""

ENDLESS = 1e300
"""Seconds that no step takes, but a finite limit: a plan that does not fit is then WORSE."""

SEVERAL = 4
"""The most neighboring places that one move changes."""


@entry("i8[:, ::1], f8[:, ::1], i8[:, ::1], i1[::1], i1[::1], i8[::1], f8[::1], f8[::1]")
def walk(
    table: Ints,
    times: Floats,
    space: Ints,
    kinds: MutableSequence[int],
    best: MutableSequence[int],
    hints: Sequence[int],
    state: MutableSequence[float],
    draws: Sequence[float],
) -> int:
    """Take the steps that `draws` has numbers for and that are not done yet; changes `kinds`.

    A better plan is always accepted, a worse one ever more rarely (Metropolis). `best` gets the
    best kinds that fit. Returns DONE, or FULL if the tables are too short for the next step.
    """
    for step in range(space[COUNTED, STEP], len(draws) // DRAWS):
        at = step * DRAWS
        space[COUNTED, STEP] = step
        _change(space, kinds, state, draws, at)
        if space[COUNTED, N_CHANGED] > 0:
            most = state[AT] - state[HEAT] * log(1.0 - draws[at + 1])
            status, seconds, _, _ = run(table, times, kinds, hints, hints, min(most, ENDLESS))
            if status == DONE:
                state[AT] = seconds
                if seconds < state[LEAST]:
                    state[LEAST] = seconds
                    for gap in range(len(kinds)):
                        best[gap] = kinds[gap]
            else:
                _change_back(space, kinds)
            if status == FULL:
                return FULL
        state[HEAT] *= state[COOLING]
    return DONE


@compiled
def _change(
    space: Ints,
    kinds: MutableSequence[int],
    state: Sequence[float],
    draws: Sequence[float],
    at: int,
) -> None:
    """Make one move: change the kinds of some places, by the draws from `at` on."""
    space[COUNTED, N_CHANGED] = 0
    rows = state[GROUP_MOVES] if space[COUNTED, N_GROUPED] > 0 else 0.0
    if draws[at] < rows:
        _change_group(space, kinds, draws, at)
        return
    move = (draws[at] - rows) / (1.0 - rows)
    place = _pick(draws[at + 2], space[COUNTED, N_PLACES])
    if move < SINGLE:
        _set(space, kinds, place, _another(space, kinds, place, draws[at + 3]))
    elif move < TRADE:
        _trade(space, kinds, place, _pick(draws[at + 3], space[COUNTED, N_PLACES]))
    elif move < FEW:
        several = 2 + _pick(draws[at + 3], SEVERAL - 1)
        for i in range(min(several, space[COUNTED, N_PLACES] - place)):
            _set(space, kinds, place + i, _option(space, place + i, draws[at + 4 + i]))
    else:
        other = place + 1 + _pick(draws[at + 3], NEAR)
        _trade(space, kinds, place, min(other, space[COUNTED, N_PLACES] - 1))


@compiled
def _change_group(
    space: Ints, kinds: MutableSequence[int], draws: Sequence[float], at: int
) -> None:
    """Set a stretch of a group to one kind, or copy the kinds of one layer to other layers."""
    group = _pick(draws[at + 2], space[COUNTED, N_GROUPED])
    start, stop = space[GROUP_START, group], space[GROUP_START, group + 1]
    one, other = _pick(draws[at + 3], stop - start), _pick(draws[at + 4], stop - start)
    first, last = min(one, other), max(one, other)
    if draws[at + 6] < LIKE_ONE and stop - start >= MANY_LAYERS:
        _copy_layer(space, kinds, stop - start, _pick(draws[at + 5], stop - start), first, last)
        return
    kind = _option(space, space[GROUP, start + first], draws[at + 5])
    for i in range(start + first, start + last + 1):
        if _may_be(space, space[GROUP, i], kind):
            _set(space, kinds, space[GROUP, i], kind)


@compiled
def _copy_layer(
    space: Ints, kinds: MutableSequence[int], layers: int, one: int, first: int, last: int
) -> None:
    """Give layers `first` to `last` the kinds of layer `one`, in all groups of `layers` places."""
    for group in range(space[COUNTED, N_GROUPED]):
        start, stop = space[GROUP_START, group], space[GROUP_START, group + 1]
        if stop - start == layers:
            kind = kinds[space[MOVABLE, space[GROUP, start + one]]]
            for i in range(start + first, start + last + 1):
                if _may_be(space, space[GROUP, i], kind):
                    _set(space, kinds, space[GROUP, i], kind)


@compiled
def _trade(space: Ints, kinds: MutableSequence[int], one: int, other: int) -> None:
    """Swap the kinds of two places, if each may have the kind of the other."""
    first, second = kinds[space[MOVABLE, one]], kinds[space[MOVABLE, other]]
    if _may_be(space, one, second) and _may_be(space, other, first):
        _set(space, kinds, one, second)
        _set(space, kinds, other, first)


@compiled
def _set(space: Ints, kinds: MutableSequence[int], place: int, kind: int) -> None:
    gap, count = space[MOVABLE, place], space[COUNTED, N_CHANGED]
    if kinds[gap] != kind:
        space[CHANGED, count], space[BEFORE, count] = gap, kinds[gap]
        space[COUNTED, N_CHANGED] = count + 1
        kinds[gap] = kind


@compiled
def _change_back(space: Ints, kinds: MutableSequence[int]) -> None:
    for i in range(space[COUNTED, N_CHANGED]):
        kinds[space[CHANGED, i]] = space[BEFORE, i]


@compiled
def _another(space: Ints, kinds: MutableSequence[int], place: int, draw: float) -> int:
    """A kind that a place may have, other than its current one."""
    start, now = space[OPTION_START, place], kinds[space[MOVABLE, place]]
    index = _pick(draw, space[OPTION_START, place + 1] - start - 1)
    found = space[OPTIONS, start + index]
    for i in range(start, start + index + 1):
        if space[OPTIONS, i] == now:
            found = space[OPTIONS, start + index + 1]
    return found


@compiled
def _option(space: Ints, place: int, draw: float) -> int:
    start = space[OPTION_START, place]
    return space[OPTIONS, start + _pick(draw, space[OPTION_START, place + 1] - start)]


@compiled
def _may_be(space: Ints, place: int, kind: int) -> bool:
    for i in range(space[OPTION_START, place], space[OPTION_START, place + 1]):
        if space[OPTIONS, i] == kind:
            return True
    return False


@compiled
def _pick(draw: float, count: int) -> int:
    """One of `count` indices, by a draw from 0 to below 1."""
    return min(int(draw * count), count - 1)
