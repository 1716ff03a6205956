"""questions: the benchmarks that train: which workloads, which ways to train, under which caps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.gpu.compare import Contender, Goals, compare, no_goals
from benchmarks.gpu.machine import has_compiler
from benchmarks.gpu.peers import SaveOnCpu, StreamOffload
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.training import Training, at_least
from benchmarks.gpu.workloads import Workload
from benchmarks.kit.benchmark import Patience
from benchmarks.kit.modes import AotEager, Checkpoint, Eager, Inductor, Outcore, SameGraph
from benchmarks.kit.rounds import FEWEST_ROUNDS
from benchmarks.kit.rows import Check, Row
from outcore.allocators.card import HEADROOM_DIVISOR
from outcore.policies import POLICIES
from outcore.runtime.settings.options import DEFAULT_POLICY

SMALL_SHARE = 0.75
"""The cap of tiny networks, relative to the in-core peak: their weights are a large part of it."""
WORTH = 0.90
"""Goal for the throughput of the default policy, relative to in-core."""
IDLE = 1 / 1.01
"""Goal for the throughput if everything fits, relative to the same graph run by torch."""
HALF, THIRD, QUARTER = 1 / 2, 1 / 3, 1 / 4
UPDATED = 0.6
"""The cap of a step with AdamW, relative to its in-core peak. torch's update has temporary tensors
as large as the weights, next to weights, gradients and state: more than half of that peak."""
COMPARED = ("search", "pooch", "swap-all", "superneurons", "window")
"""Policies to compare with the default one, as far as they exist."""
LENGTHS = 20
HOOKED_BATCH = 256
"""Hooks that move every saved tensor pin 1.5 times its size, so this batch is moderate."""


def resnet(scale: Scale, patience: Patience) -> Iterator[Row]:
    """ResNet-50, float32 without TF32, at the first batch: outcore's policies and their peers."""
    workload = _resnet(scale, scale.batches[0])

    def contenders(in_core_bytes: int) -> Sequence[Contender]:
        cap = _cap(scale, in_core_bytes)
        policies = [p for p in COMPARED if p in POLICIES and p != DEFAULT_POLICY]
        shares = (0.5,) if scale.small else (0.5, 1.0, 0.75, 0.25)
        return (
            _outcore(DEFAULT_POLICY, cap, scale, _worth),
            *(_outcore(policy, cap, scale) for policy in policies[:1]),
            # Without a cap, a process may not fit next to the reference, which ends then. They come
            # early all the same: time may be short, and they say most.
            _with_room(_outcore(DEFAULT_POLICY, cap, scale)),
            Contender(Checkpoint()),
            *_fused(_outcore(DEFAULT_POLICY, cap, scale)),
            Contender(Inductor(shares[0])),
            *(_outcore(policy, cap, scale) for policy in policies[1:]),
            Contender(AotEager()),
            *(Contender(Inductor(share)) for share in shares[1:]),
            Contender(Eager("eager, capped"), cap),
            _outcore("keep-all", cap, scale),
        )

    yield from compare(workload, Eager(), contenders, scale, patience)


def hooks(scale: Scale, patience: Patience) -> Iterator[Row]:
    """The same at a smaller batch, compared with hooks that move every saved tensor to the host."""
    workload = _resnet(scale, scale.batches[-1] if scale.small else HOOKED_BATCH)

    def contenders(in_core_bytes: int) -> Sequence[Contender]:
        cap = int(in_core_bytes * (SMALL_SHARE if scale.small else HALF))
        peers = (Contender(StreamOffload()), Contender(SaveOnCpu()))
        return (_outcore(DEFAULT_POLICY, cap, scale), *peers) if in_core_bytes else peers

    yield from compare(workload, Eager(), contenders, scale, patience)


def batches(scale: Scale, patience: Patience) -> Iterator[Row]:
    """The same at other batches, under the same cap."""
    for batch in scale.batches[1:]:
        workload = _resnet(scale, batch)
        yield from _capped(workload, (DEFAULT_POLICY, "swap-all"), scale, patience)


def idle(scale: Scale, patience: Patience) -> Iterator[Row]:
    """What outcore costs if everything fits, compared with the same graph run by torch.

    That graph is what `aot_eager` runs, except that cuDNN normalizes batches as in eager
    (docs/decisions/0015).
    """
    often = replace(scale, rounds=2 * scale.rounds, steps=10 * scale.steps)
    text = Workload(network="gpt2", batch=8)
    kept = Contender(Outcore("keep-all", host_budget=scale.host_bytes), goals=_idle)
    traced = Contender(AotEager())
    for workload in (_resnet(scale, 128), _sized(text, scale)):
        yield from compare(workload, SameGraph(), lambda _: (kept, traced), often, patience)


def precision(scale: Scale, patience: Patience) -> Iterator[Row]:
    """ResNet-50 with fast kernels, which leave less time to hide copies in."""
    plain = Workload(network="resnet50", batch=256)
    for workload in (
        replace(plain, tf32=True, channels_last=True),
        replace(plain, bf16=True, channels_last=True),
    ):
        yield from _shared(_sized(workload, scale), (HALF, THIRD, QUARTER), scale, patience)


