"""Several outstanding calls of one graph or of several graphs, within one budget."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import outcore
from outcore import Backend, worker
from outcore.errors import InfeasibleError
from outcore.ir.hardware import Tier
from outcore.ir.memory import crossing_bytes, fits
from outcore.ir.plan import make_plan
from outcore.ir.trace import Ref
from outcore.lower import lower
from outcore.policies.recompute_all import RecomputeAll
from outcore.runtime.budget import plans
from outcore.runtime.graphs.calls import Calls, Taken, least_together, together
from outcore.runtime.graphs.history import RECURS_WITHIN, CallsAtOnce
from outcore.runtime.graphs.planned import Planned
from tests.cpu.test_asked_room import peak_bytes
from tests.cpu.test_budget_kept import inside
from tests.cpu.training import Away, away, back, mean_square, same, snapshot
from tests.pure.building import small_problem

BLOCKS = 6
STEPS = 7


class Block(nn.Module):
    """Makes much inside, and hands little to the next block."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        inside: Tensor = torch.tanh(self.wide(x).square())
        result: Tensor = x + self.narrow(inside)
        return result


class Blocks(nn.Module):
    """Blocks that are compiled one by one, to one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def rows(step: int, count: int = 2048) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(step))


def train_blocks(backend: Any, *, alike: bool = False) -> list[list[Tensor]]:
    """Train `Blocks`. `alike`: the input gets a gradient, so the first block has the same graph."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Blocks()
    for block in module.blocks:
        block.compile(backend=backend)
    found = []  # small, because it counts as resident
    for step in range(STEPS):
        module.zero_grad()
        loss = module(rows(step).requires_grad_(alike)).square().mean()
        loss.backward()
        found.append([loss.detach()])
        del loss
    return [*found, snapshot(module, torch.zeros(()))]


TAKEN = st.builds(
    lambda waiting, more: Taken(waiting + more, waiting), st.integers(0, 9), st.integers(0, 9)
)


@given(st.lists(st.lists(TAKEN, min_size=1, max_size=4), min_size=1, max_size=4))
def test_the_least_of_several_graphs_is_that_of_their_best_choices(graphs: Any) -> None:
    assert least_together(graphs) == min(map(together, product(*graphs)))


@pytest.mark.parametrize("others", [False, True], ids=["own", "others"])
def test_an_input_that_only_reruns_read_is_held_by_each_call(*, others: bool) -> None:
    """It was made outside of graphs, and nothing else held it as calls came back."""
    problem = small_problem(1 << 20)
    x, *_ = problem.trace.buffers
    again = lower(problem, RecomputeAll(1).plan(problem))
    calls = Calls(problem, 3, others=others, program=again, gone=frozenset({x.id}))
    as_found = replace(calls, gone=frozenset())
    assert calls.reread_bytes(again) == x.nbytes
    assert calls.least.alone_bytes == as_found.least.alone_bytes + x.nbytes
    assert calls.least.waiting_bytes >= calls.least.alone_bytes
    more = x.nbytes - as_found.least.waiting_bytes * others
    assert calls.least.waiting_bytes == as_found.least.waiting_bytes + more
    if others:  # own calls have it in `others_bytes`
        assert calls.least.by(3) == as_found.least.by(3) + 3 * more


def test_a_result_that_another_call_reads_again_is_counted_once() -> None:
    """What crosses has it already."""
    problem = small_problem(1 << 20)
    trace = problem.trace
    (mixed,) = (value for value in trace.ops[3].outputs if value is not None)
    problem = replace(problem, trace=replace(trace, outputs=(*trace.outputs, Ref(mixed))))
    kept = lower(problem, make_plan({}))
    result = trace.values[mixed].buffer
    calls = Calls(problem, 3, others=True, program=kept, gone=frozenset({result}))
    assert calls.reread_bytes(kept) == trace.buffers[result].nbytes
    as_found = replace(calls, gone=frozenset())
    assert calls.least.peak_bytes == as_found.least.peak_bytes
    assert calls.least.waiting_bytes == crossing_bytes(kept)


