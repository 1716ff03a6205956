"""state: put away the state of an optimizer that a library has made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outcore.optimizers import is_offloaded, offload_optimizer

if TYPE_CHECKING:
    from outcore.runtime.settings.options import Keywords


def offload_state(optimizer: Any, options: Keywords) -> None:
    """Call `offload_optimizer`, or put away again what came back.

    Of `options`, those of the link hold for it too; budgets are the model's. Raises WrapError if
    the state cannot be offloaded.
    """
    if is_offloaded(optimizer):
        offload_optimizer(optimizer)
        return
    spill_dir, link_limit = options.get("spill_dir"), options.get("link_limit")
    offload_optimizer(optimizer, spill_dir=spill_dir, link_limit=link_limit)
