"""placed: a lane for a step whose large tensors lie where a Layout says (decision 0037).

torch's allocator keeps the free memory of each stream apart. So the step computes on a separate
stream, called the stage, whose free memory is one stretch. Pieces hold whatever is free of the
stretch, except what the next op is about to request. The stage waits for the caller's stream as a
call begins, and the caller's stream waits for the stage as the call ends. Tensors in memory of the
caller's stream are kept until then. If one were freed earlier, another thread could get its memory
and write to it at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from outcore.errors import StepError
from outcore.execute.device import Device, Queue
from outcore.execute.driver import Handle, Lane
from outcore.gauges import add_holder, note_refusal
from outcore.ir.layout import Hold, Layout, Move

EDGE_BYTES = 22 << 20
"""Bytes held at each end of the stretch: more than can be left free between the pages of 20 MiB
that torch maps at once."""

MOST_PLUGS = 16
"""The most blocks elsewhere that a piece may get before it gets its place. They are held, as plugs,
until the step is over."""


class Fate(Protocol):
    """What becomes of a layout in one step."""

    def kept(self) -> None:
        """The last backward call has ended, and everything was in its place."""
        ...

    def lost(self, what: str, position: int | None, /) -> None:
        """Something was not: `what`, for the instruction at `position` if it is one's."""
        ...

    def failed(self, error: RuntimeError, /) -> None:
        """A call raised this while free memory was held."""
        ...


