"""TwoHeads: one trunk with two outputs: the class of an image, and the image reconstructed."""

from torch import Tensor, nn


class TwoHeads(nn.Module):
    """A classifier and a decoder on the same features.

    Both heads use the trunk's result, so its gradient is the sum of two.
    """

    def __init__(self, *, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            *(nn.Conv2d(3, width, 3, 2, padding=1), nn.BatchNorm2d(width), nn.GELU()),
            *(nn.Conv2d(width, 2 * width, 3, 2, padding=1), nn.BatchNorm2d(2 * width), nn.GELU()),
        )
        self.classify = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, classes)
        )
        self.reconstruct = nn.Sequential(
            *(nn.ConvTranspose2d(2 * width, width, 2, 2), nn.GELU()),
            nn.ConvTranspose2d(width, 3, 2, 2),
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(n, 3, h, w), h and w multiples of 4 -> logits (n, classes) and images (n, 3, h, w)."""
        features = self.trunk(images)
        return self.classify(features), self.reconstruct(features)
