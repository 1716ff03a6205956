"""sweep: which budgets are swept, the figures of a sweep, and its plot."""

from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from outcore.cli.commands.sweep import _table
from outcore.compare import Compared, Comparison, read_budget
from outcore.errors import BudgetError, InfeasibleError, MissingPackageError, OptionValueError
from outcore.ir.hardware import Tier
from outcore.policies import floor, resolve
from outcore.presets import preset
from outcore.report import Report, style
from outcore.report.page.sweep import sweep_view
from outcore.sweep import BudgetRange, Sweep, check_plot, plot, sweep
from outcore.sweep.budgets import spaced
from tests.pure.building import TraceBuilder
from tests.pure.strategies import problems
from tests.pure.test_presets import comparison

generated = settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
POLICIES = ("keep-all", "swap-all{min_bytes=1B}", "search{min_bytes=1B,effort=0.01}")
SMALL = 64
"""Bytes of device memory on which nothing runs."""


def on_a_device_of(nbytes):
    """The small comparison on a machine with another device memory."""
    found = comparison()
    hardware = found.machine.hardware
    capacity = {**dict(hardware.capacity_bytes), Tier.DEVICE: nbytes}
    found.machine = replace(
        found.machine, hardware=replace(hardware, capacity_bytes=tuple(capacity.items()))
    )
    return found


# ---- which budgets ------------------------------------------------------------------------------


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.integers(2, 40))
def test_budgets_lie_evenly_between_both_ends(first, reach, steps):
    found = spaced(first, first + reach, steps)
    assert (found[0], found[-1]) == (first, first + reach)
    assert len(found) == min(steps, reach + 1)
    distances = [b - a for a, b in pairwise(found)]
    assert all(distance > 0 for distance in distances)
    assert max(distances, default=0) - min(distances, default=0) <= 1


