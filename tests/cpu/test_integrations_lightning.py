"""LightningCallback in a real Trainer: same results, logged metrics, errors for misuse."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

lightning = pytest.importorskip("lightning.pytorch")

import outcore  # noqa: E402 - the library first
from outcore.errors import (  # noqa: E402 - as above
    BudgetError,
    NotEngagedError,
    OptionError,
    PolicyError,
    WrapError,
)
from outcore.integrations import LightningCallback  # noqa: E402 - as above
from tests.cpu.training import Small, batch, mean_square  # noqa: E402 - as above

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:.*does not have many workers.*",
)

TIGHT: dict[str, Any] = {"budget": "2300KiB", "policy": "swap-all"}
STEPS = 8


class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]  # has no types
    """The usual shape: a network inside, called by `training_step`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net: Any = Small()
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result

    def training_step(self, data: Tensor, index: int) -> Tensor:
        torch.manual_seed(index)
        loss = mean_square(self(data))
        self.losses.append(loss.item())
        return loss

    def validation_step(self, data: Tensor, index: int) -> None:
        self.log("validated", mean_square(self(data)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


def fit(folder: Path, module: Any, *callbacks: Any, **arguments: Any) -> Any:
    given: dict[str, Any] = {
        "max_steps": STEPS,
        "accelerator": "cpu",
        "logger": lightning.loggers.CSVLogger(folder),
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 1,
        "limit_val_batches": 1,
        "default_root_dir": folder,
    }
    trainer = lightning.Trainer(callbacks=list(callbacks), **(given | arguments))
    images: Any = batch(0, n=4 * STEPS)
    data: Any = torch.utils.data.DataLoader(images, batch_size=4)
    trainer.fit(module, data, data)
    return trainer


def test_training_is_the_same_and_logged(tmp_path: Path) -> None:
    plain, module = Lit(), Lit()
    fit(tmp_path, plain)
    names = list(module.state_dict())
    callback = LightningCallback(**TIGHT)
    trainer = fit(tmp_path, module, callback)
    report = callback.report()
    assert report.state == "planned"
    assert report.counts.offload
    assert module.losses == plain.losses
    assert list(module.state_dict()) == names
    theirs = plain.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in module.state_dict().items())
    logged = trainer.logged_metrics
    assert logged["outcore/offloaded_bytes"] == report.offloaded_bytes
    assert 0 < logged["outcore/peak_bytes"] <= report.budget_bytes
    assert logged["outcore/disk_bytes_written"] > 0
    assert "outcore/stall_seconds" in logged
    written = Path(trainer.logger.log_dir, "metrics.csv").read_text()
    assert "outcore/peak_bytes" in written.splitlines()[0]


@pytest.mark.parametrize("first", [True, False])
def test_statistics_of_averaged_weights_need_no_memory_for_backward(
    tmp_path: Path, *, first: bool
) -> None:
    """Averaging ends with an epoch without backward, in which graphs end at each batch norm."""

    def trained(module: Lit, *callbacks: Any) -> Any:
        averaging = lightning.callbacks.StochasticWeightAveraging(1e-3, swa_epoch_start=2)
        order = (averaging, *callbacks) if first else (*callbacks, averaging)
        own = vars(module).get("training_step")
        fit(tmp_path, module, *order, max_steps=-1, max_epochs=4, limit_train_batches=3)
        assert vars(module).get("training_step") is own
        return module.state_dict()

    plain, module, callback = Lit(), Lit(), LightningCallback(**TIGHT)
    if first:  # as if something had decorated it
        module.__dict__["training_step"] = module.training_step
    expected, found = trained(plain), trained(module, callback)
    assert callback.report().state == "planned"
    assert expected["net.norm.num_batches_tracked"] == 3
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


class Wide(Lit):
    """Two optimizers, for weights that are large enough to move their state."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.LazyLinear(256), nn.ReLU(), nn.Linear(256, 256))
        self.net(batch(0))
        self.away: list[bool] = []
        """Whether the state was away, at each step of each optimizer."""

    def training_step(self, data: Tensor, index: int) -> Tensor:
        for optimizer in self.trainer.optimizers:
            weight = optimizer.param_groups[0]["params"][0]
            self.away.append("'exp_avg': 'away'" in repr(optimizer.state[weight]))
        loss = super().training_step(data, index)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        first, second = self.net[1], self.net[3]
        return [torch.optim.AdamW(first.parameters()), torch.optim.AdamW(second.parameters())]


def test_the_state_of_optimizers_is_away_between_steps(tmp_path: Path) -> None:
    """After a checkpoint was loaded, too."""
    plain, module = Wide(), Wide()
    fit(tmp_path, plain)
    callback = LightningCallback("1GiB", offload_optimizer=True, spill_dir=tmp_path)
    trainer = fit(tmp_path, module, callback)
    for optimizer in trainer.optimizers:
        weight = optimizer.param_groups[0]["params"][0]
        assert "'exp_avg': 'away'" in repr(optimizer.state[weight])
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    theirs = plain.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in module.state_dict().items())

    def gone_on(*callbacks: Any) -> Any:
        again = Wide()
        trainer = lightning.Trainer(
            max_steps=2 * STEPS,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            callbacks=list(callbacks),
        )
        images: Any = batch(1, n=4 * STEPS)
        data: Any = torch.utils.data.DataLoader(images, batch_size=4)
        trainer.fit(again, data, data, ckpt_path=tmp_path / "it.ckpt", weights_only=False)
        return again

    expected, found = gone_on(), gone_on(callback)
    pairs = zip(found.parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    assert all(found.away)
    assert not any(expected.away)


def test_checkpoints_are_plain(tmp_path: Path) -> None:
    module = Lit()
    trainer = fit(tmp_path, module, LightningCallback(**TIGHT), max_steps=2)
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    saved = torch.load(tmp_path / "it.ckpt", weights_only=False)["state_dict"]
    assert list(saved) == list(Lit().state_dict())
    again = Lit.load_from_checkpoint(tmp_path / "it.ckpt")
    assert torch.equal(again.net.head.weight, module.net.head.weight)


class Loose(Lit):
    """Layers directly in the LightningModule, some in a list, one not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Identity()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(3, 2)
        self.fixed = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        result: Tensor = self.fixed(self.head(x.mean((2, 3))))
        return result


def test_layers_share_one_budget(tmp_path: Path) -> None:
    plain, module, callback = Loose(), Loose(), LightningCallback(budget="64MiB")
    fit(tmp_path, plain, max_steps=2)
    fit(tmp_path, module, callback, max_steps=2)
    backends = {outcore.handle(each) for each in (*module.layers, module.head)}
    assert len(backends) == 1
    with pytest.raises(WrapError):
        outcore.handle(module.fixed)
    assert module.losses == plain.losses


class Parts(nn.Module):
    """Holds modules that are called one by one: it has no `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 3)


class Held(Loose):
    """Layers in a module without `forward`, and parameters in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = Parts()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(2))])
        self.shifts = nn.ParameterDict({"one": nn.Parameter(torch.zeros(2))})

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) * self.scales[0] + self.shifts["one"]
        result: Tensor = self.parts.second(self.parts.first(x))
        return result


