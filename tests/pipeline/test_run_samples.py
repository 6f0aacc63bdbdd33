"""Samples that run outside an engine: in order, watched, and with the error of the stage that fails for all of them."""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import join_threads

from loaderkit import Pipeline
from loaderkit.connectors.base import ConnectorTraits
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import StallTimeout
from loaderkit.pipeline.config.builder import to_config
from loaderkit.pipeline.config.model import PrefetchArgs
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.pipeline.lengths import measure_lengths
from loaderkit.pipeline.run_samples import StageRuns, chunk_of, run_samples
from loaderkit.samples.chunk import SampleChunk

NAME = "loaderkit-samples"


def threads_left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(NAME)]


def chunks_of(sizes: list[int]) -> Iterator[SampleChunk]:
    ends = np.cumsum(sizes).tolist()
    for size, end in zip(sizes, ends, strict=True):
        yield chunk_of(np.arange(end - size, end), np.arange(end, end + size), epoch=3)


def squares(chunk: SampleChunk) -> None:
    chunk.samples = [{"x": int(index) ** 2, "at": chunk.position_of(row)} for row, index in enumerate(chunk.indices)]


def negated(chunk: SampleChunk) -> None:
    chunk.samples = [sample and {**sample, "x": -sample["x"]} for sample in chunk.samples]


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_chunks_come_back_in_their_order(num_threads: int, rng: random.Random) -> None:
    sizes = [rng.randint(1, 5) for _ in range(30)]
    run = StageRuns([("first", squares), ("second", negated)])
    found = [
        (sample["x"], sample["at"], chunk.epoch)
        for chunk in run_samples(run, chunks_of(sizes), num_threads=num_threads)
        for sample in chunk.samples
        if sample is not None
    ]
    wanted = [
        (-(index**2), index + size, 3) for chunk, size in enumerate(sizes) for index in sorted_range(sizes, chunk)
    ]
    assert found == wanted
    assert not threads_left()


def sorted_range(sizes: list[int], chunk: int) -> range:
    begin = sum(sizes[:chunk])
    return range(begin, begin + sizes[chunk])


@pytest.mark.parametrize("num_threads", [0, 2])
def test_an_error_comes_in_place_of_its_chunk_and_ends_the_others(num_threads: int, rng: random.Random) -> None:
    bad, ran = rng.randint(0, 40), set()

    def fail(chunk: SampleChunk) -> None:
        ran.add(chunk.index_of(0))
        if chunk.index_of(0) == bad:
            raise OSError("no store")

    found: list[int] = []
    made = run_samples(StageRuns([("read", fail)]), chunks_of([1] * 100), num_threads=num_threads)
    with pytest.raises(OSError, match="no store"):
        found.extend(chunk.index_of(0) for chunk in made)
    assert found == list(range(bad))
    assert max(ran) <= bad + 2 * num_threads + 1, "no more are begun than are ahead"
    assert not threads_left()


def test_what_is_left_behind_ends(rng: random.Random) -> None:
    taken = rng.randint(1, 5)
    made = run_samples(StageRuns([("read", squares)]), chunks_of([1] * 50), num_threads=2)
    assert [next(made).index_of(0) for _ in range(taken)] == list(range(taken))
    made.close()
    assert not threads_left()


class Hangs:
    """Item `at` hangs, until `release`."""

    def __init__(self, size: int, at: int) -> None:
        self.size = size
        self.at = at
        self.release = threading.Event()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.at:
            self.release.wait()
        return {"tokens": np.arange(index + 1)}


def test_a_sample_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path))
    items = Hangs(rng.randint(2, 60), 0)
    items.at = rng.randrange(items.size)
    pipeline = Pipeline.dataset(items, thread_safe=True).read()
    plan = compile_pipeline(pipeline.batch(1).config, rank=0, world_size=1)
    packed = pipeline.pack(8).batch(1).config
    prefetch = PrefetchArgs(timeout=0.05, on_timeout="raise")
    try:
        with pytest.raises(StallTimeout, match=r"no sample for 0\.05 s") as raised:
            list(measure_lengths(plan.source, plan.compiled.stages, packed.stage("pack"), prefetch, raises=True))
    finally:
        items.release.set()
        plan.close()
    assert (raised.value.stage, raised.value.key) == ("read", str(items.at))


class Remote(MemoryConnector):
    """A store that is read ahead from."""

    traits = ConnectorTraits(is_remote=True)


def npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_measuring_lengths_ends_what_reads_ahead() -> None:
    store = Remote({f"{number}.npy": npy(np.arange(number)) for number in range(20)})
    stages = ["read", {"decode": {}}, {"batch": {"size": 1}}]
    source = {"kind": "files", "url": "memory://", "include": "*.npy"}
    config = to_config({"source": source, "stages": stages})
    packed = to_config(
        {"source": source, "stages": [*stages[:-1], {"pack": {"field": "npy", "length": 32}}, stages[-1]]}
    )
    plan = compile_pipeline(config, rank=0, world_size=1, connectors={"memory": store})
    try:
        measured = measure_lengths(plan.source, plan.compiled.stages, packed.stage("pack"), PrefetchArgs(), raises=True)
        next(measured)
        assert [thread for thread in threading.enumerate() if thread.name.startswith("loaderkit-ahead")]
        measured.close()
        join_threads("loaderkit-ahead")
    finally:
        plan.close()
