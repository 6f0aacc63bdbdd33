"""Writes what workers and loop did as a trace: JSON in the trace-event format's object form, for ui.perfetto.dev.

the loop        ── wait ──┤ step ├─ wait ─┤ step │
                          ^ (flow)
read+decode 0   ┤ read │ decode │ read │ ...        a lane for every worker; an arrow for every chunk, from its first stage
batch+... 0     ...             ┤ batch │            over every change of the worker to the wait that its batch ended

Format: "Trace Event Format", Google, as Perfetto and chrome://tracing read it. Times are in us since the report begins.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from loaderkit.engine.metrics.trace import WHOLE, Handoff, Item, Lane, Trace
from loaderkit.profile.report import Report

_LOOP = 1  # the lane of the loop; workers have the ones behind it
Event = dict[str, Any]


class _Slice(NamedTuple):
    """A stage at work, on its lane; times in ns."""

    begin: int
    end: int
    pid: int
    tid: int
    item: Item
    is_first_stage: bool


class _Clock(NamedTuple):
    """Clips times to the report; `begin_s` and `end_s` are its bounds."""

    begin_s: float
    end_s: float

    def ns(self, at_s: float) -> int:
        return round((min(max(at_s, self.begin_s), self.end_s) - self.begin_s) * 1e9)


def to_json(report: Report, recordings: Sequence[Trace], begin_s: float, end_s: float) -> str:
    """The trace file. `begin_s` and `end_s` of the report are by the clock of the recordings."""
    return json.dumps(trace(report, recordings, begin_s, end_s), separators=(",", ":"), allow_nan=False) + "\n"


def trace(report: Report, recordings: Sequence[Trace], begin_s: float, end_s: float) -> dict[str, Any]:
    """The same as plain values."""
    clock = _Clock(begin_s, end_s)
    lanes = [lane for recording in recordings for lane in recording.lanes]
    handoffs = [handoff for recording in recordings for handoff in recording.handoffs]
    events = [*_names(report, lanes), *_loop(handoffs, clock), *_counters(report)]
    slices: list[_Slice] = []
    for tid, lane in enumerate(lanes, _LOOP + 1):
        events += _worker(lane, tid, clock, slices)
    events += _flows(slices, handoffs, clock)
    events.sort(key=lambda event: event.get("ts", -1))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "pipeline": report.name,
            "made_at": report.made_at,
            "loaderkit": report.machine.loaderkit,
            "verdict": f"{report.verdict.stage or 'training'}: {report.verdict.evidence}",
            "workers_whose_beginning_is_missing": sum(lane.is_cut for lane in lanes),
        },
    }


def _names(report: Report, lanes: Sequence[Lane]) -> Iterator[Event]:
    own = os.getpid()
    for order, pid in enumerate(dict.fromkeys([own, *(lane.pid for lane in lanes)])):
        name = f"training: {report.name}" if pid == own else "process that loads"
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": order}}
    for tid, (pid, name) in enumerate([(own, "the loop"), *((lane.pid, lane.name) for lane in lanes)], _LOOP):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _loop(handoffs: Sequence[Handoff], clock: _Clock) -> Iterator[Event]:
    place = {"pid": os.getpid(), "tid": _LOOP}
    for number, wait in enumerate(handoffs):
        args = {
            "epoch": wait.epoch, "batch_ends_at": wait.end, "samples": wait.num_samples,
            "waited_for_ms": {cause: round(1e3 * s, 3) for cause, s in wait.causes.items()},
        }  # fmt: skip
        yield _complete("wait", "loop", clock.ns(wait.since_s), clock.ns(wait.until_s), args, **place)
        if number + 1 < len(handoffs):
            following = handoffs[number + 1]
            name = "step" if following.epoch == wait.epoch else "step, and between epochs"
            args = {"epoch": wait.epoch, "batch_ends_at": wait.end}
            yield _complete(name, "loop", clock.ns(wait.until_s), clock.ns(following.since_s), args, **place)


def _worker(lane: Lane, tid: int, clock: _Clock, slices: list[_Slice]) -> Iterator[Event]:
    """A worker's states one behind another; its stages go to `slices` as well."""
    num_stages = len(lane.names) - 3
    for (at_s, state, item), (until_s, _, _) in pairwise([*lane.entries, (lane.until_s, 0, None)]):
        begin, end = clock.ns(at_s), clock.ns(until_s)
        if end <= begin:
            continue
        args: dict[str, Any] = {}
        if state < num_stages and item is not None:
            slices.append(_Slice(begin, end, lane.pid, tid, item, state == 0))
            args = {"epoch": item[0], "batch_ends_at": item[1]}
            args["slots"] = "all" if item[2] == WHOLE else f"{item[2]} to {item[3] - 1}"
        kind = "stage" if state < num_stages else "no work"
        yield _complete(lane.names[state], kind, begin, end, args, pid=lane.pid, tid=tid)


def _flows(slices: Iterable[_Slice], handoffs: Iterable[Handoff], clock: _Clock) -> Iterator[Event]:
    """From each chunk's first stage to the wait that its batch ended, over every lane that it went through."""
    chunks: dict[Item, list[_Slice]] = defaultdict(list)
    batches: dict[tuple[int, int], list[_Slice]] = defaultdict(list)
    for piece in slices:
        if piece.item[2] == WHOLE:
            batches[piece.item[:2]].append(piece)
        else:
            chunks[piece.item].append(piece)
    waits = {(wait.epoch, wait.end): wait for wait in handoffs}
    for number, (item, pieces) in enumerate(chunks.items(), 1):
        wait = waits.get(item[:2])
        way = sorted([*pieces, *batches[item[:2]]])
        begins = [place for place, piece in enumerate(way) if piece.is_first_stage]
        if wait is None or not begins:
            continue  # read ahead and not delivered, or begun before the recording
        way = way[begins[-1] :]  # what came before was dropped, as the loop went elsewhere
        flow = {"name": "chunk", "cat": "chunk", "id": number}
        yield {"ph": "s", **flow, "pid": way[0].pid, "tid": way[0].tid, "ts": way[0].begin / 1e3}
        for before, piece in pairwise(way):
            if before.tid != piece.tid:
                yield {"ph": "t", **flow, "pid": piece.pid, "tid": piece.tid, "ts": piece.begin / 1e3}
        begin, end = clock.ns(wait.since_s), clock.ns(wait.until_s)
        # Inside of the wait, or it would point at what comes behind it.
        yield {"ph": "f", "bp": "e", **flow, "pid": os.getpid(), "tid": _LOOP, "ts": max(begin, end - 1) / 1e3}


def _counters(report: Report) -> Iterator[Event]:
    own = os.getpid()
    for point in report.series:
        counts: Mapping[str, Mapping[str, float]] = {
            "batches ready": {"batches": point["ready"]},
            "chunks queued": point["queued"],
            "samples/s": {"samples/s": point["samples_per_s"]},
            "CPUs busy": {"CPUs": point["cpus"]},
        }
        for name, args in counts.items():
            yield {
                "ph": "C",
                "name": name,
                "pid": own,
                "tid": 0,
                "ts": round(1e6 * point["at_s"], 3),
                "args": dict(args),
            }


def _complete(name: str, kind: str, begin: int, end: int, args: Mapping[str, Any], *, pid: int, tid: int) -> Event:
    return {
        "ph": "X", "name": name, "cat": kind, "ts": begin / 1e3, "dur": (end - begin) / 1e3, "pid": pid, "tid": tid,
        "args": dict(args),
    }  # fmt: skip
