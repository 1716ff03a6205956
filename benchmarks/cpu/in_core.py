"""in_core: measure what a workload needs in plain PyTorch, which its budgets are relative to."""

from __future__ import annotations

from functools import cache

from benchmarks.cpu.trainer import Trainer, alone
from benchmarks.kit.modes import Eager
from benchmarks.kit.worker import Worker


@cache
def in_core_peak_bytes(workload: str) -> int:
    """Peak tensor bytes of an eager step, measured once in a fresh process."""
    with Worker(alone, workload, Eager()) as worker:
        worker.ask(Trainer.warm_up)
        return worker.ask(Trainer.peak_bytes)
