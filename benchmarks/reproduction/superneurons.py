"""superneurons: figures of SuperNeurons: Wang et al., arXiv 1801.04380."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.kit.benchmark import Patience
from benchmarks.kit.rows import Row
from benchmarks.reproduction.figure import (
    NONE,
    fact,
    gigabytes,
    mebibytes,
    number,
    times,
)
from benchmarks.reproduction.steps import Scale, lab
from outcore.ir.hardware import Tier
from outcore.ir.memory import peak
from outcore.ir.problem import Problem
from outcore.ir.program import Copy, Program, Run
from outcore.lower import lower
from outcore.policies import resolve
from tests.pure.caffe_layers import Layers, alexnet, resnet

BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
REPLAYS = {
    "AlexNet": (14, 23, 17),
    "ResNet-50": (84, 118, 85),
    "ResNet-101": (169, 237, 170),
}
"""Table 1: speed-centric, memory-centric, cost-aware."""
STRATEGIES = ("speed-centric", "memory-centric", "cost-aware")
PEAKS_MIB = {"speed-centric": 993.018, "memory-centric": 886.23, "cost-aware": 886.23}
MOVED_GB = {256: 2.56, 384: 3.72, 512: 4.88, 640: 6.03, 896: 8.35, 1024: 9.50}
CACHED_GB = {256: 0.0, 384: 0.0, 512: 0.0, 640: 0.0, 896: 0.0, 1024: 0.88}
DEVICE_BYTES = 12_000_000_000
WIDEST = {
    "alexnet": (1792, 256),
    "vgg16": (224, 16),
    "inception-v4": (240, 16),
    "resnet50-v1": (384, 32),
    "resnet101": (256, 16),
    "resnet152": (176, 16),
}
"""Table 5: the largest batch, and the step in which batches are tried here."""
POOLS_GIB = {3: 203, 5: 240}
"""Figure 12: GiB of the pool -> images per second. It names no machine; we use the K40c."""
TOP = 4
"""Batches up to this many times the paper's are tried."""
RUNTIME = "superneurons-cost-aware"


def replays(_scale: Scale, _patience: Patience) -> Iterator[Row]:
    """Table 1 and section 4.1.1, in the paper's own layers: traces made by hand."""
    for name, expected in REPLAYS.items():
        for strategy, paper in zip(STRATEGIES, expected, strict=True):
            found = _network(name, 200).problem()
            ours = sum(
                isinstance(each.action, Run) and each.action.again
                for each in _program(found, f"{RUNTIME}{{min_bytes=1B,replay={strategy}}}").body
            )
            note = "" if name == "AlexNet" else "short cuts without normalization"
            what = f"{name}: layers replayed, {strategy}"
            yield fact("SuperNeurons, Table 1", what, str(paper), str(ours), note)
    for strategy, mib in PEAKS_MIB.items():
        spec = f"{RUNTIME}{{min_bytes=1B,replay={strategy}}}"
        nbytes = _peak(alexnet(200).problem(), spec)
        what = f"AlexNet, batch 200: peak, {strategy}"
        yield number("SuperNeurons, Table 1", what, mib * 2**20, nbytes, mebibytes)
    source = "SuperNeurons, section 4.1.1"
    every = sum(buffer.nbytes for buffer in alexnet(200).problem().trace.buffers)
    note = "the paper counts 36 tensors that it does not list; ours are what layers make"
    what = "AlexNet, batch 200: all tensors at once"
    yield number(source, what, 2189.437 * 2**20, every, mebibytes, note)
    for what, mib, options in (
        ("liveness", 1489.355, "replay=none"),
        ("and offloading", 1132.155, "replay=none,cache=false"),
        ("and recomputation", 886.385, "replay=cost-aware,cache=false"),
    ):
        nbytes = _peak(alexnet(200).problem(), f"{RUNTIME}{{min_bytes=1B,{options}}}")
        yield number(source, f"AlexNet, batch 200: peak, {what}", mib * 2**20, nbytes, mebibytes)


