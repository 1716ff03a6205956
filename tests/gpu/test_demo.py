"""`outcore demo` on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
from outcore.cli.training import repeatable

needs_photographs = pytest.mark.skipif(
    not all(map(find_spec, ("sklearn", "PIL"))), reason="needs scikit-learn and pillow"
)


@needs_photographs
def test_the_demo_keeps_its_promises_on_a_gpu(outcore: Callable[..., Any], tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    ended = outcore("demo", "--small", "--json", str(figures))
    assert ended.exit_code == 0, ended.output
    assert f"on {torch.cuda.get_device_name()}" in ended.stdout
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert (found["differing_iterations"], found["inside_budget"]) == (0, True)
    assert found["report"]["counts"]["offload"] + found["report"]["counts"]["recompute"] > 0
    assert found["budgeted"]["peak_bytes"] <= found["report"]["predicted_peak_bytes"]
    assert found["budgeted"]["seconds"] is not None


def test_a_slower_link_is_for_a_cpu(outcore: Callable[..., Any]) -> None:
    ended = outcore("demo", "--small", "--link-limit", "1GiB/s")
    assert ended.exit_code == 2
    assert "the links of a GPU cannot be slowed down" in ended.stderr


@needs_photographs
def test_memory_that_plain_training_does_not_have(outcore: Callable[..., Any]) -> None:
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(40e6 / total)
    try:
        ended = outcore("demo", "--small", "--batch", "512")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert ended.exit_code == 2
    assert "option batch=512: plain training" in ended.stderr


def test_settings_of_torch_are_put_back() -> None:
    def settings() -> tuple[bool, ...]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch._C._get_deterministic_fill_uninitialized_memory(),
            torch.backends.cudnn.deterministic,
        )

    before = settings()
    with repeatable("cuda"):
        assert settings() == (True, True, False, True)
    assert settings() == before
