"""tables: put a problem into the table rows that `kernel.py` names, with space for its results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from outcore.evaluate import kernel as k
from outcore.ir.hardware import Tier
from outcore.ir.liveness import Liveness
from outcore.ir.plan import Gap
from outcore.ir.problem import Problem
from outcore.ir.trace import Effect, Ref

CACHE_LINE = 8
"""8-byte numbers in one line of a processor's cache."""


def tables(
    problem: Problem, live: Liveness, gaps: Sequence[Gap], space: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tables of ints and of seconds for `problem`, whose gaps are `gaps`. Linear in ops.

    `space`: the most runs there is space for, as a multiple of the number of ops.
    """
    trace = problem.trace
    rows: dict[int, list[int]] = {
        **_ops(problem),
        **_buffers(problem, live),
        **_gaps(live, gaps),
        **_dead(len(trace.ops), gaps),
    }
    steps = space * len(trace.ops)
    slots = space * len(rows[k.WRITES]) + len(trace.buffers) + len(gaps)
    rows[k.FIXED] = _fixed(problem, rows, steps, slots)
    # Per gap at most one copy back, which has a slot, and one out, which may split a free range.
    longest = max(steps, slots + len(gaps), 2 * len(gaps) + 2, k.COUNTS, *map(len, rows.values()))
    columns = _columns(longest)
    table = np.zeros((k.ROWS, columns), dtype=np.int64)
    for row, items in rows.items():
        table[row, : len(items)] = items
    return table, _times(problem, columns)


def _columns(least: int) -> int:
    """At least `least` columns, an odd number of cache lines: a column's rows then use all sets."""
    return (-(-least // CACHE_LINE) | 1) * CACHE_LINE


def _fixed(problem: Problem, rows: dict[int, list[int]], steps: int, slots: int) -> list[int]:
    figures = {
        k.N_OPS: len(problem.trace.ops),
        k.N_BUFFERS: len(problem.trace.buffers),
        k.N_GAPS: len(rows[k.GAP_BUFFER]),
        k.N_INPUTS: len(rows[k.INPUTS]),
        k.N_TANGENTS: len(rows[k.TANGENTS]),
        k.STEPS_MOST: steps,
        k.SLOTS_MOST: slots,
        k.BOUNDARY: problem.trace.boundary,
        k.BUDGET_BYTES: min(problem.budget_bytes, k.NEVER),
        k.OUTSIDE_BYTES: problem.outside_bytes,
        k.BETWEEN_BYTES: problem.between_bytes,
        k.OFFLOADS: int(_offloads(problem)),
        k.DEVICE_LIMIT: min(problem.limit_bytes(Tier.DEVICE), k.NEVER),
        k.OUTER_LIMIT: min(problem.limit_bytes(problem.hardware.outer), k.NEVER),
    }
    return [figures[column] for column in range(len(figures))]


def _offloads(problem: Problem) -> bool:
    """Whether there is an outer tier. If so, it is linked to the device (`verify_problem`)."""
    return problem.hardware.capacity(problem.hardware.outer) > 0


def _rows(rows: Iterable[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Where each row starts and the last one ends; and all rows concatenated."""
    listed = list(rows)
    return list(accumulate(map(len, listed), initial=0)), list(chain.from_iterable(listed))


def _ops(problem: Problem) -> dict[int, list[int]]:
    trace = problem.trace
    read_start, reads = _rows(trace.reads)
    write_start, writes = _rows(trace.writes)
    sources: list[list[int]] = [[] for _ in trace.ops]
    targets: list[list[int]] = [[] for _ in trace.ops]
    for d in trace.donations:
        sources[d.op].append(trace.reads[d.op].index(trace.values[d.source].buffer))
        targets[d.op].append(trace.writes[d.op].index(trace.values[d.target].buffer))
    donation_start, donation_reads = _rows(sources)
    return {
        k.INPUTS: list(trace.value_buffers(tuple(map(Ref, trace.inputs)))),
        k.TANGENTS: list(trace.value_buffers(tuple(map(Ref, trace.tangents)))),
        k.READS: reads,
        k.WRITES: writes,
        k.READ_START: read_start,
        k.WRITE_START: write_start,
        k.DONATION_START: donation_start,
        k.DONATION_READS: donation_reads,
        k.DONATION_WRITES: _rows(targets)[1],
        k.REPEATABLE: [int(op.repeatable) for op in trace.ops],
        k.MUTATES: [int(Effect.MUTATES in op.effects) for op in trace.ops],
        k.WORKSPACE_BYTES: list(problem.profile.workspace_bytes),
    }


def _buffers(problem: Problem, live: Liveness) -> dict[int, list[int]]:
    hardware, nbytes = problem.hardware, [b.nbytes for b in problem.trace.buffers]
    slot, device = hardware.slot_bytes, Tier.DEVICE
    return {
        k.PRODUCER: [k.NONE if op is None else op for op in live.producer],
        k.IS_HELD: [int(held) for held in live.held],
        k.DEVICE_BYTES: [slot(device, n, copied=False) for n in nbytes],
        k.FETCHED_BYTES: [slot(device, n, copied=True) for n in nbytes],
        k.OUTER_BYTES: [slot(hardware.outer, n, copied=True) for n in nbytes],
    }


def _gaps(live: Liveness, gaps: Sequence[Gap]) -> dict[int, list[int]]:
    index = {(gap.buffer, gap.after): i for i, gap in enumerate(gaps)}
    use_start, use_gaps = _rows(
        [index.get((buffer, op), k.NONE) for op in uses] for buffer, uses in enumerate(live.uses)
    )
    return {
        k.USE_START: use_start,
        k.USE_GAPS: use_gaps,
        k.GAP_BUFFER: [gap.buffer for gap in gaps],
        k.GAP_USE: [live.uses[gap.buffer].index(gap.after) for gap in gaps],
        k.GAP_AFTER: [gap.after for gap in gaps],
        k.GAP_BEFORE: [gap.before for gap in gaps],
        k.GAP_DEAD: [int(gap.dead) for gap in gaps],
    }


def _dead(ops: int, gaps: Sequence[Gap]) -> dict[int, list[int]]:
    """The dead gaps, grouped by the op that they end with."""
    ending: list[list[int]] = [[] for _ in range(ops)]
    for index, gap in enumerate(gaps):
        if gap.dead:
            ending[gap.before].append(index)
    start, dead = _rows(ending)
    return {k.DEAD_START: start, k.DEAD: dead}


def _times(problem: Problem, columns: int) -> NDArray[np.float64]:
    times = np.zeros((k.TIME_ROWS, columns))
    times[k.SECONDS, : len(problem.trace.ops)] = problem.profile.seconds
    if _offloads(problem):
        outer, nbytes = problem.hardware.outer, [b.nbytes for b in problem.trace.buffers]
        out = problem.hardware.link(Tier.DEVICE, outer)
        back = problem.hardware.link(outer, Tier.DEVICE)
        times[k.OUT_SECONDS, : len(nbytes)] = [out.seconds(n) for n in nbytes]
        times[k.IN_SECONDS, : len(nbytes)] = [back.seconds(n) for n in nbytes]
    return times
