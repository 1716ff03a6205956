"""BERT with its masked-language head: Devlin et al., "BERT", 2018 (section 3, appendix A)."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from outcore.networks.transformer import (
    BASE,
    FeedForward,
    SelfAttention,
    TransformerShape,
    initialize,
)

EPSILON = 1e-12
SEGMENTS = 2


class PostNormBlock(nn.Module):
    """norm(x + attention(x)), then norm(x + feed-forward(x)), with dropout on both summands."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.attention = SelfAttention(shape)
        self.norm1 = nn.LayerNorm(shape.width, EPSILON)
        self.feed_forward = FeedForward(shape.width)
        self.norm2 = nn.LayerNorm(shape.width, EPSILON)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, width) -> (n, t, width)."""
        x = self.norm1(x + self.dropout(self.attention(x)))
        out: Tensor = self.norm2(x + self.dropout(self.feed_forward(x)))
        return out


class BERT(nn.Module):
    """A bidirectional encoder; the output layer shares its weight with the token embedding.

    ``length`` is the largest number of tokens in a sequence.
    """

    def __init__(
        self, shape: TransformerShape = BASE, *, vocabulary: int = 30522, length: int = 512
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, shape.width)
        self.positions = nn.Embedding(length, shape.width)
        self.segments = nn.Embedding(SEGMENTS, shape.width)
        self.norm = nn.LayerNorm(shape.width, EPSILON)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.Sequential(*(PostNormBlock(shape) for _ in range(shape.layers)))
        self.head = nn.Sequential(
            nn.Linear(shape.width, shape.width), nn.GELU(), nn.LayerNorm(shape.width, EPSILON)
        )
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.apply(initialize)

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        """Two int64 (n, t) -> logits (n, t, vocabulary)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        embedded = self.tokens(tokens) + self.positions(positions) + self.segments(segments)
        x = self.blocks(self.dropout(self.norm(embedded)))
        return functional.linear(self.head(x), self.tokens.weight, self.bias)
