"""Options: what the user can set, and Settings: the same, checked and resolved for one device."""

from __future__ import annotations

import math
import os
import resource
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch

from outcore.allocators import Card, Held
from outcore.errors import BudgetError, OptionError, OptionValueError, SpillError
from outcore.execute.arena import VARIABLE as ARENA
from outcore.execute.folders import spill_folder
from outcore.execute.torch_allocator import expand
from outcore.measure import resident_bytes
from outcore.policies import Policy, resolve
from outcore.runtime.graphs.drift import DRIFT
from outcore.runtime.limits.card import card, held
from outcore.runtime.limits.host import available_bytes, local_processes, memory_limit_bytes
from outcore.runtime.settings.reuse import Given, read_given
from outcore.units import format_bytes, parse_part, parse_rate, parse_size

DEFAULT_POLICY = "search"
"""The best policy there is. By the model, its plan is never slower than the plan it starts from."""

AUTO = "auto"
"""The budget is what is free for this process."""

PREFIX = "OUTCORE_"

ALIKE = 0.8
"""A variable whose name is at least this similar (`difflib`) to one of ours may be misspelled."""

OVER = (
    "the budget of {budget} is more than the {total} of {whose}, so a plan may need more memory "
    'than there is: lower it, or use budget="auto" for what is free'
)

LEAST_RATE = 1 << 20
"""The least `link_limit`, in bytes per second. Less is a mistake, and takes long to measure."""

PERCENT_LIKE = 10, 100
"""A number in this range as a drift is a mistake: a number of percent."""

NO_DISK_BYTES = 1
"""The budget of a missing or full disk. Not 0, so that code that needs the disk tries to use it and
reports what is wrong."""

SWITCH = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
"""Values of a boolean option in the environment."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options as given. None: from the environment, else the default.

    - `budget`: peak device bytes of the training step: "12GiB", bytes, "80%", a fraction, or "auto"
      (what is free for this process). Default: "auto" on a GPU; on a CPU it must be given.
    - `policy`: a spec such as "pooch" or "swap-all{min_bytes=4KiB}".
    - `host_budget`: the most bytes of host memory for what leaves a GPU. It has no meaning on a
      CPU, where host memory is the device. 0: none.
    - `disk_budget`: the most bytes of the spill file. 0: none.
    - `spill_dir`: the folder of the spill file. Default: the system's temporary folder, or
      `/var/tmp` if that folder is in memory.
    - `link_limit`: bytes per second per direction, 1 MiB/s or more, to imitate a slower disk on a
      CPU.
    - `drift`: the fraction of the predicted time by which steps may be slower or faster before
      their graph is planned again, once: "25%" or 0.25. Default: a quarter; "off": never.
    - `plan`: a file of plans, saved by `Backend.save_plans`. Graphs with a plan in it use that.
    - `overrides`: a file of rules that hold for any plan (docs/plan-files.md).
    - `fuse`: compile runs of elementwise ops and normalizations into one kernel each
      (docs/fusion.md).
    - `strict`: raise an error if a graph cannot be planned or is not in the file of plans, instead
      of a warning or a note.

    "auto", the default of `host_budget` and `disk_budget`, is looked up when the first graph is
    captured. It is

    - of a GPU: 31 of 32 parts of what is free or held by this process already;
    - of RAM: three quarters of what is available, plus what this process's tensors hold if RAM is
      the device;
    - of a disk: nine tenths of what is free, and no more than this process may write to one file.

    Budgets are this process's own. If several processes of one job share the RAM or a disk,
    defaults and fractions refer to this process's part of it (`host.local_processes`).
    """

    budget: str | int | float | None = None
    policy: str | Policy | None = None
    host_budget: str | int | float | None = None
    disk_budget: str | int | float | None = None
    spill_dir: str | os.PathLike[str] | None = None
    link_limit: str | float | None = None
    drift: str | float | None = None
    plan: str | os.PathLike[str] | None = None
    overrides: str | os.PathLike[str] | None = None
    fuse: bool = False
    strict: bool = False


ENVIRONMENT = {f.name: PREFIX + f.name.upper() for f in fields(Options)}
"""Option -> the environment variable that sets it."""


