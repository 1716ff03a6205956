"""LSTM language model, unrolled step by step: Zaremba et al., "RNN Regularization", 2014.

The gates are separate ops, not a fused kernel. So the captured step is a long chain of small ops,
whose parameters are used once per time step.
"""

import torch
from torch import Tensor, nn


class LSTMCell(nn.Module):
    """One time step of a layer: four gates computed from the input and the hidden state."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(inputs + width, 4 * width)

    def forward(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """(n, inputs) and twice (n, width) -> the next hidden and cell state, each (n, width)."""
        gates = self.gates(torch.cat([x, hidden], dim=-1))
        enter, forget, candidate, leave = gates.chunk(4, dim=-1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * candidate.tanh()
        return leave.sigmoid() * cell.tanh(), cell


class LSTM(nn.Module):
    """A stack of recurrent layers between an embedding and a linear layer.

    Dropout acts on the connections between layers only, never on the recurrent ones (section 3.1).
    """

    def __init__(
        self,
        *,
        vocabulary: int = 10000,
        layers: int = 2,
        width: int = 650,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.width = width
        self.tokens = nn.Embedding(vocabulary, width)
        self.cells = nn.ModuleList(LSTMCell(width, width) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, t), int64 -> logits (n, t, vocabulary); states start at zero."""
        x = self.tokens(tokens)
        for cell in self.cells:
            x = self._unroll(cell, self.dropout(x))
        logits: Tensor = self.head(self.dropout(x))
        return logits

    def _unroll(self, step: nn.Module, x: Tensor) -> Tensor:
        """Run one layer over the time axis: (n, t, width) -> (n, t, width)."""
        hidden = cell = x.new_zeros(len(x), self.width)
        outputs = []
        for moment in x.unbind(dim=1):
            hidden, cell = step(moment, hidden, cell)
            outputs.append(hidden)
        return torch.stack(outputs, dim=1)
