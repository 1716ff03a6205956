"""pooch: figures of PoocH: Ito, Imai, Nakada, arXiv 1907.05013, and its Japanese predecessor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.kit.benchmark import Patience
from benchmarks.kit.rows import Row, ratio
from benchmarks.reproduction.figure import NONE, Figure, fact, number, percent, span, times
from benchmarks.reproduction.steps import Lab, Scale, lab, lost
from outcore.compare import Compared
from outcore.errors import InfeasibleError
from outcore.ir.liveness import crossing_gaps
from outcore.ir.memory import fits
from outcore.ir.problem import Problem
from outcore.lower import lower
from outcore.policies import resolve
from outcore.report import count_choices
from outcore.simulate import simulate
from tests.pure.chainer_resnet import chainer_resnet50, table3_problem

POOL_BYTES = 16_100_000_000
"""PoocH's pool: 95 % of the device's memory, as its code documents."""

FITTED_POOL_BYTES = {"pooch": 15_100_000_000, "superneurons": 15_800_000_000}
"""Pools that reproduce the counts of Table 3: found by scanning pools and rates, not printed."""

X86, POWER9 = "v100-pcie3", "v100-nvlink2"
RATES = {X86: 13e9, POWER9: 75e9}
"""Link rates (bytes per second) that reproduce Table 3, found by the same scan."""
BATCHES = (256, 384, 512, 640)
ALEXNET_BATCHES = (2304, 2432, 2560, 2688)
ALEXNET = (
    "torch's response normalization is ten ops with maps of their own, Chainer's one function: "
    "from 2432 images on, its backward alone needs more than the pool"
)
VOLUMES = ((224, 224, 128), (224, 224, 256), (448, 224, 128), (448, 224, 256))
"""Height, width and frames."""
MAP_BYTES = 1 << 20
"""Lower limit for maps: those of 640 images are larger."""

TABLE3 = {
    X86: {"pooch": "66/12/27", "superneurons": "66/21/18"},
    POWER9: {"pooch": "66/36/3", "superneurons": "66/21/18"},
}


def table3(_scale: Scale, _patience: Patience) -> Iterator[Row]:
    """ResNet-50 as Chainer runs it, from a trace made by hand: kept, offloaded, recomputed."""
    yield from _saved_maps()
    documented = dict.fromkeys(FITTED_POOL_BYTES, POOL_BYTES)
    for pools, why in ((documented, "documented"), (FITTED_POOL_BYTES, "found by scanning")):
        for machine, policies in TABLE3.items():
            for policy, paper in policies.items():
                problem = table3_problem(512, pools[policy], RATES[machine])
                pool = pools[policy] / 1e9
                note = f"pool {pool:g} GB ({why}), {RATES[machine] / 1e9:g} GB/s"
                what = f"{policy} on {machine}, batch 512"
                yield fact("PoocH, Table 3", what, paper, _counts(problem, policy), note)
    for policy, paper in (("superneurons", NONE), ("pooch", "a plan")):
        problem = table3_problem(640, POOL_BYTES, RATES[X86])
        found = _counts(problem, policy)
        ours = found if found == NONE else "a plan"
        yield fact("PoocH, Fig. 17", f"{policy}, batch 640", paper, ours, "Chainer's trace")


def _saved_maps() -> Iterator[Row]:
    """What Chainer keeps of ResNet-50: everything that crosses to the backward call."""
    trace = chainer_resnet50(640).trace
    crossing = {gap.buffer for gap in crossing_gaps(trace)}
    saved = [b.nbytes for b in trace.buffers if b.id in crossing and b.nbytes > MAP_BYTES]
    over = "more than 50 GB" if sum(saved) > 50e9 else "less"
    note = (
        f"{len(saved)} maps, {sum(saved) / 640 / 1e6:.2f} MB per image, {sum(saved) / 1e9:.2f} GB"
    )
    yield fact("PoocH, section 1", "ResNet-50 at 640: memory", "more than 50 GB", over, note)


def _counts(problem: Problem, policy: str) -> str:
    try:
        counts = count_choices(problem.trace, resolve(policy).plan(problem))
    except InfeasibleError:
        return NONE
    return f"{counts.keep}/{counts.offload}/{counts.recompute}"


def ablation(scale: Scale, _patience: Patience) -> Iterator[Row]:
    """What each part of PoocH contributes: Figures 15 (x86) and 16 (POWER9)."""
    x86: list[dict[str, float | None]] = []
    cases = (("resnet50-v1", 256), ("googlenet", 384), ("alexnet", 2432))
    for machine, printed in ((X86, "PoocH, Fig. 15"), (POWER9, "PoocH, Fig. 16")):
        found = {
            name: _speeds(
                lab(name, machine, POOL_BYTES, scale),
                batch,
                ("swap-all-naive", "swap-all", "swap-opt", "pooch"),
            )
            for name, batch in cases
        }
        where = ", ".join(f"{name} {batch}" for name, batch in cases)
        if machine == X86:
            where = f"{where}; {ALEXNET}"
            pairs = [_ratio(f, "swap-all", "swap-all-naive") for f in found.values()]
            yield span(printed, "swap-all over its naive form", (1.02, 1.14), pairs, times, where)
            pairs = [_ratio(f, "swap-opt", "swap-all") for f in found.values()]
            yield span(printed, "swap-opt over swap-all", (1.4, 3.0), pairs, times, where)
            resnet, alexnet = found["resnet50-v1"], found["alexnet"]
            more = _ratio(resnet, "pooch", "swap-opt")
            yield number(printed, "pooch over swap-opt, ResNet-50 256", 1.45, more, times)
            more = _ratio(alexnet, "pooch", "swap-opt")
            yield number(printed, "pooch over swap-opt, AlexNet 2432", 1.01, more, times)
        else:
            gains = [_ratio(f, "pooch", "swap-all-naive") for f in found.values()]
            yield _smaller(printed, gains, [_ratio(f, "pooch", "swap-all-naive") for f in x86])
        x86 = list(found.values())


def _smaller(printed: str, gains: Sequence[float | None], before: Sequence[float | None]) -> Figure:
    """The paper says that gains in Figure 16 are smaller than in Figure 15, without numbers."""
    pairs = [(here, there) for here, there in zip(gains, before, strict=True) if here and there]
    smaller = bool(pairs) and all(here < there for here, there in pairs)
    note = "; ".join(f"{times(here)}, on x86 {times(there)}" for here, there in pairs)
    ours = "smaller" if smaller else "not all smaller"
    return fact(printed, "gains of pooch over naive swap-all, beside x86's", "smaller", ours, note)


def speed(scale: Scale, _patience: Patience) -> Iterator[Row]:
    """How much of the in-core speed is lost out of core: Figures 17 to 22."""
    in_core = lab("resnet50-v1", X86, POOL_BYTES, scale).at(128)
    rate = in_core.items / in_core.in_core.seconds
    note = "what the preset was calibrated on"
    yield number(
        "PoocH, Fig. 17", "ResNet-50 in-core, batch 128, images/s", 316, rate, _whole, note
    )
    for machine, printed, ranges in (
        (X86, "PoocH, Fig. 17", (0.13, 0.38)),
        (POWER9, "PoocH, Fig. 18", (0.02, 0.28)),
    ):
        rows = _rows(lab("resnet50-v1", machine, POOL_BYTES, scale), BATCHES, "pooch")
        note = "; ".join(f"{b}: {_lost_text(row)}" for b, row in zip(BATCHES, rows, strict=True))
        what = f"pooch on {machine}, ResNet-50, 256 to 640: lost"
        yield span(printed, what, ranges, [lost(row) for row in rows], percent, note)
    yield from _against_superneurons(scale)
    yield from _plan_of_the_other_machine(scale)
    for machine in (X86, POWER9):
        rows = _rows(lab("alexnet", machine, POOL_BYTES, scale), ALEXNET_BATCHES, "pooch")
        what = f"pooch on {machine}, AlexNet, 2304 to 2688: lost"
        gone = [lost(row) for row in rows]
        yield span("PoocH, section 5.4", what, (0, 0.061), gone, percent, ALEXNET)
    for machine in (X86, POWER9):
        rows = [_volume(machine, scale, *sizes) for sizes in VOLUMES]
        note = "; ".join(
            f"{h}x{w}, {f} frames: {_lost_text(row)}"
            for (h, w, f), row in zip(VOLUMES, rows, strict=True)
        )
        what = f"pooch on {machine}, ResNeXt-101 3D, one volume: lost"
        yield span("PoocH, section 5.4", what, (0, 0.10), [lost(r) for r in rows], percent, note)
    rows = [lab("googlenet", m, POOL_BYTES, scale).row(384, "pooch") for m in (X86, POWER9)]
    note = "batch 384 alone: the report does not give its batches"
    what = "pooch, GoogLeNet, both machines: lost"
    yield span(
        "PoocH's Japanese report", what, (0.02, 0.39), [lost(r) for r in rows], percent, note
    )


def _against_superneurons(scale: Scale) -> Iterator[Row]:
    x86 = lab("resnet50-v1", X86, POOL_BYTES, scale)
    both = [_speeds(x86, batch, ("pooch", "superneurons")) for batch in BATCHES]
    ratios = [_ratio(each, "pooch", "superneurons") for each in both[:-1]]
    what = "pooch over superneurons, ResNet-50, 256 to 512"
    yield span("PoocH, Fig. 17", what, (1.40, 1.73), ratios, times)
    ours = NONE if both[-1]["superneurons"] is None else "a plan"
    yield fact("PoocH, Fig. 17", "superneurons, ResNet-50, 640, torch's trace", NONE, ours)


def _plan_of_the_other_machine(scale: Scale) -> Iterator[Row]:
    """The plan made for POWER9, used on x86."""
    x86, power9 = (lab("resnet50-v1", machine, POOL_BYTES, scale) for machine in (X86, POWER9))
    slower: list[float | None] = []
    out: list[int] = []
    for batch in BATCHES:
        own = x86.row(batch, "pooch")
        here, there = x86.problem(batch), power9.problem(batch)
        try:
            plan = resolve("pooch").plan(there)
        except InfeasibleError:
            slower.append(None)
            continue
        program = lower(here, plan)
        slower.append(ratio(simulate(here, program).seconds, own.seconds))
        out += [] if fits(here, program) else [batch]
    what = "POWER9's plan on x86, ResNet-50, 256 to 640, beside x86's own"
    shown = ", ".join(NONE if each is None else times(each) for each in slower)
    ours = (
        "slower" if all(each is not None and each > 1 for each in slower) else "not always slower"
    )
    yield fact("PoocH, Fig. 17", what, "slower", ours, f"the time of its step: {shown}")
    ours = "does not fit" if 640 in out else "fits"
    note = "memory is fixed by the plan here; a pool with holes is in Sony's tables below"
    yield fact("PoocH, Fig. 17", "POWER9's plan on x86 at 640", "does not fit", ours, note)


def _volume(machine: str, scale: Scale, height: int, width: int, frames: int) -> Compared:
    found = lab(
        "resnext101-3d",
        machine,
        POOL_BYTES,
        scale,
        size=height,
        width=width,
        frames=frames,
    )
    return found.row(1, "pooch")


def _rows(where: Lab, batches: Sequence[int], policy: str) -> list[Compared]:
    return [where.row(batch, policy) for batch in batches]


def _speeds(where: Lab, batch: int, policies: Sequence[str]) -> dict[str, float | None]:
    return {policy: where.row(batch, policy).items_per_second for policy in policies}


def _ratio(speeds: dict[str, float | None], policy: str, base: str) -> float | None:
    return ratio(speeds[policy], speeds[base])


def _lost_text(row: Compared) -> str:
    gone = lost(row)
    return NONE if gone is None else percent(gone)


def _whole(figure: float) -> str:
    return f"{figure:.0f}"
