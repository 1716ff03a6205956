"""Weights in host memory: FSDP2 fetches them for each block, outcore plans what blocks keep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import outcore
from tests.cpu.training import mean_square
from tests.gpu.training import PROFILED_STEPS, ROOMY_BYTES

pytestmark = [
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch was built without gloo"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module.*returned a view tensor"),
]

WIDTH, BLOCKS = 256, 6
STEPS = PROFILED_STEPS + 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.drop(self.back(nn.functional.gelu(self.wide(self.norm(x)))))
        return result


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A world of one: nothing is sent, so that it does not matter by what."""
    where = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("cuda:gloo,cpu:gloo", where, rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    distributed.destroy_process_group()


def trained(mesh: DeviceMesh, **options: Any) -> tuple[list[Any], nn.Module]:
    """Losses and the last weights; by outcore if there are options."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Blocks()
    if options:
        outcore.wrap(model, **options)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = mean_square(model(torch.randn(32, 64, WIDTH, device="cuda")))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    assert [weight.device.type for weight in weights] == ["cpu"] * len(list(model.parameters()))
    return [*losses, *(weight.detach().numpy().copy().tobytes() for weight in weights)], model


def test_results_are_those_of_fsdp_and_the_budget_is_kept(mesh: DeviceMesh) -> None:
    expected, model = trained(mesh)
    whole_bytes = sum(p.nbytes for p in model.parameters())
    del model
    kept, model = trained(mesh, budget=ROOMY_BYTES)
    in_core_bytes = outcore.handle(model).report().in_core_peak_bytes
    assert in_core_bytes is not None
    del model
    budget = in_core_bytes // 2
    found, model = trained(mesh, budget=budget, policy="swap-all")
    assert found == kept == expected
    report = outcore.handle(model).report()
    assert report.state == "planned"
    assert report.counts.offload
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= budget
    assert torch.cuda.memory_allocated() < whole_bytes, "weights are on the device between steps"
