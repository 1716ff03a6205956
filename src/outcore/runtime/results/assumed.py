"""assumed: which results get no gradient, assumed before backward and known once it begins."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from outcore.capture import Missing
from outcore.runtime.missing_gradients import is_waited_for, node_is_waited_for, trains_alone
from outcore.runtime.parameters import is_gone, storage_of

STEPS: Final = 1
"""Steps after which results are assumed to get no gradient that got none in these."""


class Assumed:
    """The tangents that the calls of a graph do without. Sets of tangents are bits of integers.

    `static`: positions of the forward inputs that persist from step to step.
    """

    def __init__(
        self, missing: Missing, static: Collection[int], lock: AbstractContextManager[Any]
    ) -> None:
        self._missing, self._lock = missing, lock
        self._all = (1 << len(missing.tangents)) - 1
        self._first = missing.losses(static) or self._all
        """The tangents that are assumed to be given at first: those of losses, if there are any."""
        self._given = self._waited = 0
        """The tangents that were given so far; those that what waits for a gradient depends on."""
        self._steps, self._came_back = 0, False
        """Forward calls after which a backward call came, and whether one came since the latest."""
        self._known: dict[int, int] = {}
        """Tangents -> those of them that the graph can do without."""
        self._lost: dict[int, list[int]] = {}
        """Missing tangents -> the gradients that are zeros then."""
        self._unhooked: dict[int, StorageWeakRef | None] = {}
        """`id` of parameters whose nodes had no hooks as their gradients were first lost -> their
        storage, which shows whether they are alive."""
        self.possible = missing.again
        """Whether forward could run again, and backward calls are told of missing gradients."""

    @property
    def provisional(self) -> bool:
        """Whether no step has shown yet which results get gradients."""
        return self._steps < STEPS

    # ---- before a call --------------------------------------------------------------------------

    @property
    def at_first(self) -> int:
        """What the first call is to do without."""
        return self.without(self._all & ~self._first)

    def left(self, parameters: Mapping[int, torch.Tensor]) -> int:
        """The tangents that the next call is to do without.

        Not those that are all that an input's gradient depends on, unless that may be None.
        `parameters`: those among the call's inputs, by position.
        """
        with self._lock:
            self._steps += self._came_back
            self._came_back = False
            left, alone = self._assumed_missing(), trains_alone()
            lost = [(i, parameters.get(i)) for i in self.lost_by(left)]
            waits = [i for i, p in lost if p is None or not alone or is_waited_for(p)]
            if waits:
                self.wait_for(self._missing.gradients[i] for i in waits)
                left = self._assumed_missing()
            return left

    def _assumed_missing(self) -> int:
        given = self._first | self._given if self.provisional else self._given
        return self.without(self._all & ~given & ~self._waited)

    def without(self, tangents: int) -> int:
        """Those of `tangents` that the graph can do without."""
        if not self.possible:
            return 0
        if tangents not in self._known:
            self._known[tangents] = self._missing.without(tangents)
        return self._known[tangents]

    # ---- once backward begins -------------------------------------------------------------------

    def came_back(self, missing: int) -> None:
        """Note that a backward call came, without the tangents `missing`."""
        with self._lock:
            self._given |= self._all & ~missing
            self._came_back = True

    def wait_for(self, gradients: Iterable[int]) -> None:
        """Do not do without what these gradients depend on any more: zeros must be made of them."""
        with self._lock:
            for of in gradients:
                self._waited |= of

    def lost_by(self, missing: int) -> list[int]:
        """The gradients that are zeros without the tangents `missing`, by position."""
        if missing not in self._lost:
            gradients = enumerate(self._missing.gradients)
            self._lost[missing] = [i for i, of in gradients if of and not of & ~missing]
        return self._lost[missing]

    def may_be_none(self, parameter: torch.Tensor | None) -> bool:
        """Whether nobody but autograd waits for the gradient of a parameter."""
        if parameter is None or is_waited_for(parameter):
            return False
        number = id(parameter)
        if number not in self._unhooked or is_gone(self._unhooked[number]):
            if node_is_waited_for(parameter):
                return False
            self._unhooked[number] = storage_of(parameter)
        return True

    def unneeded(self, missing: int) -> int:
        """Those of the tangents `missing` for which no zeros must be made."""
        return missing & ~self._waited

    def left_again(self, missing: int) -> int:
        """The tangents that a second run of a call is to do without, for which all is known."""
        return self.without(self._assumed_missing() & missing)
