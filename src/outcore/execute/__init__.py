"""execute: Program -> results, on a driver."""

from __future__ import annotations

from outcore.execute.check import MismatchError, checker
from outcore.execute.codegen import Instruments
from outcore.execute.driver import Driver, Lane, Region
from outcore.execute.executable import Executable, build, drawing
from outcore.execute.in_core import in_core
from outcore.execute.opening import open_driver

__all__ = [
    "Driver",
    "Executable",
    "Instruments",
    "Lane",
    "MismatchError",
    "Region",
    "build",
    "checker",
    "drawing",
    "in_core",
    "open_driver",
]
