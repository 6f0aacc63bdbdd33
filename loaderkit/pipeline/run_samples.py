"""Runs samples through stages outside an engine: the first ones, those that are measured, bad ones again, and those that are
written as shards.

    chunks ──run_samples──> the same chunks, in their order, with samples and failures
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from loaderkit.engine.torch_threads import ONE_AT_A_TIME, new_thread_default_kept
from loaderkit.engine.watchdog import HangReport, Patience, keys_of, stack_of
from loaderkit.pipeline.config.model import PrefetchArgs
from loaderkit.stages.base import BatchWork, SampleChunk

_JOIN_S = 1.0  # s, as long as a closed engine waits for what nothing can end


class StageRuns:
    """Stages as functions of a chunk, (name, run) each, and where they are; in any number of threads."""

    def __init__(self, runs: Sequence[tuple[str, Callable[[SampleChunk], object]]]) -> None:
        self._runs = runs
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
        """The stage that they are in, and the chunk; of several, the one that began first. From any thread."""
        return next(iter(self._places.copy().values()), None)


def chunk_of(indices: NDArray[np.int64], positions: NDArray[np.int64] | None = None, epoch: int = 0) -> SampleChunk:
    """The work on samples, int64 [n], which stand at `positions` of an epoch; None: at their own numbers."""
    places = indices if positions is None else positions
    return SampleChunk(BatchWork(epoch=epoch, step=0, positions=places, indices=indices), 0, len(indices), indices)


def run_samples(
    run: StageRuns,
    chunks: Iterable[SampleChunk],
    *,
    num_threads: int = 0,
    prefetch: PrefetchArgs | None = None,
    key: Callable[[int], str] = str,
) -> Iterator[SampleChunk]:
    """Run chunks, and yield them in their order; their samples and failures are theirs. Raises what a stage raises for all
    samples, in place of the chunk.

    Without `num_threads` they run in the caller's thread, when they are asked for, as `executor: inline` does it. Else
    as many threads run twice as many ahead, and a wait for longer than `prefetch.timeout` is reported as an engine's is, with
    the stage, the `key` of the sample and stacks; raises StallTimeout if `on_timeout` says so.
    """
    if not num_threads:
        for chunk in chunks:
            run(chunk)
            yield chunk
        return
    prefetch = prefetch or PrefetchArgs()
    waiting: SimpleQueue[_Job | None] = SimpleQueue()
    ahead: deque[_Job] = deque()
    threads = _started(run, waiting, num_threads)
    try:
        for chunk in chunks:
            job = _Job(chunk)
            ahead.append(job)
            waiting.put(job)
            if len(ahead) > 2 * num_threads:
                yield _finished(ahead.popleft(), run, prefetch, key, threads)
        while ahead:
            yield _finished(ahead.popleft(), run, prefetch, key, threads)
    finally:
        for job in ahead:  # an error is not to wait for all the others
            job.is_cancelled = True
        for _ in threads:
            waiting.put(None)
        for thread in threads:
            thread.join(_JOIN_S)


class _Job:
    """A chunk to run, or that has run."""

    def __init__(self, chunk: SampleChunk) -> None:
        self.chunk = chunk
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.is_cancelled = False


def _started(run: StageRuns, waiting: SimpleQueue[_Job | None], num_threads: int) -> list[threading.Thread]:
    with ONE_AT_A_TIME, new_thread_default_kept() as compute_alone:
        ready = threading.Barrier(num_threads + 1)
        threads = [
            threading.Thread(
                target=_work, args=(run, waiting, compute_alone, ready), name=f"loaderkit-samples-{number}", daemon=True
            )
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


def _work(
    run: StageRuns, waiting: SimpleQueue[_Job | None], compute_alone: Callable[[], None], ready: threading.Barrier
) -> None:
    compute_alone()
    try:
        ready.wait()
    except threading.BrokenBarrierError:
        return
    while (job := waiting.get()) is not None:
        try:
            if not job.is_cancelled:
                run(job.chunk)
        except BaseException as error:
            job.error = error
        job.done.set()


def _finished(
    job: _Job, run: StageRuns, prefetch: PrefetchArgs, key: Callable[[int], str], threads: list[threading.Thread]
) -> SampleChunk:
    patience = Patience(prefetch.timeout, prefetch.on_timeout == "raise", "sample")
    while not job.done.wait(patience.next_s):
        patience.ends(lambda: _described(run, key, threads))
    if job.error is not None:
        raise job.error
    return job.chunk


def _described(run: StageRuns, key: Callable[[int], str], threads: list[threading.Thread]) -> HangReport:
    place = run.place()
    lines = [stack_of(thread) for thread in threads]
    if place is None:
        return HangReport("\n".join(lines))
    stage, chunk = place
    keys = keys_of(chunk, key)
    lines.insert(0, f"in {stage}, at sample {' to '.join(map(repr, keys))}")
    return HangReport("\n".join(lines), stage, keys[0] if len(keys) == 1 else None)
