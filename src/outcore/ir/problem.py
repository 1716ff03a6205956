"""Problem: everything that a policy is given: trace, profile, machine and budgets."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.ir.hardware import Hardware, Tier
from outcore.ir.profile import Profile
from outcore.ir.trace import Trace


@dataclass(frozen=True, slots=True)
class Problem:
    """A trace, what its ops cost, the machine, and the bytes that may be used.

    `budget_bytes` bounds the device, with everything counted. That includes `outside_bytes`: what
    the process holds on the device that is not one of the trace's buffers (optimizer state, old
    gradients, a safety margin). It also includes `between_bytes`: what the rest of the step needs
    between the forward and the backward call of this trace, without the tangents (a loss outside
    the graph, other graphs). `host_budget_bytes` and `disk_budget_bytes` bound the outer tiers;
    if None, the capacity of the hardware does.
    """

    trace: Trace
    profile: Profile
    hardware: Hardware
    budget_bytes: int
    host_budget_bytes: int | None = None
    disk_budget_bytes: int | None = None
    outside_bytes: int = 0
    between_bytes: int = 0

    def limit_bytes(self, tier: Tier) -> int:
        """The most bytes a program for this problem may hold in `tier`."""
        if tier is Tier.DEVICE:
            return self.budget_bytes
        given = self.host_budget_bytes if tier is Tier.HOST else self.disk_budget_bytes
        return self.hardware.capacity(tier) if given is None else given
