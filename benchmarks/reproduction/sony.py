"""sony: figures of Sony's window scheduling and virtual addressing, arXiv 2010.14109."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import partial

from benchmarks.kit.benchmark import Patience
from benchmarks.kit.rows import Row
from benchmarks.reproduction.figure import number, percent, span, times
from benchmarks.reproduction.steps import Lab, Scale, lab
from outcore.allocators import Allocator, reserve, resolve
from outcore.errors import InfeasibleError
from outcore.ir.hardware import Tier
from outcore.ir.memory import peak
from outcore.lower import lower
from outcore.policies import resolve as policy_of
from outcore.simulate import simulate

MACHINE = "v100-sony"
DEVICE_BYTES = 16 * 2**30
IN_CORE_BATCH = 190
CACHING, CHUNKS = "best-fit-nnabla", "virtual-chunks{chunk_bytes=20MiB,small_bytes=1MiB}"
PARTS = tuple(n / 16 for n in range(16, 5, -1))
"""Scheduling budgets to try, as fractions of the device: the paper tunes by hand (Figure 3)."""
SCHEDULE = {256: 0.96, 512: 0.787, 928: 0.688}
WITH_CHUNKS = {256: 0.73, 512: 0.77, 928: 0.70, 1120: 0.69, 1248: 0.60, 1440: 0.55}
"""Table 1: images per second, relative to 581 in-core at batch 190."""
WIDER = {"densenet121": (512, 1.5), "pix2pixhd": (4, 4.0), "deeplabv3plus": (6, 5.3)}
"""Section 5.3: largest batch in-core, and how many times that with the schedule alone."""
WIDER_YET = (1.5, 2.0)
LMS = {190: 0.93, 256: 0.91, 512: 0.81, 928: 0.53}
"""Table 1: TensorFlow with LMS on a P100, relative to 258 images per second in-core at 190."""


def window(scale: Scale, patience: Patience) -> Iterator[Row]:
    """Table 1: speed of ResNet-50 out of core, relative to its in-core speed."""
    found = lab("resnet50-v1", MACHINE, DEVICE_BYTES, scale)
    base = found.at(IN_CORE_BATCH)
    rate = base.items / base.in_core.seconds
    note = "what the preset was calibrated on"
    yield number("Sony, Table 1", "in-core, batch 190, images/s", 581, rate, _whole, note)
    for allocator, table in ((CACHING, SCHEDULE), (CHUNKS, WITH_CHUNKS)):
        for batch, paper in table.items():
            if patience.over():
                return
            best, part = _fastest(found, batch, resolve(allocator))
            ours = None if best is None else best / rate
            note = f"{allocator}; budget {part:.0%} of the device" if best else allocator
            what = f"window, batch {batch}, of in-core"
            yield number("Sony, Table 1", what, paper, ours, percent, note)
    yield from _largest(scale, patience)
    yield from _lms(scale)


def fragmentation(scale: Scale, _patience: Patience) -> Iterator[Row]:
    """Figure 3: what is reserved for a schedule of 8 GB at batch 928."""
    for batch, budget in ((928, 8.0), (928, 10.0), (740, 8.0)):
        found = lab("resnet50-v1", MACHINE, int(budget * 1e9), scale)
        for allocator, paper, what in (
            (CACHING, 2.0, "without virtual addresses"),
            ("virtual-chunks{chunk_bytes=40MiB,small_bytes=1MiB}", 1.0, "with chunks of 40 MiB"),
        ):
            ours = _reserved(found, batch, resolve(allocator))
            title = f"window in {budget:g} GB, batch {batch}: reserved over planned, {what}"
            other = "" if (batch, budget) == (928, 8.0) else "another case than the paper's"
            yield number("Sony, Fig. 3", title, paper, ours, times, other)


def _reserved(found: Lab, batch: int, allocator: Allocator) -> float | None:
    problem = found.problem(batch)
    try:
        program = lower(problem, policy_of("window").plan(problem))
    except InfeasibleError:
        return None
    used = reserve(problem, program, allocator).reserved.nbytes
    return used / peak(problem, program, Tier.DEVICE).nbytes


def _fastest(found: Lab, batch: int, allocator: Allocator) -> tuple[float | None, float]:
    """Items per second with the largest budget for which the allocator fits in the device."""
    for part in PARTS:
        problem = found.problem(batch, part)
        try:
            program = lower(problem, policy_of("window").plan(problem))
        except InfeasibleError:
            break
        if reserve(
            problem, program, allocator, capacity_bytes=found.problem(batch).budget_bytes
        ).met:
            return batch / simulate(problem, program).seconds, part
    return None, 0.0


def _largest(scale: Scale, patience: Patience) -> Iterator[Row]:
    """How much larger the batches of other networks get."""
    for name, (paper, factor) in WIDER.items():
        if patience.over():
            return
        found = lab(name, MACHINE, DEVICE_BYTES, scale)
        unit = max(1, paper // 16)
        batches = range(unit, 16 * paper + 1, unit)
        largest = partial(_served, found, batches)
        in_core, scheduled, chunked = (
            largest("keep-all", CACHING),
            largest("window", CACHING),
            largest("window", CHUNKS),
        )
        yield number("Sony, section 5.3", f"{name}: largest batch in-core", paper, in_core)
        more = scheduled / in_core if scheduled and in_core else None
        yield number("Sony, section 5.3", f"{name}: times that by `window`", factor, more, times)
        again = chunked / scheduled if chunked and scheduled else None
        what = f"{name}: times that again with virtual addresses"
        yield span("Sony, section 5.3", what, WIDER_YET, [again], times)


def _served(found: Lab, batches: range, policy: str, allocator: str) -> int | None:
    """The largest batch that fits with some budget. By bisection, like `Lab.largest`."""
    served = resolve(allocator)
    most = bisect_left(batches, True, key=lambda n: not _serves(found, n, policy, served))
    return batches[most - 1] if most else None


def _serves(found: Lab, batch: int, policy: str, allocator: Allocator) -> bool:
    whole = found.problem(batch).budget_bytes
    for part in PARTS:
        problem = found.problem(batch, part)
        try:
            program = lower(problem, policy_of(policy).plan(problem))
        except InfeasibleError:
            return False
        if reserve(problem, program, allocator, capacity_bytes=whole).met:
            return True
    return False


def _lms(scale: Scale) -> Iterator[Row]:
    """TensorFlow's Large Model Support, which Sony's table lists for comparison."""
    found = lab("resnet50-v1", "p100", int(0.9 * DEVICE_BYTES), scale)
    base = found.at(IN_CORE_BATCH)
    rate = base.items / base.in_core.seconds
    note = "0.9 of the device, as in TFLMS; no allocator"
    for batch, paper in LMS.items():
        row = found.row(batch, "lms")
        ours = None if row.items_per_second is None else row.items_per_second / rate
        yield number(
            "Sony, Table 1 (LMS)", f"lms, batch {batch}, of in-core", paper, ours, percent, note
        )
    batches = range(64, 2049, 64)
    what = "lms: largest batch"
    yield number("Sony, Table 1 (LMS)", what, 928, found.largest(batches, "lms"), str, note)


def _whole(figure: float) -> str:
    return f"{figure:.0f}"
