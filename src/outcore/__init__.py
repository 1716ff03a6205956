"""Train PyTorch networks that do not fit in device memory.

Public names are loaded when they are first used. So `import outcore` costs nothing, and planning
needs no torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outcore.allocators import Reservation, reserve
    from outcore.api import Backend, trace
    from outcore.bound import lower_bound
    from outcore.errors import (
        BudgetError,
        CaptureError,
        DigestError,
        FormatError,
        HostMemoryError,
        InfeasibleError,
        MissingPackageError,
        NotEngagedError,
        OptionError,
        OptionValueError,
        OutcoreError,
        ParseError,
        PolicyError,
        SpillError,
        StepError,
        TargetError,
        VerifyError,
        WrapError,
    )
    from outcore.estimate import estimate
    from outcore.explain import Explanation, explain
    from outcore.ir.hardware import Hardware, Link, Tier
    from outcore.ir.plan import Gap, Keep, Offload, Plan, Recompute
    from outcore.ir.problem import Problem
    from outcore.ir.profile import Profile
    from outcore.ir.program import Program
    from outcore.ir.timeline import Timeline
    from outcore.ir.trace import Trace
    from outcore.lower import lower
    from outcore.policies import Policy
    from outcore.presets import Preset, preset
    from outcore.report import Report, report
    from outcore.simulate import simulate
    from outcore.wrapping import Session, handle, session, unwrap, wrap

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "BudgetError",
    "CaptureError",
    "DigestError",
    "Explanation",
    "FormatError",
    "Gap",
    "Hardware",
    "HostMemoryError",
    "InfeasibleError",
    "Keep",
    "Link",
    "MissingPackageError",
    "NotEngagedError",
    "Offload",
    "OptionError",
    "OptionValueError",
    "OutcoreError",
    "ParseError",
    "Plan",
    "Policy",
    "PolicyError",
    "Preset",
    "Problem",
    "Profile",
    "Program",
    "Recompute",
    "Report",
    "Reservation",
    "Session",
    "SpillError",
    "StepError",
    "TargetError",
    "Tier",
    "Timeline",
    "Trace",
    "VerifyError",
    "WrapError",
    "estimate",
    "explain",
    "handle",
    "lower",
    "lower_bound",
    "plan",
    "preset",
    "report",
    "reserve",
    "session",
    "simulate",
    "trace",
    "unwrap",
    "wrap",
]

_HOMES = {
    "Backend": "outcore.api",
    "BudgetError": "outcore.errors",
    "CaptureError": "outcore.errors",
    "DigestError": "outcore.errors",
    "Explanation": "outcore.explain",
    "FormatError": "outcore.errors",
    "Gap": "outcore.ir.plan",
    "Hardware": "outcore.ir.hardware",
    "HostMemoryError": "outcore.errors",
    "InfeasibleError": "outcore.errors",
    "Keep": "outcore.ir.plan",
    "Link": "outcore.ir.hardware",
    "MissingPackageError": "outcore.errors",
    "NotEngagedError": "outcore.errors",
    "Offload": "outcore.ir.plan",
    "OptionError": "outcore.errors",
    "OptionValueError": "outcore.errors",
    "OutcoreError": "outcore.errors",
    "ParseError": "outcore.errors",
    "Plan": "outcore.ir.plan",
    "Policy": "outcore.policies",
    "PolicyError": "outcore.errors",
    "Preset": "outcore.presets",
    "Problem": "outcore.ir.problem",
    "Profile": "outcore.ir.profile",
    "Program": "outcore.ir.program",
    "Recompute": "outcore.ir.plan",
    "Report": "outcore.report",
    "Reservation": "outcore.allocators",
    "Session": "outcore.wrapping",
    "SpillError": "outcore.errors",
    "StepError": "outcore.errors",
    "TargetError": "outcore.errors",
    "Tier": "outcore.ir.hardware",
    "Timeline": "outcore.ir.timeline",
    "Trace": "outcore.ir.trace",
    "VerifyError": "outcore.errors",
    "WrapError": "outcore.errors",
    "estimate": "outcore.estimate",
    "explain": "outcore.explain",
    "handle": "outcore.wrapping",
    "lower": "outcore.lower",
    "lower_bound": "outcore.bound",
    "preset": "outcore.presets",
    "report": "outcore.report",
    "reserve": "outcore.allocators",
    "session": "outcore.wrapping",
    "simulate": "outcore.simulate",
    "trace": "outcore.api",
    "unwrap": "outcore.wrapping",
    "wrap": "outcore.wrapping",
}
"""The module of each public name that is not defined here."""


def plan(problem: Problem, policy: str | Policy = "search") -> Plan:
    """Return the plan that `policy` makes: a spec such as `"pooch{early=true}"`, or an instance.

    Raises PolicyError if the spec is wrong, and InfeasibleError if no plan of the policy fits.
    """
    from outcore.policies import ask, resolve  # noqa: PLC0415 - they load numpy

    return ask(resolve(policy), problem)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `outcore.lower` the function: importing the module of that name would replace it."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
