"""DenseNet: Huang et al., "Densely Connected Convolutional Networks", 2017 (Table 1)."""

import torch
from torch import Tensor, nn

from outcore.networks.resnet import Blocks

BOTTLENECK = 4  # channels between the 1x1 and the 3x3 convolution, in units of the growth


class Growth(nn.Module):
    """Norm, ReLU and convolution, 1x1 and then 3x3; the result is appended to the input.

    So all inputs of a block are kept once per later layer: the memory of the concatenations grows
    with the square of the depth.
    """

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        middle = BOTTLENECK * growth
        self.layers = nn.Sequential(*_conv(channels, middle, 1), *_conv(middle, growth, 3))

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, h, w) -> (n, channels + growth, h, w)."""
        return torch.cat([x, self.layers(x)], dim=1)


class DenseNet(nn.Module):
    """Four dense blocks after a strided stem. Between them, channels, h and w are halved.

    ``blocks`` counts the layers of the blocks: (6, 12, 24, 16) for DenseNet-121, (6, 12, 32, 32)
    for 169 and (6, 12, 48, 32) for 201. ``growth`` is the number of channels that each layer adds.
    """

    def __init__(
        self,
        blocks: Blocks = (6, 12, 24, 16),
        *,
        classes: int = 1000,
        width: int = 64,
        growth: int = 32,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *(nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width)),
            *(nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)),
        )
        layers: list[nn.Module] = []
        channels = width
        for block, count in enumerate(blocks):
            if block:
                layers += [*_conv(channels, channels // 2, 1), nn.AvgPool2d(2)]
                channels //= 2
            layers += [Growth(channels + layer * growth, growth) for layer in range(count)]
            channels += count * growth
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            *(nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Linear(channels, classes)),
        )
        self.apply(_initialize)

    def forward(self, images: Tensor) -> Tensor:
        """(n, 3, h, w) -> logits (n, classes)."""
        logits: Tensor = self.head(self.features(self.stem(images)))
        return logits


def _conv(channels: int, out: int, kernel: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels, out, kernel, padding=kernel // 2, bias=False)
    return nn.BatchNorm2d(channels), nn.ReLU(inplace=True), convolution


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight)
