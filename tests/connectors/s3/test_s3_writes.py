"""Multipart uploads, by a proxy in front of a real server: whole or not there, whatever happens to a request."""

from __future__ import annotations

import logging
import os
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from fault_proxy import Fault, FaultProxy, Request
from seaweed import Seaweed

from loaderkit.connectors.base import Writes, writes_of
from loaderkit.connectors.config import RetryArgs, S3Args
from loaderkit.connectors.s3 import S3Connector
from loaderkit.connectors.writing import put_in_parts
from loaderkit.errors import (
    AccessDeniedError,
    ConnectorError,
    ExpiredCredentialsError,
    MissingExtraError,
    ObjectNotFoundError,
    ThrottledError,
    UnreachableError,
)

pytestmark = pytest.mark.usefixtures("s3_keys")
PART = 8 << 20
BUCKET = "uploads"
DATA = np.random.default_rng(7).integers(0, 256, 2 * PART + 100_003, np.uint8).tobytes()
ASKS: dict[str, Callable[[Request], bool]] = {
    "begin": lambda request: request.method == "POST" and "uploads" in request.path,
    "part": lambda request: request.method == "PUT" and "partNumber" in request.path,
    "complete": lambda request: request.method == "POST" and "uploadId" in request.path,
    "abort": lambda request: request.method == "DELETE" and "uploadId" in request.path,
    "put": lambda request: request.method == "PUT" and "partNumber" not in request.path,
}


@pytest.fixture
def bucket(seaweed: Seaweed) -> Iterator[Any]:
    """A boto3 client; the bucket is empty."""
    client = seaweed.boto()
    client.create_bucket(Bucket=BUCKET)
    yield client
    for upload in client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []):
        client.abort_multipart_upload(Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"])
    for found in client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        client.delete_object(Bucket=BUCKET, Key=found["Key"])
    client.delete_bucket(Bucket=BUCKET)


@pytest.fixture
def connect(proxy: FaultProxy, bucket: Any) -> Iterator[Callable[..., S3Connector]]:
    made = []

    def connect(**retry: Any) -> S3Connector:
        args = RetryArgs.model_validate({"total": 60.0, "timeout": 20.0, **retry})
        made.append(S3Connector(f"s3://{BUCKET}/runs", S3Args(endpoint=proxy.endpoint, connections=4), args))
        return made[-1]

    yield connect
    for connector in made:
        connector.close()


def first(proxy: FaultProxy, num: int, what: str, fault: Fault) -> list[Request]:
    """What happens to the first `num` requests of a kind; those requests."""
    met: list[Request] = []
    lock = threading.Lock()

    def rule(request: Request) -> Fault | None:
        with lock:
            if len(met) == num or not ASKS[what](request):
                return None
            met.append(request)
            return fault

    proxy.rule = rule
    return met


def upload(writes: Writes, key: str, data: bytes = DATA) -> None:
    """Write an object's parts from three threads, and commit it."""
    writer = writes.create(key, len(data))
    view = memoryview(data)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda start: writer.write(start, view[start : start + PART]), range(0, len(data), PART)))
    info = writer.commit()
    assert (info.key, info.size) == (key, len(data))


FAULTS = {
    "503": Fault(answer=(503, "SlowDown")),
    "500": Fault(answer=(500, "InternalError")),
    "200 with an error document": Fault(answer=(200, "InternalError")),
    "damaged on the way": Fault(answer=(400, "BadDigest")),
    "reset": Fault(reset=True),
    "done, and the answer is lost": Fault(lost=True),
    "no answer": Fault(hang=True),
}


