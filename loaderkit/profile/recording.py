"""`with loader.profile() as report:` records a loop while it runs and makes the report when the block ends.

enter                 first batch            exit
stats ────────────────stats──────────────────stats         0.2 ms each
   steps ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─           3 us a batch
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from loaderkit._internal.atomic_file import write_atomically
from loaderkit.diagnosis.stats import Stats
from loaderkit.engine.metrics.trace import Trace
from loaderkit.profile.build import ReportFacts, ReportSubject, make_report
from loaderkit.profile.render.trace_file import to_json
from loaderkit.profile.report import Report
from loaderkit.profile.step_log import StepLog


@dataclass(frozen=True)
class ProfiledLoader:
    """The part of a loader that a report needs."""

    subject: Callable[[], ReportSubject]  # with the settings of now, tuned ones included
    stats: Callable[[], Stats]
    series: Callable[[], list[dict[str, Any]]]
    watch: Callable[[StepLog | None], None]
    record: Callable[[], None]  # starts the recording of what workers do
    recorded: Callable[[], list[Trace]]


class FirstBatchLog(StepLog):
    """Steps, and the stats right after the first batch."""

    def __init__(self, stats: Callable[[], Stats], clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock)
        self._stats = stats

    def reset(self) -> None:
        """Start again, with another first batch."""
        super().reset()
        self.first: Stats | None = None

    def on_batch(self, batch: Iterable[Any] = ()) -> None:
        """The batch is handed over. The stats are read after the first one only, in the loop's own time."""
        super().on_batch(batch)
        if self.first is None:
            self.first = self._stats()


class Profile:
    """Records one `with` block. After the block it has every attribute of `Report`: `report.verdict`, ..."""

    def __init__(self, subject: ProfiledLoader, import_s: float | None = None, *, trace: bool = False) -> None:
        self._subject = subject
        self._is_traced = trace
        self._recordings: list[Trace] = []
        self._import_s = import_s
        self._begin: Stats | None = None
        self._log: FirstBatchLog | None = None
        self._result: Report | None = None

    def __enter__(self) -> Profile:
        if self._begin is not None:
            raise RuntimeError("a profile is of one block: call loader.profile() again for another one")
        self._begin = self._subject.stats()
        self._log = FirstBatchLog(self._subject.stats)
        self._subject.watch(self._log)
        if self._is_traced:
            self._subject.record()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._log is not None
        self._log.close()
        self._subject.watch(None)
        if self._is_traced:
            self._recordings = self._subject.recorded()
        partial = None
        if kind is not None:
            partial = "interrupted" if issubclass(kind, KeyboardInterrupt) else f"ended by {kind.__name__}: {error}"
        self._result = self._report(partial, error if isinstance(error, Exception) else None)

    def _report(self, partial: str | None, error: Exception | None) -> Report:
        subject, log, begin = self._subject, self._log, self._begin
        assert log is not None
        assert begin is not None
        end = subject.stats()
        return make_report(
            ReportFacts(
                subject=subject.subject(),
                begin=begin,
                first=log.first,
                end=end,
                series=subject.series(),
                log=log,
                import_s=self._import_s,
                partial=partial,
                error=error,
            )
        )

    @property
    def result(self) -> Report:
        """The report, once the block is over. Raises RuntimeError before."""
        if self._result is None:
            raise RuntimeError("the report is made when the `with` block is over: ask for it after that")
        return self._result

    def save(self, path: str | Path) -> None:
        """Write the report as JSON, in one piece. Raises OSError."""
        write_atomically(Path(path), self.result.to_json())

    def save_trace(self, path: str | Path) -> None:
        """Write a trace of workers and loop for ui.perfetto.dev, in one piece; needs `loader.profile(trace=True)`.

        Raises RuntimeError without that, or while the block is not over; OSError.
        """
        write_atomically(Path(path), self.trace_json())

    def trace_json(self) -> str:
        """The trace that `save_trace` writes."""
        report = self.result
        if not self._is_traced:
            raise RuntimeError("nothing was recorded for a trace: use loader.profile(trace=True)")
        assert self._log is not None
        return to_json(report, self._recordings, self._log.begin_s, self._log.end_s)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.result, name)

    def __str__(self) -> str:
        """The report as text of 80 columns, without colour."""
        from loaderkit.profile.render.terminal import to_text  # with rich

        return "the report is made when the block is over" if self._result is None else to_text(self._result)
