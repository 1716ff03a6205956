"""snapshot: write the predicted device memory in the form of `torch.cuda.memory._snapshot()`.

The viewer at pytorch.org/memory_viz draws it, and no GPU is needed. Each graph is one device trace
with one segment. Slots are placed in it first fit, in blocks of 512 bytes as in PyTorch's
allocator. The requested bytes are what the Program holds, so the peak is the Program's too.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

from outcore.allocators.first_fit import FirstFitHeap
from outcore.ir.hardware import Tier
from outcore.ir.program import Alloc, Free, Run, Stream
from outcore.report.figures import Report
from outcore.report.planned import PlannedStep

BLOCK_BYTES = 512
BASE_ADDRESS = 0x7F0000000000
"""Device addresses look like this. The viewer would take 0 for no address."""
US_PER_SECOND = 1e6

Frame = dict[str, Any]


def memory_snapshot_file(report: Report) -> bytes:
    """`memory_snapshot`, pickled: dicts, lists, strings and integers only."""
    return pickle.dumps(memory_snapshot(report), protocol=4)


def memory_snapshot(report: Report) -> dict[str, Any]:
    """What the viewer reads: the segments at the end, and all events that lead there."""
    recorders = [_recorded(device, step) for device, step in enumerate(report.steps)]
    return {
        "segments": [segment for recorder in recorders for segment in recorder.segments()],
        "device_traces": [recorder.trace() for recorder in recorders],
        "allocator_settings": {},
        "external_annotations": [],
    }


@dataclass(slots=True)
class _Block:
    address: int
    nbytes: int
    frames: list[Frame]


@dataclass(slots=True)
class _Recorder:
    """The events of one graph, and the blocks that are held at the current time."""

    device: int
    heap: FirstFitHeap = field(default_factory=lambda: FirstFitHeap(BLOCK_BYTES))
    blocks: dict[int, _Block] = field(default_factory=dict)
    """Blocks by slot. Keys below 0 are for memory that belongs to no slot."""
    events: list[dict[str, Any]] = field(default_factory=list)
    now_us: int = 0

    def take(self, key: int, nbytes: int, frames: list[Frame]) -> None:
        """Allocate `nbytes` under `key`; no block is made for 0 bytes."""
        if nbytes:
            block = _Block(BASE_ADDRESS + self.heap.malloc(nbytes), nbytes, frames)
            self.blocks[key] = block
            self._tell("alloc", block)

    def give(self, key: int) -> None:
        """Free the block under `key`, if there is one."""
        block = self.blocks.pop(key, None)
        if block is not None:
            self.heap.free(block.address - BASE_ADDRESS)
            self._tell("free_requested", block)
            self._tell("free_completed", block)

    def hand_over(self, source: int, target: int, frames: list[Frame]) -> None:
        """Give the memory of slot `source` to slot `target`, which is what a donation does."""
        block = self.blocks.pop(source, None)
        if block is not None:
            self._tell("free_requested", block)
            self._tell("free_completed", block)
            self.blocks[target] = heir = _Block(block.address, block.nbytes, frames)
            self._tell("alloc", heir)

    def _tell(self, action: str, block: _Block) -> None:
        self.events.append(_event(action, block, self.now_us))

    def trace(self) -> list[dict[str, Any]]:
        """All events, after the one that allocates the segment."""
        total = self.heap.reserved_bytes
        segment = _event("segment_alloc", _Block(BASE_ADDRESS, total, []), 0)
        return [segment, *self.events] if total else []

    def segments(self) -> list[dict[str, Any]]:
        """One segment for all addresses, with its blocks at the end; none if it was never used."""
        total = self.heap.reserved_bytes
        if not total:
            return []
        held = sorted(self.blocks.values(), key=lambda block: block.address)
        asked = sum(block.nbytes for block in held)
        taken = sum(_rounded(block.nbytes) for block in held)
        return [
            {
                "device": self.device,
                "address": BASE_ADDRESS,
                "total_size": total,
                "allocated_size": taken,
                "active_size": taken,
                "requested_size": asked,
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": [],
                "blocks": _covering(held, total),
            }
        ]


def _event(action: str, block: _Block, now_us: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": block.address,
        "size": block.nbytes,
        "stream": 0,
        "time_us": now_us,
        "frames": block.frames,
    }


def _covering(held: list[_Block], total: int) -> list[dict[str, Any]]:
    """Blocks that cover the segment from start to end, with inactive blocks in the gaps."""
    found, end = [], BASE_ADDRESS
    for block in held:
        if block.address > end:
            found.append(_block(end, block.address - end, 0, "inactive", []))
        size = _rounded(block.nbytes)
        found.append(_block(block.address, size, block.nbytes, "active_allocated", block.frames))
        end = block.address + size
    if end < BASE_ADDRESS + total:
        found.append(_block(end, BASE_ADDRESS + total - end, 0, "inactive", []))
    return found


def _block(
    address: int, size: int, requested: int, state: str, frames: list[Frame]
) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": requested,
        "state": state,
        "frames": frames,
    }


def _rounded(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def _recorded(device: int, step: PlannedStep) -> _Recorder:
    """All allocations and frees on the device, at their predicted times."""
    problem, program = step.problem, step.program
    recorder, names = _Recorder(device), _Names(step)
    outside, between, workspace = -1, -2, -3
    recorder.take(outside, problem.outside_bytes, _frames("outside: optimizer state and the like"))
    for slot in program.arguments:
        names.take(recorder, slot)
    for span in step.predicted.spans:
        position = span.instruction
        instruction = program.body[position]
        if instruction.stream is Stream.COMPUTE:
            recorder.now_us = round(span.start_seconds * US_PER_SECOND)
        if position == program.boundary:
            for slot in program.tangents:
                names.take(recorder, slot)
            recorder.take(between, problem.between_bytes, _frames("between the two calls"))
            recorder.give(between)
        action = instruction.action
        if isinstance(action, Alloc):
            names.take(recorder, action.slot)
        elif isinstance(action, Free):
            recorder.give(action.slot)
        elif isinstance(action, Run):
            nbytes = problem.profile.cost(action.op, action.variant).workspace_bytes
            recorder.take(workspace, nbytes, names.of_op(action.op, "workspace of "))
            recorder.now_us = round(span.stop_seconds * US_PER_SECOND)
            recorder.give(workspace)
            for source, target in action.donate:
                recorder.hand_over(source, target, names.of_slot(target))
    return recorder


class _Names:
    """Names of blocks, given as stack frames, which is where the viewer shows them."""

    def __init__(self, step: PlannedStep) -> None:
        self.trace, self.slots = step.problem.trace, step.program.slots
        self.makers = {b: op for op, made in enumerate(self.trace.writes) for b in made}

    def take(self, recorder: _Recorder, slot: int) -> None:
        """Allocate the memory of a slot if the slot is on the device."""
        if self.slots[slot].tier is Tier.DEVICE:
            recorder.take(slot, self.slots[slot].nbytes, self.of_slot(slot))

    def of_slot(self, slot: int) -> list[Frame]:
        """A frame that names the slot's buffer and the op that makes it."""
        buffer = self.trace.buffers[self.slots[slot].buffer]
        named = f"{buffer.name} (buffer {buffer.id})".strip()
        maker = self.makers.get(buffer.id)
        if maker is None:
            return _frames(f"{named}, {buffer.role.value}")
        return self.of_op(maker, f"{named} by ")

    def of_op(self, op: int, what: str) -> list[Frame]:
        """A frame with `what`, the op, and its place in the model."""
        made = self.trace.ops[op]
        return _frames(f"{what}op {op} {made.target}", made.site)


def _frames(name: str, site: str = "") -> list[Frame]:
    """One frame. File and line come from a site such as `layers.3.conv (net.py:41)`, if any."""
    module, _, place = site.rstrip(")").rpartition("(")
    file, _, line = place.rpartition(":")
    where = {"filename": file or "outcore", "line": int(line) if line.isdigit() else 0}
    called = f"{name} at {module.strip()}" if module.strip() else name
    return [{"name": called, **where}]
