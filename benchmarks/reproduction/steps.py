"""Lab: steps of the papers' networks on the papers' machines, each traced once for all batches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.reproduction.batches import Batches
from outcore.allocators import Allocator
from outcore.capture import trace_network
from outcore.compare import ENDLESS_BYTES, Compared, Comparison
from outcore.ir.hardware import Tier
from outcore.ir.problem import Problem
from outcore.networks import network
from outcore.policies import resolve
from outcore.presets import Preset, preset

FEW, MORE = 2, 3
"""The batches that are traced. Sizes for other batches are extrapolated linearly."""


@dataclass(frozen=True, slots=True)
class Scale:
    """`small` means miniature networks, to check that everything runs; its figures mean nothing."""

    small: bool = False


@dataclass(frozen=True, slots=True)
class Lab:
    """A network, and a machine with `budget_bytes` for it. `variants`: whether its ops have any."""

    network: str
    machine: Preset
    budget_bytes: int
    scale: Scale
    sizes: tuple[tuple[str, int], ...] = ()
    variants: bool = False

    def at(self, batch: int, allocator: Allocator | None = None) -> Comparison:
        """The step with a batch. At small scale the batch is small, and so is the budget."""
        samples = min(batch, 8) if self.scale.small else batch
        sizes = () if self.scale.small else self.sizes
        trace = _traced(self.network, self.scale.small, sizes).at(samples)
        return Comparison(trace, self.machine, samples, allocator=allocator, variants=self.variants)

    def row(self, batch: int, policy: str, allocator: Allocator | None = None) -> Compared:
        """What a policy achieves within the budget at a batch."""
        comparison = self.at(batch, allocator)
        return comparison.row(self.budget_of(comparison), resolve(policy))

    def problem(self, batch: int, part: float = 1.0) -> Problem:
        """The problem that policies get, with a fraction of the budget."""
        comparison = self.at(batch)
        return comparison.problem(int(part * self.budget_of(comparison)))

    def budget_of(self, comparison: Comparison) -> int:
        """The budget; at small scale a fraction of the in-core peak."""
        small = int(0.6 * comparison.in_core.peak(Tier.DEVICE))
        return small if self.scale.small else self.budget_bytes

    def unbounded(self, batch: int, policy: str) -> Compared:
        """What a policy achieves on a device with room for everything."""
        return self.at(batch).row(ENDLESS_BYTES, resolve(policy))

    def fits(self, batch: int, policy: str, allocator: Allocator | None = None) -> bool:
        """Whether a policy has a plan at a batch."""
        return self.row(batch, policy, allocator).feasible

    def largest(
        self, batches: Sequence[int], policy: str, allocator: Allocator | None = None
    ) -> int | None:
        """The largest of `batches`, ascending, that a policy has a plan for; None if there is none.

        This is a bisection: it assumes that a policy without a plan for a batch has none for any
        larger.
        """
        fits = bisect_left(batches, True, key=lambda b: not self.fits(b, policy, allocator))
        return batches[fits - 1] if fits else None


def lab(
    name: str,
    machine: str,
    budget_bytes: int,
    scale: Scale,
    *,
    link: float | None = None,
    host: bool = True,
    **sizes: int,
) -> Lab:
    """A Lab on a preset, optionally with another link rate, or without host memory."""
    found = preset(machine)
    if not host:
        device = ((Tier.DEVICE, found.hardware.capacity(Tier.DEVICE)),)
        found = replace(found, hardware=replace(found.hardware, capacity_bytes=device))
    if link is not None:
        hardware = found.hardware
        links = tuple((a, b, replace(c, bytes_per_second=link)) for a, b, c in hardware.links)
        found = replace(found, hardware=replace(hardware, links=links))
    return Lab(name, found, budget_bytes, scale, tuple(sorted(sizes.items())))


def lost(row: Compared) -> float | None:
    """The fraction of in-core speed that a plan loses; None if there is no plan."""
    return None if row.relative_to_in_core is None else 1 - row.relative_to_in_core


@cache
def _traced(name: str, small: bool, sizes: tuple[tuple[str, int], ...]) -> Batches:  # noqa: FBT001 - a key of the cache
    spec = network(name).small if small else network(name)
    few, more = (trace_network(spec, samples, **dict(sizes)) for samples in (FEW, MORE))
    return Batches(FEW, few, MORE, more)
