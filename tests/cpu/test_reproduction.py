"""The reproduction benchmark: its goals for the papers' figures, its page and its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.kit.rows import Row
from benchmarks.networks.command import measure
from benchmarks.reproduction.batches import Batches
from benchmarks.reproduction.command import main
from benchmarks.reproduction.figure import fact, number, percent, span
from benchmarks.reproduction.page import page
from benchmarks.reproduction.steps import Scale, lab
from benchmarks.reproduction.table import BENCHMARKS
from outcore.capture import trace_network
from outcore.networks import NETWORKS, figures, network


def reached(figure: Row) -> bool:
    (check,) = figure.checks
    return check.met


class TestGoals:
    @pytest.mark.parametrize(
        ("ours", "met"), [(0.91, True), (1.09, True), (0.89, False), (None, False)]
    )
    def test_a_number_may_differ_by_a_tenth(self, ours, met):
        assert reached(number("paper", "what", 1.0, ours)) == met

    def test_a_number_says_by_how_much(self):
        assert number("paper", "what", 0.5, 0.25, percent).difference == "-50%"
        assert number("paper", "what", 0.5, None, percent).ours == "no plan"

    @pytest.mark.parametrize(
        ("ours", "said"),
        [
            ([0.2, 0.3], "inside"),
            ([0.05, 0.3], "5.0% below"),
            ([0.05, 0.5], "5.0% below, 10.0% above"),
            ([0.2, None], "1 without a plan"),
            ([None], "no plan"),
        ],
    )
    def test_a_range_must_hold_all_of_ours(self, ours, said):
        found = span("paper", "what", (0.1, 0.4), ours, percent)
        assert found.difference == said
        assert reached(found) == (said == "inside")

    def test_a_fact_is_the_same_or_not(self):
        assert reached(fact("paper", "what", "1/2/3", "1/2/3"))
        assert not reached(fact("paper", "what", "1/2/3", "1/2/4"))


@pytest.mark.parametrize("name", ["two-heads", "resnet50", "gpt2", "unet3d"])
def test_a_batch_on_the_line_is_the_batch_that_is_traced(name):
    spec = network(name).small
    two, three, five = (trace_network(spec, samples) for samples in (2, 3, 5))
    found = Batches(2, two, 3, three).at(5)
    assert (found.buffers, found.values) == (five.buffers, five.values)
    assert [op.target for op in found.ops] == [op.target for op in five.ops]


def test_every_network_has_its_figures_and_they_are_those_of_its_trace():
    assert list(figures()) == list(NETWORKS)
    assert measure(network("alexnet")) == figures()["alexnet"]


def test_the_command_runs_and_what_it_saves_makes_a_page(tmp_path: Path):
    file = tmp_path / "reproduction.json"
    main(["--small", "--only", "replays", "vdnn", "--out", str(file)])
    found = json.loads(file.read_text())
    text = page(found)
    assert file.with_suffix(".md").read_text() == text
    assert (
        "| SuperNeurons, Table 1 | AlexNet: layers replayed, cost-aware | 17 | 17 | same |" in text
    )
    assert text.count("\n## ") == 2
    assert set(found["benchmarks"]) < set(BENCHMARKS)


def test_the_largest_batch_is_found_by_bisection():
    found = lab("alexnet", "k40c", 3 * 10**9, Scale())
    batches = range(64, 2048, 64)
    fitting = [b for b in batches if found.fits(b, "swap-all-naive")]
    assert found.largest(batches, "swap-all-naive") == fitting[-1]
    assert fitting == list(batches)[: len(fitting)]
