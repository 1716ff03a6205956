"""optimizers: keep the state of an optimizer in a slower memory between its steps."""

from outcore.optimizers.offloading import is_offloaded, offload_optimizer, restore_optimizer

__all__ = ["is_offloaded", "offload_optimizer", "restore_optimizer"]
