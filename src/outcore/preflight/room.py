"""room: compute the memory that a process can use on a device, with all that it already holds."""

from __future__ import annotations

import gc
import resource
import traceback
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from outcore.runtime.limits.card import card
from outcore.runtime.limits.host import available_bytes, memory_limit_bytes

STATM = Path("/proc/self/statm")


def let_go(error: BaseException) -> None:
    """Free what the frames that an error came through hold, and what is saved for backward calls.

    The frames' locals are lost, and no result can be differentiated any more.
    """
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or any(each is other for other in seen):
            continue
        seen.append(each)
        waiting += [each.__cause__, each.__context__]
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None
    _let_go_of_graphs()
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        torch.cuda.empty_cache()


def _let_go_of_graphs() -> None:
    """Free what autograd saved for results that are still held, such as by a global variable."""
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.grad_fn is not None:
            with suppress(RuntimeError):  # a view cannot be detached
                each.detach_()


def room_bytes(device: torch.device, model: nn.Module) -> int:
    """Bytes that a training step of `model` may hold on `device`, including its parameters."""
    if device.type == "cuda":
        return card(device).spare_bytes
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(model)}
    left = min(available_bytes(), _address_space_bytes())
    return min(memory_limit_bytes(), left + sum(held.values()))


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    gradients = (p.grad for p in model.parameters())
    return [*model.parameters(), *model.buffers(), *(g for g in gradients if g is not None)]


def _address_space_bytes() -> int:
    """The address space that `ulimit -v` leaves; the memory limit if there is no such limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or not STATM.exists():
        return memory_limit_bytes()
    taken = int(STATM.read_text().split()[0]) * resource.getpagesize()
    return max(0, limit - taken)
