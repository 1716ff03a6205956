"""replay: replay the memory of a step under an LMS setting, by levels and without times.

What an op makes is held from its run to the run of its last reader, or to the end if nothing may
free it. What is swapped is held to its last near reader, and for one more op if the copy out is not
waited for. The copy that comes back is held from the end of the op that triggers it to its last
reader.
"""

from __future__ import annotations

import numpy as np

from outcore.ir.hardware import Tier
from outcore.ir.liveness import liveness
from outcore.ir.problem import Problem
from outcore.ir.trace import Ref
from outcore.policies.lms.levels import Ints, Levels
from outcore.policies.lms.swaps import ON_THE_SPOT, Edges, Setting

COPY_OUT_OPS = 1
"""How many ops long a copy out is, whatever its size, if it is not waited for."""


class Replay:
    """A problem's step, to be replayed under one setting after another."""

    def __init__(self, problem: Problem, edges: Edges) -> None:
        self.edges, self.budget_bytes = edges, problem.budget_bytes
        self.position = _positions(edges.levels)
        """Per node: when it runs in the replay."""
        self.nbytes = _sizes(problem, edges, copied=False)
        """Per buffer of `edges`: its device bytes before it is swapped."""
        self.copied_bytes = _sizes(problem, edges, copied=True)
        """The same once a copy has filled it (with padding)."""
        self.unswapped = _unswapped(problem, edges, self.position)
        """Per position: bytes that are held whatever is swapped."""

    def passes(self, setting: Setting) -> bool:
        """Whether the step stays inside the device budget."""
        return self.peak_bytes(setting) <= self.budget_bytes

    def peak_bytes(self, setting: Setting) -> int:
        """The most bytes that the device holds, everything counted. Linear in ops and edges."""
        edges, position = self.edges, self.position
        swaps, target = edges.swaps(setting), position[edges.target]
        start = position[edges.source]
        stop, near = start.copy(), ~swaps.far
        np.maximum.at(stop, edges.owner[near], target[near])
        if not setting.waits_out:
            stop[np.unique(edges.owner[swaps.far])] += COPY_OUT_OPS
        trigger = swaps.trigger[swaps.opens]
        back = np.where(trigger == ON_THE_SPOT, target[swaps.opens], position[trigger] + 1)
        last = back.copy()
        np.maximum.at(last, swaps.group[swaps.far], target[swaps.far])
        copied = self.copied_bytes[edges.owner[swaps.opens]]
        held = self.unswapped + _held(len(position), start, stop, self.nbytes)
        return int((held + _held(len(position), back, last, copied)).max())


def _positions(order: Levels) -> Ints:
    """Per node: when it runs in the replay, level by level."""
    position = np.empty_like(order.level)
    position[np.argsort(order.level, kind="stable")] = np.arange(len(order.level))
    return position


def _sizes(problem: Problem, edges: Edges, *, copied: bool) -> Ints:
    """Device bytes of each buffer of `edges`; `copied`: once a copy has filled it."""
    buffers = problem.trace.buffers
    slot_bytes = problem.hardware.slot_bytes
    sizes = [slot_bytes(Tier.DEVICE, buffers[b].nbytes, copied=copied) for b in edges.buffers]
    return np.array(sizes, dtype=np.int64)


def _held(count: int, start: Ints, stop: Ints, nbytes: Ints) -> Ints:
    """Bytes held at each of `count` positions by items held from `start` to `stop` inclusive."""
    change = np.zeros(count + 1, dtype=np.int64)
    np.add.at(change, start, nbytes)
    np.subtract.at(change, np.minimum(stop + 1, count), nbytes)
    return np.cumsum(change)[:count]


def _unswapped(problem: Problem, edges: Edges, position: Ints) -> Ints:
    """Bytes held at each position whatever is swapped: all but the buffers of `edges`."""
    trace, order, live = problem.trace, edges.levels, liveness(problem.trace)
    end = len(position) - 1
    pause = int(position[order.pause])
    given = dict.fromkeys(trace.value_buffers(tuple(map(Ref, trace.inputs))), 0)
    given |= dict.fromkeys(trace.value_buffers(tuple(map(Ref, trace.tangents))), pause)
    spans = [(0, end, problem.outside_bytes), (pause, pause, problem.between_bytes)]
    spans += [
        (int(position[order.node(op)]),) * 2 + (nbytes,)
        for op, nbytes in enumerate(problem.profile.workspace_bytes)
    ]
    swapped = set(edges.buffers)
    for buffer in trace.buffers:
        times = [int(position[order.node(op)]) for op in live.uses[buffer.id]]
        if buffer.id in given:
            times.append(given[buffer.id])
        if buffer.id not in swapped and times:
            last = end if live.held[buffer.id] else max(times)
            nbytes = problem.hardware.slot_bytes(Tier.DEVICE, buffer.nbytes, copied=False)
            spans.append((min(times), last, nbytes))
    start, stop, sizes = np.array(spans, dtype=np.int64).T
    return _held(len(position), start, stop, sizes)