@pytest.mark.parametrize("rounding", [1, 512])
def test_calls_that_fit_with_everything_kept_may_keep_everything(rounding: int) -> None:
    """A GPU rounds sizes up: a call's small tensors hold more than their bytes while it waits."""
    problem = small_problem(1 << 30)
    rounded = replace(problem.hardware, rounding_bytes=((Tier.DEVICE, rounding),))
    problem = replace(problem, hardware=rounded)
    kept = lower(problem, make_plan({}))
    assert any(buffer.nbytes % 512 for buffer in problem.trace.buffers)
    first, *_ = Calls(problem, 2).problems()
    assert fits(first, kept)
    tight = replace(first, between_bytes=first.between_bytes + 1)
    assert not fits(tight, kept), "it may hold no more while it waits than the other one"


def apart(
    budget: int | str, policy: str = "search"
) -> tuple[outcore.Session, Callable[[int], None]]:
    """A session with blocks that are wrapped one by one, each a graph; and a call that trains."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, ooc = Blocks(), outcore.session(budget, strict=True, policy=policy)
    for block in module.blocks:
        ooc.wrap(block)

    def steps(count: int) -> None:
        for step in range(count):
            module.zero_grad()
            module(rows(step)).square().mean().backward()

    return ooc, steps


@pytest.mark.parametrize("share", [0.6, 0.8])
def test_blocks_apart_leave_each_other_what_they_need(share: float) -> None:
    """A lean plan must hold little while its call is outstanding, not only at its peak."""
    roomy, steps = apart("1GiB")
    with roomy:
        steps(STEPS)
        peak = roomy.report().measured_peak_bytes
    assert peak is not None
    tight, steps = apart(int(peak * share))
    with tight:
        steps(STEPS)
        inside(tight.backend)
        assert tight.report().state == "planned"


def test_blocks_that_are_compiled_anew_take_the_plans_of_their_places() -> None:
    """The last block's plan uses all that is left, and the first block must not get that plan."""
    ooc, steps = apart("20MiB", "pooch")

    def plans() -> list[Any]:
        assert ooc.backend.engine is not None
        return [graph.planned for graph in ooc.backend.engine.registry.active() if graph.execution]

    with ooc:
        steps(STEPS)
        before = plans()
        assert len({id(plan) for plan in before}) == BLOCKS
        torch._dynamo.reset()
        gc.collect()
        for _ in range(2):
            steps(1)
            assert list(map(id, plans())) == list(map(id, before))
        inside(ooc.backend)


def in_core_peak() -> int:
    backend = Backend(budget="1GiB")
    train_blocks(backend)
    report = backend.report()
    assert report.state == "in-core"
    inside(backend)
    assert report.predicted_peak_bytes is not None
    return report.predicted_peak_bytes


def test_the_report_is_of_a_step_that_is_of_all_calls() -> None:
    backend = Backend(budget="1GiB")
    train_blocks(backend, alike=True)
    report = backend.report()
    (step,) = report.steps
    assert (report.graphs, step.calls) == (1, BLOCKS)
    assert report.predicted_seconds == BLOCKS * step.predicted.seconds


def test_one_call_has_its_peak_and_the_others_what_crosses() -> None:
    """If each call got a sixth of the free memory, none of these budgets would be enough."""
    peak = in_core_peak()
    plain = train_blocks("eager")
    for share in (0.5, 0.65, 0.8):
        backend = Backend(budget=int(peak * share))
        assert same(train_blocks(backend), plain)
        assert backend.report().state == "planned"
        inside(backend)


