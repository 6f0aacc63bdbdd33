"""Writing one object through a connector, and bare: python -m profiles.writes [file] [s3] [--workers N] [--out DIR]

file  parallel `pwrite` and one `fdatasync`, through the page cache and past it (O_DIRECT)
s3    parts uploaded in parallel by boto3, and the writer of s3torchconnector, to a server on this machine

All write the same bytes from aligned memory, with the same number of threads, in turns.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from loaderkit.connectors.base import Connector, writes_of
from loaderkit.connectors.config import S3Args
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.s3 import S3Connector
from profiles.record import record
from profiles.stores.__main__ import rounds_of, tell
from profiles.stores.servers import ACCESS_KEY, SECRET_KEY, Seaweed

_PART = 8 << 20


def aligned_bytes(num_bytes: int) -> memoryview:
    """Random bytes that begin at a page."""
    data = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    data[:] = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    return data.data


def parallel(write: Callable[[int, memoryview], object], data: memoryview, workers: int) -> None:
    """Write all parts from some threads."""
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda start: write(start, data[start : start + _PART]), range(0, len(data), _PART)))


def timed(write: Callable[[], object], num_bytes: int, after: Callable[[], object]) -> Callable[[], float]:
    """MB/s of `write`; `after` is not timed."""

    def run() -> float:
        begin_s = time.perf_counter()
        write()
        took_s = time.perf_counter() - begin_s
        after()
        return num_bytes / took_s / 1e6

    return run


def by_connector(connector: Connector, data: memoryview, workers: int) -> None:
    """One object, from beginning to commit."""
    writer = writes_of(connector).create("a", len(data))
    parallel(writer.write, data, workers)
    writer.commit()


def measure_file(folder: Path, data: memoryview, workers: int, rounds: int) -> dict[str, Any]:
    """Into a new file in each round."""
    path = folder / "a"

    def bare(flags: int) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags)
        parallel(lambda start, part: os.pwrite(descriptor, part, start), data, workers)
        os.fdatasync(descriptor)
        os.close(descriptor)

    def contestant(write: Callable[[], object]) -> Callable[[], float]:
        def after() -> None:
            assert path.stat().st_size == len(data)
            path.unlink()
            os.sync()

        return timed(write, len(data), after)

    connector = FileConnector(folder)
    found = rounds_of(
        {
            "bare pwrite and fdatasync": contestant(lambda: bare(0)),
            "loaderkit": contestant(lambda: by_connector(connector, data, workers)),
            "bare pwrite with O_DIRECT, and fdatasync": contestant(lambda: bare(os.O_DIRECT)),
        },
        rounds,
    )
    return tell("file", "MB/s", found)


def measure_s3(folder: Path, data: memoryview, workers: int, rounds: int) -> dict[str, Any]:
    """Over the same object in each round."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client

    server = Seaweed(folder)
    try:
        boto = server.boto()
        boto.create_bucket(Bucket="data")
        client: Any = S3Client(
            "us-east-1", endpoint=server.endpoint, s3client_config=S3ClientConfig(force_path_style=True)
        )

        def bare() -> None:
            upload = boto.create_multipart_upload(Bucket="data", Key="a")["UploadId"]
            etags: dict[int, str] = {}

            def part(start: int, memory: memoryview) -> None:
                number = start // _PART + 1
                answer = boto.upload_part(
                    Bucket="data", Key="a", UploadId=upload, PartNumber=number, Body=bytes(memory)
                )
                etags[number] = answer["ETag"]

            parallel(part, data, workers)
            parts = [{"PartNumber": number, "ETag": etag} for number, etag in sorted(etags.items())]
            boto.complete_multipart_upload(Bucket="data", Key="a", UploadId=upload, MultipartUpload={"Parts": parts})

        def stream() -> None:
            with client.put_object("data", "a") as writer:
                for start in range(0, len(data), _PART):
                    writer.write(bytes(data[start : start + _PART]))

        def after() -> None:
            assert boto.head_object(Bucket="data", Key="a")["ContentLength"] == len(data)
            boto.delete_object(Bucket="data", Key="a")

        connector = S3Connector("s3://data", S3Args(endpoint=server.endpoint))
        found = rounds_of(
            {
                "boto3, parts in parallel": timed(bare, len(data), after),
                "loaderkit": timed(lambda: by_connector(connector, data, workers), len(data), after),
                "s3torchconnector, one stream": timed(stream, len(data), after),
            },
            rounds,
        )
        connector.close()
    finally:
        server.stop()
    return tell("s3", "MB/s", found)


def main() -> None:
    """Measure what is named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", default=["file", "s3"], choices=["file", "s3"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--folder", type=Path, help="where to write; default: the folder of temporary files")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY, AWS_EC2_METADATA_DISABLED="true")
    data = aligned_bytes(arguments.megabytes << 20)
    measure = {"file": measure_file, "s3": measure_s3}
    for work in arguments.works:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            found = measure[work](Path(folder), data, arguments.workers, arguments.rounds)
        record(arguments.out, f"writes-{work}", workers=arguments.workers, megabytes=arguments.megabytes, **found)


if __name__ == "__main__":
    main()
