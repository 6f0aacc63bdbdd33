"""Draws sources to pack: files, archives and data sets with odd names, kinds of values, bad and empty samples."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from conftest import make_photo
from PIL import Image

from loaderkit import Pipeline

LETTERS = [
    "a", "B", "7", "é", "日本", " ", ".", "..", "_", "-", "'", '"', "#", "%20", "[", "{x,y}", "*", "\\", ":", "\n", "\udce9",
]  # fmt: skip
FIELDS = [
    "label", "image", "x", "X", "a b", "a.b", "ünï", "x;y", "cls", "jpg", "txt", "npy", "bin", "json", "-", "a/b", "mask", "1",
]  # fmt: skip


def drawn_name(rng: random.Random, *, num_folders: int = 2) -> str:
    """A path of one to three parts, none of them hidden or ".."."""
    parts = ["".join(rng.choices(LETTERS, k=rng.randint(1, 5))) for _ in range(1 + rng.randint(0, num_folders))]
    return "/".join(f"n{part}" if part.startswith(".") else part for part in parts)


def picture(rng: random.Random, extension: str, number: int) -> bytes:
    """A photograph, or a small picture of that format."""
    if extension in ("jpg", "JPEG"):
        return make_photo(number)
    file = io.BytesIO()
    size = rng.randint(1, 20), rng.randint(1, 20)
    mode = rng.choice(["RGB", "L", "RGBA", "P"])
    Image.effect_noise(size, 50).convert(mode).save(
        file, {"PNG": "PNG", "png": "PNG", "bmp": "BMP", "gif": "GIF"}[extension]
    )
    return file.getvalue()


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Cut, or empty."""
    return data[: rng.choice([0, len(data) // 2])]


# Each returns a pipeline without stages, and the fields whose arrays differ in shape. The first sample is a good one.


def drawn_files(folder: Path, rng: random.Random, num: int, *, share_bad: float) -> tuple[Pipeline, list[str]]:
    """Pictures of several formats."""
    num_written, parents = 0, set[Path]()
    while num_written < num:
        extension = rng.choice(["jpg", "jpg", "png", "PNG", "JPEG"])
        path = folder / rng.choice(["k1", "k 2", "k.3"]) / f"{drawn_name(rng)}.{extension}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb") as file:
                data = picture(rng, extension, num_written)
                file.write(damaged(rng, data) if num_written and rng.random() < share_bad else data)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            continue
        num_written += 1
        parents.add(path.parent)
    is_clear = len({parent.name for parent in parents}) == len(parents)  # else `parent` is refused
    label: Literal["parent", "top", "none"] = "none" if rng.random() < 0.5 else "parent" if is_clear else "top"
    return Pipeline.files(str(folder), label=label), ["image"]


MEMBERS: dict[str, Callable[[random.Random, int], bytes]] = {
    "txt": lambda rng, number: "".join(rng.choices(LETTERS[:5], k=rng.randint(0, 9))).encode(),
    "json": lambda rng, number: json.dumps({"n": number, "tags": rng.choices(LETTERS[:9], k=2)}).encode(),
    "cls": lambda rng, number: str(rng.randint(0, 9)).encode(),
    "npy": lambda rng, number: _npy(rng),
    "png": lambda rng, number: picture(rng, "png", number),
    "seg.png": lambda rng, number: picture(rng, "png", number),
    "caption.txt": lambda rng, number: b"",
    "bin": lambda rng, number: rng.randbytes(rng.randint(0, 600)),
}


def _npy(rng: random.Random) -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(rng.randint(0, 5), dtype=">i8"))
    return file.getvalue()


def drawn_archives(folder: Path, rng: random.Random, num: int, *, share_bad: float) -> tuple[Pipeline, list[str]]:
    """Samples of the same fields, some of which lack one; keys are unique in each archive."""
    folder.mkdir(parents=True)
    extensions = rng.sample(sorted(MEMBERS), rng.randint(1, 5))
    if "png" in extensions and "seg.png" in extensions:
        extensions.remove("png")
    keys: list[str] = []
    while len(keys) < num:
        key = drawn_name(rng).replace(".", "")
        if key not in keys and not key.endswith("/") and key.rpartition("/")[2]:
            keys.append(key)
    for number in range(2):
        with tarfile.open(folder / f"{number}.tar", "w", errors="surrogateescape") as tar:
            for key in keys[number::2] + (["same"] if num > 4 else []):
                lacks = rng.choice(extensions) if key != keys[0] and rng.random() < share_bad else None
                for extension in extensions:
                    if extension != lacks:
                        data = MEMBERS[extension](rng, number)
                        info = tarfile.TarInfo(f"{key}.{extension}")
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))
    fields = dict(zip(rng.sample(FIELDS, len(extensions)), extensions, strict=True))
    return Pipeline.tar(str(folder), fields=fields), [name for name, extension in fields.items() if extension in RAGGED]


VALUES: dict[str, Callable[[random.Random, int], Any]] = {
    "int": lambda rng, number: rng.randint(-(2**62), 2**62),
    "float": lambda rng, number: rng.choice([rng.random(), float("inf"), -0.0]),
    "bool": lambda rng, number: rng.random() < 0.5,
    "str": lambda rng, number: "".join(rng.choices(LETTERS[:-2], k=rng.randint(0, 5))),
    "bytes": lambda rng, number: rng.randbytes(rng.randint(0, 40)),
    "none": lambda rng, number: None,
    "list": lambda rng, number: [rng.randint(0, 9) for _ in range(rng.randint(0, 3))] + ["é", None, {"a": 1.5}],
    "big-endian": lambda rng, number: np.arange(rng.randint(0, 6), dtype=">f4"),
    "complex": lambda rng, number: np.arange(rng.randint(0, 6), dtype="c8"),
    "mask": lambda rng, number: np.arange(rng.randint(0, 6)) % 2 == 0,
    "tensor": lambda rng, number: torch.arange(rng.randint(0, 6)).reshape(1, -1).T,
    "scalar": lambda rng, number: np.float32(rng.random()),
}
RAGGED = {"big-endian", "complex", "mask", "tensor", "npy", "png", "seg.png"}


def drawn_items(rng: random.Random, num: int, *, share_bad: float) -> tuple[Pipeline, list[str]]:
    """A data set of dicts, some of which lack a field."""
    kinds = dict(zip(rng.sample(FIELDS, 5), rng.choices(sorted(VALUES), k=5), strict=True))
    items = [{name: VALUES[kind](rng, number) for name, kind in kinds.items()} for number in range(num)]
    for item in items[1:]:
        if rng.random() < share_bad:
            del item[rng.choice(sorted(item))]
    return Pipeline.dataset(items), [name for name, kind in kinds.items() if kind in RAGGED]
