"""How long chunks become: their samples take some milliseconds, whatever a chunk costs besides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderkit import Pipeline
from loaderkit.engine.autotune.chunk_sizer import ChunkSizer, trim
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.pipeline.executors.thread_engine import make_batch_plan


def sizes_of(fixed_s: float, each_s: float, *, num_batches: int = 30, batch: int = 64, workers: int = 2) -> list[int]:
    """The chunks' length in one batch after the other, where a chunk takes `fixed_s` and `each_s` for each sample."""
    chunk_sizer = ChunkSizer()
    chunk_sizer.sample_s = fixed_s + each_s  # the first sample, by itself
    found = []
    for _ in range(num_batches):
        size = chunk_sizer.next_chunk_size(batch, workers, workers)
        found.append(size)
        for begin in range(0, batch, size):
            length = min(size, batch - begin)
            chunk_sizer.landed(fixed_s + length * each_s, length)
    return found


@pytest.mark.parametrize("fixed_ms", [0, 1, 3, 5, 9, 15])
def test_what_a_chunk_costs_besides_does_not_make_it_shorter(fixed_ms: float) -> None:
    """As it would if that were taken for the time of its samples; a data set that is asked over a network, for example."""
    assert sizes_of(fixed_ms * 1e-3, 10e-6)[-1] >= 32


@pytest.mark.parametrize(
    ("each_ms", "least", "most"), [(0.01, 64, 64), (0.75, 9, 13), (4, 4, 4), (8, 4, 4), (15, 2, 2), (100, 1, 1)]
)
def test_samples_of_a_chunk_take_some_milliseconds(each_ms: float, least: int, most: int) -> None:
    assert least <= sizes_of(0.0, each_ms * 1e-3)[-1] <= most


@given(st.integers(1, 130), st.integers(1, 140))
def test_the_chunks_of_a_batch_are_alike(batch: int, chunk_size: int) -> None:
    """A short one at the end would cost as much besides its samples as a long one, and look as if that were more."""
    pipeline = Pipeline.dataset(list(range(130))).read().batch(batch, drop_last=True)
    plan = make_batch_plan(compile_pipeline(pipeline.config, rank=0, world_size=1))
    plan.prepare()
    work_item = plan.open(chunk_size)
    assert work_item is not None
    bounds = [(chunk.lo, chunk.hi) for chunk in work_item.chunks]
    assert [slot for lo, hi in bounds for slot in range(lo, hi)] == [*range(batch)]
    lengths = [hi - lo for lo, hi in bounds]
    assert len(lengths) == -(-batch // chunk_size)
    assert max(lengths) - min(lengths) <= 1
    assert all(
        [chunk.index_of(place) for place in range(len(chunk))] == work_item.indices[chunk.lo : chunk.hi].tolist()
        for chunk in work_item.chunks
    )


def test_long_chunks_are_not_tried_longer() -> None:
    """Samples of a tenth of a second are large: two of them would take twice the memory."""
    assert {*sizes_of(0.0, 0.1, num_batches=200)[1:]} == {1}


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 300), st.integers(1, 9))
def test_there_is_always_a_length(fixed_s: float, each_s: float, batch: int, workers: int) -> None:
    assert all(1 <= size <= batch for size in sizes_of(fixed_s, each_s, num_batches=5, batch=batch, workers=workers))


def test_of_scratch_memory_what_a_trial_needs_stays() -> None:
    scratch = {"decode": [{} for _ in range(32)], "read": memoryview(b"")}
    trim(scratch, 4)
    assert len(scratch["decode"]) == 8


def test_a_store_that_turns_fast_does_not_leave_a_batch_to_one_worker() -> None:
    """What was known of its answers holds until chunks of another length land: the samples count for a tenth all the while."""
    chunk_sizer = ChunkSizer()
    chunk_sizer.sample_s = 12e-3
    for fixed_s in (12e-3, 0.0):
        for _ in range(40):
            size = chunk_sizer.next_chunk_size(1024, 8, 8)
            assert size <= 128
            for _ in range(1024 // size):
                chunk_sizer.landed(fixed_s + size * 1e-3, size)
    assert 4 <= chunk_sizer.chunk_size(1024, 8, 8) <= 128


@pytest.mark.parametrize(("num_open", "size"), [(1, 4), (2, 8), (3, 8), (4, 16), (16, 16)])
def test_workers_share_a_batch_where_fewer_may_be_open_than_there_are_workers(num_open: int, size: int) -> None:
    chunk_sizer = ChunkSizer()
    chunk_sizer.landed(16 * 0.0002, 16)
    assert chunk_sizer.chunk_size(16, 4, num_open) == size
    chunk_sizer = ChunkSizer()
    chunk_sizer.landed(16 * 0.00002, 16)
    assert chunk_sizer.chunk_size(16, 4, num_open) == 16, "it takes less than a hand-off is worth"
