"""ResNeXt-101 for volumes: Hara et al., "Can Spatiotemporal 3D CNNs Retrace ...", 2018 (Table 1).

Shortcuts are projections where the shape changes (type B in the paper).
"""

from torch import Tensor, nn

from outcore.networks.resnet import RESIDUAL_SCALE, Blocks

EXPANSION = 2
GROUPS = 32


class Bottleneck3d(nn.Module):
    """Convolutions 1x1x1, grouped 3x3x3 and 1x1x1, added to a shortcut; stride in the 3x3x3."""

    def __init__(self, channels: int, width: int, stride: int, groups: int) -> None:
        super().__init__()
        out = width * EXPANSION
        self.conv1 = nn.Conv3d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm3d(width)
        self.conv2 = nn.Conv3d(width, width, 3, stride, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm3d(width)
        self.conv3 = nn.Conv3d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm3d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = (
            nn.Identity() if (channels, stride) == (out, 1) else _projection(channels, out, stride)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, d, h, w) -> (n, 2 width, d / stride, h / stride, w / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        out: Tensor = self.relu(self.bn3(self.conv3(y)) + self.downsample(x))
        return out


class ResNeXt3d(nn.Module):
    """A stem that halves height and width, four stages of grouped bottlenecks, a classifier.

    ``blocks`` counts the bottlenecks of the stages: (3, 4, 23, 3) for ResNeXt-101.
    """

    def __init__(
        self,
        blocks: Blocks = (3, 4, 23, 3),
        *,
        classes: int = 400,
        width: int = 64,
        groups: int = GROUPS,
    ) -> None:
        super().__init__()

        def stage(inputs: int, width: int, count: int, stride: int) -> nn.Sequential:
            rest = (Bottleneck3d(width * EXPANSION, width, 1, groups) for _ in range(count - 1))
            return nn.Sequential(Bottleneck3d(inputs, width, stride, groups), *rest)

        self.conv1 = nn.Conv3d(3, width, 7, (1, 2, 2), padding=3, bias=False)
        self.bn1 = nn.BatchNorm3d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool3d(3, 2, padding=1)
        self.layer1 = stage(width, 2 * width, blocks[0], 1)
        self.layer2 = stage(4 * width, 4 * width, blocks[1], 2)
        self.layer3 = stage(8 * width, 8 * width, blocks[2], 2)
        self.layer4 = stage(16 * width, 16 * width, blocks[3], 2)
        self.avgpool = nn.AdaptiveAvgPool3d(1)
        self.fc = nn.Linear(32 * width, classes)
        self.apply(_initialize)

    def forward(self, clips: Tensor) -> Tensor:
        """(n, 3, frames, h, w) -> logits (n, classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(clips))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def _projection(channels: int, out: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(channels, out, 1, stride, bias=False),
        nn.BatchNorm3d(out),
    )


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv3d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    if isinstance(module, Bottleneck3d):
        nn.init.constant_(module.bn3.weight, RESIDUAL_SCALE)
