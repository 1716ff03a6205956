"""described: what torch says of tensors with symbolic sizes; fake tensors with numbers for that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.node import map_aggregate

SYMBOLS: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Types of numbers that are symbolic."""

_NUMBERS: Final = dict(zip(SYMBOLS, (int, float, bool), strict=True))
"""Type of a symbolic number -> that of its value."""


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, strides and offset, in one tuple."""
    return *tensor.shape, *tensor.stride(), tensor.storage_offset()


class SizedInt(int):
    """An argument of an op, and what it is the value of."""

    of: Any
    """A node of the symbolic graph, or an expression with symbols."""

    def plain(self) -> int:
        """The number alone."""
        return int(self)


class SizedFloat(float):
    """As SizedInt."""

    of: Any

    def plain(self) -> float:
        """The number alone."""
        return float(self)


def sized(number: Any, of: Any) -> Any:
    """The int or float `number`, remembering what it is the value `of`."""
    kind = _SIZED.get(type(number))
    if kind is None:
        return number
    made = kind(number)
    made.of = of
    return made


def unsized(arg: Any) -> Any:
    """An argument, without what it remembers if it is a number."""
    return arg.plain() if isinstance(arg, SizedInt | SizedFloat) else arg


_SIZED: Final = {int: SizedInt, float: SizedFloat}


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor as torch described it. Sizes that are symbolic are sympy expressions."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    nbytes: Any
    """Of the whole storage."""
    storage: int
    """Tensors that share a storage have the same number here."""
    dtype: torch.dtype
    device: torch.device
    conj: bool
    neg: bool


def lie(tensor: Tensor | Described) -> tuple[Any, ...]:
    """Shape, strides, offset and storage size: all numbers that describe where a tensor lies."""
    if isinstance(tensor, Described):
        return *tensor.shape, *tensor.stride, tensor.offset, tensor.nbytes
    return *layout(tensor), tensor.untyped_storage().nbytes()


def described(made: Any) -> Any:
    """`made`, with a Described for each tensor in it."""
    return map_aggregate(made, _described)


def _described(made: Any) -> Any:
    if not isinstance(made, Tensor):
        return made
    storage = made.untyped_storage()
    return Described(
        tuple(map(_expression, made.shape)),
        tuple(map(_expression, made.stride())),
        _expression(made.storage_offset()),
        _expression(storage.nbytes()),
        storage._cdata,
        made.dtype,
        made.device,
        made.is_conj(),
        made.is_neg(),
    )


def storages(described: Any) -> set[int]:
    """`Described.storage` of each tensor that is `described`."""
    if isinstance(described, list | tuple):
        return set().union(*map(storages, described))
    return {described.storage} if isinstance(described, Described) else set()


def _expression(size: Any) -> Any:
    """A size as the sympy expression that it stands for; a number as it is."""
    return size.node.expr if isinstance(size, SYMBOLS) else size


class Numbers:
    """The values of sizes, with numbers for `symbols`."""

    def __init__(self, symbols: Mapping[Any, int]) -> None:
        self.symbols = symbols
        self._known: dict[Any, int] = {}
        """Expression -> its value."""

    def of(self, size: Any) -> int:
        """The value of a size. Raises TypeError if the forward inputs do not determine it."""
        if isinstance(size, int):
            return size
        known = self._known.get(size)
        if known is None:
            known = self._known[size] = int(size.xreplace(self.symbols))
        return known

    def all(self, sizes: Iterable[Any]) -> tuple[int, ...]:
        """The values of several sizes."""
        return tuple(map(self.of, sizes))


class Fakes:
    """Makes the fake tensors of one graph from what torch described, with `numbers` for symbols.

    Ops would make the same fake tensors, but take most of the time.
    """

    def __init__(self, numbers: Numbers) -> None:
        self.mode = FakeTensorMode()
        self.numbers = numbers
        self.storages: dict[int, UntypedStorage] = {}
        """`Described.storage` -> the storage of the fake tensors made so far."""
        self.described: dict[int, tuple[Tensor, Described]] = {}
        """Id of a fake tensor -> it, and how torch described it: it lies like that."""

    def like(self, given: Tensor | Described, described: Described) -> Tensor:
        """A fake tensor for a `given` input, which torch `described`."""
        if isinstance(given, Described):
            fake: Tensor = self._made(replace(given, storage=described.storage))
        else:
            fake = self.mode.from_tensor(given.detach(), static_shapes=True)
            held = given.untyped_storage().nbytes()
            if fake.untyped_storage().nbytes() < held:  # it has room that no tensor uses any more
                fake.untyped_storage().resize_(held)
        self.storages[described.storage] = fake.untyped_storage()
        self.described[id(fake)] = fake, described
        return fake

    def made(self, described: Any) -> Any:
        """Fake tensors as `described`, and numbers in place of symbols."""
        return map_aggregate(described, self._made)

    def take(self, made: Any, described: Any) -> bool:
        """Take the fake tensors `made` for those `described`; return whether they lie like them."""
        if isinstance(described, list | tuple):
            taken = [self.take(*pair) for pair in zip(made, described, strict=True)]
            return all(taken)
        if not isinstance(described, Described):
            return True
        storage = made.untyped_storage()
        self.storages[described.storage] = storage
        alike = (*layout(made), storage.nbytes()) == self.numbers.all(lie(described))
        if alike:
            self.described.setdefault(id(made), (made, described))
        return alike

    def shape(self, described: Described) -> tuple[int, ...]:
        """The shape of what is `described`."""
        return self.numbers.all(described.shape)

    def _made(self, described: Any) -> Any:
        if isinstance(described, SYMBOLS):
            return _NUMBERS[type(described)](described.node.expr.xreplace(self.numbers.symbols))
        if not isinstance(described, Described):
            return described
        storage = self.storages.get(described.storage)
        if storage is None:
            nbytes = self.numbers.of(described.nbytes)
            storage = torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
            self.storages[described.storage] = storage
        lying = torch.empty(0, dtype=described.dtype, device="meta").set_(
            storage,
            self.numbers.of(described.offset),
            self.shape(described),
            self.numbers.all(described.stride),
        )
        fake: Tensor = FakeTensor(self.mode, lying, described.device)
        if described.conj or described.neg:
            with self.mode:
                fake = torch._conj(fake) if described.conj else fake
                fake = torch._neg_view(fake) if described.neg else fake
        self.described[id(fake)] = fake, described
        return fake
