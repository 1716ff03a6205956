"""state: put away the state of an optimizer that a library has made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from outcore.optimizers import is_offloaded, offload_optimizer

if TYPE_CHECKING:
    from outcore.runtime.settings.options import Keywords

Offloads: TypeAlias = bool | Mapping[str, Any]
"""Whether to offload the state of optimizers; or the options of `outcore.offload_optimizer`."""


def offload_state(optimizer: Any, offloads: Offloads, options: Keywords) -> None:
    """Call `offload_optimizer`, or put away again what came back.

    Of the model's `options`, those of the link hold for it too. Raises WrapError if the state
    cannot be offloaded.
    """
    if is_offloaded(optimizer):
        offload_optimizer(optimizer)
        return
    own = offloads if isinstance(offloads, Mapping) else {}
    link = {name: options.get(name) for name in ("spill_dir", "link_limit")}
    offload_optimizer(optimizer, **{**link, **own})
