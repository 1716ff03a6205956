"""chainer_resnet: build the Trace of ResNet-50 as Chainer 3 runs it, for the PoocH paper's Table 3.

A planner sees what Chainer's functions retain for their backward. A convolution and a batch norm
retain their input, a ReLU its output only, a max-pool input and output, a linear layer its input,
the loss its logits, an addition nothing. The stride of a bottleneck is in its first 1x1
convolution. The Python variable `x` of a block lives until the block returns, so the block's last
ReLU reads it here, too: its copy out is issued there. Backward functions run by rank, a longer path
first. An addition passes the same array on to both sides.

Gradients and momentum of the weights exist before the step, so they are the problem's
`outside_bytes` and no op makes them. Times are computed: a convolution's from its FLOPs, all others
from the bytes moved. One common factor scales them so that a step processes 316 images per second.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace

from outcore.ir.hardware import Hardware, Link, Tier
from outcore.ir.problem import Problem
from outcore.ir.profile import Profile, Source
from outcore.ir.trace import Phase, Ref, Role, Trace
from tests.pure.building import TraceBuilder

ITEM_BYTES = 4
IMAGES_PER_SECOND = 316.0
FLOPS_PER_SECOND = 9.75e12
BYTES_PER_SECOND = 0.76e12
STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
"""Bottleneck blocks and their inner width, per stage."""


@dataclass(frozen=True)
class Map:
    """A variable of the forward pass: its Value, shape per image, rank, and creator."""

    value: int
    channels: int
    side: int
    rank: int
    creator: Function | None

    @property
    def items(self) -> int:
        return self.channels * self.side * self.side


@dataclass(frozen=True, eq=False)
class Function:
    """One call on the tape. `retained`: Values that its backward reads besides the gradient."""

    kind: str
    inputs: tuple[Map, ...]
    retained: tuple[int, ...]
    rank: int
    backward_seconds: float


@dataclass
class ChainerTape:
    """Records forward functions, then runs them backward as `Variable.backward` does."""

    batch: int
    builder: TraceBuilder = field(default_factory=TraceBuilder)
    seconds: list[float] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    parameter_items: int = 0
    flops: int = 0

    # ---- functions ------------------------------------------------------------------------------

    def conv(self, x: Map, channels: int, kernel: int, stride: int = 1) -> Map:
        side = -(-x.side // stride)
        weight = self._parameter(x.channels * channels * kernel * kernel)
        flops = 2 * x.channels * kernel * kernel * channels * side * side * self.batch
        self.flops += flops
        once = flops / FLOPS_PER_SECOND
        both = once * (2 if x.creator else 1)  # the images need no gradient
        return self._call("conv", (x,), (channels, side), once, both, (weight,), retain="x")

    def bn(self, x: Map) -> Map:
        scale = self._parameter(2 * x.channels)
        once = self._passes(x.items)
        return self._call("bn", (x,), _shape(x), 3 * once, 5 * once, (scale,), retain="x")

    def relu(self, x: Map, alive: tuple[Map, ...] = ()) -> Map:
        """Add a ReLU. `alive`: variables that their owner releases only after this call."""
        once = self._passes(x.items)
        more = tuple(m.value for m in alive)
        return self._call("relu", (x,), _shape(x), 2 * once, 3 * once, more, retain="y")

    def add(self, x: Map, y: Map) -> Map:
        return self._call("add", (x, y), _shape(x), 3 * self._passes(x.items), 0.0, retain="")

    def max_pool(self, x: Map, stride: int) -> Map:
        side = x.side // stride
        moved = self._passes(x.items + x.channels * side * side)
        return self._call("max_pool", (x,), (x.channels, side), moved, 2 * moved, retain="xy")

    def average_pool(self, x: Map) -> Map:
        moved = self._passes(x.items + x.channels)
        return self._call("average_pool", (x,), (x.channels, 1), moved, moved, retain="")

    def linear(self, x: Map, channels: int) -> Map:
        weight = self._parameter(x.channels * channels)
        flops = 2 * x.channels * channels * self.batch
        self.flops += flops
        once = flops / FLOPS_PER_SECOND
        return self._call("linear", (x,), (channels, 1), once, 2 * once, (weight,), retain="x")

    # ---- tape -----------------------------------------------------------------------------------

    def _passes(self, items: int) -> float:
        return items * self.batch * ITEM_BYTES / BYTES_PER_SECOND

    def _parameter(self, items: int) -> int:
        self.parameter_items += items
        self.parameters.append(self.builder.new(items, Role.PARAM, borrowed=True, name="weight"))
        return self.parameters[-1]

    def _call(
        self,
        kind: str,
        inputs: tuple[Map, ...],
        shape: tuple[int, int],
        forward_seconds: float,
        backward_seconds: float,
        more: tuple[int, ...] = (),
        *,
        retain: str,
    ) -> Map:
        channels, side = shape
        items = channels * side * side * self.batch
        value = self.builder.new(items, Role.ACTIVATION, name=kind)
        read = (*(m.value for m in inputs), *more)
        self.builder.op(f"chainer.{kind}", tuple(map(Ref, read)), (value,))
        self.seconds.append(forward_seconds)
        retained = {"x": (inputs[0].value,), "y": (value,), "": ()}
        kept = tuple(v for letter in retain for v in retained[letter])
        weights = more if kind in ("conv", "linear", "bn") else ()
        rank = max(m.rank for m in inputs)
        function = Function(kind, inputs, (*kept, *weights), rank, backward_seconds)
        return Map(value, channels, side, rank + 1, function)

    def backward(self, loss_input: Map) -> Trace:
        """Run every function backward by rank; `loss_input`: the logits that the loss retains."""
        t, images = self.builder, self.images
        loss = t.new(1, Role.ACTIVATION, name="loss")
        t.op("chainer.softmax_cross_entropy", (Ref(loss_input.value),), (loss,))
        tangent = t.new(1, Role.GRAD, name="tangent")
        grads = {loss_input.value: self._grad(loss_input)}
        read = (Ref(tangent), Ref(loss_input.value))
        out = (grads[loss_input.value],)
        t.op("chainer.softmax_cross_entropy_backward", read, out, Phase.BACKWARD)
        self.seconds += [self._passes(loss_input.items)] * 2
        self._run_backward(loss_input, grads)
        inputs = [images.value, *self.parameters]
        return t.trace(inputs, (Ref(loss),), [tangent], ())

    def _run_backward(self, start: Map, grads: dict[int, int]) -> None:
        assert start.creator is not None
        heap = [(-start.creator.rank, 0, start.creator, start)]
        seen = {start.creator}
        while heap:
            _, _, function, output = heapq.heappop(heap)
            self._function_backward(function, grads, grads.pop(output.value))
            for x in function.inputs:
                if x.creator is not None and x.creator not in seen:
                    heapq.heappush(heap, (-x.creator.rank, len(seen), x.creator, x))
                    seen.add(x.creator)

    def _function_backward(self, function: Function, grads: dict[int, int], grad: int) -> None:
        if function.kind == "add":
            for x in function.inputs:
                grads[x.value] = grad
            return
        (x,) = function.inputs
        read = tuple(map(Ref, (grad, *function.retained)))
        made = self._grad(x) if x.creator else None
        target = f"chainer.{function.kind}_backward"
        self.builder.op(target, read, (made,), Phase.BACKWARD)
        self.seconds.append(function.backward_seconds)
        if made is not None:
            grads[x.value] = self._accumulate(x, grads.get(x.value), made)

    def _accumulate(self, x: Map, before: int | None, made: int) -> int:
        if before is None:
            return made
        total = self._grad(x)
        read = (Ref(before), Ref(made))
        self.builder.op("chainer.accumulate_grad", read, (total,), Phase.BACKWARD)
        self.seconds.append(self._passes(x.items))
        return total

    def _grad(self, x: Map) -> int:
        return self.builder.new(x.items * self.batch, Role.GRAD, name="grad")

    @property
    def images(self) -> Map:
        """The input batch: the first buffer of the trace."""
        return Map(0, 3, 224, 0, None)


def _shape(x: Map) -> tuple[int, int]:
    return x.channels, x.side


def _bottleneck(tape: ChainerTape, x: Map, width: int, stride: int, *, project: bool) -> Map:
    h = tape.relu(tape.bn(tape.conv(x, width, 1, stride)))
    h = tape.relu(tape.bn(tape.conv(h, width, 3)))
    h = tape.bn(tape.conv(h, 4 * width, 1))
    shortcut = tape.bn(tape.conv(x, 4 * width, 1, stride)) if project else x
    return tape.relu(tape.add(h, shortcut), alive=(x,))


@dataclass(frozen=True)
class ChainerResNet50:
    """The trace, its times, and figures to check. A multiply-add counts as two FLOPs."""

    trace: Trace
    profile: Profile
    parameter_bytes: int
    forward_flops: int


def chainer_resnet50(batch: int) -> ChainerResNet50:
    """One training step of ResNet-50 on `batch` images of 224 x 224."""
    tape = ChainerTape(batch)
    tape.builder.new(3 * 224 * 224 * batch, Role.INPUT, borrowed=True, name="images")
    x = tape.max_pool(tape.relu(tape.bn(tape.conv(tape.images, 64, 7, 2))), 2)
    for stage, (blocks, width) in enumerate(STAGES):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            x = _bottleneck(tape, x, width, stride, project=not block)
    trace = tape.backward(tape.linear(tape.average_pool(x), 1000))
    scale = batch / IMAGES_PER_SECOND / sum(tape.seconds)
    seconds = tuple(s * scale for s in tape.seconds)
    profile = Profile(seconds, (0,) * len(seconds), Source.ESTIMATED)
    return ChainerResNet50(trace, profile, ITEM_BYTES * tape.parameter_items, tape.flops)


def v100(link_bytes_per_second: float) -> Hardware:
    """A device and a host with one full-duplex link."""
    link = Link(link_bytes_per_second)
    return Hardware(
        name="v100",
        capacity_bytes=((Tier.DEVICE, 16 * 10**9), (Tier.HOST, 192 * 10**9)),
        links=((Tier.DEVICE, Tier.HOST, link), (Tier.HOST, Tier.DEVICE, link)),
    )


def table3_problem(batch: int, memory_bytes: int, link_bytes_per_second: float) -> Problem:
    """The step with `memory_bytes` of device memory; weight gradients and momentum are outside."""
    net = chainer_resnet50(batch)
    hardware = v100(link_bytes_per_second)
    problem = Problem(net.trace, net.profile, hardware, memory_bytes)
    return replace(problem, outside_bytes=2 * net.parameter_bytes)
