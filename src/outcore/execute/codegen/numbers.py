"""numbers: where a trace says a number, for code that serves several sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from outcore.ir.trace import Trace
from outcore.ir.verify import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Number:
    """Where a trace says a number, or several.

    `what`: `shape`, `stride` or `offset` of Value `of`; `delta` or `bytes_after`, how far that
    begins after the Value `at`; `nbytes` of Buffer `of`; `arg`, that of op `of` at the path `at`.
    """

    what: str
    of: int
    at: tuple[int, ...] = ()

    def of_trace(self, trace: Trace) -> object:
        """The number."""
        return _NUMBERS[self.what](trace, self.of, self.at)


def _arg_at(trace: Trace, op: int, path: tuple[int, ...]) -> object:
    found: Any = trace.ops[op].arguments
    for index in path:
        found = found[index]
    return found


def _delta(trace: Trace, value: int, of: tuple[int, ...]) -> int:
    return trace.values[value].offset - trace.values[of[0]].offset


def _bytes_after(trace: Trace, value: int, of: tuple[int, ...]) -> int:
    here, root = trace.values[value], trace.values[of[0]]
    return here.offset * ITEM_BYTES[here.dtype] - root.offset * ITEM_BYTES[root.dtype]


_NUMBERS: Final[dict[str, Callable[[Trace, int, tuple[int, ...]], object]]] = {
    "shape": lambda trace, of, _: trace.values[of].shape,
    "stride": lambda trace, of, _: trace.values[of].stride,
    "offset": lambda trace, of, _: trace.values[of].offset,
    "nbytes": lambda trace, of, _: trace.buffers[of].nbytes,
    "delta": _delta,
    "bytes_after": _bytes_after,
    "arg": _arg_at,
}
