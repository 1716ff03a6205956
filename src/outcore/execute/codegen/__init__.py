"""codegen: generate the source of a Program as two straight-line Python functions."""

from __future__ import annotations

from outcore.execute.codegen.operands import root_values
from outcore.execute.codegen.source import NONE, Instruments, StepSource
from outcore.execute.codegen.writer import generate

__all__ = ["NONE", "Instruments", "StepSource", "generate", "root_values"]
