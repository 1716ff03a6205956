"""Train a network whose step needs more memory than there is."""

# ruff: noqa: INP001, T201 - a standalone script that prints

import argparse

import torch
from torch import Tensor, nn

import outcore

ROWS = 2**21


def build() -> nn.Module:
    """Many narrow layers on many rows: small weights, but large activations saved for backward."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(64)))


def step() -> tuple[nn.Module, Tensor]:
    """The training step, for `outcore estimate`."""
    return build(), torch.empty(ROWS, 32)


def main(rows: int, budget: str | None) -> None:
    """Train six steps; with a budget, print outcore's report at the end."""
    model = build()
    if budget is not None:
        outcore.wrap(model, budget=budget)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(rows, 32)).square().mean().backward()
        optimizer.step()
    if budget is not None:
        print(outcore.handle(model).report())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--budget")
    main(**vars(parser.parse_args()))
