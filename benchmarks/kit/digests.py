"""digests: hash results of training, so that processes can exchange and compare them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

THREADS = 4
"""Each holds one tensor in host memory at a time."""


def digests(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    """A digest of the bytes of each tensor."""
    with ThreadPoolExecutor(THREADS) as pool:  # hashing gigabytes takes seconds without the GIL
        return tuple(pool.map(_digest, tensors))


def differing(first: Sequence[Sequence[str]], second: Sequence[Sequence[str]]) -> int:
    """The number of tensors that are not bitwise equal, over all steps. Missing ones count too."""
    count = abs(len(first) - len(second))
    for mine, theirs in zip(first, second, strict=False):
        count += abs(len(mine) - len(theirs))
        count += sum(a != b for a, b in zip(mine, theirs, strict=False))
    return count


def _digest(tensor: Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(raw.numpy().data, digest_size=16).hexdigest()