def decoder(scale: Scale, patience: Patience) -> Iterator[Row]:
    """GPT-2 large at a long context, under bfloat16 autocast."""
    length = (("length", 8192),)
    workload = Workload(network="gpt2-large", sizes=length, options=length, bf16=True, tf32=True)
    yield from _shared(_sized(workload, scale), (HALF, THIRD), scale, patience)


def lengths(scale: Scale, patience: Patience) -> Iterator[Row]:
    """GPT-2 on texts of which hardly any two are as long: with room, and at half of the peak.

    In each turn all lengths come once.
    """
    workload = _sized(Workload(network="gpt2", batch=4, lengths=LENGTHS), scale)
    rounds = min(scale.rounds, FEWEST_ROUNDS)
    each = replace(scale, rounds=rounds, steps=workload.lengths)

    def contenders(in_core_bytes: int) -> Sequence[Contender]:
        roomy = Contender(Outcore(DEFAULT_POLICY, host_budget=scale.host_bytes))
        cap = int(in_core_bytes * (SMALL_SHARE if scale.small else HALF))
        return (roomy, _outcore(DEFAULT_POLICY, cap, scale)) if in_core_bytes else (roomy,)

    yield from compare(workload, SameGraph(), contenders, each, patience)


def optimizer(scale: Scale, patience: Patience) -> Iterator[Row]:
    """GPT-2 large with AdamW, whose state is on the device or in host memory between its steps."""
    workload = Workload(network="gpt2-large", batch=8, adamw=True, bf16=True, tf32=True)

    def contenders(in_core_bytes: int) -> Sequence[Contender]:
        plain = Contender(Eager())
        if not in_core_bytes:
            return (_offloading(plain),)
        cap = int(in_core_bytes * (SMALL_SHARE if scale.small else UPDATED))
        planned = _outcore(DEFAULT_POLICY, cap, scale)
        return (_offloading(plain), _offloading(planned), planned)

    yield from compare(_sized(workload, scale), Eager(), contenders, scale, patience)


def volumes(scale: Scale, patience: Patience) -> Iterator[Row]:
    """Single volumes that need more than the cap."""
    for workload in (
        Workload(network="unet3d", sizes=(("size", 192),)),
        Workload(network="resnext101-3d", sizes=(("frames", 512), ("size", 224))),
    ):
        yield from _capped(_sized(workload, scale), (DEFAULT_POLICY,), scale, patience)


def alexnet(scale: Scale, patience: Patience) -> Iterator[Row]:
    """AlexNet at half of its peak: it saves few bytes relative to its arithmetic."""
    workload = _sized(Workload(network="alexnet", batch=4096), scale)
    yield from _shared(workload, (HALF,), scale, patience)


def _outcore(policy: str, cap_bytes: int, scale: Scale, goals: Goals = no_goals) -> Contender:
    """Outcore with the budget that it would find on a device of the cap's size."""
    budget = cap_bytes - cap_bytes // HEADROOM_DIVISOR
    return Contender(Outcore(policy, budget, host_budget=scale.host_bytes), cap_bytes, goals)


def _offloading(contender: Contender) -> Contender:
    """The same with the optimizer's state in host memory between its steps."""
    return replace(contender, offloads_state=True)


def _with_room(contender: Contender) -> Contender:
    """The same budget without the cap: torch's allocator has room, and nothing is placed."""
    mode = contender.mode
    assert isinstance(mode, Outcore)
    return Contender(replace(mode, label="no cap"))


def _fused(contender: Contender) -> Sequence[Contender]:
    """The same with fused kernels; empty if nothing can compile them."""
    mode = contender.mode
    assert isinstance(mode, Outcore)
    return [Contender(replace(mode, fuse=True), contender.cap_bytes)] if has_compiler() else []


def _capped(
    workload: Workload, policies: Sequence[str], scale: Scale, patience: Patience
) -> Iterator[Training]:
    """Outcore under the scale's cap."""

    def contenders(in_core_bytes: int) -> Sequence[Contender]:
        cap = _cap(scale, in_core_bytes)
        return [_outcore(policy, cap, scale) for policy in policies]

    yield from compare(workload, Eager(), contenders, scale, patience)


def _shared(
    workload: Workload, shares: Sequence[float], scale: Scale, patience: Patience
) -> Iterator[Training]:
    """Outcore's default policy at shares of the in-core peak; fused at the first share."""

    def contenders(in_core_bytes: int) -> Sequence[Contender]:
        if not in_core_bytes:
            return ()
        caps = [int(share * in_core_bytes) for share in ((SMALL_SHARE,) if scale.small else shares)]
        plain = [_outcore(DEFAULT_POLICY, cap, scale) for cap in caps]
        return [*plain, *(_fused(plain[0]) if plain else ())]

    yield from compare(workload, Eager(), contenders, scale, patience)


def _resnet(scale: Scale, batch: int) -> Workload:
    return replace(_sized(Workload(network="resnet50"), scale), batch=batch)


def _sized(workload: Workload, scale: Scale) -> Workload:
    return replace(workload.tiny, batch=scale.batches[0]) if scale.small else workload


def _cap(scale: Scale, in_core_bytes: int) -> int:
    return scale.cap_bytes or int(SMALL_SHARE * in_core_bytes)


def _worth(row: Training) -> tuple[Check, ...]:
    return at_least("of in-core", row.of_in_core_ratio, WORTH)


def _idle(row: Training) -> tuple[Check, ...]:
    return at_least("of the same graph", row.of_in_core_ratio, IDLE)
