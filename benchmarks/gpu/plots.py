"""plots: draw throughput and memory of a results file as PNG files next to it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GIB = 1 << 30
_BAR_INCHES = 0.28
_MEASURED, _PREDICTED, _IN_CORE = "#3b6ea5", "#d9822b", "#888888"

Values = Mapping[str, Any]


def plot(file: Path) -> tuple[Path, ...]:
    """Draw `FILE-throughput.png` and `FILE-memory.png`; nothing if matplotlib is not installed."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra
    except ImportError:
        print("no plots: matplotlib is not installed", file=sys.stderr)
        return ()
    mpl.use("Agg")
    rows = _trainings(json.loads(file.read_text(encoding="utf-8")))
    if not rows:
        return ()
    drawn = tuple(file.with_name(f"{file.stem}-{what}.png") for what in ("throughput", "memory"))
    _throughput(rows, drawn[0])
    _memory(rows, drawn[1])
    return drawn


def _trainings(found: Values) -> list[Values]:
    """The rows of all benchmarks that train, including those that failed."""
    parts = found["benchmarks"].values()
    return [row for part in parts for row in part["rows"] if "workload" in row]


def _throughput(rows: Sequence[Values], file: Path) -> None:
    figure, axes = _bars(rows)
    ratios = [row.get("of_in_core_ratio", 0) for row in rows]
    axes.barh(range(len(rows)), ratios, color=_MEASURED)
    for y, (row, ratio) in enumerate(zip(rows, ratios, strict=True)):
        if not ratio:
            axes.text(0.01, y, row["note"] or _rate(row), va="center", fontsize=7)
    axes.axvline(1, color=_IN_CORE, linewidth=1)
    axes.set_xlabel("throughput, of the step in-core")
    figure.savefig(file, dpi=120)


def _rate(row: Values) -> str:
    return f"{row['samples_per_second']:.3g} samples/s, nothing to compare with"


def _memory(rows: Sequence[Values], file: Path) -> None:
    figure, axes = _bars(rows)
    for name, height, color in (
        ("allocated_bytes", 0.8, _MEASURED),
        ("predicted_peak_bytes", 0.25, _PREDICTED),
    ):
        sizes = [row.get(name, 0) / GIB for row in rows]
        label = name.removesuffix("_bytes").replace("_", " ")
        axes.barh(range(len(rows)), sizes, height, color=color, label=label)
    caps = [(row["cap_bytes"] / GIB, y) for y, row in enumerate(rows) if "cap_bytes" in row]
    axes.plot(*zip(*caps, strict=True) if caps else ((), ()), "k|", markersize=12, label="cap")
    axes.set_xlabel("most memory in tensors of a step, GiB")
    axes.legend()
    figure.savefig(file, dpi=120)


def _bars(rows: Sequence[Values]) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    figure = Figure(figsize=(10, 1.5 + _BAR_INCHES * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.set_yticks(range(len(rows)), [f"{row['workload']}: {row['mode']}" for row in rows])
    axes.tick_params(axis="y", labelsize=8)
    axes.invert_yaxis()
    return figure, axes
