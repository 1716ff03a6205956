"""The memory that this process may use on a GPU, and where torch's allocator puts requests."""

from __future__ import annotations

import gc
import random

import torch

from outcore.allocators.expandable import ExpandableHeap, ExpandableSegments
from outcore.runtime.limits.card import card, held
from tests.gpu.test_cuda import gpu_driver

MIB = 1 << 20


def test_torchs_allocator_serves_requests_as_its_model_does() -> None:
    """Each request gets the address that the model predicts, and memory is given back as often."""
    gpu_driver()  # segments expand from here on
    device = torch.device("cuda", torch.cuda.current_device())
    some = [torch.empty(size * MIB, dtype=torch.uint8, device=device) for size in (5, 30, 2, 50)]
    del some[1], some[2]
    gc.collect()
    torch.cuda.empty_cache()
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    total = torch.cuda.get_device_properties(device).total_memory
    limit = torch.cuda.memory_reserved(device) + 1024 * MIB
    torch.cuda.set_per_process_memory_fraction(limit / total, device)
    try:
        found, used = card(device), held(device)
        assert isinstance(found.allocator, ExpandableSegments)
        assert found.allocator.fraction
        assert abs(found.limit_bytes - limit) < MIB
        assert used is not None
        heap = found.allocator.heap(found.limit_bytes)
        assert isinstance(heap, ExpandableHeap)
        heap.hold(used)
        _compare(heap, device)
    finally:
        torch.cuda.set_per_process_memory_fraction(fraction, device)


def _compare(heap: ExpandableHeap, device: torch.device) -> None:
    """Make the same requests of both; they are larger than the free memory in other segments."""
    draws, apart = random.Random(0), set()
    live: list[tuple[torch.Tensor, int]] = []
    before = torch.cuda.memory_stats(device)["num_alloc_retries"]
    while heap.retries < 10:
        size = draws.randint(21, 160) * MIB
        while sum(tensor.nbytes for tensor, _ in live) + size > 800 * MIB:
            tensor, address = live.pop(draws.randrange(len(live)))
            heap.free(address)
            del tensor
        tensor = torch.empty(size, dtype=torch.uint8, device=device)
        live.append((tensor, heap.malloc(size)))
        apart.add(tensor.data_ptr() - live[-1][1])
        assert len(apart) == 1
        retries = torch.cuda.memory_stats(device)["num_alloc_retries"] - before
        assert retries == heap.retries
