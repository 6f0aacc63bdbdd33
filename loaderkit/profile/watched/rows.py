"""The rows of stages: the parts of the work on batches that can be told apart from outside."""

from __future__ import annotations

from typing import Any

from loaderkit._internal.system.processes import ProcessCounters
from loaderkit.diagnosis.watched.counters import (
    COLLATE,
    DATASET,
    HANDOVER,
    ITERABLE,
    PIN_MEMORY,
    LoaderArguments,
    WatchedCounters,
)
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.engine.metrics.stalls import EPOCH
from loaderkit.profile.watched.accounts import Accounts

_COARSE_S = 0.02  # ticks in which the kernel counts a process's CPU time


def rows_of(
    accounts: Accounts,
    arguments: LoaderArguments | None,
    counters: WatchedCounters,
    workers: ProcessCounters,
    waits_s: dict[str, float],
) -> list[StageStats]:
    """The rows; in `waits_s` waits are moved to the causes to which they belong: to `collate`, and to the change of
    epochs."""
    if arguments is None:
        _charge_changes(ITERABLE, counters, waits_s, accounts.num_batches)
        return [_row(accounts, ITERABLE, waits_s, counters.own_cpu_s, counters.own_delayed_s)]
    if not arguments.num_workers:
        return _inline_rows(accounts, counters, waits_s)
    _charge_changes(DATASET, counters, waits_s, accounts.num_batches)
    busy_s = counters.busy_s
    if busy_s < workers.cpu_s < busy_s + _COARSE_S:
        busy_s = workers.cpu_s
    dataset = StageStats(
        DATASET,
        arguments.num_workers,
        num_items=accounts.num_samples,
        num_bytes=accounts.num_bytes,
        busy_s=busy_s,
        cpu_s=workers.cpu_s,
        delayed_s=min(workers.delayed_s, max(0.0, busy_s - workers.cpu_s)),
        blocked_s=max(0.0, counters.slot_s - busy_s),
        kind=DATASET,
    )
    rows = [dataset]
    if arguments.pin_memory:
        rows.append(_row(accounts, PIN_MEMORY, waits_s, counters.pin_cpu_s, num_bytes=0))
    return [*rows, _row(accounts, HANDOVER, waits_s, counters.own_cpu_s, num_bytes=0)]


def _inline_rows(accounts: Accounts, counters: WatchedCounters, waits_s: dict[str, float]) -> list[StageStats]:
    whole_s = waits_s.get(DATASET, 0.0)
    collate_s = min(accounts.collate_s, whole_s)
    collate_cpu_s = min(accounts.collate_cpu_s, counters.own_cpu_s, collate_s)
    if collate_s:
        waits_s[DATASET], waits_s[COLLATE] = whole_s - collate_s, collate_s
    # Time that was not on a CPU was late in the same proportion.
    late = counters.own_delayed_s / max(whole_s - counters.own_cpu_s, 1e-9)
    dataset_cpu_s = counters.own_cpu_s - collate_cpu_s
    return [
        _row(accounts, DATASET, waits_s, dataset_cpu_s, late * (whole_s - collate_s - dataset_cpu_s)),
        _row(accounts, COLLATE, waits_s, collate_cpu_s, late * (collate_s - collate_cpu_s), num_bytes=0),
    ]


def _row(
    accounts: Accounts, name: str, waits_s: dict[str, float], cpu_s: float, delayed_s: float = 0.0, **more: Any
) -> StageStats:
    """Work of the loop's own process, for as long as the loop waits for it."""
    busy_s = waits_s.get(name, 0.0)
    values = {"num_bytes": accounts.num_bytes, **more}
    delayed_s = min(max(0.0, delayed_s), max(0.0, busy_s - cpu_s))
    return StageStats(
        name, 1, num_items=accounts.num_samples, busy_s=busy_s, cpu_s=cpu_s, delayed_s=delayed_s, kind=name, **values
    )


def _charge_changes(stage: str, counters: WatchedCounters, waits_s: dict[str, float], num_batches: int) -> None:
    """Charge the waits for first batches of epochs to the change of epochs, except for the usual wait: the time of a
    batch where workers are always busy, or the mean wait for another batch. The loop would wait for that in mid-epoch,
    too."""
    waited_s, num_firsts = waits_s.get(stage, 0.0), counters.num_epochs - 1
    if counters.first_s <= 0 or num_firsts < 1:
        return
    if stage == ITERABLE:
        usual_s = max(0.0, waited_s - counters.first_s) / max(1, num_batches - num_firsts)
    else:
        usual_s = counters.busy_s / max(1, num_batches) * min(1.0, counters.worker_use)
    moved_s = min(max(0.0, counters.first_s - num_firsts * usual_s), waited_s)
    waits_s[stage] = waited_s - moved_s
    waits_s[EPOCH] = waits_s.get(EPOCH, 0.0) + moved_s