def test_only_what_can_be_called_is_wrapped(tmp_path: Path) -> None:
    plain, module = Held(), Held()
    fit(tmp_path, plain, max_steps=2)
    fit(tmp_path, module, LightningCallback(budget="64MiB", strict=True), max_steps=2)
    assert outcore.handle(module.parts.first) is outcore.handle(module.parts.second)
    for held in (module.parts, module.scales, module.shifts):
        assert held._compiled_call_impl is None
    assert module.losses == plain.losses


class Adversaries(Lit):
    """Two networks with an optimizer each, trained in turns while the other one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Linear(4, 3)
        self.critic = nn.Linear(3, 1)

    def training_step(self, data: Tensor, index: int) -> None:  # type: ignore[override]  # by itself
        noise, real = data.flatten(1)[:, :4], data.mean((2, 3))
        steps = zip(self.optimizers(), (self.critic_loss, self.net_loss), strict=True)
        for optimizer, loss_of in steps:
            self.toggle_optimizer(optimizer)
            loss = loss_of(noise, real)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())

    def critic_loss(self, noise: Tensor, real: Tensor) -> Tensor:
        found: Tensor = self.critic(self.net(noise)).mean() - self.critic(real).mean()
        return found

    def net_loss(self, noise: Tensor, real: Tensor) -> Tensor:
        found: Tensor = -self.critic(self.net(noise)).mean()
        return found

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (self.critic, self.net)]


def test_two_optimizers_that_freeze_in_turns(tmp_path: Path) -> None:
    plain, module = Adversaries(), Adversaries()
    arguments = {"max_steps": 8, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    fit(tmp_path, plain, **arguments)
    fit(tmp_path, module, LightningCallback(budget="64MiB", strict=True), **arguments)
    assert module.losses == plain.losses


def test_named_modules(tmp_path: Path) -> None:
    module, callback = Loose(), LightningCallback(budget="64MiB", modules=["layers.1"])
    fit(tmp_path, module, callback, max_steps=1)
    assert outcore.handle(module) is outcore.handle(module.layers[1])


def test_a_name_that_no_module_has(tmp_path: Path) -> None:
    callback = LightningCallback(budget="64MiB", modules=["layer.1"])
    with pytest.raises(WrapError, match=r"no module named 'layer.1'.*: did you mean 'layers.1'\?"):
        fit(tmp_path, Loose(), callback, max_steps=1)


class Late(Lit):
    """Makes its network in `configure_model`, which Lightning calls after `setup`."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        self.net = Small()


