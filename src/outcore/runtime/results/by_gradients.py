"""by_gradients: the calls of a graph with several results, of which steps may use some.

A model may return logits beside its loss, or what it caches. If no step gives such a result a
gradient, backward need not compute with zeros in its place: then each call runs the graph without
that (`capture.Missing`). Which results get gradients is known once backward begins, and assumed
before (`Assumed`). If an assumption turns out to be wrong, forward runs again (`SecondRuns`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

import torch

from outcore.capture import Missing, plain
from outcore.errors import CaptureError
from outcore.runtime.budget.engine import Engine
from outcore.runtime.missing_gradients import trains_alone
from outcore.runtime.results.assumed import Assumed
from outcore.runtime.results.call import Call, kept
from outcore.runtime.results.second_run import SecondRuns
from outcore.runtime.results.variant import Graph, Make, Variant, as_compiled
from outcore.runtime.step.replay import is_parameter, without_origin
from outcore.runtime.step.versions import versions_of

LARGE_BYTES: Final = 1 << 20
"""Inputs of so many bytes are not held for a call that will hardly run again."""


class ByGradients:
    """A Runner or BySize for each set of results that get no gradients, made when first needed.

    `make` makes one of a joint graph, and `refuse` tells that it cannot. `static`: positions of the
    forward inputs that persist from step to step. `saved`: positions of those that the forward call
    returns as saved tensors.
    """

    def __init__(
        self,
        engine: Engine,
        missing: Missing,
        static: Collection[int],
        saved: Collection[int],
        make: Make,
        refuse: Callable[[CaptureError], object],
    ) -> None:
        self.engine, self.missing = engine, missing
        self._static, self._saved = frozenset(static), tuple(saved)
        self._make, self._refuse = make, refuse
        self._assumed = Assumed(missing, self._static, engine.lock)
        self._again = SecondRuns(engine, missing, self._assumed, make)
        self._confirmed: set[int] = set()
        """What calls did without, and were right."""
        self._here = threading.local()
        left = self._assumed.at_first
        self._latest = left, self._made(left)
        """The tangents that the latest graph does without, and that graph."""
        self._refused: int | None = None
        """The tangents that a graph does without which cannot be made."""

    def __deepcopy__(self, _: dict[int, Any]) -> ByGradients:
        """Itself: as for Runner."""
        return self

    @property
    def forward_calls(self) -> int:
        """How many forward calls this thread has made."""
        return getattr(self._here, "calls", 0)

    def tells(self, *, node: bool) -> None:
        """As for `Told`."""
        self._assumed.possible &= node

    def forward(self, args: list[Any]) -> list[Any]:
        """As `Runner.forward`. Raises UnknownSizesError, before it does anything."""
        self._again.forget()
        given = list(args)
        args[:] = map(plain, args)
        parameters = {i: args[i] for i in self._static if is_parameter(args[i])}
        left, graph = self._graph(self._assumed.left(parameters))
        if not left:
            call = Call(left, graph, parameters, (), ())
        else:
            inputs = self._held(args, given, confirmed=left in self._confirmed)
            versions = versions_of(args, [args[i] for i in self.missing.overwritten])
            call = Call(left, graph, parameters, tuple(inputs), tuple(versions))
        del given
        results = graph.forward(args)
        self.engine.stores.find(results[-1]).call = call
        self._here.calls = self.forward_calls + 1
        return results

    def backward(self, args: list[Any]) -> tuple[Any, ...]:
        """As `Runner.backward`; None for parameters that the gradients which are given miss."""
        named = args[: len(self._saved) + 1]
        tangents = args[len(named) :]
        args.clear()
        store, assumed = self.engine.stores.find(named[-1]), self._assumed
        call: Call = store.call
        missing = sum(1 << i for i, tangent in enumerate(tangents) if tangent is None)
        assumed.came_back(missing)
        lost, alone = assumed.lost_by(missing), trains_alone()
        none = {i for i in lost if alone and assumed.may_be_none(call.parameters.get(i))}
        zeros = [self.missing.gradients[i] for i in lost if i not in none and call.left]
        if call.left & ~missing or not all(of & ~call.left for of in zeros):
            assumed.wait_for(zeros)
            inputs = call.inputs_again(dict(zip(self._saved, named, strict=False)))
            missing = assumed.unneeded(missing)
            left, graph = self._graph(assumed.left_again(missing))
            gradients = self._again.gradients(store, inputs, tangents, missing, left, graph)
        else:
            gradients = call.graph.backward([*named, *kept(call.left, tangents)])
            self._confirmed.add(call.left)
        return tuple(None if i in none else each for i, each in enumerate(gradients))

    def _graph(self, left: int) -> tuple[int, Graph]:
        """What runs calls without the tangents `left`, or the latest graph if it cannot be made."""
        latest = self._latest
        if left == latest[0] or left == self._refused:
            return latest
        with as_compiled():
            latest = self._latest  # another thread may have made it meanwhile
            if left != latest[0]:
                try:
                    latest = self._latest = left, self._made(left)
                except CaptureError as error:
                    self._refused = left
                    self._refuse(error)
        return latest

    def _made(self, left: int) -> Graph:
        variant = Variant(self.engine, self._assumed.provisional, may_run_again=bool(left))
        return self._make(self.missing.reduced(left), variant)

    def _held(self, args: list[Any], given: list[Any], *, confirmed: bool) -> Iterator[Any]:
        """What is held of inputs until backward. `given`: as AOTAutograd gave them."""
        for i, each in enumerate(args):
            if i in self._saved:
                yield None
            elif not isinstance(each, torch.Tensor) or not confirmed or i in self._static:
                yield without_origin(each)
            else:
                large = each.nbytes >= LARGE_BYTES
                yield weakref.ref(given[i]) if large else without_origin(each)
