"""The report's charts as Vega-Lite descriptions: plain values, drawn as SVG by the JavaScript that the page carries.

Colours are of middle lightness, readable on light and on dark; texts and lines take the page's colour.
Names from the data are values, never field names or expressions, so they are shown as they are, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from statistics import fmean
from typing import Any

from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import Step, WhatIf

Spec = dict[str, Any]

_MOST_BARS = 240  # of the steps: a phone has about as many pixels
_LEAST_S = 0.25  # of a point of the speed
_BAR_HEIGHT, _AXIS_HEIGHT = 26, 70  # in pixels
_COMPUTE, _STALL = "#2a9d8f", "#e0643c"
_SLOT_COLOURS = {
    "cpu": "#2a9d8f", "i/o": "#4a8fd9", "gil": "#b05fc4", "late": "#d65a7e",
    "starved": "#c9a227", "blocked": "#8a93a0", "idle": "#b9bfc7",
}  # fmt: skip
_CAUSE_COLOURS = ("#e0643c", "#4a8fd9", "#2a9d8f", "#c9a227", "#b05fc4", "#d65a7e", "#7a9a3a", "#8a93a0")

# Named, not inherited: room is made for texts by measuring them, in this font.
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif'
CONFIG: Spec = {
    "background": None,
    "font": FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "currentColor", "titleColor": "currentColor", "titleFontWeight": "normal", "domainColor": "#8886",
        "tickColor": "#8886", "gridColor": "#8883", "labelFontSize": 12, "titleFontSize": 12, "labelLimit": 170,
        "labelOverlap": True, "tickCount": 6,
    },
}  # fmt: skip


def charts(report: Report) -> dict[str, Spec]:
    """The charts that the report has data for, by name."""
    specs = {
        "steps": _steps(report),
        "waits": _waits(report),
        "speed": _speed(report),
        "slots": _slots(report),
        "queues": _queues(report),
        "what-if": _what_if(report.what_if, report.throughput["samples_per_s"]),
    }
    return {name: spec for name, spec in specs.items() if spec is not None}


def legend(spec: Spec) -> list[tuple[str, str]]:
    """(meaning, colour) of a chart's colours, for the page, which can break the legend into lines where a chart cannot."""
    scale = spec.get("encoding", {}).get("color", {}).get("scale", {"domain": [], "range": []})
    return list(zip(scale["domain"], scale["range"], strict=True))


# --------------------------------------------------------------------------------------------------- over time


def _steps(report: Report) -> Spec | None:
    rows = list(_binned(report.steps.steps))
    if len(rows) < 2:
        return None
    shared: Spec = {"x": _time(), "x2": {"field": "until"}}
    tooltip = [
        _hover("step", "step", None), _hover("at", "at, s", ".2f"), _hover("compute", "computing, ms", ".1f"),
        _hover("stall", "waiting, ms", ".1f"), _hover("most", "longest wait, ms", ".1f"),
    ]  # fmt: skip
    parts = {"computing": ("zero", "compute", _COMPUTE), "waiting for a batch": ("compute", "whole", _STALL)}
    layers = [
        {
            "mark": {"type": "rect", "color": colour},
            "encoding": {
                **shared,
                "y": {"field": low, "type": "quantitative", "title": "ms a step"},
                "y2": {"field": high},
                "tooltip": tooltip,
            },
        }
        for low, high, colour in parts.values()
    ]
    return _chart(rows, layer=layers, height=190)


