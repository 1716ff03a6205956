"""synthetic: make random batches of the right shapes, and the criteria for them.

Each batch function takes the number of samples, a CPU generator, and sizes. Each criterion takes a
model's outputs and the targets of its batch, and returns a scalar.
"""

import torch
from torch import Generator, Tensor
from torch.nn import functional

from outcore.networks.spec import Batch

MASKED_FRACTION = 0.15  # of the tokens: Devlin et al., section 3.1
MASK_TOKEN = 103
IGNORED = -100  # the target that cross_entropy leaves out
AUXILIARY_WEIGHT = 0.3  # Szegedy et al., section 5


def images(n: int, generator: Generator, *, size: int = 224, classes: int = 1000) -> Batch:
    """Images (n, 3, size, size) from N(0, 1), and labels (n,) below `classes`."""
    pixels = torch.randn(n, 3, size, size, generator=generator)
    return Batch((pixels,), (_integers((n,), classes, generator),))


def images_twice(n: int, generator: Generator, *, size: int = 224, classes: int = 10) -> Batch:
    """Like `images`, with the images themselves as a second target."""
    batch = images(n, generator, size=size, classes=classes)
    return Batch(batch.inputs, batch.targets + batch.inputs)


def volumes(
    n: int, generator: Generator, *, size: int = 128, channels: int = 3, classes: int = 3
) -> Batch:
    """Volumes (n, channels, size, size, size), and a class for each voxel."""
    voxels = torch.randn(n, channels, size, size, size, generator=generator)
    return Batch((voxels,), (_integers((n, size, size, size), classes, generator),))


def scenes(n: int, generator: Generator, *, size: int = 513, classes: int = 21) -> Batch:
    """Images (n, 3, size, size) from N(0, 1), and a class for each pixel."""
    pixels = torch.randn(n, 3, size, size, generator=generator)
    return Batch((pixels,), (_integers((n, size, size), classes, generator),))


def label_maps(n: int, generator: Generator, *, size: int = 512, labels: int = 35) -> Batch:
    """Maps (n, labels + 1, size, 2 * size) of zeros and ones, and images (n, 3, size, 2 * size).

    Each pixel has exactly one of the labels. The last map marks pixels on a boundary. The images
    have values from -1 to 1.
    """
    label = _integers((n, 1, size, 2 * size), labels, generator)
    boundary = _integers((n, 1, size, 2 * size), 2, generator)
    one_hot = label == torch.arange(labels).view(-1, 1, 1)
    pixels = torch.rand(n, 3, size, 2 * size, generator=generator) * 2 - 1
    return Batch((torch.cat([one_hot.float(), boundary.float()], dim=1),), (pixels,))


def clips(
    n: int,
    generator: Generator,
    *,
    frames: int = 16,
    size: int = 112,
    width: int = 0,
    classes: int = 400,
) -> Batch:
    """Video clips (n, 3, frames, size, width) from N(0, 1), and labels (n,) below `classes`.

    If `width` is 0, frames are square.
    """
    pixels = torch.randn(n, 3, frames, size, width or size, generator=generator)
    return Batch((pixels,), (_integers((n,), classes, generator),))


def next_tokens(
    n: int, generator: Generator, *, length: int = 1024, vocabulary: int = 50257
) -> Batch:
    """Tokens (n, length) and the same shifted by one, both as inputs of a model that has a loss."""
    tokens = _integers((n, length + 1), vocabulary, generator)
    return Batch((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))


def shifted_tokens(
    n: int, generator: Generator, *, length: int = 35, vocabulary: int = 10000
) -> Batch:
    """Tokens (n, length), and the same shifted by one as targets."""
    batch = next_tokens(n, generator, length=length, vocabulary=vocabulary)
    return Batch(batch.inputs[:1], batch.inputs[1:])


def masked_tokens(
    n: int, generator: Generator, *, length: int = 512, vocabulary: int = 30522
) -> Batch:
    """Two segments of tokens, of which some are masked, and the masked ones as targets."""
    tokens = _integers((n, length), vocabulary, generator)
    masked = torch.rand(n, length, generator=generator) < MASKED_FRACTION
    segments = (torch.arange(length) >= length // 2).long().repeat(n, 1)
    hidden = tokens.masked_fill(masked, MASK_TOKEN)
    return Batch((hidden, segments), (tokens.masked_fill(~masked, IGNORED),))


def classify(logits: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
    """Mean cross entropy of logits (n, classes, ...) against labels (n, ...)."""
    return functional.cross_entropy(logits, targets[0])


def classify_tokens(logits: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
    """Mean cross entropy of logits (n, t, vocabulary) against tokens (n, t)."""
    return functional.cross_entropy(
        logits.flatten(0, 1), targets[0].flatten(), ignore_index=IGNORED
    )


def classify_with_auxiliaries(
    outputs: Tensor | tuple[Tensor, ...], targets: tuple[Tensor, ...]
) -> Tensor:
    """Cross entropy of the main logits, plus 0.3 times that of each auxiliary output, if any."""
    logits, *auxiliaries = (outputs,) if isinstance(outputs, Tensor) else outputs
    auxiliary = sum((classify(each, targets) for each in auxiliaries), start=logits.new_zeros(()))
    return classify(logits, targets) + AUXILIARY_WEIGHT * auxiliary


def classify_and_reconstruct(outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, ...]) -> Tensor:
    """Cross entropy of the first output, plus mean squared error of the second."""
    logits, reconstructed = outputs
    labels, originals = targets
    return functional.cross_entropy(logits, labels) + functional.mse_loss(reconstructed, originals)


def reconstruct(images: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
    """Mean absolute error of images."""
    return functional.l1_loss(images, targets[0])


def own_loss(outputs: tuple[Tensor, Tensor], _targets: tuple[Tensor, ...]) -> Tensor:
    """Return the loss of a model that returns (logits, loss)."""
    return outputs[1]


def _integers(shape: tuple[int, ...], below: int, generator: Generator) -> Tensor:
    return torch.randint(below, shape, generator=generator)
