"""The state of an optimizer is in host memory between steps."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

from outcore import StepError, offload_optimizer, restore_optimizer
from tests.cpu.test_optimizers import is_same, large_here

WIDTH, LAYERS = 512, 12
MATRIX_BYTES = WIDTH * WIDTH * 4
STATE_BYTES = 2 * LAYERS * MATRIX_BYTES


class Trained:
    """A model on the device, and its optimizer."""

    def __init__(self, **options) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        self.model = torch.nn.Sequential(*layers).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **options)
        self.draws = torch.Generator().manual_seed(1)

    def run(self, steps: int = 3):
        for _ in range(steps):
            self.optimizer.zero_grad()
            x = torch.randn(4, WIDTH, generator=self.draws).cuda()
            self.model(x).square().mean().backward()
            self.optimizer.step()
        torch.cuda.synchronize()
        return [p.detach().cpu() for p in self.model.parameters()]


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_parameters_have_the_same_bits(options) -> None:
    plain, away = Trained(**options), Trained(**options)
    offload_optimizer(away.optimizer, slice_size=2 * MATRIX_BYTES)
    assert is_same(away.run(), plain.run())
    assert not large_here(away.optimizer)
    read = away.optimizer.state[next(iter(away.model.parameters()))]["exp_avg"]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    saved = away.optimizer.state_dict()
    assert torch.cuda.max_memory_allocated() - before <= MATRIX_BYTES + (64 << 10)
    assert read.is_cuda
    del read
    tensors = [values["exp_avg"] for values in saved["state"].values()]
    assert all(tensor.device.type == "cpu" for tensor in tensors)
    for trained in (plain, away):
        trained.optimizer.load_state_dict(copy.deepcopy(saved))
    assert is_same(away.run(), plain.run())
    copied = copy.deepcopy(away.optimizer)
    tensors = [state["exp_avg"] for state in copied.state.values()]
    assert all(tensor.is_cuda for tensor in tensors)
    restore_optimizer(away.optimizer)
    assert len(large_here(away.optimizer)) == 2 * LAYERS
    assert is_same(away.run(), plain.run())


def test_another_stream_is_refused() -> None:
    away = Trained(foreach=True)
    offload_optimizer(away.optimizer)
    away.run()
    before = [p.detach().clone() for p in away.model.parameters()]
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        pytest.raises(StepError, match="on one CUDA stream and used on another"),
    ):
        away.optimizer.step()
    assert is_same([p.detach() for p in away.model.parameters()], before)
    away.run()


def test_device_memory_is_free_between_steps() -> None:
    def held_bytes(*, away: bool) -> tuple[int, int]:
        trained = Trained(fused=True)
        if away:
            offload_optimizer(trained.optimizer, slice_size=2 * MATRIX_BYTES)
        trained.run()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trained.optimizer.step()
        torch.cuda.synchronize()
        return before, torch.cuda.max_memory_allocated() - before

    held_bytes(away=True)  # what libraries allocate once
    (plain, _), (without, more) = held_bytes(away=False), held_bytes(away=True)
    assert plain - without >= STATE_BYTES
    assert more <= 3 * 2 * MATRIX_BYTES + (1 << 20)
