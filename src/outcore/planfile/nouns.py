"""nouns: the data classes of a plan file's content."""

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
    """The action of a choice, without how it is done."""
    if isinstance(choice, Keep):
        return Action.KEEP
    return Action.OFFLOAD if isinstance(choice, Offload) else Action.RECOMPUTE


@dataclass(frozen=True, slots=True)
class Rule:
    """One override: the action for all storages that the pattern `match` (as in `fnmatch`) matches.

    The pattern is compared with the storage's name, and, for the op that makes it, with the module
    path, the source line ("model.py:41") and both together ("layers.3.conv2 (model.py:41)").
    """

    match: str
    action: Action


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions of the software that made a file."""

    outcore: str
    python: str = ""
    torch: str = ""


@dataclass(frozen=True, slots=True)
class Use:
    """An op: its number in the trace, and what it calls."""

    op: int
    target: str


@dataclass(frozen=True, slots=True)
class SecondsMore:
    """By how much the simulated step is longer if one move is changed to each action.

    Everything else is unchanged. It is 0 for what the plan does, and below 0 if the step would be
    shorter. It is None if the action is impossible, does not fit, or was not evaluated.
    """

    keep: float | None = None
    offload: float | None = None
    recompute: float | None = None


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage in one idle gap in which the plan departs from the default: one line of a file."""

    buffer: int
    """Number of the storage's buffer in the trace."""
    name: str
    nbytes: int
    made: Use | None
    """The op that makes it; None if the caller passes it in."""
    module: str
    """Module path of that op; empty if not known."""
    source: str
    """Source line of that op; empty if not known."""
    after: Use
    """The last op that uses it before the gap."""
    before: Use
    """The op that needs it again."""
    choice: Choice
    """What the plan does with it in the gap."""
    seconds_more: SecondsMore
    """What the alternatives would cost."""
    reason: str
    """What the alternatives would cost, in words; empty if not computed."""
    dead: bool = False
    """No op needs it any more: it is held for recomputations until `before`, not dropped."""

    @property
    def gap(self) -> Gap:
        """The gap in the form of a Plan."""
        return Gap(self.buffer, self.after.op, self.before.op, self.dead)

    @property
    def action(self) -> Action:
        """What is done with it."""
        return action_of(self.choice)


@dataclass(frozen=True, slots=True)
class SavedLink:
    """One direction of the link between two tiers."""

    source: Tier
    target: Tier
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that a plan was made for."""

    device: str
    """Name of the processor."""
    name: str
    """Name of the hardware description."""
    duplex: bool
    """Whether both directions run at full rate at the same time, as in `Hardware`."""
    links: tuple[SavedLink, ...]


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of a plan and of all that it was made from (`outcore.ir.store.digest`)."""

    trace: str
    profile: str
    hardware: str
    problem: str
    plan: str


@dataclass(frozen=True, slots=True)
class Budgets:
    """The most bytes per tier; None means as much as the hardware has."""

    device: int
    host: int | None
    disk: int | None
    outside: int
    """`Problem.outside_bytes`."""
    between: int
    """`Problem.between_bytes`."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """Simulated figures of the plan. Bytes are peaks per tier; in-core means everything kept."""

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
    """An op that runs with another of its algorithms (`Plan.variants`)."""

    op: int
    target: str
    variant: int


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """The plan of one graph, what it was made from, and what it leads to."""

    policy: str
    times: Source
    """Whether the profile was measured or estimated."""
    machine: Machine
    digests: Digests
    budgets: Budgets
    predicted: Predicted
    storages: tuple[Storage, ...]
    variants: tuple[SavedVariant, ...]

    def plan(self) -> Plan:
        """The plan itself, with all its hints."""
        return make_plan(
            {storage.gap: storage.choice for storage in self.storages},
            self.policy,
            self.digests.problem,
            self.digests.trace,
            {each.op: each.variant for each in self.variants},
        )


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The content of a file: the plans of a training run's graphs, in order of capture."""

    versions: Versions
    plans: tuple[SavedPlan, ...]
    overrides: tuple[Rule, ...] = ()
    """The rules that the plans were made under."""
