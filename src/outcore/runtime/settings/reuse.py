"""reuse: use saved plans, and rules that hold for any plan, in training.

A graph is profiled whether or not the file has a plan for it: the plan is judged by what is
measured here (docs/decisions/0013).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version

import torch

from outcore.errors import DigestError, InfeasibleError, OptionValueError
from outcore.ir.hardware import Tier
from outcore.ir.plan import Choice, Gap, Offload, Plan, make_plan
from outcore.ir.problem import Problem
from outcore.ir.store import digest
from outcore.ir.trace import Trace
from outcore.planfile import (
    PlanFile,
    Rule,
    SavedPlan,
    Versions,
    check_saved,
    find,
    load_overrides,
    load_plans,
    make_file,
    saved_plan,
)
from outcore.policies.search.fixed import with_fixed

OVERRULED = (
    "outcore: rules of the overrides replace choices of that plan. Without the file of plans, a "
    "plan is made around the rules"
)


@dataclass(frozen=True, slots=True)
class Given:
    """What the user gives for planning in addition to a policy; by default, nothing."""

    file: PlanFile | None = None
    path: str = ""
    """The path of the file; empty without one."""
    rules: tuple[Rule, ...] = ()
    device: str = ""
    """The name of the processor that trains."""

    def find(
        self, problem: Problem, *, strict: bool, earlier: Iterable[Trace] = ()
    ) -> SavedPlan | None:
        """The saved plan for the trace of `problem`, or None.

        `earlier`: traces of the graphs captured before; those with the same trace use the file's
        earlier plans. With `strict`, raises DigestError if there is no plan, or it is for another
        device.
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
        """Raise DigestError if the file is known to have no plan for `trace` on this device.

        `checked`: the ops of the trace ran and returned what it says. Before that, sizes and
        layouts may still be corrected, and only a trace of other ops is known to be missing.
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
        """What the report says about the file; empty without one."""
        if self.file is None:
            return ""
        if saved is None:
            return f"no plan for this graph in {self.path}: it was planned as usual"
        other = saved.machine.device
        where = "" if other == self.device else f", made for another device, {other}"
        return f"the plan is from {self.path}{where}"


def _may_be_of(saved: SavedPlan, trace: Trace) -> bool:
    """Whether the ops that a saved plan names are those of `trace`."""
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
    """Read the files of plans and overrides, for training on `device`. An empty path is none.

    Raises OptionValueError if one is no path, FormatError or DigestError, naming the file.
    """
    path, rules = _path("plan", plan), _path("overrides", overrides)
    return Given(
        load_plans(path) if path else None,
        path,
        load_overrides(rules) if rules else (),
        device_name(device),
    )


def _path(option: str, given: str | os.PathLike[str] | None) -> str:
    """The path that was given for an option, with the user's folder for `~`; empty for none."""
    if not isinstance(given, str | os.PathLike | None):
        reason = "it is not the path of a file"
        raise OptionValueError(option=option, value=given, reason=reason)
    return os.path.expanduser(os.fspath(given)) if given else ""  # noqa: PTH111 - as it is if there is no such user


def reused(problem: Problem, saved: SavedPlan, fixed: Mapping[Gap, Choice], path: str) -> Plan:
    """The saved plan for `problem`, with the choices in `fixed`.

    Raises OptionValueError if it offloads to a tier of which nothing can be used; else as
    `check_saved`.
    """
    made = saved.plan()
    digests = digest(problem), digest(problem.trace)
    plan = make_plan(with_fixed(made, fixed), made.policy, *digests, made.by_op)
    used = {choice.tier for _, choice in plan.choices if isinstance(choice, Offload)}
    for tier in (tier for tier in Tier if tier in used and not problem.hardware.capacity(tier)):
        reason = (
            f"it offloads to the {tier.value}, and none can be used here: if {tier.value}_budget "
            "is 0, raise it; if not, plan anew without the file"
        )
        raise OptionValueError(option="plan", value=path, reason=reason)
    try:
        check_saved(problem, plan, path)
    except InfeasibleError as error:
        if plan.choices != made.choices:
            error.add_note(OVERRULED)
        raise
    return plan


def save_file(
    plans: Iterable[tuple[Problem, Plan]], given: Given, most: int | None = None
) -> PlanFile:
    """A file of the given plans, in this order.

    Raises OptionValueError if there are none.
    """
    saved = [saved_plan(problem, plan, device=given.device, most=most) for problem, plan in plans]
    if not saved:
        reason = "no graph has a plan yet: outcore profiles the first steps, then it plans"
        raise OptionValueError(option="save_plans", value=None, reason=reason)
    package = import_module("outcore")  # not at the top: the package imports this module
    versions = Versions(package.__version__, platform.python_version(), version("torch"))
    return make_file(saved, versions, given.rules)


def device_name(device: torch.device) -> str:
    """The processor's name, as written in plan files."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {platform.machine()}, {os.cpu_count()} cores"
