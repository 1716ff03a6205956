"""AlexNet: Krizhevsky et al., "ImageNet Classification with Deep CNNs", 2012 (section 3.5)."""

from torch import Tensor, nn


class AlexNet(nn.Module):
    """Five convolutions and three linear layers, with local response normalization.

    ``groups=2`` splits the second, fourth and fifth convolution into two groups, as the paper did
    to use two GPUs. ``groups=1`` is what Chainer's example and later comparisons train.
    """

    def __init__(
        self,
        *,
        classes: int = 1000,
        size: int = 227,
        groups: int = 1,
        width: int = 4096,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 96, 11, 4), nn.ReLU(inplace=True)),
            *(_response_norm(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(96, 256, 5, padding=2, groups=groups), nn.ReLU(inplace=True)),
            *(_response_norm(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(256, 384, 3, padding=1), nn.ReLU(inplace=True)),
            *(nn.Conv2d(384, 384, 3, padding=1, groups=groups), nn.ReLU(inplace=True)),
            *(nn.Conv2d(384, 256, 3, padding=1, groups=groups), nn.ReLU(inplace=True)),
            nn.MaxPool2d(3, 2),
        )
        self.classifier = nn.Sequential(
            *(nn.Linear(256 * _side(size) ** 2, width), nn.ReLU(inplace=True)),
            *(nn.Dropout(dropout), nn.Linear(width, width), nn.ReLU(inplace=True)),
            *(nn.Dropout(dropout), nn.Linear(width, classes)),
        )

    def forward(self, images: Tensor) -> Tensor:
        """(n, 3, size, size) -> logits (n, classes)."""
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def _response_norm() -> nn.Module:
    return nn.LocalResponseNorm(5, alpha=5e-4, beta=0.75, k=2.0)  # torch divides alpha by 5


def _side(size: int) -> int:
    """Pixels along one side of the last feature map: 6 for images of 227."""
    side = (size - 11) // 4 + 1
    for _ in range(3):
        side = (side - 3) // 2 + 1
    return side
