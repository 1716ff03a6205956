"""execute: run a Program on a device, through a driver."""

from __future__ import annotations

from outcore.execute.check import MismatchError, checker
from outcore.execute.codegen import Instruments
from outcore.execute.driver import Driver, Lane, Region
from outcore.execute.executable import Executable, build, drawing
from outcore.execute.in_core import in_core
from outcore.execute.opening import open_driver
from outcore.execute.placed import Fate, PlacedLane
from outcore.execute.queued import QueuedDriver

__all__ = [
    "Driver",
    "Executable",
    "Fate",
    "Instruments",
    "Lane",
    "MismatchError",
    "PlacedLane",
    "QueuedDriver",
    "Region",
    "build",
    "checker",
    "drawing",
    "in_core",
    "open_driver",
]
