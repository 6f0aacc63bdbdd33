"""What tests of slow stores share: a bucket with the photographs as files and as shards, and the bytes of an epoch."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from seaweed import Seaweed

import loaderkit


def upload(server: Seaweed, folder: Path, bucket: str, prefix: str = "") -> None:
    """Put all files of a folder into a bucket, each in one part, so that etags are MD5 digests."""
    client = server.boto()
    if bucket not in [found["Name"] for found in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=bucket)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            client.put_object(Bucket=bucket, Key=prefix + path.relative_to(folder).as_posix(), Body=path.read_bytes())


def digest(batch: dict[str, Any]) -> str:
    """Of all that a batch holds."""
    found = hashlib.sha256()
    for name, value in sorted(batch.items()):
        found.update(name.encode())
        found.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    return found.hexdigest()


def epoch_of(
    source: dict[str, Any], order: dict[str, Any] | None = None, **prefetch: Any
) -> tuple[list[str], dict[str, Any]]:
    """The digests of an epoch's batches, and the store's counters."""
    pipeline = {
        "source": source,
        "order": order or {"shuffle": "global", "seed": 3},
        "stages": [
            "read",
            "decode",
            {"random_resized_crop": {"size": 32}},
            "random_horizontal_flip",
            {"batch": {"size": 8}},
            "normalize",
        ],
        "prefetch": {"concurrency": 2, **prefetch},
    }
    with loaderkit.build(pipeline) as loader:
        found = [digest(batch) for batch in loader]
        return found, loader.stats().to_dict()["store"]
