"""trained: which parameters of a model require gradients."""

from __future__ import annotations

from weakref import ref

from torch import nn


class Trained:
    """Reads which parameters of a model require gradients.

    It holds where they are: weak references to them would keep torch from swapping them.
    """

    def __init__(self, model: nn.Module) -> None:
        named = ((ref(module), [*module._parameters.keys()]) for module in model.modules())  # noqa: SLF001 - no other way runs no code of parametrizations
        self._places = [(module, names) for module, names in named if names]

    def number(self) -> int:
        """How many of the parameters that there were at first require gradients now."""
        return sum(_number(module(), names) for module, names in self._places)


def _number(module: nn.Module | None, names: list[str]) -> int:
    if module is None:
        return 0
    held = module._parameters  # noqa: SLF001 - as above
    found = (held[name] for name in names if name in held)
    return sum(each is not None and each.requires_grad for each in found)
