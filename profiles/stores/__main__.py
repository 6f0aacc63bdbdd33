"""Slow stores, side by side in one run: python -m profiles.stores [object|images|cache|latency ...] [--rounds N] [--out FILE]

object   one large object: s3torchconnector's sequential reader, 8 parallel ranges of it, boto3, loaderkit
images   tar shards over loopback S3: webdataset in a DataLoader with 2 workers by presigned URLs, loaderkit
cache    the second epoch from the cache, and the same shards as local files
latency  an epoch with and without 50 ms on every request

Every work is repeated in rounds, the contestants in turns; the medians' ratio is what counts.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from PIL import Image

import loaderkit
from loaderkit.connectors.config import S3Args
from loaderkit.connectors.s3 import S3Connector
from profiles.stores.servers import Seaweed, delay, nginx, upload

_PART = 8 << 20
_BATCH = 64


def rounds_of(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What every contestant gave in every round, in turns, after one turn that does not count."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            value = run()
            if number:
                found[name].append(value)
    return found


def tell(work: str, unit: str, found: dict[str, list[float]]) -> dict[str, Any]:
    """Print the medians and every one's ratio to loaderkit's."""
    medians = {name: statistics.median(values) for name, values in found.items()}
    ours = medians["loaderkit"]
    for name, value in medians.items():
        spread = f"{min(found[name]):,.0f} to {max(found[name]):,.0f}"
        print(f"{work:8} {name:42} {value:10,.0f} {unit} ({spread}); loaderkit is {ours / value:.2f} times that")
    return {"unit": unit, "rounds": found, "medians": medians}


# ------------------------------------------------------------------------------------------------------ one object


def measure_object(server: Seaweed, folder: Path, rounds: int, num_bytes: int) -> dict[str, Any]:
    (folder / "www" / "data").mkdir(parents=True)
    data = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8).tobytes()
    (folder / "www" / "data" / "large").write_bytes(data)
    with nginx(folder / "www", folder / "nginx") as endpoint:
        where = "nginx" if endpoint else "SeaweedFS"
        if endpoint is None:
            server.boto().create_bucket(Bucket="data")
            server.boto().put_object(Bucket="data", Key="large", Body=data)
        found = rounds_of(_readers(endpoint or server.endpoint, data), rounds)
    return tell(f"object/{where}", "MB/s", found)


def _readers(endpoint: str, data: bytes) -> dict[str, Callable[[], float]]:
    import boto3
    from botocore.config import Config
    from s3torchconnector import S3ClientConfig, S3ReaderConstructor
    from s3torchconnector._s3client import S3Client

    client: Any = S3Client("us-east-1", endpoint=endpoint, s3client_config=S3ClientConfig(force_path_style=True))
    boto: Any = boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", config=Config(s3={"addressing_style": "path"})
    )
    ours, alone = (S3Connector("s3://data", S3Args(endpoint=endpoint)) for _ in range(2))
    buffer = bytearray(len(data))
    view = memoryview(buffer)

    def timed(read: Callable[[], Any]) -> Callable[[], float]:
        def run() -> float:
            buffer[::4096] = bytes(len(buffer[::4096]))
            begin_s = time.perf_counter()
            read()
            took_s = time.perf_counter() - begin_s
            assert buffer == data
            return len(data) / took_s / 1e6

        return run

    def sequential() -> None:
        reader = client.get_object("data", "large", reader_constructor=S3ReaderConstructor.sequential())
        done = 0
        while num := reader.readinto(view[done : done + (64 << 20)]):
            done += num

    def in_parts() -> None:
        info = client.head_object("data", "large")

        def part(start: int) -> None:
            constructor = S3ReaderConstructor.range_based(buffer_size=0)
            reader = client.get_object("data", "large", object_info=info, reader_constructor=constructor)
            reader.seek(start)
            reader.readinto(view[start : start + _PART])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(part, range(0, len(data), _PART)))

    def with_boto() -> None:
        body = boto.get_object(Bucket="data", Key="large")["Body"]
        done = 0
        while num := body.readinto(view[done : done + (1 << 20)]):
            done += num

    def with_one_client() -> None:
        with patch("loaderkit.connectors.s3.client._NUM_CLIENTS", 1):
            alone.read_into("large", 0, view, etag=etag)

    etag = alone.stat("large").etag
    ours.stat("large")
    return {
        "s3torchconnector, sequential reader": timed(sequential),
        "s3torchconnector, 8 parallel ranges": timed(in_parts),
        "boto3": timed(with_boto),
        "loaderkit, one client": timed(with_one_client),
        "loaderkit": timed(lambda: ours.read_into("large", 0, view, etag=etag)),
    }


# ----------------------------------------------------------------------------------------------------------- images


def make_shards(folder: Path, num_images: int, num_shards: int = 6) -> Path:
    """JPEGs of about 56 kB and classes, as WebDataset lays them out."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    pictures = []
    for _ in range(24):
        coarse = rng.integers(0, 256, (38, 50, 3), np.uint8)
        image = Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC)
        noisy = np.asarray(image, np.int16) + rng.integers(-14, 15, (375, 500, 3))
        data = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(data, "JPEG", quality=80)
        pictures.append(data.getvalue())
    for shard in range(num_shards):
        with tarfile.open(folder / f"shard-{shard:03}.tar", "w") as tar:
            for number in range(shard, num_images, num_shards):
                for name, content in ((f"{number:06}.jpg", pictures[number % 24]), (f"{number:06}.cls", b"3")):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return folder


