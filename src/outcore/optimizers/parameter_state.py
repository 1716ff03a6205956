"""ParameterState: what an optimizer keeps of one parameter, of which tensors may be away."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from functools import cache
from typing import Any

import torch

from outcore.optimizers.places import Copy, Place

LEAST_BYTES = 64 << 10
"""Smaller tensors stay on the device: a copy of them would cost more time than it frees memory."""


class ParameterState(MutableMapping[str, Any]):
    """What an optimizer keeps of one parameter.

    A tensor that is away comes back when it is read, and stays until the next step of the
    optimizer. Not a dict, because C code reads dicts without asking them. Copies and pickles are
    dicts.
    """

    __slots__ = ("__weakref__", "_homes", "_values", "lock")

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        """Places stand for tensors that are away."""
        self._homes: dict[str, Place] = {}
        """Where tensors were last, and go to again."""
        self.lock = threading.RLock()
        """Held while something is read. A step holds it too: a reader would bring back what the
        step is about to change."""

    def __getitem__(self, key: str) -> Any:
        with self.lock:
            value = self._values[key]
            if isinstance(value, Place):
                value = self._values[key] = value.read().finish()
            return value

    def __setitem__(self, key: str, value: Any) -> None:
        with self.lock:
            self._values[key] = value

    def __delitem__(self, key: str) -> None:
        with self.lock:
            del self._values[key]
            self._homes.pop(key, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    __eq__ = object.__eq__  # comparing the values would bring them back
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        here = {k: "away" if isinstance(v, Place) else v for k, v in self._values.items()}
        return f"{type(self).__name__}({here})"

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (self.copy(),)

    def copy(self, *, on_host: bool = False) -> dict[str, Any]:
        """All of it as a dict, with copies of what is away; `on_host`: copies in host memory."""

        def come(place: Place) -> torch.Tensor:
            with torch.inference_mode(mode=False):
                tensor = place.read().finish()
                return tensor.cpu() if on_host else tensor

        with self.lock:
            values = self._values.items()
            return {k: come(v) if isinstance(v, Place) else v for k, v in values}

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors that are away, or have been."""
        return sum(home.region.nbytes for home in self._homes.values())

    def here(self) -> dict[str, Any]:
        """What is not away."""
        return {k: v for k, v in self._values.items() if not isinstance(v, Place)}

    def movable(self, device: torch.device) -> list[str]:
        """The keys of large tensors on `device` that nothing else refers to.

        What refers to a tensor expects it to follow the steps.
        """
        large = [k for k, v in self._values.items() if is_plain(v) and v.device == device]
        return [k for k in large if _references(self._values, k) == _references_of_one()]

    def has_home(self, key: str) -> bool:
        """Whether there is a place that fits the tensor `key`, which is not away."""
        home = self._homes.get(key)
        return home is not None and home.fits(self._values[key])

    def settle(self, key: str, home: Place) -> None:
        """Let the tensor `key` go to `home` from now on."""
        self._homes[key] = home

    def write(self, key: str) -> Copy:
        """Start to copy the tensor `key` to its home."""
        return self._homes[key].write(self._values[key])

    def let_go(self, key: str, copy: Copy) -> None:
        """Once `copy` is done, let the tensor `key` be away, unless it was replaced meanwhile."""
        copy.finish()
        if self._values.get(key) is copy.tensor:
            self._values[key] = copy.place

    def read(self) -> dict[str, Copy]:
        """Start to copy back what is away."""
        return {k: v.read() for k, v in self._values.items() if isinstance(v, Place)}

    def take_back(self, key: str, copy: Copy) -> None:
        """Once `copy` is done, let the tensor `key` be on the device, if it still is away."""
        tensor = copy.finish()
        if self._values.get(key) is copy.place:
            self._values[key] = tensor


def is_plain(value: object) -> bool:
    """Whether it is a tensor that can be copied as bytes, and is large enough."""
    if type(value) is not torch.Tensor or value.layout is not torch.strided:
        return False
    if value.nbytes < LEAST_BYTES:  # most are
        return False
    return not (value.requires_grad or value.is_conj() or value.is_neg() or value.is_inference())


def _references(values: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """How many references there are to the tensor and to its storage, of Python and of C++."""
    tensor = values[key]
    storage: Any = tensor.untyped_storage()
    in_storage = torch._C._storage_Use_Count(storage._cdata)  # noqa: SLF001 - it has no public name
    in_tensor = tensor._use_count()  # noqa: SLF001 - as above
    return sys.getrefcount(tensor), in_tensor, sys.getrefcount(storage), in_storage


@cache
def _references_of_one() -> tuple[int, ...]:
    """Those of a tensor that only one dict refers to."""
    return _references({"": torch.empty(1, device="cpu")}, "")
