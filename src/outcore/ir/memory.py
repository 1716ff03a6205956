"""memory: how many bytes a Program holds in each tier, by body position.

Everything here follows from the Program and its Problem; nothing runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from outcore.ir.hardware import Tier, staging_bytes
from outcore.ir.plan import Offload, Plan
from outcore.ir.problem import Problem
from outcore.ir.program import Action, Alloc, Free, Program, Run, Slot
from outcore.ir.trace import Trace


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that a tier holds, and the body position at which it does."""

    nbytes: int
    position: int


def held_bytes(problem: Problem, program: Program, tier: Tier) -> tuple[int, ...]:
    """Bytes held in `tier` while the instruction at each body position runs.

    On the device this counts the caller's slots and `outside_bytes`, and during a Run its workspace
    and its outputs. The first backward position also counts `between_bytes`, for the time between
    the two calls.
    """
    device = tier is Tier.DEVICE
    slots, profile = program.slots, problem.profile
    live = sum(slots[s].nbytes for s in program.arguments if slots[s].tier is tier)
    live += problem.outside_bytes if device else 0
    held = []
    for position, instruction in enumerate(program.body):
        if position == program.boundary and device:
            live += sum(slots[s].nbytes for s in program.tangents)
        action = instruction.action
        before, live = live, live + added_bytes(slots, action, tier)
        inside = max(before, live)
        if device and isinstance(action, Run):
            inside += profile.cost(action.op, action.variant).workspace_bytes
        if device and position == program.boundary:
            inside = max(inside, before + problem.between_bytes)
        held.append(inside)
    return tuple(held)


def added_bytes(slots: Sequence[Slot], action: Action, tier: Tier = Tier.DEVICE) -> int:
    """Bytes that `action` adds to what `tier` holds; negative for a Free there."""
    if not isinstance(action, Alloc | Free) or slots[action.slot].tier is not tier:
        return 0
    nbytes = slots[action.slot].nbytes
    return nbytes if isinstance(action, Alloc) else -nbytes


def peak(problem: Problem, program: Program, tier: Tier) -> Peak:
    """The peak of `tier` over the whole program; (0, 0) for an empty body."""
    held = held_bytes(problem, program, tier)
    if not held:
        return Peak(0, 0)
    position = max(range(len(held)), key=held.__getitem__)
    return Peak(held[position], position)


def crossing_bytes(program: Program) -> int:
    """Device bytes held between the two calls, without the caller's arguments."""
    passed_in = frozenset(program.arguments)  # some are freed in forward
    actions = (instruction.action for instruction in program.body[: program.boundary])
    total = 0
    for action in actions:
        if isinstance(action, Run):  # the memory of an argument that a result takes over
            taken = (target for source, target in action.donate if source in passed_in)
            total += sum(program.slots[target].nbytes for target in taken)
        elif not (isinstance(action, Free) and action.slot in passed_in):
            total += added_bytes(program.slots, action)
    return total


def private_bytes(trace: Trace, program: Program) -> int:
    """The part of `crossing_bytes` that only outcore holds: what forward does not return."""
    return sum(slot.nbytes for slot in private_slots(trace, program))


def private_slots(trace: Trace, program: Program) -> tuple[Slot, ...]:
    """The slots of `private_bytes`."""
    returned = set(trace.value_buffers(trace.outputs))
    crossing = _crossing(program).values()
    return tuple(slot for slot in crossing if slot.buffer not in returned)


@dataclass(frozen=True, slots=True)
class Ahead:
    """Device bytes that two calls hold beyond those held as the call in question begins."""

    forward_bytes: int
    """The most within the forward call."""
    waiting_bytes: int
    """After the forward call, once the tangents exist. Negative if it freed more than it made."""
    backward_bytes: int
    """The most within the backward call."""

    def until_backward(self, between_bytes: int) -> int:
        """The most until the backward call, for which the rest of the step needs that many."""
        return max(self.forward_bytes, self.waiting_bytes + between_bytes)

    def in_all(self, between_bytes: int) -> int:
        """The most until the backward call is over."""
        backward_bytes = self.waiting_bytes + self.backward_bytes
        return max(self.until_backward(between_bytes), backward_bytes)


