"""strategies: draw random traces, problems and plans for property tests.

`traces()` draws training steps as capture makes them: a forward pass with skip connections and
views, then a backward pass that walks the forward ops in reverse. Every trace passes
`verify_trace`, every plan `verify_plan`. `small_problem()` and its parts are in `building`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import assume, reject
from hypothesis import strategies as st

from outcore.errors import VerifyError
from outcore.ir.hardware import Hardware, Link, Tier
from outcore.ir.liveness import dead_gaps, gaps, liveness
from outcore.ir.memory import fits
from outcore.ir.plan import DROP, KEEP, Choice, Gap, Offload, Plan, Recompute, make_plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Cost, Profile, Source
from outcore.ir.program import Program
from outcore.ir.trace import Arg, Donation, Effect, Op, Phase, Ref, Role, Symbol, Trace
from outcore.lower import lower
from tests.pure.building import TraceBuilder, small_hardware, small_problem, small_trace

__all__ = [
    "TraceBuilder",
    "hardwares",
    "planned",
    "plans",
    "problems",
    "profiles",
    "small_hardware",
    "small_problem",
    "small_trace",
    "traces",
]

T = TypeVar("T")

_WORD = st.binary(min_size=8, max_size=8)


class Dice:
    """Makes many small choices from few draws, because each draw of hypothesis is slow.

    All-zero draws pick the first option everywhere, so failures shrink toward first options.
    """

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.word, self.left = 0, 1

    def below(self, n: int) -> int:
        """An int from 0 to n - 1."""
        if self.left < n:
            self.word, self.left = int.from_bytes(self.draw(_WORD)), 2**64
        self.word, choice = divmod(self.word, n)
        self.left //= n
        return choice

    def pick(self, options: Sequence[T]) -> T:
        """One of `options`."""
        return options[self.below(len(options))]

    def some(self, options: Sequence[T], low: int, high: int) -> list[T]:
        """Between `low` and `high` of `options`, each at most once."""
        rest = list(dict.fromkeys(options))
        count = min(low + self.below(high - low + 1), len(rest))
        return [rest.pop(self.below(len(rest))) for _ in range(count)]

    def one_in(self, n: int) -> bool:
        """True with a probability of 1 in n."""
        return self.below(n) == n - 1


# ---- traces --------------------------------------------------------------------------------------

_ITEMS = (16, 64, 64, 256, 1024)
_DTYPES = ("float32", "float32", "float64", "int32")
_CONSTANTS: tuple[tuple[Arg, ...], ...] = (
    (),
    (),
    (2,),
    (0.5, None),
    ((1, -1), True),
    (Symbol("dtype", "float32"),),
    ("same",),
)
_EFFECTS: tuple[tuple[Effect, ...], ...] = (
    (),
    (),
    (),
    (),
    (),
    (Effect.RANDOM,),
    (Effect.RANDOM,),
    (Effect.UNREPEATABLE,),
    (Effect.COLLECTIVE,),
)


@st.composite
def traces(draw: st.DrawFn, max_forward_ops: int = 12, *, mutates: bool = False) -> Trace:
    """Valid traces of at most twice `max_forward_ops` ops; one in ten has no backward ops.

    Half of those have a backward call all the same, which returns at most what it is passed.
    With `mutates`, the forward pass may end with an op that writes a borrowed buffer.
    """
    forward_ops = draw(st.integers(1, max_forward_ops))
    dice, t = Dice(draw), TraceBuilder()
    inputs = _add_inputs(dice, t)
    made = _add_forward(dice, t, inputs, forward_ops)
    backward_of = tuple(t.ops)
    if mutates and dice.one_in(2):
        args = (Ref(inputs[-1]), Ref(made[-1]))
        t.op("test.copy_", args, (None,), effects=[Effect.MUTATES])
    outputs = [made[-1], *dice.some(made[:-1], 0, 1)]
    returned: tuple[Arg, ...] = tuple(Ref(v) for v in outputs)
    if dice.one_in(4):
        returned = (*returned, dice.pick([None, 1, Ref(inputs[0])]))
    forward_only = dice.one_in(10)
    if forward_only and dice.one_in(2):
        return t.trace(inputs, returned)
    tangents = [_like(t, v, Role.GRAD, f"tangent{v}") for v in outputs]
    if forward_only:
        return t.trace(inputs, returned, tangents, dice.pick([(None,), (Ref(tangents[0]),)]))
    grads = _add_backward(dice, t, backward_of, tangents)
    gradients: tuple[Arg, ...] = tuple(Ref(v) for v in dice.some(grads, 1, 3))
    return t.trace(inputs, returned, tangents, (*gradients, *dice.pick([(), (None,)])))


def _add_inputs(dice: Dice, t: TraceBuilder) -> list[int]:
    """Add inputs that the caller may or may not hold, and borrowed parameters and state."""
    inputs = [
        t.new(dice.pick(_ITEMS), Role.INPUT, borrowed=dice.one_in(2), name=f"input{i}")
        for i in range(1 + dice.below(2))
    ]
    params = [
        t.new(dice.pick(_ITEMS), Role.PARAM, borrowed=True, name=f"layers.{i}.weight")
        for i in range(1 + dice.below(3))
    ]
    return [*inputs, *params, t.new(16, Role.STATE, borrowed=True, name="running_mean")]


def _add_forward(dice: Dice, t: TraceBuilder, inputs: list[int], count: int) -> list[int]:
    """Add `count` ops, each on 1 to 3 values; returns the Values made, oldest first."""
    made: list[int] = []
    known = list(inputs)
    for _ in range(count):
        reads = _forward_reads(dice, t, known, made)
        fresh = [_output(dice, t, reads[0]) for _ in range(1 + dice.one_in(4))]
        _add_op(dice, t, reads, fresh, Phase.FORWARD)
        made += fresh
        known += fresh
        if dice.one_in(12):  # no result, as with assertions on tensors
            t.op("test.mix0", (Ref(dice.pick(known)),), ())
    return made


def _forward_reads(dice: Dice, t: TraceBuilder, known: list[int], made: list[int]) -> list[int]:
    """The newest value or a view of it, and up to two older ones (parameters, skip connections)."""
    newest = made[-1] if made else known[0]
    first = dice.pick(known) if dice.one_in(4) else newest
    if dice.one_in(4):
        first = _view(dice, t, first)
    return [first, *(dice.pick(known) for _ in range(dice.below(3)))]


def _view(dice: Dice, t: TraceBuilder, value: int) -> int:
    n = t.items(value)
    reshaped = ((n // 4, 4), (4, 1), 0)
    transposed = ((4, n // 4), (1, 4), 0)
    second_half = ((n // 2,), (1,), n // 2)
    expanded = ((3, n), (0, 1), 0)
    shape, stride, offset = dice.pick([reshaped, transposed, second_half, expanded])
    return t.view(value, shape, stride, offset, neg=dice.one_in(4))


def _output(dice: Dice, t: TraceBuilder, source: int) -> int:
    """Add a buffer: often like that of `source`, as pointwise ops make it, or a larger one.

    Larger ones, as concatenations and casts make them, lead to dead gaps.
    """
    if dice.one_in(3) and t.items(source) < max(_ITEMS):
        return t.new(4 * t.items(source), Role.ACTIVATION, dtype=t.values[source].dtype)
    if dice.one_in(2):
        return _like(t, source, Role.ACTIVATION)
    return t.new(dice.pick(_ITEMS), Role.ACTIVATION, dtype=dice.pick(_DTYPES))


def _add_op(dice: Dice, t: TraceBuilder, reads: list[int], made: list[int], phase: Phase) -> None:
    """Add an op from `reads` to `made`; if the layouts match, it may write over an argument."""
    args: tuple[Arg, ...] = tuple(Ref(v) for v in reads)
    if dice.one_in(8):
        args = (args,)  # a list, as for `cat`
    args = (*args, *dice.pick(_CONSTANTS))
    outputs: tuple[int | None, ...] = (None, *made) if dice.one_in(8) else tuple(made)
    kwargs = (("weight", Ref(reads[-1])), ("alpha", 2)) if dice.one_in(8) else ()
    op = t.op(f"test.mix{len(outputs)}", args, outputs, phase, dice.pick(_EFFECTS), kwargs)
    taken = dice.pick(reads)
    if _alike(t, taken, made[0]) and _once(t, taken, reads) and dice.one_in(2):
        t.donations.append(Donation(op, taken, made[0]))


def _alike(t: TraceBuilder, first: int, second: int) -> bool:
    """Whether two Values have the same dtype and layout."""
    a, b = t.values[first], t.values[second]
    return (a.dtype, a.shape, a.stride, a.offset) == (b.dtype, b.shape, b.stride, b.offset)


def _once(t: TraceBuilder, taken: int, reads: list[int]) -> bool:
    """Whether no other Value in `reads` is on the buffer of `taken`."""
    buffer = t.values[taken].buffer
    return all(read == taken or t.values[read].buffer != buffer for read in reads)


def _add_backward(
    dice: Dice, t: TraceBuilder, forward: tuple[Op, ...], tangents: list[int]
) -> list[int]:
    """Walk `forward` in reverse: gradients in, gradients out; returns the Values made."""
    grads: list[int] = []
    known = list(tangents)
    for op in reversed(forward):
        if op.id and dice.one_in(6):
            continue
        near = [*_arguments(op), *(v for v in op.outputs if v is not None)]
        newest = dice.pick(known) if dice.one_in(4) else known[-1]
        fresh = [_like(t, v, Role.GRAD) for v in dice.some(near, 1, 2)]
        _add_op(dice, t, [newest, *dice.some(near, 0, 2)], fresh, Phase.BACKWARD)
        grads += fresh
        known += fresh
    return grads


def _arguments(op: Op) -> list[int]:
    return [a.value for a in op.args if isinstance(a, Ref)]


def _like(t: TraceBuilder, value: int, role: Role, name: str = "") -> int:
    return t.new(t.items(value), role, dtype=t.values[value].dtype, name=name)


# ---- profiles, machines, problems ----------------------------------------------------------------


@st.composite
def profiles(draw: st.DrawFn, trace: Trace) -> Profile:
    """Seconds (up to one third of a second) and workspace for each op; alternatives for a few."""
    dice = Dice(draw)
    costs = [_cost(dice) for _ in trace.ops]
    chosen = sorted(dice.some(range(len(costs)), 0, 3))
    return Profile(
        tuple(cost.seconds for cost in costs),
        tuple(cost.workspace_bytes for cost in costs),
        dice.pick(list(Source)),
        tuple((op, tuple(_cost(dice) for _ in range(1 + dice.below(2)))) for op in chosen),
    )


def _cost(dice: Dice) -> Cost:
    seconds = dice.pick([1e-3, 0.0, dice.below(10**6) / 3e6])
    return Cost(seconds, dice.pick([0, 0, 64, 1000, 4096]))


@st.composite
def hardwares(draw: st.DrawFn, tiers: tuple[Tier, ...] = ()) -> Hardware:
    """Machines with a device and `tiers`; without `tiers`, with a host, a disk, or both."""
    dice = Dice(draw)
    outer = tiers or dice.pick([(Tier.HOST,), (Tier.DISK,), (Tier.HOST, Tier.DISK)])
    routes = [(Tier.DEVICE, tier) for tier in outer] + [(tier, Tier.DEVICE) for tier in outer]
    return Hardware(
        name=dice.pick(["toy", "this machine"]),
        capacity_bytes=tuple((tier, 1 << 24) for tier in (Tier.DEVICE, *outer)),
        links=tuple((start, stop, _link(dice)) for start, stop in routes),
        duplex=dice.one_in(2),
        flops_per_second=(("float32", 1e12),),
        memory_bytes_per_second=1e9,
        op_overhead_seconds=1e-6,
        rounding_bytes=dice.pick([(), ((Tier.DISK, 512),), ((Tier.DEVICE, 64), (Tier.HOST, 16))]),
        fetch_padding_bytes=dice.pick([0, 0, 32]),
    )


def _link(dice: Dice) -> Link:
    return Link(dice.pick([1e6, 1e4, 3.7e7, 1e10]), dice.pick([0.0, 1e-4]))


@st.composite
def problems(draw: st.DrawFn, trace: Trace | None = None) -> Problem:
    """A trace with a profile, a machine and budgets, from far too small to more than enough."""
    drawn = draw(traces()) if trace is None else trace
    whole = sum(b.nbytes for b in drawn.buffers)
    dice = Dice(draw)
    return Problem(
        drawn,
        draw(profiles(drawn)),
        draw(hardwares()),
        budget_bytes=2 * whole - dice.below(2 * whole),
        host_budget_bytes=dice.pick([None, None, 1 << 20]),
        disk_budget_bytes=dice.pick([None, None, 1 << 20]),
        outside_bytes=dice.pick([0, 0, 1000]),
        between_bytes=dice.pick([0, 0, 2000]),
    )


# ---- plans ---------------------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn, problem: Problem) -> Plan:
    """Plans with any variants, and any choice for any gap, dead ones included.

    Only results of repeatable ops are recomputed. In a dead gap, any buffer may be dropped.
    """
    dice, trace = Dice(draw), problem.trace
    live = liveness(trace)
    tiers = [tier for tier, _ in problem.hardware.capacity_bytes if tier is not Tier.DEVICE]
    choices: dict[Gap, Choice] = {}
    for gap in gaps(trace):
        producer = live.producer[gap.buffer]
        repeatable = producer is not None and trace.ops[producer].repeatable
        kind = dice.pick(["keep", "offload", "recompute"] if repeatable else ["keep", "offload"])
        if kind == "offload":
            choices[gap] = _offload(dice, gap, dice.pick(tiers), made_here=producer == gap.after)
        else:
            choices[gap] = KEEP if kind == "keep" else Recompute(stay=dice.one_in(2))
    for gap in dead_gaps(trace):
        choices[gap] = _dead_choice(dice, trace, live.producer[gap.buffer], gap, tiers)
    costs = problem.profile.alternatives
    variants = {op: dice.below(len(others) + 1) for op, others in costs}
    return make_plan(choices, policy=dice.pick(["", "drawn{seed=1}"]), variants=variants)


@st.composite
def planned(draw: st.DrawFn) -> tuple[Problem, Plan, Program]:
    """A problem, a plan that can be lowered and fits, and its program."""
    problem = draw(problems())
    plan = draw(plans(problem))
    try:
        program = lower(problem, plan)
    except VerifyError:
        reject()  # it cannot be lowered
    assume(fits(problem, program))
    return problem, plan, program


def _dead_choice(
    dice: Dice, trace: Trace, producer: int | None, gap: Gap, tiers: Sequence[Tier]
) -> Choice:
    repeatable = producer is not None and trace.ops[producer].repeatable
    options: list[Choice] = [DROP, KEEP, *map(Offload, tiers)]
    chosen = dice.pick([*options, Recompute(stay=True)] if repeatable else options)
    if isinstance(chosen, Offload):
        return _offload(dice, gap, chosen.tier, made_here=producer == gap.after)
    return chosen


def _offload(dice: Dice, gap: Gap, tier: Tier, *, made_here: bool) -> Offload:
    """An offload whose hints are inside the gap, in order of time; each may be None."""
    ops = range(gap.after + 1, gap.before + 1)
    depart, prefetch, arrive = sorted((dice.pick(ops), dice.pick(ops), dice.pick(ops)))
    release = dice.pick(range(depart, gap.before + 1))
    return Offload(
        tier,
        depart=dice.pick([None, depart] if made_here else [None, depart, gap.after]),
        release=dice.pick([None, release]),
        prefetch=dice.pick([None, prefetch]),
        arrive=dice.pick([None, arrive]),
    )
