"""`with loader.profile()` around real loops: sums, names, and a report also where the loop ends before its time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import StageError
from loaderkit.profile.report import Report
from loaderkit.profile.whatif.bounds import bounds
from loaderkit.profile.whatif.changes import changes
from loaderkit.profile.whatif.demands import model_of


def pictures(photos: Path) -> Pipeline:
    return Pipeline.files(photos, include="**/*.jpg", label="parent").read().decode().center_crop(16).batch(4)


def test_the_parts_of_the_loop_sum_to_its_time(photos: Path) -> None:
    with loaderkit.build(pictures(photos)) as loader:
        begin_s = time.perf_counter()
        with loader.profile() as report:
            for _ in range(2):
                for batch in loader:
                    batch["image"].float().sum()
        wall_s = time.perf_counter() - begin_s
    steps = report.result.steps
    parts_s = steps.compute_s + steps.stall_s + steps.overhead_s + steps.outside_s
    assert parts_s == pytest.approx(steps.wall_s, rel=1e-6)
    assert steps.wall_s <= wall_s  # by a clock of the test's own, around it
    assert sum(report.result.stall.by_stage.values()) == pytest.approx(steps.stall_s + steps.release_s)
    assert min(steps.compute_s, steps.stall_s, steps.overhead_s, steps.outside_s) >= 0
    assert (steps.num_steps, report.num_batches, report.num_samples) == (30, 30, 120)
    for stage in report.stages:
        assert stage.cpu_s + stage.io_s + stage.gil_s + stage.delayed_s == pytest.approx(
            stage.busy_s, rel=0.02, abs=2e-3
        )


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_every_executor_is_reported_on(photos: Path, executor: str) -> None:
    with (
        loaderkit.build(pictures(photos), overrides={"prefetch.executor": executor}) as loader,
        loader.profile() as report,
    ):
        assert len(list(loader)) == 15
    found: Report = report.result
    assert [stage.name for stage in found.stages] == ["read", "decode", "center_crop", "batch"]
    assert all(stage.num_items == 60 or executor != "inline" for stage in found.stages)
    assert {item.stage for item in found.slowest} <= {"read", "decode", "center_crop", "batch"}
    assert found.first_batch is not None
    parts = found.first_batch
    assert parts.list_s + parts.workers_s + sum(parts.by_stage.values()) == pytest.approx(parts.total_s)
    assert found.partial is None
    assert len(found.slowest) == 10


class SlowTwo(MemoryConnector):
    """Two objects wait for the clock of the test before they are read."""

    def __init__(self, objects: dict[str, bytes], slow: set[str]) -> None:
        super().__init__(objects)
        self._slow = slow

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        if key in self._slow:
            threading.Event().wait(0.3)  # what is slow about it; nothing here depends on how long it takes
        super().read_into(key, start, buffer, etag=etag)


def test_the_slowest_samples_are_named(photos: Path) -> None:
    objects = {str(path.relative_to(photos)): path.read_bytes() for path in photos.rglob("*.jpg")}
    slow = {sorted(objects)[17], sorted(objects)[43]}
    pipeline = Pipeline.files("memory://photos", include="**/*.jpg").shuffle("none").read().decode().center_crop(16)
    connectors = {"memory": SlowTwo(objects, slow)}
    with loaderkit.build(pipeline.batch(20), connectors=connectors) as loader, loader.profile() as report:
        list(loader)
    first_two = report.slowest[:2]
    assert {(item.stage, item.key) for item in first_two} == {("read", key) for key in slow}
    assert all(item.num_together == 1 and item.seconds >= 0.3 for item in first_two)


def test_a_call_that_is_slow_for_one_sample_names_it(photos: Path) -> None:
    def slow_for_one(sample: dict[str, Any]) -> None:
        if sample["__key__"].endswith("031.jpg"):
            threading.Event().wait(0.3)

    pipeline = Pipeline.files(photos, include="**/*.jpg").read().decode().center_crop(16).call(slow_for_one).batch(20)
    with loaderkit.build(pipeline) as loader, loader.profile() as report:
        list(loader)
    assert report.slowest[0].stage == "call"
    assert report.slowest[0].key.endswith("031.jpg")


def test_a_loop_that_ends_with_an_error_is_reported_on_as_partial(photos: Path) -> None:
    with loaderkit.build(pictures(photos)) as loader:
        recording = loader.profile()
        with pytest.raises(ZeroDivisionError), recording:
            for number, _ in enumerate(loader):
                1 / (5 - number)
    assert (recording.result.partial or "").startswith("ended by ZeroDivisionError: ")
    assert recording.num_batches == 6


def test_what_comes_after_a_break_is_no_step(photos: Path) -> None:
    """A validation, say: it must not pass for training that needs no data."""
    with loaderkit.build(pictures(photos)) as loader, loader.profile() as report:
        for _ in range(2):
            for number, _ in enumerate(loader):
                if number == 3:
                    break
    steps = report.result.steps
    assert (report.num_batches, steps.num_steps) == (8, 6)


class FailsOnce:
    """The sixth item of ten cannot be had the first time."""

    def __init__(self) -> None:
        self._has_failed = False

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, int]:
        if index == 20 and not self._has_failed:
            self._has_failed = True
            raise OSError("gone for a moment")
        return {"x": index}


def test_after_an_error_the_report_is_on_what_came_then() -> None:
    pipeline = Pipeline.dataset(FailsOnce()).shuffle("none").read().batch(4)
    with loaderkit.build(pipeline) as loader, loader.profile() as report:
        with pytest.raises(StageError):
            for _ in loader:
                pass
        num_batches = len(list(loader))
    found = report.result
    assert (found.num_batches, found.steps.num_steps) == (num_batches, num_batches)
    assert found.wall_s == pytest.approx(found.steps.compute_s + found.steps.stall_s + found.steps.overhead_s)
    assert found.steps.overhead_s >= 0


class SlowToDrop:
    def __del__(self) -> None:
        threading.Event().wait(0.02)  # what is slow about it


class Dropped:
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, SlowToDrop]:
        return {"x": SlowToDrop()}


def test_dropping_batches_is_the_limit() -> None:
    with loaderkit.build(Pipeline.dataset(Dropped()).read().batch(4)) as loader, loader.profile() as report:
        for _ in loader:
            pass
    found = report.result
    assert found.steps.overhead_s >= found.steps.release_s >= 13 * 4 * 0.02
    assert (found.verdict.stage, found.verdict.kind) == ("release", "memory")
    assert "Releasing batches is the limit" in str(report)
    assert "releasing the batch" in str(report)


def test_the_first_batch_of_tars_has_no_negative_part(shards: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Their indexes are read by several threads at once."""
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path))
    pipeline = Pipeline.tar(f"{shards}/*.tar").read().decode().center_crop(8).batch(4)
    with loaderkit.build(pipeline) as loader, loader.profile() as report:
        next(iter(loader))
    parts = report.first_batch
    assert parts is not None
    assert min(parts.list_s, parts.index_s, parts.workers_s) >= 0
    assert parts.index_s > 0


