"""TransformersCallback in a real Trainer: same results, logged metrics, usual checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

pytest.importorskip("accelerate")
transformers: Any = pytest.importorskip("transformers")

import outcore  # noqa: E402 - the libraries first
from outcore.errors import (  # noqa: E402 - as above
    BudgetError,
    NotEngagedError,
    OptionError,
    PolicyError,
    WrapError,
)
from outcore.integrations import TransformersCallback  # noqa: E402 - as above
from outcore.optimizers import is_offloaded, offloading  # noqa: E402 - as above

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*pin_memory.*:UserWarning"
)

TIGHT: dict[str, Any] = {"budget": "3MiB", "policy": "swap-all"}
TINY: dict[str, Any] = {"budget": "1500KiB", "policy": "swap-all{min_bytes=4KiB}"}
METRICS = {
    f"outcore/{name}"
    for name in ("peak_bytes", "stall_seconds", "offloaded_bytes", "disk_bytes_written")
}
WORDS, LENGTH = 96, 32


class Lines(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens."""

    def __init__(self, number: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(WORDS, (number, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def gpt() -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


class Tiny(nn.Module):
    """A custom model, small so that torch compiles it fast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(16))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(32, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.words(input_ids)
        for layer in self.layers:
            x = x + self.drop(torch.sigmoid(layer(x)))
        logits = self.head(x)
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def trainer(folder: Path, model: Any, *callbacks: Any, data: Any = None, **arguments: Any) -> Any:
    given: dict[str, Any] = {
        "max_steps": 8,
        "per_device_train_batch_size": 8,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
        "dataloader_pin_memory": False,
    }
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(folder), **(given | arguments)),
        train_dataset=data or Lines(),
        eval_dataset=Lines(8),
        callbacks=list(callbacks),
    )


def losses(ran: Any) -> list[float]:
    return [entry["loss"] for entry in ran.state.log_history if "loss" in entry]


def same_parameters(first: nn.Module, second: nn.Module) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


class Reporter(transformers.TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Stands in for TensorBoard and similar reporters."""

    def __init__(self) -> None:
        self.seen: list[set[str]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.seen.append(set(logs))


def test_training_is_the_same_and_logged(tmp_path: Path) -> None:
    arguments = {"gradient_accumulation_steps": 2}
    plain = trainer(tmp_path, gpt(), **arguments)
    plain.train()
    callback = TransformersCallback(**TIGHT)
    model = gpt()
    names = list(model.state_dict())
    ran = trainer(tmp_path, model, callback, **arguments)
    ran.train()
    report = callback.report()
    assert report.state == "planned"
    assert report.counts.offload
    assert list(model.state_dict()) == names
    assert losses(ran) == losses(plain)
    assert same_parameters(model, plain.model)
    logged = [entry for entry in ran.state.log_history if "loss" in entry]
    assert set(logged[-1]) >= METRICS
    assert logged[-1]["outcore/peak_bytes"] <= report.budget_bytes
    assert logged[-1]["outcore/offloaded_bytes"] == report.offloaded_bytes > 0
    assert logged[-1]["outcore/disk_bytes_written"] >= report.offloaded_bytes
    assert "outcore/peak_bytes" not in logged[0]  # still profiling


def test_evaluation_saving_and_resuming(tmp_path: Path) -> None:
    arguments = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps"}
    arguments |= {"eval_steps": 4}
    plain = trainer(tmp_path / "plain", Tiny(), **arguments)
    plain.train()
    ran = trainer(tmp_path / "first", Tiny(), TransformersCallback(**TINY), **arguments)
    ran.train()
    evaluated = [e["eval_loss"] for e in ran.state.log_history if "eval_loss" in e]
    assert evaluated == [e["eval_loss"] for e in plain.state.log_history if "eval_loss" in e]
    assert all(METRICS.isdisjoint(e) for e in ran.state.log_history if "eval_loss" in e)
    saved = load_file(tmp_path / "first" / "checkpoint-8" / "model.safetensors")
    theirs = plain.model.state_dict()
    assert saved.keys() == theirs.keys()
    assert all(torch.equal(saved[name], theirs[name]) for name in saved)
    callback = TransformersCallback(budget="64MiB")
    resumed = trainer(tmp_path / "second", Tiny(), callback, **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-4"))
    assert losses(resumed)[4:] == losses(plain)[4:]
    assert same_parameters(resumed.model, plain.model)


class Wide(Tiny):
    """Weights that are large enough to move their state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 256)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(2))
        self.head = nn.Linear(256, WORDS)


def is_away(optimizer: Any) -> bool:
    return all("'exp_avg': 'away'" in repr(optimizer.state[p]) for p in large(optimizer))


def large(optimizer: Any) -> list[Tensor]:
    found = [p for group in optimizer.param_groups for p in group["params"] if p.nbytes >= 1 << 16]
    assert found
    return found


def test_the_state_of_the_optimizer_is_away_between_steps(tmp_path: Path) -> None:
    """Resuming with it, too, from a checkpoint of either kind."""
    arguments = {"save_strategy": "steps", "save_steps": 4}
    plain = trainer(tmp_path / "plain", Wide(), **arguments)
    plain.train()
    callback = TransformersCallback("1GiB", offload_optimizer=True, spill_dir=tmp_path)
    for folder in (None, "plain", "ours"):
        ours = trainer(tmp_path / "ours", Wide(), callback, **arguments)
        start = None if folder is None else str(tmp_path / folder / "checkpoint-4")
        ours.train(resume_from_checkpoint=start)
        assert same_parameters(ours.model, plain.model)
        assert losses(ours)[-4:] == losses(plain)[-4:]
        assert is_away(ours.optimizer.optimizer)
        assert folder or callback.report().state == "in-core"


def test_the_state_of_an_optimizer_with_a_scaler_is_away_too(tmp_path: Path) -> None:
    """Accelerate's notes the inner one's step before the callback can change it."""
    from accelerate import Accelerator  # noqa: PLC0415 - it may be missing
    from accelerate.optimizer import AcceleratedOptimizer  # noqa: PLC0415 - as above

    Accelerator(cpu=True)
    weight = nn.Parameter(torch.ones(256, 256))
    inner = torch.optim.AdamW([weight])
    optimizer = AcceleratedOptimizer(inner, scaler=torch.amp.GradScaler("cpu"))
    callback = TransformersCallback("1GiB", offload_optimizer=True, spill_dir=tmp_path)
    callback.on_train_begin(None, None, None, optimizer=optimizer)
    for _ in range(2):
        optimizer.scaler.scale(weight.square().sum()).backward()
        optimizer.step()
        assert not optimizer.step_was_skipped
        assert is_away(inner)
        optimizer.zero_grad()
    assert is_offloaded(inner)


def test_an_optimizer_that_was_offloaded_before_stays_so(tmp_path: Path) -> None:
    model = Wide()
    optimizer = torch.optim.AdamW(model.parameters())
    outcore.offload_optimizer(optimizer, slice_size="1MiB", spill_dir=tmp_path)
    before = offloading._OFFLOADED[optimizer]
    callback = TransformersCallback("1GiB", offload_optimizer=True, link_limit="1GiB/s")
    callback.on_train_begin(None, None, None, optimizer=optimizer)
    assert offloading._OFFLOADED[optimizer] is before


def test_options_for_the_state_of_the_optimizer(tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(Wide().parameters())
    options = {"slice_size": "2MiB", "spill_dir": tmp_path}
    callback = TransformersCallback("1GiB", offload_optimizer=options, link_limit="1GiB/s")
    callback.on_train_begin(None, None, None, optimizer=optimizer)
    assert offloading._OFFLOADED[optimizer].stepping.slice_bytes == 2 << 20


def test_a_model_is_not_wrapped_if_the_state_cannot_be_offloaded(tmp_path: Path) -> None:
    model, callback = Wide(), TransformersCallback("1GiB", offload_optimizer=True)
    with pytest.raises(WrapError, match=r"not a torch\.optim\.Optimizer"):
        callback.on_train_begin(None, None, None, model=model, optimizer=object())
    with pytest.raises(WrapError):
        outcore.handle(model)


def test_a_classifier_that_torch_compiles_again_at_step_2(tmp_path: Path) -> None:
    """In the first step it stores the kind of its labels in its configuration."""
    torch.manual_seed(0)
    settings = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 2, "intermediate_size": 64}
    settings |= {"max_position_embeddings": LENGTH, "num_labels": 3}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**settings))
    lines = Lines()
    data = [{"input_ids": lines.tokens[i], "labels": i % 3} for i in range(len(lines))]
    callback = TransformersCallback(**TIGHT)
    trainer(tmp_path, model, callback, data=data, max_steps=9).train()
    report = callback.report()
    assert report.predicted_peak_bytes is not None
    assert report.state != "profiling"
    assert not report.notes


def test_a_last_batch_that_is_smaller(tmp_path: Path) -> None:
    """Each shape has a plan, and none runs in-core."""
    callback = TransformersCallback(**TINY, strict=True)
    trainer(tmp_path, Tiny(), callback, data=Lines(12), max_steps=13).train()
    report = callback.report()
    assert report.state == "planned"
    (note,) = report.notes
    assert note.startswith("graphs take turns"), "nothing is amiss"


def test_a_batch_that_does_not_fit_is_made_smaller(tmp_path: Path) -> None:
    callback = TransformersCallback(**TINY | {"budget": "1150KiB"})
    arguments = {"auto_find_batch_size": True, "per_device_train_batch_size": 20}
    ran = trainer(tmp_path, Tiny(), callback, **arguments)
    ran.train()
    assert 8 <= ran._train_batch_size < 20
    assert callback.report().predicted_peak_bytes is not None  # of full batches
    assert ran.state.global_step == 8


def test_reporters_see_the_metrics_of_who_comes_before_them(tmp_path: Path) -> None:
    before, late = Reporter(), TransformersCallback(**TINY)
    trainer(tmp_path, Tiny(), before, late, max_steps=6).train()
    assert METRICS.isdisjoint(before.seen[5])
    before, early = Reporter(), TransformersCallback(**TINY)
    ran = trainer(tmp_path, Tiny(), before, early, max_steps=6)
    assert early.attach(ran) is early
    ran.train()
    assert before.seen[5] >= METRICS
    assert ran.callback_handler.callbacks.count(early) == 1


def test_training_twice_keeps_the_plan(tmp_path: Path) -> None:
    callback, model = TransformersCallback(**TINY), Tiny()
    ran = trainer(tmp_path, model, callback, max_steps=6)
    ran.train()
    backend = callback.backend
    ran.train()
    assert callback.backend is backend is outcore.handle(model)
    assert callback.report().state == "planned"


def test_training_another_model_closes_the_first(tmp_path: Path) -> None:
    callback, first, second = TransformersCallback(**TINY), Tiny(), Tiny()
    trainer(tmp_path, first, callback, max_steps=1).train()
    before: Any = callback.backend
    trainer(tmp_path, second, callback, max_steps=1).train()
    assert before.closed
    assert outcore.handle(second) is callback.backend is not before
    with pytest.raises(WrapError):
        outcore.handle(first)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="did you mean 'policy'"):
        TransformersCallback(budget="1GiB", polcy="pooch")  # type: ignore[call-arg]  # refused by mypy as well
    with pytest.raises(PolicyError, match="swop-all"):
        TransformersCallback(policy="swop-all")
    with pytest.raises(BudgetError, match="3 apples"):
        TransformersCallback("3 apples")
    with pytest.raises(WrapError, match="no report yet"):
        TransformersCallback(budget="1GiB").report()
    callback = TransformersCallback(budget="1GiB")
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    arguments.torch_compile = True
    with pytest.raises(WrapError, match="leave that out"):
        callback.on_train_begin(arguments, None, None, model=Tiny())
    arguments.torch_compile, arguments._n_gpu = False, 2
    with pytest.raises(WrapError, match="torchrun"):
        callback.on_train_begin(arguments, None, None, model=Tiny())


def test_strict_refuses_a_model_that_is_not_compiled(tmp_path: Path) -> None:
    model: Any = Tiny()
    model.forward = torch.compiler.disable(model.forward)
    callback = TransformersCallback(budget="1GiB", strict=True)
    with pytest.raises(NotEngagedError, match="Tiny"):
        trainer(tmp_path, model, callback).train()


def test_the_environment_gives_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "OUTCORE_BUDGET", "1GiB")
    callback = TransformersCallback()
    trainer(tmp_path, Tiny(), callback, max_steps=1).train()
    assert callback.report().budget_bytes == 1 << 30
