"""Batches of other processes are those of threads, for every kind of source and stage."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from leftovers import nothing_left  # noqa: F401 - a fixture for every test here
from numbers_dataset import PROCESS, TWO_PROCESSES, numbers
from PIL import Image

import loaderkit
from loaderkit import Pipeline

pytestmark = pytest.mark.matrix(1)

NUM = 21  # so that the last batch of 8 is short


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same pictures as files and in a tar shard, two of them damaged, with arrays beside, and records."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    (root / "shards").mkdir()
    with tarfile.open(root / "shards" / "0.tar", "w") as shard:
        for number in range(NUM):
            folder = root / "photos" / f"class{number % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            file = io.BytesIO()
            pixels = rng.integers(0, 256, (4, 5, 3), np.uint8).repeat(12, 0).repeat(12, 1)
            Image.fromarray(pixels).save(file, "JPEG" if number % 4 else "PNG")
            extension = "jpg" if number % 4 else "png"
            content = file.getvalue() if number not in (3, 12) else file.getvalue()[:200]
            (folder / f"{number:02}.{extension}").write_bytes(content)
            np.save(folder / f"{number:02}.npy", rng.standard_normal((2, 3)).astype(np.float16))
            for name, value in ((extension, content), ("cls", b"%d" % number), ("txt", b"text %d" % number)):
                member = tarfile.TarInfo(f"{number:02}.{name}")
                member.size = len(value)
                shard.addfile(member, io.BytesIO(value))
    np.save(root / "records.npy", rng.standard_normal((NUM, 3)).astype(np.float32))
    (root / "halves.bin").write_bytes(rng.integers(0, 2**16, NUM * 4, np.uint16).tobytes())
    return root


def files(data: Path) -> Pipeline:
    return Pipeline.files(str(data / "photos"), include="**/*.{jpg,png}", label="parent").read().decode()


def shards(data: Path) -> Pipeline:
    return Pipeline.tar(str(data / "shards")).read().decode()


KINDS: dict[str, Callable[[Path], Pipeline]] = {
    "pictures": lambda data: (
        files(data).random_resized_crop(24).random_horizontal_flip().batch(8).normalize().transfer()
    ),
    "pictures as they are": lambda data: files(data).random_crop(30).resize([20, 24]).batch(8),
    "shards": lambda data: shards(data).center_crop(50).batch(8),
    "bytes of shards": lambda data: Pipeline.tar(str(data / "shards")).read().batch(8),
    "arrays": lambda data: Pipeline.files(str(data / "photos"), include="**/*.npy").read().decode().batch(8),
    "records": lambda data: Pipeline.array(str(data / "records.npy")).read().batch(8),
    "a data set": lambda data: numbers(NUM),
    "jitter": lambda data: files(data).color_jitter(brightness=0.5, hue=0.1).resize([20, 24]).batch(8).normalize(),
    "augmentations": lambda data: (
        files(data)
        .resize([20, 24])
        .random_vertical_flip()
        .random_rotation(30)
        .random_grayscale(0.5)
        .gaussian_blur(3)
        .random_erasing(value="random")
        .batch(8)
    ),
    "a filter that torch has": lambda data: files(data).resize([20, 24], interpolation="bicubic").batch(8),
    "a function of samples": lambda data: files(data).resize([20, 24]).call(brighten).batch(8),
    "a function of batches": lambda data: shards(data).resize([20, 24]).batch(8).call(add_sum),
    "records before a function": lambda data: Pipeline.array(str(data / "records.npy")).read().call(same).batch(8),
    "half precision": lambda data: files(data).resize([20, 24]).batch(8).normalize(dtype="bfloat16"),
    "another layout": lambda data: files(data).resize([20, 24]).batch(8).transfer(device="cpu", channels_last=True),
    "records of a type that NumPy lacks": lambda data: (
        Pipeline.array(str(data / "halves.bin"), dtype="bfloat16", shape=[4]).read().batch(8)
    ),
    "padding": lambda data: files(data).batch(8, ragged={"image": "pad"}),
}


def brighten(sample: dict[str, Any]) -> None:
    sample["image"] = sample["image"].add(1)


def add_sum(batch: dict[str, Any]) -> None:
    batch["sum"] = batch["image"].float().sum()


def same(sample: dict[str, Any]) -> None:
    pass


def contents(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch as what can be compared, and be kept when its memory is used again."""
    return {
        name: (value.dtype, value.shape, value.stride(), value.flatten().view(torch.uint8).numpy().tobytes())
        if isinstance(value, torch.Tensor)
        else list(value)
        for name, value in batch.items()
    }


def batches(pipeline: Pipeline, policy: str, **overrides: Any) -> list[dict[str, Any]]:
    """Two epochs of a rank that reads samples again."""
    settings: dict[str, Any] = {"errors.on_bad_sample": policy, "order.seed": 3, **overrides}
    with loaderkit.build(pipeline, overrides=settings, rank=1, world_size=2) as loader:
        seen = []
        for batch in [batch for _ in range(2) for batch in loader]:
            seen.append(contents(batch))
            change_in_place(batch)
        return seen


def change_in_place(batch: dict[str, Any]) -> None:
    """What a loop may do with its own tensors: none is a view, in which autograd would allow less."""
    for value in batch.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.add_(torch.ones((), dtype=value.dtype, requires_grad=True))
            value.detach_()


@pytest.mark.parametrize("executor", [PROCESS, TWO_PROCESSES], ids=["one", "two"])
@pytest.mark.parametrize("policy", ["skip", "replace"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_processes_are_those_of_threads(
    kind: str, policy: str, executor: dict[str, Any], data: Path
) -> None:
    pipeline = KINDS[kind](data)
    expected = batches(pipeline, policy)
    assert batches(pipeline, policy, **executor) == expected
    assert len(expected) == 4
