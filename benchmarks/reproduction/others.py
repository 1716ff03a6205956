"""others: figures of vDNN (arXiv 1602.08124), and of recomputation alone as published by MONeT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.kit.benchmark import Patience
from benchmarks.kit.rows import Row
from benchmarks.reproduction.figure import gigabytes, number, percent
from benchmarks.reproduction.steps import Scale, lab, lost
from outcore.compare import Compared
from outcore.ir.hardware import Tier

MONET = {
    "resnet50": (184, {10.01: 0.0322, 8.01: 0.0556, 6.00: 0.0931, 4.99: 0.1195}),
    "googlenet": (320, {4.99: 0.158}),
    "vgg16": (176, {5.51: 0.091}),
}
"""README of MONeT: batch, and GB -> overhead. It does not give VGG-16's batch; we chose it."""
ONE = "one algorithm per convolution, in-core too"
TWO = "a second algorithm: Winograd's, all tiles in memory (docs/hardware.md)"
RECOMPUTING = ("search", "chen-sqrt{greedy=true}", "recompute-all{stay=true}")


def vdnn(scale: Scale, _patience: Patience) -> Iterator[Row]:
    """VGG-16 at batch 256 on a 12 GB Titan X: with one algorithm per convolution, and with two."""
    found = lab("vgg16", "titan-x", 12 * 2**30, scale)
    in_core = found.at(256).in_core.peak(Tier.DEVICE)
    source, network = "vDNN, section 5", "VGG-16, batch 256"
    note = "without workspaces; the paper's has those of cuDNN's fastest algorithms"
    yield number(source, f"{network}: memory in-core", 28e9, in_core, gigabytes, note)
    for policy in ("vdnn-dyn", "vdnn-conv", "vdnn-all"):
        row = found.row(256, policy)
        yield number(source, f"{policy}, {network}: lost", 0.18, lost(row), percent, ONE)
    found = replace(found, variants=True)
    oracle = found.unbounded(256, "vdnn-dyn")  # its second pass: all kept, fastest algorithms
    what = f"{network}: memory in-core, with the fastest algorithms"
    yield number(source, what, 28e9, oracle.peak_bytes, gigabytes, TWO)
    for policy in ("vdnn-dyn", "vdnn-conv", "vdnn-all"):
        row = found.row(256, policy)
        what = f"{policy}, {network}: lost of the fastest algorithms in-core"
        yield number(source, what, 0.18, _lost_of(row, oracle), percent, TWO)


def recompute(scale: Scale, patience: Patience) -> Iterator[Row]:
    """Recomputation alone, on a machine without host memory, compared with MONeT's optimum."""
    for name, (batch, budgets) in MONET.items():
        for gigabyte, paper in budgets.items():
            if patience.over():
                return
            found = lab(name, "p100", int(gigabyte * 1e9), scale, host=False)
            rows = {policy: _over(found.row(batch, policy)) for policy in RECOMPUTING}
            known = [over for over in rows.values() if over is not None]
            shown = "; ".join(f"{p}: {_text(over)}" for p, over in rows.items())
            note = f"the best of: {shown}"
            what = f"{name}, batch {batch}, {gigabyte} GB: more time"
            ours = min(known, default=None)
            yield number("MONeT, README", what, paper, ours, percent, note)


def _lost_of(row: Compared, oracle: Compared) -> float | None:
    if row.seconds is None or oracle.seconds is None:
        return None
    return 1 - oracle.seconds / row.seconds


def _over(row: Compared) -> float | None:
    return None if row.relative_to_in_core is None else 1 / row.relative_to_in_core - 1


def _text(over: float | None) -> str:
    return "no plan" if over is None else percent(over)
