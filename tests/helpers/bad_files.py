"""Twenty-four small pictures, ways to damage them, and what an error must say; fixtures for tests of bad input."""

from __future__ import annotations

import gc
import io
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from waiting import join_threads

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import (
    StageError,
)

NUM = 24
THREADS = ["inline", "thread"]


def picture(index: int, kind: str = "JPEG") -> bytes:
    """32 x 32 pixels of one grey level that tells which sample it is, with so much noise that they outweigh the header."""
    rng = np.random.default_rng(index)
    pixels = np.clip(40 + 6 * index + rng.integers(-9, 10, (32, 32, 3)), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Pillow.fromarray(pixels).save(buffer, kind, quality=95)
    return buffer.getvalue()


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """24 good pictures in two class folders: a/00.jpg, b/01.jpg, a/02.jpg, ..."""
    root = tmp_path / "data"
    for index in range(NUM):
        place = root / "ab"[index % 2] / f"{index:02}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(picture(index))
    return root


def descriptors() -> set[str]:
    return {
        f"{number} -> {target}"
        for number in os.listdir("/proc/self/fd")
        if (target := link_of(number)) and not target.startswith(("/dev/", "anon_inode:"))
    }


def link_of(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:  # the descriptor of the listing itself
        return ""


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    """After every test: no thread of ours, no descriptor more than before. Errors alone must have cleaned up, so tests
    call `close` only where that is what they are about."""
    before = set(threading.enumerate())
    open_before = descriptors()
    yield
    join_threads("", before)
    gc.collect()
    assert descriptors() <= open_before


def files(folder: Path, executor: Any = "thread", *, kind: str = "jpg", **errors: Any) -> Pipeline:
    made = (
        Pipeline.files(folder, include=f"**/*.{kind}", label="parent")
        .shuffle("none")
        .read()
        .decode()
        .batch(6)
        .prefetch(executor=executor, concurrency=2)
    )
    return made.errors(**errors) if errors else made


def threads_of_ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("loaderkit")]


def failure(loader: loaderkit.Loader) -> StageError:
    """Iterate into the error. Afterwards nothing may run, although the loader was not closed."""
    with pytest.raises(StageError) as caught:
        list(loader)
    assert threads_of_ours() == []
    error = caught.value
    del caught
    return error


def assert_names(error: StageError, stage: str, key: str, origin: Path | str, *said: str) -> None:
    message = str(error)
    assert error.stage == stage
    assert error.key == key
    assert str(origin) in error.origin
    assert message.startswith(f"{stage} failed for sample {key!r} in {error.origin}: ")
    for part in said:
        assert part.lower() in message.lower()
    assert "\n" not in message


def zero_bytes(place: Path) -> str:
    place.write_bytes(b"")
    return "0 bytes"


def text_in_it(place: Path) -> str:
    place.write_bytes(b"this is not a picture\n")
    return "not an image"


def cut_in_half(place: Path) -> str:
    data = place.read_bytes()
    place.write_bytes(data[: len(data) * 3 // 4])
    return "truncated"


def only_a_header(place: Path) -> str:
    place.write_bytes(place.read_bytes()[:2])
    return "2 bytes"


DAMAGES = [zero_bytes, text_in_it, cut_in_half, only_a_header]


class UnluckyError(Exception):
    """The user's own."""


def raise_for_seven(sample: dict[str, Any]) -> None:
    if sample["__key__"].endswith("07.jpg"):
        raise UnluckyError("seven")


def other_shape(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["__key__"].endswith("07.jpg"):
        sample["image"] = sample["image"][:, :10]
    return sample


def no_dict(sample: dict[str, Any]) -> Any:
    return sample["image"] if sample["__key__"].endswith("07.jpg") else sample


def called(folder: Path, function: Callable[..., Any], executor: Any, **errors: Any) -> Pipeline:
    made = (
        Pipeline.files(folder, label="parent")
        .shuffle("none")
        .read()
        .decode()
        .call(function, name="mine")
        .batch(6)
        .prefetch(executor=executor, concurrency=2)
    )
    return made.errors(**errors) if errors else made


class Items:
    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise UnluckyError(f"item {index}")
        return {"x": index, "image": torch.full((3, 4, 4), index, dtype=torch.uint8)}


def damaged(folder: Path, indices: list[int]) -> list[str]:
    keys = []
    for number, index in enumerate(indices):
        place = folder / "ab"[index % 2] / f"{index:02}.jpg"
        DAMAGES[number % len(DAMAGES)](place)
        keys.append(str(place.relative_to(folder)))
    return keys


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def num_failed(loader: loaderkit.Loader) -> dict[str, int]:
    return {row["name"]: row["num_failed"] for row in loader.stats().to_dict()["stages"]}
