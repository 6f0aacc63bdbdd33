"""The trace of a real loop: by the format's rules, workers do one thing at a time, and arrows lead from read to delivery."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import loaderkit
from loaderkit import Pipeline
from loaderkit.engine.metrics.trace import Lane, joined, new_entries, num_entries, pages_of
from loaderkit.engine.metrics.worker_clock import WorkerClock, WorkerStates
from loaderkit.profile.recording import Profile

Event = dict[str, Any]

# The parts of the Trace Event Format (Google, "Trace Event Format", object form) that are used here.
_PLACE = {"pid": {"type": "integer"}, "tid": {"type": "integer"}, "name": {"type": "string", "minLength": 1}}
_TIME = {"type": "number", "minimum": 0}


def _event(phase: str, required: list[str], **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["ph", "pid", "tid", "name", *required],
        "properties": {"ph": {"const": phase}, **_PLACE, **more},
        "additionalProperties": False,
    }


_FLOW = {"ts": _TIME, "cat": {"type": "string"}, "id": {"type": "integer"}}
SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    _event("X", ["ts", "dur", "cat"], ts=_TIME, dur=_TIME, cat={"type": "string"}, args={"type": "object"}),
                    _event("M", ["args"], args={"type": "object", "minProperties": 1}),
                    _event(
                        "C", ["ts", "args"], ts=_TIME,
                        args={"type": "object", "minProperties": 1, "additionalProperties": {"type": "number"}},
                    ),
                    _event("s", ["ts", "id", "cat"], **_FLOW),
                    _event("t", ["ts", "id", "cat"], **_FLOW),
                    _event("f", ["ts", "id", "cat", "bp"], bp={"const": "e"}, **_FLOW),
                ]
            },
        },
    },
}  # fmt: skip


def traced(pipeline: Pipeline, epochs: int = 2, **overrides: Any) -> Profile:
    with (
        loaderkit.build(pipeline, overrides=overrides) as loader,
        loader.profile(trace=True) as report,
    ):
        for _ in range(epochs):
            for batch in loader:
                batch["image"].float().sum()
    return report


def pictures(photos: Path) -> Pipeline:
    return (
        Pipeline.files(photos, include="**/*.jpg", label="parent").read().decode().center_crop(16).batch(4).normalize()
    )


def by_track(events: list[Event], *phases: str) -> dict[tuple[int, int], list[Event]]:
    found: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in phases:
            found[event["pid"], event["tid"]].append(event)
    return found


def enclosing(slices: list[Event], ts: float) -> Event:
    """In whole ns, as those count that read the file."""
    return next(s for s in slices if ns(s["ts"]) <= ns(ts) < ns(s["ts"]) + ns(s["dur"]))


def ns(us: float) -> int:
    return round(1000 * us)


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "overrides",
    [
        {"prefetch.executor": "inline"},
        {"prefetch.executor": "thread"},
        {"prefetch.executor": "thread", "stages.read.workers": 2, "stages.decode.workers": 1},
        {"prefetch.executor": "process"},
        {"prefetch.executor": "process", "prefetch.processes": 2},
    ],
    ids=["inline", "thread", "two-pools", "process", "two-processes"],
)
def test_a_trace_by_the_rules(photos: Path, overrides: dict[str, Any]) -> None:
    report = traced(pictures(photos).epochs(2), **overrides)  # so that nothing is read ahead after the last batch
    trace = json.loads(report.trace_json())
    jsonschema.Draft202012Validator(SCHEMA).validate(trace)
    events: list[Event] = trace["traceEvents"]
    assert [e.get("ts", -1) for e in events] == sorted(e.get("ts", -1) for e in events)

    slices = by_track(events, "X")
    for some in slices.values():  # a worker does one thing at a time
        for one, other in pairwise(some):
            assert ns(one["ts"]) + ns(one["dur"]) <= ns(other["ts"])
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(slices) <= set(names)
    assert len({pid for pid, _ in names}) == 1 + overrides.get(
        "prefetch.processes", overrides["prefetch.executor"] == "process"
    )

    loop = next(some for place, some in slices.items() if names[place] == "the loop")
    waits = [event for event in loop if event["name"] == "wait"]
    assert len(waits) == report.num_batches == 30
    assert sum(wait["args"]["samples"] for wait in waits) == report.num_samples
    assert sum(wait["dur"] for wait in waits) / 1e6 == pytest.approx(report.steps.stall_s, rel=1e-3, abs=1e-4)
    assert [e["name"] for e in loop if e["name"].startswith("step")].count("step") == 28

    check_arrows(events, slices, loop)
    for stage in report.stages:  # the worker clocks say the same
        seconds = sum(e["dur"] for some in slices.values() for e in some if e["name"] == stage.name) / 1e6
        assert seconds == pytest.approx(stage.busy_s, rel=0.15, abs=0.02), stage.name


def check_arrows(events: list[Event], slices: dict[tuple[int, int], list[Event]], loop: list[Event]) -> None:
    """Every delivered chunk has one, from its `read` to the wait for its batch, forward in time."""
    flows: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    slots: dict[tuple[int, int], int] = defaultdict(int)
    for way in flows.values():
        assert [e["ph"] for e in way] == ["s", *("t" for _ in way[2:]), "f"]
        begin = enclosing(slices[way[0]["pid"], way[0]["tid"]], way[0]["ts"])
        end = enclosing(loop, way[-1]["ts"])
        assert (begin["name"], end["name"]) == ("read", "wait")
        batch = (begin["args"]["epoch"], begin["args"]["batch_ends_at"])
        assert batch == (end["args"]["epoch"], end["args"]["batch_ends_at"])
        low, _, high = begin["args"]["slots"].partition(" to ")
        slots[batch] += int(high) - int(low) + 1
        for hop in way[1:-1]:
            piece = enclosing(slices[hop["pid"], hop["tid"]], hop["ts"])
            assert (piece["args"]["epoch"], piece["args"]["batch_ends_at"]) == batch
    assert len(slots) == 30
    assert set(slots.values()) == {4}  # no sample is without its arrow


def test_two_pools_hand_chunks_over(photos: Path) -> None:
    report = traced(pictures(photos), 1, **{"stages.read.workers": 2, "stages.decode.workers": 1})
    events = json.loads(report.trace_json())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    hops = {names[e["pid"], e["tid"]].split()[0] for e in events if e["ph"] == "t"}
    begins = {names[e["pid"], e["tid"]].split()[0] for e in events if e["ph"] == "s"}
    assert begins == {"read"}
    assert any(name.startswith("decode") for name in hops)


def test_an_error_in_mid_epoch_leaves_what_was_seen(photos: Path) -> None:
    with loaderkit.build(pictures(photos)) as loader:
        report = loader.profile(trace=True)
        with pytest.raises(ZeroDivisionError), report:
            for number, _ in enumerate(loader):
                if number == 5:
                    raise ZeroDivisionError
    assert report.partial
    events = json.loads(report.trace_json())["traceEvents"]
    assert sum(event["name"] == "wait" for event in events) == 6


def test_without_asking_nothing_is_recorded(photos: Path, tmp_path: Path) -> None:
    with loaderkit.build(pictures(photos)) as loader:
        with loader.profile() as report:
            list(loader)
        with pytest.raises(RuntimeError, match="trace=True"):
            report.save_trace(tmp_path / "trace.json")
        with loader.profile(trace=True) as report:
            list(loader)
        report.save_trace(tmp_path / "trace.json")
        assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["pipeline"] == report.name
        with pytest.raises(RuntimeError, match="block is over"):
            loader.profile(trace=True).trace_json()


def test_a_recording_is_bounded_and_off_when_not_asked_for() -> None:
    now = 0.0
    account = WorkerClock(WorkerStates(2), lambda: now, first_state=2)
    account.enter(0)
    assert account.trace is None
    account.trace = new_entries(8, now, account.open_state)
    for number in range(100):
        now = float(number)
        account.item = (0, number, 0, 4)
        account.enter(number % 2)
    assert len(account.trace) == 8
    assert account.trace[-1] == (99.0, 1, (0, 99, 0, 4))
    assert num_entries(1) * 1 <= 2**17
    assert num_entries(64) * 64 <= 2**17


def test_pages_are_joined_again() -> None:
    entries = [(float(n), n % 3, None) for n in range(4321)]
    lanes = [
        Lane(pid, name, ("x",), some, 9.0, False)
        for pid, name, some in ((1, "a", entries), (1, "b", []), (2, "a", entries[:1]))
    ]
    assert list(joined(pages_of(lanes))) == lanes
    assert len(pages_of(lanes)) == 5
