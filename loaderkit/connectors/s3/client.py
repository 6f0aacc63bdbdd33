"""The only module that imports s3torchconnector; it offers the calls used of it as plain functions."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from loaderkit.connectors.s3.config import ClientSettings, S3Location
from loaderkit.connectors.s3.uploads import WriteClient
from loaderkit.errors import MissingExtraError

_PAGE = 1000
_UNUSED = object()
# A client of the package receives with half as many threads as the machine has CPUs, at least one; a single one is slower than
# a nearby store.
_NUM_CLIENTS = 2 if 2 <= (os.cpu_count() or 1) < 4 else 1


class Page(NamedTuple):
    """Some objects of a listing, and the token of the next page; None after the last."""

    objects: list[Any]
    token: str | None


class Client:
    """A client for one bucket, for use in the process that created it. Raises MissingExtraError.

    On small machines it holds two of the package's clients; the second is created with the first parts of a long read.
    """

    def __init__(self, location: S3Location, settings: ClientSettings) -> None:
        try:
            from s3torchconnector import S3ClientConfig, S3Exception
            from s3torchconnector._s3client import S3Client
            from s3torchconnectorclient._mountpoint_s3_client import ListObjectStream
        except ImportError as error:
            raise MissingExtraError(
                f"s3:// needs the package s3torchconnector ({error}): pip install 'loaderkit[s3]'"
            ) from error
        self.failure: type[Exception] = S3Exception
        self._location = location
        self._settings = settings
        self._bucket = location.bucket
        self._uploads: WriteClient | None = None
        self._pages = ListObjectStream
        self._lock = threading.Lock()
        self._num_part_requests = 0
        config = S3ClientConfig(
            part_size=settings.part_size,
            unsigned=settings.anonymous,
            force_path_style=settings.path_style,
            max_attempts=1,
            profile=settings.profile,
        )
        self._make = partial(S3Client, settings.region, endpoint=settings.endpoint, s3client_config=config)
        self._clients: list[Any] = [self._make()]
        self._client = self._clients[0]

    def stream(self, key: str, start: int, end: int, *, is_part: bool = False) -> Iterator[bytes]:
        """The bytes [start, end) of an object, in chunks; `is_part`: the range is one of several of a read."""
        # Only the stream is used: the client's readers would write to memory that a cancelled request must not touch.
        client = self._next_client() if is_part else self._client
        stream_of = client.get_object(
            self._bucket,
            key,
            object_info=_UNUSED,
            reader_constructor=lambda bucket, key, get_object_info, get_stream: get_stream,
        )
        stream: Iterator[bytes] = stream_of(start, end)
        return stream

    def _next_client(self) -> Any:
        with self._lock:
            index = self._num_part_requests % _NUM_CLIENTS
            if index == len(self._clients):
                self._clients.append(self._make())
            self._num_part_requests += 1
            return self._clients[index]

    def head(self, key: str) -> Any:
        """The object's metadata, with `size` and `etag`."""
        return self._client.head_object(self._bucket, key)

    def page(self, prefix: str, token: str | None) -> Page:
        """The objects whose key starts with `prefix`, from `token` on."""
        if token is None:
            stream = self._client.list_objects(self._bucket, prefix, "", _PAGE)
        else:
            stream = self._pages._from_state(self._client._client, self._bucket, prefix, "", _PAGE, token, False)
        batch = next(stream, None)
        return Page(
            batch.object_info if batch is not None else [], None if stream.complete else stream.continuation_token
        )

    @property
    def uploads(self) -> WriteClient:
        """The client that writes, created with the first upload; its errors are of type `failure`, too."""
        with self._lock:
            if self._uploads is None:
                self._uploads = WriteClient(self._location, self._settings, self.failure)
            return self._uploads

    def delete(self, key: str) -> None:
        """Remove an object."""
        self._client.delete_object(self._bucket, key)
