"""Writing objects of a bucket: each part is one request of a multipart upload, made in the thread pool of the reads.

    create ──> CreateMultipartUpload ──> write: UploadPart, retried ──> commit: CompleteMultipartUpload
                                                                    └─> abort: AbortMultipartUpload

A part is copied before it is sent, because a request that hangs is abandoned and still reads its memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from hashlib import md5

from loaderkit.connectors.base import ObjectInfo, ObjectWriter, Writes
from loaderkit.connectors.call_pool import Call
from loaderkit.connectors.s3.client import Client
from loaderkit.connectors.s3.requests import Requests
from loaderkit.connectors.s3.uploads import Upload
from loaderkit.connectors.writing import Parts, WriteCounts
from loaderkit.errors import ConnectorError, ObjectNotFoundError

logger = logging.getLogger("loaderkit")
_PART_BYTES = 8 << 20
_MAX_PARTS = 10_000
_MAX_SIZE = 5 << 40
_PATIENCE = 6.0  # times the timeout: a part takes longer than an answer


class S3Writes(Writes):
    """The writing side of `S3Connector`."""

    def __init__(
        self,
        requests: Requests,
        full: Callable[[str], str],
        describe: Callable[[str], str],
        stat: Callable[[str], ObjectInfo],
        counts: WriteCounts,
    ) -> None:
        """`full` gives the key in the bucket, or raises."""
        self.requests, self.full, self.describe, self.stat, self.counts = requests, full, describe, stat, counts

    def part_bytes_of(self, size: int) -> int:
        """8 MiB, or as many MiB as let 10,000 parts hold the object."""
        return max(_PART_BYTES, -(-size // (_MAX_PARTS << 20)) << 20)

    def create(self, key: str, size: int) -> ObjectWriter:
        """Begin an upload; an object of no bytes is put at `commit`, as an upload has at least one part."""
        if size > _MAX_SIZE:
            raise ConnectorError(f"{self.describe(key)}: an object of S3 has at most 5 TiB, not {size} bytes")
        parts = Parts(self.describe(key), size, self.part_bytes_of(size))
        return S3Writer(self, key, parts) if size else _EmptyWriter(self, key)

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        """Create or replace an object by one request."""
        full, content = self.full(key), bytes(data)
        with self.counts.timed("committing_s", len(content)):
            etag = self.requests.ask(
                lambda client, call: client.uploads.put(full, content), self.describe(key), patience=_PATIENCE
            )
        return ObjectInfo(key, len(content), etag.strip('"'))

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is no error."""
        full = self.full(key)
        self.requests.ask(lambda client, call: client.delete(full), self.describe(key))

    def rename(self, prefix: str, new_prefix: str) -> bool:
        """False: a bucket has no directories."""
        return False

    def sync(self, prefix: str) -> None:
        """Nothing to do: an object is durable when it is there."""

    def clear(self, prefix: str, *, deep: bool = True) -> None:
        """Abort the unfinished uploads below `prefix`."""
        folder = f"{prefix.removesuffix('/')}/" if prefix else ""
        full = self.full(f"{folder}x")[:-1]
        for upload in self.requests.ask(lambda client, call: client.uploads.unfinished(full), self.describe(folder)):
            if deep or "/" not in upload.key.removeprefix(full):
                self.abort(upload, self.describe(folder))

    def abort(self, upload: Upload, where: str) -> None:
        """Abort an upload; one that is gone is no error."""
        with suppress(ObjectNotFoundError):
            self.requests.ask(lambda client, call: client.uploads.abort(upload), where)


class S3Writer:
    """One multipart upload."""

    def __init__(self, writes: S3Writes, key: str, parts: Parts) -> None:
        self._writes, self._key, self._parts, self._where = writes, key, parts, writes.describe(key)
        self._etags: dict[int, str] = {}
        self._info: ObjectInfo | None = None
        full = writes.full(key)
        self._upload = writes.requests.ask(lambda client, call: client.uploads.begin(full), self._where)

    def write(self, start: int, data: memoryview) -> None:
        """Upload one part; see `ObjectWriter.write`."""
        part = bytes(self._parts.checked(start, data))
        number = start // self._parts.part_bytes + 1
        with self._writes.counts.timed("writing_s", len(part)):
            self._etags[number] = self._writes.requests.ask(
                lambda client, call: client.uploads.part(self._upload, number, part), self._where, patience=_PATIENCE
            )
        self._parts.add(start)

    def commit(self) -> ObjectInfo:
        """Complete the upload; see `ObjectWriter.commit`."""
        self._parts.check_whole()
        if self._info is None:
            with self._writes.counts.timed("committing_s"):
                etag = self._completed([self._etags[number] for number in range(1, self._parts.num_parts + 1)])
            self._info = ObjectInfo(self._key, self._parts.size, etag.strip('"'))
        return self._info

    def _completed(self, etags: list[str]) -> str:
        num_attempts = 0

        def complete(client: Client, call: Call[str]) -> str:
            nonlocal num_attempts
            num_attempts += 1
            return client.uploads.complete(self._upload, etags)

        try:
            return self._writes.requests.ask(complete, self._where, patience=_PATIENCE)
        except ObjectNotFoundError:
            # The answer to the first request was lost, and it had completed the upload.
            if num_attempts > 1 and (info := self._writes.stat(self._key)).etag == _etag_of(etags):
                return info.etag
            raise ConnectorError(
                f"{self._where}: the store knows nothing of this upload any more: it was aborted meanwhile, by a rule of the "
                "bucket or by another program; write it again"
            ) from None

    def abort(self) -> None:
        """Abort the upload; see `ObjectWriter.abort`. If the store cannot be reached, its parts stay until `clear`."""
        if self._info is not None:
            return
        try:
            self._writes.abort(self._upload, self._where)
        except ConnectorError as error:
            logger.warning("an upload could not be aborted, so the store keeps its parts, which cost: %s", error)


class _EmptyWriter:
    """An object of no bytes."""

    def __init__(self, writes: S3Writes, key: str) -> None:
        writes.full(key)
        self._writes, self._key = writes, key

    def write(self, start: int, data: memoryview) -> None:
        raise ValueError(f"{self._writes.describe(self._key)}: an object of no bytes has no parts")

    def commit(self) -> ObjectInfo:
        return self._writes.put(self._key, b"")

    def abort(self) -> None:
        pass


def _etag_of(etags: list[str]) -> str:
    """The etag of an object whose parts have these etags; "" if they are no digests."""
    try:
        digests = b"".join(bytes.fromhex(etag.strip('"')) for etag in etags)
    except ValueError:
        return ""
    return f"{md5(digests, usedforsecurity=False).hexdigest()}-{len(etags)}"
