"""A process that opens, uses and closes loaders for a long time has what it had: memory, descriptors, threads, mappings."""

from __future__ import annotations

import ctypes
import gc
import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from leftovers import traces
from memory_peak import peak_bytes
from scraping import free_port, text_of
from waiting import wait_for

import loaderkit
from loaderkit import CheckpointManager, Pipeline
from loaderkit.errors import StageError

NUM_ROWS = 40
MEBIBYTE = 1 << 20


class Ragged:
    """Large arrays of differing shape; one of them cannot be had."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.bad:
            raise ValueError("a bad one")
        return {"x": np.full(60_000 + 1000 * (index % 7), index, np.float32)}


def make_files(folder: Path, rng: random.Random, num_parquet_files: int) -> None:
    (folder / "lines").mkdir()
    (folder / "lines" / "x.jsonl").write_text("".join(f"{json.dumps({'a': n})}\n\n" for n in range(NUM_ROWS)))
    (folder / "files").mkdir()
    for number in range(NUM_ROWS):
        (folder / "files" / f"{number:02}.bin").write_bytes(rng.randbytes(rng.randrange(3000)))
    np.save(folder / "array.npy", np.arange(8 * NUM_ROWS).reshape(NUM_ROWS, 8))
    (folder / "parquet").mkdir()
    table = pa.table({f"c{number}": np.arange(NUM_ROWS) for number in range(12)})
    for number in range(num_parquet_files):
        pq.write_table(table, folder / "parquet" / f"{number:02}.parquet", row_group_size=1)


def in_use() -> tuple[Counter[str], int]:
    """Threads, descriptors, mappings and processes, and the memory in bytes, with what is free given back."""
    pa.default_memory_pool().release_unused()
    kinds = Counter(kind for kind, _ in traces())  # which collects garbage
    ctypes.CDLL(None).malloc_trim(0)
    return kinds, peak_bytes("VmRSS")


class Life:
    """Does one thing after another, drawn, with at most three open loaders."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.rng, self.folder, self.port = rng, folder, free_port()
        self.open: list[tuple[loaderkit.Loader, Any]] = []
        self.actions: list[Callable[[], None]] = [
            self.build, self.build, self.take, self.take, self.take, self.resume, self.resize, self.seek,
            self.close, self.forget, self.scrape, self.save,
        ]  # fmt: skip

    def build(self) -> None:
        if len(self.open) == 3:
            self.close()
        kind, folder = self.rng.choice(["lines", "files", "array", "parquet", "ragged", "bad"]), self.folder
        pipeline = {
            "lines": lambda: Pipeline.lines(f"{folder}/lines"),
            "files": lambda: Pipeline.files(f"{folder}/files", include="*.bin"),
            "array": lambda: Pipeline.array(f"{folder}/array.npy"),
            "parquet": lambda: Pipeline.parquet(f"{folder}/parquet"),
            "ragged": lambda: Pipeline.dataset(Ragged()),
            "bad": lambda: Pipeline.dataset(Ragged(self.rng.randrange(NUM_ROWS))),
        }[kind]()
        ragged: dict[str, Any] = {"x": self.rng.choice(["list", "pad"])} if kind in ("ragged", "bad") else {}
        pipeline = pipeline.shuffle(seed=self.rng.randrange(9)).read().batch(self.rng.choice([1, 4, 7]), ragged=ragged)
        if self.rng.random() < 0.5:
            pipeline = pipeline.metrics(prometheus=self.port)
        executor = self.rng.choice(["inline", "thread"])
        loader = loaderkit.build(pipeline.named(kind), overrides={"prefetch.executor": executor})
        self.open.append((loader, iter(loader)))

    def _drawn(self) -> int:
        if not self.open:
            self.build()
        return self.rng.randrange(len(self.open))

    def take(self) -> None:
        number = self._drawn()
        loader, batches = self.open[number]
        with suppress(StageError):
            for _ in range(self.rng.randrange(1, 12)):
                if next(batches, None) is None:
                    break
        if self.rng.random() < 0.3:  # the epoch ends there, or earlier
            self.open[number] = loader, iter(loader)

    def resume(self) -> None:
        number = self._drawn()
        loader, _ = self.open[number]
        loader.load_state_dict(loader.state_dict())
        self.open[number] = loader, iter(loader)

    def seek(self) -> None:
        number = self._drawn()
        loader, _ = self.open[number]
        loader.set_epoch(self.rng.randrange(5))
        self.open[number] = loader, iter(loader)

    def resize(self) -> None:
        self.open[self._drawn()][0].resize(batches=self.rng.randrange(2, 6))

    def close(self) -> None:
        loader, _ = self.open.pop(self._drawn())
        loader.close()

    def forget(self) -> None:
        """It is collected, and was not closed."""
        del self.open[self._drawn()]

    def scrape(self) -> None:
        with suppress(OSError):  # no loader shows its metrics
            text_of(self.port)

    def save(self) -> None:
        loader, _ = self.open[self._drawn()]
        with CheckpointManager(self.folder / "runs", keep={"last": 1}) as checkpoints:
            step = 1 + (checkpoints.latest_step() or 0)
            checkpoints.save(step, {"loader": loader, "weights": np.zeros(1000)}, wait=True)

    def live(self, num: int) -> tuple[Counter[str], int]:
        """What is in use after so many actions, with all loaders gone."""
        for _ in range(num):
            self.rng.choice(self.actions)()
        while self.open:
            self.close()
        gc.collect()
        return in_use()


@pytest.mark.parametrize("num", [60, pytest.param(2000, marks=pytest.mark.prove)])
def test_any_actions_leave_what_was_there(tmp_path: Path, rng: random.Random, num: int) -> None:
    make_files(tmp_path, rng, 4)
    life = Life(tmp_path, rng)
    kinds, before = life.live(num // 2)
    _, after = life.live(num)
    wait_for(lambda: in_use()[0] <= kinds)  # what was collected leaves its endpoint in a thread
    assert after - before < 24 * MEBIBYTE


@pytest.mark.prove
def test_any_number_of_builds_take_the_memory_of_one(tmp_path: Path, rng: random.Random) -> None:
    """Of 40 Parquet files, whose footers take more than that."""
    make_files(tmp_path, rng, 40)
    memory = []
    for _ in range(3):
        with loaderkit.build(Pipeline.parquet(f"{tmp_path}/parquet").read().batch(4)) as loader:
            next(iter(loader))
        del loader
        memory.append(in_use()[1])
    assert memory[2] - memory[0] < 8 * MEBIBYTE
