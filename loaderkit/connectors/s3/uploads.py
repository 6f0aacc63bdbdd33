"""The only module that imports botocore. It writes to a bucket in parts, because s3torchconnector writes whole objects only.

The streams of s3torchconnector take an object's bytes in order, hold them in buffers of their own, and fail as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from loaderkit.connectors.s3.config import ClientSettings, S3Location
from loaderkit.errors import MissingExtraError

_CONNECT_S = 10
_READ_S = 60  # of one read or write on a socket; the call's own timeout comes first
_NUM_CONNECTIONS = 512  # kept open at most; `connections` bounds those in use


class Upload(NamedTuple):
    """A multipart upload that was begun."""

    key: str
    upload_id: str


def _ask_before_sending(params: dict[str, Any], **others: Any) -> None:
    """Let the store refuse a part before its bytes are on the way, which would break the connection without the reason."""
    params["headers"]["Expect"] = "100-continue"


@cache
def _descriptions() -> Any:
    """What botocore knows of S3, read once a process: a client then takes 30 ms and not 180."""
    from botocore.loaders import create_loader

    return create_loader()


class WriteClient:
    """A client that writes to one bucket. Raises MissingExtraError. Failed requests raise `failure` with code and status."""

    def __init__(self, location: S3Location, settings: ClientSettings, failure: Callable[[str], Exception]) -> None:
        try:
            import botocore.session
            from botocore import UNSIGNED, handlers
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError as error:
            raise MissingExtraError(
                f"writing to s3:// needs the package botocore ({error}): pip install 'loaderkit[s3]'"
            ) from error
        self._bucket = location.bucket
        self._failure = failure
        self._client_error, self._other_error = ClientError, BotoCoreError
        config = Config(
            signature_version=UNSIGNED if settings.anonymous else None,
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            retries={"total_max_attempts": 1},
            max_pool_connections=_NUM_CONNECTIONS,
            s3={"addressing_style": "path" if settings.path_style else "auto"},
            # Not in a trailer, which other stores refuse; TLS, or without it the signed digest of the body, protects the bytes.
            request_checksum_calculation="when_required",
        )
        with self._translating():
            session = botocore.session.Session(profile=settings.profile)
            session.register_component("data_loader", _descriptions())
            self._client: Any = session.create_client(
                "s3", region_name=settings.region, endpoint_url=settings.endpoint, config=config
            )
        # As a file a part would be sent in pieces of 16 KiB, each under the GIL, and hashed from copies.
        events = self._client.meta.events
        events.unregister(
            "before-parameter-build.s3.UploadPart", getattr(handlers, "convert_body_to_file_like_object", None)
        )
        events.register("before-call.s3.UploadPart", _ask_before_sending)

    @contextmanager
    def _translating(self) -> Iterator[None]:
        """Raise botocore's errors as `failure`, in the words by which they are recognised."""
        try:
            yield
        except self._client_error as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = error.response.get("Error", {}).get("Code", "")
            raise self._failure(f"<Code>{code}</Code> http_status: {status:03}") from None
        except self._other_error as error:
            raise self._failure(f"botocore.{type(error).__name__}") from None

    def put(self, key: str, data: bytes) -> str:
        """Create or replace an object by one request; its etag."""
        with self._translating():
            return str(self._client.put_object(Bucket=self._bucket, Key=key, Body=data)["ETag"])

    def begin(self, key: str) -> Upload:
        """Begin a multipart upload."""
        with self._translating():
            return Upload(key, self._client.create_multipart_upload(Bucket=self._bucket, Key=key)["UploadId"])

    def part(self, upload: Upload, number: int, data: bytes) -> str:
        """Upload a part, counted from 1; its etag."""
        with self._translating():
            answer = self._client.upload_part(
                Bucket=self._bucket, Key=upload.key, UploadId=upload.upload_id, PartNumber=number, Body=data
            )
            return str(answer["ETag"])

    def complete(self, upload: Upload, etags: list[str]) -> str:
        """Make the object of its parts, whose etags are given in order; its etag."""
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
        with self._translating():
            answer = self._client.complete_multipart_upload(
                Bucket=self._bucket, Key=upload.key, UploadId=upload.upload_id, MultipartUpload={"Parts": parts}
            )
            return str(answer["ETag"])

    def abort(self, upload: Upload) -> None:
        """Drop an upload and its parts."""
        with self._translating():
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=upload.key, UploadId=upload.upload_id)

    def unfinished(self, prefix: str) -> list[Upload]:
        """The uploads neither completed nor aborted of keys that start with `prefix`."""
        with self._translating():
            pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=prefix)
            found = [upload for page in pages for upload in page.get("Uploads", [])]
        return [Upload(upload["Key"], upload["UploadId"]) for upload in found if upload["Key"].startswith(prefix)]
