"""The record of slow samples: the slowest are in it, whatever their order, and it stays small."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from thread_switches import race

from loaderkit.engine.metrics.slow_samples import NUM_KEPT, SlowItems, rows_of, slowest
from loaderkit.engine.metrics.worker_clock import WorkerClock, WorkerStates
from loaderkit.samples.chunk import BatchWork, SampleChunk


def chunk_of(*samples: int) -> SampleChunk:
    indices = np.array(samples, np.int64)
    work_item = BatchWork(epoch=3, step=0, positions=indices, indices=indices)
    return SampleChunk(work_item, 0, len(samples), indices)


@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=2 * NUM_KEPT, unique=True))
def test_the_slowest_are_kept(durations: list[float]) -> None:
    items = SlowItems(2)
    for sample, seconds in enumerate(durations):
        chunk = chunk_of(sample)
        chunk.slowest = (seconds, 0)
        items.note(1, chunk, 1.0, float(sample))
        assert chunk.slowest is None
    kept = [(slow.seconds, slow.sample) for slow in rows_of(slowest([items.kept(1)]))]
    assert kept == sorted(((seconds, sample) for sample, seconds in enumerate(durations)), reverse=True)[:NUM_KEPT]
    assert not len(items.kept(0))


def test_a_chunk_done_by_one_call_counts_as_a_whole() -> None:
    items = SlowItems(1)
    items.note(0, chunk_of(7, 8, 9, 10), 0.5, 1.0)
    (slow,) = rows_of(items.kept(0))
    assert (slow.seconds, slow.each_s, slow.sample, slow.num_together, slow.epoch) == (2.0, 0.5, 7, 4, 3)


def test_several_workers_keep_the_slowest_of_all() -> None:
    items = SlowItems(1)

    def work(worker: int) -> None:
        for n in range(500):
            items.note(0, chunk_of(1000 * worker + n), 1.0 + (n * 7919 % 500) + worker / 10, 0.0)

    race(work)
    expected = sorted((1.0 + n + worker / 10 for n in range(500) for worker in range(4)), reverse=True)
    assert [slow.each_s for slow in rows_of(slowest([items.kept(0)]))] == expected[:NUM_KEPT]


def test_several_processes_are_merged() -> None:
    workers = [SlowItems(1) for _ in range(3)]
    for number, items in enumerate(workers):
        for n in range(NUM_KEPT):
            items.note(0, chunk_of(1000 * number + n), 1.0 + n + number / 10, 0.0)
    merged = rows_of(slowest([items.kept(0) for items in workers]))
    assert len(merged) == NUM_KEPT
    assert [slow.sample for slow in merged[:3]] == [2000 + NUM_KEPT - 1, 1000 + NUM_KEPT - 1, NUM_KEPT - 1]


def test_a_clock_notes_what_its_stage_says() -> None:
    now = iter(range(1000))
    worker_clock = WorkerClock(WorkerStates(1), lambda: float(next(now)), first_state=1)
    worker_clock.enter(0)
    chunk = chunk_of(4, 5)
    chunk.slowest = (0.75, 1)
    worker_clock.served(0, 2, 0, chunk)
    (slow,) = rows_of(worker_clock.slow_items.kept(0))
    assert (slow.seconds, slow.sample, slow.num_together) == (0.75, 5, 1)
    assert (slow.position, slow.chunk, slow.chunk_s) == (1, 2, 1.0)
