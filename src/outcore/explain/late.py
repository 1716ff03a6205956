"""late: find out why a copy was not done sooner."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.explain.explanation import Late
from outcore.explain.scene import Scene
from outcore.ir.program import Free, Stream


@dataclass(frozen=True, slots=True)
class Lateness:
    """What the start of a copy waited for; `behind` and `full_op` are as in `Wait`."""

    late: Late
    behind: tuple[int, ...] = ()
    full_op: int | None = None


def lateness(scene: Scene, position: int) -> Lateness:
    """What the copy at body position `position` waited for."""
    leaves = scene.program.body[position].stream is Stream.OUT
    return _late_out(scene, position) if leaves else _late_back(scene, position)


def _late_out(scene: Scene, position: int) -> Lateness:
    start, issued = scene.start[position], scene.done(scene.edges(position))
    owners = scene.edges(scene.alloc[scene.copies[position].target])
    if scene.done(owners) == start > issued:
        return Lateness(Late.ROOM, _freed_buffers(scene, owners))
    if start > issued:
        return _behind_others(scene, position, issued)
    found = scene.offload(position, scene.moved(position).buffer)
    # It is issued right after its last use, or later if the plan's `depart` says so.
    behind_use = found is None or scene.step(position) <= scene.own[found[0].after] + 1
    return Lateness(Late.TIME if behind_use else Late.HINT)


def _late_back(scene: Scene, position: int) -> Lateness:
    start = scene.start[position]
    issued = scene.start[scene.alloc[scene.copies[position].target]]
    out = scene.done(scene.edges(position))
    if start > max(issued, out):
        return _behind_others(scene, position, max(issued, out))
    if out > issued:
        return _after_copy_out(scene, position)
    return _issued_late(scene, position)


def _behind_others(scene: Scene, position: int, ready: float) -> Lateness:
    """The copy's stream was busy from `ready`, when the copy could have begun, until it began."""
    stream, start = scene.program.body[position].stream, scene.start[position]
    # If no copy was running on the stream, it waited to free an outer slot, whose copy out was
    # not done.
    behind = scene.under_way(stream, ready, start)
    if not behind:
        out, own = scene.under_way(Stream.OUT, ready, start), scene.moved(position).buffer
        behind = tuple(buffer for buffer in out if buffer != own)
    return Lateness(Late.LINK, behind)


def _after_copy_out(scene: Scene, position: int) -> Lateness:
    """The buffer's own copy out was not done; `behind` lists copies that delayed that, if any."""
    out = max(scene.edges(position), key=scene.stop.__getitem__)
    behind = _late_out(scene, out).behind if out in scene.copies else ()
    return Lateness(Late.COPY_OUT, behind)


def _issued_late(scene: Scene, position: int) -> Lateness:
    """Why the copy back was not issued a step sooner (`lower/prefetch.py`)."""
    budget, step = scene.problem.budget_bytes, scene.step(position)
    slot = scene.program.slots[scene.copies[position].target]
    if step and scene.held[scene.positions[step - 1]] + slot.nbytes > budget:
        return Lateness(Late.MEMORY, full_op=scene.runs[step - 1].op)
    if step == scene.boundary_step:
        if scene.between_bytes + slot.nbytes > budget:
            return Lateness(Late.MEMORY)
        if _is_written_over(scene, slot.id):
            return Lateness(Late.CALL)
    found = scene.offload(position, slot.buffer)
    hint = None if found is None else found[1].prefetch
    if hint is not None and scene.first_step_for(hint) == step:
        return Lateness(Late.HINT)
    return Lateness(Late.TIME)


def _is_written_over(scene: Scene, slot: int) -> bool:
    return any(slot == gone for run in scene.runs for gone, _ in run.donate)


def _freed_buffers(scene: Scene, positions: tuple[int, ...]) -> tuple[int, ...]:
    """Buffers of the slots that are freed at `positions`."""
    actions = (scene.program.body[position].action for position in positions)
    slots = (scene.program.slots[a.slot] for a in actions if isinstance(a, Free))
    return tuple(dict.fromkeys(slot.buffer for slot in slots))
