"""Draft: an unfinished Program, as steps that passes can rearrange.

A step is one Run with the actions issued before and after it. Passes only move actions: `assemble`
derives streams and hazards from them (`sync`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outcore.ir.hardware import Tier
from outcore.ir.memory import added_bytes
from outcore.ir.problem import Problem
from outcore.ir.program import Action, Alloc, Copy, Free, Program, Run, Slot
from outcore.lower.sync import sync


@dataclass(slots=True)
class Step:
    """One Run, with the actions around it in order of issue.

    `awaits`: slots whose copy back the plan wants done before the run.
    """

    before: list[Action]
    run: Run
    after: list[Action]
    awaits: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Draft:
    """Slots and steps. `boundary` is the first step of the backward call; the rest: see Program."""

    slots: list[Slot]
    steps: list[Step]
    boundary: int
    arguments: tuple[int, ...]
    tangents: tuple[int, ...]
    results: tuple[int, ...]

    def first_step(self) -> dict[int, int]:
        """The step of each op's first run."""
        return {step.run.op: i for i, step in enumerate(self.steps) if not step.run.again}

    def first_step_for(self) -> dict[int, int]:
        """Per op, the first step that runs for it: its reruns come directly before it."""
        own = self.first_step()
        return {op: own[op - 1] + 1 if op else 0 for op in own}


def assemble(draft: Draft) -> Program:
    """The Program of `draft`, with streams, hazards and paces derived. Linear in actions."""
    body: list[Action] = []
    boundary = 0
    for index, step in enumerate(draft.steps):
        if index == draft.boundary:
            boundary = len(body)
        body += [*step.before, step.run, *step.after]
    if draft.boundary >= len(draft.steps):
        boundary = len(body)
    slots = tuple(draft.slots)
    paces = _paces(slots, draft.steps, body)
    return Program(
        slots, sync(slots, body, paces), boundary, draft.arguments, draft.tangents, draft.results
    )


def _paces(
    slots: Sequence[Slot], steps: Iterable[Step], body: Sequence[Action]
) -> dict[int, list[int]]:
    """Position -> the positions that should be done before it, in addition to hazards.

    A run waits for the copies in its step's `awaits`. A copy out waits for the run before it:
    drivers start a copy when it is issued, but its bytes may have been there earlier.
    """
    paces: dict[int, list[int]] = {}
    filled: dict[int, int] = {}
    left = iter(steps)
    last_run = None
    for position, action in enumerate(body):
        if isinstance(action, Run):
            last_run = position
            paces[position] = [filled[slot] for slot in next(left).awaits]
        elif isinstance(action, Copy):
            filled[action.target] = position
            leaves = slots[action.source].tier is Tier.DEVICE
            if leaves and last_run is not None:
                paces[position] = [last_run]
    return paces


@dataclass(slots=True)
class Occupancy:
    """Device bytes held during each step (with outputs and workspace), and between the calls."""

    steps: list[int]
    between: int


def occupancy(problem: Problem, draft: Draft) -> Occupancy:
    """Device bytes of `draft` by step, with everything counted. Linear in actions."""
    slots, profile = draft.slots, problem.profile
    live = problem.outside_bytes + sum(slots[s].nbytes for s in draft.arguments)
    held, between = [], 0
    for index, step in enumerate(draft.steps):
        if index == draft.boundary:
            live += sum(slots[s].nbytes for s in draft.tangents)
            between = live + problem.between_bytes
        live += sum(added_bytes(slots, action) for action in step.before)
        held.append(live + profile.cost(step.run.op, step.run.variant).workspace_bytes)
        live += sum(added_bytes(slots, action) for action in step.after)
    return Occupancy(held, between)


def crossing_slots(draft: Draft) -> frozenset[int]:
    """Slots in all tiers, except the caller's, that are live when the backward call begins."""
    alive: set[int] = set()
    for step in draft.steps[: draft.boundary]:
        for action in (*step.before, *step.after):
            if isinstance(action, Alloc):
                alive.add(action.slot)
            elif isinstance(action, Free):
                alive.discard(action.slot)
        alive.update(target for _, target in step.run.donate)
        alive.difference_update(source for source, _ in step.run.donate)
    return frozenset(alive)
