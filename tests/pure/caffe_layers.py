"""caffe_layers: build Traces of networks in the layers of SuperNeurons' paper.

Each layer is one op forward and one backward. As in the paper, only results of layers have a size
(no weights, no images), and the backward of a layer reads its input, its output and the output's
gradient (section 3.2). Convolutions and linear layers do not need their output, and some layers
write their gradient over the one that they read: which, follows from the peaks of section 4.1.1 and
of Table 1. Joins only pass gradients on. A fork is a result that more than one layer reads; its
backward adds up the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outcore.ir.hardware import Hardware, Link, Tier
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile, Source
from outcore.ir.trace import Donation, Phase, Ref, Role, Trace
from tests.pure.building import TraceBuilder

CONV, FC, JOIN = "aten.convolution.default", "aten.addmm.default", "aten.add.Tensor"
IN_PLACE = {f"caffe.{kind}" for kind in ("relu", "lrn", "bn", "dropout")}
MIB = 2**20


@dataclass(frozen=True)
class Map:
    value: int
    channels: int
    side: int


@dataclass
class Layers:
    """Builds a network's forward pass, then its backward pass, for `batch` images."""

    batch: int
    builder: TraceBuilder = field(default_factory=TraceBuilder)
    calls: list[tuple[str, tuple[Map, ...], Map]] = field(default_factory=list)

    def __post_init__(self) -> None:
        value = self.builder.new(1, Role.INPUT, borrowed=True, name="data")
        self.data = Map(value, 3, 227)

    def call(self, target: str, inputs: tuple[Map, ...], channels: int, side: int) -> Map:
        value = self.builder.new(self._items(channels, side), Role.ACTIVATION, name=target)
        out = Map(value, channels, side)
        self.builder.op(target, tuple(Ref(m.value) for m in inputs), (out.value,))
        self.calls.append((target, inputs, out))
        return out

    def same(self, x: Map, *kinds: str) -> Map:
        """Add layers that keep the shape."""
        for kind in kinds:
            x = self.call(f"caffe.{kind}", (x,), x.channels, x.side)
        return x

    def conv(self, x: Map, channels: int, side: int, *then: str) -> Map:
        return self.same(self.call(CONV, (x,), channels, side), *then)

    def pool(self, x: Map, side: int) -> Map:
        return self.call("caffe.pool", (x,), x.channels, side)

    def fc(self, x: Map, channels: int, *then: str) -> Map:
        return self.same(self.call(FC, (x,), channels, 1), *then)

    def join(self, x: Map, y: Map) -> Map:
        return self.call(JOIN, (x, y), x.channels, x.side)

    def problem(self, budget_bytes: int = 1 << 50) -> Problem:
        """The problem of the finished network; call this only once."""
        trace = self._trace()
        link = Link(8e9)
        tiers = ((Tier.DEVICE, 1 << 50), (Tier.HOST, 1 << 50))
        links = ((Tier.DEVICE, Tier.HOST, link), (Tier.HOST, Tier.DEVICE, link))
        n = len(trace.ops)
        profile = Profile((0.05,) * n, (0,) * n, Source.ESTIMATED)
        return Problem(trace, profile, Hardware("k40c", tiers, links), budget_bytes)

    def _items(self, channels: int, side: int) -> int:
        return self.batch * channels * side * side

    def _trace(self) -> Trace:
        loss = self.calls[-1][2]
        tangent = self.builder.new(1, Role.GRAD, name="tangent")
        grads: dict[int, int] = {loss.value: tangent}
        for target, inputs, out in reversed(self.calls):
            grad = grads.pop(out.value)
            for x in inputs:
                back = grad if target == JOIN else self._back(target, x, out, grad)
                self._hand_on(grads, x, back)
        done = grads.pop(self.data.value)
        return self.builder.trace([self.data.value], (), [tangent], (Ref(done),))

    def _back(self, target: str, x: Map, out: Map, grad: int) -> int:
        items = 1 if x is self.data else self._items(x.channels, x.side)
        made = self.builder.new(items, Role.GRAD)
        name = target.replace("convolution", "convolution_backward")
        out_too = () if target in (CONV, FC) else (Ref(out.value),)
        reads = (Ref(grad), Ref(x.value), *out_too)
        op = self.builder.op(name, reads, (made,), Phase.BACKWARD)
        if target in IN_PLACE:
            self.builder.donations.append(Donation(op, grad, made))
        return made

    def _hand_on(self, grads: dict[int, int], x: Map, grad: int) -> None:
        before = grads.get(x.value)
        if before is not None:
            both = self.builder.new(self._items(x.channels, x.side), Role.GRAD)
            self.builder.op("caffe.fork", (Ref(before), Ref(grad)), (both,), Phase.BACKWARD)
            grad = both
        grads[x.value] = grad


def alexnet(batch: int) -> Layers:
    """The 23 layers of the paper's footnote 3."""
    net = Layers(batch)
    x = net.pool(net.conv(net.data, 96, 55, "relu", "lrn"), 27)
    x = net.pool(net.conv(x, 256, 27, "relu", "lrn"), 13)
    x = net.conv(net.conv(x, 384, 13, "relu"), 384, 13, "relu")
    x = net.pool(net.conv(x, 256, 13, "relu"), 6)
    x = net.fc(net.fc(x, 4096, "relu", "dropout"), 4096, "relu", "dropout")
    net.fc(x, 1000, "softmax")
    return net


def resnet(batch: int, blocks: tuple[int, int, int, int], *, project: tuple[str, ...]) -> Layers:
    """Bottlenecks; `project`: the layers after the convolution of each stage's first shortcut."""
    net = Layers(batch)
    x = net.pool(net.conv(net.data, 64, 112, "bn", "relu"), 56)
    for stage, count in enumerate(blocks):
        width, side = 64 * 2**stage, 56 // 2**stage
        for block in range(count):
            inner = net.conv(net.conv(x, width, side, "bn", "relu"), width, side, "bn", "relu")
            inner = net.conv(inner, 4 * width, side, "bn")
            short = net.conv(x, 4 * width, side, *project) if block == 0 else x
            x = net.same(net.join(short, inner), "relu")
    net.same(net.fc(net.pool(x, 1), 1000), "softmax")
    return net
