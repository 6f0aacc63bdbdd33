"""Runs samples through stages outside an engine: the first samples, samples that are measured, bad samples that are
tried again, and samples that are written as shards.

    chunks ──run_samples──> the same chunks, in their order, with samples and failures
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from loaderkit._internal.torch_threads import ONE_AT_A_TIME, new_thread_default_kept
from loaderkit.engine.watchdog import HangReport, Patience, keys_of, stack_of
from loaderkit.pipeline.config.model import PrefetchArgs
from loaderkit.samples.chunk import BatchWork, SampleChunk

_JOIN_S = 1.0  # s, as long as a closed engine waits for what nothing can end


class StageRuns:
    """Stages as functions of a chunk, (name, run) each, and a record of where they are. They run in any number of
    threads, or `in_turn` in one."""

    def __init__(self, runs: Sequence[tuple[str, Callable[[SampleChunk], object]]], *, in_turn: bool = False) -> None:
        self._runs, self.in_turn = runs, in_turn
        self._places: dict[int, tuple[str, SampleChunk]] = {}  # by thread

    def __call__(self, chunk: SampleChunk) -> None:
        thread = threading.get_ident()
        try:
            for name, run in self._runs:
                self._places[thread] = name, chunk
                run(chunk)
        finally:
            self._places.pop(thread, None)

    def place(self) -> tuple[str, SampleChunk] | None:
        """The stage and the chunk at work; of several, the chunk that began first. From any thread."""
        return next(iter(self._places.copy().values()), None)


def chunk_of(indices: NDArray[np.int64], positions: NDArray[np.int64] | None = None, epoch: int = 0) -> SampleChunk:
    """The work on samples, int64 [n], at `positions` of an epoch, or, if that is None, at positions equal to their
    numbers."""
    places = indices if positions is None else positions
    return SampleChunk(BatchWork(epoch=epoch, step=0, positions=places, indices=indices), 0, len(indices), indices)


def run_samples(
    run: StageRuns,
    chunks: Iterable[SampleChunk],
    *,
    num_threads: int = 0,
    prefetch: PrefetchArgs | None = None,
    key: Callable[[int], str] = str,
) -> Generator[SampleChunk, None, None]:
    """Run chunks, and yield them in their order; a chunk then holds its samples and failures. Raises what a stage
    raises for all samples, in place of the chunk.

    Without `num_threads` they run in the caller's thread, when they are asked for, as `executor: inline` does it. Else
    as many threads, one if `run` is in turn, run twice as many ahead, and a wait for longer than `prefetch.timeout` is reported
    as an engine's is, with the stage, the `key` of the sample and stacks; raises StallTimeout if `on_timeout` says so.
    If it is not run to its end, close it (`contextlib.closing`), which ends its threads.
    """
    if not num_threads:
        for chunk in chunks:
            run(chunk)
            yield chunk
        return
    prefetch, num_threads = prefetch or PrefetchArgs(), 1 if run.in_turn else num_threads
    queue: SimpleQueue[tuple[Future[SampleChunk], SampleChunk] | None] = SimpleQueue()
    threads = _started(num_threads, partial(_work, run, queue))
    ahead: deque[Future[SampleChunk]] = deque()

    def first() -> SampleChunk:
        patience = Patience(prefetch.timeout, prefetch.on_timeout == "raise", "sample")
        while ahead[0] not in wait([ahead[0]], patience.next_s).done:
            patience.ends(lambda: _described(run, key, threads))
        return ahead.popleft().result()

    try:
        for chunk in chunks:
            ahead.append(Future())
            queue.put((ahead[-1], chunk))
            if len(ahead) > 2 * num_threads:
                yield first()
        while ahead:
            yield first()
    finally:
        for future in ahead:  # an error is not to wait for all the others
            future.cancel()
        for _ in threads:
            queue.put(None)
        for thread in threads:
            thread.join(_JOIN_S)


def _started(num_threads: int, work: Callable[[], None]) -> list[threading.Thread]:
    """Threads that do `work`, in each of which torch computes alone."""
    ready = threading.Barrier(num_threads + 1)

    def begin(compute_alone: Callable[[], None]) -> None:
        compute_alone()
        with suppress(threading.BrokenBarrierError):
            ready.wait()
            work()

    with ONE_AT_A_TIME, new_thread_default_kept() as compute_alone:
        threads = [
            threading.Thread(target=begin, args=(compute_alone,), name=f"loaderkit-samples-{number}", daemon=True)
            for number in range(num_threads)
        ]
        try:
            for thread in threads:
                thread.start()
            ready.wait()
        except BaseException:  # Ctrl-C, or the system has no more threads
            ready.abort()
            raise
    return threads


def _work(run: StageRuns, queue: SimpleQueue[tuple[Future[SampleChunk], SampleChunk] | None]) -> None:
    while (job := queue.get()) is not None:
        future, chunk = job
        if future.set_running_or_notify_cancel():
            try:
                run(chunk)
                future.set_result(chunk)
            except BaseException as error:
                future.set_exception(error)


def _described(run: StageRuns, key: Callable[[int], str], threads: Sequence[threading.Thread]) -> HangReport:
    lines, stage, keys = [stack_of(thread) for thread in threads], None, list[str]()
    if (place := run.place()) is not None:
        stage, keys = place[0], keys_of(place[1], key)
        lines.insert(0, f"in {stage}, at sample {' to '.join(map(repr, keys))}")
    return HangReport("\n".join(lines), stage, keys[0] if len(keys) == 1 else None)
