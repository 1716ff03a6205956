"""reuse: plans that are saved and used again, and rules that hold for any plan, in what trains.

A graph is profiled whether or not a file has a plan for it: what the plan takes is judged by what
is measured here (docs/decisions/0013).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version

import torch

from outcore.errors import DigestError, OptionValueError
from outcore.ir.plan import Choice, Gap, Plan, make_plan
from outcore.ir.problem import Problem
from outcore.ir.store import digest
from outcore.ir.trace import Trace
from outcore.lower import lower
from outcore.planfile import (
    PlanFile,
    Rule,
    SavedPlan,
    Versions,
    check_saved_fits,
    find,
    load_overrides,
    load_plans,
    make_file,
    saved_plan,
)
from outcore.policies.search_fixed import with_fixed


@dataclass(frozen=True, slots=True)
class Given:
    """What planning has to go by beside a policy; nothing, as a rule."""

    file: PlanFile | None = None
    path: str = ""
    """Where the file lies."""
    rules: tuple[Rule, ...] = ()
    device: str = ""
    """The processor that trains."""

    def find(
        self, problem: Problem, *, strict: bool, earlier: Iterable[Trace] = ()
    ) -> SavedPlan | None:
        """The saved plan for the trace of `problem`, if there is one.

        `earlier`: the graphs that were captured before. Those of the same trace have plans before.
        Raises DigestError with `strict` where there is none, or it was made for another device.
        """
        if self.file is None:
            return None
        trace = digest(problem.trace)
        saved = find(self.file, trace, sum(digest(other) == trace for other in earlier))
        if saved is None and strict:
            raise self._unknown(self.file, trace)
        if saved is not None and strict:
            self._check_device(saved)
        return saved

    def check_known(self, trace: Trace, *, checked: bool) -> None:
        """Raise DigestError where the file is known to have no plan for `trace` on this device.

        `checked`: its ops have run, and returned what it says. Before that sizes and layouts may
        yet be corrected, and only a trace of other ops is known to be another.
        """
        if self.file is None:
            return
        saved = find(self.file, digest(trace))
        if saved is not None:
            self._check_device(saved)
        elif checked or not any(_may_be_of(each, trace) for each in self.file.plans):
            raise self._unknown(self.file, digest(trace))

    def _check_device(self, saved: SavedPlan) -> None:
        made_for, here = saved.machine.device, self.device
        if made_for != here:
            raise DigestError(
                noun="plan", made_for=made_for, expected=here, of="device", file=self.path
            )

    def _unknown(self, file: PlanFile, trace: str) -> DigestError:
        made_for = ", ".join(plan.digests.trace for plan in file.plans)
        return DigestError(noun="plan", made_for=made_for, expected=trace, file=self.path)

    def note(self, saved: SavedPlan | None) -> str:
        """What the report says of the file; empty without one."""
        if self.file is None:
            return ""
        if saved is None:
            return f"no plan for this graph in {self.path}: it was planned as usual"
        other = saved.machine.device
        where = "" if other == self.device else f", where it was made for another device, {other}"
        return f"the plan is from {self.path}{where}"


def _may_be_of(saved: SavedPlan, trace: Trace) -> bool:
    """Whether the ops that a plan names are those of `trace`."""
    ops = dict(enumerate(op.target for op in trace.ops))
    uses = (use for each in saved.storages for use in (each.made, each.after, each.before))
    named = [(use.op, use.target) for use in uses if use is not None]
    named += [(each.op, each.target) for each in saved.variants]
    return all(ops.get(op) == target for op, target in named)


def read_given(
    plan: str | os.PathLike[str] | None,
    overrides: str | os.PathLike[str] | None,
    device: torch.device,
) -> Given:
    """Read the files, for what trains on `device`.

    Raises FormatError or DigestError, naming them.
    """
    return Given(
        None if plan is None else load_plans(plan),
        "" if plan is None else os.fspath(plan),
        () if overrides is None else load_overrides(overrides),
        device_name(device),
    )


def reused(problem: Problem, saved: SavedPlan, fixed: Mapping[Gap, Choice], path: str) -> Plan:
    """The saved plan, with what is `fixed`, for `problem`.

    Raises VerifyError where it is no plan for the problem, InfeasibleError where it does not fit.
    """
    made = saved.plan()
    digests = digest(problem), digest(problem.trace)
    plan = make_plan(with_fixed(made, fixed), made.policy, *digests, made.by_op)
    lower(problem, plan)  # verified, pass by pass
    check_saved_fits(problem, plan, path)
    return plan


def save_file(
    plans: Iterable[tuple[Problem, Plan]], given: Given, most: int | None = None
) -> PlanFile:
    """The file of what was planned, in this order.

    Raises OptionValueError where that is nothing.
    """
    saved = [saved_plan(problem, plan, device=given.device, most=most) for problem, plan in plans]
    if not saved:
        reason = "no graph has a plan yet: the first steps are profiled, then they are planned"
        raise OptionValueError(option="save_plans", value=None, reason=reason)
    package = import_module("outcore")  # not above: its public names come from here
    versions = Versions(package.__version__, platform.python_version(), version("torch"))
    return make_file(saved, versions, given.rules)


def device_name(device: torch.device) -> str:
    """The processor's name, as plan files tell it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {platform.machine()}, {os.cpu_count()} cores"
