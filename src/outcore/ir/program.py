"""Program: the plan as a straight list of instructions on three streams.

Position in `body` is the order in which the host issues. Instructions of one stream run in that
order. `after` holds the body positions that must be done first for the result to be right (hazards,
derived by `lower/sync.py` and proved by `ir/verify_program.py`); `pace` holds those that the plan
wants done first. Device memory is allocated and freed at positions of the compute stream, so that
the peak of a tier is a function of the Program alone (`ir/memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from outcore.ir.hardware import Tier


class Stream(Enum):
    """One queue of the device: compute, copies away from the device, copies back."""

    COMPUTE = "compute"
    OUT = "out"
    IN = "in"


@dataclass(frozen=True, slots=True)
class Slot:
    """One stay of one buffer in one tier. `offset` (bytes) is planned for the outer tiers only."""

    id: int
    buffer: int
    tier: Tier
    nbytes: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Alloc:
    """Slot `slot` takes memory from here on."""

    slot: int


@dataclass(frozen=True, slots=True)
class Free:
    """Slot `slot` gives its memory back."""

    slot: int


@dataclass(frozen=True, slots=True)
class Copy:
    """All bytes of slot `source` go to slot `target`, which is of the same buffer."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Run:
    """Op `op` reads and writes slots, in the order of `Trace.reads[op]` and `Trace.writes[op]`.

    `again`: not the first run of this op. `variant`: which of its costs it has, and so which
    algorithm it is (`Profile.cost`). `donate` holds pairs (slot read, slot written): the
    written slot takes over the memory of the one read, which ends here.
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
    """One action, its stream, and the body positions it waits for."""

    action: Action
    stream: Stream
    after: tuple[int, ...] = ()
    pace: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """What runs. `body[:boundary]` is the forward call, `body[boundary:]` the backward call.

    `arguments` and `tangents` are the slots the caller fills before each call; `results` are the
    slots that outlive the body, one of each buffer that is held (`ir/liveness.py`): what the two
    calls return, and the arguments that stay the caller's.
    """

    slots: tuple[Slot, ...]
    body: tuple[Instruction, ...]
    boundary: int
    arguments: tuple[int, ...]
    tangents: tuple[int, ...]
    results: tuple[int, ...]
    trace_digest: str = ""
    plan_digest: str = ""
