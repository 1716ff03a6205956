"""waits: find where the compute stream waits, for which copy, and why that copy was late."""

from __future__ import annotations

from outcore.explain.explanation import Late, Wait, WaitsFor
from outcore.explain.late import Lateness, lateness
from outcore.explain.scene import Scene
from outcore.explain.words import buffer_words
from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Program, Run, Stream
from outcore.ir.timeline import Cause, Stall, Timeline
from outcore.units import format_bytes


def waits_of(
    problem: Problem, plan: Plan, program: Program, timeline: Timeline
) -> tuple[Wait, ...]:
    """The stalls of `timeline` in order of time, each with its cause.

    `program` has to be lowered from `plan`: then compute waits for copies only.
    """
    if not timeline.stalls:
        return ()
    scene = Scene(problem, plan, program, timeline)
    return tuple(_wait(scene, stall) for stall in timeline.stalls)


def _wait(scene: Scene, stall: Stall) -> Wait:
    position = stall.instruction
    copy = max(scene.edges(position), key=scene.stop.__getitem__)
    slot = scene.moved(copy)
    buffer = scene.problem.trace.buffers[slot.buffer]
    waits_for = _waits_for(scene, stall, copy)
    late = lateness(scene, copy)
    run = scene.next_run(position)
    return Wait(
        waits_for=waits_for,
        seconds=stall.seconds,
        start_seconds=scene.start[position] - stall.seconds,
        op=None if run is None else run.op,
        again=run is not None and run.again,
        buffer=buffer.id,
        name=buffer.name,
        nbytes=buffer.nbytes,
        copy_seconds=scene.stop[copy] - scene.start[copy],
        late=late.late,
        behind=late.behind,
        full_op=late.full_op,
        reason=f"{_what(scene, position, copy, waits_for)}: {_why(scene, late)}",
    )


def _waits_for(scene: Scene, stall: Stall, copy: int) -> WaitsFor:
    if stall.cause is Cause.PACE:
        return WaitsFor.PLAN
    if scene.program.body[copy].stream is Stream.IN:
        return WaitsFor.COPY_BACK
    step = scene.step(stall.instruction)
    if step == len(scene.runs):
        return WaitsFor.END
    found = scene.offload(stall.instruction, scene.moved(copy).buffer)
    hint = None if found is None else found[1].release
    if hint is not None and scene.own[hint] == step:
        return WaitsFor.PLAN
    return WaitsFor.MEMORY if scene.lacks_memory(stall.instruction) else WaitsFor.CLOCK


# ---- words ---------------------------------------------------------------------------------------

_PURPOSE = {
    WaitsFor.COPY_BACK: "to come back",
    WaitsFor.MEMORY: "to be out, for its memory",
    WaitsFor.CLOCK: "to be out, a little later than planned",
    WaitsFor.END: "to be out",
}
_WHY = {
    Late.LINK: "the link was busy with {others}",
    Late.MEMORY: "there was no room for it along with {full}",
    Late.HINT: "the plan does not issue it earlier",
    Late.CALL: "it is overwritten in the backward call, so it is fetched there",
    Late.COPY_OUT: "it was still on its way out{after}",
    Late.ROOM: "its room in the outer tier was taken by {others}",
    Late.TIME: "it was issued as early as possible",
}


def _what(scene: Scene, position: int, copy: int, waits_for: WaitsFor) -> str:
    run, slot = scene.next_run(position), scene.moved(copy)
    before = "at the end" if run is None else f"before {_run_words(scene, run)}"
    buffer = scene.problem.trace.buffers[slot.buffer]
    named = f"{buffer_words(buffer.id, buffer.name)} of {format_bytes(buffer.nbytes)}"
    comes = scene.program.body[copy].stream is Stream.IN
    by_plan = "to come back" if comes else "to be out"
    purpose = _PURPOSE.get(waits_for, f"{by_plan}, as the plan asks")
    return f"{before} for {named} {purpose}"


def _why(scene: Scene, late: Lateness) -> str:
    others = _names(scene, late.behind)
    full = (
        "what waits between the calls" if late.full_op is None else _op_words(scene, late.full_op)
    )
    after = f", after {others}" if late.behind else ""
    return _WHY[late.late].format(others=others, full=full, after=after)


def _names(scene: Scene, buffers: tuple[int, ...]) -> str:
    """The last one of `buffers`, and how many came before it."""
    if not buffers:
        return "others"
    last = buffer_words(buffers[-1], scene.problem.trace.buffers[buffers[-1]].name)
    return last if len(buffers) == 1 else f"{last} and {len(buffers) - 1} before it"


def _run_words(scene: Scene, run: Run) -> str:
    return f"{_op_words(scene, run.op)}{', run again,' if run.again else ''}"


def _op_words(scene: Scene, op: int) -> str:
    return f"op {op} {scene.problem.trace.ops[op].target}"