class PlacedLane:
    """A lane whose pieces hold what is free of the stretch (`driver.Lane`).

    If memory is not in its place, because other memory is in the way, nothing is held from then on,
    and the allocator chooses the places. `fate` is told. Without `holds`, the step computes on the
    caller's stream, and nothing is held at all.
    """

    def __init__(
        self,
        lane: Lane,
        device: Device,
        layout: Layout,
        fate: Fate,
        *,
        holds: bool,
    ) -> None:
        self._lane, self._device, self._layout, self._fate = lane, device, layout, fate
        self._home: Queue = device.current()
        """The caller's queue."""
        self._holds, self._on_stage = holds, holds
        """Whether pieces are held now; whether the step computes on the stage, which does not
        change."""
        self._begun = False
        """Whether the lane has tried to take the stretch: the forward call has begun."""
        self._start = 0
        """The address of the stretch."""
        self._pieces: dict[int, torch.Tensor] = {}
        """Piece -> the tensor that holds its free memory."""
        self._plugs: list[torch.Tensor] = []
        """Blocks that are held so that requests do not get them."""
        self._caller_addresses: set[int] = set()
        """Addresses of storages in memory of the caller's stream."""
        if holds:
            add_holder(self)

    # ---- as any lane ----------------------------------------------------------------------------

    @property
    def key(self) -> int:
        """The key of the wrapped lane, which makes the copies."""
        return self._lane.key

    def copy_out(self, tensor: torch.Tensor, region: int, /, *after: Handle) -> Handle:
        """Do as the wrapped lane does."""
        return self._lane.copy_out(tensor, region, *after)

    def copy_in(self, region: int, /, *after: Handle) -> tuple[torch.Tensor, Handle]:
        """Do as the wrapped lane does."""
        return self._lane.copy_in(region, *after)

    def wait(self, handle: Handle, /) -> None:
        """Do as the wrapped lane does."""
        self._lane.wait(handle)

    def discard(self, tensor: torch.Tensor, /) -> None:
        """Do as the wrapped lane does."""
        self._lane.discard(tensor)

    def close(self) -> None:
        """Release everything that is held, and close the wrapped lane.

        If the step was dropped, the stage waits for copies that are in progress, and so does the
        caller's queue: they may read its memory, which is freed next.
        """
        self.let_go()
        self._lane.close()
        if self._on_stage:
            self._follow(self._home, self._device.stage)

    # ---- the stretch ----------------------------------------------------------------------------

    def held_bytes(self, device: torch.device) -> int:
        """Bytes of `device` that are held for later tensors, and in use by none."""
        held = list(self._pieces.values()) + self._plugs
        return sum(piece.nbytes for piece in held if piece.device == device)

    @contextmanager
    def call(
        self, given: Iterable[Any], crossing: Iterable[Any] = (), *, again: bool = False
    ) -> Iterator[None]:
        """Context around a forward or a backward call, which then computes on the stage.

        `given`: the tensors that the caller passes; `crossing`: those that the forward call left.
        `again`: this backward call is not the last one, and frees little.

        Raises StepError if the two calls are made on two streams.
        """
        if not self._on_stage:
            yield
            return
        if self._device.current() != self._home:
            reason = (
                "one step runs on two CUDA streams; call forward and backward on the same stream"
            )
            raise StepError(reason=reason)
        stage = self._device.stage
        self._follow(stage, self._home)
        kept = [t for t in given if isinstance(t, torch.Tensor)]
        self._caller_addresses.update(t.untyped_storage().data_ptr() for t in kept)
        kept += (t for t in crossing if self._is_homely(t))
        if again:
            self.let_go()
        begun, self._begun = self._begun, True
        try:
            with self._device.on(stage):
                if self._holds and begun:
                    self._move(self._layout.resume)
                elif self._holds:
                    self._begin()
                yield
                if self._holds and not begun:
                    self._move(self._layout.pause)
        except RuntimeError as error:
            if self._holds:
                self.let_go()
                self._fate.failed(error)
            raise
        finally:
            self._follow(self._home, stage)
            del kept

    def give(self, results: Iterable[Any], *, last: bool = False) -> None:
        """Prepare results for the caller: their memory is reused once the caller's queue is done.

        `last`: they are the results of the last backward call.
        """
        if last and self._holds:
            self._fate.kept()
        for tensor in results if self._on_stage else ():
            if isinstance(tensor, torch.Tensor) and self._device.holds(tensor):
                self._device.share(tensor, self._home)

    def let_go(self) -> None:
        """Release everything that is held; from now on the allocator chooses the places."""
        self._holds = False
        self._pieces.clear()
        self._plugs.clear()

    def place(self, position: int, /) -> None:
        """Make free exactly the memory that the requests of the instruction at `position` need."""
        if self._holds:
            self._move(self._layout.moves[position], position)

    def placed(self, slot: int, tensor: torch.Tensor, /) -> None:
        """Check that `slot` lies where the layout says; if not, release everything."""
        if self._holds:
            at = tensor.untyped_storage().data_ptr() - self._start
            if at != self._layout.offsets[slot]:
                self._lose(
                    f"slot {slot} at offset {at} of the layout, not {self._layout.offsets[slot]}",
                    self._layout.positions[slot],
                )

    def moved(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """Copy a result to memory of the caller's stream.

        Returns the tensor itself if it is only a part of its storage, or if the step computes on
        the caller's stream anyway.
        """
        if not self._on_stage or tensor.untyped_storage().nbytes() != tensor.nbytes:
            return tensor
        with self._device.on(self._home):
            copy = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
        self._caller_addresses.add(copy.untyped_storage().data_ptr())
        # The caller's stream may have used that memory until now.
        self._follow(self._device.stage, self._home)
        return copy.copy_(tensor)

    @contextmanager
    def at_home(self) -> Iterator[list[torch.Tensor]]:
        """Context around an op that computes on the caller's queue.

        Append what the op makes to the list.
        """
        made: list[torch.Tensor] = []
        if not self._on_stage:
            yield made
            return
        self._follow(self._home, self._device.stage)
        with self._device.on(self._home):
            yield made
        self._follow(self._device.stage, self._home)
        self._caller_addresses.update(each.untyped_storage().data_ptr() for each in made)

    # ---- within ---------------------------------------------------------------------------------

    def _move(self, moves: Iterable[Move], position: int | None = None) -> None:
        """Release and take pieces, for the instruction at `position` if it is one's."""
        for move in moves:
            if isinstance(move, Hold):
                piece = self._taken(move.nbytes, self._start + move.offset)
                if piece is None:
                    where = f"{move.nbytes} bytes at offset {move.offset} of the layout"
                    self._lose(where, position)
                    return
                self._pieces[move.piece] = piece
            else:
                del self._pieces[move.piece]

    def _begin(self) -> None:
        """Take the stretch and hold it."""
        nbytes = self._layout.nbytes
        try:
            self._device.empty(nbytes + 2 * EDGE_BYTES)  # freed again at once, as one block
        except torch.OutOfMemoryError:
            note_refusal()
            self._lose("no free range of the layout's size")
            return
        low = self._device.empty(EDGE_BYTES)
        self._start = low.data_ptr() + EDGE_BYTES
        body = self._taken(nbytes, self._start)
        high = None if body is None else self._taken(EDGE_BYTES, self._start + nbytes)
        if body is None or high is None:
            self._lose("the layout's range is not contiguous")
            return
        self._pieces[0] = body
        self._plugs += (low, high)

    def _taken(self, nbytes: int, address: int) -> torch.Tensor | None:
        """Take the block of `nbytes` at `address`; None if other memory is in the way."""
        for _ in range(MOST_PLUGS):
            try:
                block = self._device.empty(nbytes)
            except torch.OutOfMemoryError:
                note_refusal()
                return None
            if block.data_ptr() == address:
                return block
            self._plugs.append(block)
        return None

    def _is_homely(self, tensor: Any) -> bool:
        """Whether `tensor` is in memory of the caller's stream."""
        there = isinstance(tensor, torch.Tensor)
        return there and tensor.untyped_storage().data_ptr() in self._caller_addresses

    def _lose(self, what: str, position: int | None = None) -> None:
        """Release everything, and report what is not in its place, for which instruction."""
        self.let_go()
        self._fate.lost(what, position)

    def _follow(self, queue: Queue, earlier: Queue) -> None:
        """Let `queue` wait for everything put into `earlier` so far."""
        event = self._device.event()
        self._device.record(event, earlier)
        self._device.wait(queue, event)
