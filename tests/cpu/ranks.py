"""ranks: the checks of test_several_devices.py, run in each process that torchrun starts.

    torchrun --nproc-per-node=2 -m tests.cpu.ranks NAME...

Each NAME is a function below. `ok NAME` is printed once all processes have passed it. A failed
assertion ends its process, and torchrun then ends the others.
"""

# ruff: noqa: T201 - the test reads what is printed

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import outcore
from outcore.ir.program import Run
from outcore.ir.trace import Effect
from outcore.report import Report
from outcore.runtime import state
from outcore.runtime.planning.planner import Planner
from tests.cpu.training import PROFILED_STEPS, Small, batch, mean_square

STEPS = PROFILED_STEPS + 2
OPTIONS: list[dict[str, Any]] = [
    {"budget": "2MiB", "policy": "swap-all"},
    {"budget": "1800KiB", "policy": "recompute-all"},
]
"""The options of each rank: budgets and policies differ."""


LARGER = [options | {"budget": "4MiB"} for options in OPTIONS]


Steps: TypeAlias = list[list[Any]]


def rank() -> int:
    return distributed.get_rank()


def seeded(kind: Callable[[], nn.Module]) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return kind()


def train(module: nn.Module, call: Callable[..., Any], steps: int = STEPS, pause: int = 1) -> Steps:
    """Loss and gradients of each step; each rank has its own seed and data.

    They are NumPy arrays, because tensors would count against the budgets. A step has `pause`
    backward calls; `call` communicates with other ranks only in the last one.
    """
    seen = []
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(pause):
            torch.manual_seed(100 * step + 10 * part + rank())
            data = batch(2 * part + rank())
            if part < pause - 1:
                with call.no_sync():  # type: ignore[attr-defined]  # only DDP's is called
                    mean_square(call(data)).backward()
            else:
                loss = mean_square(call(data))
                loss.backward()
        gradients = [whole(p.grad) for p in module.parameters() if p.grad is not None]
        seen.append([t.detach().numpy().copy() for t in (loss, *gradients)])
        optimizer.step()
    return seen


def same(first: Steps, second: Steps) -> bool:
    """Whether all numbers are bitwise equal."""
    pairs = [pair for steps in zip(first, second, strict=True) for pair in zip(*steps, strict=True)]
    return all(np.array_equal(a, b) for a, b in pairs)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_planned(report: Report) -> None:
    assert report.state == "planned", report
    counts = report.counts
    assert counts.recompute if rank() else counts.offload, report
    peak, predicted = report.measured_peak_bytes, report.predicted_peak_bytes
    assert predicted is not None
    assert predicted <= report.budget_bytes
    if peak is not None:
        assert peak <= report.budget_bytes, report


# ---- DistributedDataParallel --------------------------------------------------------------------


@cache
def plain_ddp(steps: int = STEPS, pause: int = 1) -> Steps:
    module = seeded(Small)
    return train(module, DistributedDataParallel(module), steps, pause)


def wrap_then_ddp() -> None:
    expected = plain_ddp()
    module = seeded(Small)
    outcore.wrap(module, **OPTIONS[rank()])
    seen = train(module, DistributedDataParallel(module))
    check_planned(outcore.handle(module).report())
    assert same(seen, expected)


def ddp_then_wrap() -> None:
    expected = plain_ddp()
    module = seeded(Small)
    parallel = outcore.wrap(DistributedDataParallel(module), **OPTIONS[rank()])
    seen = train(module, parallel)
    check_planned(outcore.handle(parallel).report())
    assert same(seen, expected)


def accumulated() -> None:
    expected = plain_ddp(pause=2)
    module = seeded(Small)
    parallel = DistributedDataParallel(module)
    outcore.wrap(module, **OPTIONS[rank()])  # as callbacks do, once the trainer has made the DDP
    seen = train(module, parallel, pause=2)
    check_planned(outcore.handle(module).report())
    assert same(seen, expected)


def one_replans() -> None:
    """Rank 0 replans once, as its steps' times differ from the prediction; rank 1 never does."""
    steps = 40
    expected = plain_ddp(steps)
    drift = "off" if rank() else "0.001%"
    module = outcore.wrap(seeded(Small), **OPTIONS[rank()], drift=drift)
    seen = train(module, DistributedDataParallel(module), steps)
    assert outcore.handle(module).report().replans == (0 if rank() else 1)
    assert same(seen, expected)


