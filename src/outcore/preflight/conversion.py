"""conversion: let modules whose tensors have no memory be converted, as by `model.to(device)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor


@contextmanager
def convertible() -> Iterator[None]:
    """In this context `to`, `half` and the like convert modules with fake tensors.

    By itself torch would swap these tensors. But it swaps no tensor that has weak references, and
    the mode that made them keeps some.
    """
    original: Any = nn.Module._apply  # noqa: SLF001 - what all conversions call

    def apply(
        self: nn.Module,
        fn: Callable[[torch.Tensor], torch.Tensor],
        recurse: bool = True,  # noqa: FBT001, FBT002 - as torch's
    ) -> nn.Module:
        parameters = [p for p in self._parameters.values() if p is not None]
        if not any(isinstance(p, FakeTensor) for p in parameters):
            converted: nn.Module = original(self, fn, recurse)
            return converted
        for child in self.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]  # noqa: SLF001 - as torch does
        for name, parameter in self._parameters.items():
            if parameter is not None:
                self._parameters[name] = _converted(parameter, fn)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    nn.Module._apply = apply  # type: ignore[method-assign]  # noqa: SLF001 - as above
    try:
        yield
    finally:
        if nn.Module._apply is apply:  # noqa: SLF001 - the user's code may have replaced it
            nn.Module._apply = original  # type: ignore[method-assign]  # noqa: SLF001 - as above


def _converted(parameter: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A parameter, converted in place if that can be: optimizers and tied modules still hold it."""
    with torch.no_grad():
        made: Any = fn(parameter)
        gradient = None if parameter.grad is None else fn(parameter.grad)
        parameter.grad = None
        if torch._has_compatible_shallow_copy_type(parameter, made):  # noqa: SLF001 - as torch does
            parameter.data = made
            if isinstance(made, FakeTensor):
                parameter.fake_device, parameter.constant = made.fake_device, made.constant
        else:  # from the meta device, or to it
            parameter = nn.Parameter(made, parameter.requires_grad)
        parameter.grad = gradient
    return parameter
