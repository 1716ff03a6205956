"""Stand-ins: tensors that carry a number through autograd, which saves them for backward.

A user's hook on saved tensors may cast or quantize all that is saved. So each bit of the number is
an element, either 0 or 2, which any such hook keeps apart, even if a cast back rounds 2 down. Each
bit is there twice, the second time inverted: what was changed in another way is not read as the
number of another call.
"""

from __future__ import annotations

import torch

_BITS = 48
_ALL = (1 << _BITS) - 1
_AS_ELEMENTS = bytes.maketrans(b"01", b"\0\2")


class Name(bytearray):
    """The memory of a stand-in: a number that weak references can watch.

    The tensor's storage owns it, so it lives as long as any alias of the stand-in. A weak reference
    to the tensor itself would end with its Python object, which autograd may replace.
    """


def name(number: int) -> Name:
    """The memory of a stand-in for `number`, which is less than 2**48."""
    bits = f"{number:0{_BITS}b}{_ALL - number:0{_BITS}b}"
    return Name(bits.encode().translate(_AS_ELEMENTS))


def stand_in(memory: Name) -> torch.Tensor:
    """The stand-in tensor that owns `memory`: uint8, shape (96,)."""
    return torch.frombuffer(memory, dtype=torch.uint8)


def like_stand_ins() -> torch.Tensor:
    """An empty tensor of the shape and dtype of all stand-ins."""
    return torch.empty(2 * _BITS, dtype=torch.uint8, device="cpu")


def number_of(saved: torch.Tensor) -> int | None:
    """The number that a stand-in carries. None if its values were lost on the way."""
    if saved.shape != (2 * _BITS,) or saved.layout != torch.strided or saved.is_complex():
        return None
    bits = "".join(["1" if element >= 1 else "0" for element in saved.tolist()])
    number, inverted = int(bits[:_BITS], 2), int(bits[_BITS:], 2)
    return number if number == _ALL - inverted else None
