"""A bucket's location and the client's settings, from the config, the environment and the AWS configuration."""

from __future__ import annotations

import configparser
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loaderkit.connectors.config import S3Args
from loaderkit.errors import ConfigError

# A bucket's name, or the ARN of an access point, which contains a slash.
_URL = re.compile(r"s3://(arn:[^/]+/[^/]+|[^/]*)(?:/(.*))?", re.DOTALL | re.IGNORECASE)
_ENDPOINT = re.compile(r"https?://[^/@\s]+/*")
_DEFAULT_REGION = "us-east-1"
_PART_BYTES = 8 << 20


@dataclass(frozen=True)
class S3Location:
    """A bucket and a folder in it; `prefix` is empty or ends with a slash."""

    bucket: str
    prefix: str

    @classmethod
    def of(cls, url: str) -> S3Location:
        """From `s3://bucket/prefix`, taken literally: "%20" and "+" are those characters. Raises ConfigError."""
        match = _URL.fullmatch(url)
        if match is None or not match[1]:
            raise ConfigError(f"source.url {url!r}: expected s3://bucket or s3://bucket/prefix")
        bucket, prefix = match[1], match[2] or ""
        if "@" in bucket:
            raise ConfigError(
                f"source.url: s3://...@{bucket.rpartition('@')[2]}: a URL must not hold credentials, as it is printed and "
                "saved; put them where the AWS tools look for them (AWS_ACCESS_KEY_ID, ~/.aws/credentials, a role)"
            )
        return cls(bucket, prefix if not prefix or prefix.endswith("/") else prefix + "/")


@dataclass(frozen=True)
class ClientSettings:
    """The settings of a client. They hold no secret: the client finds credentials itself, in the process that uses it."""

    region: str
    endpoint: str | None
    path_style: bool
    anonymous: bool
    profile: str | None
    part_size: int

    @classmethod
    def of(cls, args: S3Args, environment: Mapping[str, str]) -> ClientSettings:
        """The settings, with what the config leaves open filled in. Raises ConfigError."""
        endpoint = (
            args.endpoint or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or None
        )
        if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
            # Not quoted, as it may hold a password.
            raise ConfigError(
                "source.s3.endpoint, or AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL in the environment: expected "
                "http://host:port or https://host, without user, password and path; credentials belong into "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials"
            )
        region = (
            args.region
            or environment.get("AWS_REGION")
            or environment.get("AWS_DEFAULT_REGION")
            or _region_of_profile(args.profile or environment.get("AWS_PROFILE") or None, environment)
        )
        path_style = args.path_style
        if path_style == "auto":
            path_style = endpoint is not None and ".amazonaws.com" not in endpoint
        return cls(
            region or _DEFAULT_REGION,
            endpoint.rstrip("/") if endpoint is not None else None,
            path_style,
            args.anonymous,
            args.profile,  # the client reads AWS_PROFILE itself, since keys in the environment take precedence over it
            _PART_BYTES if args.part_size == "auto" else args.part_size,
        )


def _region_of_profile(profile: str | None, environment: Mapping[str, str]) -> str | None:
    """The region that ~/.aws/config gives a profile; None if it has none or cannot be read."""
    path = Path(environment.get("AWS_CONFIG_FILE") or "~/.aws/config")
    aws_config = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        aws_config.read(path.expanduser(), encoding="utf-8")
    except (configparser.Error, OSError, RuntimeError, UnicodeDecodeError):
        return None
    for section in (f"profile {profile}", profile) if profile is not None else ("default",):
        if section is not None and aws_config.has_option(section, "region"):
            return aws_config.get(section, "region")
    return None