def ahead(problem: Problem, program: Program) -> Ahead:
    """What the two calls of `program` hold beyond what is held as they begin."""
    alone = replace(problem, outside_bytes=0, between_bytes=0)
    held, cut = held_bytes(alone, program, Tier.DEVICE), program.boundary
    arguments = sum(slot.nbytes for slot in _on_device(program, program.arguments))
    waiting = waiting_bytes(program)
    return Ahead(
        max(0, max(held[:cut], default=0) - arguments),
        waiting - arguments,
        max(0, max(held[cut:], default=0) - waiting),
    )


def reread_bytes(trace: Trace, program: Program, buffers: Collection[int]) -> int:
    """Bytes of the buffers among `buffers` that the backward call reads."""
    runs = (instruction.action for instruction in program.body[program.boundary :])
    read = {program.slots[s].buffer for run in runs if isinstance(run, Run) for s in run.reads}
    return sum(trace.buffers[b].nbytes for b in read.intersection(buffers))


def pause_bytes(problem: Problem, program: Program) -> int:
    """Device bytes that the budget leaves free between the two calls, once the tangents exist."""
    return problem.limit_bytes(Tier.DEVICE) - problem.outside_bytes - waiting_bytes(program)


def waiting_bytes(program: Program) -> int:
    """Device bytes held between the two calls, once the tangents exist."""
    passed_in = _on_device(program, (*program.arguments, *program.tangents))
    actions = (instruction.action for instruction in program.body[: program.boundary])
    made = sum(added_bytes(program.slots, action) for action in actions)
    return sum(slot.nbytes for slot in passed_in) + made


def _on_device(program: Program, slots: Iterable[int]) -> list[Slot]:
    return [slot for s in slots if (slot := program.slots[s]).tier is Tier.DEVICE]


def _crossing(program: Program) -> dict[int, Slot]:
    """The device slots that are live at the boundary and that forward made, by slot id."""
    live = {}
    for instruction in program.body[: program.boundary]:
        action = instruction.action
        if isinstance(action, Alloc):
            live[action.slot] = program.slots[action.slot]
        elif isinstance(action, Free):
            live.pop(action.slot, None)
        elif isinstance(action, Run):
            for source, target in action.donate:
                live.pop(source, None)  # an argument is not in it
                live[target] = program.slots[target]
    return {number: slot for number, slot in live.items() if slot.tier is Tier.DEVICE}


def retained_bytes(problem: Problem, program: Program) -> int:
    """How much the device's peak rises if backward frees nothing that crosses the boundary.

    This is the case if another backward call needs it too (`retain_graph`).
    """
    held = held_bytes(problem, program, Tier.DEVICE)
    actions = [instruction.action for instruction in program.body]
    backward = actions[program.boundary :]
    own = set(program.tangents)
    for action in backward:
        if isinstance(action, Alloc):
            own.add(action.slot)
        elif isinstance(action, Run):
            own.update(target for _, target in action.donate)
    stays, most = 0, 0
    for nbytes, action in zip(held[program.boundary :], backward, strict=True):
        most = max(most, nbytes + stays)
        if isinstance(action, Free) and action.slot not in own:
            stays -= added_bytes(program.slots, action)
    return max(0, most - max(held, default=0))


def extent_bytes(program: Program, tier: Tier) -> int:
    """Bytes from the start of an outer tier to the end of its last slot."""
    return max((s.offset + s.nbytes for s in program.slots if s.tier is tier), default=0)


def tier_bytes(problem: Problem, program: Program, tier: Tier) -> int:
    """Bytes of `tier` that the program needs: the peak on the device, the extent elsewhere."""
    if tier is Tier.DEVICE:
        return peak(problem, program, tier).nbytes
    return extent_bytes(program, tier)


def staging_needed(trace: Trace, plan: Plan) -> int:
    """Host memory through which the copies of `plan` to and from a disk pass."""
    through = (
        trace.buffers[gap.buffer].nbytes
        for gap, choice in plan.choices
        if isinstance(choice, Offload) and choice.tier is Tier.DISK
    )
    return staging_bytes(max(through, default=0))


def fits(problem: Problem, program: Program) -> bool:
    """Whether the program stays within the problem's limit in every tier."""
    return all(tier_bytes(problem, program, tier) <= problem.limit_bytes(tier) for tier in Tier)
