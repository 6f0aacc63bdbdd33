"""DALI that fails whatever it is given, and what a renderer leaves behind."""

from __future__ import annotations

import logging
import weakref
from typing import Literal

import pytest
import torch
from conftest import make_photo
from dali_pipelines import FailingPipelines, chunk_of, renderer

from loaderkit.errors import StageError
from loaderkit.samples.chunk import SampleChunk
from loaderkit.samples.values import Encoded

PHOTO = make_photo(3)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> FailingPipelines:
    made = FailingPipelines()
    monkeypatch.setattr("loaderkit.stages.image.dali.renderer.build_pipeline", made.build)
    return made


def numbered(num_images: int) -> SampleChunk:
    """Whole JPEGs, and a byte behind the end of each that is its number."""
    return chunk_of([PHOTO + bytes([number]) for number in range(num_images)])


class TestAllImages:
    def test_what_dali_said_is_raised_after_a_few_runs(self, failing: FailingPipelines) -> None:
        with pytest.raises(StageError, match=r"DALI failed .* in a row .*'#8'.*on_gpu_error: cpu") as caught:
            renderer(256)(numbered(256))
        assert failing.words in str(caught.value.__cause__)
        assert failing.num_built < 20

    def test_small_batches_add_up(self, failing: FailingPipelines) -> None:
        render = renderer(2)
        with pytest.raises(StageError, match="in a row"):
            for _ in range(10):
                render(numbered(2))

    def test_or_the_cpu_decodes_for_good(self, failing: FailingPipelines, caplog: pytest.LogCaptureFixture) -> None:
        decoded: list[int] = []
        render = renderer(256, decoded, on_gpu_error="cpu")
        with caplog.at_level(logging.WARNING, "loaderkit"):
            render(numbered(256))
            num_runs = failing.num_runs
            for _ in range(3):
                decoded.clear()
                render(numbered(256))
                assert decoded == list(range(256)), "each once"
        assert failing.num_runs == num_runs < 20
        (record,) = caplog.records
        assert failing.words in record.getMessage()
        assert "on_gpu_error" in record.getMessage()

    @pytest.mark.parametrize("crops", [False, True])
    def test_regions_are_named_where_they_may_be_the_cause(self, failing: FailingPipelines, *, crops: bool) -> None:
        with pytest.raises(StageError) as caught:
            renderer(64, crops=crops)(numbered(64))
        assert ("regions: false" in str(caught.value)) == crops


class TestSomeImages:
    @pytest.mark.parametrize("on_gpu_error", ["raise", "cpu"])
    def test_they_go_to_the_cpu_and_no_others(
        self, failing: FailingPipelines, on_gpu_error: Literal["raise", "cpu"]
    ) -> None:
        failing.refused = {0, 1, 70, 255}
        render = renderer(256, on_gpu_error=on_gpu_error)
        for _ in range(3):
            chunk = numbered(256)
            render(chunk)
            values = [sample["image"] for sample in chunk.samples if sample is not None]
            assert {number for number, value in enumerate(values) if isinstance(value, Encoded)} == failing.refused

    def test_those_of_batches_of_one_do_not_add_up(self, failing: FailingPipelines) -> None:
        failing.refused = {0}
        render = renderer(1)
        for number in range(40):
            render(chunk_of([PHOTO + bytes([number % 2])]))


@pytest.mark.parametrize("words", ["std::bad_alloc", "CUDA runtime API error cudaErrorIllegalAddress (700)"])
def test_memory_and_cuda_as_well(failing: FailingPipelines, words: str, caplog: pytest.LogCaptureFixture) -> None:
    failing.words = words
    with pytest.raises(StageError):
        renderer(8)(numbered(8))
    render = renderer(8, on_gpu_error="cpu")
    with caplog.at_level(logging.WARNING, "loaderkit"):
        for _ in range(2):
            render(numbered(8))
    assert failing.num_runs == 2
    assert len(caplog.records) == 1


class TestClose:
    def test_it_gives_back_dalis_memory_after_the_pipelines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        render = renderer(8)
        render(chunk_of([make_photo(number) for number in range(8)]))
        is_there = weakref.ref(render._idle[0])
        found = []
        monkeypatch.setattr(render._dali.backend, "ReleaseUnusedMemory", lambda: found.append(is_there() is not None))
        render.close()
        assert found == [False]

    def test_a_gpu_that_has_failed_is_no_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse() -> None:
            raise RuntimeError("CUDA runtime API error cudaErrorIllegalAddress (700)")

        render = renderer(8)
        monkeypatch.setattr(render._dali.backend, "ReleaseUnusedMemory", refuse)
        render.close()

    def test_what_was_delivered_stays(self) -> None:
        render = renderer(8)
        chunk = chunk_of([make_photo(number) for number in range(8)])
        render(chunk)
        images = [sample["image"].tensor for sample in chunk.samples if sample is not None]
        before = [image.clone() for image in images]
        render.close()
        renderer(8)(chunk_of([make_photo(number + 20) for number in range(8)]))
        assert all(map(torch.equal, images, before))
