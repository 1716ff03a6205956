"""Profile: what each op of a trace costs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Source(Enum):
    """Where a figure comes from."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True)
class Profile:
    """Per op, indexed by op id: seconds alone on the device, and workspace bytes.

    The workspace of an op is the peak inside the op less what it leaves behind (its outputs).
    """

    seconds: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    source: Source
