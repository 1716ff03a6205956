"""The planner: compiled before anything is timed, and kept on the disk for processes to come."""

from __future__ import annotations

from outcore.capture import trace_network
from outcore.compare import Comparison
from outcore.networks import network
from outcore.policies.search import Search
from outcore.presets import preset

MACHINE = "v100-pcie3"
NETWORK, BATCH = "resnet50-v1", 64


def compile_planner() -> None:
    """Plan a small step once: numba takes up to half a minute, where it has not yet."""
    comparison = Comparison(trace_network(network(NETWORK).small, BATCH), preset(MACHINE), BATCH)
    comparison.row(comparison.in_core_peak_bytes // 2, Search())
