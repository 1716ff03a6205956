"""levels: compute the bytes that a tier holds over the time of a Timeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from outcore.ir.hardware import Tier
from outcore.ir.memory import added_bytes, held_bytes
from outcore.ir.program import Alloc, Copy, Free, Program, Run, Stream
from outcore.ir.timeline import Span, Timeline
from outcore.report.planned import PlannedStep


class Level(NamedTuple):
    """From `seconds` on, `nbytes` are held, until the next Level."""

    seconds: float
    nbytes: int


def levels(step: PlannedStep, timeline: Timeline, tier: Tier) -> list[Level]:
    """What `tier` holds, in order of time.

    On the device, everything counts that `ir/memory.py` counts, so the highest level is the
    Program's peak. In an outer tier, only slots in use count. They need not be adjacent, so the
    tier's extent can be larger.
    """
    if tier is Tier.DEVICE:
        return list(_condensed(_device(step, timeline)))
    return list(_condensed(_outer(step.program, timeline, tier)))


def thinned(found: list[Level], most: int) -> list[Level]:
    """About `most` of the levels: the highest and the last of each stretch of time."""
    if len(found) <= most:
        return found
    start, stop = found[0].seconds, found[-1].seconds
    width = (stop - start) / max(1, most // 2) or 1.0
    stretches: dict[int, list[Level]] = {}
    for level in found:
        stretches.setdefault(int((level.seconds - start) / width), []).append(level)
    return [each for stretch in stretches.values() for each in _ends(stretch)]


def _device(step: PlannedStep, timeline: Timeline) -> Iterator[Level]:
    """Levels of the device, whose memory is allocated and freed in compute-stream order."""
    problem, program, slots = step.problem, step.program, step.program.slots
    spans = {span.instruction: span for span in timeline.spans}
    held = held_bytes(problem, program, Tier.DEVICE)
    now = min((span.start_seconds for span in timeline.spans), default=0.0)
    live = problem.outside_bytes
    live += sum(slots[s].nbytes for s in program.arguments if slots[s].tier is Tier.DEVICE)
    yield Level(now, live)
    for position, instruction in enumerate(program.body):
        if position == program.boundary:
            live += sum(slots[s].nbytes for s in program.tangents)
        if instruction.stream is not Stream.COMPUTE:
            if position == program.boundary:
                yield Level(now, held[position])
            continue
        span = spans.get(position)
        now = max(now, now if span is None else span.start_seconds)
        yield Level(now, held[position])
        live += added_bytes(slots, instruction.action)
        if span is not None:
            now = max(now, span.stop_seconds)
        yield Level(now, live)


def _outer(program: Program, timeline: Timeline, tier: Tier) -> Iterator[Level]:
    """Levels of an outer tier: a slot is in use from the first copy to it until its last use.

    The last use is its free, or the last copy that reads it.
    """
    spans = {span.instruction: span for span in timeline.spans}
    changes: list[tuple[float, int]] = []
    for slot, (start, stop) in _stays(program, spans).items():
        if program.slots[slot].tier is tier:
            changes += [(start, program.slots[slot].nbytes), (stop, -program.slots[slot].nbytes)]
    live = 0
    yield Level(min((span.start_seconds for span in timeline.spans), default=0.0), 0)
    for seconds, nbytes in sorted(changes):  # at one time, what is freed comes first
        live += nbytes
        yield Level(seconds, live)


def _stays(program: Program, spans: dict[int, Span]) -> dict[int, tuple[float, float]]:
    """Map each outer slot to the time from which and until which it is in use."""
    stays: dict[int, tuple[float, float]] = {}
    for position, instruction in enumerate(program.body):
        action, span = instruction.action, spans.get(position)
        if span is None or isinstance(action, Run | Alloc):
            continue
        for slot in _touched(action):
            start, stop = stays.get(slot, (span.start_seconds, span.stop_seconds))
            stays[slot] = min(start, span.start_seconds), max(stop, span.stop_seconds)
    return {s: stay for s, stay in stays.items() if program.slots[s].tier is not Tier.DEVICE}


def _touched(action: Free | Copy) -> tuple[int, ...]:
    return (action.source, action.target) if isinstance(action, Copy) else (action.slot,)


def _condensed(found: Iterable[Level]) -> Iterator[Level]:
    """Of all levels at the same moment, only the highest and the last."""
    together: list[Level] = []
    for level in found:
        if together and level.seconds != together[-1].seconds:
            yield from _ends(together)
            together = []
        together.append(level)
    yield from _ends(together)


def _ends(together: list[Level]) -> Iterator[Level]:
    if together:
        highest, last = max(together, key=lambda level: level.nbytes), together[-1]
        yield highest
        if last.nbytes != highest.nbytes:
            yield last
