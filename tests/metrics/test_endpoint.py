"""What a scrape says: the numbers of `loader.stats()`, in a valid format, and counters that never go back."""

from __future__ import annotations

import random
import socket
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executors import EXECUTORS
from leftovers import nothing_left  # noqa: F401 - a fixture for every test here
from scraping import Scrape, free_port, text_of

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import StageError

NUM_SAMPLES, BATCH_SIZE = 96, 8


def doubled(sample: dict[str, Any]) -> None:
    sample["data"] = 2 * sample["data"]


def bad_at_50(sample: dict[str, Any]) -> None:
    if int(sample["data"][0]) == 50:
        raise ValueError("a bad one")


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """An array whose record i is [i, i]."""
    np.save(tmp_path / "records.npy", np.arange(NUM_SAMPLES, dtype=np.int64)[:, None].repeat(2, axis=1))
    return tmp_path / "records.npy"


def pipeline_of(records: Path, port: int, function: Any = doubled, name: str = "train") -> Pipeline:
    read = Pipeline.array(str(records)).shuffle(seed=1).read().call(function).batch(BATCH_SIZE)
    return read.metrics(prometheus=port).named(name)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_scrape_has_the_numbers_of_stats(executor: str, records: Path) -> None:
    port = free_port()
    with loaderkit.build(pipeline_of(records, port), overrides={**EXECUTORS[executor], "order.epochs": 1}) as loader:
        before = Scrape(port)
        assert before("batches_total") == before("stall_seconds_total", cause="call") == 0
        assert before("ahead_batches") == 4
        assert len(list(loader)) == 12
        earlier, scrape, stats = loader.stats(), Scrape(port), loader.stats()
        assert scrape("batches_total", pipeline="train", rank="0") == stats.num_batches == 12
        assert scrape("samples_total") == NUM_SAMPLES
        waited_s = scrape.by("cause", "stall_seconds_total")
        assert waited_s.keys() == {"start", "memory", "wakeup", "read", "call", "batch"} | stats.stall_s.keys()
        assert sum(waited_s.values()) == pytest.approx(sum(stats.stall_s.values()))
        for cause, seconds in waited_s.items():
            # The longer workers have rested, the more of a wait is called `wakeup`.
            bounds = sorted(found.stall_s.get(cause, 0.0) for found in (earlier, stats))
            assert bounds[0] - 1e-6 <= seconds <= bounds[1] + 1e-6, cause
        assert sum(stats.stall_s.values()) > 0
        for row in stats.stages:
            assert scrape("stage_items_total", stage=row.name) == row.num_items == NUM_SAMPLES
            assert scrape("stage_bytes_total", stage=row.name) == row.num_bytes
            assert scrape("stage_worker_seconds_total", stage=row.name, state="busy") == pytest.approx(row.busy_s)
            assert scrape("stage_cpu_seconds_total", stage=row.name) == pytest.approx(row.cpu_s)
        assert scrape("stage_bytes_total", stage="read") == NUM_SAMPLES * 16
        assert scrape("memory_budget_bytes") == stats.memory["budget_bytes"]
        assert scrape("memory_live_bytes") == stats.memory["live_bytes"]
        assert scrape("pool_workers") == stats.tuning.concurrency
        assert Scrape(port, plain=True).values.keys() == scrape.values.keys()
    with pytest.raises(OSError, match="refused"):
        text_of(port)


class Course:
    """Does things with a loader at random, and scrapes after each: no counter may go back, and none may be lost."""

    def __init__(self, pipeline: Pipeline, port: int, overrides: dict[str, Any], rng: random.Random) -> None:
        self.pipeline, self.port, self.overrides, self.rng = pipeline, port, overrides, rng
        self.loader = loaderkit.build(pipeline, overrides=overrides)
        self.batches: Any = iter(self.loader)
        self.num_delivered = self.num_errors = 0
        self.before: dict[Any, float] = {}

    def load(self) -> None:
        for _ in range(self.rng.randrange(1, 9)):
            try:
                if next(self.batches, None) is None:
                    self.batches = iter(self.loader)
                    return
                self.num_delivered += 1
            except StageError:
                self.num_errors += 1
                self.batches = iter(self.loader)

    def seek(self) -> None:
        self.loader.set_epoch(self.rng.randrange(5))
        self.batches = iter(self.loader)

    def resume(self) -> None:
        self.loader.load_state_dict(self.loader.state_dict())
        self.batches = iter(self.loader)

    def resize(self) -> None:
        self.loader.resize(batches=self.rng.randrange(2, 6))

    def build_again(self) -> None:
        self.loader.close()
        self.loader = loaderkit.build(self.pipeline, overrides=self.overrides)
        self.batches = iter(self.loader)

    def scrape(self) -> None:
        scrape = Scrape(self.port)
        assert scrape("batches_total", pipeline="train") == self.num_delivered
        for key, value in self.before.items():
            assert scrape.counters[key] >= value, key
        assert scrape("stage_items_total", stage="read") >= scrape("samples_total", pipeline="train")
        assert scrape("bad_samples_total", stage="call") >= self.num_errors
        self.before = scrape.counters


@pytest.mark.matrix(2)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_counters_never_go_back(executor: str, records: Path, rng: random.Random) -> None:
    port = free_port()
    course = Course(pipeline_of(records, port, bad_at_50), port, EXECUTORS[executor], rng)
    doings = [course.load, course.load, course.load, course.seek, course.resume, course.resize, course.build_again]
    try:
        for _ in range(5 if "process" in executor else 40):  # each error and each build starts processes
            rng.choice(doings)()
            if rng.random() < 0.7:
                course.scrape()
        while not course.num_delivered:
            course.load()
        course.scrape()
    finally:
        course.loader.close()


