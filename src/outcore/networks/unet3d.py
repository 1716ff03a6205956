"""3-D U-Net: Çiçek et al., "3D U-Net: Learning Dense Volumetric Segmentation", 2016 (Figure 2).

It differs from the paper in two ways. Its convolutions are padded, so that the output is as large
as the input. A batch norm with scale and shift replaces the biases of the convolutions.
"""

import torch
from torch import Tensor, nn


class UNet3d(nn.Module):
    """Down and up again, with a skip connection from each level to its mirror image.

    So the feature maps of a level are used twice in the forward pass: immediately by the level
    below, and much later by the skip connection.
    """

    def __init__(
        self, *, channels: int = 3, classes: int = 3, width: int = 32, levels: int = 4
    ) -> None:
        super().__init__()
        wide = [width << (level + 1) for level in range(levels)]
        inputs = [channels, *wide[:-1]]
        self.down = nn.ModuleList(
            _double(before, after // 2, after) for before, after in zip(inputs, wide, strict=True)
        )
        self.pool = nn.MaxPool3d(2)
        ups = list(zip(wide[:0:-1], wide[-2::-1], strict=True))
        self.enlarge = nn.ModuleList(
            nn.ConvTranspose3d(deep, deep, 2, 2, bias=False) for deep, _ in ups
        )
        self.up = nn.ModuleList(_double(deep + skip, skip, skip) for deep, skip in ups)
        self.head = nn.Conv3d(wide[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, d, h, w) -> logits (n, classes, d, h, w).

        Each of d, h, w must be a multiple of ``2 ** (levels - 1)``.
        """
        skips = []
        for level, double in enumerate(self.down):
            x = double(self.pool(x) if level else x)
            skips.append(x)
        for enlarge, double, skip in zip(self.enlarge, self.up, skips[-2::-1], strict=True):
            x = double(torch.cat([skip, enlarge(x)], dim=1))
        logits: Tensor = self.head(x)
        return logits


def _double(before: int, middle: int, after: int) -> nn.Sequential:
    return nn.Sequential(*_conv(before, middle), *_conv(middle, after))


def _conv(before: int, after: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv3d(before, after, 3, padding=1, bias=False)
    return convolution, nn.BatchNorm3d(after), nn.ReLU(inplace=True)
