"""Train a small network on scikit-learn's digits."""

# ruff: noqa: INP001, T201 - a standalone script that prints

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import outcore


def build() -> nn.Module:
    """Convolutions on enlarged digits; a step needs 34 MiB."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Upsample(scale_factor=4), nn.Conv2d(1, 32, 3, padding=1)]
    for _ in range(6):
        layers += [nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def train(model: nn.Module, batch: int = 16, iterations: int = 16) -> None:
    """A plain PyTorch training loop."""
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    pixels = images.float().view(-1, 1, 8, 8) / 16
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(iterations):
        chosen = slice(number * batch, (number + 1) * batch)
        optimizer.zero_grad()
        loss = cross_entropy(model(pixels[chosen]), labels[chosen])
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        optimizer.step()
        if number % 2:
            print(f"iteration {number}: loss {loss.item():.9f}")


if __name__ == "__main__":
    model = outcore.wrap(build(), budget="24MiB")
    train(model)
    print(outcore.handle(model).report())
