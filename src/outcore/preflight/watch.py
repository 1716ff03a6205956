"""watch: record which module was last called in training and with what, without holding any of it.

It looks from outside at the frames of the thread that trains. It sets no hook, changes nothing in
torch, and does not slow down calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, slice)
"""Types of arguments that are small, and kept as they are."""

CALL = nn.Module._wrapped_call_impl.__code__  # noqa: SLF001 - every call to a module goes through it
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor's description, without its numbers."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def tensor(self) -> torch.Tensor:
        """Make a tensor like it."""
        made = torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=self.device)
        return made.requires_grad_(self.requires_grad)

    def __str__(self) -> str:
        return f"{self.sizes} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class Gone:
    """An argument that cannot be made again."""

    kind: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call to a module, with its arguments as Shapes and plain values."""

    module: ReferenceType[nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class CallWatch:
    """Remembers the latest training call that it saw.

    If modules call each other, that is the outermost call. Calls to modules without parameters to
    train, such as losses, are ignored. `called` holds the names of all modules that were outermost.
    `half` is the half-precision type of autocast: a type passed between the submodules of a module
    that has no such parameters itself.
    """

    def __init__(self) -> None:
        self.last: Call | None = None
        self.called: dict[str, None] = {}
        self.half: torch.dtype | None = None
        self._trains: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()

    def look(self, frame: FrameType | None) -> None:
        """Look at a frame and at its callers."""
        self._see(list(_callers(frame))[::-1])

    def look_back(self, trace: TracebackType | None) -> None:
        """Look at the frames that an error came through."""
        frames = [frame for frame in _frames(trace) if frame.f_code is CALL]
        model = None if self.last is None else self.last.module()
        known = [] if model is None else [m for m in model.modules() if m is not model]
        if frames and not any(frames[0].f_locals.get("self") is each for each in known):
            self._see(frames)  # else a part is recomputed in the backward pass

    def _see(self, calls: Sequence[FrameType]) -> None:
        """Record the outermost training call; `calls` are calls to modules, the outermost first."""
        for index, frame in enumerate(calls):
            names = frame.f_locals
            module = names.get("self")
            if isinstance(module, nn.Module) and module.training and self._trained(module):
                self.called[type(module).__name__] = None
                self.last = Call(ref(module), *map(_kept, (names["args"], names["kwargs"])))
                self._see_half(module, calls[index + 1 :])
                return

    def _trained(self, module: nn.Module) -> bool:
        if module not in self._trains:
            self._trains[module] = any(p.requires_grad for p in module.parameters())
        return self._trains[module]

    def _see_half(self, module: nn.Module, inner: Iterable[FrameType]) -> None:
        found = [
            each.dtype
            for frame in inner
            for each in frame.f_locals.get("args", ())
            if isinstance(each, torch.Tensor) and each.dtype in HALF
        ]
        if found and self.half is None and all(p.dtype not in HALF for p in module.parameters()):
            self.half = found[0]


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if frame.f_code is CALL:
            yield frame
        frame = frame.f_back


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def again(value: Any) -> Any:
    """An argument like the one that a `Call` has. Raises LookupError if that is impossible."""
    if isinstance(value, Shape):
        return value.tensor()
    if isinstance(value, ReferenceType):
        return _alive(value())
    if isinstance(value, Gone):
        return _alive(None, value.kind)
    if isinstance(value, dict):
        return {name: again(each) for name, each in value.items()}
    return type(value)(map(again, value)) if type(value) in (list, tuple) else value


def _alive(value: object, kind: str = "argument") -> object:
    if value is None:
        raise LookupError(f"the {kind} that the model is called with cannot be recreated")
    return value


def shapes(value: Any) -> list[Shape]:
    """The Shapes among arguments."""
    if isinstance(value, Shape):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [s for each in value for s in shapes(each)] if isinstance(value, list | tuple) else []


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _shape(value)
    if type(value) in (list, tuple):
        return type(value)(map(_kept, value))
    if type(value) is dict:
        return {name: _kept(each) for name, each in value.items()}
    try:
        return value if isinstance(value, PLAIN) else ref(value)
    except TypeError:
        return Gone(type(value).__name__)


def _shape(tensor: torch.Tensor) -> Shape | Gone:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return Gone(type(tensor).__name__)
    sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
    return Shape(sizes, strides, tensor.dtype, tensor.device, tensor.requires_grad)
