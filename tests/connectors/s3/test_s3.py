"""The S3 connector against a real server: settings, listings, parts, errors and secrets. What every connector promises is in
contracts/; what goes wrong on the way is in test_s3_faults.py and test_s3_errors.py."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from s3torchconnector._s3client import S3Client
from seaweed import SECRET_KEY, Seaweed

import loaderkit
from loaderkit.connectors.base import writes_of
from loaderkit.connectors.config import RetryArgs, S3Args
from loaderkit.connectors.s3 import S3Connector
from loaderkit.connectors.s3.config import ClientSettings, S3Location
from loaderkit.connectors.s3.errors import translate
from loaderkit.connectors.writing import put_in_parts
from loaderkit.errors import (
    AccessDeniedError,
    ConfigError,
    ConnectorError,
    ExpiredCredentialsError,
    ObjectChangedError,
    ObjectNotFoundError,
    ShortReadError,
    ThrottledError,
    TruncatedError,
    UnreachableError,
)

pytestmark = pytest.mark.usefixtures("s3_keys")


@pytest.fixture(scope="session")
def bucket(seaweed: Seaweed) -> str:
    seaweed.boto().create_bucket(Bucket="s3-tests")
    return "s3-tests"


@pytest.fixture
def connect(seaweed: Seaweed, bucket: str) -> Iterator[Any]:
    made: list[S3Connector] = []

    def connect(url: str = f"s3://{bucket}", *, endpoint: str = seaweed.endpoint, **s3: Any) -> S3Connector:
        made.append(S3Connector(url, S3Args(endpoint=endpoint, **s3), RetryArgs(total=5.0)))
        return made[-1]

    yield connect
    for connector in made:
        connector.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("loaderkit-s3")]


def read(connector: Any, key: str, start: int, num_bytes: int, etag: str | None = None) -> bytes:
    buffer = bytearray(num_bytes)
    connector.read_into(key, start, memoryview(buffer), etag=etag)
    return bytes(buffer)


class TestListing:
    def test_pages(self, seaweed: Seaweed, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("loaderkit.connectors.s3.client._PAGE", 100)
        client = seaweed.boto()
        client.create_bucket(Bucket="many")
        names = [f"d{number % 3}/{number:04}" for number in range(250)]
        for name in names:
            client.put_object(Bucket="many", Key=name, Body=b"x")
        connector = connect("s3://many")
        assert [info.key for info in connector.list("")] == sorted(names)
        assert connector.counters()["num_requests"] == 3
        assert len(list(connector.list("d1/"))) == 83

    def test_folders_made_by_consoles_are_not_objects(self, seaweed: Seaweed, connect: Any) -> None:
        seaweed.boto().put_object(Bucket="s3-tests", Key="folder/", Body=b"")
        seaweed.boto().put_object(Bucket="s3-tests", Key="folder/a", Body=b"a")
        assert [info.key for info in connect("s3://s3-tests/folder").list("")] == ["a"]

    def test_a_missing_bucket(self, connect: Any) -> None:
        with pytest.raises(ObjectNotFoundError, match=r"s3://nowhere/\*.*no such bucket.*s3.region"):
            list(connect("s3://nowhere").list(""))


class TestReading:
    @pytest.mark.parametrize(
        ("part_size", "near_s", "num_parts"), [("auto", 60.0, 11), ("auto", 0.0, 3), ("5MiB", 60.0, 5)]
    )
    def test_parts(
        self, connect: Any, monkeypatch: pytest.MonkeyPatch, part_size: str, near_s: float, num_parts: int
    ) -> None:
        monkeypatch.setattr("loaderkit.connectors.s3.connector._NEAR_S", near_s)
        data = np.random.default_rng(0).integers(0, 256, 23_000_001, np.uint8).tobytes()
        connector = connect(part_size=part_size)
        put_in_parts(writes_of(connector), "large", data)
        info = connector.stat("large")
        assert info.size == len(data)
        before = connector.counters()
        assert read(connector, "large", 0, 5 << 20, None) == data[: 5 << 20]
        assert connector.counters()["num_requests"] - before["num_requests"] == 1, (
            "nothing says that parts are of one object"
        )
        before = connector.counters()
        assert read(connector, "large", 0, len(data), info.etag) == data
        # And a look at the etag.
        assert connector.counters()["num_requests"] - before["num_requests"] == num_parts + 1
        assert connector.counters()["fetched_bytes"] - before["fetched_bytes"] == len(data)
        assert read(connector, "large", 5_000_000, 12_000_000, info.etag) == data[5_000_000:17_000_000]
        for start, num_bytes in ((len(data) - 3, 4), (len(data) - 6_000_000, 6_000_001), (len(data) + 8, 1)):
            with pytest.raises(
                ShortReadError, match=f"of the .* bytes requested at offset .*: its size is {len(data)}"
            ):
                read(connector, "large", start, num_bytes, info.etag)

    @pytest.mark.parametrize("num_clients", [1, 2])
    def test_parts_are_received_by_all_clients(
        self, connect: Any, monkeypatch: pytest.MonkeyPatch, num_clients: int
    ) -> None:
        monkeypatch.setattr("loaderkit.connectors.s3.client._NUM_CLIENTS", num_clients)
        made: list[Any] = []

        def make(*arguments: Any, **more: Any) -> Any:
            made.append(S3Client(*arguments, **more))
            return made[-1]

        monkeypatch.setattr("s3torchconnector._s3client.S3Client", make)
        data = np.random.default_rng(0).integers(0, 256, 23_000_001, np.uint8).tobytes()
        connector = connect(part_size="5MiB")
        writes_of(connector).put("spread", data)
        etag = connector.stat("spread").etag
        assert read(connector, "spread", 7, 1000, etag) == data[7:1007]
        assert len(made) == 1, "one part is no reason to make another"
        for _ in range(2):
            assert read(connector, "spread", 0, len(data), etag) == data
            assert len(made) == num_clients

    def test_a_whole_object_with_a_digest_costs_one_request(self, seaweed: Seaweed, connect: Any) -> None:
        seaweed.boto().put_object(Bucket="s3-tests", Key="digest", Body=b"0123456789")
        connector = connect()
        etag = connector.stat("digest").etag
        before = connector.counters()["num_requests"]
        assert read(connector, "digest", 0, 10, etag) == b"0123456789"
        assert connector.counters()["num_requests"] - before == 1
        assert read(connector, "digest", 0, 4, etag) == b"0123"
        assert read(connector, "digest", 3, 4, etag) == b"3456"
        assert connector.counters()["num_requests"] - before == 5  # and a HEAD for each

    def test_replaced_by_as_many_bytes(self, seaweed: Seaweed, connect: Any) -> None:
        client, connector = seaweed.boto(), connect()
        client.put_object(Bucket="s3-tests", Key="replaced", Body=b"old")
        etag = connector.stat("replaced").etag
        client.put_object(Bucket="s3-tests", Key="replaced", Body=b"new")
        for start, num_bytes in ((0, 3), (0, 2), (1, 2)):
            with pytest.raises(ObjectChangedError, match=r"s3://s3-tests/replaced was replaced.*start again"):
                read(connector, "replaced", start, num_bytes, etag)
        with pytest.raises(ObjectChangedError):
            connector.read_into("replaced", 0, memoryview(bytearray()), etag=etag)

    def test_empty_objects(self, connect: Any) -> None:
        connector = connect()
        writes_of(connector).put("empty", b"")
        info = connector.stat("empty")
        assert info.size == 0
        assert read(connector, "empty", 0, 0, info.etag) == b""
        with pytest.raises(ShortReadError):
            read(connector, "empty", 0, 1)

    def test_closed_and_used_again(self, connect: Any) -> None:
        connector = connect()
        writes_of(connector).put("again", b"x")
        connector.close()
        assert not [t for t in threading.enumerate() if t.name.startswith("loaderkit-s3")]
        assert read(connector, "again", 0, 1) == b"x"


class TestProcesses:
    def test_pickled_it_holds_settings_only(self, connect: Any) -> None:
        connector = connect("s3://s3-tests/p")
        writes_of(connector).put("a", b"abc")
        packed = pickle.dumps(connector)
        assert SECRET_KEY.encode() not in packed
        other = pickle.loads(packed)
        assert read(other, "a", 1, 2) == b"bc"
        other.close()

    def test_a_fork_makes_a_client_of_its_own(self, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        connector = connect("s3://s3-tests/fork")
        writes_of(connector).put("a", b"abc")
        assert read(connector, "a", 0, 3) == b"abc"
        held = threading.Event()
        done = threading.Event()

        def hold(*arguments: Any, **more: Any) -> Any:
            """As any thread of a loader may, at the moment of a fork, while it holds the lock under which clients are made."""
            if threading.current_thread() is thread:
                held.set()
                done.wait()
            return S3Client(*arguments, **more)

        monkeypatch.setattr("s3torchconnector._s3client.S3Client", hold)
        connector.close()
        thread = threading.Thread(target=read, args=(connector, "a", 0, 3))
        thread.start()
        held.wait()
        pid = os.fork()
        done.set()
        if not pid:
            try:
                signal.alarm(60)
                os._exit(0 if read(connector, "a", 0, 3) == b"abc" else 1)
            finally:
                os._exit(2)
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert read(connector, "a", 0, 3) == b"abc"


class TestDenied:
    """Each with what to do; and no secret in what is raised, logged or shown."""

    @pytest.fixture(autouse=True)
    def _logged(self, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
        caplog.set_level(logging.DEBUG)
        yield
        assert "not-the-secret" not in caplog.text

    def refused(self, connector: S3Connector) -> list[str]:
        texts = []
        for attempt in (
            lambda: list(connector.list("")),
            lambda: connector.stat("a"),
            lambda: read(connector, "a", 0, 1),
            lambda: writes_of(connector).put("a", b"x"),
        ):
            with pytest.raises(AccessDeniedError) as caught:
                attempt()
            assert caught.value.__cause__ is None
            assert caught.value.__suppress_context__
            texts.append(str(caught.value))
        assert not [text for text in texts if "not-the-secret" in text]
        return texts

    def test_wrong_secret(self, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
        texts = self.refused(connect())
        assert all("does not accept the credentials" in text for text in texts[:3])
        assert "s3://s3-tests/a" in texts[1]

    def test_unknown_key(self, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        self.refused(connect())

    def test_anonymous(self, connect: Any) -> None:
        texts = self.refused(connect(anonymous=True))
        assert all("denies access" in text or "accept" in text for text in texts)

    def test_a_url_with_a_password(self) -> None:
        with pytest.raises(ConfigError, match=r"must not hold credentials") as caught:
            S3Connector("s3://key:not-the-secret@bucket/x")
        assert "not-the-secret" not in str(caught.value)


class TestSettings:
    def test_the_environment(self) -> None:
        found = ClientSettings.of(
            S3Args(), {"AWS_DEFAULT_REGION": "eu-west-1", "AWS_ENDPOINT_URL": "http://minio:9000/"}
        )
        assert (found.region, found.endpoint, found.path_style) == ("eu-west-1", "http://minio:9000", True)
        found = ClientSettings.of(S3Args(), {"AWS_REGION": "us-west-2", "AWS_DEFAULT_REGION": "x"})
        assert (found.region, found.endpoint, found.path_style) == ("us-west-2", None, False)
        specific = {"AWS_ENDPOINT_URL_S3": "https://s3.eu-west-1.amazonaws.com", "AWS_ENDPOINT_URL": "http://other"}
        assert ClientSettings.of(S3Args(), specific).endpoint == "https://s3.eu-west-1.amazonaws.com"
        assert not ClientSettings.of(S3Args(), specific).path_style
        said = S3Args(region="r", endpoint="http://e", path_style=False, profile="p", anonymous=True)
        found = ClientSettings.of(said, {"AWS_REGION": "x", "AWS_ENDPOINT_URL": "http://x", "AWS_PROFILE": "x"})
        assert (found.region, found.endpoint, found.path_style, found.profile) == ("r", "http://e", False, "p")

    @pytest.mark.parametrize("endpoint", ["http://user:not-the-secret@minio:9000", "minio:9000", "http://minio/path"])
    def test_an_endpoint_of_the_environment_that_is_none(self, endpoint: str) -> None:
        with pytest.raises(ConfigError, match=r"AWS_ENDPOINT_URL.*expected http://host:port") as caught:
            ClientSettings.of(S3Args(), {"AWS_ENDPOINT_URL": endpoint})
        assert "not-the-secret" not in str(caught.value)

    def test_the_region_of_a_profile(self, tmp_path: Path) -> None:
        config = tmp_path / "config"
        config.write_text("[default]\nregion = eu-north-1\n[profile other]\nregion=ap-south-1\nthis is no line\n")
        assert ClientSettings.of(S3Args(), {"AWS_CONFIG_FILE": str(config)}).region == "us-east-1"  # it cannot be read
        config.write_text("[default]\nregion = eu-north-1\n[profile other]\nregion=ap-south-1\n")
        assert ClientSettings.of(S3Args(), {"AWS_CONFIG_FILE": str(config)}).region == "eu-north-1"
        assert ClientSettings.of(S3Args(profile="other"), {"AWS_CONFIG_FILE": str(config)}).region == "ap-south-1"
        assert ClientSettings.of(S3Args(profile="none"), {"AWS_CONFIG_FILE": str(config)}).region == "us-east-1"

    def test_urls(self) -> None:
        assert S3Location.of("s3://b") == S3Location.of("s3://b/") == S3Location("b", "")
        assert S3Location.of("s3://b/a b%20+") == S3Location("b", "a b%20+/")
        point = "arn:aws:s3:eu-west-1:1:accesspoint/mine"
        assert S3Location.of(f"s3://{point}/x/") == S3Location(point, "x/")
        for url in ("s3://", "s3:///x"):
            with pytest.raises(ConfigError, match="expected s3://bucket"):
                S3Location.of(url)

    @pytest.mark.parametrize(
        ("s3", "complaint"),
        [
            ({"part_size": "1MiB"}, "between 5MiB and 5GiB"),
            ({"endpoint": "minio:9000"}, "https?"),
            ({"endpoint": "http://user:password@minio"}, "https?"),
            ({"secret_key": "x"}, "unknown key 'secret_key'"),
            ({"connections": 0}, "greater than 0"),
            ({"path_style": "yes"}, "auto"),
        ],
    )
    def test_what_is_refused(self, s3: dict[str, Any], complaint: str) -> None:
        source = {"kind": "files", "url": "s3://bucket", "s3": s3}
        with pytest.raises(ConfigError, match=complaint):
            loaderkit.build({"source": source, "stages": ["read", {"batch": {"size": 1}}]})

    def test_a_description_comes_back(self, tmp_path: Path) -> None:
        pipeline = loaderkit.Pipeline.files(
            "s3://b/x",
            s3={"endpoint": "http://e", "part_size": "16MiB", "path_style": True},
            cache={"dir": "/tmp/c", "size": "1GiB"},
            retry={"total": "20s"},
        )
        pipeline = pipeline.read().batch(2)
        path = tmp_path / "again.yaml"
        path.write_text(pipeline.to_yaml())
        assert "part_size: 16MiB" in path.read_text()
        assert loaderkit.Pipeline.from_yaml(path).config.source == pipeline.config.source


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Service error: The key does not exist", ObjectNotFoundError),
        ("Client error: Forbidden: <no message>", AccessDeniedError),
        ("Client error: Request throttled", ThrottledError),
        ("Unknown CRT error: CRT error 14370: aws-c-s3: AWS_ERROR_S3_TOKEN_EXPIRED, Token expired", ExpiredCredentialsError),
        ("Unknown CRT error: CRT error 1051: aws-c-io: AWS_IO_SOCKET_CLOSED, socket is closed.", TruncatedError),
        ("CRT error 1047: aws-c-io: AWS_IO_SOCKET_CONNECTION_REFUSED, refused", UnreachableError),
        ("response_status: 400, body: <Code>ExpiredToken</Code><Token-0>TOP</Token-0>)", ExpiredCredentialsError),
        ("response_status: 301, body: <Code>PermanentRedirect</Code><Token-0>TOP</Token-0>", ConnectorError),
        ("something new: TOP", ConnectorError),
    ],
)  # fmt: skip
def test_complaints(text: str, kind: type[ConnectorError]) -> None:
    found = translate(text, "s3://b/k", "http://store")
    assert type(found) is kind
    assert str(found).startswith("s3://b/k: ")
    assert "TOP" not in str(found)
