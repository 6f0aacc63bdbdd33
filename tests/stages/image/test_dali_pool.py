"""Threads that share DALI's pipelines, and samples that the CPU is not asked about again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import make_photo
from dali_pipelines import chunk_of, renderer

from loaderkit.stages.base import Encoded, GpuDecoded
from loaderkit.stages.image.dali_pool import PipelinePool

_LIMIT_S = 30.0


class SlowBuilds:
    """Counts builds; from the second on each waits for `go`."""

    def __init__(self) -> None:
        self.num = 0
        self.began, self.go = threading.Event(), threading.Event()

    def build(self) -> int:
        self.num += 1
        number = self.num
        if number > 1:
            self.began.set()
            assert self.go.wait(_LIMIT_S)
        return number


@pytest.fixture
def threads() -> Any:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class TestPool:
    def test_one_that_comes_back_is_taken_while_another_is_built(self, threads: ThreadPoolExecutor) -> None:
        builds = SlowBuilds()
        pool = PipelinePool()
        first = pool.take(builds.build)
        try:
            second = threads.submit(pool.take, builds.build)
            assert builds.began.wait(_LIMIT_S)
            third = threads.submit(pool.take, builds.build)
            pool.give_back(first)
            assert third.result(_LIMIT_S) == first
            assert builds.num == 2
        finally:
            builds.go.set()
        assert second.result(_LIMIT_S) == 2

    def test_all_that_wait_get_one_of_their_own(self, threads: ThreadPoolExecutor) -> None:
        builds = SlowBuilds()
        builds.go.set()
        pool = PipelinePool()
        assert sorted(threads.map(pool.take, [builds.build] * 4)) == [1, 2, 3, 4]

    def test_a_build_that_fails_leaves_the_turn_to_the_next(self) -> None:
        outcomes = iter([ValueError("no memory"), "pipeline"])

        def build() -> Any:
            outcome = next(outcomes)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        pool = PipelinePool()
        with pytest.raises(ValueError, match="no memory"):
            pool.take(build)
        assert pool.take(build) == "pipeline"


class TestRenderedSamples:
    """What DALI has rendered costs no second look, a third of a sample's time."""

    @pytest.mark.parametrize(
        ("other", "num_looks"), [(3, 0), ("text", 0), (Encoded(memoryview(b"7"), "cls"), 1), (None, 1)]
    )
    def test_the_cpu_is_asked_about_what_is_left(self, other: Any, num_looks: int) -> None:
        decoded: list[int] = []
        chunk = chunk_of([make_photo(1)])
        (sample,) = chunk.samples
        assert sample is not None
        sample["other"] = other
        renderer(1, decoded)(chunk)
        assert type(sample["image"]) is GpuDecoded
        assert len(decoded) == num_looks

    @pytest.mark.parametrize(
        ("change", "num_looks"),
        [(lambda sample: sample.update(other=None), 0), (lambda sample: sample.pop("depth"), 1)],
        ids=["others stay", "one is missing"],
    )
    def test_or_about_the_fields_that_are_named(self, change: Callable[[Any], Any], num_looks: int) -> None:
        decoded: list[int] = []
        chunk = chunk_of([make_photo(1)])
        (sample,) = chunk.samples
        assert sample is not None
        sample["depth"] = Encoded(memoryview(make_photo(2)), "jpg")
        change(sample)
        renderer(1, decoded, fields=("image", "depth"))(chunk)
        assert len(decoded) == num_looks
