"""The engine: pools of workers that pull chunks, fill destinations, and hand them over in order.

A chunk runs through all stages of a pool without a hand-off; a hand-off to another pool costs 10 to 20 us. Where chunks come
from and where they land is `intake.py`.
"""

from __future__ import annotations

import _thread
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from loaderkit.errors import ClosedError, ConfigError
from loaderkit.prefetch import stalls, watch
from loaderkit.prefetch.accounts import Account, Clock, States
from loaderkit.prefetch.buffers import Buffer
from loaderkit.prefetch.intake import Intake
from loaderkit.prefetch.intraop import ONE_AT_A_TIME, threads_to_come_kept
from loaderkit.prefetch.plan import Plan
from loaderkit.prefetch.pools import PoolPlan
from loaderkit.prefetch.self_service import SelfService
from loaderkit.prefetch.slowest import SlowItems
from loaderkit.prefetch.stats import Stats, collect
from loaderkit.prefetch.tape import WHOLE, Handover, Recording, cut, new_tape, tape_length
from loaderkit.prefetch.turns import Ticket, Turns
from loaderkit.types import BatchContext, Chunk, Destination, Stage

_JOIN_S = 10.0
logger = logging.getLogger("loaderkit")


class Pool:
    """A running pool. The first takes its chunks from the engine's intake, the others from a buffer."""

    def __init__(self, number: int, plan: PoolPlan, states: States, clock: Clock, *, takes_turns: bool = True) -> None:
        self.number = number
        self._takes_turns = takes_turns
        self.plan = plan
        self.num_workers = plan.num_workers  # that are wanted; others rest
        self.buffer: Buffer[Chunk | Destination] | None = Buffer(2 * plan.num_workers, states) if number else None
        self.turns = Turns(clock)
        self.accounts: list[Account] = []
        self.threads: list[threading.Thread] = []

    def one_works(self) -> bool:
        """Whether only one worker takes chunks at present."""
        return self.num_workers == 1 or self.turns.one_at_a_time

    def begin(self) -> Ticket | None:
        """A worker begins with a chunk."""
        return self.turns.begin() if self.num_workers > 1 and self._takes_turns else None

    def end(self, ticket: Ticket | None, num_samples: int) -> None:
        """It is done with it."""
        if ticket is not None or (self.num_workers > 1 and self._takes_turns):
            self.turns.end(ticket, num_samples)


