"""Tiny batches of local records run inline; what a pipeline says of `prefetch` and of workers is done."""

from __future__ import annotations

import io
import tarfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError
from loaderkit.profile.settings_patch import settings_for


def records(folder: Path, batch: int = 16, **options: Any) -> Pipeline:
    np.save(folder / "records.npy", np.arange(8000).reshape(2000, 4))
    return Pipeline.array(str(folder / "records.npy"), **options).shuffle(seed=0).read().batch(batch)


def members(folder: Path, batch: int, extensions: tuple[str, ...] = ("bin",), size: int = 100) -> Pipeline:
    with tarfile.open(folder / "members.tar", "w") as archive:
        for number in range(300):
            for extension in extensions:
                member = tarfile.TarInfo(f"{number:03}.{extension}")
                member.size = size
                archive.addfile(member, io.BytesIO(bytes(size)))
    return Pipeline.tar(str(folder / "members.tar")).read().batch(batch)


def executor_of(pipeline: Pipeline, **overrides: Any) -> str:
    with loaderkit.build(pipeline, overrides=overrides) as loader:
        next(iter(loader))
        tuning = loader.stats().to_dict()["tuning"]
        has_threads = any(thread.name.startswith("loaderkit") for thread in threading.enumerate())
        assert has_threads == (tuning["executor"] == "thread")
        assert ("executor_reason" in tuning) == (tuning["executor"] == "inline")
        return str(tuning["executor"])


def test_tiny_batches_of_local_records_and_members_run_inline(tmp_path: Path) -> None:
    assert executor_of(records(tmp_path)) == "inline"
    assert executor_of(records(tmp_path, 128)) == "inline"
    assert executor_of(members(tmp_path, 128)) == "inline"
    assert executor_of(members(tmp_path, 64, ("bin", "cls"))) == "inline"


@pytest.mark.parametrize(
    "overrides",
    [
        {"prefetch.concurrency": 1},
        {"prefetch.concurrency": 2, "prefetch.executor": "thread"},
        {"stages.read.workers": 1},
        {"prefetch.on_timeout": "raise"},
        {"prefetch.executor": "thread"},
        {"prefetch.batches": 16},
        {"prefetch.timeout": "5s"},
    ],
)
def test_what_was_asked_for_is_done(tmp_path: Path, overrides: dict[str, Any]) -> None:
    assert executor_of(records(tmp_path), **overrides) == "thread"


def test_batches_that_are_not_tiny_have_workers(tmp_path: Path) -> None:
    assert executor_of(records(tmp_path, 129)) == "thread"
    assert executor_of(members(tmp_path, 129)) == "thread"
    assert executor_of(members(tmp_path, 65, ("bin", "cls"))) == "thread"
    assert executor_of(members(tmp_path, 16, size=10_000)) == "thread"


def test_data_larger_than_the_page_cache_is_read_by_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loaderkit.pipeline.inline_rule._CACHED_SHARE", 0.0)
    assert executor_of(records(tmp_path)) == "thread"


def test_other_code_and_other_stores_have_workers(tmp_path: Path) -> None:
    np.save(tmp_path / "records.npy", np.arange(8000).reshape(2000, 4))
    pipeline = Pipeline.array(str(tmp_path / "records.npy")).read()
    assert executor_of(pipeline.call(dict).batch(16)) == "thread"
    assert executor_of(pipeline.batch(16).transfer(device="cpu")) == "thread"
    assert executor_of(Pipeline.dataset(list(range(100))).read().batch(4)) == "thread"
    store = MemoryConnector({"records.npy": (tmp_path / "records.npy").read_bytes()})
    elsewhere = Pipeline.array("memory://records.npy").read().batch(16)
    with loaderkit.build(elsewhere, connectors={"memory": store}) as loader:
        assert loader.stats().tuning.executor == "thread"


def test_the_batches_are_those_of_threads_and_so_is_the_state(tmp_path: Path) -> None:
    pipeline = records(tmp_path)
    with (
        loaderkit.build(pipeline) as inline,
        loaderkit.build(pipeline, overrides={"prefetch.concurrency": 2}) as threads,
    ):
        inline.start()
        inline.resize(batches=2, memory="1MiB")
        for number, (mine, theirs) in enumerate(zip(inline, threads, strict=True)):
            assert mine["__key__"] == theirs["__key__"]
            assert mine["data"].equal(theirs["data"])
            if number == 7:
                break
        assert inline.state_dict() == threads.state_dict()
        state = inline.state_dict()
        for loader in (inline, threads):
            loader.load_state_dict(state)
        for mine, theirs in zip(inline, threads, strict=True):
            assert mine["__key__"] == theirs["__key__"]
        assert inline.config.prefetch.executor == "auto", "the description stays as it was written"
        assert "inline" not in inline.to_yaml()


def test_messages_name_the_setting_that_gives_workers(tmp_path: Path) -> None:
    with loaderkit.build(records(tmp_path, 64)) as loader:
        with pytest.raises(ConfigError, match=r"takes longer to hand over .* set prefetch\.concurrency to a number"):
            loader.resize("read", workers=2)
        for _ in loader:
            pass
        stats = loader.stats()
        verdict = stats.verdict()
        assert "prefetch.executor" not in verdict.change
        settings = settings_for(verdict, stats, loader.config)
        assert {setting.key for setting in settings} <= {"prefetch.concurrency"}