@pytest.mark.matrix(9)
@pytest.mark.parametrize("what", ["begin", "part", "complete", "put"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_request_that_fails_is_made_again(
    proxy: FaultProxy, connect: Callable[..., S3Connector], bucket: Any, what: str, fault: str
) -> None:
    connector = connect(**({"timeout": 0.5} if fault == "no answer" else {}))
    writes = writes_of(connector)
    met = first(proxy, 2, what, FAULTS[fault])
    if what == "put":
        writes.put("a", DATA[:1000])
    else:
        upload(writes, "a")
    content = bucket.get_object(Bucket=BUCKET, Key="runs/a")["Body"].read()
    assert content == (DATA[:1000] if what == "put" else DATA)
    num_failed = 1 if (fault, what) == ("done, and the answer is lost", "complete") else 2
    assert len(met) == 2
    assert connector.counters()["num_retries"] >= num_failed
    assert connector.counters()["written_bytes"] == len(content)


def test_a_store_that_stays_away(
    proxy: FaultProxy, connect: Callable[..., S3Connector], bucket: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that names object and cause; the upload that could not be aborted is invisible, and goes with `clear`."""
    connector = connect(total=0.3)
    writes = writes_of(connector)
    writer = writes.create("d/a", len(DATA))
    writer.write(PART, memoryview(DATA)[PART : 2 * PART])
    for fault, kind in ((Fault(answer=(503, "SlowDown")), ThrottledError), (Fault(reset=True), UnreachableError)):
        proxy.rule = lambda request, fault=fault: fault  # type: ignore[misc]
        with pytest.raises(kind, match=f"s3://{BUCKET}/runs/d/a"):
            writer.write(0, memoryview(DATA)[:PART])
    with caplog.at_level(logging.WARNING):
        writer.abort()
    assert "could not be aborted" in caplog.text
    proxy.rule = lambda request: None
    assert list(connector.list("")) == []
    uploads = bucket.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    assert [found["Key"] for found in uploads] == ["runs/d/a"]
    other = writes.create("e/a", len(DATA))
    writes.clear("d/")
    uploads = bucket.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    assert [found["Key"] for found in uploads] == ["runs/e/a"]
    writes.clear("")
    assert "Uploads" not in bucket.list_multipart_uploads(Bucket=BUCKET)
    with pytest.raises(ConnectorError, match=f"s3://{BUCKET}/runs/e/a"):
        other.write(0, memoryview(DATA)[:PART])
    other.abort()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_an_upload_that_somebody_aborted_is_not_taken_for_done(
    connect: Callable[..., S3Connector], bucket: Any, is_replaced: bool
) -> None:
    """Neither where nothing has its key nor where another object of that size has."""
    writes = writes_of(connect())
    if is_replaced:
        upload(writes, "a", DATA[::-1])
    writer = writes.create("a", PART + 5)
    writer.write(0, memoryview(DATA)[:PART])
    writer.write(PART, memoryview(DATA)[:5])
    writes.clear("")
    with pytest.raises(ConnectorError, match=r"runs/a.*(write it again|no such object)"):
        writer.commit()
    writer.abort()


def test_expired_credentials(
    proxy: FaultProxy, connect: Callable[..., S3Connector], bucket: Any, write_s3_keys: Callable[[str], None]
) -> None:
    """In the middle of an upload: said at once, with what to do; after newer ones are written it goes on."""
    write_s3_keys("")
    writer = writes_of(connect()).create("a", len(DATA))
    writer.write(0, memoryview(DATA)[:PART])
    proxy.rule = lambda request: Fault(answer=(403, "ExpiredToken"))
    before = len(proxy.requests)
    with pytest.raises(ExpiredCredentialsError, match="renew"):
        writer.write(PART, memoryview(DATA)[PART : 2 * PART])
    assert len(proxy.requests) == before + 1

    def renew(request: Request) -> Fault | None:
        if is_renewed:
            return None
        write_s3_keys("# renewed\n")
        is_renewed.append(True)
        return Fault(answer=(403, "ExpiredToken"))

    is_renewed: list[bool] = []
    proxy.rule = renew
    writer.write(PART, memoryview(DATA)[PART : 2 * PART])
    writer.write(2 * PART, memoryview(DATA)[2 * PART :])
    writer.commit()
    assert bucket.get_object(Bucket=BUCKET, Key="runs/a")["Body"].read() == DATA


def test_no_credentials_and_wrong_ones(
    connect: Callable[..., S3Connector], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    with pytest.raises(AccessDeniedError, match="does not accept the credentials") as caught:
        writes_of(connect()).create("a", 1)
    assert caught.value.__cause__ is None
    assert "not-the-secret" not in caplog.text
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(AccessDeniedError, match="there are no credentials"):
        writes_of(connect()).create("a", 1)


def test_no_bucket_and_no_server(proxy: FaultProxy) -> None:
    nowhere = S3Connector("s3://nowhere/x", S3Args(endpoint=proxy.endpoint))
    proxy.rule = lambda request: Fault(answer=(404, "NoSuchBucket"))  # this server would make it
    with pytest.raises(ObjectNotFoundError, match="no such bucket"):
        writes_of(nowhere).create("a", 1)
    nowhere.close()
    proxy.go_down()
    away = S3Connector("s3://uploads/x", S3Args(endpoint=proxy.endpoint), RetryArgs(total=0.2))
    with pytest.raises(UnreachableError, match=r"s3://uploads/x/a: no connection with http://127.*tried"):
        writes_of(away).put("a", b"1")
    away.close()


def test_without_botocore(connect: Callable[..., S3Connector], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'loaderkit\[s3\]'"):
        writes_of(connect()).put("a", b"1")


def test_a_worker_holds_one_part(seaweed: Seaweed, bucket: Any) -> None:
    connector = S3Connector(f"s3://{BUCKET}/runs", S3Args(endpoint=seaweed.endpoint))
    writes = writes_of(connector)
    put_in_parts(writes, "first", b"1")  # botocore's own memory
    writer, view = writes.create("a", len(DATA)), memoryview(DATA)
    tracemalloc.start()
    try:
        for start in range(0, len(DATA), PART):
            writer.write(start, view[start : start + PART])
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    writer.commit()
    connector.close()
    assert PART <= peak_bytes < PART + (1 << 20)


@pytest.mark.parametrize("size", [0, 1, PART, 80_000 * 2**20, 80_000 * 2**20 + 1, 10**12, 5 * 2**40])
def test_ten_thousand_parts_hold_every_object(size: int) -> None:
    writes = writes_of(S3Connector("s3://anywhere"))
    part_bytes = writes.part_bytes_of(size)
    assert part_bytes * 10_000 >= size
    assert part_bytes % 2**20 == 0
    assert PART <= part_bytes <= max(PART, size / 10_000 + 2**20)


def test_an_object_that_no_bucket_takes() -> None:
    with pytest.raises(ConnectorError, match="at most 5 TiB"):
        writes_of(S3Connector("s3://anywhere")).create("a", 5 * 2**40 + 1)


def test_a_forked_child_writes_too(connect: Callable[..., S3Connector], bucket: Any) -> None:
    writes = writes_of(connect())
    writes.put("a", b"1")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            put_in_parts(writes, "b", b"2")
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert bucket.get_object(Bucket=BUCKET, Key="runs/b")["Body"].read() == b"2"
