"""storages: make storages, and the regions they are copied to, for tests of drivers."""

import torch

from outcore.execute.disk import MEMORY_ALIGNMENT_BYTES, region_nbytes
from outcore.execute.driver import Region


def region_of(tensor: torch.Tensor, offset: int = 0) -> Region:
    nbytes = tensor.untyped_storage().nbytes()
    return Region(offset, nbytes, tensor.dtype, tuple(tensor.shape), tensor.stride())


def regions_of(*tensors: torch.Tensor) -> dict[int, Region]:
    regions, offset = {}, 0
    for key, tensor in enumerate(tensors):
        regions[key] = region_of(tensor, offset)
        offset += region_nbytes(regions[key].nbytes)
    return regions


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        torch.equal(bytes_of(a), bytes_of(b))
        and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        and b.storage_offset() == 0
    )


def random_storage(nbytes: int, residue: int) -> torch.Tensor:
    """Random bytes in a new storage that begins `residue` bytes after an aligned address."""
    memory = torch.randint(0, 256, (nbytes + MEMORY_ALIGNMENT_BYTES,), dtype=torch.uint8)
    start = (residue - memory.data_ptr()) % MEMORY_ALIGNMENT_BYTES
    return torch.from_numpy(memory.numpy()[start : start + nbytes])
