"""Where each of several sources is, for `loader.stats()`: what its weights come to, its passes, its bad samples."""

from __future__ import annotations

import threading
from copy import copy
from dataclasses import dataclass, replace

from loaderkit.engine.metrics.snapshot import Snapshot, SourceState
from loaderkit.pipeline.bad_samples import BadSamples
from loaderkit.pipeline.execution_plan import ExecutionPlan
from loaderkit.sampling.mixture import Mixture
from loaderkit.sampling.token_mixture import TokenMixture

AnyMixture = Mixture | TokenMixture


@dataclass(slots=True)
class _Course:
    """The positions [begin, end) of an epoch that were delivered last, and what the weights of those before come to. Its
    `end` alone changes."""

    run: int
    epoch: int
    begin: int
    end: int
    due: tuple[float, ...]


class SourceAccounts:
    """Adds the sources of a mixture to statistics, from any thread. With a single source it adds nothing."""

    def __init__(self, plan: ExecutionPlan, bad_samples: BadSamples) -> None:
        self._mixture = plan.mixture
        if isinstance(plan.mixture, Mixture):
            self._mixture = copy(plan.mixture)  # one thread at a time may call it, and that of the order is another's
        self._packing = plan.packing if plan.batching is None else plan.batching.order  # positions are theirs
        self._bad_samples = bad_samples
        self._course: _Course | None = None
        self._lock = threading.Lock()

    def passed(self, run: int, epoch: int, begin: int, end: int) -> None:
        """Note that the positions [begin, end) were delivered in a run of the executor; from the consumer's thread."""
        if self._mixture is None:
            return
        course = self._course
        if course is not None and course.end == begin and course.epoch == epoch and course.run == run:
            course.end = end
            return
        due = (0.0,) * len(self._mixture.sources)
        if course is not None and course.run == run:
            due = self._due(self._mixture, course)
        self._course = _Course(run, epoch, begin, end, due)

    def added_to(self, stats: Snapshot, epoch: int, position: int) -> Snapshot:
        """The statistics with the sources as they are before `position` of an epoch."""
        if self._mixture is None:
            return stats
        course = self._course
        if course is None or course.run != stats.run:
            course = _Course(stats.run, epoch, position, position, (0.0,) * len(self._mixture.sources))
        with self._lock:
            states = self._states(self._mixture, course, epoch, position)
        return replace(stats, sources=states)

    def _states(self, mixture: AnyMixture, course: _Course, epoch: int, position: int) -> tuple[SourceState, ...]:
        known, about = self._before(epoch, position)
        places = mixture.places(epoch, about)
        surely = places if known == about else mixture.places(epoch, known)
        begins = mixture.places(epoch, 0)
        num_bad = self._bad_samples.by_source(course.run)
        return tuple(
            SourceState(
                source.name,
                due=due,
                num_passes=places[number] / source.num_samples,
                is_used_up=source.most is not None and surely[number] - begins[number] >= source.most,
                num_bad=num_bad.get(source.name, 0),
                share_of="tokens" if isinstance(mixture, TokenMixture) else "samples",
            )
            for number, (source, due) in enumerate(zip(mixture.sources, self._due(mixture, course), strict=True))
        )

    def _due(self, mixture: AnyMixture, course: _Course) -> tuple[float, ...]:
        """What the weights come to over all positions that were delivered."""
        due = list(course.due)
        begin, end = (self._before(course.epoch, position)[1] for position in (course.begin, course.end))
        for segment in mixture.course(course.epoch, end):
            num = min(end, segment.end) - max(begin, segment.begin)
            if num > 0:
                for number, share in segment.shares.items():
                    due[number] += share * num
        return tuple(due)

    def _before(self, epoch: int, position: int) -> tuple[int, int]:
        """The mixture's positions that surely come before a position of the loader's, and about how many do."""
        return (position, position) if self._packing is None else self._packing.num_before(epoch, position)
