"""Program: a plan as a linear list of instructions on three streams.

The host issues the instructions of `body` in order. Instructions of one stream run in that order.
`after` lists the body positions that must be done before the instruction starts, so that results
are right (hazards, derived by `lower/sync.py` and proved by `ir/verify_program.py`). `pace` lists
those that the plan wants done first. Device memory is allocated and freed at positions of the
compute stream, so the peak of a tier follows from the Program alone (`ir/memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from outcore.ir.hardware import Tier


class Stream(Enum):
    """One queue of the device: compute, copies out of the device, copies back."""

    COMPUTE = "compute"
    OUT = "out"
    IN = "in"


@dataclass(frozen=True, slots=True)
class Slot:
    """One stay of one buffer in one tier. `offset` (bytes) is set for the outer tiers only."""

    id: int
    buffer: int
    tier: Tier
    nbytes: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Alloc:
    """Slot `slot` occupies memory from here on."""

    slot: int


@dataclass(frozen=True, slots=True)
class Free:
    """The memory of slot `slot` is free again."""

    slot: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy all bytes of slot `source` to slot `target`. Both are slots of the same buffer."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Run:
    """Op `op` reads and writes slots, in the order of `Trace.reads[op]` and `Trace.writes[op]`.

    `donate`: pairs (slot read, slot written); the written slot takes over the memory of the slot
    read, which ends here. `again`: this is a rerun, not the op's first run. `variant`: the
    algorithm, as an index into the op's costs (`Profile.cost`).
    """

    op: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    donate: tuple[tuple[int, int], ...] = ()
    again: bool = False
    variant: int = 0


Action: TypeAlias = Alloc | Free | Copy | Run


@dataclass(frozen=True, slots=True)
class Instruction:
    """One action, its stream, and the body positions that it waits for."""

    action: Action
    stream: Stream
    after: tuple[int, ...] = ()
    pace: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """What is executed: `body[:boundary]` is the forward call, `body[boundary:]` the backward call.

    The caller fills the slots `arguments` before the forward call and `tangents` before the
    backward call. `results` are the slots that outlive the body, one for each buffer that is held
    to the end (`ir/liveness.py`): what the two calls return, and the arguments that stay the
    caller's.
    """

    slots: tuple[Slot, ...]
    body: tuple[Instruction, ...]
    boundary: int
    arguments: tuple[int, ...]
    tangents: tuple[int, ...]
    results: tuple[int, ...]
    trace_digest: str = ""
    plan_digest: str = ""
