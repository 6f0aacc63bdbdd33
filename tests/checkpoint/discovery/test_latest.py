"""The newest checkpoint of names of all kinds, and a reader past retention."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import loaderkit
from loaderkit.checkpoint.discovery.kinds import step_in
from loaderkit.checkpoint.discovery.listing import list_checkpoints
from loaderkit.connectors.base import ConnectorLayer
from loaderkit.connectors.file import FileConnector
from loaderkit.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS: list[Callable[[int, random.Random], str]] = [
    lambda step, rng: f"step-{step:0{rng.choice([1, 8])}d}.pt",
    lambda step, rng: f"checkpoint_{step}.pth.tar",
    lambda step, rng: f"loss{rng.random():.3f}_step{step}.pt",
    lambda step, rng: f"epoch={rng.randrange(90)}-step={step}.ckpt",
    lambda step, rng: f"{step:06d}.pt",
    lambda step, rng: f"global_step{step}-best.bin",
]
NUMBERED: list[Callable[[int, random.Random], str]] = [
    lambda number, rng: f"model_{number}.pt",
    lambda number, rng: f"epoch{number}.ckpt",
]
UNNUMBERED = ["handpicked.pt", "last.ckpt", "final.bin", "zz.pth"]
BEST = ["model_best.pt", "best.ckpt", "best_0.999.pt", "BEST-model.pth"]


def save(folder: Path, names: list[str], rng: random.Random) -> None:
    """In any order."""
    for name in rng.sample(names, len(names)):
        torch.save({"name": name}, folder / name)


def newest_in(folder: Path) -> str:
    newest = os.path.basename(loaderkit.checkpoint.latest(folder))
    listed = list_checkpoints(folder)
    assert listed[-1].name == newest
    assert listed[-1].step == step_in(newest)
    assert loaderkit.restore(folder / newest)["name"] == newest
    return newest


def test_steps_come_first_and_the_best_last(tmp_path: Path, rng: random.Random) -> None:
    for number in range(12):
        (folder := tmp_path / str(number)).mkdir()
        steps = rng.sample(range(2000), rng.randrange(1, 5))
        names = {rng.choice(STEPS)(step, rng): step for step in steps}
        others = rng.sample([*UNNUMBERED, *BEST, "model_99999.pt"], rng.randrange(5))
        save(folder, [*names, *others], rng)
        assert newest_in(folder) == max(names, key=lambda name: names[name])


def test_without_steps_numbers_then_times_then_the_best(tmp_path: Path, rng: random.Random) -> None:
    for number in range(6):
        (folder := tmp_path / str(number)).mkdir()
        template, numbers = rng.choice(NUMBERED), rng.sample(range(500), 3)
        save(folder, [*(template(one, rng) for one in numbers), *rng.sample(UNNUMBERED, 2), *rng.sample(BEST, 2)], rng)
        assert loaderkit.checkpoint.latest(folder) == f"{folder}/{template(max(numbers), rng)}"
        for one in numbers:
            (folder / template(one, rng)).unlink()
        for time_s, path in enumerate(rng.sample(sorted(folder.iterdir()), 4), 1_700_000_000):
            os.utime(path, (time_s, time_s))
        plain = [path for path in folder.iterdir() if path.name in UNNUMBERED]
        assert loaderkit.checkpoint.latest(folder) == str(max(plain, key=lambda path: path.stat().st_mtime))


def test_of_one_step_the_one_that_was_written_last(tmp_path: Path, rng: random.Random) -> None:
    """As of a run of Lightning that was begun again."""
    names = ["epoch=1-step=300.ckpt", "epoch=1-step=300-v1.ckpt", "epoch=1-step=300-v2.ckpt"]
    save(tmp_path, ["epoch=0-step=200.ckpt", *names], rng)
    for time_s, name in enumerate(rng.sample(names, 3), 1_700_000_000):
        os.utime(tmp_path / name, (time_s, time_s))
    assert loaderkit.checkpoint.latest(tmp_path) == f"{tmp_path}/{name}"


def test_a_directory_that_is_a_checkpoint_itself(tmp_path: Path) -> None:
    """And no shard of it; one that lacks a shard is none."""
    for number in (1, 2):
        safetensors.torch.save_file(
            {f"w{number}": torch.ones(2)}, tmp_path / f"model-{number:05d}-of-00002.safetensors"
        )
    assert loaderkit.checkpoint.latest(tmp_path) == str(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="not whole"):
        loaderkit.checkpoint.latest(tmp_path)


class Retained(ConnectorLayer):
    """A store in which retention removes at the read with the number `at` what was listed, after `save` has saved more."""

    def __init__(self, inner: FileConnector, at: int, save: Callable[[], Any]) -> None:
        super().__init__(inner)
        self._left, self._save = at, save

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self._left -= 1
        if self._left == 0:
            self._save()
        self.inner.read_into(key, start, buffer, etag=etag)


def test_a_reader_takes_the_next_newest(tmp_path: Path, rng: random.Random, caplog: pytest.LogCaptureFixture) -> None:
    """Whenever the checkpoint is removed: while it is looked for, before it is opened, or while its tensors are read."""
    num_taken = 0
    for number in range(10):
        with loaderkit.CheckpointManager(tmp_path / str(number), keep={"last": 1}) as checkpoints:

            def save(step: int = 2, checkpoints: loaderkit.CheckpointManager = checkpoints) -> None:
                checkpoints.save(step, {"w": torch.full((40_000,), float(step))}, wait=True)
                checkpoints.wait_until_finished()

            save(1)
            store = Retained(FileConnector(tmp_path), rng.randrange(1, 9), save)
            into: dict[str, Any] = {"w": torch.zeros(40_000)}
            if number % 3 == 0:
                with loaderkit.CheckpointManager(f"given://{number}", connectors={"given": store}) as reader:
                    step = reader.restore(into) or 0
                assert step in (1, 2)
                assert into["w"].eq(step).all()
                continue
            url = loaderkit.checkpoint.latest(f"given://{number}", connectors={"given": store})
            assert type(url) is str  # which every YAML and JSON writer takes
            restored = loaderkit.restore(url, rng.choice([into, None]), keys="w", connectors={"given": store})
            step = checkpoints.latest_step() or 0
            assert restored["w"].eq(step).all() or (step == 2 and restored["w"].eq(1).all())
            num_taken += "is restored in its place" in caplog.text
            caplog.clear()
    assert num_taken


def test_of_another_url_the_error_says_that_it_was_removed(tmp_path: Path) -> None:
    with loaderkit.CheckpointManager(tmp_path / "run", keep={"last": 1}) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(300_000)}, wait=True)
        removed = Retained(FileConnector(tmp_path), 6, lambda: (tmp_path / "run").rename(tmp_path / "gone"))
        url = str(loaderkit.checkpoint.latest(tmp_path / "run")).replace(str(tmp_path), "given:/")
        with pytest.raises(CheckpointError, match="was removed before it was read, as `keep` of a running job does"):
            loaderkit.restore(url, connectors={"given": removed})
        with pytest.raises(CheckpointError, match="no such file"):
            loaderkit.restore(url, connectors={"given": removed})


def test_who_writes_a_url_means_that_checkpoint(tmp_path: Path, rng: random.Random) -> None:
    """Although `latest` has returned the same text before."""
    with loaderkit.CheckpointManager(tmp_path, keep={"last": 1}) as checkpoints:
        first, second = sorted(rng.sample(range(1000), 2))
        checkpoints.save(first, {"w": torch.full((3,), float(first))}, wait=True)
        url = loaderkit.checkpoint.latest(tmp_path)
        checkpoints.save(second, {"w": torch.full((3,), float(second))}, wait=True)
        checkpoints.wait_until_finished()
    with pytest.raises(CheckpointError, match=f"{first:010d}: there is no such file"):
        loaderkit.restore("".join([*url]))
    assert loaderkit.restore(url)["w"].eq(second).all()
