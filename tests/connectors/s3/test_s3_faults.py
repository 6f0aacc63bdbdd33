"""What networks and stores do to an epoch, by a proxy in front of a real server: the right bytes, or one clear error."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buckets import digest, epoch_of, upload
from fault_proxy import Fault, FaultProxy, Request
from s3_sources import BLOCKS, is_read, local, now_and_then, source
from seaweed import Seaweed

import loaderkit
from loaderkit.connectors.config import RetryArgs, S3Args
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.connectors.s3 import S3Connector
from loaderkit.errors import (
    AccessDeniedError,
    ChecksumError,
    ConfigError,
    ExpiredCredentialsError,
    ObjectChangedError,
    RequestTimeoutError,
    SourceError,
    StageError,
    UnreachableError,
)

pytestmark = pytest.mark.usefixtures("s3_keys")


EPOCHS = {
    "latency": lambda request: Fault(wait_s=0.02),
    "resets": now_and_then(Fault(reset=True)),
    "a burst of 503": lambda request: Fault(answer=(503, "SlowDown")) if 20 <= request.number < 30 else None,
    "500 now and then": now_and_then(Fault(answer=(500, "InternalError"))),
    "200 with an error document now and then": now_and_then(Fault(answer=(200, "SlowDown"))),
    "truncated bodies": now_and_then(Fault(keep_bytes=100)),
    "no answer": now_and_then(Fault(hang=True), 19),
    "an answer that never ends": now_and_then(Fault(drip=True), 19),
}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("what", EPOCHS)
@pytest.mark.parametrize("kind", ["files", pytest.param("tar", marks=pytest.mark.prove)])
def test_an_epoch_has_the_right_bytes(proxy: FaultProxy, photos: Path, shards: Path, kind: str, what: str) -> None:
    proxy.rule = EPOCHS[what]
    found, store = epoch_of(source(proxy, kind), BLOCKS if kind == "tar" else None)
    assert found == local(photos, shards, kind)
    if what in ("no answer", "an answer that never ends") and kind == "files":
        assert store["num_timeouts"] >= 1
        assert store["num_retries"] >= 1


def test_a_flipped_byte_whose_checksum_is_known(proxy: FaultProxy, photos: Path, shards: Path) -> None:
    proxy.rule = now_and_then(Fault(flip=300))
    found, store = epoch_of(source(proxy, "files"))
    assert found == local(photos, shards, "files")
    assert store["num_checksum_failures"] >= 1


def test_bytes_that_stay_wrong(proxy: FaultProxy) -> None:
    proxy.rule = lambda request: Fault(flip=300) if is_read(request) else None
    with pytest.raises(StageError, match=r"MD5.*source.s3.md5: false") as caught:
        epoch_of(source(proxy, "files"))
    assert isinstance(caught.value.__cause__, ChecksumError)


def test_the_endpoint_is_down_for_a_while(proxy: FaultProxy, photos: Path, shards: Path) -> None:
    timers: list[threading.Timer] = []

    def rule(request: Request) -> None:
        if request.number == 40:
            proxy.go_down()
            timers.append(threading.Timer(3.0, proxy.come_up))
            timers[0].start()

    proxy.rule = rule
    found, _ = epoch_of(source(proxy, "files"))
    assert timers
    timers[0].join()
    assert found == local(photos, shards, "files")


@pytest.mark.parametrize("kind", ["files", "tar"])
def test_replaced_in_mid_epoch(seaweed: Seaweed, photos: Path, shards: Path, proxy: FaultProxy, kind: str) -> None:
    bucket = f"replaced-{kind}"
    folder = photos if kind == "files" else shards
    upload(seaweed, folder, bucket, "d/")
    client = seaweed.boto()
    overrides = {"source.url": f"s3://{bucket}/d", "source.read_ahead.memory": 100_000}
    pipeline = {
        "source": source(proxy, kind),
        "order": {"shuffle": "none"},
        "stages": ["read", {"batch": {"size": 4}}],
        "prefetch": {"batches": 1, "concurrency": 1},
    }
    with loaderkit.build(pipeline, overrides=overrides) as loader:
        batches = iter(loader)
        found = [digest(next(batches))]
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                body = bytearray(path.read_bytes())
                body[len(body) // 2] ^= 1
                client.put_object(Bucket=bucket, Key=f"d/{path.relative_to(folder).as_posix()}", Body=bytes(body))
        with pytest.raises(StageError, match=r"was replaced since it was listed.*start again") as caught:
            found += [digest(batch) for batch in batches]
        assert isinstance(caught.value.__cause__, ObjectChangedError)
    with loaderkit.build(pipeline, overrides={**overrides, "source.url": str(folder)}) as loader:
        assert [digest(batch) for batch in loader][: len(found)] == found


class TestLongReads:
    """Of many parts."""

    @pytest.fixture
    def data(self, seaweed: Seaweed, disturbed_bucket: None, monkeypatch: pytest.MonkeyPatch) -> bytes:
        monkeypatch.setattr("loaderkit.connectors.s3.connector._NEAR_S", 60.0)  # parts of 2 MiB
        data = np.random.default_rng(0).integers(0, 256, 60_000_000, np.uint8).tobytes()
        seaweed.boto().put_object(Bucket="faults", Key="photos/large", Body=data)
        return data

    @pytest.mark.matrix(1)
    @pytest.mark.parametrize("fault", [Fault(answer=(503, "SlowDown")), Fault(reset=True), Fault(keep_bytes=1000)])
    def test_a_store_that_fails_is_not_asked_for_all_parts(self, proxy: FaultProxy, data: bytes, fault: Fault) -> None:
        """And the read continues when it is back, with all of them."""
        connector = S3Connector("s3://faults/photos", S3Args(endpoint=proxy.endpoint), RetryArgs.model_validate({}))
        info = connector.stat("large")
        buffer = bytearray(len(data))
        asked: set[str] = set()  # for which parts, while it failed

        def rule(request: Request) -> Fault | None:
            if not is_read(request) or num_errors[0] >= 30:
                return None
            num_errors[0] += 1
            asked.add(request.headers["range"])
            return fault

        num_errors = [0]
        proxy.rule = rule
        connector.read_into("large", 0, memoryview(buffer), etag=info.etag)
        connector.close()
        assert buffer == data
        assert 1 < len(asked) <= 4

    def test_parts_ahead_that_hang_do_not_keep_one_from_being_tried_again(self, proxy: FaultProxy, data: bytes) -> None:
        settings = S3Args(endpoint=proxy.endpoint, connections=2)
        connector = S3Connector("s3://faults/photos", settings, RetryArgs.model_validate({"timeout": "300ms"}))
        info = connector.stat("large")
        buffer, seen, lock = bytearray(len(data)), iter(range(10**9)), threading.Lock()

        def rule(request: Request) -> Fault | None:
            if not is_read(request):
                return None
            with lock:
                number = next(seen)
            return Fault(answer=(503, "SlowDown")) if number < 2 else Fault(hang=True) if number < 6 else None

        proxy.rule = rule
        connector.read_into("large", 0, memoryview(buffer), etag=info.etag)
        assert connector.counters()["num_timeouts"] >= 2
        connector.close()
        assert buffer == data

    def test_newer_credentials_are_for_all_parts_that_are_left(
        self, proxy: FaultProxy, data: bytes, write_s3_keys: Callable[[str], None]
    ) -> None:
        write_s3_keys("aws_session_token = old\n")
        expired: set[str] = set()

        def rule(request: Request) -> Fault | None:
            if request.headers.get("x-amz-security-token") != "old":
                return None
            if not expired:
                write_s3_keys("")
            expired.add(request.headers.get("range", ""))
            return Fault(answer=(400, "ExpiredToken"))

        proxy.rule = rule
        settings = S3Args.model_validate({"endpoint": proxy.endpoint, "part_size": "5MiB"})
        connector = S3Connector("s3://faults/photos", settings, RetryArgs.model_validate({}))
        buffer = bytearray(len(data))
        connector.read_into("large", 0, memoryview(buffer), etag=hashlib.md5(data, usedforsecurity=False).hexdigest())
        connector.close()
        assert buffer == data
        assert 1 < len(expired) <= 8, "each of the others would have taken seconds to learn it"


EXPIRED, HANGS = Fault(answer=(400, "ExpiredToken")), Fault(hang=True)


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("policy", "fault"), [("raise", EXPIRED), ("skip", EXPIRED), ("replace", EXPIRED), ("replace", HANGS)]
)
def test_no_sample_is_bad_because_its_store_fails(proxy: FaultProxy, policy: str, fault: Fault) -> None:
    """Nor is one skipped or replaced; one error says what is wrong, soon, and is the cause of what is raised."""
    kind = RequestTimeoutError if fault is HANGS else ExpiredCredentialsError
    retry = {"total": "1s", "timeout": "3s" if fault is HANGS else "9s"}
    pipeline = {
        "source": source(proxy, "tar", retry=retry, read_ahead={"memory": 100_000}),
        "order": BLOCKS,
        "stages": ["read", {"batch": {"size": 4}}],
        "errors": {"on_bad_sample": policy, "max_bad_samples": 100},
    }
    with loaderkit.build(pipeline) as loader:
        batches = iter(loader)
        found = [next(batches)]
        proxy.rule = lambda request: fault
        with pytest.raises(StageError) as caught:
            found += [batch for _ in range(40) for batch in (batches, loader)[_ > 0]]
        assert isinstance(caught.value.__cause__, kind)
        assert all(len(batch["__key__"]) == 4 for batch in found)
    proxy.rule = lambda request: fault if is_read(request) else None
    with loaderkit.build({**pipeline, "source": source(proxy, "files", retry=retry)}) as loader:
        with pytest.raises(StageError) as caught:
            next(iter(loader))  # what a batch looks like is found out by the first sample that can be read
        assert isinstance(caught.value.__cause__, kind)


@pytest.mark.parametrize("what", ["files", "records"])
def test_a_chunk_is_not_read_on_when_the_store_is_away(what: str, tmp_path: Path) -> None:
    """Each of its reads would be tried for as long as `source.retry` allows."""

    class Away(MemoryConnector):
        num_reads = 0

        def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
            self.num_reads += 1
            if self.num_reads > 4:
                raise UnreachableError("away")
            super().read_into(key, start, buffer, etag=etag)

    connector = Away({f"{number}.bin": bytes(80) for number in range(32)})
    where: dict[str, Any] = {"kind": "files", "url": "memory://x"}
    if what == "records":
        where = {"kind": "array", "url": "memory://x/0.bin", "dtype": "uint8", "shape": [2]}
    pipeline = {
        "source": where,
        "order": {"shuffle": "global"},
        "stages": ["read", {"batch": {"size": 16}}],
        "prefetch": {"executor": "inline"},
    }
    # By a clock that stands still a sample takes no time, so a batch is one chunk on a slow machine, too.
    with loaderkit.build(pipeline, connectors={"memory": connector}, clock=lambda: 0.0) as loader:
        with pytest.raises(StageError) as caught:
            list(loader)
        assert isinstance(caught.value.__cause__, UnreachableError)
    assert connector.num_reads <= 6


def test_shards_that_may_be_read_and_not_listed(proxy: FaultProxy, photos: Path, shards: Path) -> None:
    proxy.rule = lambda request: Fault(answer=(403, "AccessDenied")) if "list-type" in request.path else None
    names = "s3://faults/shards/shard-{000..002}.tar"
    assert epoch_of(source(proxy, "tar", url=names), BLOCKS)[0] == local(photos, shards, "tar")
    with pytest.raises(SourceError, match=r"is called 'shard-003.tar'; the objects below it cannot be listed"):
        epoch_of(source(proxy, "tar", url="s3://faults/shards/shard-{000..003}.tar"), BLOCKS)
    with pytest.raises(AccessDeniedError, match=r"s3://faults/shards/\*"):
        epoch_of(source(proxy, "tar"), BLOCKS)
    with pytest.raises(ConfigError, match="no batch at all"):
        loaderkit.build(
            {"source": source(proxy, "tar", url=names), "stages": ["read", {"batch": {"size": 61, "drop_last": True}}]}
        )


def test_closing_does_not_wait_for_what_hangs(proxy: FaultProxy) -> None:
    hangs = threading.Event()

    def rule(request: Request) -> Fault | None:
        if not is_read(request):
            return None
        hangs.set()
        return Fault(hang=True)

    proxy.rule = rule
    pipeline = source(proxy, "files", retry={"total": "500s", "timeout": "400s"})
    loader = loaderkit.build({"source": pipeline, "stages": ["read", {"batch": {"size": 4}}]})
    loader.start()
    assert hangs.wait(30)
    begin_s = time.monotonic()
    loader.close()  # the requests end with the proxy, and with them their threads
    assert time.monotonic() - begin_s < 300  # they would hang for 400 s
