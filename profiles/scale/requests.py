"""Requests to a store: counted by a proxy between the real S3 connector and SeaweedFS, at the start and for an epoch."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from webdataset.writer import TarWriter

import loaderkit
from loaderkit.cli import main
from profiles.stores.servers import ACCESS_KEY, SECRET_KEY, Seaweed

from fault_proxy import FaultProxy, Request  # isort: skip - of tests/helpers, which `servers` puts on the path

SAMPLE_BYTES = 100_000
_NUM_SAMPLES = 1280
SHARDS = (4, 16)  # of 32 and 8 MB
INDEXED = f"tar, {SHARDS[-1]} shards with .idx, global"
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
BLOCK = {"block": "8MiB", "window": 16, "lanes": 8}


def cases() -> Iterator[tuple[str, dict[str, Any], dict[str, Any], int]]:
    """(what, source, order, ranks): rank 0 is run."""
    files = {"kind": "files", "url": "s3://scale/files", "include": "**/*.npy"}
    yield "files", files, {"shuffle": "global"}, 1
    for number in SHARDS:
        tar = {"kind": "tar", "url": f"s3://scale/tar-{number}", "fields": {"x": "npy"}}
        yield f"tar, {number} shards, global", tar, {"shuffle": "global"}, 1
        yield f"tar, {number} shards, none", tar, {"shuffle": "none"}, 1
        for block in ("1MiB", "8MiB", "32MiB"):
            yield (
                f"tar, {number} shards, block {block}",
                tar,
                {"shuffle": "block", "block": {**BLOCK, "block": block}},
                1,
            )
        yield f"tar, {number} shards, block 8MiB", tar, {"shuffle": "block", "block": BLOCK}, 4
    yield INDEXED, tar, {"shuffle": "global"}, 1


def measure() -> list[dict[str, Any]]:
    """A row for every case."""
    with tempfile.TemporaryDirectory() as folder, _server(Path(folder)) as (server, proxy):
        _fill(server, Path(folder) / "data")
        rows = []
        for what, source, order, ranks in cases():
            if what == INDEXED:
                with patch.dict(os.environ, {"AWS_ENDPOINT_URL": server.endpoint}):
                    assert main(["index", source["url"]]) == 0
            cache = Path(folder) / "indexes" / re.sub(r"\W", "-", f"{what}-{ranks}")
            with patch.dict(os.environ, {"LOADERKIT_CACHE_DIR": str(cache)}):
                rows.append({"what": what, "ranks": ranks, **_count(proxy, source, order, ranks)})
            print(rows[-1], flush=True)
        return rows


def _count(proxy: FaultProxy, source: dict[str, Any], order: dict[str, Any], ranks: int) -> dict[str, Any]:
    description = {
        "source": {**source, "s3": {"endpoint": proxy.endpoint}},
        "order": {"seed": 0, **order},
        "stages": ["read", "decode", {"batch": {"size": 16}}],
        "prefetch": {"concurrency": 8},
    }
    starts, found = [], {}
    for _ in range(2):  # the second time indexes are in the cache
        del proxy.requests[:]
        with loaderkit.build(description, rank=0, world_size=ranks, overrides={"order.epochs": 1}) as loader:
            starts.append(_kinds(proxy.requests))
            del proxy.requests[:]
            num = sum(len(batch["__key__"]) for batch in loader)
        found = {"num_samples": num, **_kinds(proxy.requests)}
    return {"start": starts[0], "start_again": starts[1], "epoch": found}


def _kinds(requests: Sequence[Request]) -> dict[str, int]:
    """Requests by kind, and the bytes that their ranges ask for."""
    kinds: Counter[str] = Counter()
    for request in list(requests):
        kind = "list" if "list-type" in request.path else request.method.lower()
        kinds[kind] += 1
        asked = _RANGE.match(request.headers.get("range", ""))
        if asked:
            kinds["range_bytes"] += int(asked[2]) + 1 - int(asked[1])
    return dict(kinds)


@contextmanager
def _server(folder: Path) -> Iterator[tuple[Seaweed, FaultProxy]]:
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_EC2_METADATA_DISABLED": "true"}
    with patch.dict(os.environ, keys):
        server = Seaweed(folder / "weed")
        try:
            with FaultProxy(server.port) as proxy:
                yield server, proxy
        finally:
            server.stop()


def _fill(server: Seaweed, folder: Path) -> None:
    """The same samples as files and in shards."""
    rng, client = np.random.default_rng(0), server.boto()
    client.create_bucket(Bucket="scale")
    data = []
    for _ in range(_NUM_SAMPLES):
        np.save(file := BytesIO(), rng.integers(0, 256, SAMPLE_BYTES - 128, np.uint8))
        data.append(file.getvalue())
    for number, content in enumerate(data):
        client.put_object(Bucket="scale", Key=f"files/{number:06}.npy", Body=content)
    folder.mkdir()
    for shards in SHARDS:
        for shard in range(shards):
            path = folder / "shard.tar"
            with TarWriter(str(path)) as writer:
                for number in range(shard * _NUM_SAMPLES // shards, (shard + 1) * _NUM_SAMPLES // shards):
                    writer.write({"__key__": f"{number:06}", "npy": data[number]})
            client.put_object(Bucket="scale", Key=f"tar-{shards}/shard-{shard:03}.tar", Body=path.read_bytes())