def cache(_scale: Scale, _patience: Patience) -> Iterator[Row]:
    """Table 3: what AlexNet moves in a step, without and with the tensor cache."""
    for title, table, option in (("no cache", MOVED_GB, "false"), ("cache", CACHED_GB, "true")):
        for batch, paper in table.items():
            problem = alexnet(batch).problem(12 * 2**30)
            moved = _moved_bytes(problem, f"{RUNTIME}{{min_bytes=1B,cache={option}}}")
            what = f"AlexNet, batch {batch}: moved, {title}"
            note = "convolutions' outputs, there and back" if option == "false" else ""
            if paper:
                yield number("SuperNeurons, Table 3", what, paper * 1e9, moved, gigabytes, note)
            else:
                yield fact("SuperNeurons, Table 3", what, "0", f"{moved:g}", note)


def capacity(scale: Scale, patience: Patience) -> Iterator[Row]:
    """Tables 4 and 5: how wide and how deep a network fits in 12 GB, from torch's traces."""
    for name, (paper, step) in WIDEST.items():
        if patience.over():
            return
        found = lab(name, "k40c", DEVICE_BYTES, scale)
        batches = range(step, TOP * paper + 1, step)
        wide = found.largest(batches, RUNTIME)
        rule = found.largest(batches, "superneurons")
        note = (
            f"no workspaces, no holes; `superneurons`: {rule or NONE}; tried up to {TOP} times the "
            "paper's"
        )
        what = f"{name}: largest batch in 12 GB"
        yield number("SuperNeurons, Table 5", what, paper, wide, str, note)
    for name, batch, source in (
        ("resnet1920", 16, "SuperNeurons, Table 4"),
        ("resnet2500", 1, "SuperNeurons, section 4.2"),
    ):
        if patience.over():
            return
        row = lab(name, "k40c", DEVICE_BYTES, scale).row(batch, RUNTIME)
        ours = "a plan" if row.feasible else NONE
        yield fact(source, f"{name}, batch {batch}, in 12 GB", "a plan", ours, row.reason)


def workspaces(scale: Scale, _patience: Patience) -> Iterator[Row]:
    """Figure 12: AlexNet with more memory, which the workspaces of convolutions use."""
    source, what = "SuperNeurons, Figure 12", "AlexNet, batch 300"
    speeds: list[float | None] = []
    for gib, paper in POOLS_GIB.items():
        found = lab("alexnet", "k40c", gib * 2**30, scale)
        two = replace(found, variants=True).row(300, RUNTIME)
        one = found.row(300, RUNTIME).items_per_second or 0.0
        speeds.append(two.items_per_second)
        note = f"a Winograd algorithm beside the default, which gives {_images(one)}"
        name = f"{what}: in a pool of {gib} GB"
        yield number(source, name, paper, two.items_per_second, _images, note)
    less, more = speeds
    gain = None if less is None or more is None else more / less
    small, large = POOLS_GIB.values()
    yield number(source, f"{what}: the larger pool", large / small, gain, times)


def _images(rate: float) -> str:
    return f"{rate:.0f} images/s"


def _network(name: str, batch: int) -> Layers:
    if name == "AlexNet":
        return alexnet(batch)
    return resnet(16, BLOCKS[int(name.removeprefix("ResNet-"))], project=())


def _program(problem: Problem, policy: str) -> Program:
    return lower(problem, resolve(policy).plan(problem))


def _peak(problem: Problem, policy: str) -> int:
    return peak(problem, _program(problem, policy), Tier.DEVICE).nbytes


def _moved_bytes(problem: Problem, policy: str) -> int:
    program = _program(problem, policy)
    copies = (each.action for each in program.body if isinstance(each.action, Copy))
    buffers = (program.slots[copy.source].buffer for copy in copies)
    return sum(problem.trace.buffers[buffer].nbytes for buffer in buffers)
