"""A watched loop as the subject of a report."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import Any

from loaderkit.diagnosis.stats import Stats
from loaderkit.diagnosis.watched.rules import diagnose_watched
from loaderkit.diagnosis.watched.stats import WatchedStats
from loaderkit.errors import ConfigError
from loaderkit.profile.build import ReportSubject
from loaderkit.profile.experiments.trial import untried
from loaderkit.profile.recording import ProfiledLoader
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import VerdictPart
from loaderkit.profile.watched.recorder import Recorder
from loaderkit.ranks.place import ranks_now


def watched_subject(recorder: Recorder, name: str) -> ProfiledLoader:
    """What a profile reads of it. No sample of it is known, so that none is named."""
    return ProfiledLoader(
        subject=lambda: _subject(recorder, name),
        stats=recorder.snapshot,
        series=recorder.series,
        watch=recorder.watch,
        record=lambda: None,
        recorded=list,
    )


def _subject(recorder: Recorder, name: str) -> ReportSubject:
    try:
        rank, world_size = ranks_now()
    except ConfigError:  # an environment that makes no sense is no matter here
        rank, world_size = 0, 1
    return ReportSubject(
        name=name,
        rank=rank,
        world_size=world_size,
        config=_described(recorder, name),
        verdict=lambda passed: _verdict(recorder, passed),
        slowest=lambda passed, begin_s: [],
        finished=partial(_finished, recorder),
        list_s=0.0,
        index_s=0.0,
    )


def _finished(recorder: Recorder, report: Report) -> Report:
    """Settings of another loader are not tried, and no patch of a YAML file."""
    found = untried(report, "a loop that trains is left as it is", is_simulated=False)
    return found.model_copy(update={"patch": None, "lines": recorder.line_times()})


def _verdict(recorder: Recorder, passed: Stats) -> VerdictPart:
    assert isinstance(passed, WatchedStats)
    verdict = diagnose_watched(replace(recorder.with_programs(passed), lines=recorder.line_times()))
    return VerdictPart(**verdict.to_dict(), settings=[*verdict.settings])


def _described(recorder: Recorder, name: str) -> dict[str, Any]:
    stats = recorder.snapshot()
    arguments = {} if stats.arguments is None else asdict(stats.arguments)
    return {"name": name, "watched": stats.kind, **arguments}
