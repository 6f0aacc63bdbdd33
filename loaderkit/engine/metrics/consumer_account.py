"""Counts what the consumer of an executor has waited for, and what it was given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from loaderkit.engine.metrics.host import CpuWatch
from loaderkit.engine.metrics.trace import Handoff
from loaderkit.engine.metrics.worker_clock import Clock
from loaderkit.engine.work import Delivery, SourceCounts

Given = TypeVar("Given", bound=Delivery)


class AccountReading(NamedTuple):
    """The account at one moment. All but `waiting_since_s`, the begin of the open wait, are fields of a `Snapshot`."""

    now_s: float
    wall_s: float
    num_batches: int
    num_samples: int
    num_dropped: int
    by_source: SourceCounts
    waits_s: dict[str, float]  # those that ended
    waiting_since_s: float | None

    def counters(self, open_wait: Mapping[str, float]) -> dict[str, Any]:
        """The fields of a `Snapshot`, with the seconds of the open wait by cause."""
        fields, waits_s = self._asdict(), dict(self.waits_s)
        for cause, seconds in open_wait.items():
            waits_s[cause] = waits_s.get(cause, 0.0) + seconds
        del fields["waiting_since_s"]
        return {**fields, "waits_s": waits_s}


class ConsumerAccount:
    """Counts what the consumer takes from an executor, and charges its waits. Its thread writes; `read` is for any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._first_wait_s: float | None = None
        # The waits that ended, by cause, and since when the consumer has been in one: both are written at once, so that a
        # reader counts every wait once, also one that is being charged.
        self._waits: tuple[dict[str, float], float | None] = ({}, None)
        self._handoffs: deque[Handoff] | None = None  # while they are traced
        self.cpus = CpuWatch()  # since the first wait
        self.last_wait: Mapping[str, float] = {}  # the seconds by cause of the last wait that ended in a batch
        self.num_batches = self.num_samples = self.num_dropped = 0
        self.by_source = SourceCounts()
        self.next_position: tuple[int, int] | None = None
        """(epoch, position) where the next batch surely begins: behind the last one that was given, or where a seek
        ended. None while a batch is taken: if that is not given, as after Ctrl-C, it has to be made again."""

    def take(self, wait: Callable[[], Given], causes_of: Callable[[Given, float, float], dict[str, float]]) -> Given:
        """What `wait` returns, counted. `causes_of(given, begin_s, end_s)` are the seconds of that wait by cause."""
        begin_s = self._waits[1]
        if begin_s is None:
            begin_s = self._clock()
            self.wait_since(begin_s)
        self.next_position = None
        try:
            given = wait()
            end_s = self._clock()
        except BaseException:
            self.begin(None)  # only waits that end in a batch count
            raise
        causes = causes_of(given, begin_s, end_s)
        self.end(causes)
        if self._handoffs is not None:
            self._handoffs.append(Handoff(begin_s, end_s, given.epoch, given.end, len(given), causes))
        if given.error is None and not given.is_end:
            self.num_batches += not given.is_empty
            self.num_samples += len(given) - given.num_dropped - given.num_skipped
            self.num_dropped += given.num_dropped
            self.by_source = self.by_source.plus(given.by_source)
            self.next_position = given.epoch, given.end
        return given

    def wait_since(self, begin_s: float) -> None:
        """The consumer waits since then; `take` follows, if it has not begun."""
        if self._first_wait_s is None:
            self._first_wait_s = begin_s
            self.cpus.begin()
        self.begin(begin_s)

    def begin(self, now: float | None) -> None:
        """A wait begins; with None there is no wait, or one ended that does not count."""
        self._waits = (self._waits[0], now)

    def end(self, causes: Mapping[str, float]) -> None:
        """The wait has ended with a batch; `causes` are its seconds by cause."""
        ended, self.last_wait = dict(self._waits[0]), causes
        for cause, seconds in causes.items():
            ended[cause] = ended.get(cause, 0.0) + seconds
        self._waits = (ended, None)

    def record(self, num_handoffs: int) -> None:
        """Keep the last `num_handoffs` waits from now on."""
        self._handoffs = deque(maxlen=num_handoffs)

    def recorded(self) -> list[Handoff]:
        """The waits that were kept; stops keeping them."""
        handoffs, self._handoffs = self._handoffs, None
        return [] if handoffs is None else list(handoffs.copy())

    def read(self, at_s: float | None = None) -> AccountReading:
        """The account now, or at `at_s`, a moment ago."""
        counts = self.num_batches, self.num_samples, self.num_dropped, self.by_source
        while True:
            waits = self._waits
            now = self._clock()
            if waits is self._waits:
                break
        now = now if at_s is None else min(now, at_s)
        wall_s = 0.0 if self._first_wait_s is None else now - self._first_wait_s
        return AccountReading(now, wall_s, *counts, dict(waits[0]), waits[1])
