"""by_size: the calls of a graph with symbolic sizes. Each runs the graph for the sizes at hand."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

from outcore.capture import Symbolic, UnknownSizesError, as_dynamo_compiles
from outcore.errors import CaptureError
from outcore.gc_paused import gc_paused
from outcore.runtime.runner import Runner
from outcore.runtime.step.store import Stores

KEPT_GRAPHS: Final = 64
"""The graphs of at least so many combinations of sizes are kept."""

KEPT_OPS: Final = 100_000
"""More graphs are kept while they have no more ops than this together. Then the one used longest
ago is dropped, unless it has an outstanding call. An op takes some 9 KiB of the host's memory, or 3
if a pattern told its graph."""

LENT_LATELY: Final = 64
"""A graph whose plan was lent to other sizes is kept for so many steps."""


class BySize:
    """A Runner for each combination of sizes of a symbolic graph, made when it is first called.

    `make` makes one for forward inputs like those given; it raises CaptureError if it cannot.
    `saved_inputs` is how many inputs the forward call returns as saved tensors.
    """

    def __init__(
        self, symbolic: Symbolic, saved_inputs: int, make: Callable[[Sequence[Any]], Runner]
    ) -> None:
        self.symbolic, self.saved_inputs, self._make = symbolic, saved_inputs, make
        self._runners: OrderedDict[Hashable, Runner | None] = OrderedDict()
        """Runners by sizes, the one used longest ago first; None for sizes that have no graph."""
        self._stores: Stores | None = None
        """Those of the engine; None before the first call."""
        self._lock = threading.Lock()
        """Held while `_runners` is read or changed."""

    def __deepcopy__(self, _: dict[int, Any]) -> BySize:
        """Itself: as for Runner."""
        return self

    def forward(self, args: list[Any]) -> list[Any]:
        """As `Runner.forward`. Raises UnknownSizesError, before it does anything."""
        key = self.symbolic.key(args)
        known, runner = self._find(key)
        if not known:
            with as_dynamo_compiles(), gc_paused():
                known, runner = self._find(key)  # another thread may have made it meanwhile
                if not known:
                    runner = self._new(key, args)
        if runner is None:
            raise UnknownSizesError
        given = [args[i] for i in self.symbolic.given]
        args.clear()
        results = runner.forward(given)
        self._stores = runner.engine.stores
        self._stores.find(results[-1]).runner = runner
        return results

    def backward(self, args: list[Any]) -> tuple[Any, ...]:
        """As `Runner.backward`; the gradients of inputs that are numbers are None."""
        assert self._stores is not None  # noqa: S101 - forward sets it
        runner = self._stores.find(args[self.saved_inputs]).runner
        gradients: list[Any] = [None] * self.symbolic.inputs
        for position, gradient in zip(self.symbolic.given, runner.backward(args), strict=True):
            gradients[position] = gradient
        return tuple(gradients)

    def _find(self, key: Hashable) -> tuple[bool, Runner | None]:
        """Whether sizes have been called before, and the Runner for them."""
        with self._lock:
            known = key in self._runners
            if known:
                self._runners.move_to_end(key)
            return known, self._runners.get(key)

    def _new(self, key: Hashable, args: list[Any]) -> Runner | None:
        try:
            runner = self._make(args)
        except CaptureError:
            runner = None
        with self._lock:
            self._runners[key] = runner
            self._drop(key)
        return runner

    def _drop(self, latest: Hashable) -> None:
        """Drop graphs if there are too many, but not that for the sizes `latest`."""
        sizes = {key: _ops(runner) for key, runner in self._runners.items()}
        kept, ops = len(sizes), sum(sizes.values())
        for key, number in sizes.items():
            if kept <= KEPT_GRAPHS or ops <= KEPT_OPS:
                return
            if key != latest and not _is_needed(self._runners[key]):
                del self._runners[key]
                kept, ops = kept - 1, ops - number


def _ops(runner: Runner | None) -> int:
    return 1 if runner is None else len(runner.graph.captured.trace.ops)


def _is_needed(runner: Runner | None) -> bool:
    """Whether calls of a Runner are outstanding, or its plan was lent to other sizes lately."""
    if runner is None:
        return False
    registry, graph = runner.engine.registry, runner.graph
    lately = graph.lent_in >= 0 and registry.steps.number - graph.lent_in <= LENT_LATELY
    return lately or bool(registry.waiting(graph))
