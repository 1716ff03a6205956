"""pix2pixHD: Wang et al., "High-Resolution Image Synthesis ... with Conditional GANs", 2018.

Only the global generator (section 3.2; layers in the appendix), without the local enhancer and the
discriminators. Its 36 input channels are those of the published setting for Cityscapes: a map for
each of 35 labels, and one for the boundaries between instances.
"""

from itertools import pairwise

from torch import Tensor, nn

DEVIATION = 0.02  # of the initial weights, as in the authors' program


class Residual(nn.Module):
    """Two 3x3 convolutions with instance norm, added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        first = (*_reflected(channels, channels, 3), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(*first, *_reflected(channels, channels, 3))

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, h, w) -> the same."""
        out: Tensor = x + self.layers(x)
        return out


class Pix2PixHD(nn.Module):
    """Label maps are halved ``levels`` times, transformed, and enlarged to images.

    The convolutions have biases, although the instance norm after them, which has no parameters,
    cancels them. The published network does the same.
    """

    def __init__(
        self, *, channels: int = 36, width: int = 64, levels: int = 4, blocks: int = 9
    ) -> None:
        super().__init__()
        wide = [width << level for level in range(levels + 1)]
        steps = list(pairwise(wide))
        self.encode = nn.Sequential(
            *(*_reflected(channels, width, 7), nn.ReLU(inplace=True)),
            *(_halve(shallow, deep) for shallow, deep in steps),
        )
        self.change = nn.Sequential(*(Residual(wide[-1]) for _ in range(blocks)))
        self.decode = nn.Sequential(
            *(_double(deep, shallow) for shallow, deep in reversed(steps)),
            *(nn.ReflectionPad2d(3), nn.Conv2d(width, 3, 7), nn.Tanh()),
        )
        self.apply(_initialize)

    def forward(self, maps: Tensor) -> Tensor:
        """(n, channels, h, w) -> images (n, 3, h, w) with values from -1 to 1.

        Both h and w must be multiples of ``2**levels``, and larger than that.
        """
        images: Tensor = self.decode(self.change(self.encode(maps)))
        return images


def _reflected(channels: int, out: int, kernel: int) -> tuple[nn.Module, ...]:
    pad = nn.ReflectionPad2d(kernel // 2)
    return pad, nn.Conv2d(channels, out, kernel), nn.InstanceNorm2d(out)


def _halve(channels: int, out: int) -> nn.Module:
    convolution = nn.Conv2d(channels, out, 3, 2, padding=1)
    return nn.Sequential(convolution, nn.InstanceNorm2d(out), nn.ReLU(inplace=True))


def _double(channels: int, out: int) -> nn.Module:
    convolution = nn.ConvTranspose2d(channels, out, 3, 2, padding=1, output_padding=1)
    return nn.Sequential(convolution, nn.InstanceNorm2d(out), nn.ReLU(inplace=True))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, std=DEVIATION)
