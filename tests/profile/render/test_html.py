"""The report as a page: in a browser it says what it should, makes no request, and runs nothing of the data's."""

from __future__ import annotations

import builtins
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Page, chromium

import loaderkit
from loaderkit import Pipeline
from loaderkit.engine.metrics.nodes.ledger import NodeLedger
from loaderkit.errors import ConfigError
from loaderkit.profile.render.charts import charts
from loaderkit.profile.render.html import to_html, why_no_html
from loaderkit.profile.render.terminal import to_text
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import Headroom, Measured, NodeRow, Rate, SourceRow, WhatIf

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
    with chromium(tmp_path_factory.mktemp("chromium") / "profile") as page:
        yield page


@pytest.mark.integration
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
    assert verdict.headline in text
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


@pytest.mark.integration
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


@pytest.mark.integration
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


def source_row(name: str, **more: Any) -> SourceRow:
    """One of several sources that has all there is to show."""
    known: dict[str, Any] = {
        "weight": 0.3, "share": 0.25, "share_of": "samples", "num_samples": 500_123, "num_tokens": None, "samples_per_s": 612.5,
        "num_items": 500_200, "num_bytes": 25_000_000, "bytes_per_s": 31.4e6, "read_s": 812.0, "stages_s": 0.004,
        "cpu_s": 3.0, "delayed_s": 0.5, "waiting_s": 808.5, "stall_s": 71.0, "stall_percent": 64.2, "num_bad": 7,
        "num_dropped": 41, "num_skipped": 6, "num_replaced": 0, "num_passes": 1.257, "is_used_up": False,
    }  # fmt: skip
    return SourceRow(name=name, **{**known, **more})


@pytest.mark.integration
@pytest.mark.parametrize("width", [390, 1280])
def test_sources_have_a_table(report: Report, tab: Page, tmp_path: Path, width: int) -> None:
    rows = [source_row("web"), source_row("<b>x</b>", num_passes=2.0, is_used_up=True, num_bad=0)]
    verdict = report.verdict.model_copy(update={"source": "web: 80 % of the wait, <with> 25 % of the samples"})
    mixed = report.model_copy(update={"sources": rows, "verdict": verdict})
    (path := tmp_path / "report.html").write_text(to_html(mixed), encoding="utf-8")
    tab.complaints.clear()
    tab.open(path, width=width)
    assert verdict.source in tab.evaluate("document.querySelector('#verdict').innerText")
    tables = (
        "[...document.querySelectorAll('#sources table')].map(table => [...table.rows].map(row => "
        "[...row.cells].map(cell => cell.innerText)))"
    )
    given, times = tab.evaluate(tables)
    assert dict(zip(given[0], given[1], strict=True)) == {
        "source": "web", "samples": "500123", "share": "25.0 %", "weight": "30.0 %", "per s": "612", "MB/s": "31.4",
        "bad": "7", "dropped": "41", "skipped": "6", "replaced": "", "passes": "1.26",
    }  # fmt: skip
    assert (given[2][0], given[2][-1]) == ("<b>x</b>", "2.00, used up")
    assert dict(zip(times[0], times[1], strict=True)) == {
        "source": "web", "read": "812 s", "own stages": "4 ms", "cpu": "3 s", "waiting": "808 s", "late": "500 ms",
        "loop waited": "71 s, 64.2 %",
    }  # fmt: skip
    cut_off = "[...document.querySelectorAll('#sources .scroll')].some(box => box.scrollWidth > box.clientWidth)"
    assert width < 1280 or not tab.evaluate(cut_off)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.complaints == []
    packed = mixed.model_copy(update={"sources": [source_row("web", num_tokens=12_345)]})
    path.write_text(to_html(packed), encoding="utf-8")
    tab.open(path, width=width)
    head, web = tab.evaluate(tables)[0]
    assert (head[1:3], web[1:3]) == (["samples", "tokens"], ["500123", "12345"])
    tab.screenshot(tmp_path / "sources.png")


@pytest.mark.integration
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


@pytest.mark.integration
@pytest.mark.parametrize("width", [390, 1280])
def test_nodes_have_a_table_where_there_are_several(report: Report, tab: Page, tmp_path: Path, width: int) -> None:
    assert report.nodes == []
    assert 'id="nodes"' not in to_html(report)
    ledger = NodeLedger("10.0.0.1")
    ledger.placed("10.0.0.1", 4.0)
    for number in range(4):
        ledger.arrived("<b>far</b>", 5_000_000, number, number + 0.25)
    ledger.restarted("<b>far</b>")
    nodes = ledger.stats([("10.0.0.1", 3.0), ("<b>far</b>", 12.0), ("<b>far</b>", 8.0)])
    several = report.model_copy(update={"nodes": [NodeRow(**row) for row in nodes.to_dicts(10.0)]})
    assert Report.from_json(several.to_json()).nodes == several.nodes
    (path := tmp_path / "report.html").write_text(to_html(several), encoding="utf-8")
    tab.complaints.clear()
    tab.open(path, width=width)
    rows = "[...document.querySelector('#nodes table').rows].map(row => [...row.cells].map(cell => cell.innerText))"
    titles, here, far = tab.evaluate(rows)
    assert dict(zip(titles, here, strict=True)) == {
        "node": "10.0.0.1 (training)", "workers": "1", "cpu": "0.30 of 4", "batches": "0", "MB/s": "", "on the way": "",
        "a batch": "", "restarts": "",
    }  # fmt: skip
    assert dict(zip(titles, far, strict=True)) == {
        "node": "<b>far</b>", "workers": "2", "cpu": "2.00", "batches": "4", "MB/s": "2", "on the way": "10.0 %",
        "a batch": "250 ms", "restarts": "1",
    }  # fmt: skip
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.complaints == []
    table = to_text(several).partition("\nNodes\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split() for line in table[1:]] == [
        ["10.0.0.1", "(training)", "1", "0.30", "of", "4", "0"],
        ["<b>far</b>", "2", "2.00", "4", "2", "10", "%", "250ms", "1"],
    ]
