"""The sums of one watched loop: its waits by cause, its batches, and its workers' load. The loop's thread writes them."""

from __future__ import annotations

from typing import Any

from loaderkit.diagnosis.watched.counters import (
    DATASET,
    HANDOVER,
    ITERABLE,
    PIN_MEMORY,
    LoaderArguments,
    WatchedCounters,
)
from loaderkit.engine.metrics.stalls import EPOCH, START, WAKEUP
from loaderkit.profile.watched.batches import num_samples_of, size_of
from loaderkit.profile.watched.dataloader import A_WAIT_S

_NUM_MEASURED = 32  # batches whose bytes are counted; of later ones each 16th
_LATE = 1.5  # times the mean wait


class Accounts:
    """Plain sums. A thread that reads them meanwhile sees each of them as it was a moment ago."""

    def __init__(self) -> None:
        self.waits_s: dict[str, float] = {}
        self.first_waits_s: dict[str, float] = {}  # of these, for the first of all batches
        self.num_batches = self.num_samples = self.num_bytes = self.largest_bytes = 0
        self.collate_s = self.collate_cpu_s = 0.0  # of the waits for `dataset`
        self._num_epochs = self._num_measured = self._measured_bytes = 0
        self._measured_tensors = self._measured_array_bytes = 0
        self._open_s = self._first_s = self._stop_s = self._own_cpu_s = self._own_delayed_s = 0.0
        self._slot_s = self._busy_s = self._tail_s = self._wait_slot_s = self._wait_busy_s = 0.0
        self._read_s = self._read_delayed_s = 0.0  # of waits whose delays were read
        self._gaps: dict[int, int] = {}
        self._num_since_late, self._late_s = 0, 0.0
        self.is_on_gpu = False  # the last batch whose bytes were counted

    def counters(self) -> WatchedCounters:
        """The present sums; the sums of processes are left at 0."""
        return WatchedCounters(
            num_epochs=self._num_epochs,
            open_s=self._open_s,
            first_s=self._first_s,
            stop_s=self._stop_s,
            own_cpu_s=self._own_cpu_s,
            own_delayed_s=self._own_delayed_s,
            slot_s=self._slot_s,
            busy_s=self._busy_s,
            tail_s=self._tail_s,
            wait_slot_s=self._wait_slot_s,
            wait_busy_s=self._wait_busy_s,
            late_s=self._late_s,
            num_measured=self._num_measured,
            measured_bytes=self._measured_bytes,
            measured_tensors=self._measured_tensors,
            measured_array_bytes=self._measured_array_bytes,
            gaps=self._gaps.copy(),
        )

    def opened(self, seconds: float) -> None:
        """An epoch has begun."""
        self._charge(START if self._num_epochs == 0 else EPOCH, seconds)
        self._open_s += seconds if self._num_epochs else 0.0
        self._num_epochs += 1
        self._num_since_late, self._late_s = 0, 0.0
        self.is_on_gpu = False  # the last batch whose bytes were counted

    def is_known(self) -> None:
        """What is iterated over is a DataLoader, as its first batch has shown."""
        for waits_s in (self.waits_s, self.first_waits_s):
            if waited_s := waits_s.pop(ITERABLE, 0.0):
                waits_s[DATASET] = waits_s.get(DATASET, 0.0) + waited_s

    def ended(self, seconds: float) -> None:
        """An epoch has ended."""
        self._charge(EPOCH, seconds)
        self._stop_s += seconds

    def waited(
        self,
        arguments: LoaderArguments | None,
        seconds: float,
        cpu_s: float,
        delayed_s: float | None,
        *,
        is_first: bool,
        all_done: bool,
    ) -> None:
        """A batch came after `seconds`. Of these the loop's thread was on a CPU for `cpu_s`, and for `delayed_s` ready to run
        while no CPU was free (None if that was not read). `all_done`: when the loop asked for it, the workers had
        finished all batches that they had been asked for."""
        cpu_s, before = min(cpu_s, seconds), None if self.num_batches else self.waits_s.copy()
        self._own_cpu_s += cpu_s
        if arguments is None or not arguments.num_workers:
            self._charge(ITERABLE if arguments is None else DATASET, seconds)
            self._own_delayed_s += self._delayed(seconds - cpu_s, delayed_s)
        elif all_done:
            delayed_s = self._delayed(seconds - cpu_s, delayed_s)
            self._charge(WAKEUP, delayed_s)
            self._charge(HANDOVER, cpu_s)
            self._charge(PIN_MEMORY if arguments.pin_memory else HANDOVER, seconds - cpu_s - delayed_s)
        else:
            self._charge(HANDOVER, cpu_s)
            self._charge(DATASET, seconds - cpu_s)
        if not is_first:
            self._count_late(seconds)
        elif before is not None:
            self.first_waits_s = {cause: wait_s - before.get(cause, 0.0) for cause, wait_s in self.waits_s.items()}
        elif self._num_epochs > 1:
            self._first_s += seconds
        self.num_batches += 1

    def holds(self, batch: Any, batch_size: int | None) -> None:
        """Count what is in the batch. For most batches only the samples are counted, as counting bytes takes longer."""
        if self._num_measured >= _NUM_MEASURED and self.num_batches % 16:
            self.num_samples += num_samples_of(batch, batch_size)
            self.num_bytes += round(self._measured_bytes / self._num_measured)
            return
        size = size_of(batch, batch_size)
        self.num_samples += size.num_samples
        self.num_bytes += size.num_bytes
        self.is_on_gpu = size.gpu_bytes > 0
        self.largest_bytes = max(self.largest_bytes, size.num_bytes)
        self._num_measured += 1
        self._measured_bytes += size.num_bytes
        self._measured_tensors += size.num_tensors
        self._measured_array_bytes += size.array_bytes

    def worked(self, seconds: float, num_workers: int, busy: float, *, is_wait: bool, is_asking: bool) -> None:
        """Of `num_workers` workers, `busy` had batches to make for so long."""
        slot_s = seconds * num_workers
        busy_s = min(seconds * busy, slot_s)
        self._slot_s += slot_s
        self._busy_s += busy_s
        if not is_asking:
            self._tail_s += slot_s - busy_s
        elif is_wait:
            self._wait_slot_s += slot_s
            self._wait_busy_s += busy_s

    def _charge(self, cause: str, seconds: float) -> None:
        self.waits_s[cause] = self.waits_s.get(cause, 0.0) + seconds

    def _delayed(self, seconds: float, delayed_s: float | None) -> float:
        """Of `seconds` in which the loop's thread was not on a CPU, the part in which it was ready to run: as it was
        read, or in proportion to what was read."""
        if delayed_s is None:
            return seconds * self._read_delayed_s / self._read_s if self._read_s else 0.0
        delayed_s = min(seconds, delayed_s)
        self._read_s += seconds
        self._read_delayed_s += delayed_s
        return delayed_s

    def _count_late(self, seconds: float) -> None:
        self._num_since_late += 1
        if seconds > A_WAIT_S and seconds * self.num_batches > _LATE * sum(self.waits_s.values()):
            gap, self._num_since_late = self._num_since_late, 0
            self._gaps[gap] = self._gaps.get(gap, 0) + 1
            self._late_s += seconds
