"""Higher-order calls (ops that write, `cond`, `map`, `scan`), planned as ops: the same bits."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as along
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule

from outcore import Backend
from outcore.capture import as_ops
from outcore.ir.trace import Effect
from tests.cpu.training import PROFILED_STEPS, mean_square, same, tight_budget, train

STEPS = PROFILED_STEPS + 2
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
ROWS, WIDTH = 256, 64


@torch.library.custom_op("test_opaque::sine_into", mutates_args=("out",))
def sine_into(x: Tensor, out: Tensor, shift: float) -> None:
    out.copy_((x + shift).sin())


@sine_into.register_fake
def _(x: Tensor, out: Tensor, shift: float) -> None:
    pass


@torch.library.custom_op("test_opaque::add_into", mutates_args=("out",))
def add_into(x: Tensor, out: Tensor) -> Tensor:
    out += x * 0.1
    made: Tensor = out.mean(0)
    return made


@add_into.register_fake
def _(_: Tensor, out: Tensor) -> Tensor:
    return torch.empty_like(out[0])


class Sine(torch.autograd.Function):
    """A sine whose forward and backward use ops that write into arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        sine_into(x, out, 0.0)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        sine_into(x, out, torch.pi / 2)
        product: Tensor = gradient * out
        means: Tensor = add_into(out, product)
        return product + means


def images() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


