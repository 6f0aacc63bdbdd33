"""The report as a page: in a browser it says what it should, makes no request, and runs nothing of the data's."""

from __future__ import annotations

import builtins
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Page, chromium, find_chromium

import loaderkit
from loaderkit import Pipeline
from loaderkit.engine.metrics.bottleneck_words import headline
from loaderkit.errors import ConfigError
from loaderkit.profile.render.charts import charts
from loaderkit.profile.render.html import to_html, why_no_html
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import Headroom, Measured, Rate, WhatIf

pytestmark = pytest.mark.matrix(1)

NASTY = ("<img src=x onerror=boom()>.jpg", "x<", "{{ 7 * 7 }} 'quoted\" & more.jpg", "<!--<script>boom().jpg")


def rate(samples_per_s: float) -> Rate:
    return Rate(samples_per_s=samples_per_s, interval_percent=3.0, seconds=4.0, num_batches=40)


def changes() -> list[WhatIf]:
    measured = Measured(samples_per_s=700, stall_percent=20, interval_percent=5, error_percent=8)
    one = WhatIf(
        name="<b>2 workers</b>", settings=[], samples_per_s=760, stall_percent=18, speedup=1.9, limit="cpus", can_run=True,
        measured=measured,
    )  # fmt: skip
    return [one, one.model_copy(update={"name": "a faster disk", "measured": None, "note": "a <note>"})]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Report:
    """Of a real loop over files whose names are markup."""
    folder = tmp_path_factory.mktemp("data")
    one = next(photos.rglob("*.jpg"))
    for name in NASTY:
        (folder / name).parent.mkdir(exist_ok=True)
        if name.endswith(".jpg"):
            shutil.copy(one, folder / name)
    (folder / NASTY[1]).mkdir()
    shutil.copy(one, folder / NASTY[1] / "script><script>boom().jpg")  # its path has an end tag in it
    pipeline = Pipeline.files(folder, include="**/*.jpg").read().decode().center_crop(16).batch(2)
    with loaderkit.build(pipeline) as loader, loader.profile(import_s=1.5) as profile:
        for _ in range(3):
            for _ in loader:
                pass
    headroom = Headroom(
        consumer=rate(900), warm=rate(500), cold=None, cold_note="no <cold> rate", fetch_percent=None,
        preprocess_percent=None, factor=0.56, summary="the pipeline makes 0.56 times what training takes",
    )  # fmt: skip
    found: Report = profile.result
    return found.model_copy(
        update={"name": "<i>name</i>", "headspace": headroom, "what_if": changes(), "model_error_percent": 2.0}
    )


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    try:
        find_chromium()
    except RuntimeError as error:
        pytest.skip(f"THE PAGE IS NOT TESTED: {error}")
    with chromium(tmp_path_factory.mktemp("chromium") / "profile") as page:
        yield page


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_it_shows_the_verdict_and_asks_no_network(
    report: Report, tab: Page, tmp_path: Path, width: int, dark: bool
) -> None:
    path = tmp_path / "report.html"
    path.write_text(to_html(report), encoding="utf-8")
    tab.requests.clear()
    tab.open(path, width=width, dark=dark)
    num_charts = len(charts(report))
    assert num_charts >= 3
    assert tab.wait_for(f"document.querySelectorAll('.chart svg').length == {num_charts}")
    assert tab.complaints == []
    assert set(tab.requests) == {path.resolve().as_uri()}

    text = tab.evaluate("document.body.innerText")
    verdict = report.verdict
    assert headline(verdict.stage, verdict.kind) in text
    for shown in (
        verdict.evidence,
        verdict.change,
        f"{report.stall.percent:.1f} %",
        "Throughput",
        "a <note>",
        "<i>name</i>",
    ):
        assert shown in text
    # The verdict and the key figures come before anything is scrolled, on the large screen; they are never cut off.
    boxes = "[...document.querySelectorAll('#verdict, #figures')].map(e => e.getBoundingClientRect().bottom)"
    assert width < 1280 or max(tab.evaluate(boxes)) <= 900
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    lightness = tab.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)")
    assert (max(lightness) < 60) == dark
    tab.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000


STORED = [
    path
    for path in sorted((Path(__file__).parents[3] / "profiles" / "results" / "reports").glob("*.json"))
    if json.loads(path.read_text()).get("kind") != "restore"  # which has no page
]


@pytest.mark.parametrize("stored", STORED, ids=lambda path: path.stem)
def test_on_a_phone_nothing_is_wider_than_the_screen(stored: Path, tab: Page, tmp_path: Path) -> None:
    report = Report.from_json(stored.read_bytes())
    many = {name: 12_345.6 * figure for name, figure in report.throughput.items()}
    for number, one in enumerate((report, report.model_copy(update={"throughput": many}))):
        path = tmp_path / f"{number}.html"
        path.write_text(to_html(one), encoding="utf-8")
        tab.open(path, width=390)
        assert tab.wait_for(f"document.querySelectorAll('.chart svg').length == {len(charts(one))}")
        boxes = "[...document.querySelectorAll('main, section, .verdict, .figure, h1, p, dt, dd, pre')]"
        assert tab.evaluate(f"Math.max(...{boxes}.map(box => box.getBoundingClientRect().right))") <= 390
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_names_of_samples_are_never_markup(report: Report, tab: Page, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(to_html(report), encoding="utf-8")
    tab.complaints.clear()
    tab.open(path)
    text = tab.evaluate("document.body.innerText")
    for item in report.slowest:
        assert item.key in text
    assert tab.evaluate("document.querySelectorAll('img, i:not([class]):not([style]), b b').length") == 0
    assert "49" not in [part.strip() for part in text.split("'quoted")]
    assert tab.complaints == []  # boom is not defined: whatever called it would have been heard


def test_a_chart_tells_more_under_the_mouse(report: Report, tab: Page, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(to_html(report), encoding="utf-8")
    tab.open(path, height=6000)
    bar = "document.querySelector('[data-chart=\"what-if\"] svg .mark-rect path')"
    for _ in range(100):
        tab.evaluate("new Promise(done => requestAnimationFrame(done))")
        if tab.evaluate(f"!!{bar}"):
            break
    x, y = tab.evaluate(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({bar}.getBoundingClientRect())")
    tab.hover(x, y)
    for _ in range(100):
        tab.evaluate("new Promise(done => requestAnimationFrame(done))")
        shown = tab.evaluate("(e => e && e.classList.contains('visible') ? e.innerText : '')"
                             "(document.getElementById('vg-tooltip-element'))")  # fmt: skip
        if shown:
            break
    assert "<b>2 workers</b>" in shown
    assert "760" in shown


def test_the_page_holds_all_it_needs(report: Report) -> None:
    page = to_html(report)
    assert not any(markup in page for markup in ("<script>boom", "<img src=x", "</script><script>boom", "<b>2 workers"))
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\';' in page
    assert len(page) < 2_000_000


def test_without_its_libraries_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name == "vl_convert":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert "pip install 'loaderkit[profile]'" in str(why_no_html())
    with pytest.raises(ConfigError, match="vl_convert"):
        to_html.__globals__["_libraries"]()