def _binned(steps: Sequence[Step]) -> Iterator[Spec]:
    """Neighbouring steps averaged, at most 240 bars."""
    size = -(-len(steps) // _MOST_BARS) or 1
    for begin in range(0, len(steps), size):
        some = steps[begin : begin + size]
        compute, stall = (
            1e3 * sum(values) / len(some) for values in zip(*((s.compute_s, s.stall_s) for s in some), strict=True)
        )
        last = some[-1]
        yield {
            "step": f"{begin}" if size == 1 else f"{begin} to {begin + len(some) - 1}",
            "at": some[0].at_s,
            "until": last.at_s + last.compute_s + last.stall_s,
            "zero": 0,
            "compute": compute,
            "stall": stall,
            "whole": compute + stall,
            "most": 1e3 * max(step.stall_s for step in some),
        }


def _waits(report: Report) -> Spec | None:
    causes = [cause for cause, seconds in report.stall.by_stage.items() if seconds > 0.005 * report.stall.total_s]
    rows = [
        {"at": point["at_s"], "cause": cause, "n": n, "percent": 100.0 * point["stall"].get(cause, 0.0)}
        for point in report.series
        for n, cause in enumerate(causes)
    ]
    if len(report.series) < 3 or not causes:
        return None
    return _chart(
        rows,
        mark={"type": "area", "interpolate": "step-before"},
        encoding={
            "x": _time(),
            "y": {"field": "percent", "type": "quantitative", "title": "waiting, % of the time", "stack": "zero"},
            "color": _colour("cause", dict(zip(causes, cycle(_CAUSE_COLOURS), strict=False))),
            "order": {"field": "n"},
            "tooltip": [
                _hover("cause", "waited for", None),
                _hover("percent", "%", ".1f"),
                _hover("at", "at, s", ".2f"),
            ],
        },
    )


def _speed(report: Report) -> Spec | None:
    """Samples by the time between batches that came, not by fixed intervals: one in which no batch came is no standstill."""
    rows = list(_speeds(report))
    if len(rows) < 3:
        return None
    return _chart(
        rows,
        mark={"type": "line", "color": _COMPUTE, "point": {"size": 24, "color": _COMPUTE}},
        encoding={
            "x": _time(),
            "y": {"field": "speed", "type": "quantitative", "title": "samples/s"},
            "tooltip": [
                _hover("at", "at, s", ".2f"), _hover("speed", "samples/s", ",.0f"), _hover("mb", "MB/s", ".3~g"),
                _hover("cpus", "CPUs busy", ".2f"),
            ],
        },
    )  # fmt: skip


def _speeds(report: Report) -> Iterator[Spec]:
    """The speed of neighbouring steps that take a quarter of a second together, or more where that would be too many points."""
    each = report.num_samples / max(report.num_batches, 1)
    steps = report.steps.steps
    least_s = max(_LEAST_S, sum(step.compute_s + step.stall_s for step in steps) / _MOST_BARS)
    begin_s, seconds, num = steps[0].at_s if steps else 0.0, 0.0, 0
    for step in steps:
        seconds, num = seconds + step.compute_s + step.stall_s, num + 1
        if seconds < least_s:
            continue
        end_s = step.at_s + step.compute_s + step.stall_s
        during = [one for one in report.series if one["at_s"] > begin_s and one["at_s"] - one["seconds"] < end_s]
        yield {
            "at": end_s,
            "speed": each * num / seconds,
            "mb": fmean(one["bytes_per_s"] for one in during) / 1e6 if during else None,
            "cpus": fmean(one["cpus"] for one in during) if during else None,
        }
        begin_s, seconds, num = end_s, 0.0, 0


def _queues(report: Report) -> Spec | None:
    names = [stage.name for stage in report.stages if stage.queued_max]
    rows = [
        {"at": point["at_s"], "what": f"chunks for {name}", "count": point["queued"].get(name, 0)}
        for point in report.series
        for name in names
    ]
    rows += [{"at": point["at_s"], "what": "batches ready", "count": point["ready"]} for point in report.series]
    if len(report.series) < 3:
        return None
    shown = ["batches ready", *(f"chunks for {name}" for name in names)]
    return _chart(
        rows,
        mark={"type": "line", "interpolate": "step-after", "strokeWidth": 2},
        encoding={
            "x": _time(),
            "y": {"field": "count", "type": "quantitative", "title": "waiting", "axis": {"tickMinStep": 1}},
            "color": _colour("what", dict(zip(shown, cycle(("#2a9d8f", *_CAUSE_COLOURS)), strict=False))),
            "tooltip": [_hover("what", "what", None), _hover("count", "how many", "d"), _hover("at", "at, s", ".2f")],
        },
    )


# ------------------------------------------------------------------------------------------------ by stage, by change


def _slots(report: Report) -> Spec | None:
    pools: dict[int, float] = {}
    for row in report.stages:
        pools[row.pool] = pools.get(row.pool, 0.0) + row.slot_s
    rows = []
    for row in report.stages:
        whole_s = max(pools[row.pool], 1e-9)
        times = (row.cpu_s, row.io_s, row.gil_s, row.delayed_s, row.starved_s, row.blocked_s, row.idle_s)
        for number, (name, seconds) in enumerate(zip(_SLOT_COLOURS, times, strict=True)):
            if seconds > 0:
                percent = 100.0 * seconds / whole_s
                rows.append({"stage": row.name, "what": name, "n": number, "percent": percent, "seconds": seconds})
    if not rows:
        return None
    shown = {name: colour for name, colour in _SLOT_COLOURS.items() if any(row["what"] == name for row in rows)}
    return _chart(
        rows,
        height=_BAR_HEIGHT * len(report.stages) + _AXIS_HEIGHT,
        mark={"type": "bar"},
        encoding={
            "y": {"field": "stage", "type": "nominal", "title": None, "sort": [row.name for row in report.stages]},
            "x": {"field": "percent", "type": "quantitative", "title": "% of the time of its workers", "stack": "zero",
                  "scale": {"domain": [0, 100]}},
            "color": _colour("what", shown),
            "order": {"field": "n"},
            "tooltip": [
                _hover("stage", "stage", None), _hover("what", "doing", None), _hover("percent", "% of its workers", ".1f"),
                _hover("seconds", "s", ".2f"),
            ],
        },
    )  # fmt: skip


def _what_if(changes: Sequence[WhatIf], now_per_s: float) -> Spec | None:
    if not changes:
        return None
    rows = []
    for change in changes:
        row: Spec = {
            "change": change.name, "predicted": change.samples_per_s, "stall": change.stall_percent, "limit": change.limit,
        }  # fmt: skip
        if (measured := change.measured) is not None:
            # The speed-up was measured against the pipeline at that time, whose rate may differ from the loop's.
            rate = measured.samples_per_s if measured.speedup is None else measured.speedup * now_per_s
            half = rate * measured.interval_percent / 100
            row |= {"measured": rate, "low": max(0.0, rate - half), "high": rate + half}
        rows.append(row)
    y = {"field": "change", "type": "nominal", "title": None, "sort": [change.name for change in changes]}
    x = {"type": "quantitative", "title": "samples/s"}
    tooltip = [
        _hover("change", "change", None), _hover("predicted", "predicted samples/s", ",.0f"),
        _hover("measured", "found samples/s", ",.0f"), _hover("stall", "waiting then, %", ".0f"),
        _hover("limit", "limit then", None),
    ]  # fmt: skip
    return _chart(
        rows,
        height=_BAR_HEIGHT * len(rows) + _AXIS_HEIGHT,
        layer=[
            {
                "mark": {"type": "bar", "color": "#4a8fd9", "height": 14},
                "encoding": {"y": y, "x": {"field": "predicted", **x}, "tooltip": tooltip},
            },
            {
                "transform": [{"filter": "isValid(datum.measured)"}],
                "mark": {"type": "rule", "color": "currentColor", "strokeWidth": 2},
                "encoding": {"y": y, "x": {"field": "low", **x}, "x2": {"field": "high"}, "tooltip": tooltip},
            },
            {
                "transform": [{"filter": "isValid(datum.measured)"}],
                "mark": {"type": "point", "filled": True, "size": 70, "color": _STALL, "opacity": 1},
                "encoding": {"y": y, "x": {"field": "measured", **x}, "tooltip": tooltip},
            },
            {
                "data": {"values": [{"now": now_per_s}]},
                "mark": {"type": "rule", "color": "currentColor", "strokeDash": [4, 4]},
                "encoding": {"x": {"field": "now", **x}, "tooltip": [_hover("now", "now, samples/s", ",.0f")]},
            },
        ],
    )


# ---------------------------------------------------------------------------------------------------------- parts


def _chart(rows: Iterable[Mapping[str, Any]], *, height: int = 190, **more: Any) -> Spec:
    return {
        "width": "container",
        "height": height,
        "autosize": {"type": "fit", "contains": "padding"},
        "data": {"values": list(rows)},
        "config": CONFIG,
        **more,
    }


def _time() -> Spec:
    return {
        "field": "at",
        "type": "quantitative",
        "title": "seconds since the report begins",
        "axis": {"grid": False},
        "scale": {"nice": False},
    }


def _colour(field: str, colours: Mapping[str, str]) -> Spec:
    scale = {"domain": list(colours), "range": list(colours.values())}
    return {"field": field, "type": "nominal", "scale": scale, "legend": None}


def _hover(field: str, title: str, form: str | None) -> Spec:
    if form is None:
        return {"field": field, "type": "nominal", "title": title}
    return {"field": field, "type": "quantitative", "title": title, "format": form}
