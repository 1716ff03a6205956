"""Explanations of plans in training, and `outcore explain`."""

from __future__ import annotations

import json

import pytest
import torch

from outcore import Backend, Explanation
from tests.cpu.training import Small, batch, mean_square, tight_budget, train

STEPS = 6

# AlexNet keeps everything in 12 GiB, and moves almost everything in 2.6 GiB.
EXPLAIN = ("explain", "--network", "alexnet", "--batch", "300", "--hardware", "titan-xp")
TIGHT = ("--budget", "2.6GiB")


def explained(budget: str | int) -> tuple[Backend, list[Explanation]]:
    torch.manual_seed(0)
    module = Small()
    backend = Backend(budget=budget, policy="swap-all{min_bytes=1KiB}")
    assert backend.explain() == []
    train(module, torch.compile(module, backend=backend), [batch(0)], mean_square, STEPS)
    return backend, backend.explain()


def test_a_backend_explains_what_it_runs() -> None:
    backend, (explanation,) = explained(tight_budget(Small(), [batch(0)], mean_square))
    report = backend.report()
    assert explanation.policy == report.policy
    assert explanation.peak_bytes == report.predicted_peak_bytes
    assert explanation.seconds == report.predicted_seconds
    assert explanation.in_core_seconds == pytest.approx(report.in_core_seconds)
    assert explanation.stall_seconds == pytest.approx(report.stall_seconds)
    assert explanation.moved == len(explanation.moves) > 0
    assert all(move.choice == "offload" for move in explanation.moves)
    assert any("training.py" in move.site for move in explanation.moves)
    (short,) = backend.explain(most=1)
    assert short.moves == explanation.moves[:1]


def test_what_is_kept_needs_no_explanation() -> None:
    _, (explanation,) = explained("1GiB")
    assert (explanation.moved, explanation.waits) == (0, ())
    assert explanation.seconds == pytest.approx(explanation.in_core_seconds)


def test_explain_for_programs(outcore) -> None:
    run = outcore(*EXPLAIN, *TIGHT, "--policy", "swap-all", "--json")
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert found["moved"] == len(found["moves"]) > 1
    parts = ("in_core_seconds", "variant_seconds", "recompute_seconds", "stall_seconds")
    assert sum(found[part] for part in parts) == pytest.approx(found["seconds"])
    assert sum(wait["seconds"] for wait in found["waits"]) == pytest.approx(found["stall_seconds"])
    for move in found["moves"]:
        (chosen,) = [a for a in move["alternatives"] if a["chosen"]]
        assert chosen["seconds"] == found["seconds"]
        assert move["target"].startswith("aten.")
    first = json.loads(
        outcore(*EXPLAIN, *TIGHT, "--policy", "swap-all", "--top", "1", "--json").stdout
    )
    assert first["moves"] == found["moves"][:1]
    assert first["moved"] == found["moved"]


def test_explain_for_people(outcore) -> None:
    run = outcore(*EXPLAIN, *TIGHT, "--policy", "swap-all", "--top", "2")
    assert run.exit_code == 0, run.output
    assert "of a budget of 2.60 GiB" in run.stdout
    assert "2 of " in run.stdout
    assert "if kept, it would not fit" in run.stdout
    assert "alexnet.py" in run.stdout
    assert "waits of compute" in run.stdout


def test_explain_where_everything_fits(outcore) -> None:
    run = outcore(*EXPLAIN)
    assert run.exit_code == 0, run.output
    assert "0 s recomputed + 0 s waited" in run.stdout
    assert "gaps" not in run.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--policy", "poch"), "did you mean 'pooch'"),
        (("--budget", "much"), "--budget"),
        (("--top", "0"), "--top"),
        (("--budget", "64MiB"), "smallest feasible budget"),
    ],
)
def test_mistakes_are_one_line(outcore, options, said) -> None:
    run = outcore(*EXPLAIN, *options)
    assert run.exit_code == 2
    assert said in run.stderr
