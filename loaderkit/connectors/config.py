"""The settings of stores: S3, retries, a cache on local disk, reading ahead."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, field_validator

from loaderkit._internal.config.settings import ByteSize, Duration, Model


class SourceArgs(Model):
    """The settings of every source."""

    kind: str = Field("", description="its name")
    limit: PositiveInt | None = Field(None, description="only the first N samples of the canonical order")


class S3Args(Model):
    """How to reach a bucket. Credentials are never part of the config: they come from where the AWS tools look for them."""

    region: str | None = Field(
        None, min_length=1, description="default: AWS_REGION, AWS_DEFAULT_REGION, the profile's, else us-east-1"
    )
    endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^/@\s]+/?$",
        description="of another store than AWS, as http://host:port; default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL",
    )
    path_style: bool | Literal["auto"] = Field(
        "auto", description="the bucket in the path instead of the host's name; auto: with an `endpoint` of one's own"
    )
    anonymous: bool = Field(False, description="requests without a signature, for public buckets")
    profile: str | None = Field(None, min_length=1, description="of the AWS configuration; default: AWS_PROFILE")
    part_size: ByteSize | Literal["auto"] = Field(
        "auto",
        description="longer reads are cut into parallel requests of this size; auto: 8 MiB, or 2 MiB if the store answers "
        "within 2 ms",
    )
    connections: PositiveInt = Field(32, le=512, description="requests at a time")
    max_attempts: PositiveInt = Field(10, description="for one request, within `retry.total`")
    md5: bool = Field(
        True,
        description="check whole objects whose etag is an MD5 digest; false where etags only look like one (SSE-KMS, SSE-C)",
    )

    @field_validator("part_size")
    @classmethod
    def _is_allowed(cls, value: int | Literal["auto"]) -> int | Literal["auto"]:
        if value != "auto" and not 5 * 2**20 <= value <= 5 * 2**30:
            raise ValueError(f"between 5MiB and 5GiB, as S3 has it, not {value}")
        return value


class RetryArgs(Model):
    """How temporary failures of a store are retried."""

    total: Duration = Field(60.0, description="how long one read is retried before it fails")
    timeout: Duration | None = Field(
        None,
        description="a request without progress for this long is cancelled and retried; null: 10 s, for files never",
    )


class CacheArgs(Model):
    """Objects of a slow store, kept on local disk."""

    dir: str | None = Field(
        None, min_length=1, description="a folder of a local disk, shared by all processes that name it; null: no cache"
    )
    size: ByteSize = Field(50 * 2**30, description="its maximum size; the least recently used entry is evicted first")
    verify: bool = Field(True, description="compare checksums of the bytes read from it")


class ReadAheadArgs(Model):
    """Reading ahead from a slow store (not with `executor: inline`, and never for local files)."""

    memory: ByteSize = Field(
        2 * 2**30,
        description="bound on the bytes held or being fetched; a block order holds about 2 x block x window x lanes / ranks",
    )
    requests: PositiveInt = Field(32, le=512, description="reads at a time")


class StoreArgs(SourceArgs):
    """The settings of every source that reads from a store."""

    s3: S3Args = Field(S3Args(), description="for `s3://`: `source.s3`")
    retry: RetryArgs = Field(RetryArgs(), description="when the store fails for a while: `source.retry`")
    cache: CacheArgs = Field(CacheArgs(), description="of slow stores, on local disk: `source.cache`")
    read_ahead: ReadAheadArgs = Field(ReadAheadArgs(), description="of slow stores, into memory: `source.read_ahead`")
