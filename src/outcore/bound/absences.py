"""Absences: the stretches in which a buffer may be away from the device, and how it can return.

They are the gaps of `ir/liveness.py` and a few more, because the bound holds for every program.
What the caller passes may leave before its first use. What is read for the last time may be kept
for a later recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from outcore.bound.positions import Positions
from outcore.ir.hardware import Link, Tier
from outcore.ir.liveness import Liveness
from outcore.ir.problem import Problem

SMALL = 1 / 2000
"""The smallest buffers that together have this fraction of all bytes may be away at no cost."""

ENDLESS_RATE = float(1 << 62)
"""Bytes per second that stand for a link that needs no time."""


@dataclass(frozen=True, slots=True)
class Absence:
    """Buffer `buffer` may be away after position `after` and before position `before`.

    `producer`: the op that can recompute it, or None. `movable`: an outer tier has room for it.
    `needed`: it must be back at `before`. If not, only recomputations still read it, the last of
    them before position `before`.
    """

    buffer: int
    nbytes: int
    after: int
    before: int
    producer: int | None
    movable: bool
    needed: bool


@dataclass(frozen=True, slots=True)
class Absences:
    """All absences, sorted by buffer and position.

    `again_until`: per op, the position before which a rerun of it can be of use for the last time;
    None if it cannot or need not run again.
    """

    all: tuple[Absence, ...]
    again_until: tuple[int | None, ...]


def find_absences(problem: Problem, live: Liveness, positions: Positions) -> Absences:
    """Every absence that counts. Linear in ops, except for sorting buffers by size."""
    finder = _Finder(problem, live, positions)
    finder.find()
    found = sorted(finder.found, key=lambda a: (a.buffer, a.after))
    return Absences(tuple(found), tuple(finder.again_until))


def best_rates(problem: Problem) -> tuple[float, float]:
    """Bytes per second of the fastest link out and the fastest link back; 0 without an outer tier.

    The rate is for a copy of the largest buffer, with latency counted: no copy is faster.
    """
    largest = max((b.nbytes for b in problem.trace.buffers), default=0)
    routes = [(away, back) for away, back, _ in _routes(problem)]
    return (
        max((_rate(away, largest) for away, _ in routes), default=0.0),
        max((_rate(back, largest) for _, back in routes), default=0.0),
    )


def _rate(link: Link, nbytes: int) -> float:
    seconds = link.seconds(nbytes)
    return min(nbytes / seconds, ENDLESS_RATE) if seconds else ENDLESS_RATE


def _routes(problem: Problem) -> list[tuple[Link, Link, int]]:
    """Per outer tier: the link to it, the link back, and the bytes that may be stored there."""
    hardware = problem.hardware
    return [
        (
            hardware.link(Tier.DEVICE, tier),
            hardware.link(tier, Tier.DEVICE),
            problem.limit_bytes(tier),
        )
        for tier in (Tier.HOST, Tier.DISK)
        if hardware.capacity(tier)
    ]


@dataclass(slots=True)
class _Finder:
    """Walks the ops backward: what is recomputed determines what must exist for that."""

    problem: Problem
    live: Liveness
    positions: Positions
    found: list[Absence] = field(default_factory=list)
    again_until: list[int | None] = field(init=False)
    spans: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Per buffer, the pairs of successive positions that touch it with something between."""
    last_read: dict[int, int] = field(default_factory=dict)
    """Buffer -> the position before which reruns read it, after its last use."""

    def find(self) -> None:
        trace = self.problem.trace
        self.again_until = [None] * len(trace.ops)
        least = self._least_bytes()
        large = [b.id for b in trace.buffers if b.nbytes >= least and not self.live.held[b.id]]
        self._find_spans(large)
        self._find_reruns(frozenset(large))
        room = max((limit for _, _, limit in _routes(self.problem)), default=0)
        for buffer, spans in self.spans.items():
            self.found += [self._absence(buffer, span, room, needed=True) for span in spans]
        for buffer, read in self.last_read.items():
            span = self.positions.touches[buffer][-1], read
            self.found.append(self._absence(buffer, span, room, needed=False))

    def _least_bytes(self) -> int:
        """The size below which buffers are left out."""
        held = self.live.held
        sizes = sorted(b.nbytes for b in self.problem.trace.buffers if not held[b.id])
        left = sum(sizes) * SMALL
        for nbytes in sizes:
            left -= nbytes
            if left < 0:
                return max(1, nbytes)
        return 1

    def _find_spans(self, buffers: list[int]) -> None:
        trace, of_op = self.problem.trace, self.positions.of_op
        donated = {(trace.values[d.source].buffer, of_op[d.op]) for d in trace.donations}
        for buffer in buffers:
            self.spans[buffer] = [
                (a, c)
                for a, c in pairwise(self.positions.touches[buffer])
                if c - a > 1 or (buffer, a) in donated
            ]

    def _find_reruns(self, large: frozenset[int]) -> None:
        trace = self.problem.trace
        for op in reversed(trace.ops):
            if not op.repeatable:
                continue
            wanted = [self.last_read.get(b, 0) for b in trace.writes[op.id]]
            wanted += [c for b in trace.writes[op.id] for _, c in self.spans.get(b, ())]
            last = max(wanted, default=0)
            if not last:
                continue
            self.again_until[op.id] = last
            if op.id >= trace.boundary:
                continue  # few gradients wait long enough to be worth recomputing
            for buffer in large.intersection(trace.reads[op.id]):
                if self.positions.touches[buffer][-1] < last:
                    self.last_read[buffer] = max(last, self.last_read.get(buffer, 0))

    def _absence(self, buffer: int, span: tuple[int, int], room: int, *, needed: bool) -> Absence:
        nbytes, producer = self.problem.trace.buffers[buffer].nbytes, self.live.producer[buffer]
        again = producer is not None and self.problem.trace.ops[producer].repeatable
        maker = producer if again else None
        return Absence(buffer, nbytes, *span, maker, nbytes <= room, needed)
