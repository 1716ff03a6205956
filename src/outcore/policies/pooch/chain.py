"""chain: find what a break point needs: targets to fetch, and ops to run again.

The recursion of PoocH's code: what a recomputation reads is fetched, or recomputed in turn. Only
what the break point itself needs stays. Intermediates are dropped at their last reader, and
recomputed whenever they are needed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outcore.errors import VerifyError
from outcore.ir.hardware import Tier
from outcore.ir.liveness import liveness
from outcore.ir.problem import Problem
from outcore.policies.pooch.log import KEEP, OFFLOAD, Kind, Log, Segment

REMEMBERED = 4
"""Results that are cached per segment: a search asks for the same few again and again."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a segment needs before its first op."""

    fetched: tuple[int, ...]
    """Targets to fetch."""
    again: tuple[int, ...]
    """Targets to recompute."""
    seconds: float
    """Seconds of compute for these recomputations."""
    growth_bytes: int
    """Peak of these recomputations, above what is on the device once the fetches are."""

    @property
    def back(self) -> tuple[int, ...]:
        """The targets that are on the device from then on."""
        return self.fetched + self.again


NOTHING = Need((), (), 0.0, 0)
"""What a segment needs if all its targets are on the device."""


class Chains:
    """Finds out what a segment needs, given what is on the device."""

    def __init__(self, problem: Problem, log: Log) -> None:
        self.trace, self.profile = problem.trace, problem.profile
        self.live = liveness(problem.trace)
        self.targets = log.targets
        self.target_of = {target.gap.buffer: i for i, target in enumerate(log.targets)}
        """Buffer -> its target."""
        self.nbytes = [
            problem.hardware.slot_bytes(Tier.DEVICE, buffer.nbytes, copied=False)
            for buffer in problem.trace.buffers
        ]
        """Device bytes of each buffer."""
        self.met: set[int] = set()
        """Targets whose state the answer in progress depends on."""
        self.known: dict[int, list[tuple[list[int], list[Kind], Need]]] = {}
        """Cache. Per break point: the targets that an answer depends on, their states, and the
        answer."""

    def need(self, segment: Segment, left: Sequence[Kind]) -> Need:
        """What `segment` needs before its first op.

        `left` is KEEP for the targets that are on the device, else how the target comes back.
        """
        if all(left[i] is KEEP for i in segment.wanted):
            return NOTHING
        known = self.known.setdefault(segment.op, [])
        for met, states, need in known:
            if states == [left[i] for i in met]:
                return need
        self.met = set(segment.wanted)
        need = self._work_out(segment, left)
        met = list(self.met)
        known.insert(0, (met, [left[i] for i in met], need))
        del known[REMEMBERED:]
        return need

    def _work_out(self, segment: Segment, left: Sequence[Kind]) -> Need:
        """The answer of `need`, without the cache."""
        wanted = [i for i in segment.wanted if left[i] is not KEEP]
        if all(left[i] is OFFLOAD for i in wanted):
            return Need(tuple(wanted), (), 0.0, 0)
        ops, fetched = self._closure(segment.op, wanted, left)
        again = tuple(i for i in wanted if i not in fetched)
        growth = self._growth_bytes(segment.op, ops, again, left)
        return Need(tuple(fetched), again, sum(self.profile.seconds[op] for op in ops), growth)

    def _closure(
        self, before: int, wanted: Sequence[int], left: Sequence[Kind]
    ) -> tuple[list[int], list[int]]:
        """Ops to run again before op `before` for the `wanted` targets, and targets to fetch."""
        ops: set[int] = set()
        fetched: list[int] = []
        stack = [self.targets[i].gap.buffer for i in wanted]
        seen = set(stack)
        while stack:
            buffer = stack.pop()
            target = self.target_of.get(buffer)
            if target is not None and left[target] is OFFLOAD:
                fetched.append(target)
                continue
            producer = self.live.producer[buffer]
            if producer is None:
                rule = "what is recomputed can be made again from what is left"
                raise VerifyError(noun="plan", rule=rule, where=f"buffer {buffer}")
            ops.add(producer)
            reads = (b for b in self.trace.reads[producer] if b not in seen)
            more = [b for b in reads if not self._there(b, before, left)]
            seen.update(more)
            stack += more
        return sorted(ops), fetched

    def _there(self, buffer: int, before: int, left: Sequence[Kind]) -> bool:
        """Whether `buffer` is on the device when the recomputations for op `before` begin."""
        if not self.live.held[buffer] and self.live.uses[buffer][-1] < before:
            return False
        target = self.target_of.get(buffer)
        if target is None:
            return True
        self.met.add(target)
        return left[target] is KEEP

    def _growth_bytes(
        self, before: int, ops: Sequence[int], again: Sequence[int], left: Sequence[Kind]
    ) -> int:
        """Peak bytes of running `ops` again, above what is on the device."""
        staying = {self.targets[i].gap.buffer for i in again}
        last_reader = {b: op for op in ops for b in self.trace.reads[op]}
        temporary: set[int] = set()
        level = peak = 0
        for op in ops:
            made = self.trace.writes[op]
            inside = sum(self.nbytes[b] for b in made) + self.profile.workspace_bytes[op]
            peak = max(peak, level + inside)
            fresh = {b for b in made if not self._there(b, before, left)}
            temporary |= {b for b in fresh - staying if b in last_reader}
            level += sum(self.nbytes[b] for b in fresh if b in staying or b in temporary)
            ended = {b for b in self.trace.reads[op] if b in temporary and last_reader[b] == op}
            level -= sum(self.nbytes[b] for b in ended)
            temporary -= ended
        return peak
