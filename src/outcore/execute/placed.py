"""placed: one outstanding step whose large tensors lie where a Layout has them (decision 0037).

Torch's allocator keeps the free memory of each stream apart. So the step computes on a stream of
its own, and all that is free there is the stretch of the layout: what of that an op is not about to
ask for is held. The stream waits for that of the caller as a call begins, and is waited for when it
ends. Whatever lies in memory of the caller's is kept until then: were it freed in between, another
thread might be given its memory, and write there at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from outcore.errors import StepError
from outcore.execute.device import Device, Queue
from outcore.execute.driver import Handle, Lane
from outcore.gauges import add_holder
from outcore.ir.layout import Hold, Layout

EDGE_BYTES = 22 << 20
"""What is held at both ends: more than is free between pages (20 MiB) that torch maps at once."""

MOST_PLUGS = 16
"""So many blocks elsewhere may be in the way of a piece. They are held until the step is over."""


class PlacedLane:
    """A lane, with the pieces that hold what is free of the stretch (`driver.Lane`).

    `lost` is told where a tensor does not lie where it should: others have memory in between. From
    there on nothing is held, and the allocator finds the places. It is told the empty text where a
    backward call went through with all in its place. Where not `holds`, the stream is the caller's,
    and nothing is held at all.
    """

    def __init__(
        self,
        lane: Lane,
        device: Device,
        layout: Layout,
        lost: Callable[[str], None],
        *,
        holds: bool,
    ) -> None:
        self._lane, self._device, self._layout, self._lost = lane, device, layout, lost
        self._home: Queue = device.current()
        """The queue of the caller."""
        self._holds, self._on_stage = holds, holds
        self._begun = False
        self._start = 0
        """The address of the stretch."""
        self._pieces: dict[int, torch.Tensor] = {}
        self._plugs: list[torch.Tensor] = []
        self._homely: set[int] = set()
        """Addresses of what lies in memory of the caller's."""
        if holds:
            add_holder(self)

    # ---- as any lane ----------------------------------------------------------------------------

    def copy_out(self, tensor: torch.Tensor, region: int, /, *after: Handle) -> Handle:
        """As the lane's."""
        return self._lane.copy_out(tensor, region, *after)

    def copy_in(self, region: int, /, *after: Handle) -> tuple[torch.Tensor, Handle]:
        """As the lane's."""
        return self._lane.copy_in(region, *after)

    def wait(self, handle: Handle, /) -> None:
        """As the lane's."""
        self._lane.wait(handle)

    def discard(self, tensor: torch.Tensor, /) -> None:
        """As the lane's."""
        self._lane.discard(tensor)

    def close(self) -> None:
        """Let all that is held go, and close the lane."""
        self.let_go()
        self._lane.close()

    # ---- the stretch ----------------------------------------------------------------------------

    def held_bytes(self, device: torch.device) -> int:
        """What of a device is held for tensors to come, and is in use by nobody."""
        held = list(self._pieces.values()) + self._plugs
        return sum(piece.nbytes for piece in held if piece.device == device)

    @contextmanager
    def call(
        self, given: Iterable[Any], crossing: Iterable[Any] = (), *, again: bool = False
    ) -> Iterator[None]:
        """Around a forward or a backward call: it computes on the stream of the stretch.

        `given`: what the caller gives it; `crossing`: what the forward call left. `again`: this
        backward call is not the last one, and frees little.

        Raises StepError where the two calls are made on two streams.
        """
        if not self._on_stage:
            yield
            return
        if self._device.current() != self._home:
            reason = "one step computes on two streams; call forward and backward on the same"
            raise StepError(reason=reason)
        stage = self._device.stage
        self._follow(stage, self._home)
        kept = [t for t in given if isinstance(t, torch.Tensor)]
        self._homely.update(t.untyped_storage().data_ptr() for t in kept)
        kept += (t for t in crossing if self._is_homely(t))
        if again:
            self.let_go()
        try:
            with self._device.on(stage):
                if self._holds and not self._begun:
                    self._begin()
                yield
        finally:
            self._follow(self._home, stage)
            del kept

    def give(self, results: Iterable[Any], *, last: bool = False) -> None:
        """Take what the caller gets: its memory serves others once the caller's queue is done.

        `last`: of a backward call that is the last one.
        """
        if last and self._holds:
            self._lost("")
        for tensor in results if self._on_stage else ():
            if isinstance(tensor, torch.Tensor) and self._device.holds(tensor):
                self._device.share(tensor, self._home)

    def let_go(self) -> None:
        """Hold nothing any more: others may need it. Tensors lie where the allocator likes."""
        self._holds = False
        self._pieces.clear()
        self._plugs.clear()

    def place(self, position: int, /) -> None:
        """Have free what the instruction at `position` is to be served from, and nothing else."""
        if not self._holds:
            return
        for move in self._layout.moves[position]:
            if isinstance(move, Hold):
                piece = self._taken(move.nbytes, self._start + move.offset)
                if piece is None:
                    self._lose(f"{move.nbytes} bytes at {move.offset} of the stretch")
                    return
                self._pieces[move.piece] = piece
            else:
                del self._pieces[move.piece]

    def placed(self, slot: int, tensor: torch.Tensor, /) -> None:
        """Take that `slot` has its memory: nothing is held any more where that lies elsewhere."""
        if self._holds:
            at = tensor.untyped_storage().data_ptr() - self._start
            if at != self._layout.offsets[slot]:
                self._lose(f"slot {slot} at {at} of the stretch, not {self._layout.offsets[slot]}")

    def moved(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """A copy of a result, in memory of the caller's; itself where it is not all of its own."""
        if not self._on_stage or tensor.untyped_storage().nbytes() != tensor.nbytes:
            return tensor
        with self._device.on(self._home):
            copy = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
        self._homely.add(copy.untyped_storage().data_ptr())
        self._follow(self._device.stage, self._home)  # which may have used that memory until now
        return copy.copy_(tensor)

    @contextmanager
    def at_home(self) -> Iterator[list[torch.Tensor]]:
        """Around an op that computes on the caller's queue; to the list comes what it makes."""
        made: list[torch.Tensor] = []
        if not self._on_stage:
            yield made
            return
        self._follow(self._home, self._device.stage)
        with self._device.on(self._home):
            yield made
        self._follow(self._device.stage, self._home)
        self._homely.update(each.untyped_storage().data_ptr() for each in made)

    # ---- within ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Take the stretch, and hold it."""
        self._begun = True
        nbytes = self._layout.nbytes
        try:
            self._device.empty(nbytes + 2 * EDGE_BYTES)  # which is free again at once, in one piece
        except torch.OutOfMemoryError:
            self._lose("a stretch of its size")
            return
        low = self._device.empty(EDGE_BYTES)
        self._start = low.data_ptr() + EDGE_BYTES
        body = self._taken(nbytes, self._start)
        high = None if body is None else self._taken(EDGE_BYTES, self._start + nbytes)
        if body is None or high is None:
            self._lose("pieces beside each other")
            return
        self._pieces[0] = body
        self._plugs += (low, high)

    def _taken(self, nbytes: int, address: int) -> torch.Tensor | None:
        """A block of `nbytes` at `address`, which is free; None where others are in the way."""
        for _ in range(MOST_PLUGS):
            try:
                block = self._device.empty(nbytes)
            except torch.OutOfMemoryError:
                return None
            if block.data_ptr() == address:
                return block
            self._plugs.append(block)
        return None

    def _is_homely(self, tensor: Any) -> bool:
        there = isinstance(tensor, torch.Tensor)
        return there and tensor.untyped_storage().data_ptr() in self._homely

    def _lose(self, what: str) -> None:
        self.let_go()
        self._lost(what)

    def _follow(self, queue: Queue, earlier: Queue) -> None:
        """Let `queue` wait for what was put into `earlier` so far."""
        event = self._device.event()
        self._device.record(event, earlier)
        self._device.wait(queue, event)
