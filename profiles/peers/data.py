"""Makes what the benchmark reads, each part once: under another name first, so that half a part is never taken for one."""

from __future__ import annotations

import io
import os
import secrets
import shutil
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from loaderkit.cli.demo.photos import demo_data
from profiles.peers.places import RECORD_BASE, ROW, TOKEN_STEP, Places, labelled

_QUALITY = 93  # gives the demo's photographs about 56 kB
_LARGE_QUALITY = 90
_LARGE_SIZE = (4000, 3000)
_SHARD_SAMPLES = 250
_SEED = 3


@dataclass(frozen=True)
class Amounts:
    """How much of everything; the tests make little."""

    photos: int = 1500
    small_samples: int = 20_000
    records: int = 1_000_000
    array_rows: int = 150_000_000 // (4 * ROW)
    arrays: int = 8
    tokens: int = 500_000_000
    large_photos: int = 48


TINY = Amounts(photos=120, small_samples=400, records=4000, array_rows=100, tokens=100_000, large_photos=4)
"""Enough to see that the harness works."""


def make(parts: Iterable[str], places: Places, amounts: Amounts, demo: Path) -> None:
    """Make the parts that are not there; `demo` is where loaderkit's demo data is or is to be made.

    Parts that a peer writes in its own format (litdata, mosaic) are made by that peer's environment, not here.
    """
    made: dict[str, tuple[Path, Callable[[Path], None]]] = {
        "photos": (places.photos, lambda target: _photos(target, demo, amounts.photos)),
        "shards": (places.shards, lambda target: _shards(target, places.photos)),
        "small-shards": (places.small_shards, lambda target: _small_shards(target, amounts.small_samples)),
        "records": (places.records.parent, lambda target: _records(target, amounts.records)),
        "npy": (places.npy, lambda target: _arrays(target, amounts, ".npy")),
        "npz": (places.npz, lambda target: _arrays(target, amounts, ".npz")),
        "tokens": (places.tokens.parent, lambda target: _tokens(target, amounts.tokens)),
        "large-photos": (places.large_photos, lambda target: _large_photos(target, demo, amounts)),
    }
    for part in parts:
        if part in made:
            once(*made[part])


def once(target: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a folder that gets its name when it is whole; nothing if it is there."""
    if target.exists():
        return
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(parents=True)
    print(f"making {target}", flush=True)
    try:
        write(temporary)
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def into_page_cache(folders: Iterable[Path]) -> None:
    """Read every file once, so that the first contestant does not read it from the disk for all."""
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                with open(path, "rb", buffering=0) as file:
                    while file.read(1 << 24):
                        pass


def _photos(target: Path, demo: Path, num_photos: int) -> None:
    source = demo_data(demo, num_photos)
    for path in sorted(source.rglob("*.jpg")):
        place = target / path.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        with Image.open(path) as image:
            image.save(place, quality=_QUALITY)


def _shards(target: Path, photos: Path) -> None:
    samples = labelled(photos)
    mixed = np.random.default_rng(_SEED).permutation(len(samples)).tolist()
    # At least two, since a reader with two workers gives each of them shards of its own.
    per_shard = min(_SHARD_SAMPLES, -(-len(samples) // 2))
    for first in range(0, len(samples), per_shard):
        with tarfile.open(target / f"train-{first // per_shard:03}.tar", "w") as tar:
            for place in mixed[first : first + per_shard]:
                path, label = samples[place]
                _add(tar, f"{path.stem}.jpg", path.read_bytes())
                _add(tar, f"{path.stem}.cls", str(label).encode())


def _small_shards(target: Path, num_samples: int) -> None:
    rng = np.random.default_rng(_SEED)
    per_shard = -(-num_samples // 4)
    for first in range(0, num_samples, per_shard):
        with tarfile.open(target / f"text-{first // per_shard}.tar", "w") as tar:
            for number in range(first, min(first + per_shard, num_samples)):
                letters = rng.integers(97, 123, int(rng.integers(900, 1100)), dtype=np.uint8)
                _add(tar, f"{number:07}.txt", letters.tobytes())
                _add(tar, f"{number:07}.cls", str(number % 10).encode())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _records(target: Path, num_records: int) -> None:
    number = np.arange(num_records)
    columns = [number, number % RECORD_BASE, number // RECORD_BASE, np.full(num_records, 7)]
    np.save(target / "records.npy", np.stack(columns, axis=1).astype(np.float32))


def _arrays(target: Path, amounts: Amounts, suffix: str) -> None:
    rows = np.arange(amounts.array_rows, dtype=np.float32)[:, None] / np.float32(2**20)
    for number in range(amounts.arrays):
        array = np.broadcast_to(rows + np.float32(number), (amounts.array_rows, ROW)).copy()
        if suffix == ".npy":
            np.save(target / f"array-{number}.npy", array)
        else:
            np.savez(target / f"array-{number}.npz", data=array)


def _tokens(target: Path, num_tokens: int) -> None:
    step = 1 << 24
    with open(target / "tokens.bin", "wb") as file:
        for first in range(0, num_tokens, step):
            places = np.arange(first, min(first + step, num_tokens), dtype=np.uint64)
            file.write((places * np.uint64(TOKEN_STEP)).astype(np.uint16).tobytes())


def _large_photos(target: Path, demo: Path, amounts: Amounts) -> None:
    """Pieces of the demo's photographs, enlarged; 4 of each class and more."""
    source = demo_data(demo, amounts.photos)
    classes = sorted(source.iterdir())
    for number in range(amounts.large_photos):
        folder = classes[number % len(classes)]
        path = sorted(folder.glob("*.jpg"))[number // len(classes)]
        (target / folder.name).mkdir(exist_ok=True)
        with Image.open(path) as image:
            large = image.resize(_LARGE_SIZE, Image.Resampling.BICUBIC)
        large.save(target / folder.name / path.name, quality=_LARGE_QUALITY)
