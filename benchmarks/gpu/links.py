"""links: measure the machine: arithmetic, device memory, and copies by outcore's driver.

Copies use the lanes of the driver, as in a step: in one direction, in both at once, and while the
device computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.gpu.instruments import instruments
from benchmarks.gpu.scale import Scale
from benchmarks.kit.benchmark import Patience
from benchmarks.kit.modes import spill_folder
from benchmarks.kit.rows import Row
from benchmarks.kit.worker import Worker
from outcore.execute import open_driver
from outcore.execute.driver import CopySpan, Direction, Region
from outcore.ir.hardware import Tier

REPEATS = 5
CALLS = 20
"""Calls in a row: a single short call would include the time to launch it."""
PRODUCT, MEMORY = "matrix product, float32", "device memory, read and written"
USES = PRODUCT, MEMORY
"""What computes next to copies: much arithmetic, or only reads and writes, as batch norm does."""
REGIONS = 8
"""Copies in a row, in each direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate(Row):
    """One thing that the device does, while it does `beside`."""

    what: str
    beside: str = "nothing"
    bytes_per_second: float | None = None
    flop_per_second: float | None = None
    of_alone_ratio: float | None = None
    """The rate divided by the rate without anything in parallel."""


class Measured(NamedTuple):
    """Rates of what ran at the same time; None for what did not run."""

    out: float | None = None
    into: float | None = None
    calls: float | None = None
    """Calls per second of what computes."""


def links(scale: Scale, patience: Patience) -> Iterator[Row]:
    """Arithmetic and memory first, then the links alone, together, and during compute."""
    if patience.over():
        return
    with Worker(Machine, scale) as machine:
        for name in machine.ask(Machine.precisions):
            rate = machine.ask(Machine.arithmetic, name)
            yield Rate(what=f"matrix product, {name}", flop_per_second=rate)
        rate = machine.ask(Machine.memory)
        yield Rate(what=MEMORY, bytes_per_second=rate)
        out = machine.ask(Machine.together, copy_out=True).out
        into = machine.ask(Machine.together, copy_in=True).into
        yield _link("device to outer tier", "nothing", out, out)
        yield _link("outer tier to device", "nothing", into, into)
        both = machine.ask(Machine.together, copy_out=True, copy_in=True)
        yield _link("device to outer tier", "copies back", both.out, out)
        yield _link("outer tier to device", "copies away", both.into, into)
        for use in USES:
            alone = machine.ask(Machine.together, use=use).calls
            one = machine.ask(Machine.together, use=use, copy_out=True)
            yield _link("device to outer tier", use, one.out, out)
            yield _slowed(use, "copies away", one.calls, alone)
            both = machine.ask(Machine.together, use=use, copy_out=True, copy_in=True)
            others = f"{use}, and copies both ways"
            yield _link("device to outer tier", others, both.out, out)
            yield _link("outer tier to device", others, both.into, into)
            yield _slowed(use, "copies both ways", both.calls, alone)


