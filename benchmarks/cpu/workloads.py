"""What is trained, by name: ResNet-50 at the size of the benchmarks, and the cases of the tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outcore.networks import network


class Step(NamedTuple):
    """One training step: ``loss(module(*args)).backward()``."""

    module: nn.Module
    args: tuple[Tensor, ...]
    loss: Callable[[Any], Tensor]


def make_step(name: str, seed: int = 0) -> Step:
    """The model, arguments and loss of a workload, from `seed`. KeyError: no such workload."""
    torch.manual_seed(seed)
    return _WORKLOADS[name]() if name in _WORKLOADS else _case(name)


def case_names() -> tuple[str, ...]:
    """The models of tests/cpu/models.py."""
    # Loads other people's libraries, which takes seconds and memory, for these workloads alone.
    from tests.cpu.models import CASES  # noqa: PLC0415 - see above

    return tuple(case.name for case in CASES)


def _case(name: str) -> Step:
    from tests.cpu.models import CASES  # noqa: PLC0415 - as above

    return Step(*{case.name: case for case in CASES}[name].make())


def _resnet(batch: int, size: int, *, small: bool = False) -> Step:
    spec = network("resnet50")
    spec = spec.small if small else spec
    sample = spec.batch(batch, size=size)
    return Step(
        spec.build(), sample.inputs, lambda outputs: spec.criterion(outputs, sample.targets)
    )


_WORKLOADS: dict[str, Callable[[], Step]] = {
    "resnet50-b16-224": partial(_resnet, 16, 224),
    "resnet50-b32-224": partial(_resnet, 32, 224),
    "small-resnet-b16-64": partial(_resnet, 16, 64, small=True),
}
