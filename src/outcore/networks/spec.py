"""NetworkSpec: a row of the table of networks: what to build, what to feed it, what to minimize."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from outcore.errors import OptionValueError


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one training step."""

    inputs: tuple[Tensor, ...]
    """The model's positional arguments."""
    targets: tuple[Tensor, ...] = ()
    """What the criterion compares the model's outputs with."""

    def to(self, device: torch.device | str) -> Self:
        """Return the same batch on `device`."""
        return replace(
            self,
            inputs=tuple(each.to(device) for each in self.inputs),
            targets=tuple(each.to(device) for each in self.targets),
        )


@dataclass(frozen=True, slots=True)
class NetworkSpec:
    """One row of the table of networks.

    A training step is ``spec.loss(model, spec.batch(n, seed)).backward()``, where ``model`` is
    ``spec.build()``, compiled or not.
    """

    name: str
    summary: str
    """One line: the name of the network, and the variant."""
    build: Callable[..., nn.Module]
    """Makes the model with random weights from the global generator; options are keywords."""
    make_batch: Callable[..., Batch]
    """(n, generator, **sizes) -> a batch of n samples."""
    criterion: Callable[[Any, tuple[Tensor, ...]], Tensor]
    """(outputs of the model, targets of the batch) -> the loss, a scalar."""
    small_build: Mapping[str, Any]
    """Build options that shrink the model, so that a CPU step takes a fraction of a second."""
    small_batch: Mapping[str, Any]
    """Sizes of the samples for the small model."""
    fewest: int = 1
    """The fewest samples in a batch that it can train on."""

    @property
    def small(self) -> Self:
        """The same row with a small model and small samples as defaults."""
        return replace(
            self,
            build=partial(self.build, **self.small_build),
            make_batch=partial(self.make_batch, **self.small_batch),
        )

    def batch(self, n: int, seed: int = 0, **sizes: int) -> Batch:
        """Make `n` random samples on the CPU; the same seed gives the same samples.

        Raises OptionValueError if the network cannot train on so few.
        """
        if n < self.fewest:
            reason = f"{self.name} cannot train on fewer than {self.fewest} samples"
            raise OptionValueError(option="batch", value=n, reason=reason)
        return self.make_batch(n, torch.Generator().manual_seed(seed), **sizes)

    def loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """Run the model forward on `batch`, and return the scalar to minimize."""
        return self.criterion(model(*batch.inputs), batch.targets)
