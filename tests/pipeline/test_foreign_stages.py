"""Stages of other packages: nothing is assumed of them but what their kind says."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from extensions import forget_after
from numpy.typing import NDArray
from PIL import Image as PillowImage

import loaderkit
from loaderkit.cli import main
from loaderkit.errors import ConfigError
from loaderkit.samples.sample import Sample
from loaderkit.samples.values import Encoded, Image
from loaderkit.stages.base import StageArgs
from loaderkit.stages.context import StageKind

Run = Callable[[Sample, NDArray[np.float64], dict[str, Any] | None], None]


class NoArgs(StageArgs):
    """What a stage does."""


def of_samples(run: Run, **more: Any) -> StageKind:
    return StageKind(NoArgs, "sample", lambda args: run, **more)


def keeps_views(sample: Sample, draws: NDArray[np.float64], memory: dict[str, Any] | None) -> None:
    """Views of what it is given, in containers, as multi-crop makes them."""
    name, value = next((name, value) for name, value in sample.items() if isinstance(value, Encoded | Image))
    pixels = value.pixels if isinstance(value, Image) else np.frombuffer(value.data, np.uint8)
    if isinstance(value, Encoded):
        sample[name] = int(pixels[0])
    sample["views"] = [pixels[:3], {"last": pixels[-1:]}]


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_after(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path, rng: random.Random) -> Path:
    """48 files of one value each, as pixels and as bytes."""
    (tmp_path / "data").mkdir()
    for number in range(48):
        pixels = np.full((rng.randint(20, 40), rng.randint(20, 40), 3), number, np.uint8)
        PillowImage.fromarray(pixels).save(tmp_path / "data" / f"{number:02}.png")
        (tmp_path / "data" / f"{number:02}.bin").write_bytes(bytes([number]) * rng.randint(3000, 5000))
    return tmp_path / "data"


@pytest.mark.parametrize("executor", ["inline", "thread"])
@pytest.mark.parametrize(
    ("include", "stages"),
    [("*.png", ["decode", {"resize": {"size": [16, 16]}}, "keeps_views"]), ("*.bin", ["keeps_views"])],
    ids=["pixels", "bytes"],
)
def test_it_may_keep_what_it_is_given(folder: Path, include: str, stages: list[Any], executor: str) -> None:
    loaderkit.extend.register("keeps_views", of_samples(keeps_views))
    pipeline = {
        "source": {"kind": "files", "url": str(folder), "include": include},
        "stages": ["read", *stages, {"batch": {"size": 6}}],
        "prefetch": {"executor": executor},
        "order": {"epochs": 1, "shuffle": "none"},
    }
    with loaderkit.build(pipeline) as loader:
        batches = [*loader]
    seen = [
        {int(value) for view in (first, rest["last"]) for value in np.asarray(view).ravel()}
        for batch in batches
        for first, rest in batch["views"]
    ]
    assert seen == [{number} for number in range(48)]


class Counted:
    """How many threads were in it at once."""

    def __init__(self) -> None:
        self.most, self._inside, self._lock = 0, 0, threading.Lock()
        self._both = threading.Event()

    def __call__(self, sample: Sample, draws: NDArray[np.float64], memory: dict[str, Any] | None) -> None:
        with self._lock:
            self._inside += 1
            self.most = max(self.most, self._inside)
            if self._inside > 1:
                self._both.set()
        self._both.wait(0.02)  # for another one; none comes where one at a time runs
        with self._lock:
            self._inside -= 1


def test_one_thread_at_a_time_runs_it_if_its_kind_says_so() -> None:
    free, alone = Counted(), Counted()
    loaderkit.extend.register("free", of_samples(free))
    loaderkit.extend.register("alone", of_samples(alone, runs_user_code=True))
    for name in ("free", "alone"):
        pipeline = loaderkit.Pipeline(
            {
                "source": {"kind": "dataset", "object": [{"x": number} for number in range(40)]},
                "stages": ["read", name, {"batch": {"size": 4}}],
                "prefetch": {"executor": "thread", "concurrency": 4},
                "order": {"epochs": 1},
            }
        )
        with loaderkit.build(pipeline) as loader:
            assert len([*loader]) == 10
    assert free.most > 1
    assert alone.most == 1


def test_it_may_make_fields_and_decode(folder: Path) -> None:
    def decodes(sample: Sample, draws: NDArray[np.float64], memory: dict[str, Any] | None) -> None:
        number = sample.pop("image").data[-1] % 200
        sample["picture"] = Image(np.full((9, 9, 3), number, np.uint8))
        sample["thumb"] = Image(np.full((9, 9, 3), 255 - number, np.uint8))

    loaderkit.extend.register("own_decode", of_samples(decodes))
    resize = {"resize": {"size": [4, 4], "fields": ["picture", "thumb"]}}
    pipeline = {
        "source": {"kind": "files", "url": str(folder), "include": "*.png"},
        "stages": ["read", "own_decode", resize, {"batch": {"size": 6}}],
        "order": {"epochs": 1},
        "output": ["picture", "thumb"],
    }
    with loaderkit.build(pipeline) as loader:
        for picture, thumb in loader:
            assert picture.shape == thumb.shape == (6, 3, 4, 4)
            assert (picture + thumb == 255).all()


@pytest.mark.parametrize(
    ("scope", "more"),
    [("batch", {"make": lambda args: keeps_views}), ("sample", {}), ("sample", {"make": list, "compile": list})],
)
def test_a_kind_that_cannot_run_is_refused_at_once(scope: Any, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="NoArgs"):
        StageKind(NoArgs, scope, **more)


def test_check_names_one_that_threads_disturb(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held: list[int] = [0]

    def races(sample: Sample, draws: NDArray[np.float64], memory: dict[str, Any] | None) -> None:
        held[0] = len(sample.pop("bin").data)
        time.sleep(1e-3)  # another thread's turn, on a busy machine as well
        sample["x"] = held[0]

    loaderkit.extend.register("races", of_samples(races))
    (tmp_path / "p.yaml").write_text(
        f"source: {{kind: files, url: '{folder}', include: '*.bin'}}\nstages: [read, races, batch: {{size: 4}}]\n"
    )
    main(["check", str(tmp_path / "p.yaml")])
    said = capsys.readouterr().out
    assert "other values in x" in said
    assert "races" in said.partition("other values in x")[2]
