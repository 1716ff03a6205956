"""GoogLeNet: Szegedy et al., "Going Deeper with Convolutions", 2014 (Table 1, section 5).

The default is the batch-normalized variant that torchvision ships: no biases, and 3x3 in the branch
in which the paper has 5x5. ``batch_norm=False`` is the paper's variant, with 5x5, biases and local
response normalization in the stem.
"""

import torch
from torch import Tensor, nn

# (inputs, 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool) channels of each module, by stage
STAGE_3 = ((192, 64, 96, 128, 16, 32, 32), (256, 128, 128, 192, 32, 96, 64))
STAGE_4A = ((480, 192, 96, 208, 16, 48, 64),)
STAGE_4BCD = (
    (512, 160, 112, 224, 24, 64, 64),
    (512, 128, 128, 256, 24, 64, 64),
    (512, 112, 144, 288, 32, 64, 64),
)
STAGE_4E = ((528, 256, 160, 320, 32, 128, 128),)
STAGE_5 = ((832, 256, 160, 320, 32, 128, 128), (832, 384, 192, 384, 48, 128, 128))


class Conv(nn.Sequential):
    """Convolution, optional batch norm, ReLU; padded so that stride 1 keeps h and w."""

    def __init__(
        self, channels: int, out: int, kernel: int, *, batch_norm: bool, stride: int = 1
    ) -> None:
        padding = kernel // 2
        convolution = nn.Conv2d(channels, out, kernel, stride, padding, bias=not batch_norm)
        norm = (nn.BatchNorm2d(out, eps=0.001),) if batch_norm else ()
        super().__init__(convolution, *norm, nn.ReLU(inplace=True))


class Inception(nn.Module):
    """Four parallel branches whose channels are concatenated."""

    def __init__(self, channels: tuple[int, ...], *, batch_norm: bool) -> None:
        super().__init__()
        inputs, ones, reduce3, threes, reduce5, fives, pooled = channels
        self.one = Conv(inputs, ones, 1, batch_norm=batch_norm)
        self.three = nn.Sequential(
            Conv(inputs, reduce3, 1, batch_norm=batch_norm),
            Conv(reduce3, threes, 3, batch_norm=batch_norm),
        )
        self.five = nn.Sequential(
            Conv(inputs, reduce5, 1, batch_norm=batch_norm),
            Conv(reduce5, fives, 3 if batch_norm else 5, batch_norm=batch_norm),
        )
        self.pool = nn.Sequential(
            nn.MaxPool2d(3, 1, padding=1), Conv(inputs, pooled, 1, batch_norm=batch_norm)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, sum of the branches, h, w)."""
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], dim=1)


class Auxiliary(nn.Sequential):
    """The classifier on an inner stage, used during training."""

    def __init__(self, channels: int, classes: int, *, batch_norm: bool) -> None:
        super().__init__(
            nn.AdaptiveAvgPool2d(4),
            Conv(channels, 128, 1, batch_norm=batch_norm),
            nn.Flatten(),
            nn.Linear(128 * 4 * 4, 1024),
            nn.ReLU(inplace=True),
            nn.Dropout(0.7),
            nn.Linear(1024, classes),
        )


class GoogLeNet(nn.Module):
    """Nine inception modules, and in training two auxiliary classifiers."""

    def __init__(
        self, *, classes: int = 1000, dropout: float = 0.4, batch_norm: bool = True
    ) -> None:
        super().__init__()

        def stage(modules: tuple[tuple[int, ...], ...]) -> nn.Sequential:
            return nn.Sequential(*(Inception(each, batch_norm=batch_norm) for each in modules))

        norms = () if batch_norm else (nn.LocalResponseNorm(5),)
        self.stem = nn.Sequential(
            Conv(3, 64, 7, batch_norm=batch_norm, stride=2),
            *(_pool(), *norms),
            Conv(64, 64, 1, batch_norm=batch_norm),
            Conv(64, 192, 3, batch_norm=batch_norm),
            *(*norms, _pool()),
        )
        self.stage4a = nn.Sequential(stage(STAGE_3), _pool(), stage(STAGE_4A))
        self.stage4d = stage(STAGE_4BCD)
        self.stage5 = nn.Sequential(stage(STAGE_4E), _pool(), stage(STAGE_5))
        self.auxiliary4a = Auxiliary(512, classes, batch_norm=batch_norm)
        self.auxiliary4d = Auxiliary(528, classes, batch_norm=batch_norm)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(1024, classes)
        )

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """(n, 3, h, w) -> logits (n, classes); in training also those after 4a and after 4d."""
        inner = self.stage4a(self.stem(images))
        deeper = self.stage4d(inner)
        logits: Tensor = self.head(self.stage5(deeper))
        if self.training:
            return logits, self.auxiliary4a(inner), self.auxiliary4d(deeper)
        return logits


def _pool() -> nn.Module:
    return nn.MaxPool2d(3, 2, padding=1)