def test_what_configure_model_makes(tmp_path: Path) -> None:
    callback = LightningCallback(**TIGHT)
    fit(tmp_path, Late(), callback, max_steps=6)
    assert callback.report().state == "planned"


def test_training_again_keeps_the_plan(tmp_path: Path) -> None:
    module, callback = Lit(), LightningCallback(**TIGHT)
    fit(tmp_path, module, callback, max_steps=6)
    session = callback.session
    assert session is not None
    assert callback.report().state == "planned"
    calls = session.calls
    fit(tmp_path, module, callback, max_steps=2)
    assert callback.session is session
    assert outcore.handle(module.net) is session.backend
    assert callback.report().state == "planned"
    assert session.calls == calls + 2


def test_a_size_that_is_found_without_outcore_is_warned_of(tmp_path: Path) -> None:
    finder = lightning.callbacks.BatchSizeFinder(steps_per_trial=1, max_trials=1)
    module, callback = Lit(), LightningCallback(**TIGHT)
    trainer = lightning.Trainer(callbacks=[finder, callback], logger=False, accelerator="cpu")
    with pytest.warns(UserWarning, match="outcore: while BatchSizeFinder looks for a batch size"):
        callback.setup(trainer, module, "fit")


def test_a_callback_that_has_trained_can_be_sent_elsewhere(tmp_path: Path) -> None:
    callback = LightningCallback(**TIGHT)
    fit(tmp_path, Lit(), callback, max_steps=1)
    copy = pickle.loads(pickle.dumps(callback))
    assert callback.session is not None
    assert copy.session is None
    fit(tmp_path, Lit(), copy, max_steps=1)
    assert copy.report().budget_bytes == callback.report().budget_bytes


def test_training_another_closes_the_first(tmp_path: Path) -> None:
    first, second, callback = Lit(), Lit(), LightningCallback(**TIGHT)
    fit(tmp_path, first, callback, max_steps=1)
    before = callback.session
    assert before is not None
    fit(tmp_path, second, callback, max_steps=1)
    assert before.backend.closed
    assert callback.session is not before
    assert first.net._compiled_call_impl is None
    with pytest.raises(WrapError):
        outcore.handle(first)
    assert outcore.handle(second).engaged


