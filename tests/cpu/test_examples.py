"""The examples at small sizes: each moves something and trains exactly as without outcore."""

from __future__ import annotations

import gc
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from outcore.integrations import TransformersCallback
from outcore.report import Report

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 6
"""The profiled steps, the first planned step, which is metered, and one more."""

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*pin_memory.*:UserWarning"
)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    """The reports that an example reads."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("OUTCORE_POLICY", "swap-all")  # plans without delay
    seen: list[Report] = []

    def noting(asked: Callable[..., Report]) -> Callable[..., Report]:
        def report(self: object) -> Report:
            seen.append(asked(self))
            return seen[-1]

        return report

    for owner in (outcore.Backend, TransformersCallback):
        monkeypatch.setattr(owner, "report", noting(owner.report))
    return seen


def trained(name: str, *, plain: bool) -> dict[str, Any]:
    """The network's state after training, as NumPy copies, which no budget counts."""
    torch._dynamo.reset()
    gc.collect()  # what an earlier run left behind would count
    main = importlib.import_module(name).main
    state = main(None, STEPS, small=True, plain=plain).state_dict()
    return {each: value.cpu().numpy().copy() for each, value in state.items()}


@pytest.mark.parametrize("name", ["gcn", "large_images", "long_context", "swin_unetr"])
def test_it_trains_inside_its_budget_as_without(
    name: str, reports: list[Report], capsys: pytest.CaptureFixture[str]
) -> None:
    plain = trained(name, plain=True)
    assert not reports
    budgeted = trained(name, plain=False)
    shown, report = capsys.readouterr().out, reports[-1]
    assert report.state == "planned"
    assert report.counts.offload + report.counts.recompute
    peaks = [report.measured_peak_bytes, report.predicted_peak_bytes, report.budget_bytes]
    assert all(peaks)
    assert peaks == sorted(peaks, key=lambda nbytes: nbytes or 0)
    assert report.budget_bytes < (report.in_core_peak_bytes or 0)
    assert re.search(r"^peak \d+.* of a budget of \d+.*; loss \d.* -> \d", shown, re.MULTILINE)
    differing = [each for each in plain if not (budgeted[each] == plain[each]).all()]
    assert not differing
