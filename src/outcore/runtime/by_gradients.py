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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.fx import Interpreter

from outcore.capture import (
    Missing,
    UnknownSizesError,
    as_dynamo_compiles,
    as_kernels,
    keeps_graph,
    plain,
    without_autocast,
)
from outcore.errors import CaptureError, InfeasibleError, StepError
from outcore.execute import drawing
from outcore.gc_paused import gc_paused
from outcore.runtime.budget.engine import Engine
from outcore.runtime.by_size import BySize
from outcore.runtime.missing_gradients import (
    is_waited_for,
    node_is_waited_for,
    trains_alone,
)
from outcore.runtime.runner import Runner, with_default
from outcore.runtime.step.replay import is_parameter, without_origin
from outcore.runtime.step.store import Store
from outcore.runtime.step.versions import versions_of

STEPS: Final = 1
"""Steps after which results are assumed to get no gradient that got none in these."""

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
    """Its inputs, some of them weakly, and None for saved ones; () if it need not run again."""
    versions: tuple[range | None, ...]
    """How often each of them may have been written; None if it does not matter."""
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    """That of the call."""

    def inputs_again(self, saved: Mapping[int, Any]) -> list[Any]:
        """Its inputs, with those that autograd `saved`.

        Raises StepError if one is gone, or was overwritten since.
        """
        found = list(self.inputs)
        for i, version in enumerate(self.versions):
            if isinstance(found[i], weakref.ref):
                found[i] = plain(found[i]())
                if found[i] is None:
                    raise StepError(reason=_cannot("an input does not exist any more"))
            if i not in saved and version is not None and found[i]._version not in version:
                shape = tuple(found[i].shape)
                raise StepError(reason=_cannot(f"an input of shape {shape} was changed in place"))
        return [saved.get(i, given) for i, given in enumerate(found)]