class Engine:
    """Runs a plan. All public methods but `stats` and `close` belong to the consumer's thread."""

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[Stage],
        pools: Sequence[PoolPlan],
        *,
        inline: bool,
        self_service: bool = False,
        timeout_s: float,
        raises: bool = False,
        takes_turns: bool = True,
        clock: Clock = time.perf_counter,
        counters: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        """`raises`: a wait longer than `timeout_s` is an error, and not only reported. `takes_turns`: try whether one worker
        alone is faster; not where no stage holds the GIL, and workers are off the CPU because they wait for a store.
        `counters`: what the store has done."""
        self.plan = plan
        self.stages = stages
        self.states = States(len(stages))
        self.clock = clock
        self.counters = counters
        self.inline = inline
        self.pools = [
            Pool(number, pool, self.states, clock, takes_turns=takes_turns) for number, pool in enumerate(pools)
        ]
        self._stage_names = [stage.name for stage in stages]
        accounts = [pool.accounts for pool in self.pools]
        self._facts = {short: stalls.Facts(short, self._stage_names, accounts) for short in (False, True)}
        self.waits = stalls.Waits()
        self.slow_items = SlowItems(len(stages))
        self.num_delivered = 0
        self.num_samples = 0
        self.num_self_served = 0  # made in the loop's thread, in a worker's place
        self.first_wait_s: float | None = None
        self._timeout_s = timeout_s
        self._raises = raises
        num_workers = sum(pool.num_workers for pool in pools)
        self.intake = Intake(
            plan,
            self.states,
            clock,
            num_workers=num_workers,
            inline=inline,
            is_whole=len(pools) == 1,
            one_works=self.pools[0].one_works,
        )
        self._sizing = threading.RLock()  # of pools
        self._resized = threading.Condition(self._sizing)  # workers that are not wanted wait on it
        may_serve_itself = self_service and not inline and len(pools) == 1
        self._batch = next((number for number, stage in enumerate(stages) if stage.kind == "batch"), None)
        self._self_service = SelfService(self.intake) if may_serve_itself else None
        self._tape_length = 0  # of what is recorded of each worker
        self._is_started = False
        self._is_closed = False
        self._has_ended = False
        self._pid = os.getpid()

    # ------------------------------------------------------------------------------------------------ the consumer

    def start(self) -> None:
        """Begin to work ahead. Idempotent. The inline executor has nothing to start: it works when it is asked."""
        self._check_usable()
        if self._is_started:
            return
        self._is_started = True
        if self.inline:
            account = Account(self.states, self.clock, first_state=self.states.blocked, slow_items=self.slow_items)
            self._record(account)
            self.pools[0].accounts.append(account)
            return
        with self._sizing:
            try:
                self._start_missing_workers()
            except BaseException as error:  # Ctrl-C, or no more threads to be had
                self.intake.fail(error)
                raise

    def resize(self, stage: str, num_workers: int) -> None:
        """Let so many workers run `stage` and what shares its pool, from now on; from any thread.

        Workers that are too many rest once they are done with their chunk. Raises ConfigError for a stage there is not, and
        where the system has no more threads: then it goes on with those there are.
        """
        self._check_usable()
        if self.inline:
            raise ConfigError(
                f"stage {stage!r} has no workers to resize: prefetch.executor is inline; use thread or process"
            )
        pool = self._pool_of(stage)
        with self._sizing:
            self._check_usable()  # a thread that starts now would be joined by nobody
            before = pool.num_workers
            try:
                self._want(pool, num_workers)
                if self._is_started:
                    self._start_missing_workers()
            except BaseException as error:
                self._want(pool, before)
                if not isinstance(error, RuntimeError):
                    raise
                raise ConfigError(
                    f"resize: {num_workers} workers for {stage!r} could not be started ({error}): the system allows no more "
                    f"threads (`ulimit -u`, the cgroup's pids.max, or memory for their stacks); it goes on with {before}"
                ) from error
        self.intake.resize(sum(pool.num_workers for pool in self.pools))
        if self._self_service is not None:
            self._self_service.forget()
        if pool.buffer is not None:
            pool.buffer.resize(2 * num_workers)

    def _want(self, pool: Pool, num_workers: int) -> None:
        """Let the first so many workers of a pool work, and the others rest. Under the lock of sizes."""
        pool.num_workers = num_workers
        for number, account in enumerate(pool.accounts):
            account.is_wanted = number < num_workers
        self._resized.notify_all()

    def _pool_of(self, stage: str) -> Pool:
        for pool in self.pools:
            if stage in (self.stages[number].name for number in pool.plan.stages):
                return pool
        raise ConfigError(f"there is no stage {stage!r} to resize; there are {', '.join(self._stage_names)}")

    def set_depth(self, num_batches: int | None, memory_bytes: int | None) -> None:
        """Change how many batches are read ahead, and in how many bytes; None: as it is. From any thread."""
        self._check_usable()
        self.intake.set_depth(num_batches, memory_bytes)

    def _start_missing_workers(self) -> None:
        """Start as many threads as are wanted and not there; returns when all of them run, or, raising, when none of them
        is left. Under the lock of sizes."""
        num_there = [len(pool.accounts) for pool in self.pools]
        missing = [(pool, n) for pool in self.pools for n in range(len(pool.accounts), pool.num_workers)]
        since_s = self.clock()  # starting them is part of their time: a few milliseconds
        ready = threading.Barrier(len(missing) + 1)
        with ONE_AT_A_TIME, threads_to_come_kept() as compute_alone:
            try:
                for pool, number in missing:
                    self._start_worker(pool, number, ready, since_s, compute_alone)
                ready.wait()
            except BaseException:
                ready.abort()  # let those go that run
                for pool, num_before in zip(self.pools, num_there, strict=True):
                    for thread in pool.threads[num_before:]:
                        thread.join()
                    del pool.accounts[num_before:], pool.threads[num_before:]
                raise

    def _start_worker(
        self, pool: Pool, number: int, ready: threading.Barrier, since_s: float, compute_alone: Callable[[], None]
    ) -> None:
        states = self.states
        account = Account(states, self.clock, first_state=states.starved, since_s=since_s, slow_items=self.slow_items)
        self._record(account)
        names = [self.stages[stage].name for stage in pool.plan.stages]
        thread = threading.Thread(
            target=self._work,
            args=(pool, account, ready, compute_alone),
            name=f"loaderkit-{'+'.join(names)}-{number}"[:64],
            daemon=True,
        )
        thread.start()
        pool.threads.append(thread)
        pool.accounts.append(account)

    def next(self) -> Destination:
        """The next destination in order, complete; its error, if it has one, is still in it."""
        begin = self.clock()
        if self.first_wait_s is None:
            self.first_wait_s = begin
        self.waits.begin(begin)
        service = self._self_service
        try:
            self.start()
            destination = self._wait(begin)
            end = self.clock()
            if service is not None:
                service.leaves(end)
        except BaseException:
            self.waits.begin(None)  # only waits that end in a batch count
            if os.getpid() == self._pid:  # in a fork's child its lock may never open
                self.intake.give_back()  # Ctrl-C may have come right after borrowing
            raise
        assert destination.last_chunk is not None
        way = stalls.Way(destination.opened_s, destination.last_chunk.marks, destination.done_s)
        causes = self.attribute(begin, end, way)
        self.waits.end(causes)
        if self.waits.tape is not None:
            batch = (destination.epoch, destination.end, len(destination))
            self.waits.tape.append(Handover(begin, end, *batch, causes))
        if destination.error is None:
            self.num_delivered += 1
            self.num_samples += len(destination)
        destination.last_chunk = None
        destination.chunks = []
        return destination

    def attribute(self, begin_s: float, end_s: float, way: stalls.Way) -> dict[str, float]:
        """Seconds of the wait [begin_s, end_s) by cause, along the way of the chunk that was waited for."""
        if way.done_s <= begin_s:  # it was there already; most waits are such
            return {stalls.WAKEUP: end_s - begin_s}
        return stalls.attribute(begin_s, end_s, way, self._facts[self.intake.is_short_of_memory])

    def trace(self, begin_s: float, end_s: float, way: stalls.Way) -> list[stalls.Segment]:
        """What the chunk that was waited for went through within [begin_s, end_s)."""
        return stalls.trace(begin_s, end_s, way, self._facts[self.intake.is_short_of_memory])

    def open_wait(self, begin: float | None, now: float) -> dict[str, float]:
        """Seconds by cause of the wait that the consumer has been in since `begin`; for any thread."""
        is_fork = os.getpid() != self._pid  # there nobody waits, nor opens the locks
        if begin is None or begin >= now or is_fork:
            return {}
        head = self.intake.head()
        if head is not None and head.is_done:
            return self.attribute(begin, now, stalls.Way(head.opened_s, [], head.done_s))
        if head is None:
            way = stalls.Way(now, [], now)
        else:
            # Of the chunks that keep the batch waiting, the one that is the least far.
            unfinished = [chunk for chunk in list(head.chunks) if chunk.samples]
            last = min(unfinished, key=lambda chunk: len(chunk.marks), default=None)
            way = stalls.Way(head.opened_s, list(last.marks) if last is not None else [], now)
        return self.attribute(begin, now, way)

    def _wait(self, begin_s: float) -> Destination:
        works_itself = self.inline or (self._self_service is not None and self._self_service.comes(begin_s))
        patience, left_s = None, 0.0
        while True:
            while works_itself:
                found = self.intake.first() if self.intake.num_ready else None
                if found is not None:
                    return found
                if not (self._work_inline() if self.inline else self._work_for_a_worker()):
                    break
            if patience is None:
                patience = watch.Patience(self._timeout_s, self._raises)
                left_s = patience.next_s
            found, left_s = self.intake.wait_for_first(left_s)
            if found is not None:
                return found
            if left_s <= 0:
                patience.ends(self.describe_wait)
                left_s = patience.next_s

    def describe_wait(self) -> watch.Report:
        """Where every unfinished chunk of the awaited batch is, and what the workers do; for any thread."""
        return watch.describe_wait(
            self.intake.head(),
            self.clock(),
            stage_names=[stage.name for stage in self.stages],
            key_of=self.plan.key,
            threads=[thread for pool in self.pools for thread in pool.threads],
        )

    def stats(self, tuning: dict[str, Any], run: int, at_s: float | None = None) -> Stats:
        """The accounts up to now, or to a moment ago; for any thread."""
        return collect(self, tuning, run, at_s)

    def record(self) -> None:
        """Keep what workers and loop do from now on, as much as `tape` says."""
        with self._sizing:
            self._tape_length = tape_length(sum(pool.num_workers for pool in self.pools))
            self.waits.record(self._tape_length)
            for pool in self.pools:
                for account in pool.accounts:
                    self._record(account)

    def _record(self, account: Account) -> None:
        if self._tape_length:
            account.tape = new_tape(self._tape_length, self.clock(), account.open_state)

    def recorded(self) -> Recording:
        """What was kept; nothing more is. For any thread."""
        self._tape_length = 0
        names = (*self._stage_names, "starved", "blocked", "idle")
        found = []
        for pool in self.pools:
            stages = "+".join(self._stage_names[number] for number in pool.plan.stages)
            for number, account in enumerate(pool.accounts):
                tape, account.tape = account.tape, None
                if tape is not None:
                    name = "in the loop's thread" if self.inline else f"{stages} {number}"
                    found.append(cut(tape, self._pid, name, names, self.clock()))
        return Recording(found, self.waits.recorded())

    def seek(self, epoch: int, position: int) -> None:
        """Drop everything read ahead and go on from another place, unless that is where the plan already stands."""
        self._check_usable()
        self.intake.seek(epoch, position)

    def close(self, join_s: float = _JOIN_S) -> None:
        """Stop and join the workers, drop what was read ahead. Idempotent, from any thread and any state.

        A worker that is still inside a stage after `join_s` is left to end by itself, with a warning.
        """
        if os.getpid() != self._pid:
            # In a fork's child none of our threads is here, and a lock may have been copied while it was held.
            self._is_closed = True
            return
        if self._has_ended:
            return
        for stage in self.stages:
            if stage.interrupt is not None:
                stage.interrupt()
        self.intake.close()
        for pool in self.pools:
            if pool.buffer is not None:
                pool.buffer.close()
            pool.turns.close()
        with self._sizing:
            self._is_closed = True
            self._resized.notify_all()
        deadline = time.monotonic() + join_s
        for thread in [thread for pool in self.pools for thread in pool.threads]:
            if thread.ident != threading.get_ident():
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    stack = watch.stack_of(thread)
                    logger.warning("%s did not stop within %g s: a stage hangs\n%s", thread.name, join_s, stack)
        self.intake.clear()
        for stage in self.stages:
            if stage.close is not None:
                stage.close()
        self._has_ended = True  # only now: what Ctrl-C has interrupted is done by a second call

    def abandon(self) -> None:
        """Close, once the loader is garbage. The collector may run in a worker that holds a lock of ours, and that one
        cannot close anything itself; `threading.Thread` would take locks of its own."""
        if any(thread.ident == threading.get_ident() for pool in self.pools for thread in pool.threads):
            _thread.start_new_thread(self.close, ())
        else:
            self.close()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ClosedError("the loader is closed: build another one")
        if os.getpid() != self._pid:
            raise ClosedError(
                "the loader was made before a fork and used after it, where its threads do not exist: build one in each process"
            )

    # ------------------------------------------------------------------------------------------------- the workers

    def _work(self, pool: Pool, account: Account, ready: threading.Barrier, compute_alone: Callable[[], None]) -> None:
        try:
            compute_alone()  # two threads inside an operation of a worker cost 13 % of the throughput
            ready.wait()
            while True:
                if not account.is_wanted:
                    self._rest(pool, account)
                if pool.num_workers > 1:
                    pool.turns.wait(account, self.states.idle, self.intake.wake_worker)
                item = self.intake.take(account) if pool.buffer is None else pool.buffer.get(account)
                if item is not None:
                    self._process(pool, account, item)
                elif self.intake.is_over or (pool.buffer is not None and pool.buffer.is_closed):
                    return
                del item  # or the worker would keep a delivered batch's memory while it waits
        except threading.BrokenBarrierError:
            return
        except BaseException as error:
            self.intake.fail(error)

    def _rest(self, pool: Pool, account: Account) -> None:
        """Return when this worker is wanted again, or nothing more will come."""
        account.enter(self.states.idle)
        pool.turns.leave(account)
        with self._sizing:
            while not account.is_wanted and not self._is_closed:
                self._resized.wait()

    def _work_for_a_worker(self) -> bool:
        """Do a worker's work in the consumer's thread, while that worker rests; False if there is none to do."""
        account = self.intake.borrow()
        if account is None:
            return False
        try:
            has_worked = self._work_inline(account)
            if not has_worked:  # no room: what else there is has to end first
                self.intake.set_self_service(False)
            return has_worked
        finally:
            self.intake.give_back()

    def _work_inline(self, account: Account | None = None) -> bool:
        """Carry one chunk through every pool, in the consumer's thread; False if there is none."""
        account = account or self.pools[0].accounts[0]
        item: Chunk | Destination | None = self.intake.take(account)
        if item is None:
            return False
        num_torch_threads = torch.get_num_threads()
        try:
            if num_torch_threads > 1:
                torch.set_num_threads(1)  # as in the workers: on small tensors a second thread only spins
            for pool in self.pools:
                if item is not None:
                    item = self._run(pool, account, item)
        finally:
            if num_torch_threads > 1:
                torch.set_num_threads(num_torch_threads)
        if isinstance(item, Destination):
            self.intake.deliver(item)
            self.num_self_served += not self.inline
        account.enter(self.states.blocked if self.inline else self.states.idle)
        return True

    def _process(self, pool: Pool, account: Account, item: Chunk | Destination) -> None:
        ticket = pool.begin()
        try:
            onward = self._run(pool, account, item)
        finally:
            pool.end(ticket, len(item))
        if onward is None:
            return
        if pool.number + 1 < len(self.pools):
            following = self.pools[pool.number + 1]
            assert following.buffer is not None
            chunk = onward if isinstance(onward, Chunk) else onward.last_chunk
            assert chunk is not None
            chunk.marks.append((self.clock(), stalls.QUEUED - following.number))
            following.buffer.put(onward, account)
        elif isinstance(onward, Destination):
            self.intake.deliver(onward)

    def _run(self, pool: Pool, account: Account, item: Chunk | Destination) -> Chunk | Destination | None:
        """Run a pool's stages on an item; what goes on from there: the chunk, its complete destination, or nothing."""
        if isinstance(item, Destination):
            self._run_batch_stages(pool, account, item)
            return item
        destination = item.destination
        if account.tape is not None:
            account.item = (destination.epoch, destination.end, item.lo, item.hi)
        try:
            for number in pool.plan.sample_stages:
                if destination.cancelled:
                    break
                item.marks.append((account.enter(number), number))
                num_failed = len(item.failures)
                num_bytes = self.stages[number].run(item)
                account.served(number, len(item), num_bytes or 0, item)
                if len(item.failures) > num_failed:
                    account.failed(number, len(item.failures) - num_failed)
        except Exception as error:
            destination.error = destination.error or error
        if not pool.plan.lands:
            return item
        landed = self.intake.land(item)
        if landed is not None:
            self._run_batch_stages(pool, account, landed)
        return landed

    def _run_batch_stages(self, pool: Pool, account: Account, destination: Destination) -> None:
        if account.tape is not None:
            account.item = (destination.epoch, destination.end, WHOLE, WHOLE)
        try:
            if destination.result is None and destination.error is None:
                # To pad is the work of `batch`, though `normalize` may have come since.
                if self._batch in pool.plan.sample_stages and self._batch != pool.plan.sample_stages[-1]:
                    self._enter(destination, account, self._batch)
                destination.result = self.plan.finish(destination)
            for number in pool.plan.batch_stages:
                if destination.cancelled or destination.error is not None:
                    break
                self._enter(destination, account, number)
                first = int(destination.positions[0])
                context = BatchContext(
                    destination.epoch, destination.step, first, destination.result["__key__"], destination.specs
                )
                self.stages[number].run(destination.result, context)
                account.served(number, len(destination), 0)
        except Exception as error:
            destination.error = error

    @staticmethod
    def _enter(destination: Destination, account: Account, stage: int) -> None:
        """A worker begins with a stage on a whole batch."""
        now = account.enter(stage)
        assert destination.last_chunk is not None
        destination.last_chunk.marks.append((now, stage))
