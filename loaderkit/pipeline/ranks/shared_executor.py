"""`ranks: {share: broadcast}`: an executor for ranks that need the same batches. Only the first of these ranks has workers.

    its executor ──batches──> a thread ──> two ready ones ──> next() ──> the training loop
                                 └─gloo─> a thread ──> two ready ones ──> next() ──> the loop of another rank

The thread of each rank runs ahead of its loop. Stages from a `transfer` to CUDA on run in it, on every rank for itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

import torch

from loaderkit._internal.cuda.pinned import PinnedMemory
from loaderkit._internal.garbage import close_collected
from loaderkit.engine import watchdog
from loaderkit.engine.contracts import Executor
from loaderkit.engine.lifetime import Lifetime
from loaderkit.engine.metrics import stalls
from loaderkit.engine.metrics.consumer_account import ConsumerAccount
from loaderkit.engine.metrics.host import host_stats
from loaderkit.engine.metrics.snapshot import Snapshot
from loaderkit.engine.metrics.trace import Trace, num_entries
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.metrics.worker_clock import Clock
from loaderkit.engine.remote.delivery import Delivered
from loaderkit.errors import ClosedError, PeerError, StallTimeout
from loaderkit.pipeline.ranks import passing
from loaderkit.pipeline.ranks.passing import Passed
from loaderkit.pipeline.ranks.share_stages import ShareStages, cut_wait
from loaderkit.ranks.channel import PeerChannel
from loaderkit.sampling.schedule import BatchSampler

_NUM_READY = 2  # batches that wait for the loop: while it uses one, another may come late
_MAX_STALE = 4 * _NUM_READY + 4  # batches of before a seek; more come only if the ranks do not take the same steps
_LOOK_S = 1.0
_MUCH_BYTES = 2**16  # a smaller tensor is not pinned

logger = logging.getLogger("loaderkit")


class SharedExecutor:
    """An `Executor`. `inner` makes the batches on the rank that reads; it is None on a rank to which another one passes
    them on."""

    def __init__(
        self,
        inner: Executor | None,
        channel: PeerChannel,
        stages: ShareStages,
        *,
        schedule: BatchSampler,
        num_epochs: int | None,
        about: Callable[[], Mapping[str, str]],
        memory_bytes: int,
        timeout_s: float,
        raises: bool,
        pinned_for: torch.device | None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """The result of `about` has to be the same on all ranks. `pinned_for`: the CUDA device to which arriving
        batches are copied."""
        self._inner = inner
        self._channel = channel
        self._stages = stages
        self._schedule = schedule
        self._num_epochs = num_epochs
        self._about = about
        self._memory_bytes = memory_bytes
        self._timeout_s = timeout_s
        self._raises = raises
        self._pinned = None if pinned_for is None else PinnedMemory(pinned_for)
        self._clock = clock
        self.account = ConsumerAccount(clock)
        self.lifetime = Lifetime()
        self._changed = threading.Condition()  # guards the next three, and the end
        self._ready: deque[Passed] = deque()
        self._generation = 0  # the number of seeks so far
        self._begin = (0, 0)  # (epoch, position) of the last of them
        self._next_position = (0, 0)  # of the loop's next batch
        self._thread: threading.Thread | None = None
        self._doing = "connects"
        self._reads_since_s: float | None = None  # while the thread waits for `inner`
        self._inner_s: dict[str, float] = {}  # its waits for `inner` so far
        self._batch_bytes = 0
        self._closing = threading.RLock()
        self._has_ended = False

    # ------------------------------------------------------------------------------------------------ the consumer

    def start(self) -> None:
        """Start the thread, which connects with the other ranks. Idempotent."""
        self.lifetime.check_usable()
        if self._thread is None:
            self._channel.begin()
            self._stages.begin()
            self._thread = threading.Thread(target=self._work, name="loaderkit-share", daemon=True)
            self._thread.start()

    def seek(self, epoch: int, position: int) -> None:
        """Continue at another position, unless the next batch begins there."""
        self.lifetime.check_usable()
        if (epoch, position) == self._next_position and self._generation:
            return
        self._next_position = (epoch, position)
        with self._changed:
            self._generation += 1
            self._begin = (epoch, position)
            while self._ready and self._ready[0].batch is not None:
                if self._ready[0].generation >= self._generation:
                    break  # the rank that reads was here first
                self._ready.popleft()
            self._changed.notify_all()

    def next(self) -> Delivered:
        """The next batch in order; its error, if it has one, is still in it. Raises PeerError."""
        batch = self.account.take(self._wait, self._causes)
        self._next_position = self._schedule.next_position_after(batch.epoch, batch.end, 0)
        return batch

    def _wait(self) -> Delivered:
        """The next batch of the loop's generation. Raises what ended the thread; PeerError if another rank took other steps."""
        self.start()
        patience = watchdog.Patience(self._timeout_s, self._raises)
        left_s = patience.next_s
        with self._changed:
            while True:
                self.lifetime.check_awaited()
                if self._ready:
                    passed = self._ready[0]
                    if passed.failure is not None:
                        raise passed.failure
                    if passed.generation != self._generation or passed.begin != self._next_position:
                        raise self._apart(passed)
                    assert passed.batch is not None
                    self._ready.popleft()
                    self._changed.notify_all()
                    return passed.batch
                if self._channel.failure is not None:
                    raise self._channel.failure
                self._changed.wait(min(left_s, _LOOK_S))
                left_s -= _LOOK_S
                if left_s <= 0 and not self._ready:
                    if self._reads_since_s is None and self._doing != "connects":  # else others report
                        self._end_patience(patience)
                    left_s = patience.next_s

    def _end_patience(self, patience: watchdog.Patience) -> None:
        try:
            patience.ends(self._report)
        except StallTimeout:
            # The rank that reads has waited as long, and its error, which says for what, may be on its way.
            if self._inner is not None or not self._changed.wait_for(lambda: self._ready, self._timeout_s / 4):
                raise

    def _apart(self, passed: Passed) -> PeerError:
        """The error of ranks that do not take the same steps."""
        (epoch, position), (other_epoch, other_position) = self._next_position, passed.begin
        return self._channel.fail(
            f"is at position {position} of epoch {epoch}, and rank {self._channel.reader}, which reads for it, went on to "
            f"position {other_position} of epoch {other_epoch}: ranks that share batches take the same number of batches, "
            "break at the same one, and load the same state"
        )

    def _report(self) -> watchdog.HangReport:
        thread = self._thread
        assert thread is not None
        name = self._stages.current
        where = f"its thread {self._doing}" if name is None else f"it is in {name} on this rank"
        epoch, position = self._next_position
        lines = [f"awaited: the batch at position {position} of epoch {epoch}; {where}", watchdog.stack_of(thread)]
        if self._inner is None:
            lines.insert(1, f"rank {self._channel.reader} reads it: its log, or its stacks, say what it waits for")
        return watchdog.HangReport("\n".join(lines), name or self._stages.name)

    def _causes(self, batch: Delivered, begin_s: float, end_s: float) -> dict[str, float]:
        before = stalls.WaitSegment(begin_s, batch.segments[0].since_s, self._before)
        behind = stalls.WaitSegment(batch.done_s, end_s, stalls.WAKEUP)
        return stalls.charge([before, *batch.segments, behind], begin_s, end_s)

    @property
    def _before(self) -> str:
        """What the loop waits for before the thread begins with its batch."""
        return self._stages.name if self.account.num_batches else stalls.START

    # -------------------------------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        try:
            self._channel.connect(self._about())
            generation, here = 0, None
            while (wanted := self._await_room(generation, here)) is not None:
                generation, here = self._pass_one(generation, here, *wanted)
        except BaseException as error:
            with self._changed:
                self._ready.append(Passed(self._generation, self._begin, None, error))
                self._changed.notify_all()

    def _await_room(self, generation: int, here: tuple[int, int] | None) -> tuple[int, tuple[int, int]] | None:
        """The (generation, begin) of the loop, once there is room for a batch of it; None when the loader is closed.

        `here` is where the thread is in `generation`; None if that is over, so that only a seek can continue.
        """
        self._stages.enter_blocked()
        with self._changed:
            while not self.lifetime.is_closed:
                if self._generation > generation or (here is not None and len(self._ready) < _NUM_READY):
                    return self._generation, self._begin
                self._changed.wait()
        return None

    def _pass_one(
        self, generation: int, here: tuple[int, int] | None, wanted: int, begin: tuple[int, int]
    ) -> tuple[int, tuple[int, int] | None]:
        """Pass one batch on; returns (generation, position behind it), with None as the position if nothing follows."""
        if wanted > generation:
            generation, here = wanted, begin
            if self._inner is not None:
                self._inner.seek(*begin)
        assert here is not None
        since_s = self._clock()
        self._stages.enter_starved()
        passed, causes = self._read(generation, here) if self._inner is not None else self._receive(generation)
        assert passed.batch is not None
        generation, ended_s = max(generation, passed.generation), self._clock()
        segments = cut_wait(since_s, ended_s, causes)
        if self._inner is not None:
            self._doing = "passes a batch on"
            self._stages.enter()
            passed = passing.send(self._channel, passed)
            segments.append(stalls.WaitSegment(ended_s, self._stages.served(passed), self._stages.name))
        else:
            self._stages.served(passed)
        self._batch_bytes = max(self._batch_bytes, passed.num_bytes)
        self._doing = "runs stages"
        batch, later = self._stages.run(passed)
        batch.segments = [*segments, *later]
        batch.done_s = batch.segments[-1].until_s
        self._put(passed._replace(batch=batch))
        self._doing = "waits for the loop"
        behind = self._schedule.next_position_after(batch.epoch, batch.end, 0)
        is_over = batch.error is not None or batch.is_end
        is_over = is_over or (self._num_epochs is not None and behind[0] >= self._num_epochs)
        return generation, None if is_over else behind

    def _put(self, passed: Passed) -> None:
        with self._changed:
            if passed.generation >= self._generation:
                self._ready.append(passed)
                self._changed.notify_all()

    def _read(self, generation: int, here: tuple[int, int]) -> tuple[Passed, Mapping[str, float]]:
        """The next batch of this rank's own executor. If the executor stops with an error, the other ranks are told."""
        assert self._inner is not None
        self._doing = "reads"
        self._reads_since_s = self._clock()
        try:
            delivery = self._inner.next()
        except Exception as error:
            with self._changed:
                is_closed = self.lifetime.is_closed
            if not is_closed:
                with suppress(PeerError, ClosedError):
                    passing.send(self._channel, Passed(generation, here, None, error))
            raise
        finally:
            self._reads_since_s = None
        causes = self._inner.account.last_wait
        for cause, seconds in causes.items():
            self._inner_s[cause] = self._inner_s.get(cause, 0.0) + seconds
        return Passed(generation, here, passing.delivered(self._inner, delivery)), causes

    def _receive(self, generation: int) -> tuple[Passed, Mapping[str, float]]:
        """The next batch of the reading rank; batches from before a seek of this rank are dropped."""
        self._doing = f"waits for rank {self._channel.reader}, which reads"
        for _ in range(_MAX_STALE):
            passed = passing.receive(self._channel, self._new_memory, self._stages.enter)
            if passed.failure is not None:
                raise passed.failure
            if passed.generation >= generation:  # above it: this rank's loop will be there soon
                return passed, {self._stages.name: 1.0}
        raise self._apart(passed)

    def _new_memory(self, num_bytes: int) -> torch.Tensor:
        """Memory for a tensor that arrives: uint8 [num_bytes], on the CPU."""
        pinned = None if self._pinned is None or num_bytes < _MUCH_BYTES else self._pinned.take(num_bytes)
        if pinned is not None:
            return torch.from_numpy(pinned)
        return torch.empty(num_bytes, dtype=torch.uint8)

    # ------------------------------------------------------------------------------------------------- any thread

    def resize(self, stage: str, num_workers: int) -> None:
        """Set the workers of a stage on the rank that reads; others have none."""
        self.lifetime.check_usable()
        if self._inner is not None:
            self._inner.resize(stage, num_workers)

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        """Set how far the rank that reads reads ahead; others keep the same number of ready batches."""
        self.lifetime.check_usable()
        self._memory_bytes = memory_bytes or self._memory_bytes
        if self._inner is not None:
            self._inner.set_depth(num_batches, memory_bytes)

    def set_processes(self, num: int, refused: Callable[[str], None]) -> None:
        """Set the number of processes of the rank that reads."""
        self.lifetime.check_usable()
        if self._inner is not None:
            self._inner.set_processes(num, refused)

    def stats(self, tuning: Tuning, run: int) -> Snapshot:
        """The counters up to now: of the executor, if this rank has it, and of what is passed on."""
        read, reads_since_s = self.account.read(), self._reads_since_s
        if self._inner is not None:
            stats = self._inner.stats(tuning, run)
        else:
            stats = Snapshot.empty([], self._memory_bytes)
            memory = {"open_bytes": self._batch_bytes * len(self._ready), "batch_bytes": self._batch_bytes}
            host = self.account.cpus.added_to(host_stats())
            memory["rss_peak_bytes"] = host.rss_peak_bytes
            stats = replace(stats, memory={**stats.memory, **memory}, host=host)
        since_s, now, open_wait = read.waiting_since_s, read.now_s, dict[str, float]()
        if since_s is not None and now > since_s:
            open_wait = self._open_wait(stats, since_s, now, reads_since_s)
        return replace(
            stats,
            run=run,
            **read.counters(open_wait),
            stages=[*stats.stages, *self._stages.rows(now)],
            num_ready=stats.num_ready + len(self._ready),
            tuning=tuning if stats.tuning.pids is None else replace(tuning, pids=stats.tuning.pids),
        )

    def _open_wait(self, stats: Snapshot, since_s: float, now: float, reads_since_s: float | None) -> dict[str, float]:
        """Seconds by cause of the loop's wait since `since_s`."""
        before = self._before
        if reads_since_s is None:
            return {before: now - since_s}
        reading_s = min(now - since_s, max(0.0, now - reads_since_s))
        open_s = {cause: max(0.0, s - self._inner_s.get(cause, 0.0)) for cause, s in stats.waits_s.items()}
        total_s = sum(open_s.values())
        causes = (
            {cause: reading_s * s / total_s for cause, s in open_s.items() if s} if total_s else {before: reading_s}
        )
        causes[before] = causes.get(before, 0.0) + now - since_s - reading_s
        return causes

    def record(self) -> None:
        """Start a trace of workers, thread and loop."""
        self.account.record(num_entries(1))
        self._stages.record()
        if self._inner is not None:
            self._inner.record()

    def recorded(self) -> Trace:
        """The trace since `record`; ends it."""
        lanes = [] if self._inner is None else self._inner.recorded().lanes
        return Trace([*lanes, *self._stages.recorded()], self.account.recorded())

    def close(self, join_s: float = 10.0) -> None:
        """Stop the thread and the executor, and leave the other ranks. Idempotent, from any thread and any state."""
        if self.lifetime.is_fork:
            self.lifetime.is_closed = True
            return  # in a fork's child neither threads nor connections are ours
        with self._closing:
            if self._has_ended:
                return
            with self._changed:
                self.lifetime.is_closed = True
                error = next(
                    (passed.failure for passed in self._ready if passed.failure is not None), self._stages.error
                )
                self._changed.notify_all()
            self._stages.interrupt()
            self._channel.leave(None if isinstance(error, ClosedError) else error)
            if self._inner is not None:
                self._inner.close(join_s)
            self._join(join_s)
            self._stages.close()
            self._ready.clear()
            self._has_ended = True  # set last: a second call completes a close that Ctrl-C has interrupted

    def _join(self, join_s: float) -> None:
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(join_s)
        if thread.is_alive():
            stack = watchdog.stack_of(thread)
            logger.warning("%s did not stop within %g s: a stage hangs\n%s", thread.name, join_s, stack)

    def abandon(self) -> None:
        """Close because the loader was collected."""
        close_collected(self.close)
