"""Inception-v4: Szegedy et al., "Inception-v4, Inception-ResNet and ...", 2016 (Figures 3 to 9).

Channels are counted in units of ``width``. In the paper it is 32, and every count is a multiple.
"""

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn


class Kernel(NamedTuple):
    """Shape and movement of a convolution's kernel."""

    size: tuple[int, int]
    stride: int = 1
    padded: bool = True
    """Whether stride 1 keeps h and w (in the paper: not marked with V)."""


POINT, SQUARE = Kernel((1, 1)), Kernel((3, 3))
ROW3, COLUMN3 = Kernel((1, 3)), Kernel((3, 1))
ROW7, COLUMN7 = Kernel((1, 7)), Kernel((7, 1))
VALID, HALVE = Kernel((3, 3), padded=False), Kernel((3, 3), 2, padded=False)

Step: TypeAlias = tuple[int, Kernel]
"""A convolution: its output channels, and its kernel."""
Branch: TypeAlias = tuple[Step, ...]

STEM: tuple[Branch, ...] = (
    ((2, POINT), (3, VALID)),
    ((2, POINT), (2, COLUMN7), (2, ROW7), (3, VALID)),
)
A: tuple[Branch, ...] = (
    ((3, POINT),),
    ((2, POINT), (3, SQUARE)),
    ((2, POINT), (3, SQUARE), (3, SQUARE)),
)
REDUCTION_A: tuple[Branch, ...] = (
    ((12, HALVE),),
    ((6, POINT), (7, SQUARE), (8, HALVE)),
)
B: tuple[Branch, ...] = (
    ((12, POINT),),
    ((6, POINT), (7, ROW7), (8, COLUMN7)),
    ((6, POINT), (6, ROW7), (7, COLUMN7), (7, ROW7), (8, COLUMN7)),
)
REDUCTION_B: tuple[Branch, ...] = (
    ((6, POINT), (6, HALVE)),
    ((8, POINT), (8, ROW7), (10, COLUMN7), (10, HALVE)),
)
# Module C: branches that end as they are, branches that fork at their end, and the two forks.
C: tuple[Branch, ...] = (((8, POINT),),)
C_FORKED: tuple[Branch, ...] = (((12, POINT),), ((12, POINT), (14, ROW3), (16, COLUMN3)))
C_ENDS: tuple[Branch, ...] = (((8, ROW3),), ((8, COLUMN3),))


class Conv(nn.Sequential):
    """Convolution, batch norm, ReLU."""

    def __init__(self, channels: int, out: int, kernel: Kernel) -> None:
        height, width = kernel.size
        padding = (height // 2, width // 2) if kernel.padded else (0, 0)
        super().__init__(
            nn.Conv2d(channels, out, kernel.size, kernel.stride, padding, bias=False),
            nn.BatchNorm2d(out, eps=0.001),
            nn.ReLU(inplace=True),
        )


class Parallel(nn.Module):
    """Branches from the same tensor, whose channels are concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, h, w) -> (n, sum of the branches, h', w')."""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class InceptionV4(nn.Module):
    """A stem, then ``modules`` modules of types A, B and C, with two reductions in between."""

    def __init__(
        self,
        modules: tuple[int, int, int] = (4, 7, 3),
        *,
        classes: int = 1000,
        width: int = 32,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        times_a, times_b, times_c = modules
        self.stem = nn.Sequential(
            Conv(3, width, HALVE),
            _branch(width, 1, ((1, VALID), (2, SQUARE))),
            _reduction(width, 2, (((3, HALVE),),)),
            Parallel(*_branches(width, 5, STEM)),
            _reduction(width, 6, (((6, HALVE),),)),
        )
        self.features = nn.Sequential(
            *(_inception(width, 12, 3, A) for _ in range(times_a)),
            _reduction(width, 12, REDUCTION_A),
            *(_inception(width, 32, 4, B) for _ in range(times_b)),
            _reduction(width, 32, REDUCTION_B),
            *(_inception(width, 48, 8, C, C_FORKED) for _ in range(times_c)),
        )
        self.head = nn.Sequential(
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            *(nn.Dropout(dropout), nn.Linear(48 * width, classes)),
        )

    def forward(self, images: Tensor) -> Tensor:
        """(n, 3, h, w), h and w at least 75 -> logits (n, classes)."""
        logits: Tensor = self.head(self.features(self.stem(images)))
        return logits


def _inception(
    width: int,
    channels: int,
    pooled: int,
    branches: tuple[Branch, ...],
    forked: tuple[Branch, ...] = (),
) -> nn.Module:
    average = nn.AvgPool2d(3, 1, padding=1, count_include_pad=False)
    return Parallel(
        nn.Sequential(average, _branch(width, channels, ((pooled, POINT),))),
        *_branches(width, channels, branches),
        *(_fork(width, channels, steps) for steps in forked),
    )


def _fork(width: int, channels: int, steps: Branch) -> nn.Module:
    last, _ = steps[-1]
    return nn.Sequential(_branch(width, channels, steps), Parallel(*_branches(width, last, C_ENDS)))


def _reduction(width: int, channels: int, branches: tuple[Branch, ...]) -> nn.Module:
    return Parallel(nn.MaxPool2d(3, 2), *_branches(width, channels, branches))


def _branches(width: int, channels: int, branches: tuple[Branch, ...]) -> list[nn.Module]:
    return [_branch(width, channels, steps) for steps in branches]


def _branch(width: int, channels: int, steps: Branch) -> nn.Module:
    inputs = (channels, *(out for out, _ in steps[:-1]))
    return nn.Sequential(
        *(
            Conv(before * width, out * width, kernel)
            for before, (out, kernel) in zip(inputs, steps, strict=True)
        )
    )
