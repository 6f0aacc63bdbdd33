"""`S3Connector`: the objects below a prefix of a bucket.

    read_into ──> parts of `part_size` ──> one request each, four or eight at once ──> the destination
              └─> the etag: the MD5 of a whole object where it is one, else a HEAD after the last byte

The client cannot send If-Match, so the etag is checked afterwards: a read succeeds only if the object still had the etag it
was listed with after its last byte arrived.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from hashlib import md5
from typing import Any, NamedTuple

from loaderkit.connectors.base import BulkConnector, ConnectorTraits, ObjectInfo
from loaderkit.connectors.call_pool import Call
from loaderkit.connectors.config import RetryArgs, S3Args
from loaderkit.connectors.retries import RetryPolicy
from loaderkit.connectors.s3.client import Client, Page
from loaderkit.connectors.s3.config import ClientSettings, S3Location
from loaderkit.connectors.s3.requests import Requests
from loaderkit.connectors.s3.writes import S3Writes
from loaderkit.connectors.writing import WriteCounts
from loaderkit.errors import (
    AccessDeniedError,
    ChecksumError,
    ConnectorError,
    ObjectChangedError,
    ObjectNotFoundError,
    ShortReadError,
    TruncatedError,
)

_MD5 = re.compile(r"[0-9a-f]{32}")
_DOTS = re.compile(r"(?:\A|/)\.{1,2}(?:/|\Z)")
_EMPTY_PART = re.compile(r"\A/|//")
_MOST_MD5_BYTES = 64 << 20
_MOST_KEY_BYTES = 1024
_TIMEOUT_S = 10.0
_MOST_READS = 3


class _Split(NamedTuple):
    """How a read is split: the size of a part, and the number of concurrent requests."""

    part_bytes: int
    at_once: int


_MOST_CONCURRENT_BYTES = 32 << 20
# 32 at once run at 0.86 of the speed of 8, as the client's buffers outgrow the CPU's caches.
_AT_ONCE = 8
# A store that answers this soon is nearby, so requests are cheap; smaller parts stay in the CPU's caches, and the client's
# memory is not returned to the system. 500 MB over loopback: 1.25 times the speed of 8 parts of 8 MiB at once.
_NEAR_S = 2e-3
_NEAR = _Split(2 << 20, 4)


def _page(prefix: str, token: str | None, client: Client, call: Call[Page]) -> Page:
    return client.page(prefix, token)


def _info_of(key: str, metadata: Any) -> ObjectInfo:
    return ObjectInfo(key, int(metadata.size), metadata.etag.strip('"'))


class _PartRead:
    """A part of a read, fetched by one request."""

    call: Call[int]  # the latest request for it

    def __init__(self, start: int, memory: memoryview) -> None:
        self.start = start
        self.memory = memory
        self.is_complete = False


class S3Connector(BulkConnector):
    """The objects of a bucket whose keys start with a prefix; keys are what follows it.

    It holds settings only; the first request in each process creates the client and its threads, which neither cross a fork
    nor are pickled. Raises ConfigError for an invalid URL.
    """

    def __init__(
        self, url: str, s3: S3Args | None = None, retry: RetryArgs | None = None, odd_keys: Iterable[str] = ()
    ) -> None:
        """`odd_keys` are keys with empty parts that are known to exist."""
        self._url, self._s3, self._retry = url, s3 or S3Args(), retry or RetryArgs()
        self._location = S3Location.of(url)
        settings = ClientSettings.of(self._s3, os.environ)
        self._most_part_bytes = settings.part_size
        self._requests = Requests(
            self._location,
            settings,
            connections=self._s3.connections,
            policy=RetryPolicy(self._retry.total, self._s3.max_attempts),
            timeout_s=self._retry.timeout or _TIMEOUT_S,
        )
        num_parts = min(4, _MOST_CONCURRENT_BYTES // self._most_part_bytes)
        self.traits = ConnectorTraits(
            is_remote=True,
            part_size=num_parts * self._most_part_bytes if num_parts > 1 else 0,
            store=self._requests.store,
        )
        self._counts = WriteCounts()
        self.num_checksum_failures = 0
        self._odd_keys = set(odd_keys)  # they were listed, so the store tells "a//b" from "a/b"
        # AWS lists in the order of the keys' bytes, except directory buckets; other stores may not.
        self._is_sorted = settings.endpoint is None and not self._location.bucket.endswith("--x-s3")

    def __reduce__(self) -> tuple[Any, ...]:
        return S3Connector, (self._url, self._s3, self._retry, self._odd_keys)

    # ------------------------------------------------------------------------------------------------------ contract

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose key starts with `prefix`, ordered by its UTF-8 bytes; "folders" of no bytes are left out."""
        if self._is_sorted:
            yield from self._listed(prefix)
        else:
            yield from sorted(self._listed(prefix), key=lambda info: info.key.encode())

    def stat(self, key: str) -> ObjectInfo:
        """Size in bytes and etag of one object."""
        return self._head(key, None)

    def modified_s(self, key: str) -> float | None:
        """The store's Last-Modified, in whole seconds."""
        modified = getattr(self._metadata(key, None), "last_modified", None)
        return None if modified is None else float(modified)

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        """Fill `buffer` with the object's bytes from `start` on, or raise; see `Connector.read_into`."""
        if start < 0:
            raise ShortReadError(f"{self.describe(key)}: the offset {start} is negative")
        if etag is not None and _EMPTY_PART.search(key):
            self._odd_keys.add(key)  # another connector listed it, maybe long ago
        if not len(buffer):
            self._check_etag(self.stat(key), etag)
            return
        begin_s = self._requests.retries.now_s()
        if etag is None and len(buffer) > self._most_part_bytes:  # the parts must be of one version of the object
            etag = self._head(key, begin_s).etag
        for attempts_left in reversed(range(_MOST_READS)):
            try:
                self._read_checked(key, start, buffer, etag, begin_s)
                break
            except ChecksumError:  # damaged on the way or in the store; a retry decides
                self.num_checksum_failures += 1
                if not attempts_left:
                    raise

    def writes(self) -> S3Writes:
        """The writing side: parallel multipart uploads."""
        return S3Writes(self._requests, self._full, self.describe, self.stat, self._counts)

    def describe(self, key: str) -> str:
        """The object's URL."""
        return f"s3://{self._location.bucket}/{self._location.prefix}{key}"

    def counters(self) -> dict[str, float]:
        """Counts and seconds of the requests made in this process."""
        requests = self._requests
        return {
            "num_requests": requests.num_requests,
            "num_retries": requests.retries.num_retries,
            "num_timeouts": requests.num_timeouts,
            "num_checksum_failures": self.num_checksum_failures,
            "fetched_bytes": requests.fetched_bytes,
            "first_byte_s": requests.first_byte_s,
            "body_s": requests.body_s,
            **self._counts.counters(),
        }

    def time_objects(self) -> None:
        """Time the reads of each object from now on, for `object_times`."""
        self._requests.by_key = {}

    def object_times(self) -> dict[str, tuple[float, float]]:
        """(seconds to the first byte, seconds of the body) by URL, each summed over all reads of the object."""
        bucket = self._location.bucket
        times = dict(self._requests.by_key or {})
        return {f"s3://{bucket}/{key}": (first_byte_s, body_s) for key, (first_byte_s, body_s) in times.items()}

    def close(self) -> None:
        """Drop the client and end the threads."""
        self._requests.close()

    # --------------------------------------------------------------------------------------------------------- parts

    def _head(self, key: str, begin_s: float | None) -> ObjectInfo:
        return _info_of(key, self._metadata(key, begin_s))

    def _metadata(self, key: str, begin_s: float | None) -> Any:
        full, where = self._full(key), self.describe(key)
        try:
            head = self._requests.ask(lambda client, call: client.head(full), where, begin_s=begin_s)
        except AccessDeniedError:
            # The answer to a HEAD has no body with the reason; that to a GET has.
            try:
                self._requests.once(lambda client, call: next(client.stream(full, 0, 1), None), where)
            except AccessDeniedError:
                raise
            except ConnectorError:
                pass
            raise
        return head

    def _read_checked(self, key: str, start: int, buffer: memoryview, etag: str | None, begin_s: float) -> None:
        self._read_parts(key, start, buffer, etag, begin_s)
        if etag is None:
            return
        is_digest = self._s3.md5 and start == 0 and len(buffer) <= _MOST_MD5_BYTES and _MD5.fullmatch(etag)
        digest = md5(buffer, usedforsecurity=False).hexdigest() if is_digest else None
        if digest == etag:
            return
        info = self._head(key, begin_s)
        self._check_etag(info, etag)
        if digest is not None and info.size == len(buffer):
            raise ChecksumError(
                f"{self.describe(key)} has the MD5 digest {digest}, but its etag is {etag}: its bytes were damaged on the way "
                "or in the store; in a bucket encrypted with SSE-KMS or SSE-C etags are no digests: set source.s3.md5: false"
            )

    def _read_parts(self, key: str, start: int, buffer: memoryview, etag: str | None, begin_s: float) -> None:
        size, at_once = self._split if etag is not None else _Split(self._most_part_bytes, 1)
        parts = [_PartRead(start + at, buffer[at : at + size]) for at in range(0, len(buffer), size)]
        self._requests.renewing(lambda: self._read_rest(key, parts, etag, begin_s, at_once))

    def _read_rest(self, key: str, parts: Sequence[_PartRead], etag: str | None, begin_s: float, at_once: int) -> None:
        """Fetch the incomplete parts, several at a time, each with its own retries."""
        parts = [part for part in parts if not part.is_complete]
        for part, call in zip(parts, self._gets(key, parts), strict=True):
            part.call = call
        try:
            self._requests.begin_gets([part.call for part in parts], at_once)
            for part in parts:
                self._finish(part, key, etag, begin_s)
                part.is_complete = True
        finally:
            for part in parts:
                part.call.cancel()  # after an error no other part may write

    def _finish(self, part: _PartRead, key: str, etag: str | None, begin_s: float) -> None:
        first = part.call
        num_tries = 0

        def once() -> None:
            nonlocal num_tries
            num_tries += 1
            if num_tries > 1:
                (part.call,) = self._gets(key, [part])
                self._requests.begin_gets([part.call], 1)
            try:
                num_read = self._requests.finish_get(part.call, self.describe(key))
            except ShortReadError as error:
                if isinstance(error, TruncatedError):
                    raise
                num_read = 0  # the range starts past the object's end
            if num_read < len(part.memory):
                raise self._cut_short(key, part, num_read, etag)

        self._requests.retries(once, begin_s)
        self._requests.pass_on(first)

    def _gets(self, key: str, parts: Sequence[_PartRead]) -> Sequence[Call[int]]:
        return self._requests.gets(self._full(key), [(part.start, part.memory) for part in parts])

    @property
    def _split(self) -> _Split:
        """The split of a read with an etag."""
        is_near = self._s3.part_size == "auto" and self._requests.answer_s < _NEAR_S
        return _NEAR if is_near else _Split(self._most_part_bytes, _AT_ONCE)

    def _cut_short(self, key: str, part: _PartRead, num_read: int, etag: str | None) -> ConnectorError:
        """The error for a short answer: ShortReadError if the object ends there, else TruncatedError."""
        info = _info_of(key, self._requests.once(lambda client, call: client.head(self._full(key)), self.describe(key)))
        self._check_etag(info, etag)
        wanted = len(part.memory)
        text = (
            f"{self.describe(key)} ended after {num_read} of the {wanted} bytes requested at offset {part.start}: its size is "
            f"{info.size}"
        )
        if info.size >= part.start + wanted:
            return TruncatedError(f"{text}, and the store sent less")
        return ShortReadError(f"{text}; it is truncated, or its index is stale")

    def _check_etag(self, info: ObjectInfo, etag: str | None) -> None:
        if etag is not None and etag != info.etag:
            raise ObjectChangedError(
                f"{self.describe(info.key)} was replaced since it was listed (then {etag}, now {info.etag}); start again, so "
                "that it is listed again"
            )

    def _full(self, key: str) -> str:
        """The key in the bucket. Raises ObjectNotFoundError for a key that no object can have."""
        full = self._location.prefix + key
        try:
            num_bytes = len(full.encode())
        except UnicodeEncodeError:
            raise ObjectNotFoundError(f"{key!r} is no key: it is not Unicode text") from None
        if not key or key.endswith("/") or "\0" in key or num_bytes > _MOST_KEY_BYTES:
            raise ObjectNotFoundError(
                f"{key[:100]!r} is no key: keys are not empty, end with no slash and have at most {_MOST_KEY_BYTES} bytes"
            )
        # Some stores and proxies would resolve these like a path.
        if _DOTS.search(key) or (_EMPTY_PART.search(key) and key not in self._odd_keys):
            raise ObjectNotFoundError(f"{key!r} is no key: it has parts that are '.', '..' or empty")
        return full

    def _listed(self, prefix: str) -> Iterator[ObjectInfo]:
        location, last = self._location, b""
        token: str | None = None
        try:
            full = location.prefix + prefix
            full.encode()
        except UnicodeEncodeError:
            return
        while True:
            page = self._requests.ask(partial(_page, full, token), self.describe(prefix) + "*")
            for listed in page.objects:
                if not listed.key.startswith(full):  # cut to size it could be the name of another object
                    raise ConnectorError(
                        f"{self.describe(prefix)}*: the store lists {listed.key!r} there, as it takes some names for others: "
                        "is there a slash too many in `url`?"
                    )
                key = listed.key[len(location.prefix) :]
                if not key or key.endswith("/"):
                    continue
                if self._is_sorted and key.encode() <= last:
                    raise ConnectorError(
                        f"{self.describe(prefix)}*: the store lists {key!r} out of order; name it as source.s3.endpoint, "
                        "then listings are sorted here"
                    )
                last = key.encode() if self._is_sorted else last
                if _EMPTY_PART.search(key):
                    self._odd_keys.add(key)
                yield _info_of(key, listed)
            token = page.token
            if token is None:
                return
