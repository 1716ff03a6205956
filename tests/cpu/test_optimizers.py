"""An optimizer whose state is away between steps trains as one whose state is not."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

import outcore
from outcore import offload_optimizer, restore_optimizer
from outcore.errors import (
    BudgetError,
    InfeasibleError,
    OutcoreError,
    SpillError,
    StepError,
    WrapError,
)
from outcore.execute import QueuedDriver
from outcore.execute.arena import Arena, own_arena
from outcore.execute.disk import SpillFile
from outcore.ir.hardware import Tier
from outcore.measure import resident_bytes
from outcore.optimizers import offloading
from outcore.optimizers.checkpoints import Box
from outcore.optimizers.of_model import optimizers_of
from outcore.optimizers.parameter_state import LEAST_BYTES, ParameterState
from outcore.optimizers.places import Outer
from outcore.optimizers.slices import INDEPENDENT
from outcore.optimizers.stepping import Stepping
from outcore.preflight.optimizers import OptimizerState, held_for
from tests.cpu.adversarial import AdversarialDriver
from tests.cpu.ending import ends_in_a_fork
from tests.cpu.queues import LateDevice
from tests.cpu.test_budget_kept import Tower
from tests.cpu.training import inside

WIDTH = 256
"""Each matrix, and so each tensor of its state, has 256 KiB."""
MATRIX_BYTES = WIDTH * WIDTH * 4

Make = Callable[[Any], optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "ASGD": lambda p: optim.ASGD(p, lr=1e-2),
    "Adadelta": lambda p: optim.Adadelta(p, lr=1e-2),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-2),
    "Adam": lambda p: optim.Adam(p, lr=1e-2, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2),
    "AdamW of lists": lambda p: optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW in one kernel": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
    "Adamax": lambda p: optim.Adamax(p, lr=1e-2),
    "Muon": lambda p: optim.Muon([each for each in p if each.ndim == 2], lr=1e-2),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-2),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-2),
    "SGD": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9),
    "SGD without state": lambda p: optim.SGD(p, lr=1e-2),
    "LBFGS": lambda p: optim.LBFGS(p, lr=1e-2, max_iter=2),
}


def adamw(parameters: Any) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=1e-2)


class Other(optim.AdamW):
    """An optimizer of another package."""


def others(parameters: Any) -> optim.Optimizer:
    return Other(parameters, lr=1e-2)


class Training:
    """A model and its optimizer."""

    def __init__(self, make: Make = adamw, *, layers: int = 4, width: int = WIDTH) -> None:
        torch.manual_seed(0)
        self.model = Tower(width, layers)
        self.optimizer: Any = make(self.model.parameters())
        self._draws = torch.Generator().manual_seed(1)
        self._width = width

    def loss(self) -> Tensor:
        self.optimizer.zero_grad()
        x = torch.randn(4, self._width, generator=self._draws)
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        return loss

    def run(self, steps: int = 3, *, closure: bool = False) -> list[Tensor]:
        """Do some steps; the parameters after them."""
        for _ in range(steps):
            if closure:
                self.optimizer.step(self.loss)
            else:
                self.loss()
                self.optimizer.step()
        return [p.detach().clone() for p in self.model.parameters()]


def offloaded(make: Make = adamw, slice_size: int = 1 << 20, **options: Any) -> Training:
    training = Training(make)
    offload_optimizer(training.optimizer, slice_size=slice_size, **options)
    return training


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(is_same(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def large_here(optimizer: optim.Optimizer) -> list[str]:
    """What is on the device of what should be away."""
    states = optimizer.state.values()
    values = [s.here() if isinstance(s, ParameterState) else s for s in states]
    tensors = [(k, v) for each in values for k, v in each.items() if isinstance(v, Tensor)]
    return [k for k, v in tensors if v.untyped_storage().nbytes() >= LEAST_BYTES]


def away_bytes(optimizer: optim.Optimizer) -> int:
    return sum(s.nbytes for s in optimizer.state.values() if isinstance(s, ParameterState))


def test_torchs_optimizers_are_all_known() -> None:
    found = (
        getattr(optim, name) for name in optim.__all__ if isinstance(getattr(optim, name), type)
    )
    classes = {each for each in found if issubclass(each, optim.Optimizer)}
    assert classes - INDEPENDENT == {optim.Optimizer, optim.LBFGS}


@pytest.mark.parametrize("closure", [False, True], ids=["loss", "closure"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_and_state_have_the_same_bits(name: str, *, closure: bool) -> None:
    if name == "LBFGS" and not closure:
        pytest.skip("LBFGS needs a closure")
    plain, away = Training(OPTIMIZERS[name]), offloaded(OPTIMIZERS[name])
    expected, found = plain.run(closure=closure), away.run(closure=closure)
    assert is_same(found, expected)
    assert not large_here(away.optimizer)
    if name not in {"SGD without state", "Adafactor"}:  # whose state is small
        assert away_bytes(away.optimizer) >= 4 * MATRIX_BYTES
    assert is_same(away.optimizer.state_dict(), plain.optimizer.state_dict())
    assert not large_here(away.optimizer)


def test_sparse_adam() -> None:
    def train(*, away: bool) -> Any:
        torch.manual_seed(0)
        table = nn.Embedding(1000, 64, sparse=True)
        optimizer = optim.SparseAdam(list(table.parameters()))
        if away:
            offload_optimizer(optimizer)
        for i in range(3):
            optimizer.zero_grad()
            table(torch.arange(i, 100, 7)).square().sum().backward()
            optimizer.step()
        assert bool(large_here(optimizer)) is not away
        return table.weight.detach(), optimizer.state_dict()

    assert is_same(train(away=True), train(away=False))


@pytest.mark.parametrize("slice_size", [1, 3 * MATRIX_BYTES, 1 << 30])
def test_any_slice(slice_size: int) -> None:
    assert is_same(offloaded(slice_size=slice_size).run(), Training().run())


def test_only_a_few_slices_are_on_the_device_at_a_time() -> None:
    arena = own_arena()
    if not isinstance(arena, Arena):
        pytest.skip("nobody counts without the arena")

    def peak_bytes(make: Callable[[Any], Any]) -> int:
        training = Training(adamw, layers=24)
        make(training.optimizer)
        peak = 0
        for _ in range(3):
            training.loss()
            gc.collect()
            before = arena.figures().live_bytes
            arena.peak_bytes(anew=True)
            training.optimizer.step()
            peak = max(peak, arena.peak_bytes(anew=False) - before)
        return peak

    state_bytes = 2 * 24 * MATRIX_BYTES
    assert peak_bytes(lambda _: None) >= state_bytes
    found = peak_bytes(lambda o: offload_optimizer(o, slice_size=2 * MATRIX_BYTES))
    # Three slices, and the temporary tensors of AdamW.
    assert found <= 3 * 2 * MATRIX_BYTES + 4 * MATRIX_BYTES + (64 << 10)


class TestCopiesAreOrdered:
    """With drivers whose copies are as late as they may be."""

    @pytest.fixture(params=[True, False], ids=["stream", "no stream"])
    def adversarial(
        self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> AdversarialDriver:
        driver = AdversarialDriver(stream_order=request.param)
        monkeypatch.setattr(offloading, "open_driver", lambda *_: driver)
        return driver

    def test_late(self, adversarial: AdversarialDriver) -> None:
        away = offloaded(slice_size=2 * MATRIX_BYTES)
        assert is_same(away.run(5), Training().run(5))
        assert adversarial.lanes

    def test_queues(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        driver = queued(tmp_path, monkeypatch)
        away = offloaded(slice_size=2 * MATRIX_BYTES)
        assert is_same(away.run(5), Training().run(5))
        assert not large_here(away.optimizer)
        assert not driver.disk_bytes_written()
        assert driver.slabs.taken_bytes >= 8 * MATRIX_BYTES
        restore_optimizer(away.optimizer)
        assert is_same(away.run(), Training().run(8))

    def test_little_host_memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        queued(tmp_path, monkeypatch)
        away = offloaded(slice_size=2 * MATRIX_BYTES, host_budget=3 * MATRIX_BYTES)
        with pytest.warns(UserWarning, match="host_budget is used up"):
            found = away.run(5)
        assert is_same(found, Training().run(5))
        assert away_bytes(away.optimizer) == 2 * MATRIX_BYTES

    def test_another_queue(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        device: Any = queued(tmp_path, monkeypatch).device
        away = offloaded(slice_size=1)
        away.run()
        away.loss()
        before = [p.detach().clone() for p in away.model.parameters()]
        device.switch("other")
        with pytest.raises(StepError, match="on one CUDA stream and used on another"):
            away.optimizer.step()
        saved = Training()
        saved.run(1)
        for use in (
            away.optimizer.state_dict,
            partial(away.optimizer.load_state_dict, saved.optimizer.state_dict()),
            partial(offload_optimizer, away.optimizer),
            partial(restore_optimizer, away.optimizer),
        ):
            with pytest.raises(StepError, match="on one CUDA stream and used on another"):
                use()
        device.compute = "compute"
        assert is_same([p.detach() for p in away.model.parameters()], before)
        away.optimizer.step()
        assert is_same(away.run(1), Training().run(5))


def queued(folder: Path, monkeypatch: pytest.MonkeyPatch) -> QueuedDriver:
    """A driver with queues, for optimizers that are offloaded from now on."""
    driver = QueuedDriver(LateDevice(), folder)
    monkeypatch.setattr(offloading, "open_driver", lambda *_: driver)
    monkeypatch.setattr(offloading, "Outer", lambda driver, _: Outer(driver, Tier.HOST))
    return driver


class TestReading:
    """What is read between steps."""

    def test_comes_back_and_stays_until_the_next_step(self) -> None:
        plain, away = Training(), offloaded()
        for training in (plain, away):
            training.run()
            state = training.optimizer.state[training.model.layers[0].weight]
            assert state["exp_avg"].shape == (WIDTH, WIDTH)
            state["exp_avg"].zero_()
            state["exp_avg_sq"] = torch.ones(WIDTH, WIDTH)
        assert len(large_here(away.optimizer)) == 2
        del state
        assert is_same(away.run(), plain.run())
        assert not large_here(away.optimizer)

    def test_another_call_moves_away_what_came_back(self) -> None:
        away = offloaded()
        away.run()
        for state in away.optimizer.state.values():
            dict(state)
        assert len(large_here(away.optimizer)) == 8
        assert offload_optimizer(away.optimizer) is away.optimizer
        assert not large_here(away.optimizer)

    def test_in_inference_mode(self) -> None:
        plain, away = Training(), offloaded()
        for training in (plain, away):
            training.run()
            with torch.inference_mode():
                for state in training.optimizer.state.values():
                    assert state["exp_avg"].norm() >= 0
                training.optimizer.state_dict()
        assert is_same(away.run(), plain.run())
        with torch.inference_mode():
            restore_optimizer(away.optimizer)
        assert is_same(away.run(), plain.run())

    def test_by_another_thread(self) -> None:
        plain, away = Training(), offloaded(slice_size=1)
        away.run(1)
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                for state in list(away.optimizer.state.values()):
                    for key in list(state):
                        state[key]

        reader = threading.Thread(target=read)
        reader.start()
        found = away.run(20)
        stop.set()
        reader.join()
        assert is_same(found, plain.run(21))

    def test_another_thread_steps_once_the_state_is_saved(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain, away = Training(), offloaded()
        plain.run(1)
        away.run(1)
        stepper, copied = threading.Thread(target=away.run), ParameterState.copy

        def late(state: ParameterState, **options: bool) -> dict[str, Any]:
            if stepper.ident is None:
                stepper.start()
                stepper.join(0.3)
            return copied(state, **options)

        monkeypatch.setattr(ParameterState, "copy", late)
        saved = away.optimizer.state_dict()
        stepper.join()
        assert is_same(saved, plain.optimizer.state_dict())

    def test_in_a_forked_process(self) -> None:
        away = offloaded()
        away.run(1)

        def told() -> None:
            for use in (away.optimizer.state_dict, partial(restore_optimizer, away.optimizer)):
                with pytest.raises(StepError, match=r"read or save its state, in the parent"):
                    use()

        assert ends_in_a_fork(told)

    def test_a_storage_that_is_held_elsewhere_stays(self) -> None:
        away = offloaded()
        away.run(1)
        state = away.optimizer.state[away.model.layers[1].weight]
        held = state["exp_avg"].untyped_storage()
        away.run()
        assert large_here(away.optimizer) == ["exp_avg"]
        del held

    def test_what_is_held_elsewhere_stays(self) -> None:
        plain, away = Training(), offloaded()
        held = []
        for training in (plain, away):
            training.run(1)
            state = training.optimizer.state[training.model.layers[1].weight]
            held.append((state["exp_avg"], state["exp_avg_sq"][0]))
        assert is_same(away.run(), plain.run())
        assert is_same(held[1], held[0])  # they followed the steps
        assert sorted(large_here(away.optimizer)) == ["exp_avg", "exp_avg_sq"]
        del held
        assert is_same(away.run(1), plain.run(1))
        assert not large_here(away.optimizer)

    def test_states_are_mappings(self) -> None:
        away = offloaded()
        away.run()
        state = away.optimizer.state[away.model.layers[0].weight]
        assert isinstance(state, ParameterState)
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert len(state) == 3
        assert "exp_avg" in state
        assert "max_exp_avg_sq" not in state
        assert "away" in repr(state)
        assert len(large_here(away.optimizer)) == 0
        copies: list[object] = [copy.copy(state), copy.deepcopy(state)]
        assert all(type(each) is dict for each in copies)
        assert is_same(pickle.loads(pickle.dumps(state)), dict(state))
        assert {**state}.keys() == state.keys()
        assert state.pop("exp_avg").shape == (WIDTH, WIDTH)
        assert "exp_avg" not in state

    def test_copies_are_plain(self) -> None:
        away = offloaded()
        away.run()
        for copied in (
            copy.deepcopy(away.optimizer),
            pickle.loads(pickle.dumps(away.optimizer)),
        ):
            assert type(copied) is optim.AdamW
            assert "step" not in vars(copied)
            assert all(type(state) is dict for state in copied.state.values())
            assert is_same(copied.state_dict(), away.optimizer.state_dict())


class TestCheckpoints:
    """`state_dict` and `load_state_dict`."""

    @pytest.mark.parametrize("into", [offloaded, Training])
    @pytest.mark.parametrize("of", [offloaded, Training])
    def test_go_from_one_to_the_other(
        self, of: Callable[[], Training], into: Callable[[], Training]
    ) -> None:
        expected = Training().run(6)
        first, second = of(), into()
        first.run(3)
        file = io.BytesIO()
        torch.save(first.optimizer.state_dict(), file)
        file.seek(0)
        second.run(3)
        second.optimizer.load_state_dict(torch.load(file))
        assert is_same(second.optimizer.state_dict(), first.optimizer.state_dict())
        assert bool(large_here(second.optimizer)) is (into is Training)
        assert is_same(second.run(3), expected)

    def test_are_cast_as_torch_does(self) -> None:
        single, plain, away = Training(), Training(), offloaded()
        single.run()
        for training in (plain, away):
            training.model.bfloat16()
            training.optimizer.load_state_dict(single.optimizer.state_dict())
        assert is_same(away.optimizer.state_dict(), plain.optimizer.state_dict())
        assert not large_here(away.optimizer)

    def test_are_loaded_in_slices(self) -> None:
        arena = own_arena()
        if not isinstance(arena, Arena):
            pytest.skip("nobody counts without the arena")
        state = Training(layers=24)
        state.run(1)
        saved = state.optimizer.state_dict()
        for values in saved["state"].values():
            for key in ("exp_avg", "exp_avg_sq"):
                values[key] = values[key].double()  # a copy is needed
        away = Training(layers=24)
        offload_optimizer(away.optimizer, slice_size=2 * MATRIX_BYTES)
        before = arena.figures().live_bytes
        arena.peak_bytes(anew=True)
        away.optimizer.load_state_dict(saved)
        assert arena.peak_bytes(anew=False) - before <= 4 * MATRIX_BYTES + (64 << 10)
        assert not large_here(away.optimizer)
        assert is_same(away.optimizer.state_dict(), state.optimizer.state_dict())

    def test_shared_memory_stays_shared(self) -> None:
        found = []
        for training in (Training(), offloaded()):
            training.run(1)
            saved = copy.deepcopy(training.optimizer.state_dict())
            first = saved["state"][0]
            first["shared"] = first["exp_avg"].view(-1)
            training.optimizer.load_state_dict(saved)
            state = training.optimizer.state[training.model.layers[0].weight]
            state["shared"].zero_()
            assert not state["exp_avg"].any()
            found.append(training.run())
        assert is_same(*found)

    def test_of_parts_of_one_tensor(self) -> None:
        away = offloaded()
        away.run(1)
        saved = copy.deepcopy(away.optimizer.state_dict())
        flat = torch.cat([values["exp_avg"].view(-1) for values in saved["state"].values()])
        parts = flat.split([values["exp_avg"].numel() for values in saved["state"].values()])
        for values, part in zip(saved["state"].values(), parts, strict=True):
            values["exp_avg"] = part.view(values["exp_avg"].shape)
        away.optimizer.load_state_dict(saved)
        assert away_bytes(away.optimizer) <= 8 * MATRIX_BYTES
        assert is_same(away.run(), Training().run(4))

    def test_state_that_is_of_no_parameter(self) -> None:
        away = offloaded()
        away.run(1)
        saved = away.optimizer.state_dict()
        for key in ("shared", 99):
            saved["state"][key] = {"big": torch.ones(WIDTH, WIDTH)}
        with torch.inference_mode():
            away.optimizer.load_state_dict(saved)
        for key in ("shared", 99):
            assert torch.equal(away.optimizer.state[key]["big"], torch.ones(WIDTH, WIDTH))
        assert is_same(away.run(), Training().run(4))

    def test_loading_that_fails_leaves_tensors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        away = offloaded()
        away.run(1)
        saved = away.optimizer.state_dict()

        def fail(*_: Any) -> Tensor:
            raise torch.OutOfMemoryError

        with monkeypatch.context() as patch:
            patch.setattr(Stepping, "move_away", fail)
            with pytest.raises(torch.OutOfMemoryError):
                away.optimizer.load_state_dict(saved)
        kept = copy.deepcopy(saved)
        assert is_same(away.run(), Training().run(4))
        assert is_same(saved, kept), "what was loaded is not trained"
        with monkeypatch.context() as patch:
            patch.setattr(Box, "opened", fail)
            with pytest.raises(torch.OutOfMemoryError):
                away.optimizer.load_state_dict(saved)
        away.run()

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_are_of_the_moment_at_which_they_were_made(self, name: str) -> None:
        away = offloaded(OPTIMIZERS[name])
        away.run(2, closure=True)
        read = [list(state.values()) for state in list(away.optimizer.state.values())[:2]]
        saved = away.optimizer.state_dict()
        kept = copy.deepcopy(saved)
        del read
        away.run(2, closure=True)
        assert is_same(saved, kept)

    @pytest.mark.parametrize("make", [*OPTIMIZERS.values(), others], ids=[*OPTIMIZERS, "others"])
    def test_can_be_loaded_again(self, make: Make) -> None:
        away = offloaded(make)
        away.run(2, closure=True)
        saved = copy.deepcopy(away.optimizer.state_dict())
        kept = copy.deepcopy(saved)
        for _ in range(2):
            away.optimizer.load_state_dict(saved)
            assert make is OPTIMIZERS["LBFGS"] or not large_here(away.optimizer)
            away.run(2, closure=True)
            assert is_same(saved, kept)

    def test_a_rate_that_is_a_tensor_is_copied(self) -> None:
        away = offloaded(lambda p: optim.SGD(p, lr=torch.tensor(0.5), momentum=0.9))
        away.run(1)
        saved = away.optimizer.state_dict()
        StepLR(away.optimizer, 1, 0.5)
        away.run(1)
        away.optimizer.param_groups[0]["lr"].fill_(0.125)
        assert saved["param_groups"][0]["lr"] == 0.5

    def test_copies_share_memory_as_the_state_does(self) -> None:
        away = offloaded()
        away.run(1)
        state = away.optimizer.state[away.model.layers[0].weight]
        state["row"] = state["exp_avg"][1]
        saved = away.optimizer.state_dict()["state"][0]
        saved["exp_avg"].zero_()
        assert not saved["row"].any()
        assert state["row"].any()

    def test_of_state_of_any_kind(self) -> None:
        """Sparse, of a subclass, in containers, and of no parameter."""
        away = offloaded()
        away.run(1)
        two = TwoTensor(torch.ones(2), torch.ones(2))
        more = {"sparse": torch.eye(2).to_sparse(), "two": two, "list": [torch.ones(2), ("text",)]}
        away.optimizer.state[away.model.layers[0].weight].update(more)
        away.optimizer.state["of none"] = {"big": torch.ones(WIDTH, WIDTH), "small": torch.ones(2)}
        saved = away.optimizer.state_dict()
        for state in (saved["state"][0], saved["state"]["of none"]):
            for tensor in (v for v in tree_leaves(state) if isinstance(v, Tensor)):
                tensor.mul_(0)
        for state in away.optimizer.state.values():
            tensors = (v for v in tree_leaves(dict(state)) if isinstance(v, Tensor))
            assert all(bool((tensor.to_dense() != 0).any()) for tensor in tensors)

    def test_that_do_not_fit_change_nothing(self) -> None:
        away, other = offloaded(), Training(layers=2)
        away.run()
        with pytest.raises(ValueError, match="doesn't match the size"):
            away.optimizer.load_state_dict(other.optimizer.state_dict())
        assert is_same(away.run(), Training().run(6))


class TestSchedulersAndHooks:
    """What else torch puts around a step."""

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("before", [False, True])
    def test_schedulers(self, *, before: bool) -> None:
        plain, away = Training(), Training()
        schedulers = [StepLR(plain.optimizer, 2)]
        if before:
            schedulers.append(StepLR(away.optimizer, 2))
        offload_optimizer(away.optimizer)
        if not before:
            schedulers.append(StepLR(away.optimizer, 2))
        for _ in range(5):
            expected, found = plain.run(1), away.run(1)
            assert is_same(found, expected)
            for scheduler in schedulers:
                scheduler.step()
        assert away.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]
        restore_optimizer(away.optimizer)
        assert is_same(away.run(), plain.run())

    def test_hooks_run_once_a_step(self) -> None:
        away = offloaded(slice_size=1)
        seen = []
        away.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        away.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        away.run(2)
        assert seen == ["before", "after"] * 2

    def test_another_step_of_its_own_is_refused(self) -> None:
        optimizer = Training().optimizer
        optimizer.step = lambda *_: None
        with pytest.raises(WrapError, match="its step was replaced"):
            offload_optimizer(optimizer)

    def test_a_step_that_is_replaced_later(self) -> None:
        plain, away = Training(), offloaded()
        away.optimizer.step = partial(type(away.optimizer).step, away.optimizer)
        with pytest.warns(UserWarning, match="the step of AdamW was replaced by one from before"):
            found = away.run()
        assert is_same(found, plain.run())
        assert not large_here(away.optimizer)

    def test_a_step_that_raised_before_it_was_replaced(self) -> None:
        away = offloaded()
        away.run(1)
        next(iter(away.model.parameters())).grad = torch.ones(WIDTH, WIDTH).to_sparse()
        with pytest.raises(RuntimeError, match="sparse gradients"):
            away.optimizer.step()
        away.optimizer.step = partial(type(away.optimizer).step, away.optimizer)
        with pytest.warns(UserWarning, match="the step of AdamW was replaced by one from before"):
            away.run(1)
        assert not large_here(away.optimizer)

    def test_scalers_find_what_a_step_takes(self) -> None:
        class Scaled(optim.SGD):
            """As fused optimizers of other packages, it unscales the gradients itself."""

            _step_supports_amp_scaling = True

            def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
                assert grad_scaler is not None
                return super().step(closure)

        away = offloaded(lambda p: Scaled(p, lr=0.1))
        away.loss()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(1))
        with pytest.warns(FutureWarning, match="passing itself"):
            scaler.step(away.optimizer)
        assert signature(away.optimizer.step) == signature(partial(Scaled.step, away.optimizer))
        assert away.optimizer.step.__name__ == "step"

    def test_its_own_step_as_an_attribute(self) -> None:
        training = Training()
        training.optimizer.step = training.optimizer.step
        offload_optimizer(training.optimizer, slice_size=1)
        assert is_same(training.run(), Training().run())
        assert not large_here(training.optimizer)

    def test_a_scheduler_of_an_earlier_time(self) -> None:
        away = offloaded()
        StepLR(away.optimizer, 100)
        away.run(1)
        restore_optimizer(away.optimizer)
        offload_optimizer(away.optimizer, slice_size=1)
        assert is_same(away.run(), Training().run(4))
        assert not large_here(away.optimizer)

    def test_code_around_the_step_of_a_class(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls, hooked = [], optim.AdamW.step

        @wraps(hooked)
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return hooked(*args, **kwargs)

        monkeypatch.setattr(optim.AdamW, "step", counted)
        away = offloaded(slice_size=1)
        seen: list[int] = []
        away.optimizer.register_step_post_hook(lambda o, *_: seen.append(len(o.param_groups[0])))
        assert is_same(away.run(), Training().run())
        assert len(calls) == 6
        assert len(seen) == 3
        assert not large_here(away.optimizer)

    def test_an_optimizer_around_another(self) -> None:
        outer = Training().optimizer
        outer.optimizer = Training().optimizer
        with pytest.raises(WrapError, match="pass that one, its attribute `optimizer`"):
            offload_optimizer(outer)

    def test_the_optimizer_is_gone(self) -> None:
        away = offloaded()
        step = away.optimizer.step
        del away
        with pytest.raises(StepError, match="the optimizer of this step is gone"):
            step()

    def test_the_loss_is_returned(self) -> None:
        plain, away = Training(), offloaded()
        assert torch.equal(plain.optimizer.step(plain.loss), away.optimizer.step(away.loss))


class TestGroups:
    """Parameters that come, go and have no gradients."""

    def test_settings_differ_between_groups(self) -> None:
        def make(parameters: Any) -> optim.Optimizer:
            given = list(parameters)
            groups = [{"params": given[:3], "lr": 0.1}, {"params": given[3:], "weight_decay": 0.5}]
            return optim.AdamW(groups, lr=1e-3)

        away = offloaded(make, slice_size=1)
        groups = away.optimizer.param_groups
        assert is_same(away.run(), Training(make).run())
        assert away.optimizer.param_groups is groups
        assert [len(group["params"]) for group in groups] == [3, 5]

    @pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
    def test_a_parameter_is_there_twice(self) -> None:
        def make(parameters: Any) -> optim.Optimizer:
            given = list(parameters)
            return optim.AdamW([given[0], *given], lr=1e-2, foreach=False)

        away = offloaded(make, slice_size=1)
        assert is_same(away.run(), Training(make).run())
        assert not large_here(away.optimizer)

    def test_parameters_on_another_device(self) -> None:
        away = offloaded()
        elsewhere = nn.Parameter(torch.ones(3, device="meta"))
        away.optimizer.add_param_group({"params": [elsewhere]})
        with pytest.warns(UserWarning, match="offloaded for the device cpu, and parameters are on"):
            away.run(1)

    def test_gradients_are_missing_in_some_steps(self) -> None:
        found = []
        for training in (Training(), offloaded(slice_size=1)):
            for step in range(4):
                training.loss()
                training.model.layers[step].weight.grad = None
                training.optimizer.step()
            training.optimizer.zero_grad()
            training.optimizer.step()  # nothing to do
            found.append(training.run())
        assert is_same(*found)

    def test_what_was_read_without_gradients_leaves_too(self) -> None:
        away = offloaded()
        away.run(1)
        for state in away.optimizer.state.values():
            dict(state)
        away.loss()
        away.model.layers[0].weight.grad = None
        away.optimizer.step()
        assert not large_here(away.optimizer)

    def test_others_see_all_groups_in_the_middle_of_a_step(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        away, seen = offloaded(slice_size=1), []
        hooked: Any = optim.AdamW.step
        plain = hooked.__wrapped__

        def look(optimizer: optim.Optimizer) -> Any:
            saved = away.optimizer.state_dict()
            seen.append(len(saved["param_groups"][0]["params"]))
            return plain(optimizer)

        monkeypatch.setattr(hooked, "__wrapped__", look)
        found = away.run()
        monkeypatch.undo()
        assert is_same(found, Training().run())
        assert set(seen) == {8}

    def test_a_group_is_added(self) -> None:
        found = []
        for away in (False, True):
            training = Training(lambda p: optim.AdamW(list(p)[:4], lr=1e-2))
            if away:
                offload_optimizer(training.optimizer)
            training.run()
            training.optimizer.add_param_group({"params": list(training.model.parameters())[4:]})
            found.append(training.run())
        assert is_same(*found)
        assert not large_here(training.optimizer)


class TestFailures:
    """What goes wrong in the middle."""

    def test_no_room(self) -> None:
        away = offloaded(disk_budget=5 * MATRIX_BYTES, slice_size=MATRIX_BYTES)
        with pytest.warns(UserWarning, match="some of the state of AdamW stays on the device"):
            found = away.run()
        assert is_same(found, Training().run())
        assert large_here(away.optimizer)
        assert 0 < away_bytes(away.optimizer) <= 5 * MATRIX_BYTES

    @pytest.mark.filterwarnings("ignore:outcore. some of the state")
    def test_no_disk(self) -> None:
        away = offloaded(disk_budget=0)
        assert is_same(away.run(), Training().run())
        assert not away_bytes(away.optimizer)

    @pytest.mark.filterwarnings("error")
    def test_warnings_that_are_errors_come_after_the_update(self) -> None:
        away = offloaded(disk_budget=2 * MATRIX_BYTES, slice_size=1)
        away.loss()
        with pytest.raises(UserWarning, match="some of the state"):
            away.optimizer.step()
        assert is_same(away.run(1), Training().run(2))

    @pytest.mark.filterwarnings("error")
    def test_other_warnings_do_not_end_an_update(self, monkeypatch: pytest.MonkeyPatch) -> None:
        away, plain = offloaded(slice_size=1), Outer.places
        away.loss()

        def warn(*args: Any) -> Any:
            warnings.warn("this host memory could not be locked", stacklevel=2)
            return plain(*args)

        monkeypatch.setattr(Outer, "places", warn)
        with pytest.raises(UserWarning, match="could not be locked"):
            away.optimizer.step()
        assert is_same(away.run(1), Training().run(2))

    def test_an_error_s_traceback_keeps_no_optimizer(self) -> None:
        away = offloaded(slice_size=1)
        away.loss()
        away.model.layers[2].weight.grad = torch.ones(WIDTH, WIDTH).to_sparse()
        with pytest.raises(RuntimeError, match="sparse gradients") as caught:
            away.optimizer.step()
        assert [each for each, _ in optimizers_of(away.model)] == [away.optimizer]
        del caught

    def test_what_a_step_sets_is_set(self) -> None:
        away = offloaded(lambda p: optim.SGD(p, lr=0.1, fused=True), slice_size=1)
        assert away.optimizer._need_device_dtype_check_for_fused
        away.run(1)
        assert not away.optimizer._need_device_dtype_check_for_fused

    def test_a_state_that_something_else_has_stays(self) -> None:
        plain, away = Training(), offloaded()
        restore_optimizer(away.optimizer)
        for training in (plain, away):
            training.run(1)
        mine = away.optimizer.state[away.model.layers[0].weight]
        offload_optimizer(away.optimizer)
        assert sorted(large_here(away.optimizer)) == ["exp_avg", "exp_avg_sq"]
        for state in (mine, plain.optimizer.state[plain.model.layers[0].weight]):
            state["exp_avg"] = torch.ones(WIDTH, WIDTH)
        del state
        assert is_same(away.run(), plain.run())

    def test_what_cannot_be_written_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        away = offloaded(slice_size=1)
        away.run(1)

        def fail(*_: Any) -> Iterator[int]:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(SpillFile, "write", fail)
            with pytest.warns(UserWarning, match="Input/output error"):
                away.run(2)
        assert large_here(away.optimizer)
        assert is_same(away.run(), Training().run(6))
        assert not large_here(away.optimizer)

    def test_what_cannot_be_read_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        away = offloaded(slice_size=1)
        away.run(1)

        def fail(*_: Any) -> Iterator[int]:
            raise OSError(5, "Input/output error")

        away.loss()
        with monkeypatch.context() as patch:
            patch.setattr(SpillFile, "read", fail)
            with pytest.raises(SpillError, match="Input/output error"):
                away.optimizer.step()
        away.optimizer.step()
        assert is_same(away.run(1), Training().run(3))

    def test_an_update_that_raises_can_be_done_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        away = offloaded(slice_size=1)
        away.run(1)
        away.loss()
        groups = away.optimizer.param_groups
        hooked: Any = optim.AdamW.step
        plain = hooked.__wrapped__
        calls = []

        def fail(optimizer: optim.Optimizer, *args: Any) -> Any:
            calls.append(optimizer.param_groups[0]["params"])
            if len(calls) == 4:
                raise KeyboardInterrupt
            return plain(optimizer, *args)

        with monkeypatch.context() as patch:
            patch.setattr(hooked, "__wrapped__", fail)
            with pytest.raises(KeyboardInterrupt):
                away.optimizer.step()
        assert away.optimizer.param_groups is groups
        updated = {id(p) for each in calls[:3] for p in each}
        for parameter in away.model.parameters():
            if id(parameter) in updated:
                parameter.grad = None
        away.optimizer.step()
        assert is_same(away.run(1), Training().run(3))


class TestRestoring:
    """What `restore_optimizer` undoes, and what is released with an optimizer."""

    def test_all_is_as_before(self) -> None:
        away = offloaded()
        away.run()
        assert restore_optimizer(away.optimizer) is away.optimizer
        assert "step" not in vars(away.optimizer)
        assert all(type(state) is dict for state in away.optimizer.state.values())
        assert is_same(away.run(), Training().run(6))
        offload_optimizer(away.optimizer)
        assert not large_here(away.optimizer)
        assert is_same(away.run(), Training().run(9))

    def test_it_must_be_offloaded(self) -> None:
        optimizer = Training().optimizer
        with pytest.raises(WrapError, match="AdamW: its state is not offloaded"):
            restore_optimizer(optimizer)
        offload_optimizer(optimizer)
        with pytest.raises(WrapError, match="it is offloaded already"):
            offload_optimizer(optimizer, slice_size=1)

    def test_optimizers_are_collected(self) -> None:
        away = offloaded()
        away.run()
        driver = offloading._OFFLOADED[away.optimizer].driver
        states = [s for s in away.optimizer.state.values() if isinstance(s, ParameterState)]
        lanes: list[Any] = [state._homes["exp_avg"].room.lane for state in states]
        ended = weakref.ref(away.optimizer)
        assert all(lane._open for lane in lanes)
        del states
        away.optimizer.state.clear()
        assert not any(lane._open for lane in lanes)
        assert driver.disk_bytes_written()
        del away, driver, lanes
        assert ended() is None


class TestOptions:
    """Wrong arguments."""

    @pytest.mark.parametrize(
        ("given", "kind", "words"),
        [
            ({"slice_size": "large"}, BudgetError, "slice_size"),
            ({"slice_size": 0}, BudgetError, "slice_size"),
            ({"disk_budget": "-1"}, BudgetError, "disk_budget"),
            ({"spill_dir": "/nowhere"}, SpillError, "/nowhere"),
        ],
    )
    def test_values(self, given: dict[str, Any], kind: type[OutcoreError], words: str) -> None:
        optimizer = Training().optimizer
        with pytest.raises(kind, match=words):
            offload_optimizer(optimizer, **given)
        offload_optimizer(optimizer)

    def test_other_objects(self) -> None:
        with pytest.raises(WrapError, match=r"Tower: it is not a torch\.optim\.Optimizer"):
            offload_optimizer(Tower())  # type: ignore[type-var]  # that is the point

    def test_other_devices(self) -> None:
        on_meta = optim.SGD([nn.Parameter(torch.empty(3, device="meta"))])
        with pytest.raises(WrapError, match="device meta"):
            offload_optimizer(on_meta)
        both = optim.SGD([nn.Parameter(torch.empty(3, device=d)) for d in ("meta", "cpu")])
        with pytest.raises(WrapError, match="cpu, meta"):
            offload_optimizer(both)


def test_estimates_count_no_state() -> None:
    training = Training()
    assert held_for(training.model).nbytes >= 8 * MATRIX_BYTES  # what it will have
    offload_optimizer(training.optimizer)
    assert held_for(training.model) == OptimizerState(("AdamW",), 0)
    training.run(1)
    assert held_for(training.model).nbytes < MATRIX_BYTES
    held = [dict(state) for state in training.optimizer.state.values()]
    assert held_for(training.model).nbytes >= 8 * MATRIX_BYTES
    del held


def test_optimizers_that_could_not_be_made_are_left_out() -> None:
    training = Training()
    with pytest.raises(ValueError, match="Invalid learning rate") as caught:
        optim.AdamW(training.model.parameters(), lr=-1.0)
    assert held_for(training.model).names == ("AdamW",)
    del caught


def test_errors_name_the_state() -> None:
    notes = []
    for away in (False, True):
        torch._dynamo.reset()
        training = Training()
        if away:
            offload_optimizer(training.optimizer)
        training.run(1)
        outcore.wrap(training.model, 1 << 20, strict=True)
        with pytest.raises(InfeasibleError) as caught:
            training.run(1)
        notes.append(" ".join(getattr(caught.value, "__notes__", ())))
        outcore.unwrap(training.model)
        del caught
    assert "the state of AdamW takes 2.01 MiB of the memory" in notes[0]
    assert "outcore.offload_optimizer(optimizer) keeps it" in notes[0]
    assert "the state of" not in notes[1]


def test_a_budget_that_the_state_would_exceed() -> None:
    def train(budget: int, *, away: bool) -> list[Tensor]:
        torch._dynamo.reset()
        training = Training()
        if away:
            offload_optimizer(training.optimizer, slice_size=MATRIX_BYTES)
        outcore.wrap(training.model, budget, strict=True, policy="recompute-all")
        found = training.run(8)
        inside(outcore.handle(training.model).report())
        outcore.unwrap(training.model)
        return found

    gc.collect()
    weights = 4 * MATRIX_BYTES
    budget = int(3.2 * weights)  # parameters and gradients take 2, the state 2 more
    base = resident_bytes(torch.device("cpu"))
    with pytest.raises(InfeasibleError):
        train(base + budget, away=False)
    found = train(base + budget, away=True)
    assert is_same(found, Training().run(8))


def test_sharded_parameters_are_named() -> None:
    """Their state is of their kind, and stays."""
    weight = nn.Parameter(TwoTensor(torch.ones(WIDTH, WIDTH), torch.ones(WIDTH, WIDTH)))
    optimizer = adamw([weight])
    with pytest.warns(UserWarning, match="that of tensor subclasses"):
        offload_optimizer(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (weight * 2).sum().backward()
        optimizer.step()
