"""command: trace each network, and write its figures to src/outcore/networks/figures.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from outcore.capture import trace_network
from outcore.estimate import flops
from outcore.ir.liveness import crossing_gaps
from outcore.ir.trace import Role, Trace
from outcore.networks import NETWORKS, NetworkSpec, network
from outcore.networks.figures import FILE, Figures

FLOAT_BYTES = 4
PATH = Path(__file__).parents[2] / "src" / "outcore" / "networks" / FILE


def main(names: Sequence[str] | None = None) -> None:
    """Compute the networks named on the command line, or all; others keep their figures."""
    chosen = sys.argv[1:] if names is None else names
    for name in chosen or NETWORKS:
        found = measure(network(name))
        print(f"{name}: {found}", flush=True)
        save(name, found)


def save(name: str, found: Figures) -> None:
    """Put one network's figures in the file, and remove networks that no longer exist."""
    known = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
    known[name] = asdict(found)
    kept = {each: known[each] for each in NETWORKS if each in known}
    PATH.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def measure(spec: NetworkSpec) -> Figures:
    """The figures of a network: batch 3 minus batch 2, since batch norm needs two samples."""
    two, three = (trace_network(spec, samples) for samples in (2, 3))
    parameters = sum(b.nbytes for b in two.buffers if b.role is Role.PARAM) // FLOAT_BYTES
    saved = _saved_bytes(three) - _saved_bytes(two)
    return Figures(parameters, saved, sum(flops(three)) - sum(flops(two)))


def _saved_bytes(trace: Trace) -> int:
    return sum(trace.buffers[b].nbytes for b in {gap.buffer for gap in crossing_gaps(trace)})