@pytest.mark.parametrize("lacking_bytes", [0, 1])
def test_the_planning_process_stays_only_while_all_of_the_budget_is_available(
    lacking_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = int(in_core_peak() * 0.65)
    monkeypatch.setattr(plans, "available_bytes", lambda: budget - lacking_bytes)
    backend = Backend(budget=budget)
    train_blocks(backend)
    assert backend.report().state == "planned"
    assert bool(worker._waiting) == (not lacking_bytes)
    worker.dismiss()


def test_the_least_budget_of_several_calls_is_enough() -> None:
    with pytest.raises(
        InfeasibleError, match="up to 6 calls of this graph are outstanding"
    ) as refused:
        train_blocks(Backend(budget="10MiB"), alike=True)
    budget = refused.value.floor_bytes
    del refused  # which holds the tensors of that step
    gc.collect()
    backend = Backend(budget=budget)
    assert same(train_blocks(backend, alike=True), train_blocks("eager", alike=True))
    inside(backend)


class Other(nn.Module):
    """A block of another kind, which keeps more and makes less."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("share", [0.6, 0.8])
def test_graphs_that_take_turns_within_a_step(share: float) -> None:
    def turns(backend: Any) -> list[list[Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = nn.Sequential(*(kind() for _ in range(4) for kind in (Block, Other)))
        for block in module:
            block.compile(backend=backend)
        found = []
        for step in range(STEPS):
            module.zero_grad()
            loss = module(rows(step).requires_grad_()).square().mean()
            loss.backward()
            found.append([loss.detach()])
            del loss
        return [*found, snapshot(module, torch.zeros(()))]

    roomy = Backend(budget="1GiB")
    plain = turns(roomy)
    inside(roomy)
    peak = roomy.report().measured_peak_bytes
    assert peak is not None
    backend = Backend(budget=int(peak * share))
    assert same(turns(backend), plain)
    assert backend.report().state == "planned"
    inside(backend)


class Skipping(nn.Module):
    """Layers of two kinds, of which each step skips some: each step has another mix of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(4) for kind in (Block, Other))

    def forward(self, x: Tensor, kept: Sequence[bool]) -> list[Tensor]:
        found = []
        for layer, keeps in zip(self.layers, kept, strict=True):
            if keeps:
                x = layer(x)
                found.append(x)
        return found


