"""requests: what the ops of a program ask a GPU's allocator for, but for small blocks, and when."""

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
"""A result is there twice until it is copied elsewhere: larger ones take too much. An op that makes
nothing else can make them there."""

UNIT = 2 * MIB
"""Places begin and end at multiples of this. What an odd size leaves of one is held too, and so
large (more than 1 MiB) that torch has it lie where large blocks do. Where one op asks for several
blocks, each place has such a rest: beside each other, two would be one free block."""


@dataclass(slots=True)
class Block:
    """What an op asks for, in bytes as the allocator rounds them; a workspace has no slot."""

    first: int
    nbytes: int
    slot: int | None = None
    last: int = 0
    alone: bool = True
    """Whether its op asks for nothing else."""

    @property
    def stay(self) -> Stay:
        """Its time, and the bytes of its place."""
        exact = self.alone and not self.nbytes % UNIT
        rest = 0 if exact else MIB + PYTORCH.round_small
        return Stay(self.first, self.last, round_up(self.nbytes + rest, UNIT))


class Requests:
    """What the ops of a program ask for, but for small blocks."""

    def __init__(self, problem: Problem, program: Program) -> None:
        self.problem, self.program = problem, program
        self.at: dict[int, list[Block]] = {}
        """Body position -> what is asked for there, in that order."""
        self.frees: dict[int, Block] = {}
        """Body position -> what is free from there on."""
        self.guests: dict[int, Block] = {}
        """Slot that outlives the program -> the block that it lies in at first."""
        self.at_home: set[int] = set()
        """Body positions whose op asks for nothing here."""
        self._inside: dict[int, int] = {}
        """Slot -> its first one: those that lie here."""
        self._find()
        self.blocks = [block for blocks in self.at.values() for block in blocks]

    def outside_bytes(self) -> int:
        """The most that is in use besides, where what the caller gives stays until the end."""
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
        """The slots that are all of one tensor: such can be copied."""
        trace = self.problem.trace
        whole = {
            value.buffer
            for value in trace.values
            if prod(value.shape) * ITEM_BYTES[value.dtype] == trace.buffers[value.buffer].nbytes
        }
        return {slot.id for slot in self.program.slots if slot.buffer in whole}

    def fetches(self, block: Block) -> bool:
        """Whether a block is asked for by a copy back."""
        return isinstance(self.program.body[block.first].action, Copy)

    def _op(self, position: int) -> int | None:
        action = self.program.body[position].action
        return action.op if isinstance(action, Run) else None

    def writes(self, position: int) -> set[int]:
        """The slots that an op writes."""
        action = self.program.body[position].action
        return {*action.writes} if isinstance(action, Run) else set()

    def _find(self) -> None:
        """Go through the program twice: what outlives it is known in the end."""
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
        """Slot -> the body position from which its memory is free; donated memory counts as one."""
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
        blocks: list[Block] = []
        slots = [self.program.slots[index] for index in asked]
        large = any(slot.nbytes > MOST_GUEST_BYTES for slot in slots)
        # Nothing that dies within the program, whose memory would be the caller's at once; nor what
        # lies here already, donated or written over: the caller's is kept until a call is over.
        if large and lasts.keys().isdisjoint(asked) and self.writes(position) == {*asked}:
            self.at_home.add(position)
            return
        for slot in slots:
            if slot.tier is not Tier.DEVICE or slot.nbytes <= PYTORCH.small_most:
                continue
            size = round_up(slot.nbytes, PYTORCH.round_small)
            block = Block(position, size, slot.id, lasts.get(slot.id, position + 1))
            blocks.append(block)
            if slot.id in lasts:
                self.frees[block.last] = block
                self._inherit(slot.id)
            else:
                self.guests[slot.id] = block
        workspace = self._workspace_bytes(position)
        if workspace > PYTORCH.small_most:
            # Of several pieces, perhaps; and none that asks for a slot's bytes is to get its place.
            size = round_up(workspace + MIB, UNIT)
            size += UNIT * any(block.nbytes == size for block in blocks)
            blocks.append(Block(position, size, last=position + 1))
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
