"""Writes what a loader has done lately to TensorBoard, W&B, a Lightning logger and the like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

from loaderkit.diagnosis.stats import Stats
from loaderkit.metrics.families import causes


class LoggedLoader(Protocol):
    """What `log` reads of a loader."""

    @property
    def config(self) -> Any: ...

    def stats(self) -> Stats: ...


class _LastWritten(NamedTuple):
    """The statistics of a loader when they were last written to a writer."""

    writer: Callable[[], Any] | None  # a weak reference; None if its class has none
    stats: Stats


_LAST: WeakKeyDictionary[LoggedLoader, dict[int, _LastWritten]] = WeakKeyDictionary()
"""By loader and `id` of the writer, which need be neither hashable nor unequal to others."""


def log(loader: LoggedLoader, writer: Any, step: int) -> dict[str, float]:
    """Write what the loader did since it was last written to this `writer`, as scalars of training step `step`; returns them.

    The names are `loaderkit/<name of the pipeline>/...`: `stall_percent` of the time, and by what the loop waited for
    `stall_percent_<cause>`; `batches_per_second`, `samples_per_second`, `read_bytes_per_second`; numbers since then
    (`dropped_samples`, `bad_samples`, `worker_restarts`), and of this moment (`ready_batches`, `ahead_batches`, `workers`,
    `live_bytes`); of mixed sources `share_<source>`. Empty, and nothing is written, before the loop has waited for a batch.

    A writer is a SummaryWriter (`add_scalar`), a W&B run or an Accelerator (`log`), a logger of Lightning's or `mlflow`
    (`log_metrics`), or has one of these methods. It takes about 1 ms: call it each tenth step or so. Raises TypeError.
    """
    write = _write_to(writer)
    stats = loader.stats()
    if type(stats) is not Stats:
        raise TypeError(
            "loaderkit.metrics.log takes a loader of loaderkit.build, and not what loaderkit.watch has given"
        )
    by_writer = _LAST.setdefault(loader, {})
    last = by_writer.get(id(writer))
    # An `id` may be another one's that is gone.
    is_known = last is not None and (last.writer is None or last.writer() is writer)
    rise = stats.since(last.stats) if last is not None and is_known and last.stats.run == stats.run else stats
    if rise.wall_s <= 0:
        return {}
    values = {f"loaderkit/{loader.config.name}/{name}": float(value) for name, value in _values(rise).items()}
    write(values, step)
    if not is_known:
        _forget_gone(by_writer)
    by_writer[id(writer)] = _LastWritten(_reference(writer), stats)
    return values


def _reference(writer: Any) -> Callable[[], Any] | None:
    try:
        return ref(writer)
    except TypeError:  # as with `__slots__`
        return None


def _forget_gone(by_writer: dict[int, _LastWritten]) -> None:
    for key, (writer, _) in [*by_writer.items()]:
        if writer is not None and writer() is None:
            del by_writer[key]


def _values(rise: Stats) -> dict[str, float]:
    stalls = dict.fromkeys(causes(rise), 0.0) | rise.stall_s
    values: dict[str, float] = {"stall_percent": 100 * sum(stalls.values()) / rise.wall_s}
    values |= {
        f"stall_percent_{cause.replace(' ', '_')}": 100 * seconds / rise.wall_s for cause, seconds in stalls.items()
    }
    values |= {
        "batches_per_second": rise.num_batches / rise.wall_s,
        "samples_per_second": rise.num_samples / rise.wall_s,
        "read_bytes_per_second": sum(row.num_bytes for row in rise.stages) / rise.wall_s,
        "dropped_samples": rise.num_dropped,
        "bad_samples": sum(row.num_failed for row in rise.stages),
        "worker_restarts": rise.num_restarts,
        "ready_batches": rise.num_ready,
        "workers": rise.tuning.concurrency,
        "live_bytes": rise.memory["live_bytes"],
    }
    if rise.tuning.batches is not None:
        values["ahead_batches"] = rise.tuning.batches
    return values | {f"share_{source.name}": source.share for source in rise.source_rows()}


def _write_to(writer: Any) -> Callable[[Mapping[str, float], int], None]:
    """How values are written to it. Raises TypeError."""
    if hasattr(writer, "log_metrics"):
        return lambda values, step: writer.log_metrics(dict(values), step=step)
    if hasattr(writer, "add_scalar"):

        def add(values: Mapping[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        return add
    if hasattr(writer, "log") and not hasattr(writer, "log_dict"):
        return lambda values, step: writer.log(dict(values), step=step)
    reason = "it logs single values: give its `logger`" if hasattr(writer, "log_dict") else "it has none of these"
    raise TypeError(
        f"loaderkit.metrics.log takes a writer with log_metrics, add_scalar or log, and not {type(writer).__name__}: {reason}"
    )
