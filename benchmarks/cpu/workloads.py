"""workloads: models to train, by name: outcore's networks with batch and size, and test cases."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outcore.networks import NetworkSpec, network


class Step(NamedTuple):
    """One training step: ``loss(module(*args)).backward()``."""

    module: nn.Module
    args: tuple[Tensor, ...]
    loss: Callable[[Any], Tensor]


def make_step(name: str, seed: int = 0) -> Step:
    """The model, arguments and loss of a workload, made from `seed`.

    `name` is `NETWORK-bBATCH-SIZE`, or the name of a test case. Raises KeyError, or
    OptionValueError like `network`.
    """
    torch.manual_seed(seed)
    if name in _WORKLOADS:
        return _WORKLOADS[name]()
    sized = _SIZED.fullmatch(name)
    if sized is not None:
        return _step(network(sized["network"]), int(sized["batch"]), size=int(sized["size"]))
    return _case(name)


def case_names() -> tuple[str, ...]:
    """The names of the models in tests/cpu/models.py."""
    # This loads third-party libraries, which takes seconds and memory, for these workloads only.
    from tests.cpu.models import CASES  # noqa: PLC0415 - see above

    return tuple(case.name for case in CASES)


def _case(name: str) -> Step:
    from tests.cpu.models import CASES  # noqa: PLC0415 - as above

    return Step(*{case.name: case for case in CASES}[name].make())


def _step(spec: NetworkSpec, batch: int, **sizes: int) -> Step:
    sample = spec.batch(batch, **sizes)
    return Step(
        spec.build(), sample.inputs, lambda outputs: spec.criterion(outputs, sample.targets)
    )


_SIZED = re.compile(r"(?P<network>[a-z0-9-]+)-b(?P<batch>\d+)-(?P<size>\d+)")
"""A network of outcore, its batch, and the width of its images."""

_WORKLOADS: dict[str, Callable[[], Step]] = {
    "small-resnet-b16-64": lambda: _step(network("resnet50").small, 16, size=64),
    "gpt2-b1-256": lambda: _step(network("gpt2"), 1, length=256),
    "gpt2-b4-256": lambda: _step(network("gpt2"), 4, length=256),
    "small-gpt2-b2-64": lambda: _step(network("gpt2").small, 2, length=64),
}
