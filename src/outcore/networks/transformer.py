"""transformer: the parts that transformers here share: sizes, attention, the pre-norm block."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from outcore.errors import OptionValueError


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """Sizes of a stack of blocks; the default is "base" (BERT-base, GPT-2 small, ViT-B).

    Raises OptionValueError if ``heads`` does not divide ``width``.
    """

    layers: int = 12
    heads: int = 12
    width: int = 768
    dropout: float = 0.1

    def __post_init__(self) -> None:
        """Check that ``heads`` divides ``width``."""
        if self.width % self.heads:
            raise OptionValueError(
                option="heads",
                value=self.heads,
                reason=f"does not divide width={self.width} (remainder {self.width % self.heads}); "
                "choose a width that is a multiple of heads",
            )


BASE = TransformerShape()


class SelfAttention(nn.Module):
    """Multi-head attention by ``scaled_dot_product_attention``, with dropout on its weights."""

    def __init__(self, shape: TransformerShape, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = shape.heads, shape.dropout, causal
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, width) -> (n, t, width)."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind()
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Sequential):
    """Two linear layers with a GELU between them, four times as wide inside."""

    def __init__(self, width: int, *, gelu: Literal["none", "tanh"] = "none") -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(gelu), nn.Linear(4 * width, width))


class PreNormBlock(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)), with dropout on both summands."""

    def __init__(
        self,
        shape: TransformerShape,
        *,
        causal: bool = False,
        gelu: Literal["none", "tanh"] = "none",
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = SelfAttention(shape, causal=causal)
        self.norm2 = nn.LayerNorm(shape.width)
        self.feed_forward = FeedForward(shape.width, gelu=gelu)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, width) -> (n, t, width)."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        out: Tensor = x + self.dropout(self.feed_forward(self.norm2(x)))
        return out


def initialize(module: nn.Module) -> None:
    """Draw the weights of linear layers and embeddings from N(0, 0.02); set biases to zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
