"""planner: compile the planner before anything is timed; the cache is on disk."""

from __future__ import annotations

from outcore.allocators.packing import Stay, pack
from outcore.capture import trace_network
from outcore.compare import Comparison
from outcore.networks import network
from outcore.policies.search.search import Search
from outcore.presets import preset

MACHINE = "v100-pcie3"
NETWORK, BATCH = "resnet50-v1", 64


def compile_planner() -> None:
    """Plan a small step once. If numba has to compile first, this takes up to half a minute."""
    comparison = Comparison(trace_network(network(NETWORK).small, BATCH), preset(MACHINE), BATCH)
    comparison.row(comparison.in_core_peak_bytes // 2, Search())
    pack([Stay(0, 1, 1)], 1)  # on a nearly full GPU, plans are placed, too