def one_plans_longer() -> None:
    expected = plain_ddp()
    made = Planner.plan

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(1.0 * rank())
        return made(*args, **kwargs)

    Planner.plan = slow  # type: ignore[method-assign]  # restored below
    try:
        module = outcore.wrap(seeded(Small), **OPTIONS[rank()])
        seen = train(module, DistributedDataParallel(module))
    finally:
        Planner.plan = made  # type: ignore[method-assign]  # restored
    assert same(seen, expected)


# ---- FSDP2 --------------------------------------------------------------------------------------


class Block(nn.Module):
    """A module that is sharded by itself; torch would not compile its own classes one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)))
        self.norm, self.drop = nn.GroupNorm(2, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = torch.relu(layer(self.norm(y)))
        dropped: Tensor = self.drop(y) + x
        return dropped


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def sharded(module: Any) -> Any:
    for block in module.blocks:
        fully_shard(block)
    return fully_shard(module)


@cache
def plain_fsdp() -> Steps:
    module = seeded(Blocks)
    seen = train(module, sharded(module))
    module = seeded(Blocks)
    assert same(seen, train(module, DistributedDataParallel(module)))
    return seen


def wrap_then_shard() -> None:
    expected = plain_fsdp()
    module = outcore.wrap(seeded(Blocks), **LARGER[rank()])
    seen = train(module, sharded(module))
    check_planned(outcore.handle(module).report())
    assert same(seen, expected)


def shard_then_wrap() -> None:
    expected = plain_fsdp()
    module = outcore.wrap(sharded(seeded(Blocks)), **LARGER[rank()])
    seen = train(module, module)
    check_planned(outcore.handle(module).report())
    assert same(seen, expected)


# ---- collectives inside a graph -----------------------------------------------------------------


class Talking(nn.Module):
    """Has a sum over all ranks, as synchronized norms do, and a gather that begins early."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8 if i else 3, 8, 3, padding=1) for i in range(10))

    def forward(self, x: Tensor) -> Tensor:
        world = distributed.group.WORLD
        assert world is not None
        for number, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            if number == 2:
                x = torch.sigmoid(x - all_reduce(x.mean((0, 2, 3)), "sum", world)[:, None, None])
            if number == 4:
                gather = torch.ops._c10d_functional.all_gather_into_tensor
                means = x.mean((2, 3))
                begun = gather(means, 2, world.group_name)
                means = torch.relu(means - 0.1)  # may not overwrite a tensor that is being sent
                x = x * (means[:, :, None, None] + wait_tensor(begun).tanh().mean())
        return x


def talking() -> None:
    """Under any plan, each collective runs once, and all ranks run them in the trace's order."""
    module = seeded(Talking)
    expected = train(module, module)
    module = outcore.wrap(seeded(Talking), **OPTIONS[rank()])
    seen = train(module, module)
    backend = outcore.handle(module)
    check_planned(backend.report())
    assert same(seen, expected)
    assert backend.engine is not None
    (graph,) = backend.engine.graphs
    assert graph.planned is not None
    trace, program = graph.planned.problem.trace, graph.planned.program
    talks = {op.id for op in trace.ops if Effect.COLLECTIVE in op.effects}
    runs = [x.action for x in program.body if isinstance(x.action, Run)]
    said = [trace.ops[run.op].target for run in runs if run.op in talks]
    assert len(said) == len(talks) >= 3
    others: list[Any] = [None, None]
    distributed.all_gather_object(others, said)
    assert others[0] == others[1]


# ---- no plan ------------------------------------------------------------------------------------


def in_buckets() -> None:
    """Torch splits the graph at the buckets' ends. No note says that a part runs uncompiled."""
    layers = (nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(12))
    module = outcore.wrap(nn.Sequential(*layers), budget="1GiB", strict=True)
    parallel = DistributedDataParallel(module, bucket_cap_mb=1)
    for _ in range(STEPS):
        parallel(torch.ones(64, 256)).sum().backward()
    report = outcore.handle(module).report()
    assert report.graphs > 1
    assert report.notes == ()


def no_plan() -> None:
    """Rank 1 has no plan and raises an error; the job ends."""
    module = outcore.wrap(seeded(Small), budget="64KiB" if rank() else "2MiB")
    train(module, DistributedDataParallel(module))


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    # A rank waits longer for the other than the test waits for both.
    distributed.init_process_group("gloo", timeout=timedelta(minutes=10))
    # No note about `gc.freeze`, as in conftest.py.
    mock.patch.object(state, "frozen_objects", return_value=0).start()
    for name in names:
        torch._dynamo.reset()
        gc.collect()
        gc.freeze()  # readings do not visit imported modules then, as in conftest.py
        start = time.perf_counter()
        globals()[name]()
        distributed.barrier()
        if not rank():
            print(f"ok {name} {time.perf_counter() - start:.1f} s", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