class Around(Lit):
    """Calls the network's `forward` directly, not `__call__`."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net.forward(x)
        return result


class PartlyAround(Loose):
    """Calls its layers, but the head's `forward` directly."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        result: Tensor = self.head.forward(x.mean((2, 3)))
        return result


class TestRefused:
    def test_what_lightning_would_not_run(self, tmp_path: Path) -> None:
        module = outcore.wrap(Lit(), **TIGHT)
        with pytest.raises(WrapError, match="never the LightningModule itself"):
            fit(tmp_path, module, LightningCallback(**TIGHT))

    def test_what_is_compiled_as_a_whole(self, tmp_path: Path) -> None:
        module = torch.compile(Lit(), backend="eager")
        with pytest.raises(WrapError, match=r"already compiled with torch\.compile"):
            fit(tmp_path, module, LightningCallback(**TIGHT))

    def test_a_step_that_goes_past_the_modules(self, tmp_path: Path) -> None:
        with pytest.raises(NotEngagedError, match="Around"):
            fit(tmp_path, Around(), LightningCallback(**TIGHT))

    def test_a_second_training_that_goes_past_them(self, tmp_path: Path) -> None:
        module: Any = Lit()
        callback = LightningCallback(**TIGHT)
        fit(tmp_path, module, callback, max_steps=1)
        module.forward = module.net.forward
        with pytest.raises(NotEngagedError, match="Lit"):
            fit(tmp_path, module, callback)

    def test_a_step_that_goes_past_one_of_them(self, tmp_path: Path) -> None:
        with pytest.warns(UserWarning, match="nothing to plan in head:"):
            fit(tmp_path, PartlyAround(), LightningCallback(budget="64MiB"), max_steps=2)
        with pytest.raises(NotEngagedError, match="nothing to plan in head:"):
            fit(tmp_path, PartlyAround(), LightningCallback(budget="64MiB", strict=True))

    def test_what_is_compiled_inside_leaves_nothing_wrapped(self, tmp_path: Path) -> None:
        module = Loose()
        module.head.compile(backend="eager")
        with pytest.raises(WrapError, match="Linear: it is already compiled"):
            fit(tmp_path, module, LightningCallback(budget="64MiB"))
        with pytest.raises(WrapError, match="neither it nor a module inside it is wrapped"):
            outcore.handle(module)

    def test_nothing_to_wrap(self, tmp_path: Path) -> None:
        module = Lit()
        module.net = nn.Identity()
        module.weight = nn.Parameter(torch.ones(()))
        with pytest.raises(WrapError, match="no module with parameters to train"):
            fit(tmp_path, module, LightningCallback(**TIGHT))

    def test_options_at_once(self) -> None:
        with pytest.raises(OptionError, match="did you mean 'policy'"):
            LightningCallback(budget="1GiB", polcy="pooch")  # type: ignore[call-arg]  # refused by mypy as well
        with pytest.raises(PolicyError, match="swop-all"):
            LightningCallback(policy="swop-all")
        with pytest.raises(BudgetError, match="3 apples"):
            LightningCallback("3 apples")
        with pytest.raises(WrapError, match="no report yet"):
            LightningCallback(budget="1GiB").report()


class Sized(lightning.LightningDataModule):  # type: ignore[misc, name-defined]  # has no types
    """Data in batches of a size that the tuner searches for."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        images: Any = batch(0, n=64)
        return torch.utils.data.DataLoader(images, batch_size=self.batch_size)

    val_dataloader = train_dataloader


def test_a_batch_that_does_not_fit_is_made_smaller(tmp_path: Path) -> None:
    """By Lightning's tuner, which trains without any callback."""
    module, data = Lit(), Sized(4)
    outcore.wrap(module.net, budget="4MiB")
    unwanted = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        limit_val_batches=0,
        default_root_dir=tmp_path,
        **dict.fromkeys(unwanted, False),
    )
    tuner = lightning.tuner.Tuner(trainer)
    found = tuner.scale_batch_size(module, datamodule=data, steps_per_trial=STEPS, init_val=4)
    assert 4 <= found < 64
    assert outcore.handle(module.net).report().predicted_peak_bytes is not None
