"""Finds what the loop waited for, when a batch of another process has come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loaderkit.engine.metrics import stalls
from loaderkit.engine.remote.delivery import Delivered


def causes_of(
    batch: Delivered, begin: float, end: float, restarting: Sequence[tuple[float, float]], *, is_after_restart: bool
) -> dict[str, float]:
    """Seconds by cause of the wait [begin, end) for `batch`, which may have been made by a process that has just
    replaced another one. `restarting`: the parts of the wait in which processes were replaced."""
    first_s = batch.segments[0].since_s if batch.segments else batch.done_s
    segments = [
        stalls.WaitSegment(begin, first_s, stalls.START),
        *batch.segments,
        stalls.WaitSegment(batch.done_s, end, stalls.WAKEUP),
    ]
    causes: dict[str, float] = {}
    since = begin
    for replaced_s, until_s in (*restarting, (end, end)):
        for cause, seconds in stalls.charge(segments, since, replaced_s).items():
            causes[cause] = causes.get(cause, 0.0) + seconds
        if until_s > replaced_s:
            causes[stalls.RESTART] = causes.get(stalls.RESTART, 0.0) + until_s - replaced_s
        since = until_s
    return start_as_restart(causes) if is_after_restart else causes


def start_as_restart(causes: Mapping[str, float]) -> dict[str, float]:
    """The causes of a wait for a process that was started in another one's place."""
    return _renamed(causes, stalls.START, stalls.RESTART)


def wakeup_as_network(causes: Mapping[str, float]) -> dict[str, float]:
    """The causes that another node gives for a wait: its `wakeup` is `network` here, as the batch may be finished there."""
    return _renamed(causes, stalls.WAKEUP, stalls.NETWORK)


def _renamed(causes: Mapping[str, float], cause: str, name: str) -> dict[str, float]:
    renamed = dict(causes)
    seconds = renamed.pop(cause, 0.0)
    if seconds:
        renamed[name] = renamed.get(name, 0.0) + seconds
    return renamed
