"""card: what this process may take of a GPU."""

from __future__ import annotations

import os

import torch

from outcore.allocators import Card
from outcore.allocators.best_fit import BestFit
from outcore.allocators.expandable import ExpandableSegments
from outcore.execute.segments import asked, expands


def card(device: torch.device) -> Card:
    """That of a GPU, with what this process's tensors hold of it already.

    No more than the fraction that torch was told to keep to.
    """
    free, total = torch.cuda.mem_get_info(device)
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    limit = int(min(free + torch.cuda.memory_reserved(device), int(fraction * total)))
    if expands(asked(os.environ)[1]) is False:
        return Card(limit, BestFit())
    return Card(limit, ExpandableSegments(fraction=fraction < 1))
