"""VGG: Simonyan and Zisserman, "Very Deep Convolutional Networks", 2014 (Table 1, column D)."""

from collections.abc import Iterator

from torch import Tensor, nn


class VGG(nn.Module):
    """Five stages of 3x3 convolutions and three linear layers, without batch norm.

    ``convolutions`` counts the 3x3 convolutions of the five stages: (2, 2, 3, 3, 3) is VGG-16.
    Images that are not 224x224 are pooled to 7x7 before the classifier.
    """

    def __init__(
        self,
        convolutions: tuple[int, int, int, int, int] = (2, 2, 3, 3, 3),
        *,
        classes: int = 1000,
        width: int = 64,
        hidden: int = 4096,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(*_features(convolutions, width))
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            *(nn.Linear(8 * width * 7 * 7, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout)),
            *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout)),
            nn.Linear(hidden, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """(n, 3, h, w) -> logits (n, classes)."""
        logits: Tensor = self.classifier(self.pool(self.features(images)).flatten(1))
        return logits


def _features(convolutions: tuple[int, ...], width: int) -> Iterator[nn.Module]:
    channels = 3
    for stage, repeats in enumerate(convolutions):
        out = width << min(stage, 3)
        for _ in range(repeats):
            yield nn.Conv2d(channels, out, 3, padding=1)
            yield nn.ReLU(inplace=True)
            channels = out
        yield nn.MaxPool2d(2)
