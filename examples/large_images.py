"""Classify images of 2048 x 2048 with ResNet-50, two at a time, inside a byte budget.

    python examples/large_images.py --budget 4GiB

The images are crops of scikit-learn's two sample photographs, scaled up. The script needs the extra
`demo`. In-core the step needs 13.6 GiB (predicted):

    outcore estimate examples/large_images.py:step --budget 4GiB
"""

# ruff: noqa: INP001, T201 - a standalone script that prints

import argparse
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

import outcore
from outcore.networks import network, photograph_batches
from outcore.units import format_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, CROP = 2, 427  # the photographs have 640 x 427 pixels
LARGE = 2048, "4GiB"
SMALL = 256, "28MiB"
"""Side length in pixels, and budget."""


def batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scaled crops (2, 3, size, size), and which photograph each crop is from."""
    for photographs in photograph_batches(BATCH, size=min(size // 2, CROP)):
        (images,), (labels,) = photographs.inputs, photographs.targets
        yield interpolate(images, size=(size, size), mode="bicubic"), labels


def step() -> tuple[nn.Module, Tensor, Any]:
    """A training step at full size, for `outcore estimate`."""
    images = torch.empty(BATCH, 3, LARGE[0], LARGE[0])
    labels, model = torch.zeros(BATCH, dtype=torch.int64), network("resnet50").build(classes=2)
    return model, images, lambda logits: cross_entropy(logits, labels)


def main(budget: str | None, steps: int, *, small: bool, plain: bool) -> nn.Module:
    """Train, then print the plan and the measured figures. Returns the network."""
    size, usual_budget = SMALL if small else LARGE
    torch.manual_seed(0)
    spec = network("resnet50").small if small else network("resnet50")
    model = spec.build(classes=2).to(DEVICE)
    if not plain:
        outcore.wrap(model, budget=budget or usual_budget)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for number, (images, labels) in enumerate(islice(batches(size), steps), 1):
        optimizer.zero_grad()
        loss = cross_entropy(model(images.to(DEVICE)), labels.to(DEVICE))
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
    parser = argparse.ArgumentParser(description="Train ResNet-50 on large images in a budget.")
    parser.add_argument("--budget", help=f"{LARGE[-1]} if not given; {SMALL[-1]} with --small")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="the same in seconds")
    parser.add_argument("--plain", action="store_true", help="without outcore, to compare")
    main(**vars(parser.parse_args()))
