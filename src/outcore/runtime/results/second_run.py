"""second_run: compute the gradients of a call that did without what they need.

Forward runs again, of a graph with all that this step needs. If that has no room beside what the
first run made, all is computed in the backward call of a late graph (`Missing.late`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from outcore.capture import (
    Missing,
    UnknownSizesError,
    boxed,
    by_cudnn,
    keeps_graph,
    without_autocast,
)
from outcore.errors import CaptureError, InfeasibleError, StepError
from outcore.execute import drawing
from outcore.runtime.budget.engine import Engine
from outcore.runtime.results.assumed import Assumed
from outcore.runtime.results.call import Call, cannot_run_again, kept
from outcore.runtime.results.variant import Graph, Make, Variant, as_compiled
from outcore.runtime.runner import with_default
from outcore.runtime.step.store import Store


class SecondRuns:
    """Runs calls again. `make` makes a late graph."""

    def __init__(self, engine: Engine, missing: Missing, assumed: Assumed, make: Make) -> None:
        self.engine, self.missing = engine, missing
        self._assumed, self._make = assumed, make
        self._late: tuple[int, Graph | None] | None = None
        """The latest late graph and what it does without, until the next forward call."""

    def forget(self) -> None:
        """Forget the latest late graph: a new step begins."""
        self._late = None

    def gradients(
        self,
        store: Store,
        inputs: list[Any],
        tangents: list[Any],
        missing: int,
        left: int,
        graph: Graph,
    ) -> tuple[Any, ...]:
        """The gradients of the call of `store`, by a run of `graph`, which does without `left`.

        The store is dropped, unless the call may come back once more. `missing`: the tangents for
        which no zeros must be made. Empties `inputs` and `tangents`. Raises InfeasibleError if
        there is no room, and StepError if other random numbers were drawn.
        """
        call, draws = store.call, store.draws
        if not keeps_graph():
            self.engine.stores.drop(store.number)
        refused = list[InfeasibleError]()  # not by a name: once raised, it would hold this frame
        try:
            with self._as_in(call, draws[0]):
                results = None if left & ~missing else _forward(graph, inputs)
                if results is None:  # no graph has all that is needed
                    return self._at_once(inputs, missing, tangents)
                self._check_draws(*draws)
        except InfeasibleError as error:  # beside what the first run made, and the tangents
            error.add_note(NO_ROOM_AGAIN)
            refused.append(error.with_traceback(None))
        else:
            inputs.clear()
            return self._back(graph, results, left, tangents)
        left, late = self._late_graph(self._assumed.without(missing), call.default_dtype)
        gradients = None
        if late is not None:
            with self._as_in(call, draws[0]):
                gradients = self._all_in_backward(late, left, inputs, tangents)
                self._check_draws(*draws)
        if gradients is None:
            raise refused.pop()
        return gradients

    def _back(
        self, graph: Graph, results: list[Any], left: int, tangents: list[Any]
    ) -> tuple[Any, ...]:
        """The gradients of a second run, of which `results` is what forward returned."""
        del results[: self.missing.forward_outputs]
        number = self.engine.stores.find(results[-1]).number
        try:
            return graph.backward([*results, *kept(left, tangents)])
        finally:
            self.engine.stores.drop(number)

    def _late_graph(self, left: int, dtype: torch.dtype) -> tuple[int, Graph | None]:
        """A graph that computes all in its backward call; None if there is no such graph.

        `left`: the tangents that it does without; `dtype`: the default dtype of the first run.
        """
        found = self._late
        if found is None or found[0] != left:
            found = left, None
            joint, variant = self.missing.late(left), Variant(self.engine, provisional=True)
            if joint is not None:
                with as_compiled(), with_default(dtype), suppress(CaptureError):
                    found = left, self._make(joint, variant)
            self._late = found  # a forward call on another thread may forget it at any time
        return found

    def _all_in_backward(
        self, graph: Graph, left: int, inputs: list[Any], tangents: list[Any]
    ) -> tuple[Any, ...] | None:
        """The gradients, by a late `graph`. It makes no results a second time, and keeps nothing.

        None if there is no graph for these sizes. Raises InfeasibleError if there is no room.
        """
        try:
            with self.engine.residency.beside_tangents(tangents):
                results = _forward(graph, inputs)
            if results is None:
                return None
            inputs.clear()
            return self._back(graph, results, left, tangents)
        except InfeasibleError as error:
            error.add_note(NO_ROOM_AGAIN)
            raise

    @contextmanager
    def _as_in(self, call: Call, state: torch.Tensor) -> Iterator[None]:
        """In this context, ops of `call` give what they gave from the generator's `state` on."""
        with (
            self.engine.lock,
            without_autocast(),
            with_default(call.default_dtype),
            self._drawing_from(state),
        ):
            yield

    @contextmanager
    def _drawing_from(self, state: torch.Tensor) -> Iterator[None]:
        """In this context, random ops draw as from the generator's `state`."""
        generator = self.engine.driver.generator
        before = generator.get_state()
        with drawing():
            generator.set_state(state)
        try:
            yield
        finally:
            with drawing():
                generator.set_state(before)

    def _check_draws(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Raise StepError if forward has just drawn something else than what led to `after`."""
        drawn = self.engine.driver.generator.get_state()
        if not torch.equal(drawn, before) and not torch.equal(drawn, after):
            raise StepError(reason=cannot_run_again(OTHERS_DRAW))

    def _at_once(self, inputs: list[Any], missing: int, tangents: list[Any]) -> tuple[Any, ...]:
        """The gradients, by forward and backward as one graph in-core, without a plan.

        `missing`: the tangents that it may do without.
        """
        left = self._assumed.without(missing)
        described = [node.meta["val"] for node in self.missing.tangents]
        given = [
            torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=like.device
            ).zero_()
            if tangent is None and not left >> i & 1
            else tangent
            for i, (tangent, like) in enumerate(zip(tangents, described, strict=True))
        ]
        tangents.clear()
        with as_compiled():
            module = self.missing.reduced(left)
            by_cudnn(module)
            run = boxed(module)
        args = [*inputs, *kept(left, given)]
        inputs.clear()
        return tuple(run(args)[self.missing.forward_outputs :])


OTHERS_DRAW = (
    "another thread draws from torch's default generator, or seeds it; give that thread its own "
    "torch.Generator"
)

NO_ROOM_AGAIN = (
    "outcore: a result of forward got a gradient that it was not expected to get, and there is no "
    "room to compute again what that needs. Run the step again: now the gradient is expected"
)


def _forward(graph: Graph, inputs: list[Any]) -> list[Any] | None:
    """As `Runner.forward`; None if there is no graph for these sizes."""
    try:
        return graph.forward(list(inputs))
    except UnknownSizesError:
        return None
