"""What a bucket answers, as errors of loaderkit: which one, for what, and what to do; never a secret."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import Fault, FaultProxy, Request, error_document
from s3_sources import is_read
from seaweed import Seaweed
from waiting import join_threads

from loaderkit.connectors.base import writes_of
from loaderkit.connectors.config import RetryArgs, S3Args
from loaderkit.connectors.s3 import S3Connector
from loaderkit.connectors.writing import put_in_parts
from loaderkit.errors import (
    AccessDeniedError,
    ConnectorError,
    ExpiredCredentialsError,
    RequestTimeoutError,
    TemporaryError,
    ThrottledError,
    UnreachableError,
)

pytestmark = pytest.mark.usefixtures("s3_keys")


class TestErrors:
    """One error, with bucket, key and what to do; never a secret."""

    def connector(self, proxy: FaultProxy, **retry: Any) -> S3Connector:
        args = RetryArgs.model_validate({"total": 3.0, "timeout": 1.0, **retry})
        return S3Connector("s3://faults/photos", S3Args(endpoint=proxy.endpoint, connections=4), args)

    def error(self, proxy: FaultProxy, fault: Fault, **retry: Any) -> ConnectorError:
        connector = self.connector(proxy, **retry)
        etag = connector.stat("ant/000.jpg").etag
        self.asked: list[Request] = []
        proxy.rule = lambda request: self.asked.append(request) or fault  # type: ignore[func-returns-value]
        with pytest.raises(ConnectorError) as caught:
            connector.read_into("ant/000.jpg", 0, memoryview(bytearray(100)), etag=etag)
        connector.close()
        assert "s3://faults/photos/ant/000.jpg" in str(caught.value)
        assert "SESSION-TOKEN" not in f"{caught.value!r}{caught.value.__cause__!r}"
        return caught.value

    def test_expired_credentials_are_known_soon(self, proxy: FaultProxy) -> None:
        error = self.error(proxy, Fault(answer=(400, "ExpiredToken")), total=60.0, timeout=9.0)
        assert isinstance(error, ExpiredCredentialsError)
        assert "renew" in str(error)
        assert len(self.asked) <= 8  # the client would ask for half a minute

    @pytest.mark.matrix(1)
    @pytest.mark.parametrize("are_valid", [True, False])
    def test_newer_credentials_are_taken(
        self, proxy: FaultProxy, write_s3_keys: Callable[[str], None], photos: Path, are_valid: bool
    ) -> None:
        """By all requests that were begun with older ones, also if they are told long after others."""
        write_s3_keys("aws_session_token = old\n")
        has_come, is_renewed = threading.Event(), threading.Event()

        def rule(request: Request) -> Fault | None:
            if request.headers.get("x-amz-security-token") != "old":
                return None if are_valid else Fault(answer=(400, "ExpiredToken"))
            if "000" in request.path:
                has_come.set()
                is_renewed.wait(60.0)
            elif not is_renewed.is_set():
                write_s3_keys("" if are_valid else "aws_session_token = older\n")
            return Fault(answer=(400, "ExpiredToken"))

        proxy.rule = rule
        connector = self.connector(proxy, total=0.5, timeout=60.0)
        found: list[bytes | ConnectorError] = []

        def read(key: str) -> None:
            buffer = bytearray(100)
            try:
                connector.read_into(key, 0, memoryview(buffer))
                found.append(bytes(buffer))
            except ConnectorError as error:
                found.append(error)

        early = threading.Thread(target=read, args=("ant/000.jpg",))
        early.start()
        assert has_come.wait(60.0)
        read("bee/001.jpg")
        is_renewed.set()
        early.join()
        connector.close()
        if are_valid:
            assert found == [(photos / key).read_bytes()[:100] for key in ("bee/001.jpg", "ant/000.jpg")]
        else:
            assert all(isinstance(error, ExpiredCredentialsError) for error in found), found
        tokens = [request.headers.get("x-amz-security-token") for request in proxy.requests]
        assert tokens[-1] == (None if are_valid else "older")

    def test_a_file_dated_in_the_future_is_newer_once(
        self, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        credentials = tmp_path / "credentials"
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
        credentials.write_text("[default]\n")
        os.utime(credentials, (2e9, 2e9))
        connector = self.connector(proxy, timeout=60.0)
        proxy.rule = lambda request: Fault(answer=(400, "ExpiredToken"))
        with pytest.raises(ExpiredCredentialsError):
            connector.read_into("ant/000.jpg", 0, memoryview(bytearray(100)))
        before = len(proxy.requests)
        os.replace(shutil.copy2(credentials, tmp_path / "moved"), credentials)  # written before the client was made
        with pytest.raises(ExpiredCredentialsError):
            connector.read_into("ant/000.jpg", 0, memoryview(bytearray(100)))
        connector.close()
        assert before < 10
        assert before < len(proxy.requests) - before < 20

    @pytest.mark.parametrize("code", ["AccessDenied", "InvalidAccessKeyId", "RequestTimeTooSkewed"])
    def test_denied(self, proxy: FaultProxy, code: str) -> None:
        assert isinstance(self.error(proxy, Fault(answer=(403, code)), timeout=9.0), AccessDeniedError)

    def test_throttled_for_too_long(self, proxy: FaultProxy) -> None:
        error = self.error(proxy, Fault(answer=(503, "SlowDown")), timeout=9.0)
        assert isinstance(error, ThrottledError)
        assert "tried" in str(error)

    @pytest.mark.matrix(1)
    @pytest.mark.parametrize("fault", [Fault(keep_bytes=10), Fault(reset=True)])
    def test_broken_off_for_too_long(self, proxy: FaultProxy, fault: Fault) -> None:
        assert isinstance(self.error(proxy, fault, timeout=9.0), TemporaryError)

    @pytest.mark.matrix(1)
    @pytest.mark.parametrize("fault", [Fault(hang=True), Fault(drip=True)])
    def test_hanging_for_too_long(self, proxy: FaultProxy, fault: Fault) -> None:
        error = self.error(proxy, fault)
        assert isinstance(error, RequestTimeoutError)
        assert "for 1 s: it is overloaded" in str(error)

    def test_a_server_that_is_down(self, proxy: FaultProxy) -> None:
        connector = self.connector(proxy, timeout=9.0)
        proxy.go_down()
        with pytest.raises(UnreachableError, match=r"s3://faults/photos/x: no connection with http://127.*tried"):
            connector.read_into("x", 0, memoryview(bytearray(1)))
        connector.close()
        proxy.come_up()

    def test_what_came_too_late_is_not_written(self, proxy: FaultProxy) -> None:
        release = threading.Event()

        def rule(request: Request) -> Fault | None:
            if is_read(request):
                release.wait(5.0)
            return None

        connector = self.connector(proxy, total=0.1, timeout=0.2)
        proxy.rule = rule
        buffer = bytearray(100)
        with pytest.raises(RequestTimeoutError):
            connector.read_into("ant/000.jpg", 0, memoryview(buffer))
        release.set()
        connector.close()
        join_threads("loaderkit-s3")
        assert buffer == bytearray(100)

    def test_a_listing_goes_on_where_it_failed(
        self, proxy: FaultProxy, seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("loaderkit.connectors.s3.client._PAGE", 100)
        client = seaweed.boto()
        client.create_bucket(Bucket="pages")
        names = [f"{number:04}" for number in range(110)]
        for name in names:
            client.put_object(Bucket="pages", Key=name, Body=b"x")
        for fault in (Fault(answer=(500, "InternalError")), Fault(hang=True), Fault(keep_bytes=1000)):
            failed: list[Request] = []

            def rule(request: Request, fault: Fault = fault, failed: list[Request] = failed) -> Fault | None:
                if "continuation-token" in request.path and len(failed) < 2:
                    failed.append(request)
                    return fault
                return None

            connector = S3Connector("s3://pages", S3Args(endpoint=proxy.endpoint), RetryArgs(total=30.0, timeout=2.0))
            proxy.rule = rule
            assert [info.key for info in connector.list("")] == names
            assert failed
            connector.close()


_CODES = ("SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout")


class TestErrorDocuments:
    """An answer with status 200 that is an error document is tried again; an object that looks like one is an object."""

    def connector(self, proxy: FaultProxy, **retry: Any) -> S3Connector:
        args = RetryArgs.model_validate({"total": 120.0, "timeout": 60.0, **retry})
        return S3Connector("s3://documents", S3Args(endpoint=proxy.endpoint, connections=4), args)

    def first(self, proxy: FaultProxy, num: int, code: str, is_meant: Callable[[Request], bool]) -> list[Request]:
        """Answer the first `num` requests that are meant with a document; those requests."""
        met: list[Request] = []

        def rule(request: Request) -> Fault | None:
            if len(met) == num or not is_meant(request):
                return None
            met.append(request)
            return Fault(answer=(200, code))

        proxy.rule = rule
        return met

    def test_reads(self, proxy: FaultProxy, rng: random.Random) -> None:
        """Of objects that are such documents themselves, and of ranges as long as one, shorter and longer."""
        code = rng.choice(_CODES)
        document = error_document(code)
        size = len(document)
        objects = {"document": document, "documents": document * 3, "bytes": rng.randbytes(4 * size)}
        connector = self.connector(proxy)
        for key, data in objects.items():
            writes_of(connector).put(key, data)
            lengths = [size, rng.randrange(1, size), min(len(data), rng.randrange(size + 1, 3 * size))]
            for start, length in [(rng.randint(0, len(data) - length), length) for length in lengths] + [
                (0, len(data))
            ]:
                for etag in (None, connector.stat(key).etag):
                    met = self.first(proxy, rng.choice((0, 1, 2)), code, is_read)
                    before = connector.counters()["num_retries"]
                    buffer = bytearray(length)
                    connector.read_into(key, start, memoryview(buffer), etag=etag)
                    assert buffer == data[start : start + length]
                    assert connector.counters()["num_retries"] - before == len(met)
        connector.close()

    @pytest.mark.parametrize("what", ["read", "head", "list", "begin", "part", "complete", "delete"])
    def test_what_else_is_asked(self, proxy: FaultProxy, seaweed: Seaweed, what: str, rng: random.Random) -> None:
        code = rng.choice(_CODES)
        connector = self.connector(proxy)
        writes_of(connector).put("old", b"old")
        asks: dict[str, Callable[[Request], bool]] = {
            "read": is_read,
            "head": lambda request: request.method == "HEAD",
            "list": lambda request: "list-type" in request.path,
            "begin": lambda request: request.method == "POST" and "uploads" in request.path,
            "part": lambda request: request.method == "PUT",
            "complete": lambda request: request.method == "POST" and "uploadId" in request.path,
            "delete": lambda request: request.method == "DELETE",
        }
        met = self.first(proxy, 2, code, asks[what])
        buffer = bytearray(3)
        connector.read_into("old", 0, memoryview(buffer), etag=connector.stat("old").etag)
        put_in_parts(writes_of(connector), "new", b"new ones")
        assert {"old": 3, "new": 8}.items() <= {info.key: info.size for info in connector.list("")}.items()
        writes_of(connector).delete("old")
        connector.close()
        assert buffer == b"old"
        assert len(met) == 2
        client = seaweed.boto()
        assert client.get_object(Bucket="documents", Key="new")["Body"].read() == b"new ones"
        assert "old" not in [found["Key"] for found in client.list_objects_v2(Bucket="documents")["Contents"]]

    @pytest.mark.parametrize("etag", [None, "x"])
    def test_for_too_long(self, proxy: FaultProxy, etag: str | None) -> None:
        connector = self.connector(proxy, total=0.5)
        writes_of(connector).put("old", b"old")
        proxy.rule = lambda request: Fault(answer=(200, "SlowDown"))
        for ask in (
            lambda: connector.read_into("old", 0, memoryview(bytearray(3)), etag=etag),
            lambda: connector.stat("old"),
        ):
            with pytest.raises(
                ThrottledError, match=r"s3://documents/old: .*status 200.*error document.*tried"
            ) as caught:
                ask()
            assert "SESSION-TOKEN" not in f"{caught.value!r}{caught.value.__cause__!r}"
        connector.close()
