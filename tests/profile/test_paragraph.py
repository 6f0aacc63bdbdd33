"""The paragraph to forward: what it says is what the report has in figures, everywhere that the report is shown."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from loaderkit.diagnosis.verdict import Setting
from loaderkit.profile.render.html import to_html
from loaderkit.profile.render.paragraph import paragraph
from loaderkit.profile.render.terminal import to_text
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import Rate, SettingsTrial
from profiles.reports import FOLDER

DATABASE = Report.from_json((FOLDER / "database.json").read_text())
TRAINING = Report.from_json((FOLDER / "imagenet-files-waits-for-nothing.json").read_text())


def trial(outcome: str, rng: random.Random, *settings: Setting, **more: Any) -> SettingsTrial:
    before, factor = rng.uniform(50, 90), rng.uniform(2, 5)
    rates = [
        Rate(samples_per_s=one, interval_percent=4.0, seconds=4.0, num_batches=40) for one in (before, factor * before)
    ]
    return SettingsTrial(
        settings=[*settings], outcome=outcome, before=rates[0], after=rates[1], speedup=factor, interval=0.11, num_pairs=7,
        num_faster=6, **more,
    )  # fmt: skip


def with_verdict(**update: Any) -> Report:
    return DATABASE.model_copy(update={"verdict": DATABASE.verdict.model_copy(update=update)})


WORKERS = Setting(key="prefetch.concurrency", before=2, value=8)
BATCHES = Setting(key="prefetch.batches", before=4, value=10)


def test_what_was_waited_for_how_sure_what_was_tried_and_what_it_costs(rng: random.Random) -> None:
    found = trial("faster", rng, WORKERS, extra_cpus=1.26, extra_bytes=37_000_000)
    report = with_verdict(kind="latency", stage="read", settings=[WORKERS], tried=found, confidence=0.87, check=None)
    text = report.summary
    assert found.before is not None
    assert found.after is not None
    for part in (
        f"waited for data {report.stall.percent:.1f} % of the time",
        f"longest for read ({report.verdict.percent:.1f} %): its workers wait for answers",
        "This is 87 % sure.",
        f"prefetch.concurrency: 8: tried: {found.before.samples_per_s:.4g} -> {found.after.samples_per_s:.4g} samples/s",
        "faster in 6 of 7 pairs",
        "It costs 6 more workers, 1.3 CPUs more, 37.00 MB of memory more.",
    ):
        assert part in text
    assert re.fullmatch(r"[A-Z].*\.", text)
    assert "\n" not in text
    assert " ".join(text.split()) in " ".join(to_text(report).split())
    page = re.sub(r"&#3[49];|&gt;|&lt;", "", to_html(report))
    assert re.sub(r"[\"'<>]", "", text) in page
    assert report.to_dict()["summary"] == text


def test_what_is_not_suggested_costs_nothing(rng: random.Random) -> None:
    found = trial("slower", rng, WORKERS)
    text = with_verdict(kind="lock", settings=[], tried=found, change="hold the lock for a shorter time").summary
    assert "slower: not suggested. To change instead: hold the lock for a shorter time." in text
    assert "cost" not in text


@pytest.mark.parametrize("before", [4, "auto", None])
def test_what_was_not_tried_costs_what_it_is(before: Any) -> None:
    setting = BATCHES.model_copy(update={"before": before})
    untried = SettingsTrial(settings=[setting], outcome="not tried", note="it trains", predicted=1.5)
    verdict = DATABASE.verdict.model_copy(update={"settings": [setting], "tried": untried})
    more = 6 if before == 4 else 10
    text = paragraph(verdict, DATABASE.stall, 10.0, 100.0, 2_000_000)
    assert "not tried: it trains; by simulation 1.50 times as fast" in text
    assert f"It costs up to {2 * more:.2f} MB of memory more." in text


def test_a_report_of_an_older_version_tried_nothing() -> None:
    assert "Nothing was tried; to change" in with_verdict(settings=[WORKERS], tried=None).summary
    assert "no setting to try" in with_verdict(settings=[], tried=None).summary


def test_without_a_setting_and_without_a_wait() -> None:
    text = with_verdict(settings=[], tried=None, change="a cheaper call", kind="computing", or_kind="gil").summary
    assert "Nothing was tried, as there is no setting to try; to change: a cheaper call." in text
    assert "or its workers wait for Python's GIL" in text
    assert "the figures do not tell which" in text
    for kind, said in (("unknown", "Too few batches to say"), ("failed", "No batch came")):
        stage = "read" if kind == "unknown" else None
        assert said in with_verdict(stage=stage, kind=kind, settings=[], causes=[]).summary
    assert TRAINING.summary.endswith("loading does not hold it up. This is 95 % sure.")
