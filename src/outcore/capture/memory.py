"""memory: where the tensors of a graph lie: its buffers, one for each storage, and its Values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from outcore import aten
from outcore.capture.nodes.storages import covered_bytes, storage_id
from outcore.errors import CaptureError
from outcore.ir.trace import Buffer, Donation, Role, Value
from outcore.ir.verify import ITEM_BYTES

_HOST: Final = torch.device("cpu")


class OutsideError(Exception):
    """A view reaches beyond the part of a `storage` that its input stands for."""

    def __init__(self, storage: int) -> None:
        super().__init__(storage)
        self.storage = storage


class Memory:
    """Collects the buffers of a graph, and the Values that lie in them."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        """By id."""
        self.values: list[Value] = []
        """By id."""
        self._devices: set[torch.device] = set()
        """Where they are, without scalars on the host."""
        self._scalars: set[int] = set()
        """Ids of buffers that are scalars on the host."""
        self._part_of: dict[int, range] = {}
        """Ids of buffers for a part of a storage -> the bytes of it."""
        self._known: dict[Value, int] = {}
        """Each Value (with id 0) -> its id: equal descriptions share one Value."""

    def buffer(
        self,
        tensor: torch.Tensor,
        role: Role,
        name: str,
        *,
        borrowed: bool = False,
        part: range | None = None,
    ) -> int:
        """Add a buffer for the storage of `tensor`, or for a part of it, and return its id."""
        self._check_tensor(tensor, name)
        if tensor.is_conj() or tensor.is_neg():
            raise CaptureError(reason=f"{name} is a conjugate or negative view of its memory")
        nbytes = tensor.untyped_storage().nbytes()
        if not isinstance(nbytes, int):
            raise CaptureError(reason=f"the size of {name} is symbolic")
        if part is not None:
            self._part_of[len(self.buffers)], nbytes = part, len(part)
        if (tensor.dim() and nbytes) or tensor.device.type != "cpu":
            self._devices.add(tensor.device)
        else:
            self._scalars.add(len(self.buffers))
        self.buffers.append(Buffer(len(self.buffers), nbytes, role, borrowed, name))
        return len(self.buffers) - 1

    def buffer_of(self, value: int) -> int:
        """The buffer that a Value lies in."""
        return self.values[value].buffer

    def device(self) -> torch.device:
        """The one device of all tensors. Raises CaptureError if there are several, or none."""
        devices = self._devices or ({_HOST} if self._scalars else set())
        if len(devices) != 1:
            names = ", ".join(sorted(map(str, devices))) or "none"
            raise CaptureError(reason=f"all tensors must be on one device; found {names}")
        (device,) = devices
        return device

    def on_host(self, value: int) -> bool:
        """Whether a Value is a scalar on the host, among tensors on another device."""
        return bool(self._devices - {_HOST}) and self.buffer_of(value) in self._scalars

    def _check_tensor(self, tensor: torch.Tensor, name: str) -> None:
        """Raise CaptureError if a Trace cannot describe `tensor`."""
        plain = tensor.layout is torch.strided and not tensor._is_zerotensor()
        if not plain or tensor.is_quantized:
            raise CaptureError(reason=f"{name} is not a plain strided tensor")
        if str(tensor.dtype).removeprefix("torch.") not in ITEM_BYTES:
            raise CaptureError(reason=f"{name} has an unsupported dtype: {tensor.dtype}")
        sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
        if not all(isinstance(n, int) for n in sizes):
            raise CaptureError(reason=f"the size of {name} is symbolic")

    def value(self, buffer: int, tensor: torch.Tensor) -> int:
        """Return the id of the Value that describes `tensor` on a buffer, added if it is new."""
        self._check_tensor(tensor, f"a view of {self.buffers[buffer].name}")
        dtype = str(tensor.dtype).removeprefix("torch.")
        offset, part = int(tensor.storage_offset()), self._part_of.get(buffer)
        if part is not None:
            covered = covered_bytes(tensor)
            if covered.start < part.start or covered.stop > part.stop:
                raise OutsideError(storage_id(tensor))
            offset -= part.start // tensor.itemsize
        value = Value(
            len(self.values),
            buffer,
            dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            offset,
            tensor.is_conj(),
            tensor.is_neg(),
        )
        known = self._known.setdefault(replace(value, id=0), value.id)
        if known == value.id:
            self.values.append(value)
        return known


def fits_over(
    donation: Donation, target: str, values: Sequence[Value], buffers: Sequence[Buffer]
) -> bool:
    """Whether an op `target` can write its result over its argument, by how the two lie."""
    source, made = values[donation.source], values[donation.target]
    same = _read_as(source) == _read_as(made)
    whole = buffers[source.buffer].nbytes == buffers[made.buffer].nbytes
    return same and whole and (target not in aten.IN_ORDER or _in_order(made))


def _read_as(value: Value) -> tuple[object, ...]:
    """All of a Value but which one it is, and of which buffer."""
    return value.dtype, value.shape, value.stride, value.offset, value.conj, value.neg


def _in_order(value: Value) -> bool:
    """Whether the value is contiguous, with standard strides also in dimensions of size 1."""
    strides = [math.prod(max(n, 1) for n in value.shape[d + 1 :]) for d in range(len(value.shape))]
    return list(value.stride) == strides
