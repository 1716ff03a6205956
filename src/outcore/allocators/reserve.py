"""reserve: predict what a real allocator would reserve on the device to serve a Program.

The program's device slots are requested and freed in its order, one after another, as if by the
compute stream; that includes the slots of copies back. A donation passes a block on. A workspace is
requested before its run and freed after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outcore.allocators.allocator import Allocator, Heap
from outcore.allocators.expandable import ExpandableHeap, Held
from outcore.allocators.spec import resolve
from outcore.ir.hardware import Tier
from outcore.ir.memory import Peak
from outcore.ir.problem import Problem
from outcore.ir.program import Action, Alloc, Free, Program, Run
from outcore.spec import spec_text

STEPS = 3
"""Training steps that are served. In later steps, requests meet what the first left cached, not an
empty device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What an allocator reserves for a program, over all steps.

    `allocator` is its spec. `live`: the most bytes requested and not freed. `reserved`: the most
    bytes that the allocator reserves for that. Both have the body position where this first
    happened. A real process ends if it needs more than `capacity_bytes`. The model goes on, so
    `reserved` shows how much is missing. `retries`: how often, in the last step, the allocator
    found the device full and gave free memory back; a GPU waits each time. `given_back_bytes`: how
    much a step gave back in this way, on average over the second half of the steps.
    """

    allocator: str
    capacity_bytes: int
    live: Peak
    reserved: Peak
    retries: int
    given_back_bytes: int

    @property
    def fragmentation(self) -> float:
        """Reserved bytes per live byte, both at their peaks; 1 if nothing is requested."""
        return self.reserved.nbytes / self.live.nbytes if self.live.nbytes else 1.0

    @property
    def met(self) -> bool:
        """Whether the device has enough memory."""
        return self.reserved.nbytes <= self.capacity_bytes


def reserve(
    problem: Problem,
    program: Program,
    allocator: str | Allocator = "best-fit",
    *,
    capacity_bytes: int | None = None,
    steps: int = STEPS,
    held: Held | None = None,
    others: Sequence[tuple[int, int]] = (),
) -> Reservation:
    """What `allocator` (a spec such as `"best-fit"`, or an instance) reserves for `program`.

    The program is served for `steps` training steps. After each, its results are freed, except what
    the caller holds. About n log n for n instructions.

    `capacity_bytes`: the size at which the allocator starts to give cached memory back; by default
    the device's capacity. `held`: the blocks that a process holds before the program runs, its
    arguments among them; only for expandable segments. `outside_bytes` count as one block; with
    `held`, that block is what `held` lacks of `outside_bytes` and the arguments. `others`: blocks
    that other code requests in each step, as (body position, bytes), and frees at the end of it.

    Raises OptionValueError for an invalid spec, and ValueError for `held` with an allocator whose
    segments do not expand.
    """
    chosen = resolve(allocator)
    if capacity_bytes is None:
        capacity_bytes = problem.hardware.capacity(Tier.DEVICE)
    process = _Process(problem, program, chosen.heap(capacity_bytes), others)
    process.begin(held)
    before = given_back = 0
    for step in range(steps):
        if step == steps // 2:
            given_back = process.heap.given_back_bytes
        before = process.heap.retries
        process.step()
    return Reservation(
        allocator=spec_text(chosen),
        capacity_bytes=capacity_bytes,
        live=process.live_peak,
        reserved=process.reserved_peak,
        retries=process.heap.retries - before,
        given_back_bytes=(process.heap.given_back_bytes - given_back) // max(1, steps - steps // 2),
    )


class _Process:
    """A heap, the blocks of live slots, and the peaks so far."""

    def __init__(
        self, problem: Problem, program: Program, heap: Heap, others: Iterable[tuple[int, int]]
    ) -> None:
        self.problem, self.program, self.heap = problem, program, heap
        self.others: defaultdict[int, list[int]] = defaultdict(list)
        """Body position -> bytes of each block of other code."""
        for position, nbytes in others:
            self.others[position].append(nbytes)
        self.slots: dict[int, int] = {}
        """Slot -> address of its block. A slot without bytes has none."""
        self.nbytes: dict[int, int] = {}
        """Address -> bytes that were requested."""
        self.live = self.position = 0
        self.live_peak = self.reserved_peak = Peak(0, 0)
        self.holds_arguments = False
        """Whether the arguments are among the blocks that the process holds."""

    def begin(self, held: Held | None) -> None:
        """Request what exists before the first step."""
        outside = self.problem.outside_bytes
        if held is not None:
            if not isinstance(self.heap, ExpandableHeap):
                raise ValueError("held: what a process holds is known where segments expand")
            self.heap.hold(held)
            self.holds_arguments = True
            slots = (self.program.slots[index] for index in self.program.arguments)
            given = sum(slot.nbytes for slot in slots if slot.tier is Tier.DEVICE)
            outside = max(0, outside + given - held.nbytes)
        self.take(outside)

    def step(self) -> None:
        """The forward and the backward call, and what follows until the next step."""
        program = self.program
        passing: list[int | None] = []
        self.position = 0
        for slot in () if self.holds_arguments else program.arguments:
            self._take_slot(slot)
        for self.position, instruction in enumerate(program.body):
            if self.position == program.boundary:
                for slot in program.tangents:
                    self._take_slot(slot)
                self._pass(self.problem.between_bytes)
            passing += map(self.take, self.others.get(self.position, ()))
            self._serve(instruction.action)
        for address in passing:
            self.give(address)
        for slot in set(program.results) - set(program.arguments):
            self._free_slot(slot)

    def take(self, nbytes: int) -> int | None:
        """The address of a new block of `nbytes`; None for 0 bytes."""
        if not nbytes:
            return None
        address = self.heap.malloc(nbytes)
        self.nbytes[address] = nbytes
        self.live += nbytes
        if self.live > self.live_peak.nbytes:
            self.live_peak = Peak(self.live, self.position)
        if self.heap.reserved_bytes > self.reserved_peak.nbytes:
            self.reserved_peak = Peak(self.heap.reserved_bytes, self.position)
        return address

    def give(self, address: int | None) -> None:
        """Free the block at `address`; None is ignored."""
        if address is not None:
            self.live -= self.nbytes.pop(address)
            self.heap.free(address)

    def _serve(self, action: Action) -> None:
        if isinstance(action, Alloc):
            self._take_slot(action.slot)
        elif isinstance(action, Free):
            self._free_slot(action.slot)
        elif isinstance(action, Run):
            cost = self.problem.profile.cost(action.op, action.variant)
            self._pass(cost.workspace_bytes)
            for source, target in action.donate:
                if source in self.slots:
                    self.slots[target] = self.slots.pop(source)

    def _pass(self, nbytes: int) -> None:
        """Request a block, and free it at the same position."""
        self.give(self.take(nbytes))

    def _take_slot(self, index: int) -> None:
        """Request a block for a device slot. An argument may still have one from the last step."""
        slot = self.program.slots[index]
        if slot.tier is not Tier.DEVICE or index in self.slots:
            return
        address = self.take(slot.nbytes)
        if address is not None:
            self.slots[index] = address

    def _free_slot(self, slot: int) -> None:
        self.give(self.slots.pop(slot, None))