class Layers(nn.Module):
    """Linear layers, with `between` after each."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor], count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.between(layer, torch.relu(layer(x)))
        return x


def written(_: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = Sine.apply(x)
    return result


def conditional(layer: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = torch.cond(
        x.sum() > 0, lambda y: torch.sin(layer(y)), lambda y: torch.cos(y) * 2, (x,)
    )
    return result


def with_constants(layer: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = torch.cond(
        x.sum() > 0,
        lambda y: torch.sin(layer(y)) * torch.tensor([0.5, 2.0]).repeat(WIDTH // 2),
        lambda y: y * torch.tensor([3.0, 0.25]).repeat(WIDTH // 2),
        (x,),
    )
    return result


def mapped(layer: nn.Module, x: Tensor) -> Tensor:
    rows = x.view(4, ROWS // 4, WIDTH)
    weight: Any = layer.weight
    result: Tensor = along(lambda row, w: torch.tanh(row @ w), rows, weight)
    return result.reshape(ROWS, WIDTH)


def scanned(_: nn.Module, x: Tensor) -> Tensor:
    rows = x.view(4, ROWS // 4, WIDTH)
    start = x.new_zeros(ROWS // 4, WIDTH)
    _, result = scan(lambda c, row: (c * 0.5 + row, torch.sin(c + row)), start, rows)
    made: Tensor = result
    return made.reshape(ROWS, WIDTH)


Between = Callable[[nn.Module, Tensor], Tensor]


def trained(between: Between, backend: Any, layers: int = 3) -> list[list[Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Layers(between, layers)
    # With backend "eager", torch would run, and keep forever, what it made of autograd functions.
    call = module if backend is None else torch.compile(module, backend=backend)
    return train(module, call, [images()], mean_square, STEPS)


def planned(backend: Backend) -> Any:
    assert backend.engine is not None
    (graph,) = backend.engine.graphs
    assert graph.planned is not None
    return graph.planned


@pytest.mark.parametrize(
    ("between", "name"),
    [(written, "sine_into"), (conditional, "cond"), (mapped, "map_impl"), (scanned, "scan")],
)
def test_a_call_is_planned_like_an_op(between: Between, name: str) -> None:
    layers = 8
    expected = trained(between, None, layers)
    budget = tight_budget(Layers(between, layers), [images()], mean_square, share=0.9)
    backend = Backend(budget=budget, policy="pooch", strict=True)
    assert same(trained(between, backend, layers), expected)
    report = backend.report()
    assert report.state == "planned"
    assert report.counts.offload + report.counts.recompute
    assert report.measured_peak_bytes
    assert report.predicted_peak_bytes
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= report.budget_bytes
    assert (name == "cond") == any("torch.cond" in note for note in report.notes)
    trace = planned(backend).problem.trace
    calls = [op for op in trace.ops if op.target.startswith(f"outcore.{name}_")]
    assert len(calls) >= 6
    assert all(Effect.UNREPEATABLE in op.effects for op in calls)


@pytest.mark.parametrize("between", [conditional, with_constants])
def test_graphs_within_are_told_by_what_they_are(between: Between) -> None:
    seen, expected = [], trained(between, None)
    for _ in range(2):
        backend = Backend(budget="1GiB", strict=True)
        assert same(trained(between, backend), expected)
        seen.append([op.target for op in planned(backend).problem.trace.ops])
    assert seen[0] == seen[1]


def heavy(y: Tensor) -> Tensor:
    """Hold four times the size of the argument at once."""
    return torch.stack([y.sin(), y.cos(), y.tanh(), y.exp()]).sum(0)


def halved(y: Tensor) -> Tensor:
    result: Tensor = torch.cond(y.min() > 0, heavy, lambda z: z / 2, (y,))
    return result


@pytest.mark.parametrize("branch", [heavy, halved], ids=["branch", "condition_within"])
def test_a_branch_that_was_not_taken_is_counted(branch: Callable[[Tensor], Tensor]) -> None:
    def between(layer: nn.Module, x: Tensor) -> Tensor:
        x = torch.relu(layer(x)) + 1.0
        sign: Any = layer.sign
        result: Tensor = torch.cond(x.sum() * sign > 0, branch, lambda y: y * 2, (x,))
        return result

    def workspaces(sign: float) -> list[int]:
        torch._dynamo.reset()
        module = Layers(between)
        for layer in module.layers:
            layer.register_buffer("sign", torch.tensor(sign))
        backend = Backend(budget="1GiB", strict=True)
        train(module, torch.compile(module, backend=backend), [images()], mean_square, STEPS)
        problem = planned(backend).problem
        ops = zip(problem.trace.ops, problem.profile.workspace_bytes, strict=True)
        return [nbytes for op, nbytes in ops if op.target.startswith("outcore.cond_")]

    taken, untaken = workspaces(1.0), workspaces(-1.0)
    assert min(taken) >= 4 * ROWS * WIDTH
    assert taken == untaken


def test_the_same_call_is_the_same_op() -> None:
    backend = Backend(budget="1GiB")
    trained(written, backend)
    targets = [op.target for op in planned(backend).problem.trace.ops]
    assert len({t for t in targets if "sine_into" in t}) == 2, "there and back"
    assert len({t for t in targets if "add_into" in t}) == 1
    assert not any("empty" in t for t in targets), "made where it is written into"
    again = Backend(budget="1GiB")
    trained(written, again)
    assert [op.target for op in planned(again).problem.trace.ops] == targets


@torch.library.custom_op("test_opaque::scale_into", mutates_args=("out",))
def scale_into(x: Tensor, out: Tensor, how: str | None) -> None:
    out.copy_(x * (2 if how is None else 3))


@scale_into.register_fake
def _(x: Tensor, out: Tensor, how: str | None) -> None:
    pass


def test_calls_that_read_alike_are_two_ops() -> None:
    def both(x: Tensor) -> Tensor:
        outs = [torch.empty_like(x) for _ in range(2)]
        scale_into(x, outs[0], None)
        scale_into(x, outs[1], "None")
        return outs[0] + 10 * outs[1] + x.sin()

    x = torch.ones(4, requires_grad=True)
    backend = Backend(budget="1GiB", strict=True)
    assert torch.equal(torch.compile(both, backend=backend)(x), both(x))


def test_a_region_within_runs_in_core() -> None:
    @torch.compiler.nested_compile_region
    def region(x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(x @ weight)

    def between(layer: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = region(x, layer.weight)
        return result

    expected = trained(between, None)
    backend = Backend(budget="1GiB")
    with pytest.warns(UserWarning, match="op invoke_subgraph is not an ATen op"):
        assert same(trained(between, backend), expected)


# ---- one call in a graph ------------------------------------------------------------------------


def called(results: Callable[[Tensor], Any], take: Callable[[Graph, Any], Any]) -> GraphModule:
    """A graph with a `cond` on x: both branches make `results(x)`, of which `take` returns some."""
    graph, mode = Graph(), FakeTensorMode()
    module = GraphModule(nn.Module(), graph)
    with mode:
        x = torch.ones(3)
    branch = Graph()
    branch.output(results_node(branch, results))
    module.branch = GraphModule(nn.Module(), branch)
    given = graph.placeholder("x")
    given.meta["val"] = x
    attribute = graph.get_attr("branch")
    call = graph.call_function(torch.ops.higher_order.cond, (given, attribute, attribute, (given,)))
    with mode:
        call.meta["val"] = results(x)
    graph.output(take(graph, call))
    return module


def results_node(branch: Graph, results: Callable[[Tensor], Any]) -> Any:
    return branch.call_function(results, (branch.placeholder("x"),))


def result_of(graph: Graph, call: Any, *path: Any) -> Any:
    for key in path:
        value = call.meta["val"][key]
        call = graph.call_function(operator.getitem, (call, key))
        call.meta["val"] = value
    return call


def targets(module: GraphModule) -> list[str]:
    return [str(n.target) for n in module.graph.nodes if n.op == "call_function"]


def test_results_by_name_and_inside_others_are_found() -> None:
    module = called(
        lambda x: {"a": x + 1, "b": (x + 2, None, x)},
        lambda graph, call: [
            result_of(graph, call, "a"),
            *(result_of(graph, call, "b", i) for i in range(3)),
        ],
    )
    as_ops(module)
    results: Any = module.graph.output_node().args[0]
    one, two, nothing, given = results
    assert (one.args[1], two.args[1], nothing) == (0, 1, None)
    assert given.op == "placeholder"
    assert one.args[0] is two.args[0]
    assert [tuple(each.shape) for each in one.args[0].meta["val"]] == [(3,), (3,)]
    assert not module.graph.find_nodes(op="get_attr")


@pytest.mark.parametrize(
    "results",
    [lambda x: (x[1:],), lambda x: (x + 1, 2), lambda x: (x,), lambda x: twice(x + 1)],
    ids=["a view of what it is given", "a number", "nothing of its own", "views of one another"],
)
def test_other_calls_stay_as_they_are(results: Callable[[Tensor], Any]) -> None:
    module = called(results, lambda graph, call: [result_of(graph, call, 0)])
    before = targets(module)
    as_ops(module)
    assert targets(module) == before


def test_a_branch_that_launches_kernels_stays_as_it_is() -> None:
    module = called(lambda x: (x + 1,), lambda graph, call: [result_of(graph, call, 0)])
    branch: Any = module.branch
    with branch.graph.inserting_before(branch.graph.output_node()):
        branch.graph.call_function(triton_kernel_wrapper_functional)
    before = targets(module)
    as_ops(module)
    assert targets(module) == before


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:2], x[1:]
