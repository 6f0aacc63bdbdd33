"""The report on one `loaderkit.start`: its parts, and the path that the first step waited for.

The path is followed from the first batch backwards: of what a part waited for, that which ended last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import torch

from loaderkit.checkpoint.names import texts
from loaderkit.checkpoint.restore.source import OpenCheckpoint
from loaderkit.profile.build import machine
from loaderkit.profile.report import StartReport
from loaderkit.profile.report_parts import StartPart

OPEN, STATE, TENSORS, IMPORT, BUILD, BATCHES, FIRST = (
    "open the checkpoints",
    "describe the checkpoint",
    "read the tensors",
    "import",
    "build the loader",
    "begin to make batches",
    "make the first batch",
)
_AT_ONCE_S = 0.002  # a wait below that is none


def start_report(
    name: str,
    step: int | None,
    times: Mapping[str, tuple[float, float]],
    first_batch: tuple[float, float],
    import_s: float | None,
    *,
    list_s: float,
    index_s: float,
) -> StartReport:
    """`times` are those of `Run`, `first_batch` when the first `next()` began and ended, by the same clock; `import_s`: what
    the program took before."""
    asked_s, done_s = first_batch
    spans = {part: span for part, span in times.items() if part in (OPEN, STATE, TENSORS, IMPORT, BUILD, BATCHES)}
    begun_s = spans[BATCHES][1] if BATCHES in spans else asked_s
    spans[FIRST] = (begun_s, done_s)
    critical = {*_path(spans, waited_s=done_s - asked_s)}
    before_s = import_s or 0.0
    parts = [
        StartPart(name=part, begin_s=before_s + begin_s, end_s=before_s + end_s, is_critical=part in critical)
        for part, (begin_s, end_s) in sorted(spans.items(), key=lambda item: item[1])
    ]
    if import_s is not None:
        parts.insert(0, StartPart(name="the program's imports", begin_s=0.0, end_s=import_s, is_critical=True))
    return StartReport(
        name=name,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(),
        step=step,
        total_s=before_s + done_s,
        one_by_one_s=before_s + sum(end_s - begin_s for begin_s, end_s in spans.values()),
        list_s=list_s,
        index_s=index_s,
        parts=parts,
    )


def _path(spans: Mapping[str, tuple[float, float]], *, waited_s: float) -> Iterator[str]:
    """The parts that the first step waited for, the last one first."""
    if waited_s < _AT_ONCE_S:  # the batch was there: the tensors came last
        yield from (TENSORS, STATE, OPEN)
        return
    yield FIRST
    if BATCHES not in spans:
        yield from (BUILD, IMPORT)
        return
    yield BATCHES
    if STATE in spans and spans[STATE][1] > spans[BUILD][1]:
        yield from (STATE, OPEN)
    else:
        yield from (BUILD, IMPORT)


def state_like(url: str, left_out: str) -> dict[str, Any]:
    """A state into which all of a checkpoint can be restored without a model, but the entry `left_out`: a table for each table
    at its top, which gets what is in it."""
    state: dict[str, Any] = {}
    with OpenCheckpoint.open(url, None, "2GiB", "auto") as source:
        contents = source.contents
        for name in (*contents.tensors, *contents.values, *contents.pickled):
            path = contents.paths.get(name, (name,))
            top, entry = texts(path)[0], contents.tensors.get(name)
            if top == left_out or top.startswith("loaderkit"):
                continue
            if len(path) > 1:
                state.setdefault(top, {})
            else:
                state[top] = None if entry is None else torch.empty(entry.shape, dtype=entry.dtype)
    return state
