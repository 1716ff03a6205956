"""places: find where in a model an op comes from, and the names by which rules match storages."""

from __future__ import annotations

from outcore.ir.liveness import liveness
from outcore.ir.trace import Trace


def place(site: str) -> tuple[str, str]:
    """Module path and source line of an op's site, such as `layers.3.conv2 (model.py:41)`."""
    path, opened, source = site.rpartition("(")
    if not opened or not source.endswith(")"):
        path, source = site, ")"
    return path.strip(), source[:-1]


def labels(trace: Trace) -> list[tuple[str, ...]]:
    """For each buffer, the words that a rule may match: its name, and where it is made."""
    producer = liveness(trace).producer
    return [
        tuple(filter(None, (buffer.name, *_made_at(trace, producer[buffer.id]))))
        for buffer in trace.buffers
    ]


def _made_at(trace: Trace, op: int | None) -> tuple[str, ...]:
    if op is None:
        return ()
    module, source = place(trace.ops[op].site)
    both = f"{module} ({source})" if module and source else ""
    return module, source, both, trace.ops[op].site
