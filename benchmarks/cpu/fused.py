"""fused: compare fused kernels under a budget with torch's own compiler.

All workers of one run take turns step by step. Eager and Inductor have no budget; they are there
for comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.cpu.in_core import in_core_peak_bytes
from benchmarks.cpu.race import race
from benchmarks.cpu.scale import FULL, Scale
from benchmarks.cpu.worth import SLOW_LINK
from benchmarks.kit.benchmark import Patience
from benchmarks.kit.modes import Eager, Inductor, Mode, Outcore
from benchmarks.kit.rows import Row
from outcore.runtime.settings.options import DEFAULT_POLICY


def fused(scale: Scale, patience: Patience) -> Iterator[Row]:
    """Rows at full speed, then with a slower link."""
    if patience.over():
        return
    budget = int(in_core_peak_bytes(scale.workload) * scale.budget_share)
    for link in (None, SLOW_LINK) if scale.throttled else (None,):
        if patience.over():
            return
        yield from race(scale, _modes(scale, budget, link), link, patience)


def _modes(scale: Scale, budget: int, link: str | None) -> Sequence[Mode]:
    """The modes to compare, the reference first."""
    planned = (
        Outcore(DEFAULT_POLICY, budget, link),
        Outcore(DEFAULT_POLICY, budget, link, fuse=True),
    )
    if scale != FULL:
        return (Eager(), *planned)
    in_core: list[Mode] = [Outcore("keep-all", fuse=True), Inductor()] if link is None else []
    return (Eager(), *in_core, *planned, Inductor(0.5))
