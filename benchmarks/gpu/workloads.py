"""Workload: a network with batch and precision, as data that can be sent to a process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from outcore.networks import network
from outcore.networks.spec import Batch

Sizes = tuple[tuple[str, int], ...]
SMALL_BATCH = 32
SMALL_LENGTHS = 4
MOMENTUM = 0.9
STRIDE = 7
"""Lengths follow each other in another order than that of size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training step of a network of the table, with random data."""

    network: str
    batch: int = 1
    sizes: Sizes = ()
    """Sizes of a sample, where they differ from the network's defaults."""
    options: Sizes = ()
    """Options of the model."""
    lengths: int = 0
    """How many lengths take turns, so that hardly any returns; 0: all samples are as long."""
    adamw: bool = False
    """Whether the optimizer is AdamW; else SGD with momentum."""
    tf32: bool = False
    channels_last: bool = False
    bf16: bool = False
    """Whether to use bfloat16 autocast."""
    small: bool = False

    @property
    def name(self) -> str:
        """The name in tables."""
        words = [self.network, f"b{self.batch}", *(f"{n}={v}" for n, v in self.sizes)]
        words += [f"lengths={self.lengths}"] * bool(self.lengths)
        flags = {
            "tf32": self.tf32,
            "channels_last": self.channels_last,
            "bf16": self.bf16,
            "adamw": self.adamw,
        }
        return " ".join([*words, *(word for word, on in flags.items() if on)])

    @property
    def tiny(self) -> Self:
        """The same with a tiny network, and samples of its size."""
        lengths = min(self.lengths, SMALL_LENGTHS)
        return replace(self, small=True, batch=SMALL_BATCH, sizes=(), options=(), lengths=lengths)

    def build(self, device: torch.device) -> Step:
        """The model on `device`, from a fixed seed. Sets TF32 for the whole process."""
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        torch.backends.cudnn.allow_tf32 = self.tf32
        torch.manual_seed(0)
        spec = network(self.network)
        spec = spec.small if self.small else spec
        with device:  # making random weights takes seconds on one core of the host
            module = spec.build(**dict(self.options)).to(device)
        batch = spec.batch(self.batch, **dict(self.sizes)).to(device)
        if self.channels_last:
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's types lack it
            batch = replace(batch, inputs=tuple(map(_channels_last, batch.inputs)))
        return Step(module, batch, spec.criterion, self.bf16, self.lengths, self.adamw)


@dataclass(frozen=True, slots=True)
class Step:
    """A model, its data and its loss."""

    module: nn.Module
    batch: Batch
    criterion: Callable[[Any, tuple[Tensor, ...]], Tensor]
    bf16: bool
    lengths: int = 0
    adamw: bool = False

    def optimizer(self) -> torch.optim.Optimizer:
        """One that leaves the weights as they are, in the time that it takes to change them."""
        if self.adamw:
            return torch.optim.AdamW(self.module.parameters(), 0.0)
        return torch.optim.SGD(self.module.parameters(), 0.0, MOMENTUM)

    def loss(self, call: Callable[..., Any], number: int = 0) -> Tensor:
        """Run forward of step `number` through `call`, and return the loss."""
        with self._precision():
            return self.criterion(call(*self._inputs(number)), self.batch.targets)

    def _inputs(self, number: int) -> tuple[Tensor, ...]:
        """Those of step `number`: of half to all of the length, and each time round one shorter."""
        if not self.lengths:
            return self.batch.inputs
        longest = self.batch.inputs[0].shape[1]
        turns, within = divmod(number, self.lengths)
        place = (STRIDE * within + self.lengths // 2) % self.lengths
        length = longest - place * longest // (2 * self.lengths) - turns
        return tuple(each[:, : max(1, length)].contiguous() for each in self.batch.inputs)

    def _precision(self) -> AbstractContextManager[Any]:
        if not self.bf16:
            return nullcontext()
        device = self.batch.inputs[0].device.type
        return torch.autocast(device, dtype=torch.bfloat16)


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
