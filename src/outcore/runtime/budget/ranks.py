"""ranks: name this process among those that train one model together (docs/several-devices.md).

Each process plans for itself, from what it measures, under its own budget. Nothing here
communicates with other processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed

from outcore.errors import InfeasibleError


def rank_words() -> str:
    """`rank 1 of 4` (ranks begin at 0); empty if this process trains alone."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return ""
    size = distributed.get_world_size()
    return f"rank {distributed.get_rank()} of {size}" if size > 1 else ""


@contextmanager
def naming_the_rank() -> Iterator[None]:
    """Add to an InfeasibleError the rank that has no plan: others may have one and continue."""
    try:
        yield
    except InfeasibleError as error:
        rank = rank_words()
        if rank:
            error.add_note(
                f"outcore: this is {rank}. The other ranks have their own budgets and plans, and "
                "wait for this one at their next collective: end the job, as torchrun does when a "
                "process fails"
            )
        raise