def pipeline(url: str, **source: Any) -> dict[str, Any]:
    """The image task."""
    return {
        "source": {"kind": "tar", "url": url, "fields": {"image": "jpg", "label": "cls"}, **source},
        "order": {"shuffle": "block", "block": {"block": "8MiB", "window": 4, "lanes": 4}},
        "stages": ["read", "decode", {"random_resized_crop": {"size": 224}}, "random_horizontal_flip",
                   {"batch": {"size": _BATCH, "drop_last": True}}, {"normalize": {"mean": "imagenet", "std": "imagenet"}}],
    }  # fmt: skip


def epochs(description: dict[str, Any], num_epochs: int) -> tuple[float, dict[str, Any]]:
    """Images a second over some epochs after a first batch, and the store's counters."""
    with loaderkit.build(description) as loader:
        num, begin_s = 0, 0.0
        for _ in range(num_epochs):
            for batch in loader:
                if not begin_s:
                    begin_s = time.perf_counter()
                else:
                    num += len(batch["__key__"])
        return num / (time.perf_counter() - begin_s), loader.stats().to_dict()["store"]


def measure_images(server: Seaweed, shards: Path, rounds: int, num_epochs: int) -> dict[str, Any]:
    client: Any = server.boto()
    urls = [
        client.generate_presigned_url("get_object", Params={"Bucket": "shards", "Key": path.name}, ExpiresIn=3600)
        for path in sorted(shards.glob("*.tar"))
    ]
    found = rounds_of(
        {
            "webdataset, DataLoader, 2 workers": lambda: _webdataset(urls, num_epochs),
            "loaderkit": lambda: epochs(pipeline("s3://shards", s3={"endpoint": server.endpoint}), num_epochs)[0],
        },
        rounds,
    )
    return tell("images", "img/s", found)


def _webdataset(urls: list[str], num_epochs: int) -> float:
    import torch
    import webdataset

    from profiles.peers.contestants.pixels import by_pillow

    pipes = [f"pipe:curl -s -f '{url}'" for url in urls]
    data = webdataset.WebDataset(pipes, shardshuffle=100).shuffle(1000).to_tuple("jpg", "cls").map_tuple(by_pillow, int)
    data = data.batched(_BATCH, partial=False, collation_fn=torch.utils.data.default_collate)
    loader = torch.utils.data.DataLoader(
        data, batch_size=None, num_workers=2, persistent_workers=True, prefetch_factor=4
    )
    num, begin_s = 0, 0.0
    for _ in range(num_epochs):
        for images, _labels in loader:
            if not begin_s:
                begin_s = time.perf_counter()
            else:
                num += len(images)
    return num / (time.perf_counter() - begin_s)


def measure_cache(server: Seaweed, shards: Path, folder: Path, rounds: int, num_epochs: int) -> dict[str, Any]:
    cached = pipeline("s3://shards", s3={"endpoint": server.endpoint}, cache={"dir": str(folder / "cache")})
    rates = []

    def from_cache() -> float:
        speed, store = epochs(cached, num_epochs)
        rates.append(store["cache_hit_rate"])
        return speed

    found = rounds_of(
        {"local files": lambda: epochs(pipeline(str(shards)), num_epochs)[0], "loaderkit": from_cache}, rounds
    )
    return {**tell("cache", "img/s", found), "hit_rates": rates}


def measure_latency(server: Seaweed, rounds: int, num_epochs: int) -> dict[str, Any]:
    with delay(server.port, 0.0) as near, delay(server.port, 0.05) as far:
        found = rounds_of(
            {
                "no latency": lambda: epochs(pipeline("s3://shards", s3={"endpoint": near}), num_epochs)[0],
                "loaderkit": lambda: epochs(pipeline("s3://shards", s3={"endpoint": far}), num_epochs)[0],
            },
            rounds,
        )
    return tell("latency", "img/s", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", default=["object", "images", "cache", "latency"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.update(AWS_ACCESS_KEY_ID="testkey", AWS_SECRET_ACCESS_KEY="testsecret", AWS_EC2_METADATA_DISABLED="true")
    results: dict[str, Any] = {"num_cpus": os.cpu_count(), "arguments": vars(args) | {"out": None}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["LOADERKIT_CACHE_DIR"] = str(folder / "indexes")
        server = Seaweed(folder / "weed")
        try:
            if {"images", "cache", "latency"} & {*args.works}:
                shards = make_shards(folder / "shards", args.images)
                upload(server, shards, "shards")
            if "object" in args.works:
                results["object"] = measure_object(server, folder, args.rounds, args.megabytes * 10**6)
            if "images" in args.works:
                results["images"] = measure_images(server, shards, args.rounds, args.epochs)
            if "cache" in args.works:
                results["cache"] = measure_cache(server, shards, folder, args.rounds, args.epochs)
            if "latency" in args.works:
                results["latency"] = measure_latency(server, args.rounds, args.epochs)
        finally:
            server.stop()
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
