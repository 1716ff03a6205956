"""card: how much of a GPU's memory this process may use, and how much it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from outcore.allocators import Card, Held
from outcore.allocators.best_fit import BestFit
from outcore.allocators.expandable import LARGE_PAGE, SMALL_PAGE, ExpandableSegments
from outcore.execute.torch_allocator import expands_well

DEFAULT_POOL = (0, 0)
"""The id of the allocator's pool that neither CUDA graphs nor `torch.cuda.MemPool` use."""


def card(device: torch.device) -> Card:
    """The Card of a GPU, limited to what is free or already reserved by this process.

    The limit is at most the fraction that torch may use
    (`torch.cuda.get_per_process_memory_fraction`).
    """
    free, total = torch.cuda.mem_get_info(device)
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    limit = int(min(free + torch.cuda.memory_reserved(device), int(fraction * total)))
    allocator = ExpandableSegments(fraction=fraction < 1) if expands_well() else BestFit()
    return Card(limit, allocator)


def held(device: torch.device) -> Held | None:
    """What this process holds of a GPU; None if expandable segments do not work.

    Reads all blocks of torch's allocator: milliseconds for thousands of tensors.
    """
    if not expands_well():
        return None
    number = torch.cuda.device(device).idx
    snapshot: Callable[..., list[dict[str, Any]]] = torch.cuda.memory_snapshot
    found = snapshot(include_traces=False)  # a history that the user records may be long
    segments = (segment for segment in found if segment["device"] == number)
    return laid(segments, torch.cuda.current_stream(device).cuda_stream)


def laid(segments: Iterable[dict[str, Any]], stream: int) -> Held:
    """Which blocks of torch's allocator are in use, and where (`torch.cuda.memory_snapshot`).

    Block by block for expandable segments of `stream`, on which steps run. Of the others, what the
    allocator cannot give back to a full device counts as reserved (`_kept_bytes`).
    """
    found: dict[str, list[tuple[int, int]]] = {"small": [], "large": []}
    starts: dict[str, int] = {}
    elsewhere = external = 0
    for segment in segments:
        used = [(b["address"], b["size"]) for b in segment["blocks"] if b["state"] != "inactive"]
        kind, start = segment["segment_type"], segment["address"]
        own = segment["stream"] == stream and tuple(segment["segment_pool_id"]) == DEFAULT_POOL
        if not (own and segment["is_expandable"]):
            external += _kept_bytes(segment, used)
            elsewhere += sum(nbytes for _, nbytes in used)
            continue
        found[kind] += used
        starts[kind] = min(start, starts.get(kind, start))
    small, large = (
        tuple((address - starts[kind], nbytes) for address, nbytes in sorted(found[kind]))
        for kind in ("small", "large")
    )
    return Held(small, large, external, elsewhere)


def _kept_bytes(segment: dict[str, Any], used: Iterable[tuple[int, int]]) -> int:
    """Bytes of a segment that the allocator keeps because of the blocks in use, (address, bytes).

    All of it, or only the pages with such blocks if it is expandable.
    """
    whole: int = segment["total_size"]
    if not segment["is_expandable"]:
        return whole if used else 0
    page = SMALL_PAGE if segment["segment_type"] == "small" else LARGE_PAGE
    start = segment["address"]
    spans = ((address - start, address - start + nbytes - 1) for address, nbytes in used)
    pages = {n for low, high in spans for n in range(low // page, high // page + 1)}
    return min(whole, page * len(pages))
