"""No two threads are in user code at once unless it is declared; batches are then what they are one item after another."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import ConfigError
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.pipeline.thread_checks import SideBySide, compare_side_by_side

SIZE = 64
THREADS = {"prefetch.executor": "thread", "prefetch.concurrency": 4, "prefetch.batches": 8}


class OneFile(torch.utils.data.Dataset[Any]):
    """Keeps a file open, as people's data sets do: where it stands belongs to who has sought."""

    def __init__(self, file: BinaryIO, num: int) -> None:
        self.file, self.num = file, num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.file.seek(index * SIZE)
        time.sleep(2e-5)  # another thread would seek meanwhile
        return {"index": index, "data": np.frombuffer(self.file.read(SIZE), np.int64).copy()}

    def check(self, sample: dict[str, Any]) -> None:
        """A method of the same object, as a `call`."""
        sample["again"] = self[int(sample["index"])]["data"]


class Truncating:
    """As a tokenizer that keeps its length from one call to the next."""

    def __init__(self) -> None:
        self.length = 0

    def __call__(self, text: str, length: int) -> str:
        self.length = length
        time.sleep(2e-5)
        return text[: self.length]


@pytest.fixture
def records(tmp_path: Path, rng: random.Random) -> Iterator[tuple[OneFile, np.ndarray[Any, Any]]]:
    values = np.random.default_rng(rng.randrange(2**32)).integers(2**62, size=(200, SIZE // 8))
    values.tofile(tmp_path / "records")
    with (tmp_path / "records").open("rb") as file:
        yield OneFile(file, len(values)), values


def built(dataset: Any, rng: random.Random, **given: Any) -> loaderkit.Loader:
    pipeline = Pipeline.dataset(dataset, **given).shuffle(seed=rng.randrange(99)).epochs(1).read()
    return loaderkit.build(pipeline.call(dataset.check).batch(8), overrides=THREADS)


def test_a_data_set_with_a_file_and_a_method_of_it(records: tuple[OneFile, Any], rng: random.Random) -> None:
    dataset, values = records
    with built(dataset, rng) as loader:
        for batch in loader:
            for name in ("data", "again"):
                assert np.array_equal(batch[name].numpy(), values[batch["index"].numpy()])


def test_two_loaders_of_one_data_set(records: tuple[OneFile, Any], rng: random.Random) -> None:
    dataset, values = records
    with built(dataset, rng) as first, built(dataset, rng) as second:
        for both in zip(first, second, strict=True):
            for batch in both:
                assert np.array_equal(batch["data"].numpy(), values[batch["index"].numpy()])


def test_functions_that_share_what_cannot_be_seen(rng: random.Random) -> None:
    """Two lambdas have one tokenizer, before and behind `batch`."""
    cut, texts = Truncating(), [str(rng.randrange(10**40, 10**41)) for _ in range(160)]
    short, long = rng.randrange(1, 9), rng.randrange(10, 30)
    pipeline = (
        Pipeline.dataset([{"text": text} for text in texts]).shuffle(False).epochs(1).read()
        .call(lambda sample: {"short": cut(sample["text"], short)})
        .call(lambda sample: {"long": cut(sample["text"], long)})
        .batch(8)
        .call(lambda batch: {"both": [cut(text, short + long) for text in batch["text"]]})
    )  # fmt: skip
    with loaderkit.build(pipeline, overrides=THREADS) as loader:
        found = [row for batch in loader for row in zip(batch["short"], batch["long"], batch["both"], strict=True)]
    assert found == [(text[:short], text[:long], text[: short + long]) for text in texts]


@pytest.mark.parametrize("kind", ["call", "filter"])
def test_what_is_declared_runs_side_by_side(kind: str) -> None:
    """The two calls behind the first wait until both are in it."""
    meeting, numbers = threading.Barrier(2), count()

    def meet(sample: dict[str, Any]) -> bool | None:
        if next(numbers) in (1, 2):
            meeting.wait(60)
        return True if kind == "filter" else None

    stages = [{"read": {}}, {kind: {"function": meet, "thread_safe": True, "workers": 2}}, {"batch": {"size": 1}}]
    pipeline = {"source": {"kind": "dataset", "object": np.arange(40)}, "order": {"epochs": 1}, "stages": stages}
    with loaderkit.build(pipeline, overrides=THREADS) as loader:
        assert len(list(loader)) == 40


def test_a_close_waits_for_nobody_who_waits_for_user_code(rng: random.Random) -> None:
    trap, inside = threading.Event(), threading.Event()

    def hang(sample: dict[str, Any]) -> None:
        if sample["0"] == 13:
            inside.set()
            trap.wait(60)

    pipeline = Pipeline.dataset(np.arange(64)).shuffle(False).read().call(hang).batch(4)
    loader = loaderkit.build(pipeline, overrides=THREADS)
    next(iter(loader))
    inside.wait(60)
    threading.Timer(0.5, trap.set).start()
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loaderkit-read")]


def test_it_is_no_part_of_what_a_state_compares(rng: random.Random) -> None:
    made = Pipeline.dataset([*range(64)]).shuffle(seed=1).read()
    with loaderkit.build(made.call(abs_of).batch(8)) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with loaderkit.build(made.call(abs_of, thread_safe=True).batch(8)) as loader:
        loader.load_state_dict(state)
        assert len(list(loader)) == 7


def abs_of(sample: dict[str, Any]) -> None:
    sample["0"] = abs(sample["0"])


def test_only_three_values() -> None:
    with pytest.raises(ConfigError, match="thread_safe"):
        loaderkit.build(Pipeline.dataset([1, 2], thread_safe="maybe").read().batch(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("declared", [False, True])
def test_check_names_what_differs_in_threads(declared: bool, records: tuple[OneFile, Any], rng: random.Random) -> None:
    """And neither what is the same, nor what differs in any case."""
    dataset, _ = records
    made = Pipeline.dataset(dataset, thread_safe=declared).shuffle(seed=rng.randrange(99)).read()
    drawing = made.call(lambda sample: {"drawn": random.random(), "same": abs(sample["index"])}, thread_safe=declared)
    found = compare_side_by_side(compile_pipeline(drawing.batch(8).config))
    assert found == SideBySide(["read", "call"], ["read", "call"] if declared else [], ["data"], None)
    calm = Pipeline.dataset([*range(50)]).read().call(abs_of).batch(8)
    assert compare_side_by_side(compile_pipeline(calm.config)) == SideBySide(["read", "call"], ["read"], [], None)
    assert compare_side_by_side(compile_pipeline(Pipeline.iterable([1, 2]).read().batch(1).config)) is None


def test_check_names_what_fails_in_threads_alone(rng: random.Random) -> None:
    inside = threading.Lock()

    def alone(sample: dict[str, Any]) -> None:
        if not inside.acquire(blocking=False):
            raise RuntimeError("somebody is in it")
        time.sleep(1e-4)
        inside.release()

    found = compare_side_by_side(compile_pipeline(Pipeline.dataset([*range(99)]).read().call(alone).batch(8).config))
    assert found is not None
    assert found.fields == []
    assert "somebody is in it" in str(found.error)
