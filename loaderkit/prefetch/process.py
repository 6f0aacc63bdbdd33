"""`executor: process`: the engine in a process of its own, its batches in memory that both processes see.

    link ──messages──> receiver ──> (late stages, when there is a GPU) ──> next() ──> the training loop
      ^                                                                      │
      └── taken: one batch has left the budget; released: nobody sees them ──┘

No thread of this process works on batches, unless stages must run here: those that hold CUDA tensors.
"""

from __future__ import annotations

import _thread
import errno
import logging
import os
import resource
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from loaderkit.errors import ClosedError, ConfigError, WorkerDiedError
from loaderkit.order import Schedule
from loaderkit.prefetch import stalls, wire
from loaderkit.prefetch.arena import Allocator, Arena, stdio_occupied
from loaderkit.prefetch.host import host_stats
from loaderkit.prefetch.late import LateStages
from loaderkit.prefetch.ledger import Ledger
from loaderkit.prefetch.link import Link
from loaderkit.prefetch.receiver import Inbox, Receiver, relay
from loaderkit.prefetch.stats import StageStats, Stats, blank
from loaderkit.prefetch.watch import Patience, Report
from loaderkit.types import Stage

logger = logging.getLogger("loaderkit")
_JOIN_S = 10.0


class ProcessEngine:
    """An `Executor` whose work is done by another process. `make_engine` is what makes the engine there: it is pickled,
    and gets a function that allocates slabs. `late_stages` run here, on batches that have arrived."""

    def __init__(
        self,
        make_engine: Any,
        *,
        preload: str,
        schedule: Schedule,
        rows: Sequence[StageStats],
        late_stages: Sequence[Stage] = (),
        pinned: bool = False,
        memory_bytes: int,
        timeout_s: float,
        raises: bool = False,
    ) -> None:
        self._make_engine = make_engine
        self._preload = preload
        self._schedule = schedule
        self._late = LateStages(late_stages, time.perf_counter) if late_stages else None
        self._pinned = pinned
        self._timeout_s = timeout_s
        self._raises = raises
        self._link: Link | None = None
        self._inbox: Inbox | None = None
        self._ledger: Ledger | None = None
        self._generation = 0
        self._place = (0, 0)  # of the batch that comes next
        self._failure: BaseException | None = None
        self._early: list[tuple[Any, ...]] = []  # what to tell the process once there is one
        self._has_ordered_early = False
        self._ordering = threading.Lock()
        self._is_closed = False
        self._closing = threading.Lock()
        self._pid = os.getpid()
        self._latest = blank(rows, memory_bytes)  # what the other process said last
        self._waits = stalls.Waits()
        self._num_delivered = 0
        self._num_samples = 0
        self._first_wait_s: float | None = None

    # ------------------------------------------------------------------------------------------------ the consumer

    def start(self) -> None:
        """Start the process and send it its job; it imports what it needs meanwhile. Idempotent."""
        self._check_usable()
        if self._link is not None or self._failure is not None:
            return
        try:
            arena, link = self._open()
        except (OSError, RuntimeError) as error:
            # Without the traceback: its frames would hold the arena open for as long as the error is kept.
            self._failure = _not_started(error)
            raise self._failure from error.with_traceback(None)
        except BaseException as error:
            self._failure = error
            raise
        self._ledger = Ledger(arena, pinned=self._pinned)
        receiver = Receiver(link, self._ledger)
        self._inbox = receiver if self._late is None else self._late.follow(receiver)

    def _open(self) -> tuple[Arena, Link]:
        with stdio_occupied():
            arena = Arena.create()
            try:
                allocator = Allocator(arena)
                self._link = link = Link(arena, allocator, self._preload)
                self._send_job(link, arena, allocator)
            finally:
                arena.release_descriptor()
        return arena, link

    def _send_job(self, link: Link, arena: Arena, allocator: Allocator) -> None:
        parcel, _ = wire.post((self._make_engine, torch.get_num_threads()), arena, allocator)
        epoch, position = self._place
        link.tell(
            "job",
            {
                "job": parcel,
                "begin": allocator.end,
                "keep_pages": self._pinned,
                "epoch": epoch,
                "position": position,
                "log_level": logger.getEffectiveLevel(),
            },
        )
        with self._ordering:
            for order in self._early:
                link.tell(*order)
            self._has_ordered_early = True

    def resize(self, stage: str, num_workers: int) -> None:
        """Let so many threads of the other process run a stage. Raises ConfigError for one it does not run, and
        where the system has no more threads."""
        self._check_usable()
        names = [row.name for row in self._latest.stages]
        if stage not in names:
            why = "runs in the trainer's process, by one thread" if self._late is not None else "does not exist"
            raise ConfigError(f"stage {stage!r} {why} and cannot be resized; {', '.join(names)} can")
        self._order("resize", stage, num_workers)

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        """Change how far is read ahead. Raises ConfigError if the memory holds not even one batch."""
        self._check_usable()
        self._order("set_depth", num_batches, memory_bytes)

    def _order(self, *order: Any) -> None:
        """Let the other process do something, or note it down until there is one. Raises what it refuses that with."""
        with self._ordering:
            link = self._link if self._has_ordered_early else None
            if link is None:
                self._early.append(order)
                return
        if not link.is_awake:
            link.tell(*order)
        elif (refused := link.ask(*order)) is not None:
            raise refused

    def seek(self, epoch: int, position: int) -> None:
        """Go on from another place, unless the next batch is the one there."""
        self._check_usable()
        if (epoch, position) == self._place:
            return
        self._place = (epoch, position)
        if self._link is not None:
            self._generation += 1
            self._link.tell("seek", self._generation, epoch, position)

    def next(self) -> wire.Delivered:
        """The next batch in order; its error, if it has one, is still in it."""
        begin = time.perf_counter()
        if self._first_wait_s is None:
            self._first_wait_s = begin
        self._waits.begin(begin)
        try:
            self.start()
            if self._failure is not None:
                raise self._failure
            batch = self._wait()
            end = time.perf_counter()
        except BaseException:
            self._waits.begin(None)
            raise
        self._charge(batch, begin, end)
        if batch.error is None:
            self._num_delivered += 1
            self._num_samples += len(batch)
        at_end = self._schedule.num_batches(batch.end) == 0
        self._place = (batch.epoch + 1, 0) if at_end else (batch.epoch, batch.end)
        return batch

    def _wait(self) -> wire.Delivered:
        link, inbox = self._link, self._inbox  # which another thread's `close` lets go
        if link is None or inbox is None:
            raise ClosedError("the loader was closed while a batch was awaited")
        try:
            arrived = inbox.take(self._generation, 0.0)
            if arrived is None:  # else `taken` says it as well: a message costs 0.1 ms, as it wakes the other process
                inbox.give_back()
                patience = Patience(self._timeout_s, self._raises)
                silent = Report(f"process {link.pid} is still starting, or does not answer")
                arrived = inbox.take(self._generation, patience.next_s)
                while arrived is None:
                    patience.ends(lambda: link.ask("report") or silent)
                    arrived = inbox.take(self._generation, patience.next_s)
        except EOFError:
            if self._is_closed:
                raise ClosedError("the loader was closed while a batch was awaited") from None
            self._failure = link.death()
            raise self._failure from None
        except Exception as error:
            self._failure = error
            raise
        inbox.taken()
        return arrived.batch

    def _charge(self, batch: wire.Delivered, begin: float, end: float) -> None:
        first_s = batch.segments[0].since_s if batch.segments else batch.done_s
        segments = [
            stalls.Segment(begin, first_s, stalls.START),
            *batch.segments,
            stalls.Segment(batch.done_s, end, stalls.WAKEUP),
        ]
        self._waits.end(stalls.charge(segments, begin, end))

    # ------------------------------------------------------------------------------------------------- any thread

    def stats(self, tuning: dict[str, Any], run: int) -> Stats:
        """The accounts up to now; what the other process said last, if it does not answer."""
        link, asked_since_s = self._link, self._waits.since_s
        answer: Stats | None = None
        if link is not None and not self._is_closed and os.getpid() == self._pid:
            answer = link.ask("stats", asked_since_s)
            tuning = {**tuning, "pid": link.pid}
        stall_s, since_s, now = self._waits.read(time.perf_counter)
        self._latest = latest = answer or self._latest
        if since_s is not None:
            waited = answer.stall_s if answer is not None and since_s == asked_since_s else {}
            so_far_s = sum(waited.values())
            if so_far_s <= 0:
                waited, so_far_s = {stalls.START: 1.0}, 1.0
            for cause, seconds in waited.items():  # the answer took its time, too
                stall_s[cause] = stall_s.get(cause, 0.0) + seconds * (now - since_s) / so_far_s
        late = [] if self._late is None else self._late.rows(now)
        return replace(
            latest,
            run=run,
            now_s=now,
            wall_s=0.0 if self._first_wait_s is None else now - self._first_wait_s,
            num_batches=self._num_delivered,
            num_samples=self._num_samples,
            stall_s=stall_s,
            stages=[*latest.stages, *late],
            memory={
                **latest.memory,
                "rss_peak_bytes": host_stats().rss_peak_bytes,
                "process_rss_peak_bytes": latest.memory["rss_peak_bytes"],
            },
            tuning=tuning,
        )

    def close(self, join_s: float = _JOIN_S) -> None:
        """End the process; batches that were delivered stay valid. Idempotent, from any thread and any state."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        if os.getpid() != self._pid:
            return  # in a fork's child the process is not ours, nor is its memory
        for message in self._link.close(join_s) if self._link is not None else ():
            if isinstance(message, wire.LogMessage):
                relay(message)
        if self._inbox is not None:
            self._inbox.close()
        if self._ledger is not None:
            self._ledger.close()
        self._inbox = self._ledger = self._failure = None  # an error's traceback would keep all of it alive

    def abandon(self) -> None:
        """Close, once the loader is garbage; the collector may run in a thread that closing would wait for."""
        if threading.current_thread().name.startswith("loaderkit"):
            _thread.start_new_thread(self.close, ())
        else:
            self.close()

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ClosedError("the loader is closed: build another one")
        if os.getpid() != self._pid:
            raise ClosedError(
                "the loader was made before a fork and used after it, where its process answers only to the parent: build "
                "one in each process"
            )


def _not_started(error: OSError | RuntimeError) -> WorkerDiedError:
    """What to raise where the system has not what a process and its sockets need."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        reason += f": this process may have {limit} descriptors (`ulimit -n`): raise that, or keep fewer files open"
    return WorkerDiedError(
        f"the process that loads could not be started: {reason}; or use prefetch.executor: thread, which needs no process"
    )
