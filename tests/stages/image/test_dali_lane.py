"""What DALI has rendered, on its way through the lane: also without a GPU, by a lane whose device is the CPU."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_photo, write_photos
from PIL import Image as Pillow

import loaderkit
from loaderkit import Pipeline
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.pipeline.executors.thread_engine import make_batch_plan
from loaderkit.samples.chunk import BatchWork, FieldSpec, SampleChunk
from loaderkit.samples.values import GpuDecoded, Image


def source(folder: Path) -> Pipeline:
    return (
        Pipeline.files(folder, include="**/*.*", label="parent", fields={"image": "jpg;png;webp"})
        .shuffle(seed=3)
        .read()
    )


class OnTheCpu:
    """A lane whose device is the CPU."""

    device = torch.device("cuda", 0)

    def __init__(self, *args: Any) -> None:
        self.num_moved = 0

    def run(self, act: Callable[..., Any], *args: Any) -> Any:
        return act(*args)

    def move(self, batch: dict[str, Any]) -> None:
        assert batch["image"].dtype == torch.uint8, "it was normalised in the other process"
        self.num_moved += 1

    def close(self) -> None: ...

    def hand_over(self, batch: dict[str, Any], asked_s: float) -> None:
        """It is here already."""

    def counters(self) -> dict[str, float]:
        return {"num_bytes": self.num_moved, "timed_bytes": 0, "copy_s": 0.0, "exposed_s": 0.0}


class Unpinned:
    """Shared memory that is registered nowhere."""

    def __init__(self, *args: Any) -> None: ...

    def add(self, start: int, size: int) -> None: ...

    def clear(self) -> None: ...


def test_what_stands_behind_a_transfer_is_done_in_the_process_that_trains(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chain(pipeline: Pipeline) -> Pipeline:
        return pipeline.random_resized_crop(32).random_horizontal_flip().batch(8).transfer().normalize()

    pipeline = chain(source(photos).decode(device="dali-cpu"))
    with loaderkit.build(pipeline, overrides={"stages.transfer.device": "cpu"}) as loader:
        expected = list(loader)
    monkeypatch.setattr("loaderkit.stages.transfer.resolve_device", lambda wanted: torch.device("cuda", 0))
    monkeypatch.setattr("loaderkit.stages.transfer.TransferStream", OnTheCpu)
    monkeypatch.setattr("loaderkit.engine.process.leases.RegisteredMemory", Unpinned)
    with loaderkit.build(pipeline, overrides={"prefetch.executor": "process", "prefetch.concurrency": 2}) as loader:
        found = list(loader)
        assert loader.stats().to_dict()["transfer"]["num_bytes"] >= len(expected)
        assert [pool.stages for pool in loader.stats().tuning.pools][1:] == [("transfer", "normalize")]
    for one, other in zip(found, expected, strict=True):
        assert one["__key__"] == other["__key__"]
        assert one["image"].dtype == torch.float32
        # DALI rounds pixels to whole levels before they leave it; 0.224 is the smallest of the deviations.
        assert (one["image"] - other["image"]).abs().max() <= 0.51 / 255 / 0.224


def test_what_is_put_together_on_a_gpu_is_put_together_in_the_lane(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting(OnTheCpu):
        num_calls = 0

        def run(self, act: Callable[..., Any], *args: Any) -> Any:
            Counting.num_calls += 1
            return act(*args)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("loaderkit.stages.transfer.resolve_device", lambda wanted: torch.device("cuda", 0))
    monkeypatch.setattr("loaderkit.stages.transfer.TransferStream", Counting)
    config = source(photos).decode(device="gpu").resize([8, 8]).batch(2).transfer().config
    plan = compile_pipeline(config, rank=0, world_size=1)
    indices = np.arange(2)
    work_item = BatchWork(epoch=0, step=0, positions=indices, indices=indices, end=2)
    work_item.specs = {"image": FieldSpec("rendered", (3, 8, 8), "uint8", True, "a", 192)}
    work_item.values["image"] = [None, None]
    chunk = SampleChunk(work_item, 0, 2, indices)
    chunk.samples = [{"image": GpuDecoded(torch.full((1, 3, 8, 8), n, dtype=torch.uint8), 0)} for n in range(2)]
    next(stage.run for stage in plan.compiled.stages if stage.kind == "batch")(chunk)
    assert Counting.num_calls == 1
    batch = make_batch_plan(plan).finish(work_item)
    assert Counting.num_calls == 2
    assert batch["image"][:, 0, 0, 0].tolist() == [0, 1]


@pytest.mark.parametrize(("is_before", "in_slots"), [(True, True), (False, False)])
def test_what_is_normalised_before_it_is_copied_is_normalised_in_its_slots(
    photos: Path, monkeypatch: pytest.MonkeyPatch, is_before: bool, in_slots: bool
) -> None:
    monkeypatch.setattr("loaderkit.stages.transfer.resolve_device", lambda wanted: torch.device("cuda", 0))
    monkeypatch.setattr("loaderkit.stages.transfer.TransferStream", OnTheCpu)
    made = source(photos).decode().resize([8, 8]).batch(2)
    config = (made.normalize().transfer() if is_before else made.transfer().normalize()).config
    compiled = compile_pipeline(config, rank=0, world_size=1).compiled
    sample = {"image": Image(np.zeros((8, 8, 3), np.uint8))}
    assert compiled.specs_of([("a", sample)])["image"].dtype == ("float32" if in_slots else "uint8")


@pytest.mark.parametrize(
    ("num_workers", "num_batches", "num_threads"),
    [(2, 4, 1), (2, 1, 2), (16, 4, 4), (16, 5, 3), (16, 32, 1), (64, 4, 4), (3, 4, 1), (1, 4, 1)],
)
def test_batches_that_are_open_at_once_share_the_cpus(
    photos: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int, num_batches: int, num_threads: int
) -> None:
    monkeypatch.setattr("loaderkit.pipeline.dali_lowering.num_cpus", lambda: 16)
    pipeline = source(photos).decode(device="dali-cpu").resize([8, 8]).batch(2)
    config = pipeline.prefetch(concurrency=num_workers, batches=num_batches).config
    compiled = compile_pipeline(config, rank=0, world_size=1).compiled
    assert compiled.lowering is not None
    assert compiled.lowering.graph.num_threads == num_threads


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("ragged", [False, True])
def test_parts_of_a_batch_are_not_read_before_they_are_written(tmp_path: Path, *, ragged: bool) -> None:
    """While the loop's stream, which is a worker's default stream as well, is far behind. Some images are no
    JPEGs."""
    folder = write_photos(tmp_path / "mixed", 56)
    for index in range(8):
        Pillow.open(io.BytesIO(make_photo(100 + index))).save(folder / "ant" / f"{index}.png")

    def chain(pipeline: Pipeline) -> Pipeline:
        kinds: dict[str, Any] = {"ragged": {"image": "list"}} if ragged else {}
        sized = pipeline.resize([128, 128])
        return sized.batch(8, **kinds).transfer("cuda", channels_last=not ragged)

    with loaderkit.build(chain(source(folder).decode())) as loader:
        expected = list(loader)
    found = []
    with loaderkit.build(chain(source(folder).decode(device="gpu"))) as loader:
        for batch in loader:
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
            found.append(batch)
    torch.cuda.synchronize()
    for one, other in zip(found, expected, strict=True):
        assert one["__key__"] == other["__key__"]
        for mine, theirs in zip(one["image"], other["image"], strict=True):
            assert (mine.double() - theirs.double()).abs().mean() < 2.0
