"""policy: PoochPolicy, the options and planning of swap-all, swap-opt, pooch and cheap."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from outcore.ir.plan import Plan
from outcore.ir.problem import Problem
from outcore.policies.policy import MIN_BYTES, check_min_bytes
from outcore.policies.pooch.log import Kind
from outcore.policies.pooch.model import PoochModel
from outcore.policies.pooch.plan import pooch_plan, published


@dataclass(frozen=True, slots=True)
class PoochPolicy(ABC):
    """A policy that decides over PoocH's model of a step. A subclass says how, and adds no option.

    Candidates are buffers of at least `min_bytes`. Copies back are issued as in PoocH's code. With
    `early`, lowering issues each one as early as memory allows, and the decisions assume that.
    """

    name: ClassVar[str]
    summary: ClassVar[str]

    min_bytes: int = MIN_BYTES
    early: bool = False

    def __post_init__(self) -> None:
        check_min_bytes(self, self.min_bytes)

    @abstractmethod
    def decide(self, model: PoochModel) -> Sequence[Kind]:
        """One kind per target of `model`, in their order."""

    def plan(self, problem: Problem) -> Plan:
        """The plan of `decide`. Raises InfeasibleError if not even offloading everything fits."""
        schedule = None if self.early else published
        return pooch_plan(problem, self, self.min_bytes, self.decide, schedule)