def test_from_the_floor_to_the_peak_unless_told_otherwise():
    found = comparison()
    budgets = BudgetRange(steps=3).budgets(found)
    lowest, peak = floor(found.problem(1 << 62)).nbytes, found.in_core_peak_bytes
    assert budgets == (lowest, (lowest + peak) // 2, peak)


def test_ends_by_size_by_part_of_the_peak_and_by_word():
    found = comparison()
    peak = found.in_core_peak_bytes
    assert BudgetRange("50%", "100%", 2).budgets(found) == (peak // 2, peak)
    assert BudgetRange("7KiB", "16KiB", 2).budgets(found) == (7 * 1024, 16384)
    lowest = found.floor().floor.nbytes
    assert BudgetRange("floor", "floor", 5).budgets(found) == (lowest,)


def test_no_further_than_the_machine_goes():
    peak = comparison().in_core_peak_bytes
    found = on_a_device_of(peak - 1)
    assert BudgetRange().budgets(found)[-1] == peak - 1
    with pytest.raises(BudgetError, match="the machine has"):
        BudgetRange("floor", "100%").budgets(found)
    with pytest.raises(BudgetError, match=r"--from='1MiB'.*the machine has"):
        BudgetRange("1MiB").check(peak)


def test_a_machine_on_which_nothing_runs():
    with pytest.raises(InfeasibleError) as caught:
        BudgetRange().budgets(on_a_device_of(SMALL))
    assert caught.value.budget_bytes == SMALL
    assert caught.value.floor_bytes == comparison().floor().floor.nbytes


def test_ends_the_wrong_way_round():
    with pytest.raises(BudgetError, match=r"--from='8KiB'.*above the other end.*the floor is"):
        BudgetRange("8KiB", "7KiB").budgets(comparison())


@pytest.mark.parametrize("text", ["much", "ground", "10G", "120%", "0%"])
def test_an_end_that_cannot_be_read_is_refused_without_a_trace(text):
    with pytest.raises(BudgetError, match="--from"):
        BudgetRange(text).check(1 << 30)
    with pytest.raises(BudgetError, match="--to"):
        BudgetRange("floor", text).check(1 << 30)


def test_good_ends_pass():
    BudgetRange("1KiB", "100%").check(1 << 30)
    BudgetRange().check(1 << 30)


def test_a_budget_is_a_part_of_the_machine_or_of_what_is_named():
    assert read_budget("--budget", "50%", 1000) == 500
    assert read_budget("--budget", "50%", 1000, part_of=100) == 50
    with pytest.raises(BudgetError, match="the machine has 1000 B"):
        read_budget("--budget", "50%", 1000, part_of=4000)


# ---- the figures --------------------------------------------------------------------------------


def row(policy, budget, seconds=None, least=None):
    return Compared(
        policy=policy,
        budget_bytes=budget,
        feasible=seconds is not None,
        seconds=seconds,
        lower_bound_seconds=least,
    )


def by_hand():
    """Three policies under three budgets; in-core, a step takes 2 s and 30 bytes."""
    rows = (
        row("a", 10, None, None),
        row("b", 10, 8.0, None),
        row("c", 10, None, None),
        row("a", 20, 3.0, 2.5),
        row("b", 20, 5.0, 2.5),
        row("c", 20, None, 2.5),
        row("a", 30, 2.0, 2.0),
        row("b", 30, 2.0 * (1 + 1e-12), 2.0),
        row("c", 30, None, 2.0),
    )
    return Sweep(2.0, 30, 10, rows)


def test_rows_and_columns_by_hand():
    found = by_hand()
    assert found.budgets == (10, 20, 30)
    assert found.policies == ("a", "b", "c")
    assert found.slowdowns("a") == [None, 1.5, 1.0]
    assert found.slowdowns("c") == [None, None, None]
    assert found.bounds() == {20: 2.5, 30: 2.0}
    assert found.fastest() == {10: {"b"}, 20: {"a"}, 30: {"a", "b"}}
    assert found.cells[20, "b"].seconds == 5.0


def test_nothing_is_fastest_where_there_is_no_plan():
    assert Sweep(2.0, 30, 10, (row("a", 10),)).fastest() == {10: frozenset()}


def test_a_sweep_shows_what_each_policy_makes_of_each_budget():
    on = comparison()
    seen: list[Compared] = []
    budgets = BudgetRange(steps=3).budgets(on)
    found = sweep(on, budgets, POLICIES, watch=seen.append)
    assert found.budgets == budgets
    assert found.policies == POLICIES
    assert tuple(seen) == found.rows
    assert found.floor_bytes == budgets[0]
    for each in found.rows:
        (alone,) = on.rows([each.budget_bytes], [each.policy], bound=True)
        if each.policy != POLICIES[2]:
            assert alone.seconds == each.seconds
        assert alone.lower_bound_seconds == each.lower_bound_seconds
        if each.seconds is not None and each.lower_bound_seconds is not None:
            assert each.lower_bound_seconds <= each.seconds * (1 + 1e-9)
    *short, whole = found.slowdowns("keep-all")
    assert short == [None, None]
    assert whole == 1
    assert found.slowdowns(POLICIES[2])[0] is not None, "search has a plan at the floor"
    assert "keep-all" in found.fastest()[budgets[-1]]


@generated
@given(problem=problems(), steps=st.integers(2, 6))
def test_more_memory_never_makes_search_slower(problem, steps):
    assume(any(min(c.seconds for c in costs) for costs in problem.profile.costs))  # it takes time
    on = comparison()
    on.trace, on.profile, on.outside_bytes = problem.trace, problem.profile, problem.outside_bytes
    on.machine = replace(on.machine, hardware=problem.hardware)
    lowest = floor(on.problem(1 << 62)).nbytes
    budgets = spaced(lowest, 2 * lowest, steps)
    found = sweep(on, budgets, [POLICIES[2]], bound=False)
    times = [row.seconds for row in found.rows if row.seconds is not None]
    assert len(times) == len(budgets)
    assert times == sorted(times, reverse=True)
    assert all((row.peak_bytes or 0) <= row.budget_bytes for row in found.rows)


def test_the_smallest_budget_comes_first_and_each_once():
    on = comparison()
    low, _, high = BudgetRange(steps=3).budgets(on)
    found = tuple(on.rows([high, low, high], POLICIES[1:]))
    assert [(row.budget_bytes, row.policy) for row in found] == [
        *((low, policy) for policy in POLICIES[1:]),
        *((high, policy) for policy in POLICIES[1:]),
    ]
    assert all((row.peak_bytes or 0) <= row.budget_bytes for row in found)


def test_a_sweep_without_bounds():
    found = sweep(comparison(), [16384], ["keep-all"], bound=False)
    assert found.bounds() == {}


def test_what_is_proved_is_not_above_the_floor():
    on = comparison()
    assert 1 < on.proved_floor_bytes() <= on.floor().floor.nbytes


# ---- the plot -----------------------------------------------------------------------------------

matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="an extra")


@matplotlib
@pytest.mark.parametrize(
    ("name", "start"), [("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml")]
)
def test_a_plot_is_what_its_name_says(tmp_path, name, start):
    plot(by_hand(), "two\nlines", tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def drawn(found, tmp_path, monkeypatch):
    """The axes of the plot, and the words of its legend."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    kept = []
    save = Figure.savefig

    def keep(figure, *arguments, **options):
        kept.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    plot(found, "title (predicted)", tmp_path / "a.png")
    (figure,) = kept
    (legend,) = figure.legends
    return figure.axes[0], [text.get_text() for text in legend.get_texts()]


@matplotlib
def test_lines_have_gaps_and_all_policies_are_named(tmp_path, monkeypatch):
    axes, words = drawn(by_hand(), tmp_path, monkeypatch)
    lines = {line.get_label(): line for line in axes.lines}
    assert str(lines["a"].get_ydata().tolist()) == "[nan, 1.5, 1.0]"
    assert [gib * 2**30 for gib in lines["a"].get_xdata()] == [10, 20, 30]
    assert words == ["a", "b", "c: no plan", "below the lower bound", "floor", "in-core peak"]
    assert axes.get_title(loc="left") == "title (predicted)"
    low, high = axes.get_ylim()
    assert low < 1
    assert high > 4


@matplotlib
def test_the_bound_is_drawn_where_it_is_known(tmp_path, monkeypatch):
    axes, _ = drawn(by_hand(), tmp_path, monkeypatch)
    (area,) = axes.collections
    corners = area.get_paths()[0].vertices
    assert {round(x * 2**30) for x, _ in corners} == {20, 30}
    assert max(y for _, y in corners) == 1.25


@matplotlib
def test_little_to_draw(tmp_path, monkeypatch):
    """One budget far below the peak, no bound, times near each other."""
    found = Sweep(2.0, 3000, 10, (row("a", 10, 2.1), row("b", 10, 2.2)))
    axes, words = drawn(found, tmp_path, monkeypatch)
    assert words == ["a", "b", "floor"]
    assert axes.get_yscale() == "linear"
    nothing = Sweep(2.0, 3000, 10, (row("a", 10),))
    assert drawn(nothing, tmp_path, monkeypatch)[1] == ["a: no plan", "floor"]


def empty() -> Sweep:
    """A step that takes neither time nor memory in-core."""
    return Sweep(0.0, 0, 10, (row("a", 10, 0.0, 0.0), row("b", 10, None, 0.0)))


@matplotlib
def test_an_empty_step_is_drawn_without_what_it_would_be_compared_to(tmp_path, monkeypatch):
    axes, words = drawn(empty(), tmp_path, monkeypatch)
    assert words == ["a", "b: no plan", "floor"]
    assert not axes.child_axes


def test_tables_of_an_empty_step_have_no_slowdowns():
    found = empty()
    assert found.slowdowns("a") == [None]
    budget, *cells = (
        list(column.cells) for column in _table(found, ["a", "b"], bound=True).columns
    )
    assert budget == ["10 B"]
    assert ["-" in str(cell) for (cell,) in cells] == [False, True, False]
    view = sweep_view(found, Report("search", "planned", 10))
    assert view.table == (("10 B", "-", "-", "-"),)
    assert not view.bounded


def test_what_cannot_be_drawn_is_refused_before_anything_is_planned(tmp_path, monkeypatch):
    with pytest.raises(OptionValueError, match=r"\.png, \.pdf, \.svg"):
        check_plot(tmp_path / "a.jpg")
    with pytest.raises(OptionValueError, match="there is no folder"):
        check_plot(tmp_path / "none" / "a.png")
    monkeypatch.setattr(style, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install matplotlib"):
        check_plot(tmp_path / "a.png")


def test_a_step_without_ops_has_no_throughput():
    comparison = Comparison(TraceBuilder().trace([], ()), preset("h100"), 1)
    row = comparison.row(1 << 30, resolve("keep-all"))
    assert (row.seconds, row.items_per_second, row.relative_to_in_core) == (0.0, None, None)
