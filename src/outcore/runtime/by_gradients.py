"""by_gradients: the calls of a graph with several results, of which steps may use some.

A model may return logits beside its loss, or what it caches. If no step gives such a result a
gradient, backward need not compute with zeros in its place: then each call runs the graph without
that (`capture.Missing`). Which results get gradients is known once backward begins, and assumed
before. If an assumption turns out to be wrong, forward runs again, of a graph with all that this
step needs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch

from outcore.capture import (
    Missing,
    as_dynamo_compiles,
    as_kernels,
    keeps_graph,
    without_autocast,
)
from outcore.errors import CaptureError, StepError
from outcore.execute import drawing
from outcore.gc_paused import gc_paused
from outcore.runtime.budget.engine import Engine
from outcore.runtime.by_size import BySize
from outcore.runtime.missing_gradients import may_be_none
from outcore.runtime.runner import Runner, with_default
from outcore.runtime.step.versions import versions_of

STEPS: Final = 2
"""Backward calls after which results are assumed to get no gradient that got none in these."""

LARGE_BYTES: Final = 1 << 20
"""Inputs of so many bytes are not held for a call that will hardly run again."""

Calls: TypeAlias = Runner | BySize


@dataclass(frozen=True, slots=True)
class Call:
    """A forward call."""

    left: int
    """The tangents that its graph does without, as a set of bits."""
    calls: Calls
    """What ran it."""
    weights: Mapping[int, Any]
    """The parameters and module buffers among its inputs, by position."""
    inputs: tuple[Any, ...] = ()
    """Its inputs, some of them weakly; () if `left` is empty."""
    versions: tuple[range | None, ...] = ()
    """How often each of them may have been written; None if it does not matter."""
    generator_state: Any = None
    """That of the device as the call began."""
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    """That of the call."""

    def inputs_again(self) -> list[Any]:
        """Its inputs. Raises StepError if one is gone, or was overwritten since."""
        found: list[Any] = [x() if isinstance(x, weakref.ref) else x for x in self.inputs]
        for given, held, version in zip(found, self.inputs, self.versions, strict=True):
            if given is None and held is not None:
                raise StepError(reason=_cannot("does not exist any more"))
            if version is not None and given._version not in version:
                raise StepError(reason=_cannot(f"was changed in place: its shape is {given.shape}"))
        return found


class ByGradients:
    """A Runner or BySize for each set of results that get no gradient, made when first needed.

    `make` makes one of a joint graph, which may be provisional (`PlannedGraph`); it raises
    CaptureError if it cannot. `static`: positions of
    the forward inputs that persist from step to step. `saved`: positions of those that the forward
    call returns as saved tensors.
    """

    def __init__(
        self,
        engine: Engine,
        missing: Missing,
        static: Collection[int],
        saved: Collection[int],
        make: Callable[..., Calls],
    ) -> None:
        self.engine, self.missing = engine, missing
        self.forward_calls = 0
        self._static, self._saved, self._make = tuple(static), tuple(saved), make
        self._all = (1 << len(missing.tangents)) - 1
        self._assumed = missing.scalars or self._all
        """The tangents that are assumed to be given: at first those of losses, if there are any."""
        self._given, self._backward_calls = 0, 0
        """The tangents that were given so far, and in how many backward calls."""
        self._confirmed: set[int] = set()
        """What calls did without, and were right."""
        self._known: dict[int, int] = {}
        """Tangents -> those of them that the graph can do without."""
        self._lost: dict[int, list[int]] = {}
        """Missing tangents -> the gradients that are zeros then."""
        self._told = missing.again
        """Whether backward calls are told of missing gradients, and forward could run again."""
        left = self._left(None)
        self._latest = left, self._made(left)
        """The tangents that the latest call did without, and what ran it."""

    def __deepcopy__(self, _: dict[int, Any]) -> ByGradients:
        """Itself: as for Runner."""
        return self

    def tells(self, *, node: bool) -> None:
        """As for `Told`."""
        self._told &= node

    def forward(self, args: list[Any]) -> list[Any]:
        """As `Runner.forward`. Raises UnknownSizesError, before it does anything."""
        weights = {i: args[i] for i in self._static}
        left, calls = self._latest
        with suppress(CaptureError):  # if it was closed meanwhile
            left, calls = self._for(self._left(weights))
        with self.engine.lock:
            self.engine.driver.refuse_capture()
            call = Call(left, calls, weights) if not left else self._call(left, calls, args)
            results = calls.forward(args)
            self.engine.stores.find(results[-1]).call = call
        self.forward_calls += 1
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
        none = {i for i in lost if may_be_none(call.weights.get(i))}
        zeros = [self.missing.gradients[i] for i in lost if i not in none]
        if call.left & ~missing or not all(of & ~call.left for of in zeros):
            gradients = self._again(store.number, call, tangents)
        else:
            gradients = call.calls.backward([*named, *_without(call.left, tangents)])
            self._confirmed.add(call.left)
        return tuple(None if i in none else each for i, each in enumerate(gradients))

    def _left(self, weights: Mapping[int, Any] | None) -> int:
        """The tangents that the next call is to do without.

        Not those that are all that a parameter's gradient depends on, unless that may be None.
        """
        if not self._told:
            return 0
        left = self._possible(self._all & ~self._assumed)
        if not left or weights is None:
            return left
        for i in self._lost_by(left):
            if not may_be_none(weights.get(i)):
                left &= ~self.missing.gradients[i]
        return self._possible(left)

    def _possible(self, tangents: int) -> int:
        if tangents not in self._known:
            self._known[tangents] = self.missing.without(tangents)
        return self._known[tangents]

    def _lost_by(self, missing: int) -> list[int]:
        if missing not in self._lost:
            gradients = enumerate(self.missing.gradients)
            self._lost[missing] = [i for i, of in gradients if of and not of & ~missing]
        return self._lost[missing]

    def _for(self, left: int) -> tuple[int, Calls]:
        """What runs a call without the tangents `left`. Raises CaptureError if it cannot be."""
        latest = self._latest
        if left != latest[0]:
            with as_dynamo_compiles(), as_kernels(), without_autocast(), gc_paused():
                latest = self._latest  # another thread may have made it meanwhile
                if left != latest[0]:
                    latest = self._latest = left, self._made(left)
        return latest

    def _made(self, left: int) -> Calls:
        reduced, provisional = self.missing.reduced(left), self._backward_calls < STEPS
        return self._make(reduced, provisional=provisional)

    def _call(self, left: int, calls: Calls, args: list[Any]) -> Call:
        """A call that is about to begin, and may have to run again."""
        held = {*self._static, *self._saved} if left in self._confirmed else range(len(args))
        inputs = [x if i in held or _is_small(x) else weakref.ref(x) for i, x in enumerate(args)]
        may_change = [args[i] for i in self.missing.overwritten]
        return Call(
            left,
            calls,
            {i: args[i] for i in self._static},
            tuple(inputs),
            tuple(versions_of(args, may_change)),
            self.engine.driver.generator.get_state(),
        )

    def _note(self, missing: int) -> None:
        """Note which gradients a backward call lacks."""
        self._backward_calls += 1
        self._given |= self._all & ~missing
        known = self._backward_calls >= STEPS
        self._assumed = self._given if known else self._assumed | self._given

    def _again(self, number: int, call: Call, tangents: list[Any]) -> tuple[Any, ...]:
        """The gradients of a call that did without what it needs: it runs again, with that."""
        engine, generator = self.engine, self.engine.driver.generator
        with engine.lock, without_autocast(), with_default(call.default_dtype):
            inputs = call.inputs_again()
            again = keeps_graph()
            if not again:
                engine.stores.drop(number)
            left, calls = self._for(self._left(call.weights))
            state = generator.get_state()
            with drawing():
                generator.set_state(call.generator_state)
            try:
                results = calls.forward(inputs)
            finally:
                with drawing():
                    generator.set_state(state)
            del results[: self.missing.forward_outputs]
            number = engine.stores.find(results[-1]).number
            try:
                return calls.backward([*results, *_without(left, tangents)])
            finally:
                engine.stores.drop(number)


def _cannot(what: str) -> str:
    return (
        "a result of forward got a gradient that earlier steps did not give it, and forward cannot "
        f"run again for that: an input {what}. Run the step again; later ones expect this gradient"
    )


def _without(left: int, tangents: list[Any]) -> list[Any]:
    """Those of `tangents` that are not among `left`. Empties the list, to free each early."""
    kept = [each for i, each in enumerate(tangents) if not left >> i & 1]
    tangents.clear()
    return kept


def _is_small(given: Any) -> bool:
    return not isinstance(given, torch.Tensor) or given.nbytes < LARGE_BYTES