def test_what_was_before_the_block_does_not_count(photos: Path) -> None:
    with loaderkit.build(pictures(photos)) as loader:
        list(loader)
        with loader.profile() as report:
            list(loader)
    assert report.num_samples == 60
    assert report.first_batch is None
    assert all(point["at_s"] >= 0 for point in report.series)


def test_a_report_on_nothing(photos: Path) -> None:
    with loaderkit.build(pictures(photos)) as loader, loader.profile() as report:
        pass
    assert (report.num_batches, report.verdict.kind, report.utilisation) == (0, "unknown", None)
    assert "Nothing to say yet" in str(report)


def test_a_report_is_asked_for_when_its_block_is_over(photos: Path) -> None:
    with loaderkit.build(pictures(photos)) as loader:
        with loader.profile() as report:
            with pytest.raises(RuntimeError, match="when the `with` block is over"):
                _ = report.verdict
            with pytest.raises(RuntimeError, match="being profiled already"), loader.profile():
                pass
        with pytest.raises(RuntimeError, match="of one block"), report:
            pass


def test_json_is_read_again_unchanged(photos: Path, tmp_path: Path) -> None:
    with loaderkit.build(pictures(photos)) as loader, loader.profile() as report:
        list(loader)
    report.save(tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    assert Report.from_json(text) == report.result
    newer = {**json.loads(text), "schema_version": 99}
    with pytest.raises(ValueError, match="version 99"):
        Report.from_json(json.dumps(newer))


def test_a_report_fits_80_columns_without_colour(photos: Path) -> None:
    name = "a_stage_with_a_name_of_no_less_than_sixty_characters_in_all"
    pipeline = pictures(photos).with_overrides({"stages.center_crop.name": name})
    with loaderkit.build(pipeline) as loader, loader.profile() as report:
        list(loader)
    text = str(report)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "\x1b" not in text
    assert " ".join(text.split()).index("the loop waited") < 80


def test_a_pipeline_that_no_file_can_hold_is_reported_on(photos: Path) -> None:
    pipeline = Pipeline.files(photos, include="**/*.jpg").read().call(lambda sample: None).batch(20)
    with loaderkit.build(pipeline) as loader, loader.profile() as report:
        list(loader)
    assert "cannot be written as YAML" in report.config["note"]
    json.loads(report.to_json())


@pytest.mark.parametrize("is_scaled", [False, True])
def test_smaller_images_never_promise_less_than_before(photos: Path, is_scaled: bool) -> None:
    source = Pipeline.files(photos, include="**/*.jpg", label="parent").read()
    pipeline = source.decode(scaled=is_scaled).resize((16, 16)).random_horizontal_flip().batch(4)
    with loaderkit.build(pipeline) as loader, loader.profile() as report:
        assert len(list(loader)) == 15
    model = model_of(report.result)
    assert model is not None
    found = {
        change.name: min(bounds(change.model).values()) for change in changes(model, report.result, pipeline.config)
    }
    assert ("resize to half the width and height" in found) is not is_scaled
    for name in ("resize to half the width and height", "images stored at half the width and height"):
        assert is_scaled or found[name] >= min(bounds(model).values())


@pytest.mark.parametrize(
    ("add", "is_offered"),
    [
        (lambda made: made.resize((16, 16)).color_jitter(hue=0.1), True),
        (lambda made: made.color_jitter(hue=0.1).resize((16, 16)), False),
        (lambda made: made.resize((16, 16), interpolation="nearest"), False),
        (lambda made: made.resize((16, 16)).call(lambda sample: None), False),
    ],
)
def test_the_gpu_is_only_offered_to_what_can_go_there(
    photos: Path, add: Callable[[Any], Any], is_offered: bool
) -> None:
    pipeline = add(Pipeline.files(photos, include="**/*.jpg", label="parent").read().decode()).batch(4)
    with loaderkit.build(pipeline) as loader, loader.profile() as report:
        list(loader)
    model = model_of(report.result)
    assert model is not None
    offered = {change.name for change in changes(model, report.result, pipeline.config)}
    assert ("decoding on the GPU" in offered) is is_offered


def test_inline_the_first_batch_is_made_as_any_other_is(photos: Path) -> None:
    with loaderkit.build(pictures(photos), overrides={"prefetch.executor": "inline"}) as loader:
        with loader.profile() as report:
            for batch in loader:
                batch["image"].float().sum()
        waits_s = loader.stats().stall_s
    by_stage = report.result.stall.by_stage
    assert by_stage.get("start", 0.0) == pytest.approx(waits_s.get("start", 0.0))
    assert by_stage["decode"] == pytest.approx(waits_s["decode"])
