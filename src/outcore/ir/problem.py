"""Problem: the only argument of a policy."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.ir.hardware import Hardware, Tier
from outcore.ir.profile import Profile
from outcore.ir.trace import Trace


@dataclass(frozen=True, slots=True)
class Problem:
    """A trace, what it costs, the machine, and the bytes it may use.

    `budget_bytes` bounds the device, everything counted: `outside_bytes` is what the process holds
    there besides the trace's own buffers (optimizer state, old gradients, a safety margin), and
    `between_bytes` is what the rest of the step needs while this trace is suspended between its
    forward and its backward call, besides the tangents (a loss outside the graph, other graphs).
    The outer tiers are
    bounded by `host_budget_bytes` and `disk_budget_bytes`, or by the hardware where these are None.
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
