"""Train PyTorch networks that do not fit in device memory.

Public names are loaded when they are first used. So `import outcore` costs nothing, and planning
needs no torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from outcore.lazy import lazily

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
    from outcore.optimizers import offload_optimizer, restore_optimizer
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
    "offload_optimizer",
    "plan",
    "preset",
    "report",
    "reserve",
    "restore_optimizer",
    "session",
    "simulate",
    "trace",
    "unwrap",
    "wrap",
]

_NAMES = {
    "outcore.allocators": ("Reservation", "reserve"),
    "outcore.api": ("Backend", "trace"),
    "outcore.bound": ("lower_bound",),
    "outcore.errors": (
        "BudgetError",
        "CaptureError",
        "DigestError",
        "FormatError",
        "HostMemoryError",
        "InfeasibleError",
        "MissingPackageError",
        "NotEngagedError",
        "OptionError",
        "OptionValueError",
        "OutcoreError",
        "ParseError",
        "PolicyError",
        "SpillError",
        "StepError",
        "TargetError",
        "VerifyError",
        "WrapError",
    ),
    "outcore.estimate": ("estimate",),
    "outcore.explain": ("Explanation", "explain"),
    "outcore.ir.hardware": ("Hardware", "Link", "Tier"),
    "outcore.ir.plan": ("Gap", "Keep", "Offload", "Plan", "Recompute"),
    "outcore.ir.problem": ("Problem",),
    "outcore.ir.profile": ("Profile",),
    "outcore.ir.program": ("Program",),
    "outcore.ir.timeline": ("Timeline",),
    "outcore.ir.trace": ("Trace",),
    "outcore.lower": ("lower",),
    "outcore.optimizers": ("offload_optimizer", "restore_optimizer"),
    "outcore.policies": ("Policy",),
    "outcore.presets": ("Preset", "preset"),
    "outcore.report": ("Report", "report"),
    "outcore.simulate": ("simulate",),
    "outcore.wrapping": ("Session", "handle", "session", "unwrap", "wrap"),
}
"""Module -> its public names."""


def plan(problem: Problem, policy: str | Policy = "search") -> Plan:
    """Return the plan that `policy` makes: a spec such as `"pooch{early=true}"`, or an instance.

    Raises PolicyError if the spec is wrong, and InfeasibleError if no plan of the policy fits.
    """
    from outcore.policies import ask, resolve  # noqa: PLC0415 - they load numpy

    return ask(resolve(policy), problem)


__getattr__, __dir__ = lazily(__name__, _NAMES)


class _Package(ModuleType):
    """Keeps `outcore.lower` the function: importing the module of that name would replace it."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle and copy by name, as cloudpickle does with other modules."""
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
