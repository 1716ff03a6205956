"""building: build traces by hand, and make small problems for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from outcore.ir.hardware import Hardware, Link, Tier
from outcore.ir.liveness import dead_gaps, gaps
from outcore.ir.plan import KEEP, Choice, Gap, Offload, Plan, Recompute, make_plan
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile, Source
from outcore.ir.trace import (
    Arg,
    Buffer,
    Donation,
    Effect,
    Op,
    Phase,
    Ref,
    Role,
    Symbol,
    Trace,
    Value,
)
from outcore.ir.verify import ITEM_BYTES


@dataclass
class TraceBuilder:
    """Collects buffers, values and ops, and gives them ids."""

    buffers: list[Buffer] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    donations: list[Donation] = field(default_factory=list)

    def new(
        self,
        items: int,
        role: Role,
        *,
        dtype: str = "float32",
        borrowed: bool = False,
        name: str = "",
    ) -> int:
        """Add a buffer of `items` elements; returns the id of the Value that spans it."""
        buffer = Buffer(len(self.buffers), items * ITEM_BYTES[dtype], role, borrowed, name)
        self.buffers.append(buffer)
        return self._value(buffer.id, dtype, (items,), (1,), 0)

    def view(
        self,
        value: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int = 0,
        *,
        conj: bool = False,
        neg: bool = False,
    ) -> int:
        """Add a Value on the buffer of `value`; returns its id."""
        base = self.values[value]
        made = self._value(base.buffer, base.dtype, shape, stride, offset)
        self.values[made] = replace(self.values[made], conj=conj, neg=neg)
        return made

    def op(
        self,
        target: str,
        args: tuple[Arg, ...],
        outputs: tuple[int | None, ...],
        phase: Phase = Phase.FORWARD,
        effects: Sequence[Effect] = (),
        kwargs: tuple[tuple[str, Arg], ...] = (),
    ) -> int:
        """Append an op; returns its id."""
        op = len(self.ops)
        site = f"layers.{op} (net.py:{10 + op})"
        self.ops.append(Op(op, target, args, outputs, phase, kwargs, frozenset(effects), site))
        return op

    def items(self, value: int) -> int:
        """The number of elements in the whole buffer of `value`."""
        base = self.values[value]
        return self.buffers[base.buffer].nbytes // ITEM_BYTES[base.dtype]

    def trace(
        self,
        inputs: Sequence[int],
        outputs: tuple[Arg, ...],
        tangents: Sequence[int] = (),
        gradients: tuple[Arg, ...] = (),
    ) -> Trace:
        """The finished Trace; its boundary is the first op that is not in the forward phase."""
        return Trace(
            tuple(self.buffers),
            tuple(self.values),
            tuple(self.ops),
            sum(op.phase is Phase.FORWARD for op in self.ops),
            tuple(inputs),
            outputs,
            tuple(tangents),
            gradients,
            tuple(self.donations),
        )

    def _value(
        self, buffer: int, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
    ) -> int:
        self.values.append(Value(len(self.values), buffer, dtype, shape, stride, offset))
        return len(self.values) - 1


def small_trace() -> Trace:
    """A convolution, dropout, a skip connection, a linear layer, and their backward ops: 9 ops.

    Four buffers have a gap across the boundary: `conv`, `dropped`, `curved` and `mixed`. `conv` has
    one inside the forward pass, too. The dropout is random, the last op is not repeatable, and op 6
    may write its result over its first argument.
    """
    t, backward = TraceBuilder(), Phase.BACKWARD
    x = t.new(256, Role.INPUT, borrowed=True, name="x")
    w1 = t.new(64, Role.PARAM, borrowed=True, name="conv.weight")
    w2 = t.new(64, Role.PARAM, borrowed=True, name="linear.weight")
    conv, dropped, curved, mixed = (
        t.new(256, Role.ACTIVATION, name=name) for name in ("conv", "dropped", "curved", "mixed")
    )
    out = t.new(64, Role.ACTIVATION, name="out")
    t.op("aten.convolution.default", (Ref(x), Ref(w1), None, (1, 1)), (conv,))
    t.op("aten.dropout.default", (Ref(conv), 0.5), (dropped,), effects=[Effect.RANDOM])
    t.op("aten.tanh.default", (Ref(dropped),), (curved,))
    t.op("aten.add.Tensor", (Ref(curved), Ref(conv)), (mixed,), kwargs=(("alpha", 1),))
    flat = t.view(mixed, (16, 16), (16, 1))
    t.op("aten.mm.default", (Ref(flat), Ref(t.view(w2, (16, 4), (1, 16)))), (out,))
    tangent = t.new(64, Role.GRAD, name="tangent")
    mixed_grad, w2_grad = (t.new(n, Role.GRAD) for n in (256, 64))
    t.op("test.mm_backward", (Ref(tangent), Ref(flat), Ref(w2)), (mixed_grad, w2_grad), backward)
    curved_grad, dropped_grad, w1_grad = (t.new(n, Role.GRAD) for n in (256, 256, 64))
    reads = (Ref(mixed_grad), Ref(curved))
    tanh_backward = t.op("aten.tanh_backward.default", reads, (curved_grad,), backward)
    t.donations.append(Donation(tanh_backward, mixed_grad, curved_grad))
    t.op("test.dropout_backward", (Ref(curved_grad), Ref(dropped)), (dropped_grad,), backward)
    t.op(
        "aten.convolution_backward.default",
        (Ref(dropped_grad), Ref(x), Ref(conv), Ref(w1), (False, True)),
        (None, w1_grad),
        backward,
        effects=[Effect.UNREPEATABLE],
        kwargs=(("dtype", Symbol("dtype", "float32")),),
    )
    return t.trace([x, w1, w2], (Ref(out),), [tangent], (None, Ref(w1_grad), Ref(w2_grad)))


def small_hardware() -> Hardware:
    """Three tiers with round numbers: 1 MB/s to the host, half of that to the disk."""
    fast, slow = Link(1e6, 1e-4), Link(5e5, 1e-3)
    device, host, disk = Tier.DEVICE, Tier.HOST, Tier.DISK
    return Hardware(
        name="small",
        capacity_bytes=((device, 16384), (host, 65536), (disk, 1 << 20)),
        links=(
            (device, host, fast),
            (host, device, fast),
            (device, disk, slow),
            (disk, device, slow),
        ),
        flops_per_second=(("float32", 1e9),),
        memory_bytes_per_second=1e8,
        op_overhead_seconds=1e-5,
        rounding_bytes=((disk, 512),),
    )


def relinked(problem: Problem, change: Callable[[Tier, Tier, Link], Link]) -> Problem:
    """The problem with each link replaced by `change(source tier, target tier, link)`."""
    links = tuple((a, b, change(a, b, link)) for a, b, link in problem.hardware.links)
    return replace(problem, hardware=replace(problem.hardware, links=links))


def small_problem(budget_bytes: int = 8192) -> Problem:
    """`small_trace` on `small_hardware`: one millisecond and 128 B of workspace per op."""
    trace = small_trace()
    n = len(trace.ops)
    profile = Profile((1e-3,) * n, (128,) * n, Source.ESTIMATED)
    return Problem(trace, profile, small_hardware(), budget_bytes)


def dense_problem(layers: int = 4, budget_bytes: int = 1 << 14) -> Problem:
    """Concatenations as in a DenseNet: each layer reads all earlier outputs, and adds 1 KiB.

    Buffers `y0` to `y{layers}` are these outputs, dead after the forward pass. `cat1` to
    `cat{layers}` are concatenated from them and wait for the backward pass. A layer takes ten times
    as long as a concatenation.
    """
    t, backward = TraceBuilder(), Phase.BACKWARD
    x = t.new(256, Role.INPUT, borrowed=True, name="x")
    outputs = [t.new(256, Role.ACTIVATION, name="y0")]
    t.op("aten.convolution.default", (Ref(x),), (outputs[0],))
    cats = []
    for layer in range(1, layers + 1):
        cats.append(t.new(256 * layer, Role.ACTIVATION, name=f"cat{layer}"))
        t.op("aten.cat.default", (tuple(map(Ref, outputs)),), (cats[-1],))
        outputs.append(t.new(256, Role.ACTIVATION, name=f"y{layer}"))
        t.op("aten.convolution.default", (Ref(cats[-1]),), (outputs[-1],))
    tangent = gradient = t.new(256, Role.GRAD, name="tangent")
    for cat in reversed(cats):
        following = t.new(256, Role.GRAD)
        args = (Ref(gradient), Ref(cat))
        t.op("aten.convolution_backward.default", args, (following,), backward)
        gradient = following
    trace = t.trace([x], (Ref(outputs[-1]),), [tangent], (Ref(gradient),))
    seconds = tuple(1e-3 if op.target == "aten.cat.default" else 1e-2 for op in trace.ops)
    profile = Profile(seconds, (0,) * len(seconds), Source.ESTIMATED)
    return Problem(trace, profile, small_hardware(), budget_bytes)


def dense_plan(problem: Problem) -> Plan:
    """A plan for a dense problem that recomputes each `cat` from the outputs that are held.

    `y0` is kept, `y1` is offloaded, `y2` stays once it is recomputed; all others are dropped.
    """
    trace = problem.trace
    cats = (gap for gap in gaps(trace) if trace.buffers[gap.buffer].name.startswith("cat"))
    choices: dict[Gap, Choice] = dict.fromkeys(cats, Recompute())
    held: tuple[Choice, ...] = (KEEP, Offload(Tier.HOST), Recompute(stay=True))
    choices |= dict(zip(dead_gaps(trace), held, strict=False))
    return make_plan(choices, "by hand")
