"""requests: what a program's ops request from a GPU's allocator, and when; without small blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from outcore.allocators.best_fit import MIB, PYTORCH
from outcore.allocators.blocks import round_up
from outcore.allocators.packing import Stay
from outcore.ir.hardware import Tier
from outcore.ir.memory import peak
from outcore.ir.problem import Problem
from outcore.ir.program import Alloc, Copy, Free, Program, Run
from outcore.ir.verify import ITEM_BYTES

MOST_GUEST_BYTES = 256 * MIB
"""A result in the stretch is in memory twice until it is copied out of it; a larger one would need
too much. If its op makes nothing else, the op can make it outside the stretch."""

UNIT = 2 * MIB
"""Places begin and end at multiples of this. If a block's size is not a multiple, a piece holds the
remainder of its place. It is more than 1 MiB, so that torch puts the piece among large blocks. If
an op requests several blocks, each place has a remainder: without it, two adjacent places would be
one free block."""


@dataclass(slots=True)
class Request:
    """What an op requests, in bytes as the allocator rounds them. A workspace has no slot.

    It is in use from body position `first` until `last`.
    """

    first: int
    nbytes: int
    slot: int | None = None
    last: int = 0
    alone: bool = True
    """Whether its op requests nothing else."""

    @property
    def stay(self) -> Stay:
        """Its lifetime, and the bytes of its place."""
        exact = self.alone and not self.nbytes % UNIT
        rest = 0 if exact else MIB + PYTORCH.round_small
        return Stay(self.first, self.last, round_up(self.nbytes + rest, UNIT))


class Requests:
    """What the ops of a program request in a stretch, except small blocks."""

    def __init__(self, problem: Problem, program: Program) -> None:
        self.problem, self.program = problem, program
        self.at: dict[int, list[Request]] = {}
        """Body position -> the blocks requested there, in order."""
        self.frees: dict[int, Request] = {}
        """Body position -> the block that is freed there."""
        self.guests: dict[int, Request] = {}
        """Slot that outlives the program -> the block in which it lies at first."""
        self.at_home: set[int] = set()
        """Body positions whose op requests nothing in the stretch, but makes results outside."""
        self._inside: dict[int, int] = {}
        """Slot in the stretch -> the slot whose block it is in; differs if that was donated."""
        self._find()
        self.blocks = [block for blocks in self.at.values() for block in blocks]

    def outside_bytes(self) -> int:
        """The most bytes in use outside the stretch, if the caller's slots stay until the end."""
        slots = [
            replace(slot, nbytes=0) if slot.id in self._inside else slot
            for slot in self.program.slots
        ]
        profile = self.problem.profile
        ops = {self._op(block.first) for block in self.blocks if block.slot is None}
        rest = (0 if op in ops else n for op, n in enumerate(profile.workspace_bytes))
        problem = replace(self.problem, profile=replace(profile, workspace_bytes=tuple(rest)))
        given, stays = {*self.program.arguments, *self.program.tangents}, 0
        for action in (instruction.action for instruction in self.program.body):
            if isinstance(action, Run):
                given.update(target for source, target in action.donate if source in given)
            elif isinstance(action, Free) and action.slot in given:
                stays += slots[action.slot].nbytes
        program = replace(self.program, slots=tuple(slots))
        return peak(problem, program, Tier.DEVICE).nbytes + stays

    def whole(self) -> set[int]:
        """The slots that one tensor covers completely; only these can be copied."""
        trace = self.problem.trace
        whole = {
            value.buffer
            for value in trace.values
            if prod(value.shape) * ITEM_BYTES[value.dtype] == trace.buffers[value.buffer].nbytes
        }
        return {slot.id for slot in self.program.slots if slot.buffer in whole}

    def fetches(self, block: Request) -> bool:
        """Whether a block is requested by a copy back."""
        return isinstance(self.program.body[block.first].action, Copy)

    def _op(self, position: int) -> int | None:
        action = self.program.body[position].action
        return action.op if isinstance(action, Run) else None

    def writes(self, position: int) -> set[int]:
        """The slots that the op at `position` writes."""
        action = self.program.body[position].action
        return {*action.writes} if isinstance(action, Run) else set()

    def _find(self) -> None:
        """Walk the program twice, because what outlives it is known only at its end."""
        lasts = self._lasts()
        waiting: set[int] = set()
        for position, instruction in enumerate(self.program.body):
            action = instruction.action
            if isinstance(action, Alloc):
                waiting.add(action.slot)
            elif isinstance(action, Copy | Run):
                slots = (action.target,) if isinstance(action, Copy) else action.writes
                asked = [slot for slot in dict.fromkeys(slots) if slot in waiting]
                waiting.difference_update(asked)
                self._ask(position, asked, lasts)

    def _lasts(self) -> dict[int, int]:
        """Slot -> the body position at which its memory, possibly donated by then, is freed."""
        lasts: dict[int, int] = {}
        heirs: dict[int, int] = {}
        for position, instruction in enumerate(self.program.body):
            action = instruction.action
            if isinstance(action, Free):
                lasts[action.slot] = position
            elif isinstance(action, Run):
                heirs.update(action.donate)
        for slot in heirs:
            heir = slot
            while heir in heirs:
                heir = heirs[heir]
            if heir in lasts:
                lasts[slot] = lasts[heir]
            else:
                lasts.pop(slot, None)
        self._heirs = heirs
        return lasts

    def _ask(self, position: int, asked: Sequence[int], lasts: dict[int, int]) -> None:
        blocks: list[Request] = []
        slots = [self.program.slots[index] for index in asked]
        large = any(slot.nbytes > MOST_GUEST_BYTES for slot in slots)
        # Not for what is freed within the program: its memory would be free for the caller at once.
        # Nor for what is in the stretch already (donated, overwritten): the caller's memory is kept
        # until a call ends.
        if large and lasts.keys().isdisjoint(asked) and self.writes(position) == {*asked}:
            self.at_home.add(position)
            return
        for slot in slots:
            if slot.tier is not Tier.DEVICE or slot.nbytes <= PYTORCH.small_most:
                continue
            size = round_up(slot.nbytes, PYTORCH.round_small)
            block = Request(position, size, slot.id, lasts.get(slot.id, position + 1))
            blocks.append(block)
            if slot.id in lasts:
                self.frees[block.last] = block
                self._inherit(slot.id)
            else:
                self.guests[slot.id] = block
        workspace = self._workspace_bytes(position)
        if workspace > PYTORCH.small_most:
            # It may be several requests, and none of a slot's size may get that slot's place.
            size = round_up(workspace + MIB, UNIT)
            size += UNIT * any(block.nbytes == size for block in blocks)
            blocks.append(Request(position, size, last=position + 1))
        for block in blocks:
            block.alone = len(blocks) == 1
        if blocks:
            self.at[position] = blocks

    def _inherit(self, slot: int) -> None:
        heir: int | None = slot
        while heir is not None:
            self._inside[heir] = slot
            heir = self._heirs.get(heir)

    def _workspace_bytes(self, position: int) -> int:
        action = self.program.body[position].action
        if not isinstance(action, Run):
            return 0
        return self.problem.profile.cost(action.op, action.variant).workspace_bytes
