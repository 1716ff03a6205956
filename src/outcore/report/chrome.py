"""chrome: write timelines in the Trace Event Format, for Perfetto and chrome://tracing.

The file has a process for each timeline, a thread for each track and a counter for each tier.
Arrows lead from a copy out to the copies back of the same bytes, and from each copy back to the
first run that reads what it brought. Times are microseconds, with nanosecond precision. Slices of
one track never overlap.

Some details follow from how Perfetto reads such files (src/trace_processor/importers/json):
- A thread whose number equals its process's number is the main thread, and is shown first.
- A number can name one thread only.
- Times are truncated to nanoseconds, and slices that then overlap are dropped.
- An arrow's end belongs to the last slice before it in the file.
- A counter's name consists of its name and its series.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from itertools import count, groupby
from typing import Any

from outcore.ir.hardware import Tier
from outcore.ir.profile import Source
from outcore.ir.program import Copy, Program, Run
from outcore.ir.timeline import Cause, Timeline
from outcore.report.figures import Report
from outcore.report.levels import Level, levels
from outcore.report.planned import PlannedStep
from outcore.report.tracks import Slice, StallSpan, Track, pauses, slices

Event = dict[str, Any]

NS_PER_US = 1000
APART = 100
"""Distance between the numbers of two processes; their threads' numbers lie in between."""
_WAITS = {
    Cause.FETCH: "wait for a copy back",
    Cause.RELEASE: "wait for a copy out",
    Cause.PACE: "wait as planned",
}


def chrome_trace_text(report: Report) -> str:
    """The text of the file, one event per line."""
    head = json.dumps({"policy": report.policy, "budget_bytes": report.budget_bytes})
    lines = ",\n".join(json.dumps(event) for event in chrome_events(report))
    return f'{{"displayTimeUnit":"ms","otherData":{head},"traceEvents":[\n{lines}\n]}}\n'


def chrome_events(report: Report) -> list[Event]:
    """All events: names first, then everything else in order of time."""
    names: list[Event] = []
    timed: list[Event] = []
    arrows, process = count(1), 0
    for number, step in enumerate(report.steps, 1):
        for timeline in step.timelines:
            process += APART
            graph = f" graph {number}" if len(report.steps) > 1 else ""
            source = "predicted" if timeline.source is Source.SIMULATED else "measured"
            names += _names(process, source + graph)
            timed += _events(step, timeline, process, arrows)
    return [*names, *sorted(timed, key=lambda event: event["ts"])]


def _names(process: int, name: str) -> Iterator[Event]:
    yield _meta(process, process, "process_name", name=name)
    yield _meta(process, process, "process_sort_index", sort_index=process)
    for thread, track in enumerate(Track, process):
        yield _meta(process, thread, "thread_name", name=track.value)
        yield _meta(process, thread, "thread_sort_index", sort_index=thread)


def _meta(process: int, thread: int, what: str, **args: str | int) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": args}


def _events(
    step: PlannedStep, timeline: Timeline, process: int, arrows: Iterator[int]
) -> Iterator[Event]:
    """The boxes of one timeline, each with the arrow ends that belong to it, and its counters."""
    boxes = _boxes(step, timeline, process)
    ends: dict[tuple[int, bool], list[Event]] = {}
    for key, end in _arrows(step.program, boxes, arrows):
        ends.setdefault(key, []).append(end)
    for key, box in boxes.items():
        yield box
        yield from ends.get(key, ())
    for tier in Tier:
        found = levels(step, timeline, tier)
        if any(level.nbytes for level in found):
            yield from _counter(process, tier, found)


def _boxes(step: PlannedStep, timeline: Timeline, process: int) -> dict[tuple[int, bool], Event]:
    """Map (body position, whether the box is the wait before it) to its box.

    Times are whole nanoseconds.
    """
    shown: list[Slice | StallSpan] = [*slices(step, timeline), *pauses(timeline)]
    found: dict[tuple[int, bool], Event] = {}
    threads = {track: number for number, track in enumerate(Track, process)}

    def track(box: Slice | StallSpan) -> int:
        return threads[box.track if isinstance(box, Slice) else Track.COMPUTE]

    by_track = sorted(shown, key=lambda box: (track(box), box.start_seconds, box.position))
    for thread, boxes in groupby(by_track, key=track):
        free = 0
        for box in boxes:
            start = max(free, _ns(box.start_seconds))
            free = max(start, _ns(box.stop_seconds))
            event = _slice(step, box) if isinstance(box, Slice) else _pause(box)
            event |= {"ph": "X", "pid": process, "tid": thread}
            event |= {"ts": _us(start), "dur": _us(free - start)}
            found[box.position, isinstance(box, StallSpan)] = event
    return found


def _slice(step: PlannedStep, box: Slice) -> Event:
    args: dict[str, Any] = {"site": box.site} if box.site else {}
    if box.op is not None:
        args |= {"op": box.op, "target": step.problem.trace.ops[box.op].target}
    else:
        args |= {"buffer": box.buffer, "bytes": box.nbytes}
    return {"name": box.name, "cat": box.kind.value, "args": args}


def _pause(box: StallSpan) -> Event:
    return {"name": _WAITS[box.cause], "cat": "wait", "args": {"cause": box.cause.value}}


def _arrows(
    program: Program, boxes: dict[tuple[int, bool], Event], numbers: Iterator[int]
) -> Iterator[tuple[tuple[int, bool], Event]]:
    """Arrows from each copy out, through a copy back, to the run that reads what came back.

    Yields the ends of all arrows, each with the key of the box that it belongs to.
    """
    copies = [
        (position, instruction.action)
        for position, instruction in enumerate(program.body)
        if isinstance(instruction.action, Copy)
    ]
    away = {copy.target: position for position, copy in reversed(copies)}
    readers = _first_readers(program)
    for position, copy in copies:
        if copy.source not in away:
            continue
        places = [away[copy.source], position, readers.get(copy.target)]
        met = [(p, False) for p in places if p is not None and (p, False) in boxes]
        yield from zip(met, _arrow([boxes[key] for key in met], next(numbers)), strict=False)


def _arrow(boxes: list[Event], number: int) -> Iterator[Event]:
    """One arrow through `boxes`, which are in order of time; none if there are fewer than two."""
    if len(boxes) < 2:  # noqa: PLR2004 - the two ends of an arrow
        return
    for index, box in enumerate(boxes):
        last = index == len(boxes) - 1
        phase = {"ph": "s" if index == 0 else "f" if last else "t"}
        ends = {"bp": "e"} if last else {}
        where = {name: box[name] for name in ("pid", "tid", "ts")}
        yield {**phase, "name": "offload", "cat": "offload", "id": number, **where, **ends}


def _first_readers(program: Program) -> dict[int, int]:
    """Map each slot to the body position of the first run that reads it."""
    found: dict[int, int] = {}
    for position, instruction in enumerate(program.body):
        if isinstance(instruction.action, Run):
            for slot in instruction.action.reads:
                found.setdefault(slot, position)
    return found


def _counter(process: int, tier: Tier, found: Iterable[Level]) -> Iterator[Event]:
    for level in found:
        where = {"pid": process, "tid": process, "ts": _us(_ns(level.seconds))}
        yield {"ph": "C", "name": tier.value, **where, "args": {"bytes": level.nbytes}}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _us(ns: int) -> float:
    """Microseconds that give `ns` when multiplied by 1000 and truncated to a whole number."""
    us = ns / NS_PER_US
    return us if int(us * NS_PER_US) == ns else math.nextafter(us, math.inf)
