"""GPT-2: Radford et al., "Language Models are Unsupervised Multitask Learners" (section 2.3)."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from outcore.networks.transformer import BASE, PreNormBlock, TransformerShape, initialize


class GPT(nn.Module):
    """A causal decoder with dropout; the token embedding is also the output layer (tied weights).

    ``length`` is the largest number of tokens in a sequence.
    """

    def __init__(
        self, shape: TransformerShape = BASE, *, vocabulary: int = 50257, length: int = 1024
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, shape.width)
        self.positions = nn.Embedding(length, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.Sequential(
            *(PreNormBlock(shape, causal=True, gelu="tanh") for _ in range(shape.layers))
        )
        self.norm = nn.LayerNorm(shape.width)
        self.apply(initialize)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Two int64 (n, t) -> logits (n, t, vocabulary) and their mean cross entropy, ()."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        logits = functional.linear(self.norm(self.blocks(x)), self.tokens.weight)
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
