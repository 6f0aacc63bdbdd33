"""A data set of many kinds of values, pipelines to pack, and readers of shards that are not loaderkit's."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from loaderkit.pipeline.config.builder import to_config
from loaderkit.shards.planning import Options, plan_shards
from loaderkit.shards.run import PackResult, Workers, pack_shards


class Things:
    """Sample i: a value of every kind that shards can hold, drawn from `seed`."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng([self.seed, index])
        shape = tuple(rng.integers(1, 5, int(rng.integers(0, 4))))
        return {
            "number": int(rng.integers(-(2**62), 2**62)),
            "label": int(rng.integers(10)),
            "Ratio": float(rng.normal()),
            "flag": bool(rng.integers(2)),
            "text": "".join(map(chr, rng.integers(32, 0x3000, int(rng.integers(0, 20))))) + "\r\n",
            "bytes": rng.bytes(int(rng.integers(0, 40))),
            "nothing": None,
            "meta": {"tags": ["a", int(rng.integers(5)), 0.5], "deep": {"": None}},
            "array": rng.normal(size=shape).astype(rng.choice(["f4", "f8", ">f4"])),
            "tensor x/y": torch.from_numpy(rng.integers(0, 9, (2, 3), np.int32)).T,
            "mask of it": np.asfortranarray(rng.integers(0, 2, (3, 4)).astype(bool)),
        }


def refuse_some(sample: dict[str, Any], every: int) -> None:
    """Fail for every so-manieth sample by its label."""
    if int(sample["__key__"].rpartition("/")[2].partition(".")[0]) % every == every - 1:
        raise ValueError("no such luck")


def keep_most(sample: dict[str, Any]) -> bool:
    return int(sample["__key__"].rpartition("/")[2].partition(".")[0]) % 5 != 2


def jittered(sample: dict[str, Any], rng: np.random.Generator) -> None:
    sample["shift"] = rng.random()


def signal_at(sample: dict[str, Any], path: str, at: int, name: str) -> None:
    """Send this process a signal at the `at`-th call of all processes."""
    with open(path, "ab") as file:
        file.write(b".")
        file.flush()
        if os.fstat(file.fileno()).st_size == at:
            os.kill(os.getpid(), signal.Signals[name])


def packed(pipeline: Any, out: Path | str, workers: Workers | None = None, **options: Any) -> PackResult:
    """Pack a pipeline, given as whatever describes one, in this process."""
    plan = plan_shards(to_config(pipeline), Options(str(out), **options))
    try:
        return pack_shards(plan, workers or Workers(1), lambda progress: None)
    finally:
        plan.job.plan.close()


def files_in(folder: Path) -> dict[str, bytes]:
    """The content of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def members_in(folder: Path) -> dict[str, bytes]:
    """Members by name, of all archives, as tarfile reads them; no name is there twice."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path, errors="surrogateescape") as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                assert member.name not in found
                found[member.name] = file.read()
    return found


def pixels_of(data: bytes) -> np.ndarray[Any, Any]:
    """As Pillow reads them: uint8 [H, W, 3]."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


READERS: dict[str, Callable[[bytes], Any]] = {
    "cls": int,
    "json": json.loads,
    "txt": lambda data: data.decode(),
    "bin": bytes,
    "npy": lambda data: np.load(io.BytesIO(data)),
}


def write_photos_with_odd_names(folder: Path, photo: Callable[[int], bytes], rng: random.Random) -> dict[str, bytes]:
    """Photographs below nested folders, with names that a tar of samples cannot hold as they are; their bytes by key."""
    names = [
        "a/b/c/one.jpg", "a/b/two.jpeg", "Größe/日本 語.jpg", "a.b/x.y.jpg", "a.b/x_y.jpg", "a.b/x.y.jpeg", "__meta__/z.jpg",
        "plain.jpg", f"{'long' * 40}/{'n' * 120}.jpg", "a b/c\td.jpg", "a/\udce9.jpg",
    ]  # fmt: skip
    rng.shuffle(names)
    written = {}
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo(number))
        written[name] = path.read_bytes()
    return written


def refuse_once(sample: dict[str, Any], path: str, at: int) -> None:
    """Fail at the `at`-th call of all processes."""
    with open(path, "ab") as file:
        file.write(b".")
        file.flush()
        if os.fstat(file.fileno()).st_size == at:
            raise ValueError("no such luck")


def hundred() -> list[dict[str, int]]:
    return [{"x": number} for number in range(100)]


def die_behind(sample: dict[str, Any], position: int, path: str) -> None:
    """Kill the worker of Ray that meets such a sample, while there is a file."""
    is_rays = b"ray::" in Path("/proc/self/cmdline").read_bytes()
    if sample["x"] >= position and os.path.exists(path) and is_rays:
        os.kill(os.getpid(), signal.SIGKILL)


def need_variable(sample: dict[str, Any], name: str, value: str) -> None:
    """Fail unless a variable of the environment is as it should be."""
    assert os.environ.get(name) == value, name


def interrupt_at(sample: dict[str, Any], path: str, at: int, name: str, parent: bool) -> None:
    """Send this process, or its parent, a signal at the `at`-th call of all processes."""
    with open(path, "ab") as file:
        file.write(b".")
        file.flush()
        if os.fstat(file.fileno()).st_size == at:
            os.kill(os.getppid() if parent else os.getpid(), signal.Signals[name])
