"""vDNN (arXiv 1602.08124), and recomputation alone as MONeT publishes it."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.kit.benchmark import Patience
from benchmarks.kit.rows import Row
from benchmarks.reproduction.figure import gigabytes, number, percent
from benchmarks.reproduction.steps import Scale, lab
from outcore.compare import Compared
from outcore.ir.hardware import Tier

MONET = {
    "resnet50": (184, {10.01: 0.0322, 8.01: 0.0556, 6.00: 0.0931, 4.99: 0.1195}),
    "googlenet": (320, {4.99: 0.158}),
    "vgg16": (176, {5.51: 0.091}),
}
"""README of MONeT: batch, and GB -> overhead. It does not give VGG-16's batch: ours."""
RECOMPUTING = ("chen-sqrt{greedy=true}", "recompute-all{stay=true}")


def vdnn(scale: Scale, _patience: Patience) -> Iterator[Row]:
    """VGG-16 at batch 256 on a 12 GB Titan X."""
    found = lab("vgg16", "titan-x", 12 * 2**30, scale)
    in_core = found.at(256).in_core.peak(Tier.DEVICE)
    source = "vDNN, section 5"
    note = "the paper's has the workspaces of cuDNN's fastest algorithms"
    yield number(source, "VGG-16, batch 256: memory in-core", 28e9, in_core, gigabytes, note)
    for policy in ("vdnn-dyn", "vdnn-conv", "vdnn-all"):
        row = found.row(256, policy)
        yield number(source, f"{policy}, VGG-16, batch 256: lost", 0.18, _lost(row), percent)


def recompute(scale: Scale, patience: Patience) -> Iterator[Row]:
    """Recomputation alone: what the policies here that never copy lose, beside MONeT's optimum."""
    for name, (batch, budgets) in MONET.items():
        for gigabyte, paper in budgets.items():
            if patience.over():
                return
            found = lab(name, "p100", int(gigabyte * 1e9), scale)
            rows = {policy: _over(found.row(batch, policy)) for policy in RECOMPUTING}
            known = [over for over in rows.values() if over is not None]
            shown = "; ".join(f"{p}: {_text(over)}" for p, over in rows.items())
            note = f"the better of: {shown}"
            what = f"{name}, batch {batch}, {gigabyte} GB: more time"
            ours = min(known, default=None)
            yield number("MONeT, README", what, paper, ours, percent, note)


def _lost(row: Compared) -> float | None:
    return None if row.relative_to_in_core is None else 1 - row.relative_to_in_core


def _over(row: Compared) -> float | None:
    return None if row.relative_to_in_core is None else 1 / row.relative_to_in_core - 1


def _text(over: float | None) -> str:
    return "no plan" if over is None else percent(over)
