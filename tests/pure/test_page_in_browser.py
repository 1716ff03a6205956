"""The HTML page of a report in a real browser, from a file, without a network.

Skipped if Chromium or playwright is missing; with OUTCORE_REQUIRE_BROWSER=1 the tests fail instead.
If OUTCORE_SCREENSHOTS names a folder, screenshots are saved there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from outcore.report import Report
from outcore.report.page.words import spell_budget
from outcore.report.tracks import slices
from tests.pure.reports import long_report, measured_report, two_graphs
from tests.pure.test_page import swept

pytestmark = pytest.mark.xdist_group("browser")  # starts one browser, not one per process

REQUIRED = os.environ.get("OUTCORE_REQUIRE_BROWSER") == "1"
ARGUMENTS = [
    "--no-sandbox",  # containers run as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 120_000
"""A long timeout, because other tests keep the machine busy."""
PHONE, DESK = {"width": 400, "height": 800}, {"width": 1200, "height": 900}


def missing(reason: str) -> None:
    if REQUIRED:
        pytest.fail(f"OUTCORE_REQUIRE_BROWSER=1, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    executable = which("chromium") or which("chromium-browser")
    if executable is None:
        missing("there is no Chromium on this machine (Debian: apt-get install chromium)")
    try:
        from playwright.sync_api import sync_playwright  # noqa: PLC0415 - may be absent
    except ImportError:
        missing('playwright is not installed: pip install "outcore[test]"')
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=executable, headless=True, args=ARGUMENTS, timeout=PATIENCE_MS
        )
        yield started
        started.close()


class Opened:
    """A page in the browser, with its requests and its console messages and errors."""

    def __init__(self, browser: Any, file: Path, **options: Any) -> None:
        self.context = browser.new_context(offline=True, **options)
        self.context.set_default_timeout(PATIENCE_MS)
        self.tab = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.tab.on("console", lambda message: self.complaints.append(message.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(file.as_uri())

    def close(self) -> None:
        """Assert that there were no messages, and no request except for the file itself."""
        urls = [url for url in self.requests if not url.startswith("data:")]
        self.context.close()
        assert self.complaints == []
        assert len(urls) == 1, urls
        assert urls[0].startswith("file:")


REPORTS = {
    "measured": lambda: replace(measured_report(), sweep=swept(), lower_bound_seconds=0.004),
    "two-graphs": two_graphs,
    "long": lambda: long_report(1000),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, tuple[Report, Path]]:
    folder = tmp_path_factory.mktemp("pages")
    made = {}
    for name, make in REPORTS.items():
        found, file = make(), folder / f"{name}.html"
        found.to_html(file)
        made[name] = found, file
    return made


@pytest.mark.parametrize(
    ("name", "scheme", "size"),
    [
        *(("measured", scheme, size) for scheme in ("light", "dark") for size in (DESK, PHONE)),
        ("two-graphs", "light", DESK),
        ("two-graphs", "dark", PHONE),
        ("long", "light", PHONE),
        ("long", "dark", DESK),
    ],
)
def test_a_page_opens_and_shows_everything(browser, pages, name, scheme, size):
    found, file = pages[name]
    opened = Opened(browser, file, color_scheme=scheme, viewport=size)
    tab = opened.tab
    timelines = [(step, timeline) for step in found.steps for timeline in step.timelines]
    shown = tab.evaluate(
        "[...document.querySelectorAll('.timeline')].map(t =>"
        " [...t.querySelectorAll('rect')].reduce((n, r) => n + Number(r.dataset.spans ?? 0), 0))"
    )
    assert shown == [len(slices(step, timeline)) for step, timeline in timelines]
    boxes = tab.evaluate(
        "[...document.querySelectorAll('.track rect')].map(r => r.getBoundingClientRect())"
        ".map(b => [b.width, b.height])"
    )
    assert all(width > 0 and height > 10 for width, height in boxes)
    for line in tab.locator("figure[data-tier=device]").all():
        box, label = line.locator(".budget-line").bounding_box(), line.locator(".budget-label")
        assert box["width"] > 0.7 * size["width"], "the budget line crosses the chart"
        assert label.is_visible()
        assert label.inner_text() == f"budget {spell_budget(found.budget_bytes)}"
        near = label.bounding_box()
        assert abs(near["y"] + near["height"] - box["y"]) < 8, "it stands on its line"
    for chart in tab.locator(".chart").all():
        frame = chart.bounding_box()
        for label in chart.locator(".y-tick, .line-label").all():
            at = label.bounding_box()
            assert at["y"] >= frame["y"] - 1, "labels are inside"
            assert at["y"] + at["height"] <= frame["y"] + frame["height"] + 4
    narrow = tab.evaluate(
        "[...document.querySelectorAll('table.cards')].map(t => t.getBoundingClientRect().width)"
    )
    assert all(width < size["width"] for width in narrow), "rows are cards on a phone"
    wide = tab.evaluate("document.documentElement.scrollWidth")
    assert wide <= size["width"], "a phone need not scroll sideways"
    keep_picture(tab, f"{name}-{scheme}-{size['width']}")
    opened.close()


def test_pointing_at_a_box_says_what_it_is(browser, pages):
    opened = Opened(browser, pages["measured"][1], viewport=DESK)
    tab = opened.tab
    first = tab.locator(".track rect[data-spans]").first
    title = first.locator("title").evaluate("t => t.textContent")
    assert title.startswith("op ")
    assert tab.locator("#detail").inner_text() == "no box chosen"
    first.hover()
    assert tab.locator("#detail").inner_text() == title
    opened.close()


def test_a_tap_does_too(browser, pages):
    opened = Opened(browser, pages["measured"][1], viewport=PHONE, has_touch=True)
    first = opened.tab.locator(".track rect[data-spans]").first
    first.tap()
    title = first.locator("title").evaluate("t => t.textContent")
    assert opened.tab.locator("#detail").inner_text() == title
    opened.close()


def test_columns_sort_and_the_timeline_zooms(browser, pages):
    opened = Opened(browser, pages["long"][1], viewport=DESK)
    tab = opened.tab
    head = tab.locator("table.sortable th", has_text="size").first
    for order, sign in (("descending", -1), ("ascending", 1)):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == order
        sizes = tab.evaluate(
            "[...document.querySelectorAll('table.sortable tbody tr')]"
            ".map(r => Number(r.cells[1].dataset.value))"
        )
        assert sizes == sorted(sizes, key=lambda nbytes: sign * nbytes)
    before = tab.locator(".track").first.bounding_box()["width"]
    tab.locator("#zoom").fill("8")
    assert tab.locator(".track").first.bounding_box()["width"] == pytest.approx(
        8 * before, rel=0.01
    )
    assert tab.evaluate("document.documentElement.scrollWidth") <= DESK["width"]
    opened.close()


def test_without_javascript_all_is_there(browser, pages):
    opened = Opened(browser, pages["measured"][1], java_script_enabled=False)
    assert opened.tab.locator("h1").inner_text().startswith("Fits in 8 KiB")
    assert opened.tab.locator(".track rect").count() > 0
    opened.close()


def keep_picture(tab: Any, name: str) -> None:
    folder = os.environ.get("OUTCORE_SCREENSHOTS")
    if folder:
        tab.screenshot(path=Path(folder) / f"{name}.png", full_page=True)
