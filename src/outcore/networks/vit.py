"""Vision transformer: Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020 (section 3.1)."""

import torch
from torch import Tensor, nn

from outcore.errors import OptionValueError
from outcore.networks.transformer import BASE, PreNormBlock, TransformerShape


class ViT(nn.Module):
    """Patches of an image as a sequence, after a class token from which the class is predicted.

    Raises OptionValueError if ``patch`` does not divide ``size`` (both in pixels).
    """

    def __init__(
        self,
        shape: TransformerShape = BASE,
        *,
        size: int = 224,
        patch: int = 16,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        if size % patch:
            raise OptionValueError(
                option="patch",
                value=patch,
                reason=f"leaves {size % patch} pixels over along an image of {size}x{size}; "
                "choose a divisor of size",
            )
        self.patches = nn.Conv2d(3, shape.width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, shape.width))
        self.positions = nn.Parameter(torch.randn(1, 1 + (size // patch) ** 2, shape.width) * 0.02)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.Sequential(*(PreNormBlock(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(n, 3, size, size) -> logits (n, classes)."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        token = self.class_token.expand(len(images), -1, -1)
        x = self.dropout(torch.cat([token, patches], dim=1) + self.positions)
        logits: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return logits