class Keywords(TypedDict, total=False):
    """The options that can be given by name, for editors and type checkers: all but `budget`."""

    policy: str | Policy | None
    host_budget: str | int | float | None
    disk_budget: str | int | float | None
    spill_dir: str | os.PathLike[str] | None
    link_limit: str | float | None
    drift: str | float | None
    plan: str | os.PathLike[str] | None
    overrides: str | os.PathLike[str] | None
    fuse: bool
    strict: bool


def make_options(given: Mapping[str, Any]) -> Options:
    """Options from keyword arguments.

    An environment variable replaces an option that is None or not given. Raises OptionError for an
    unknown name, OptionValueError for a boolean option that cannot be read.
    """
    known = tuple(f.name for f in fields(Options))
    for name in given:
        if name not in known:
            raise OptionError(option=name, known=known)
    _tell_misspelled()
    from_environment = {
        name: os.environ[variable]
        for name, variable in ENVIRONMENT.items()
        if os.environ.get(variable) and given.get(name) is None
    }
    merged = {**given, **from_environment}
    switches = {name: _switch(name, merged.get(name)) for name in ("fuse", "strict")}
    return Options(**{**merged, **switches})


def _tell_misspelled() -> None:
    """Warn of variables whose names are almost ours. No error: they may be of other software."""
    ours = {name.removeprefix(PREFIX): name for name in (*ENVIRONMENT.values(), ARENA)}
    for name, value in os.environ.items():
        if value and name.startswith(PREFIX) and name not in ours.values():
            near = get_close_matches(name.removeprefix(PREFIX), ours, n=1, cutoff=ALIKE)
            for found in near:
                text = f"outcore: unknown environment variable {name}: did you mean {ours[found]}?"
                warnings.warn(text, stacklevel=2)


def checked_options(given: Mapping[str, Any]) -> Options:
    """As `make_options`, but read every value once, so that a bad one fails where it is written.

    A budget that is missing or "auto" is not checked, as it depends on the device. Raises as
    `make_options` and `settings_for` do.
    """
    options = make_options(given)
    known = options if options.budget not in (None, AUTO) else replace(options, budget=1)
    settings_for(known, torch.device("cpu"))
    return options


@dataclass(frozen=True, slots=True)
class Settings:
    """The options in bytes, bytes per second and objects, for one device."""

    budget_bytes: int
    policy: Policy
    host_budget_bytes: int
    disk_budget_bytes: int
    spill_dir: Path
    link_bytes_per_second: float | None
    drift: float | None
    """The fraction of the prediction by which steps may differ. None: no graph is planned again."""
    strict: bool
    given: Given
    card: Card | None = None
    """The device if it is a GPU; else None."""
    read_held: Callable[[], Held | None] = lambda: None
    """Returns what this process holds of the GPU now; None if that is unknown, or on a CPU."""

    @property
    def rooms(self) -> tuple[int, ...]:
        """Bytes of the budget that plans should leave free if they can, smallest first."""
        return (0,) if self.card is None else self.card.rooms(self.budget_bytes)


def settings_for(options: Options, device: torch.device) -> Settings:
    """Read every option for `device`.

    Raises BudgetError, OptionValueError, PolicyError or SpillError, which name the option, and
    FormatError or DigestError for a file of plans or overrides.
    """
    spill_dir = _spill_dir(options.spill_dir)
    found = _card(device)
    budget_bytes = _budget(options.budget, device, found)
    return Settings(
        budget_bytes,
        _policy(options.policy),
        _host_budget(options.host_budget),
        _disk_budget(options.disk_budget, spill_dir),
        spill_dir,
        _link_limit(options.link_limit),
        _drift(options.drift),
        options.strict,
        read_given(options.plan, options.overrides, device),
        found,
        partial(_held, device),
    )


def over_memory(settings: Settings, device: torch.device) -> str:
    """A warning if the budget is more than the device's memory; else empty."""
    total = _device_bytes(device)
    if settings.budget_bytes <= total:
        return ""
    whose = str(device) if device.type == "cuda" else "RAM that this process may use"
    budget = format_bytes(settings.budget_bytes)
    return OVER.format(budget=budget, total=format_bytes(total), whose=whose)


def _policy(given: str | Policy | None) -> Policy:
    found = DEFAULT_POLICY if given is None or given == "" else given
    if not isinstance(found, str) and not callable(getattr(found, "plan", None)):
        reason = 'it is not a policy; write a spec such as "search", or pass an object that plans'
        raise OptionValueError(option="policy", value=given, reason=reason)
    return resolve(found)


