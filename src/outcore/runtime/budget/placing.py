"""placing: decide whether a step's tensors lie where its layout says or the allocator likes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from weakref import ref

from outcore.execute import Driver, Executable, Fate, Lane, PlacedLane, QueuedDriver
from outcore.ir.layout import Layout
from outcore.ir.program import Action, Program, Run
from outcore.ir.trace import Trace
from outcore.measure import says_memory
from outcore.runtime.budget.metering import Metering
from outcore.runtime.step.store import Stores

log = logging.getLogger("outcore")

MOST_LOST = 4
"""Steps in a row with a misplaced tensor after which a layout counts as useless. In the first ones,
what libraries keep for good may be in the way; after that, it is an op that allocates in another
order."""

IN_PIECES = (
    "in many steps torch's allocator returned memory to the GPU, although tensors were at their "
    "planned addresses: what others hold or make between steps needs more than was left for it"
)

STARVED = (
    "an op ran out of memory while free memory was held for tensors' planned addresses: it needs "
    "more than when it was profiled. Its graph is planned again, without addresses"
)

NOTE = (
    "tensors were not at their planned addresses (an op allocates memory differently than when it "
    "was profiled, or no free range is large enough): torch's allocator places them, and may have "
    "to return memory to the GPU within steps; the latest: {what}"
)


class Placing:
    """Opens the lanes of steps, and watches whether layouts work."""

    def __init__(self, stores: Stores, metering: Metering) -> None:
        self._stores, self._metering = stores, metering
        self._lane: Callable[[], PlacedLane | None] = lambda: None
        """Returns the lane that was opened last, if it is alive."""
        self._layout: Layout | None = None
        """The layout of the latest step with one."""
        self._lost = 0
        """Number of latest steps in a row in which one of its tensors was misplaced."""
        self._left: list[Layout] = []
        """Layouts that did not help."""
        self.note = ""
        """For reports: why layouts do not work; empty if they do."""
        self.steps = 0
        """Number of steps in which every tensor lay where its layout says."""
        self._starved = False
        """Whether a call ran out of memory while some was held, and `take_starved` was not asked
        since."""

    def is_in_vain(self, layout: Layout | None) -> bool:
        """Whether `layout` is of no use: tensors keep being misplaced, or it did not help."""
        lost = layout is self._layout and self._lost >= MOST_LOST
        return layout is not None and (lost or any(layout is left for left in self._left))

    def give_up(self) -> None:
        """Note that the latest layout does not help."""
        self._leave(IN_PIECES)

    def take_starved(self) -> bool:
        """Whether the latest call that ran out of memory did so while some was held for a layout.

        That layout is of no use any more. True once for each such call.
        """
        starved, self._starved = self._starved, False
        return starved

    def called(self) -> None:
        """Note that a forward call begins. If another one waits, free the memory held for it."""
        lane = self._lane()
        if lane is not None and len(self._stores):
            lane.let_go()

    def open_lane(self, driver: Driver, executable: Executable, trace: Trace) -> Lane:
        """Open the lane of a step that `executable`, a program of `trace`, will run.

        With a layout, free memory is held for it, unless other calls wait for their backward, which
        may need the memory, the step is metered, which would count it, or the layout is of no use
        (`is_in_vain`). Raises as `Driver.open_lane` does.
        """
        layout = executable.layout
        if layout is None or not isinstance(driver, QueuedDriver):
            return driver.open_lane(executable.regions)
        if layout is not self._layout:
            self._layout, self._lost = layout, 0
        holds = self._metering.running is None and not len(self._stores)
        holds = holds and not self.is_in_vain(layout)
        fate = self.fate(trace, executable.program)
        lane = driver.open_placed_lane(executable.regions, layout, fate, holds=holds)
        self._lane = ref(lane)
        return lane

    def fate(self, trace: Trace, program: Program | None) -> Fate:
        """What to tell of the layout of a step that runs `program`, one of `trace`."""
        return _Fate(self, trace, program)

    def kept(self) -> None:
        """Note a step in which every tensor lay where its layout says."""
        self._lost = 0
        self.steps += 1

    def lost(self, what: str) -> None:
        """Note a step in which something did not: `what`."""
        self._lost += 1
        log.debug("outcore: a tensor is not at its planned address: %s", what)
        if self._lost >= MOST_LOST:
            self.note = NOTE.format(what=what)

    def starve(self) -> None:
        """Note that a call ran out of memory while some was held for the latest layout."""
        self._leave(STARVED)
        self._starved = True

    def _leave(self, why: str) -> None:
        if self._layout is not None:
            self._left.append(self._layout)
        self.note = why


class _Fate(NamedTuple):
    """Tells a `Placing` what becomes of the layout of one step."""

    placing: Placing
    trace: Trace
    program: Program | None

    def kept(self) -> None:
        self.placing.kept()

    def lost(self, what: str, position: int | None, /) -> None:
        if self.program is not None and position is not None:
            what = f"{what}, for {_name(self.trace, self.program.body[position].action)}"
        self.placing.lost(what)

    def failed(self, error: RuntimeError, /) -> None:
        if says_memory(error):
            self.placing.starve()


def _name(trace: Trace, action: Action) -> str:
    """What an instruction that requests memory does."""
    return trace.ops[action.op].target if isinstance(action, Run) else "a copy back"


def call(
    lane: Lane, given: Sequence[Any], crossing: Sequence[Any] = (), *, again: bool = False
) -> AbstractContextManager[None]:
    """A context for a call with `lane`, as `PlacedLane.call`; empty for other lanes."""
    if isinstance(lane, PlacedLane):
        return lane.call(given, crossing, again=again)
    return nullcontext()


def give(lane: Lane, results: Sequence[Any], *, last: bool = False) -> None:
    """Note what the caller gets from a call with `lane`, as `PlacedLane.give`."""
    if isinstance(lane, PlacedLane):
        lane.give(results, last=last)
