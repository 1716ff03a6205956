"""keep-all: move nothing; the fastest step, and the most memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.policies.settle import settle


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Keep everything on the device, as plain training does."""

    name: ClassVar[str] = "keep-all"
    summary: ClassVar[str] = "keep everything on the device; the fastest where it fits"

    def plan(self, problem: Problem) -> Plan:
        """The plan without choices. Raises InfeasibleError if it does not fit."""
        return settle(problem, {}, self)
