"""cores: how many threads can work at once."""

from __future__ import annotations

import os
from pathlib import Path

from outcore import cgroups


def usable_cores() -> int:
    """How many of the machine's cores this thread may use, at least one.

    It may be bound to some of them. A container may have less time than these would give.
    """
    bound = getattr(os, "sched_getaffinity", None)  # some systems do not have it
    cores = len(bound(0)) if bound is not None else os.cpu_count() or 1
    quotas = (_quota(folder) for folder in cgroups.folders("cpu"))
    return max(1, min((cores, *(int(quota) for quota in quotas if quota is not None))))


def _quota(folder: Path) -> float | None:
    """The seconds of cores per second that a cgroup may use; None if it does not limit them."""
    both = cgroups.text(folder, "cpu.max")  # version 2
    if both is None:
        names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
        both = " ".join(cgroups.text(folder, name) or "" for name in names)
    quota, _, period = both.partition(" ")
    known = quota.isdigit() and period.isdigit() and int(period)
    return int(quota) / int(period) if known else None