@pytest.mark.parametrize("share", [0.6, 0.9])
def test_layers_that_are_left_out_now_and_then(share: float) -> None:
    """The most calls of each graph, added up, are more than any step has."""

    def skips(backend: Any, steps: int = 12) -> list[list[Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module, random, found = Skipping(), Random(3), []
        for layer in module.layers:
            layer.compile(backend=backend)
        for step in range(steps):
            module.zero_grad()
            kept = [random.random() > 0.3 for _ in module.layers]
            results = module(rows(step).requires_grad_(), kept)
            loss = torch.stack([result.square().mean() for result in results]).sum()
            loss.backward()
            found.append([loss.detach()])
            del loss, results
        return [*found, snapshot(module, torch.zeros(()))]

    roomy = Backend(budget="1GiB")
    plain = skips(roomy)
    inside(roomy)
    peak = roomy.report().measured_peak_bytes
    assert peak is not None
    backend = Backend(budget=int(peak * share))
    assert same(skips(backend), plain)
    assert backend.report().state == "planned"
    inside(backend)


class Handing(nn.Module):
    """A block of two graphs: the second gets what the first returns, and does not keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.back(torch.tanh(self.there(x)))
        torch._dynamo.graph_break()
        result: Tensor = x + y.sigmoid()
        return result


def handing(backend: Any, steps: int = STEPS) -> list[list[Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.Sequential(*(Handing() for _ in range(10)))
    module.compile(backend=backend, dynamic=False)
    found = []
    for step in range(steps):
        module.zero_grad()
        loss = module(rows(step)).square().mean()
        loss.backward()
        found.append([loss.detach()])
        del loss
    return [*found, snapshot(module, torch.zeros(()))]


def test_what_one_call_hands_to_the_next_is_counted_once() -> None:
    """It used to be counted as a result, an input and external memory: twice what is held."""
    roomy = Backend(budget="40MiB")
    plain = handing(roomy)
    inside(roomy)
    report = roomy.report()
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.predicted_peak_bytes <= 1.1 * report.measured_peak_bytes
    backend = Backend(budget=int(0.75 * report.measured_peak_bytes), strict=True)
    assert same(handing(backend), plain)
    report = backend.report()
    assert report.state == "planned"
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.predicted_peak_bytes <= 1.1 * report.measured_peak_bytes
    inside(backend)


@pytest.mark.parametrize(("share", "fits"), [(0.8, False), (1.1, True)])
def test_what_is_made_between_two_calls_of_one_graph_has_room(share: float, *, fits: bool) -> None:
    """In every pause, not only in the one after the last call."""

    def step(blocks: nn.ModuleList) -> None:
        blocks.zero_grad()
        x = blocks[0](rows(0).requires_grad_())
        x = x.repeat(1, 32).sin().view(2048, 32, 64).mean(1)  # 16 MiB, twice
        mean_square(blocks[2](blocks[1](x))).backward()

    def blocks(backend: Any) -> nn.ModuleList:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = nn.ModuleList(Block() for _ in range(3))
        for block in module:
            block.compile(backend=backend, dynamic=False)
        for _ in range(STEPS):
            step(module)
        return module

    roomy = Backend(budget="1GiB")
    blocks(roomy)
    inside(roomy)
    peak = roomy.report().measured_peak_bytes
    assert peak is not None
    backend = Backend(budget=int(share * peak))
    if fits:
        blocks(backend)
        inside(backend)
    else:
        with pytest.raises(InfeasibleError, match="the pause between"):
            blocks(backend)


@pytest.mark.parametrize("since", [0, 2])
def test_what_is_made_between_calls_of_planned_steps_has_room(since: int) -> None:
    """It is seen when the first planned step is metered, and the blocks can hold less."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend = Backend(budget="70MiB", policy="pooch")
    module = Blocks()
    for block in module.blocks:
        block.compile(backend=backend, dynamic=False)

    def step(*, makes: bool) -> None:
        module.zero_grad()
        x = rows(0).requires_grad_()
        for block in module.blocks[:-1]:
            x = block(x)
        if makes:
            x = x.repeat(1, 32).sin().view(2048, 32, 64).mean(1)  # 16 MiB, several times
        mean_square(module.blocks[-1](x)).backward()

    for i in range(STEPS):
        step(makes=i >= since)
        assert backend.engine is not None
        (graph,) = backend.engine.graphs
        assert (graph.planned is not None) == (i >= 2)
    backend.report()  # ends the session of the last step
    assert peak_bytes(lambda: step(makes=True)) <= backend.report().budget_bytes


def test_calls_that_waited_in_a_checked_step_alone_are_counted_once_they_come_back() -> None:
    """External memory was not counted in that step; counted later, it is no process growth."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend = Backend(budget="18MiB", policy="pooch")
    modules = nn.ModuleList((Block(), Other()))
    first, second = (torch.compile(m, backend=backend, dynamic=False) for m in modules)

    def step(*, nested: bool) -> None:
        modules.zero_grad()
        x = rows(0).requires_grad_()
        if nested:
            x = first(x).repeat(1, 8).sin().view(2048, 8, 64).mean(1)  # 4 MiB, which wait too
        else:
            mean_square(first(rows(1).requires_grad_())).backward()
        mean_square(second(x)).backward()

    for i in range(3 * STEPS):
        step(nested=not i or i > STEPS)
    assert backend.engine is not None
    one, two = backend.engine.graphs
    assert two.planned is not None
    mixes = [mix for mix in two.observed.called if ref(one) in mix.others]
    assert mixes
    assert all(mix.excess_bytes is not None for mix in mixes)
    assert not [note for note in backend.report().notes if "planned again because" in note]


class Wide(nn.Module):
    """Makes little, but its weight is as large as everything that the others make."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 16384)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.wide(x).square().mean(1, keepdim=True)
        return result


class Headed(nn.Module):
    """A tower, and a head that joins later."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = nn.Sequential(*(Other() for _ in range(3))), Wide()


@pytest.mark.parametrize("joins", [1, 2, 6])
def test_gradients_of_a_graph_that_joins_later_have_room(joins: int) -> None:
    def train(backend: Any) -> Away:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Headed()
        module.tower.compile(backend=backend, dynamic=False)
        module.head.compile(backend=backend, dynamic=False)
        found = []
        for step in range(14):
            module.zero_grad()
            x = module.tower(rows(step))
            x = module.head(x[:16]) if step >= joins else x
            loss = mean_square(x)
            loss.backward()
            found.append(loss.detach())
            del x, loss
        return away([*found, *snapshot(module, torch.zeros(()))])

    roomy = Backend(budget="1GiB")
    plain = train(roomy)
    inside(roomy)
    peak = roomy.report().measured_peak_bytes
    assert peak is not None
    backend = Backend(budget=peak, strict=True)
    assert same([back(train(backend))], [back(plain)])
    inside(backend)


class Judge(nn.Module):
    """The discriminator of a GAN: it sees real and generated data before its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x).mean()
        return result


def judge(backend: Any, calls: list[int]) -> list[list[Tensor]]:
    """Train one step for each of `calls`, which is the number of calls in that step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Judge()
    call = torch.compile(module, backend=backend)
    found = []
    for step, number in enumerate(calls):
        module.zero_grad()
        losses = [call(rows(step + i, 1024)) for i in range(number)]
        torch.stack(losses).sum().backward()
        found.append(away(snapshot(module, torch.stack(losses).detach())))
        del losses
    return list(map(back, found))


def only_plan(backend: Backend) -> Planned:
    """The plan of the only graph."""
    assert backend.engine is not None
    (status,) = backend.engine.registry.statuses()
    assert status.planned is not None
    return status.planned


def test_calls_that_come_later_are_planned_for() -> None:
    calls = [1] * 7 + [3] * 4
    backend = Backend(budget="6MiB")
    assert same(judge(backend, calls), judge("eager", calls))
    report = backend.report()
    assert report.state == "planned"
    assert report.predicted_peak_bytes is not None
    assert report.predicted_peak_bytes <= report.budget_bytes
    assert not [note for note in report.notes if "outstanding at once" in note]


def test_one_step_with_more_calls_changes_no_plan() -> None:
    """Such as a step that skips its backward: the next one begins while it is still held."""
    backend = Backend(budget="6MiB", strict=True)
    calls = [1] * 7 + [2] + [1] * 3
    assert same(judge(backend, calls), judge("eager", calls))
    planned = only_plan(backend)
    assert planned.calls == 1
    (note,) = [note for note in backend.report().notes if "outstanding at once" in note]
    assert "in some step up to 2 calls" in note
    inside(backend)


def test_steps_with_more_calls_that_recur_are_planned_for() -> None:
    backend = Backend(budget="6MiB", strict=True)
    calls = [1] * 7 + [2] + [1] * 3 + [2] + [1] * 2
    assert same(judge(backend, calls), judge("eager", calls))
    planned = only_plan(backend)
    assert planned.calls == 2
    assert not [note for note in backend.report().notes if "outstanding at once" in note]
    inside(backend)


def test_more_calls_are_expected_once_two_of_the_latest_steps_had_them() -> None:
    calls = CallsAtOnce()
    for number in (2, 3):  # twice in one step
        calls.note(number, 10, planned=True)
    assert (calls.most, calls.expected) == (3, 1)
    calls.note(2, 10 + RECURS_WITHIN, planned=True)  # too late
    assert (calls.most, calls.expected) == (3, 1)
    calls.note(2, 11 + RECURS_WITHIN, planned=True)
    assert (calls.most, calls.expected) == (3, 2)
    calls.note(4, 12 + RECURS_WITHIN, planned=True)
    assert (calls.most, calls.expected) == (4, 4), "their number varies: no recurrence is awaited"


def test_calls_at_once_without_a_plan_are_expected_again() -> None:
    calls = CallsAtOnce()
    for step, number in enumerate([1, 3, 2]):
        calls.note(number, step, planned=False)
    assert (calls.most, calls.expected) == (3, 3)


def test_calls_that_no_plan_has_room_for_are_told_of() -> None:
    calls = [1] * 7 + [12] * 3
    backend = Backend(budget="6MiB")
    assert same(judge(backend, calls), judge("eager", calls))
    (note,) = [note for note in backend.report().notes if "outstanding at once" in note]
    assert "up to 12 calls" in note
    assert "more than 1 within" in note


def test_calls_that_have_no_plan_do_not_stand_in_the_way_of_others() -> None:
    """Steps of one call are planned again as if there had been no more calls."""
    backend = Backend(budget="6MiB", strict=True)
    judge(backend, [1] * 7 + [12] * 2 + [1] * 2)
    assert backend.engine is not None
    (status,) = backend.engine.registry.statuses()
    assert status.planned is not None
    assert (status.at_once.expected, status.planned_for) == (12, 1)
    (graph,) = backend.engine.graphs
    again = backend.engine.plans.beside_more(
        graph, status.planned, status.planned.external.base_bytes + (1 << 20), 0
    )
    assert again.calls == 1
