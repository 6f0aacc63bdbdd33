"""The one place that imports s3torchconnector: what is used of it, as plain functions."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from loaderkit.connectors.s3.config import Reach, S3Location
from loaderkit.errors import MissingExtraError

_PAGE = 1000
_UNUSED = object()
# A client of the package has half as many threads that receive as the machine has CPUs, at least one: with one alone, a store
# nearby has more to give than is taken.
_NUM_CLIENTS = 2 if 2 <= (os.cpu_count() or 1) < 4 else 1


class Page(NamedTuple):
    """Some objects of a listing, and what to ask with for the next; `token` is None after the last."""

    objects: list[Any]
    token: str | None


class Client:
    """A client for one bucket. It belongs to the process that made it. Raises MissingExtraError.

    On small machines it is two of the package's, the second of which is made when parts of a long read are first asked for.
    """

    def __init__(self, place: S3Location, reach: Reach) -> None:
        try:
            from s3torchconnector import S3ClientConfig, S3Exception
            from s3torchconnector._s3client import S3Client
            from s3torchconnectorclient._mountpoint_s3_client import ListObjectStream
        except ImportError as error:
            raise MissingExtraError(
                f"s3:// needs the package s3torchconnector ({error}): pip install 'loaderkit[s3]'"
            ) from error
        self.failure: type[Exception] = S3Exception
        self._bucket = place.bucket
        self._pages = ListObjectStream
        self._lock = threading.Lock()
        self._num_parts = 0
        config = S3ClientConfig(
            part_size=reach.part_size,
            unsigned=reach.anonymous,
            force_path_style=reach.path_style,
            max_attempts=1,
            profile=reach.profile,
        )
        self._make = partial(S3Client, reach.region, endpoint=reach.endpoint, s3client_config=config)
        self._clients: list[Any] = [self._make()]
        self._client = self._clients[0]

    def stream(self, key: str, start: int, end: int, *, is_part: bool = False) -> Iterator[bytes]:
        """The bytes [start, end) of an object, in pieces; `is_part`: of a read that is more of them."""
        # The client's readers write to memory that a request given up must not touch any more: the stream alone is wanted.
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
            at = self._num_parts % _NUM_CLIENTS
            if at == len(self._clients):
                self._clients.append(self._make())
            self._num_parts += 1
            return self._clients[at]

    def head(self, key: str) -> Any:
        """Has `size` and `etag`."""
        return self._client.head_object(self._bucket, key)

    def page(self, prefix: str, token: str | None) -> Page:
        """The objects whose key starts with `prefix`, from where `token` points on."""
        if token is None:
            stream = self._client.list_objects(self._bucket, prefix, "", _PAGE)
        else:
            stream = self._pages._from_state(self._client._client, self._bucket, prefix, "", _PAGE, token, False)
        batch = next(stream, None)
        return Page(
            batch.object_info if batch is not None else [], None if stream.complete else stream.continuation_token
        )

    def put(self, key: str, data: memoryview, piece_bytes: int, check_cancelled: Callable[[], None]) -> None:
        """Create or replace an object; it appears when all of it is there. `check_cancelled` is called from piece to piece."""
        # Not the client's writer, which is a file: collected as garbage after a failure it would complete the upload.
        stream = self._client._client.put_object(self._bucket, key)
        for start in range(0, len(data), piece_bytes):
            stream.write(bytes(data[start : start + piece_bytes]))
            check_cancelled()
        stream.close()

    def delete(self, key: str) -> None:
        """Remove an object."""
        self._client.delete_object(self._bucket, key)
