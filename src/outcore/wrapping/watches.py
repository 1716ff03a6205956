"""watches: notice in backward that a model is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from weakref import ref

from torch import Tensor, nn

MOST_WATCHED = 64
"""The most parameters of a model that a `GradientWatch` watches."""


class GradientWatch:
    """Notices that parameters of a model get gradients.

    It watches some of them by hooks, until the second gradient of one: the first may come from a
    penalty on the parameters alone.
    """

    def __init__(self, model: nn.Module, tell: Callable[[int], None]) -> None:
        """`tell` is called with the `id` of such a parameter, in backward."""
        self._tell, self._often = tell, Counter[int]()
        trained = [p for p in model.parameters() if p.requires_grad and type(p) is nn.Parameter]
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]  # torch leaves it so
            for p in trained[:: max(1, -(-len(trained) // MOST_WATCHED))]
        ]

    def _note(self, parameter: Tensor) -> None:
        self._often[id(parameter)] += 1
        if self._often[id(parameter)] > 1:
            self._tell(id(parameter))

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class EvalWatch:
    """Notices that a model is trained in eval mode, as with frozen batch norms."""

    def __init__(self, model: nn.Module) -> None:
        self.trains = False
        """Whether it was: later calls with gradients in eval mode count as training calls."""
        self._model = ref(model)
        self._gradients: GradientWatch | None = None

    def start(self, model: nn.Module) -> None:
        """Watch the backward of a call of `model`."""
        if self._gradients is None:
            self._gradients = GradientWatch(model, self._tell)

    def stop(self) -> None:
        """Remove the hooks."""
        gradients, self._gradients = self._gradients, None
        if gradients is not None:
            gradients.stop()

    def _tell(self, _: int) -> None:
        self.stop()
        model = self._model()
        self.trains = model is not None and not model.training