class ByGradients:
    """A Runner or BySize for each set of results that get no gradients, made when first needed.

    `make` makes one of a joint graph and a Variant; it raises CaptureError if it cannot, and
    `refuse` tells of that. `static`: positions of the forward inputs that persist from step to
    step. `saved`: positions of those that the forward call returns as saved tensors.
    """

    def __init__(
        self,
        engine: Engine,
        missing: Missing,
        static: Collection[int],
        saved: Collection[int],
        make: Callable[[Any, Variant], Graph],
        refuse: Callable[[CaptureError], object],
    ) -> None:
        self.engine, self.missing = engine, missing
        self._static, self._saved = frozenset(static), tuple(saved)
        self._make, self._refuse = make, refuse
        self._all = (1 << len(missing.tangents)) - 1
        self._first = missing.losses(self._static) or self._all
        """The tangents that are assumed to be given at first: those of losses, if there are any."""
        self._given = self._waited = 0
        """The tangents that were given so far; those that what waits for a gradient depends on."""
        self._steps, self._came_back = 0, False
        """Forward calls after which a backward call came, and whether one came since the latest."""
        self._confirmed: set[int] = set()
        """What calls did without, and were right."""
        self._known: dict[int, int] = {}
        """Tangents -> those of them that the graph can do without."""
        self._lost: dict[int, list[int]] = {}
        """Missing tangents -> the gradients that are zeros then."""
        self._unhooked: set[int] = set()
        """Ids of parameters whose nodes had no hooks as their gradients were first lost."""
        self._may_assume = missing.again
        """Whether forward could run again, and backward calls are told of missing gradients."""
        self._here = threading.local()
        left = self._without(self._all & ~self._first)
        self._latest = left, self._made(left)
        """The tangents that the latest graph does without, and that graph."""
        self._refused: int | None = None
        """The tangents that a graph does without which cannot be made."""
        self._late: tuple[int, Graph | None] | None = None
        """The latest late graph (`_late_graph`), until the next forward call."""

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
        self._late = None
        given = list(args)
        args[:] = map(plain, args)
        parameters = {i: args[i] for i in self._static if is_parameter(args[i])}
        left, graph = self._graph(self._left(parameters))
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
        store = self.engine.stores.find(named[-1])
        call: Call = store.call
        missing = sum(1 << i for i, tangent in enumerate(tangents) if tangent is None)
        with self.engine.lock:
            self._given |= self._all & ~missing
            self._came_back = True
        lost, alone = self._lost_by(missing), trains_alone()
        none = {i for i in lost if alone and self._may_be_none(call.parameters.get(i))}
        zeros = [self.missing.gradients[i] for i in lost if i not in none and call.left]
        if call.left & ~missing or not all(of & ~call.left for of in zeros):
            self._wait_for(zeros)
            gradients = self._again(store, named, missing, tangents)
        else:
            gradients = call.graph.backward([*named, *_kept(call.left, tangents)])
            self._confirmed.add(call.left)
        return tuple(None if i in none else each for i, each in enumerate(gradients))

    # ---- what is assumed ------------------------------------------------------------------------

    def _left(self, parameters: Mapping[int, torch.Tensor]) -> int:
        """The tangents that a call is to do without.

        Not those that are all that an input's gradient depends on, unless that may be None.
        """
        with self.engine.lock:
            self._steps += self._came_back
            self._came_back = False
            left, alone = self._assumed_missing(), trains_alone()
            lost = [(i, parameters.get(i)) for i in self._lost_by(left)]
            waits = [i for i, p in lost if p is None or not alone or is_waited_for(p)]
            if waits:
                self._wait_for(self.missing.gradients[i] for i in waits)
                left = self._assumed_missing()
            return left

    def _assumed_missing(self) -> int:
        given = self._given if self._steps >= STEPS else self._first | self._given
        return self._without(self._all & ~given & ~self._waited)

    def _wait_for(self, gradients: Iterable[int]) -> None:
        """Do not do without what these gradients depend on any more: zeros must be made of them."""
        with self.engine.lock:
            for of in gradients:
                self._waited |= of

    def _may_be_none(self, parameter: torch.Tensor | None) -> bool:
        """Whether nobody but autograd waits for the gradient of a parameter."""
        if parameter is None or is_waited_for(parameter):
            return False
        if id(parameter) not in self._unhooked:
            if node_is_waited_for(parameter):
                return False
            self._unhooked.add(id(parameter))
        return True

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

    # ---- what runs ------------------------------------------------------------------------------

    def _graph(self, left: int) -> tuple[int, Graph]:
        """What runs calls without the tangents `left`, or the latest graph if it cannot be made."""
        latest = self._latest
        if left == latest[0] or left == self._refused:
            return latest
        with as_dynamo_compiles(), as_kernels(), without_autocast(), gc_paused():
            latest = self._latest  # another thread may have made it meanwhile
            if left != latest[0]:
                try:
                    latest = self._latest = left, self._made(left)
                except CaptureError as error:
                    self._refused = left
                    self._refuse(error)
        return latest

    def _made(self, left: int) -> Graph:
        variant = Variant(self.engine, self._steps < STEPS, may_run_again=bool(left))
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

    def _again(
        self, store: Store, named: list[Any], missing: int, tangents: list[Any]
    ) -> tuple[Any, ...]:
        """The gradients of a call that did without what it needs: it runs again, with that."""
        call, stores, draws = store.call, self.engine.stores, store.draws
        inputs = call.inputs_again(dict(zip(self._saved, named, strict=False)))
        missing &= ~self._waited  # what waits is given zeros
        left, graph = self._graph(self._without(self._assumed_missing() & missing))
        if not keeps_graph():
            stores.drop(store.number)
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
        left, late = self._late_graph(self._without(missing), call.default_dtype)
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
            return graph.backward([*results, *_kept(left, tangents)])
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
                with (
                    as_dynamo_compiles(),
                    as_kernels(),
                    without_autocast(),
                    with_default(dtype),
                    gc_paused(),
                    suppress(CaptureError),
                ):
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
            raise StepError(reason=_cannot(OTHERS_DRAW))

    def _at_once(self, inputs: list[Any], missing: int, tangents: list[Any]) -> tuple[Any, ...]:
        """The gradients, by forward and backward as one graph in-core, without a plan.

        `missing`: the tangents that it may do without.
        """
        left = self._without(missing)
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
        results = Interpreter(self.missing.reduced(left)).run(*inputs, *_kept(left, given))
        return tuple(results[self.missing.forward_outputs :])


OTHERS_DRAW = (
    "another thread draws from torch's default generator, or seeds it; give that thread its own "
    "torch.Generator"
)


def _forward(graph: Graph, inputs: list[Any]) -> list[Any] | None:
    """As `Runner.forward`; None if there is no graph for these sizes."""
    try:
        return graph.forward(list(inputs))
    except UnknownSizesError:
        return None


NO_ROOM_AGAIN = (
    "outcore: a result of forward got a gradient that it was not expected to get, and there is no "
    "room to compute again what that needs. Run the step again: now the gradient is expected"
)


def _kept(left: int, tangents: list[Any]) -> list[Any]:
    """Those of `tangents` that are not among `left`. Empties the list, to free each early."""
    kept = [each for i, each in enumerate(tangents) if not left >> i & 1]
    tangents.clear()
    return kept


def _cannot(why: str) -> str:
    return (
        "a result of forward got a gradient that it was not expected to get, and forward cannot "
        f"run again for that: {why}. Run the step again: now it is expected"
    )
