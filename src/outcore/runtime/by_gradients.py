"""by_gradients: the calls of a graph with several results, of which steps may use some.

A model may return logits beside its loss, or what it caches. If no step gives such a result a
gradient, backward need not compute with zeros in its place: then each call runs the graph without
that (`capture.Missing`). Which results get gradients is known once backward begins, and assumed
before. If an assumption turns out to be wrong, forward runs again, of a graph with all that this
step needs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from outcore.capture import (
    Missing,
    as_dynamo_compiles,
    as_kernels,
    keeps_graph,
    without_autocast,
)
from outcore.errors import StepError
from outcore.execute import drawing
from outcore.gc_paused import gc_paused
from outcore.runtime.budget.engine import Engine
from outcore.runtime.by_size import BySize
from outcore.runtime.missing_gradients import may_be_none
from outcore.runtime.runner import Runner, with_default
from outcore.runtime.step.replay import is_parameter, without_origin
from outcore.runtime.step.store import Store
from outcore.runtime.step.versions import versions_of

STEPS: Final = 2
"""Backward calls after which results are assumed to get no gradient that got none in these."""

KEPT: Final = 4
"""The graphs of so many sets of results are kept, if calls alternate between them."""

LARGE_BYTES: Final = 1 << 20
"""Inputs of so many bytes are not held for a call that will hardly run again."""

Graph: TypeAlias = Runner | BySize


class Variant(NamedTuple):
    """How a graph is made."""

    engine: Engine | None = None
    """Its engine; None: that of its device."""
    provisional: bool = False
    """As for `PlannedGraph`."""
    may_run_again: bool = False
    """Whether forward may have to run again."""


ALONE = Variant()
"""The variant of a graph that is the only one."""


@dataclass(frozen=True, slots=True)
class Call:
    """A forward call."""

    left: int
    """The tangents that its graph does without, as a set of bits."""
    graph: Graph
    """What ran it."""
    parameters: Mapping[int, torch.Tensor]
    """Those among its inputs, by position."""
    inputs: tuple[Any, ...]
    """Its inputs, some of them weakly; () if it need not run again."""
    versions: tuple[range | None, ...]
    """How often each of them may have been written; None if it does not matter."""
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    """That of the call."""

    def inputs_again(self) -> list[Any]:
        """Its inputs. Raises StepError if one is gone, or was overwritten since."""
        found: list[Any] = [x() if isinstance(x, weakref.ref) else x for x in self.inputs]
        for given, held, version in zip(found, self.inputs, self.versions, strict=True):
            if given is None and held is not None:
                raise StepError(reason=_cannot("does not exist any more"))
            if version is not None and given._version not in version:
                shape = tuple(given.shape)
                raise StepError(reason=_cannot(f"of shape {shape} was changed in place"))
        return found


class ByGradients:
    """A Runner or BySize for each set of results that get no gradients, made when first needed.

    `make` makes one of a joint graph and a Variant; it raises CaptureError if it cannot. `static`:
    positions of the forward inputs that persist from step to step. `saved`: positions of those that
    the forward call returns as saved tensors.
    """

    def __init__(
        self,
        engine: Engine,
        missing: Missing,
        static: Collection[int],
        saved: Collection[int],
        make: Callable[[Any, Variant], Graph],
    ) -> None:
        self.engine, self.missing = engine, missing
        self._static, self._saved, self._make = frozenset(static), tuple(saved), make
        self._alive = self._static.union(saved)
        """Inputs that others hold until backward anyway."""
        self._all = (1 << len(missing.tangents)) - 1
        self._assumed = missing.losses(self._static) or self._all
        """The tangents that are assumed to be given: at first those of losses, if there are any."""
        self._given, self._backward_calls = 0, 0
        """The tangents that were given so far, and in how many backward calls."""
        self._confirmed: set[int] = set()
        """What calls did without, and were right."""
        self._known: dict[int, int] = {}
        """Tangents -> those of them that the graph can do without."""
        self._lost: dict[int, list[int]] = {}
        """Missing tangents -> the gradients that are zeros then."""
        self._may_assume = missing.again
        """Whether forward could run again, and backward calls are told of missing gradients."""
        self._here = threading.local()
        left = self._without(self._all & ~self._assumed)
        self._graphs = {left: self._made(left)}
        """By the tangents that they do without, the latest ones."""

    def __deepcopy__(self, _: dict[int, Any]) -> ByGradients:
        """Itself: as for Runner."""
        return self

    @property
    def forward_calls(self) -> int:
        """How many forward calls this thread has made."""
        return getattr(self._here, "calls", 0)

    def tells(self, *, node: bool) -> None:
        """As for `Told`."""
        self._may_assume &= node

    def forward(self, args: list[Any]) -> list[Any]:
        """As `Runner.forward`. Raises UnknownSizesError, before it does anything."""
        parameters = {i: args[i] for i in self._static if is_parameter(args[i])}
        left = self._left(parameters)
        graph = self._graph(left)
        inputs = self._held(args, confirmed=left in self._confirmed) if left else ()
        versions = versions_of(args, [args[i] for i in self.missing.overwritten]) if left else ()
        call = Call(left, graph, parameters, tuple(inputs), tuple(versions))
        results = graph.forward(args)
        self.engine.stores.find(results[-1]).call = call
        self._here.calls = self.forward_calls + 1
        return results

    def backward(self, args: list[Any]) -> tuple[Any, ...]:
        """As `Runner.backward`; None for parameters that the gradients which are given miss."""
        named = args[: len(self._saved) + 1]
        tangents = args[len(named) :]
        args.clear()
        store = self.engine.stores.find(named[-1])
        call: Call = store.call
        missing = sum(1 << i for i, tangent in enumerate(tangents) if tangent is None)
        self._note(missing)
        lost = self._lost_by(missing)
        none = {i for i in lost if may_be_none(call.parameters.get(i))}
        zeros = [self.missing.gradients[i] for i in lost if i not in none]
        if call.left & ~missing or not all(of & ~call.left for of in zeros):
            gradients = self._again(store, missing, tangents)
        else:
            gradients = call.graph.backward([*named, *_kept(call.left, tangents)])
            self._confirmed.add(call.left)
        return tuple(None if i in none else each for i, each in enumerate(gradients))

    # ---- what is assumed ------------------------------------------------------------------------

    def _left(self, parameters: Mapping[int, Any]) -> int:
        """The tangents that a call is to do without.

        Not those that are all that an input's gradient depends on, unless that may be None.
        """
        left = self._without(self._all & ~self._assumed)
        for i in self._lost_by(left):
            if not may_be_none(parameters.get(i)):
                left &= ~self.missing.gradients[i]
        return self._without(left)

    def _without(self, tangents: int) -> int:
        if not self._may_assume:
            return 0
        if tangents not in self._known:
            self._known[tangents] = self.missing.without(tangents)
        return self._known[tangents]

    def _lost_by(self, missing: int) -> list[int]:
        if missing not in self._lost:
            gradients = enumerate(self.missing.gradients)
            self._lost[missing] = [i for i, of in gradients if of and not of & ~missing]
        return self._lost[missing]

    def _note(self, missing: int) -> None:
        """Note which gradients a backward call lacks."""
        with self.engine.lock:
            before = self._assumed
            self._backward_calls += 1
            self._given |= self._all & ~missing
            known = self._backward_calls >= STEPS
            self._assumed = self._given if known else before | self._given
            if self._assumed != before:
                left = self._without(self._all & ~self._assumed)
                self._graphs = {k: graph for k, graph in self._graphs.items() if k == left}

    # ---- what runs ------------------------------------------------------------------------------

    def _graph(self, left: int) -> Graph:
        """What runs calls without the tangents `left`. Raises CaptureError if it cannot be made."""
        graph = self._graphs.get(left)
        if graph is None:
            with as_dynamo_compiles(), as_kernels(), without_autocast(), gc_paused():
                graph = self._graphs.get(left)  # another thread may have made it meanwhile
                if graph is None:
                    graph = self._made(left)
                    latest = list(self._graphs.items())[1 - KEPT :]
                    self._graphs = dict([*latest, (left, graph)])
        return graph

    def _made(self, left: int) -> Graph:
        provisional = self._backward_calls < STEPS
        variant = Variant(self.engine, provisional=provisional, may_run_again=bool(left))
        return self._make(self.missing.reduced(left), variant)

    def _held(self, args: list[Any], *, confirmed: bool) -> Iterator[Any]:
        """What is held of inputs until backward."""
        for i, given in enumerate(args):
            alive = not confirmed or i in self._alive or not isinstance(given, torch.Tensor)
            small = alive or given.nbytes < LARGE_BYTES
            yield without_origin(given) if small else weakref.ref(given)

    def _again(self, store: Store, missing: int, tangents: list[Any]) -> tuple[Any, ...]:
        """The gradients of a call that did without what it needs: it runs again, with that."""
        call, stores, generator = store.call, self.engine.stores, self.engine.driver.generator
        inputs, draws = call.inputs_again(), store.generator_state
        left = self._without(self._left(call.parameters) & missing)
        graph = self._graph(left)
        if not keeps_graph():
            stores.drop(store.number)
        with self.engine.lock, without_autocast(), with_default(call.default_dtype):
            state = generator.get_state()
            with drawing():
                generator.set_state(draws)
            try:
                results = graph.forward(inputs)
            finally:
                with drawing():
                    generator.set_state(state)
        del results[: self.missing.forward_outputs]
        number = stores.find(results[-1]).number
        try:
            return graph.backward([*results, *_kept(left, tangents)])
        finally:
            stores.drop(number)


def _kept(left: int, tangents: list[Any]) -> list[Any]:
    """Those of `tangents` that are not among `left`. Empties the list, to free each early."""
    kept = [each for i, each in enumerate(tangents) if not left >> i & 1]
    tangents.clear()
    return kept


def _cannot(what: str) -> str:
    return (
        "a result of forward got a gradient that it was not expected to get, and forward cannot "
        f"run again for that: an input {what}. Run the step again: now it is expected"
    )
