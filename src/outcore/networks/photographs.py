"""photographs: make training batches of random crops from scikit-learn's two sample images.

Needs the extra ``demo`` (scikit-learn and pillow). The photographs are part of scikit-learn, so
nothing is downloaded.
"""

import importlib
from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from outcore.errors import OptionValueError, PhotographsError
from outcore.networks.spec import Batch

# Per channel, over ImageNet's training set: the usual normalization of photographs.
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
CLASSES = 2


def photograph_batches(n: int, seed: int = 0, *, size: int = 224) -> Iterator[Batch]:
    """Yield batches without end: normalized crops (n, 3, size, size), and labels (n,) of 0 or 1.

    The label says which photograph a crop is from. Crops are at random positions, and half of them
    are mirrored. Everything depends on `seed` alone.

    Raises:
        OptionValueError: `size` is larger than the photographs.
        PhotographsError: scikit-learn or pillow is not installed.
    """
    photographs = _photographs()
    _check(size, photographs)
    return _batches(photographs, n, size, Generator().manual_seed(seed))


def _batches(
    photographs: tuple[Tensor, ...], n: int, size: int, generator: Generator
) -> Iterator[Batch]:
    while True:
        labels = torch.randint(len(photographs), (n,), generator=generator)
        crops = [_crop(photographs[label], size, generator) for label in labels.tolist()]
        yield Batch((torch.stack(crops),), (labels,))


def _crop(photograph: Tensor, size: int, generator: Generator) -> Tensor:
    top, left = (_below(side - size + 1, generator) for side in photograph.shape[1:])
    crop = photograph[:, top : top + size, left : left + size]
    return crop.flip(-1) if _below(2, generator) else crop


def _below(bound: int, generator: Generator) -> int:
    return int(torch.randint(bound, (), generator=generator))


def _check(size: int, photographs: tuple[Tensor, ...]) -> None:
    largest = min(min(each.shape[1:]) for each in photographs)
    if not 1 <= size <= largest:
        raise OptionValueError(
            option="size",
            value=size,
            reason=f"crops have from 1 to {largest} pixels on a side, as the photographs allow",
        )


def _photographs() -> tuple[Tensor, ...]:
    """Load the photographs, each (3, h, w), float32 and normalized."""
    try:  # an optional package that only the demo needs
        sample_images = importlib.import_module("sklearn.datasets").load_sample_images()
    except ImportError as error:
        raise PhotographsError(reason=str(error)) from error
    return tuple(_normalize(torch.from_numpy(pixels.copy())) for pixels in sample_images.images)


def _normalize(pixels: Tensor) -> Tensor:
    """Turn bytes (h, w, 3) into float32 (3, h, w) of about zero mean and unit deviation."""
    colors = pixels.permute(2, 0, 1).float() / 255
    return (colors - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(DEVIATION).view(3, 1, 1)