class Machine:
    """A device with its driver, and regions to copy to."""

    def __init__(self, scale: Scale) -> None:
        self.instruments = instruments(scale.device)
        self.device = self.instruments.device
        self.side = 512 if scale.small else 8192
        self.nbytes = (4 if scale.small else 256) << 20
        self.driver = open_driver(self.device, spill_folder(), None)
        room = 4 * REGIONS * self.nbytes
        self.driver.hardware({Tier.DEVICE: room, Tier.HOST: room, Tier.DISK: room})

    def precisions(self) -> tuple[str, ...]:
        """The precisions that `arithmetic` supports."""
        return ("float32", "tf32", "bfloat16") if self.device.type == "cuda" else ("float32",)

    def arithmetic(self, precision: str) -> float:
        """Floating-point operations per second of a product of two square matrices."""
        with _tf32(on=precision == "tf32"):
            dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
            product = self._product(dtype)
            return 2 * self.side**3 / self._seconds(product)

    def memory(self) -> float:
        """Bytes per second, read and written, of a copy within the device."""
        return 2 * self.nbytes / self._seconds(self._use(MEMORY))

    def together(self, *, copy_out: bool = False, copy_in: bool = False, use: str = "") -> Measured:
        """Rates of the chosen activities, all begun at once: copies, and one of `USES`."""
        call = self._use(use)
        count = self._calls_during_the_copies(call) if use else 0
        regions = {
            number: Region(number * self.nbytes, self.nbytes, torch.uint8, (self.nbytes,), (1,))
            for number in range(2 * REGIONS)
        }
        lane = self.driver.open_lane(regions)
        source = self._bytes()
        for number in regions:  # a region has to be written before it is read
            lane.wait(lane.copy_out(source, number))
        taken = []
        for _ in range(REPEATS + 1):
            handles = []
            spans: list[CopySpan] = []
            self.driver.record(spans.append)
            for number in range(
                REGIONS
            ):  # the copies first: they wait for what was computed before
                if copy_out:
                    handles.append((lane.copy_out(source, number), source))
                if copy_in:
                    target, handle = lane.copy_in(REGIONS + number)
                    handles.append((handle, target))
            seconds = self._span(call, count)
            for handle, _ in handles:
                lane.wait(handle)
            self.driver.drain()
            calls = count / seconds if use else None
            taken.append(Measured(_rate(spans, "out"), _rate(spans, "in"), calls))
        self.driver.record(None)
        lane.close()
        del taken[0]  # warm-up
        return Measured(
            *(_median([each[i] for each in taken]) for i in range(len(Measured._fields)))
        )

    def _calls_during_the_copies(self, call: Callable[[], object]) -> int:
        """How many calls take about as long as the copies of one direction."""
        out = self.together(copy_out=True).out
        assert out is not None
        seconds = REGIONS * self.nbytes / out
        return max(1, round(seconds / self._seconds(call)))

    def _use(self, use: str) -> Callable[[], object]:
        """What computes: one of `USES`, or nothing."""
        if use == PRODUCT:
            return self._product(torch.float32)
        if use == MEMORY:
            source, target = self._bytes(), self._bytes()
            return lambda: target.copy_(source)
        return lambda: None

    def _product(self, dtype: torch.dtype) -> Callable[[], object]:
        one, other = (torch.randn(self.side, self.side, device=self.device) for _ in range(2))
        one, other = one.to(dtype), other.to(dtype)
        result = torch.empty_like(one)
        return lambda: torch.mm(one, other, out=result)

    def _bytes(self) -> torch.Tensor:
        return torch.ones(self.nbytes, dtype=torch.uint8, device=self.device)

    def _seconds(self, call: Callable[[], object]) -> float:
        spans = [self._span(call, CALLS) for _ in range(REPEATS + 1)]
        return median(spans[1:]) / CALLS  # the first is warm-up

    def _span(self, call: Callable[[], object], count: int) -> float:
        """Seconds of `count` calls in a row."""
        clock = self.driver.clock
        start = clock.now()
        for _ in range(count):
            call()
        return clock.seconds(start, clock.now())


def _rate(spans: list[CopySpan], direction: Direction) -> float | None:
    mine = [span for span in spans if span.direction == direction]
    if not mine:
        return None
    seconds = max(s.stop_seconds for s in mine) - min(s.start_seconds for s in mine)
    return sum(span.nbytes for span in mine) / seconds


def _median(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return median(known) if known else None


def _link(what: str, others: str, rate: float | None, alone: float | None) -> Rate:
    assert rate is not None
    assert alone is not None
    return Rate(what=what, beside=others, bytes_per_second=rate, of_alone_ratio=rate / alone)


def _slowed(what: str, others: str, calls: float | None, alone: float | None) -> Rate:
    assert calls is not None
    assert alone is not None
    return Rate(what=what, beside=others, of_alone_ratio=calls / alone)


@contextmanager
def _tf32(*, on: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
