"""Train ResNet-50 on photographs inside a byte budget.

    python examples/train_resnet.py --budget 700MiB

The script needs the extra `demo` (scikit-learn and pillow, for the photographs).
"""

# ruff: noqa: INP001, T201 - a standalone script that prints

import argparse
from itertools import islice

import torch
from torch.nn.functional import cross_entropy

import outcore
from outcore.networks import network, photograph_batches

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main(budget: str, batch: int, size: int, iterations: int) -> None:
    """Train, and print the losses, the plan and the measured figures."""
    model = network("resnet50").build(classes=2).to(DEVICE)
    backend = outcore.Backend(budget=budget)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches = photograph_batches(batch, size=size)
    for number, photographs in enumerate(islice(batches, iterations), 1):
        (images,), (labels,) = photographs.inputs, photographs.targets
        optimizer.zero_grad()
        loss = cross_entropy(compiled(images.to(DEVICE)), labels.to(DEVICE))
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        optimizer.step()
        print(f"iteration {number}: loss {loss.item():.4f}")
    print(backend.report())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train ResNet-50 inside a byte budget.")
    parser.add_argument("--budget", default="700MiB")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=224, help="pixels on a side of a crop")
    parser.add_argument("--iterations", type=int, default=10)
    main(**vars(parser.parse_args()))
