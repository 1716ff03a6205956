"""What a plan file holds, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from outcore.ir.hardware import Tier
from outcore.ir.plan import Choice, Gap, Keep, Offload, Plan, make_plan
from outcore.ir.profile import Source


class Action(StrEnum):
    """What is done with a storage while it is idle."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


def action_of(choice: Choice) -> Action:
    """The action of a choice, however it is done."""
    if isinstance(choice, Keep):
        return Action.KEEP
    return Action.OFFLOAD if isinstance(choice, Offload) else Action.RECOMPUTE


@dataclass(frozen=True, slots=True)
class Rule:
    """One override: what becomes of the storages that `match` (a pattern of `fnmatch`) names.

    It is held against the storage's name, and against the module path, the source line
    ("model.py:41") and both together ("layers.3.conv2 (model.py:41)") of the op that makes it.
    """

    match: str
    action: Action


@dataclass(frozen=True, slots=True)
class Versions:
    """What made a file."""

    outcore: str
    python: str = ""
    torch: str = ""


@dataclass(frozen=True, slots=True)
class Use:
    """An op by its number in the trace, and what it calls."""

    op: int
    target: str


@dataclass(frozen=True, slots=True)
class SecondsMore:
    """By how much the simulated step is longer with one move changed to this and all else the same.

    0 for what the plan does, below 0 where the step would be shorter; None where it cannot be done,
    does not fit, or was not looked into.
    """

    keep: float | None = None
    offload: float | None = None
    recompute: float | None = None


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage in one idle gap in which it does not stay: one line of a file.

    `made`, `module` and `source` are those of the op that makes it; None and empty where it is
    passed in. It leaves after the op `after`, and is needed again by the op `before`. `dead`: no
    op needs it any more, and up to `before` it is held for what is recomputed, not dropped.
    """

    buffer: int
    name: str
    nbytes: int
    made: Use | None
    module: str
    source: str
    after: Use
    before: Use
    choice: Choice
    seconds_more: SecondsMore
    reason: str
    dead: bool = False

    @property
    def gap(self) -> Gap:
        """The gap, as a Plan has it."""
        return Gap(self.buffer, self.after.op, self.before.op, self.dead)

    @property
    def action(self) -> Action:
        """What is done with it."""
        return action_of(self.choice)


@dataclass(frozen=True, slots=True)
class SavedLink:
    """One direction between two tiers."""

    source: Tier
    target: Tier
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True)
class Machine:
    """What a plan was made for. `device` is the processor's name, `name` the hardware's."""

    device: str
    name: str
    duplex: bool
    links: tuple[SavedLink, ...]


@dataclass(frozen=True, slots=True)
class Digests:
    """What each noun meant (`outcore.ir.store.digest`)."""

    trace: str
    profile: str
    hardware: str
    problem: str
    plan: str


@dataclass(frozen=True, slots=True)
class Budgets:
    """The most bytes per tier; None: as the hardware has. The rest as in `Problem`."""

    device: int
    host: int | None
    disk: int | None
    outside: int
    between: int


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the plan takes, simulated; bytes are peaks per tier. In-core: with everything kept."""

    seconds: float
    in_core_seconds: float
    recompute_seconds: float
    stall_seconds: float
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    in_core_bytes: int


@dataclass(frozen=True, slots=True)
class SavedVariant:
    """An op that runs by another of its algorithms (`Plan.variants`)."""

    op: int
    target: str
    variant: int


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """One graph's plan, with what it was made from and what it comes to."""

    policy: str
    times: Source
    """Whether its profile was measured or estimated."""
    machine: Machine
    digests: Digests
    budgets: Budgets
    predicted: Predicted
    storages: tuple[Storage, ...]
    variants: tuple[SavedVariant, ...]

    def plan(self) -> Plan:
        """The plan itself, to the last hint."""
        return make_plan(
            {storage.gap: storage.choice for storage in self.storages},
            self.policy,
            self.digests.problem,
            self.digests.trace,
            {each.op: each.variant for each in self.variants},
        )


@dataclass(frozen=True, slots=True)
class PlanFile:
    """What a file holds: the plans of a training run's graphs, in order of capture."""

    versions: Versions
    plans: tuple[SavedPlan, ...]
    overrides: tuple[Rule, ...] = ()
    """The rules that the plans were made under."""