def test_loaders_share_a_port_and_a_closed_one_keeps_its_counters(records: Path) -> None:
    port = free_port()
    train = loaderkit.build(pipeline_of(records, port))
    with loaderkit.build(pipeline_of(records, port, name="validation")) as validation:
        with loaderkit.build(pipeline_of(records, port)) as second:
            next(iter(second))
            list(train)
            next(iter(validation))
            names = {"train": 12, "train-2": 1, "validation": 1}
            assert Scrape(port).by("pipeline", "batches_total") == names
        train.close()
        scrape = Scrape(port)
        assert scrape.by("pipeline", "batches_total") == names
        assert scrape("samples_total", pipeline="train") == NUM_SAMPLES
        assert scrape("stall_seconds_total", pipeline="train") == pytest.approx(sum(train.stats().stall_s.values()))
        assert scrape.by("pipeline", "ready_batches").keys() == {"validation"}
        with loaderkit.build(pipeline_of(records, port)) as again:
            next(iter(again))
            assert Scrape(port).by("pipeline", "batches_total") == names | {"train": 13}
    with loaderkit.build(pipeline_of(records, port)) as later:  # the port was free meanwhile
        next(iter(later))
        assert Scrape(port)("batches_total", pipeline="train") == 14


def test_the_rank_is_that_of_the_loader(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with loaderkit.build(pipeline_of(records, port)) as loader:
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv("WORLD_SIZE", "4")
        next(iter(loader))
        assert Scrape(port).by("rank", "batches_total") == {"3": 1}
    with loaderkit.build(pipeline_of(records, port, name="given"), rank=1, world_size=2):
        assert Scrape(port)("batches_total", pipeline="given", rank="1") == 0


def test_each_rank_of_a_machine_has_a_port(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("LOCAL_RANK", "1")
    with loaderkit.build(pipeline_of(records, port - 1)):
        assert Scrape(port)("batches_total") == 0


def test_other_machines_reach_it_only_where_the_host_says_so(records: Path) -> None:
    port = free_port()
    with loaderkit.build(pipeline_of(records, port)), pytest.raises(OSError, match="refused"):
        text_of(port, host="127.0.0.2")
    with loaderkit.build(pipeline_of(records, port), overrides={"metrics.prometheus": f"0.0.0.0:{port}"}):
        assert "loaderkit_batches_total" in text_of(port, host="127.0.0.2")


def test_bad_samples_and_sources(records: Path) -> None:
    port = free_port()
    web, books = (Pipeline.array(str(records)), Pipeline.array(str(records)).call(bad_at_50))
    mixed = Pipeline.mix({"web": web, "books": books}, {"web": 3.0, "books": 1.0}, stop="all")
    pipeline = mixed.shuffle(seed=1).read().batch(BATCH_SIZE).errors(on_bad_sample="skip").metrics(prometheus=port)
    with loaderkit.build(pipeline, overrides={"order.epochs": 1}) as loader:
        for _ in loader:
            pass
        scrape, rows = Scrape(port), {row.name: row for row in loader.stats().source_rows()}
    assert scrape.by("source", "source_samples_total") == {name: row.num_samples for name, row in rows.items()}
    assert scrape.by("source", "source_skipped_samples_total") == {name: row.num_skipped for name, row in rows.items()}
    assert scrape("source_skipped_samples_total", source="books") == rows["books"].num_bad == 1
    assert scrape("bad_samples_total", stage="call.books", action="skip") == 1
    assert scrape("source_passes", source="books") == pytest.approx(rows["books"].num_passes)


def test_saves_of_checkpoints(records: Path, tmp_path: Path) -> None:
    port = free_port()
    with (
        loaderkit.build(pipeline_of(records, port)) as loader,
        loaderkit.CheckpointManager(tmp_path / "runs") as checkpoints,
    ):
        before = _saves(port)
        for step in (3, 7):
            next(iter(loader))
            checkpoints.save(step, {"loader": loader, "weights": np.zeros(1000)}, wait=True)
        after, stats = _saves(port), checkpoints.stats()
        assert Scrape(port)("checkpoint_last_step") == 7
    assert after["saves"] - before["saves"] == stats["num_saved"] == 2
    assert after["pause"] - before["pause"] == pytest.approx(stats["waiting_s"] + stats["staging_s"], abs=1e-3)
    assert after["flush"] - before["flush"] == pytest.approx(stats["flush_s"])
    assert after["bytes"] - before["bytes"] > 2000


def _saves(port: int) -> dict[str, float]:
    """What other tests of this process have saved counts, too."""
    values = Scrape(port).values
    names = {
        "saves": "saves_total",
        "pause": "pause_seconds_total",
        "flush": "flush_seconds_total",
        "bytes": "bytes_total",
    }
    return {
        key: sum(value for (one, _), value in values.items() if one == f"loaderkit_checkpoint_{name}")
        for key, name in names.items()
    }


def test_a_client_that_says_nothing_holds_up_neither_scrapes_nor_the_close(records: Path) -> None:
    port = free_port()
    with socket.socket() as silent:
        with loaderkit.build(pipeline_of(records, port)):
            silent.connect(("127.0.0.1", port))
            silent.sendall(b"GET /met")
            assert Scrape(port)("batches_total") == 0
        assert silent.recv(1) == b""
    with loaderkit.build(pipeline_of(records, port)), pytest.raises(OSError, match="404"):
        text_of(port, host=f"127.0.0.1:{port}/other?")


@pytest.mark.integration
def test_prometheus_finds_nothing_to_complain_of(records: Path) -> None:
    port = free_port()
    with loaderkit.build(pipeline_of(records, port)) as loader:
        next(iter(loader))
        text = text_of(port, "text/plain")
    ran = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
