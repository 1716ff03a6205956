"""Train a graph convolution network on a whole graph at once inside a byte budget.

    python examples/gcn.py --budget 3.5GiB

The graph is generated, with as many nodes, edges, features and classes as ogbn-arxiv. The script
needs only torch. In-core the step needs 7.20 GiB (predicted):

    outcore estimate examples/gcn.py:step --budget 3.5GiB --states 2
"""

# ruff: noqa: INP001, T201 - a standalone script that prints

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

import outcore
from outcore.units import format_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FEATURES, CLASSES = 128, 40
LARGE = 169_343, 1_166_243, 256, "3.5GiB"
SMALL = 2_000, 10_000, 64, "12MiB"
"""Nodes, edges, channels and budget."""


class Convolution(nn.Module):
    """Kipf and Welling's graph convolution after norm, ReLU and dropout, with a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor, ends: Tensor, scale: Tensor) -> Tensor:
        """Nodes (n, width), ends of edges (2, edges), and degree ** -0.5 (n, 1) -> (n, width)."""
        y = dropout(self.norm(x).relu(), 0.5, self.training)
        sent = self.linear(y) * scale
        received: Tensor = sent.index_add(0, ends[1], sent.index_select(0, ends[0]))
        return x + received * scale


class GCN(nn.Module):
    """Eight convolutions between two linear layers."""

    def __init__(self, width: int, layers: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)
        self.layers = nn.ModuleList(Convolution(width) for _ in range(layers))

    def forward(self, x: Tensor, ends: Tensor, scale: Tensor) -> Tensor:
        """The arguments of a convolution -> a score for each class (n, 40)."""
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, ends, scale)
        scores: Tensor = self.last(x)
        return scores


def generated(nodes: int, edges: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """A generated graph (features, ends of edges, degree ** -0.5), and the class of each node."""
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (nodes,), generator=random)
    centers = torch.randn(CLASSES, FEATURES, generator=random)
    features = centers[labels] + 4 * torch.randn(nodes, FEATURES, generator=random)
    cited = (nodes * torch.rand(edges, generator=random) ** 3).long()  # many cite the same few
    citing = torch.randint(nodes, (edges,), generator=random)
    ends = torch.stack([torch.cat([citing, cited]), torch.cat([cited, citing])])  # both directions
    degree = torch.ones(nodes).index_add(0, ends[1], torch.ones(2 * edges))
    return (features, ends, degree.rsqrt()[:, None]), labels


def step() -> tuple[nn.Module, tuple[Tensor, Tensor, Tensor], Any]:
    """A training step at full size, for `outcore estimate`."""
    nodes, edges, width, _ = LARGE
    graph, labels = generated(nodes, edges)
    return GCN(width), graph, lambda scores: cross_entropy(scores, labels)


def main(budget: str | None, steps: int, *, small: bool, plain: bool) -> nn.Module:
    """Train, then print the plan and the measured figures. Returns the network."""
    nodes, edges, width, usual_budget = SMALL if small else LARGE
    torch.manual_seed(0)
    model = GCN(width).to(DEVICE)
    if not plain:
        outcore.wrap(model, budget=budget or usual_budget)
    nodes_and_edges, classes = generated(nodes, edges)
    graph, labels = [each.to(DEVICE) for each in nodes_and_edges], classes.to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    losses = []
    for number in range(1, steps + 1):
        optimizer.zero_grad()
        loss = cross_entropy(model(*graph), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        optimizer.step()
        losses.append(loss.item())
        print(f"step {number}: loss {losses[-1]:.6f}")
    if not plain:
        report = outcore.handle(model).report()
        peak, of = format_bytes(report.measured_peak_bytes or 0), format_bytes(report.budget_bytes)
        print(report)
        print(f"\npeak {peak} of a budget of {of}; loss {losses[0]:.6f} -> {losses[-1]:.6f}")
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a GCN on a whole graph inside a budget.")
    parser.add_argument("--budget", help=f"{LARGE[-1]} if not given; {SMALL[-1]} with --small")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="the same in seconds")
    parser.add_argument("--plain", action="store_true", help="without outcore, to compare")
    main(**vars(parser.parse_args()))
