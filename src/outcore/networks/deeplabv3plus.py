"""DeepLabv3+: Chen et al., "Encoder-Decoder with Atrous ... Convolution ...", 2018 (Figure 2).

The output stride is 16. It differs from the paper's best network in two ways. The encoder is this
package's ResNet-101 (stride in the 3x3) instead of the aligned Xception; its last stage is dilated
as in DeepLabv3 (Chen et al., "Rethinking Atrous Convolution ...", 2017, multi-grid 1, 2, 4). And
its convolutions are plain where that network has depthwise separable ones.
"""

from itertools import cycle

import torch
from torch import Tensor, nn

from outcore.networks.resnet import Blocks, ResNet

STAGE_RATES = (2, 4, 8)  # for the bottlenecks of the last stage: twice the multi-grid
PYRAMID_RATES = (6, 12, 18)


class Pyramid(nn.Module):
    """Atrous spatial pyramid pooling: five views of the same features, concatenated.

    One view is the mean over the image. The batch norm after it sees one value per image, so a
    batch needs at least two images in training.
    """

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.views = nn.ModuleList(
            [_conv(channels, out), *(_conv(channels, out, 3, rate) for rate in PYRAMID_RATES)]
        )
        self.mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), _conv(channels, out))
        self.join = _conv(out * (len(self.views) + 1), out)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, h, w) -> (n, out, h, w)."""
        views = [view(x) for view in self.views]
        joined: Tensor = self.join(torch.cat([*views, self.mean(x).expand_as(views[0])], dim=1))
        return joined


class DeepLabV3Plus(nn.Module):
    """A classifier of pixels: features at a 16th of the image's size, refined at a quarter of it.

    ``blocks`` and ``width`` are those of the ResNet. The features of its first stage are used twice
    in the forward pass: immediately by the next stage, and at the end by the decoder.
    """

    def __init__(
        self, blocks: Blocks = (3, 4, 23, 3), *, classes: int = 21, width: int = 64
    ) -> None:
        super().__init__()
        resnet = ResNet(blocks, width=width)
        shallow, deep, out, reduced = 4 * width, 32 * width, 4 * width, 3 * width // 4
        self.stem = nn.Sequential(resnet.conv1, resnet.bn1, resnet.relu, resnet.maxpool)
        self.layer1 = resnet.layer1
        self.deeper = nn.Sequential(resnet.layer2, resnet.layer3, _atrous(resnet.layer4))
        self.pyramid = Pyramid(deep, out)
        self.reduce = _conv(shallow, reduced)
        self.decode = nn.Sequential(
            *(_conv(out + reduced, out, 3), _conv(out, out, 3)), nn.Conv2d(out, classes, 1)
        )

    def forward(self, images: Tensor) -> Tensor:
        """(n, 3, h, w) -> logits (n, classes, h, w)."""
        shallow = self.layer1(self.stem(images))
        deep = enlarged(self.pyramid(self.deeper(shallow)), shallow.shape[-2:])
        logits = self.decode(torch.cat([deep, self.reduce(shallow)], dim=1))
        return enlarged(logits, images.shape[-2:])


def enlarged(x: Tensor, size: tuple[int, ...]) -> Tensor:
    """Bilinear interpolation (n, channels, h, w) -> (n, channels, *size), with aligned corners.

    It multiplies by a matrix along each axis instead of calling torch's ``interpolate``. On a GPU
    the gradient of ``interpolate`` varies from run to run, and it compiles to other operators than
    it runs uncompiled.
    """
    (height, width), (rows, columns) = x.shape[-2:], size
    return _weights(x, height, rows) @ (x @ _weights(x, width, columns).T)


def _weights(like: Tensor, before: int, after: int) -> Tensor:
    """Row i: how much each pixel before contributes to pixel i after; only two neighbors do."""
    places = torch.linspace(0, before - 1, after, dtype=like.dtype, device=like.device)
    distances = places.unsqueeze(1) - torch.arange(before, device=like.device)
    return (1 - distances.abs()).clamp(min=0)


def _conv(channels: int, out: int, kernel: int = 1, rate: int = 1) -> nn.Module:
    padding = rate * (kernel // 2)
    return nn.Sequential(
        nn.Conv2d(channels, out, kernel, padding=padding, dilation=rate, bias=False),
        *(nn.BatchNorm2d(out), nn.ReLU(inplace=True)),
    )


def _atrous(stage: nn.Sequential) -> nn.Sequential:
    """Remove the stride from a stage, and dilate its 3x3 convolutions instead."""
    rates = cycle(STAGE_RATES)
    for module in stage.modules():
        if isinstance(module, nn.Conv2d):
            module.stride = (1, 1)
            if module.kernel_size == (3, 3):
                rate = next(rates)
                module.dilation = module.padding = (rate, rate)
    return stage
