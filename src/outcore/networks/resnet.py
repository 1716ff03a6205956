"""ResNet: He et al., "Deep Residual Learning", 2015 (Table 1), with bottleneck blocks."""

from functools import partial
from typing import TypeAlias

from torch import Tensor, nn

EXPANSION = 4
# Residual branches start small, which stabilizes the first steps (Goyal et al., "Accurate, Large
# Minibatch SGD", 2017, section 5.1). Unlike there, the scale is not zero: with zero, the first
# gradients inside the branches would be zero, and comparing them would show nothing.
RESIDUAL_SCALE = 0.2
Blocks: TypeAlias = tuple[int, int, int, int]
"""The number of bottlenecks in each of the four stages."""


class Bottleneck(nn.Module):
    """Convolutions 1x1, 3x3 and 1x1, added to a shortcut.

    The stride is in the 3x3 convolution ("v1.5"). With ``stride_in_1x1`` it is in the first 1x1, as
    in the paper and in Chainer.
    """

    def __init__(
        self, channels: int, width: int, stride: int, *, stride_in_1x1: bool, inplace_relu: bool
    ) -> None:
        super().__init__()
        out = width * EXPANSION
        stride_1x1, stride_3x3 = (stride, 1) if stride_in_1x1 else (1, stride)
        self.conv1 = nn.Conv2d(channels, width, 1, stride_1x1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride_3x3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=inplace_relu)
        self.downsample = (
            nn.Identity() if (channels, stride) == (out, 1) else _projection(channels, out, stride)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, h, w) -> (n, 4 width, h / stride, w / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        out: Tensor = self.relu(self.bn3(self.conv3(y)) + self.downsample(x))
        return out


class ResNet(nn.Module):
    """Four stages of bottlenecks between a strided stem and a linear classifier.

    ``blocks`` counts the bottlenecks of the stages: (3, 4, 6, 3) for ResNet-50. Parameters are
    named as in torchvision.
    """

    def __init__(
        self,
        blocks: Blocks = (3, 4, 6, 3),
        *,
        classes: int = 1000,
        width: int = 64,
        stride_in_1x1: bool = False,
        inplace_relu: bool = True,
    ) -> None:
        super().__init__()

        block = partial(Bottleneck, stride_in_1x1=stride_in_1x1, inplace_relu=inplace_relu)

        def stage(inputs: int, width: int, count: int, stride: int) -> nn.Sequential:
            rest = (block(width * EXPANSION, width, 1) for _ in range(count - 1))
            return nn.Sequential(block(inputs, width, stride), *rest)

        self.conv1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=inplace_relu)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.layer1 = stage(width, width, blocks[0], 1)
        self.layer2 = stage(4 * width, 2 * width, blocks[1], 2)
        self.layer3 = stage(8 * width, 4 * width, blocks[2], 2)
        self.layer4 = stage(16 * width, 8 * width, blocks[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(32 * width, classes)
        self.apply(_initialize)

    def forward(self, images: Tensor) -> Tensor:
        """(n, 3, h, w) -> logits (n, classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def _projection(channels: int, out: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, out, 1, stride, bias=False),
        nn.BatchNorm2d(out),
    )


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    if isinstance(module, Bottleneck):
        nn.init.constant_(module.bn3.weight, RESIDUAL_SCALE)
