"""Segment volumes of 4 x 128 x 128 x 128 with MONAI's SwinUNETR inside a byte budget.

    python examples/swin_unetr.py --budget 6GiB

Network, volume and batch are from a report of an out-of-memory error on a 12 GB card (MONAI issue
8042). The volumes are generated. The script needs monai and einops. In-core the step needs
12.1 GiB (predicted):

    outcore estimate examples/swin_unetr.py:step --real --states 2 --budget 6GiB
"""

# ruff: noqa: INP001, T201 - a standalone script that prints

import argparse
from typing import Any

import torch
from monai.losses import DiceCELoss
from monai.networks.nets import SwinUNETR
from torch import Tensor, nn

import outcore
from outcore.units import format_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LARGE: Any = {"feature_size": 24}, (128, 128, 128), "6GiB"
SMALL: Any = {"feature_size": 12, "depths": (1,) * 4, "window_size": 4}, (64, 32, 32), "112MiB"
"""Options of the network, voxels and budget."""


def generated(size: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """A generated volume (1, 4, *size) of three nested balls with noise, and the balls' masks."""
    random = torch.Generator().manual_seed(seed)
    center = torch.rand(3, 1, 1, 1, generator=random) - 0.5
    axes = [torch.linspace(-1, 1, voxels) for voxels in size]
    places = torch.stack(torch.meshgrid(axes, indexing="ij"))
    distance = (places - center).norm(dim=0)
    masks = torch.stack([distance < radius for radius in (0.5, 0.35, 0.2)]).float()
    volume = masks.sum(0) + torch.randn(4, *size, generator=random)
    return volume[None], masks[None]


def step() -> tuple[nn.Module, Tensor, Any]:
    """A training step at full size, for `outcore estimate`.

    It leaves out the Dice part of the loss: MONAI reads values there, and an estimate has none.
    """
    options, size, _ = LARGE
    volume, masks = generated(size)
    criterion = nn.BCEWithLogitsLoss()
    return SwinUNETR(4, 3, **options), volume, lambda scores: criterion(scores, masks)


def main(budget: str | None, steps: int, *, small: bool, plain: bool) -> nn.Module:
    """Train, then print the plan and the measured figures. Returns the network."""
    options, size, usual_budget = SMALL if small else LARGE
    torch.manual_seed(0)
    net: nn.Module = SwinUNETR(in_channels=4, out_channels=3, **options).to(DEVICE)
    if not plain:
        outcore.wrap(net, budget=budget or usual_budget)
    criterion = DiceCELoss(sigmoid=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    losses = []
    for number in range(1, steps + 1):
        volume, masks = (each.to(DEVICE) for each in generated(size, seed=number))
        optimizer.zero_grad()
        loss = criterion(net(volume), masks)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {number}: loss {losses[-1]:.6f}")
    if not plain:
        report = outcore.handle(net).report()
        peak, of = format_bytes(report.measured_peak_bytes or 0), format_bytes(report.budget_bytes)
        print(report)
        print(f"\npeak {peak} of a budget of {of}; loss {losses[0]:.6f} -> {losses[-1]:.6f}")
    return net


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train SwinUNETR inside a byte budget.")
    parser.add_argument("--budget", help=f"{LARGE[-1]} if not given; {SMALL[-1]} with --small")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="the same in seconds")
    parser.add_argument("--plain", action="store_true", help="without outcore, to compare")
    main(**vars(parser.parse_args()))
