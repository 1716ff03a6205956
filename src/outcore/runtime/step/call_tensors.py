"""CallTensors: the storages that a forward call was given and returned, weakly referenced.

Other code may hold them too, so they are not counted as the call's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from outcore.ir.trace import Trace
from outcore.runtime.step.pause import Storages, storages_of


@dataclass(frozen=True, slots=True)
class CallTensors:
    """Storages on one device, weakly referenced, and the trace's buffers that lie in each."""

    trace: Trace
    storages: Storages
    buffers: dict[int, frozenset[int]]
    """Address of a storage -> the buffers in it."""
    lost: frozenset[int] = frozenset()
    """Buffers whose storages were freed before later ones were added: these may have the same
    addresses."""

    def __or__(self, more: CallTensors) -> CallTensors:
        """These and `more`, which were found later."""
        there, nothing = self.storages.there(), frozenset[int]()
        buffers = {
            at: (self.buffers[at] if at in there.found else nothing) | more.buffers.get(at, nothing)
            for at in there.found.keys() | more.buffers.keys()
        }
        storages = Storages(more.storages.found | there.found)
        return CallTensors(self.trace, storages, buffers, self.gone | more.lost)

    @property
    def gone(self) -> frozenset[int]:
        """The buffers that nothing holds any more."""
        expired = (self.buffers[at] for at in self.storages.expired)
        return self.lost.union(*expired)

    @property
    def live(self) -> list[torch.UntypedStorage]:
        """The storages that something still holds."""
        return list(self.storages.live.values())

    @property
    def beyond_bytes(self) -> int:
        """Bytes of the live storages beyond what the trace counts for the buffers in them."""
        live = self.storages.live.items()
        return sum(max(0, each.nbytes() - self._nbytes(self.buffers[at])) for at, each in live)

    @property
    def gone_bytes(self) -> int:
        """Bytes that the trace counts although nothing holds them any more."""
        return self._nbytes(self.gone)

    def _nbytes(self, buffers: Iterable[int]) -> int:
        return sum(self.trace.buffers[b].nbytes for b in buffers)


def call_tensors(
    trace: Trace, pairs: Iterable[tuple[int, Any]], device: torch.device
) -> CallTensors:
    """The CallTensors of `pairs` (value number, tensor), of the tensors that are on `device`."""
    near = [(v, t) for v, t in pairs if isinstance(t, torch.Tensor) and t.device == device]
    buffers: dict[int, frozenset[int]] = {}
    for value, tensor in near:
        at = tensor.untyped_storage().data_ptr()
        buffers[at] = buffers.get(at, frozenset()) | {trace.values[value].buffer}
    return CallTensors(trace, storages_of((t for _, t in near), device, None), buffers)
