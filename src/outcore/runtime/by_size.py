"""by_size: the calls of a graph with symbolic sizes. Each runs the graph for the sizes at hand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final

from outcore.capture import Sized, Symbolic, UnknownSizesError, as_dynamo_compiles
from outcore.errors import CaptureError
from outcore.runtime.runner import Runner

MOST_SIZES: Final = 64
"""The most combinations of sizes whose graphs are kept: then the one used longest ago is dropped,
with its plan, unless it has an outstanding call."""


class BySize:
    """A Runner for each combination of sizes of a symbolic graph, made when it is first called.

    `make` makes one from a graph with numbers; it raises CaptureError if that cannot be planned.
    `saved_inputs` is how many inputs the forward call returns as saved tensors.
    """

    def __init__(
        self, symbolic: Symbolic, saved_inputs: int, make: Callable[[Sized], Runner]
    ) -> None:
        self.symbolic, self.saved_inputs, self._make = symbolic, saved_inputs, make
        self._runners: OrderedDict[Hashable, Runner] = OrderedDict()
        """Runners by sizes, the one used longest ago first."""

    def __deepcopy__(self, _: dict[int, Any]) -> BySize:
        """Itself: as for Runner."""
        return self

    def forward(self, args: list[Any]) -> list[Any]:
        """As `Runner.forward`. Raises UnknownSizesError, before it does anything."""
        key = self.symbolic.key(args)
        runner = self._runners.get(key)
        if runner is None:
            with as_dynamo_compiles():
                runner = self._runners.get(key) or self._new(key, args)
        self._runners.move_to_end(key)
        given = [args[i] for i in self.symbolic.given]
        args.clear()
        return runner.forward(given)

    def backward(self, args: list[Any]) -> tuple[Any, ...]:
        """As `Runner.backward`; the gradients of inputs that are numbers are None."""
        runner = self._runner_of(args[self.saved_inputs])
        gradients: list[Any] = [None] * self.symbolic.inputs
        for position, gradient in zip(self.symbolic.given, runner.backward(args), strict=True):
            gradients[position] = gradient
        return tuple(gradients)

    def _new(self, key: Hashable, args: list[Any]) -> Runner:
        try:
            runner = self._make(self.symbolic.at(args))
        except CaptureError as error:
            raise UnknownSizesError from error
        self._runners[key] = runner
        if len(self._runners) > MOST_SIZES:
            waiting = runner.engine.registry.waiting
            idle = [k for k, r in self._runners.items() if k != key and not waiting(r.graph)]
            for oldest in idle[:1]:
                del self._runners[oldest]
        return runner

    def _runner_of(self, stand_in: Any) -> Runner:
        engine = next(iter(self._runners.values())).engine
        graph = engine.stores.find(stand_in).visit.owner()
        return next(runner for runner in self._runners.values() if runner.graph is graph)
