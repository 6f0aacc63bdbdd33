"""How far each of several sources is, for `loader.stats()`: the shares that its weights have given it, its passes, its
bad samples."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from loaderkit.engine.metrics.snapshot import Snapshot, SourceState
from loaderkit.pipeline.delivery.bad_samples import BadSamples
from loaderkit.pipeline.execution_plan import ExecutionPlan


@dataclass(slots=True)
class _DeliveredRange:
    """The positions [begin, end) of an epoch that were delivered last. `due` is how many samples of each source the
    weights give before them. Only `end` changes."""

    run: int
    epoch: int
    begin: int
    end: int
    due: tuple[float, ...]


class SourceAccounts:
    """Adds the sources of a mixture to statistics, from any thread. With a single source it adds nothing."""

    def __init__(self, plan: ExecutionPlan, bad_samples: BadSamples) -> None:
        self._order = plan.order.for_thread()
        self._mixed = self._order.core.for_thread()
        self._bad_samples = bad_samples
        self._course: _DeliveredRange | None = None
        self._lock = threading.Lock()

    def passed(self, run: int, epoch: int, begin: int, end: int) -> None:
        """Note that the positions [begin, end) were delivered in a run of the executor; from the consumer's thread."""
        if not self._mixed.sources:
            return
        course = self._course
        if course is not None and course.end == begin and course.epoch == epoch and course.run == run:
            course.end = end
            return
        due = (0.0,) * len(self._mixed.sources)
        if course is not None and course.run == run:
            due = self._due(course)
        self._course = _DeliveredRange(run, epoch, begin, end, due)

    def added_to(self, stats: Snapshot, epoch: int, position: int) -> Snapshot:
        """The statistics with the sources as they are before `position` of an epoch."""
        if not self._mixed.sources:
            return stats
        course = self._course
        if course is None or course.run != stats.run:
            course = _DeliveredRange(stats.run, epoch, position, position, (0.0,) * len(self._mixed.sources))
        with self._lock:
            states = self._states(course, epoch, position)
        return replace(stats, sources=states)

    def _states(self, course: _DeliveredRange, epoch: int, position: int) -> tuple[SourceState, ...]:
        known, about = self._order.num_before(epoch, position)
        places = self._mixed.places(epoch, about)
        surely = places if known == about else self._mixed.places(epoch, known)
        begins = self._mixed.places(epoch, 0)
        num_bad = self._bad_samples.by_source(course.run)
        return tuple(
            SourceState(
                source.name,
                due=due,
                num_passes=places[number] / source.num_samples,
                is_used_up=source.most is not None and surely[number] - begins[number] >= source.most,
                num_bad=num_bad.get(source.name, 0),
                share_of=self._mixed.share_of,
            )
            for number, (source, due) in enumerate(zip(self._mixed.sources, self._due(course), strict=True))
        )

    def _due(self, course: _DeliveredRange) -> tuple[float, ...]:
        """How many samples of each source the weights give over all positions that were delivered."""
        due = list(course.due)
        begin, end = (self._order.num_before(course.epoch, position)[1] for position in (course.begin, course.end))
        for segment in self._mixed.course(course.epoch, end):
            num = min(end, segment.end) - max(begin, segment.begin)
            if num > 0:
                for number, share in segment.shares.items():
                    due[number] += share * num
        return tuple(due)
