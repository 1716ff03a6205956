"""Train GPT-2 on 4096 tokens at once with Hugging Face's Trainer inside a byte budget.

    python examples/long_context.py --budget 5GiB

GPT-2's usual context is 1024 tokens. The weights are random; the text is the source of Python's
argparse, a token per byte. The script needs the extra `transformers`. In-core the step needs
8.02 GiB (predicted):

    outcore estimate examples/long_context.py:step --budget 5GiB --states 2
"""

# ruff: noqa: INP001, T201 - a standalone script that prints

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from outcore.integrations import TransformersCallback
from outcore.units import format_bytes

LARGE = {"n_positions": 4096}, "5GiB"
SMALL = {"n_positions": 1024, "n_layer": 3, "n_embd": 96, "n_head": 3, "vocab_size": 512}, "30MiB"
"""Options of the network, and budget."""


def gpt2(options: dict[str, int]) -> Any:
    """GPT-2 with random weights, without attention dropout, which would save large matrices."""
    end = 0  # the usual one is outside a small vocabulary
    config = GPT2Config(**options, attn_pdrop=0.0, bos_token_id=end, eos_token_id=end)
    return GPT2LMHeadModel(config)


def lines(length: int) -> list[dict[str, Tensor]]:
    """The text, in lines of `length` tokens."""
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    whole = text[: len(text) // length * length].view(-1, length)
    return [{"input_ids": line, "labels": line} for line in whole]


def step() -> tuple[nn.Module, dict[str, Tensor]]:
    """A training step at full size, for `outcore estimate`."""
    options, _ = LARGE
    tokens = torch.zeros(1, options["n_positions"], dtype=torch.int64)
    return gpt2(options), {"input_ids": tokens, "labels": tokens}


def main(budget: str | None, steps: int, *, small: bool, plain: bool) -> nn.Module:
    """Train, then print the plan and the measured figures. Returns the network."""
    options, usual_budget = SMALL if small else LARGE
    torch.manual_seed(0)
    model: nn.Module = gpt2(options)
    outcore = TransformersCallback(budget=budget or usual_budget)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                folder,
                max_steps=steps,
                per_device_train_batch_size=1,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
            ),
            train_dataset=lines(options["n_positions"]),
            callbacks=[] if plain else [outcore],
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if not plain:
        report = outcore.report()
        peak, of = format_bytes(report.measured_peak_bytes or 0), format_bytes(report.budget_bytes)
        print(report)
        print(f"\npeak {peak} of a budget of {of}; loss {losses[0]:.6f} -> {losses[-1]:.6f}")
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train GPT-2 on long lines inside a budget.")
    parser.add_argument("--budget", help=f"{LARGE[-1]} if not given; {SMALL[-1]} with --small")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="the same in seconds")
    parser.add_argument("--plain", action="store_true", help="without outcore, to compare")
    main(**vars(parser.parse_args()))