def _spill_dir(given: str | os.PathLike[str] | None) -> Path:
    if given is None or given == "":
        return spill_folder()
    if not isinstance(given, str | os.PathLike):
        raise OptionValueError(
            option="spill_dir", value=given, reason="it is not the path of a directory"
        )
    try:
        folder = Path(given).expanduser()
    except RuntimeError as error:  # there is no such user
        raise OptionValueError(option="spill_dir", value=str(given), reason=str(error)) from error
    if not os.path.isdir(folder):  # noqa: PTH112 - Path.is_dir raises if a parent is not accessible
        there = os.path.exists(folder)  # noqa: PTH110 - as above
        reason = "it is not a directory" if there else "it does not exist, or cannot be accessed"
        raise SpillError(directory=str(folder), reason=reason)
    return folder


def _card(device: torch.device) -> Card | None:
    if device.type != "cuda":
        return None
    expand(device)
    return card(device)


def _held(device: torch.device) -> Held | None:
    return held(device) if device.type == "cuda" else None


def _budget(given: str | float | None, device: torch.device, gpu: Card | None) -> int:
    if given is None and device.type == "cpu":
        reason = (
            "on a CPU you must set the budget, for example budget='8GiB', or budget='auto' for "
            "three quarters of what is free"
        )
        raise BudgetError(option="budget", value=given, reason=reason)
    if given is None or given == AUTO:
        if gpu is not None:
            return gpu.spare_bytes
        return _spare_host_bytes() + resident_bytes(device)
    return _size("budget", given, _device_bytes(device))


def _spare_host_bytes() -> int:
    """Three quarters of the available RAM, or of this process's part of it.

    Not all of it: Linux kills a process that uses more RAM than there is, instead of refusing.
    """
    return available_bytes() * 3 // 4 // local_processes()


def _device_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return memory_limit_bytes() // local_processes()


def _host_budget(given: str | float | None) -> int:
    if given is None or given == AUTO:
        return _spare_host_bytes()
    total = memory_limit_bytes() // local_processes()
    return _size("host_budget", given, total, least_bytes=0)


def _disk_budget(given: str | float | None, spill_dir: Path) -> int:
    try:
        usage = shutil.disk_usage(spill_dir)
    except OSError:
        return NO_DISK_BYTES
    processes = local_processes()
    if given is None or given == AUTO:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)  # all that is offloaded is in one file
        most = math.inf if limit == resource.RLIM_INFINITY else limit
        return max(NO_DISK_BYTES, int(min(usage.free * 0.9 / processes, most)))
    return _size("disk_budget", given, usage.total // processes, least_bytes=0)


def _size(option: str, given: str | float, total: int, *, least_bytes: Literal[0, 1] = 1) -> int:
    try:
        return parse_size(given, total, least_bytes=least_bytes)
    except ValueError as error:
        raise BudgetError(option=option, value=given, reason=str(error)) from error


def _switch(option: str, given: object) -> bool:
    if given is None or isinstance(given, bool):
        return bool(given)
    known = SWITCH.get(given.lower()) if isinstance(given, str) else None
    if known is None:
        reason = f"write True or False; in the environment one of {', '.join(SWITCH)}"
        raise OptionValueError(option=option, value=given, reason=reason)
    return known


def _link_limit(given: str | float | None) -> float | None:
    if given is None:
        return None
    try:
        found = parse_rate(given)
    except ValueError as error:
        raise OptionValueError(option="link_limit", value=given, reason=str(error)) from error
    if found < LEAST_RATE:
        least = f"{format_bytes(LEAST_RATE)}/s is the least"
        reason = f'it is {found:g} bytes per second, and {least}: write text like "150MiB/s"'
        raise OptionValueError(option="link_limit", value=given, reason=reason)
    return found


def _drift(given: str | float | None) -> float | None:
    if given is None:
        return DRIFT
    if given == "off":
        return None
    try:
        found = parse_part(given)
    except ValueError as error:
        reason = f'{error}; or "off"'
        raise OptionValueError(option="drift", value=given, reason=reason) from error
    if "%" not in str(given) and PERCENT_LIKE[0] <= found <= PERCENT_LIKE[1]:
        reason = f'it is {found:g} times the predicted time; for percent write "{found:g}%"'
        raise OptionValueError(option="drift", value=given, reason=reason)
    return found
