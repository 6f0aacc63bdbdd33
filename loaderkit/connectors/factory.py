"""From a URL and its settings to a connector: file, S3 or fsspec, with retries and a cache around it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from loaderkit.connectors.backoff import RetryPolicy
from loaderkit.connectors.base import Connector
from loaderkit.connectors.config import RetryArgs, StoreArgs
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.layers.retry import RetryConnector
from loaderkit.errors import ConfigError

SCHEMES = ("file", "memory", "s3", "gs", "gcs", "az", "abfs", "http", "https", "hf")


_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_TIMEOUT_S = 10.0
_NUM_FILE_ATTEMPTS = 5  # within 3 s: the kernel has waited already, and a broken disk stays broken


def open_connector(url: str, given: Mapping[str, Connector], args: StoreArgs | None = None) -> Connector:
    """The connector of a URL or path: one of `given` by its scheme, else a built-in. Raises ConfigError, MissingExtraError."""
    args = args or StoreArgs()
    match = _URL.fullmatch(url)
    scheme, rest = (match[1].lower(), match[2]) if match else ("file", url)
    if scheme in given:
        connector = given[scheme]
        if args.retry != RetryArgs():
            connector = RetryConnector(connector, _policy(args, 10), args.retry.timeout, owns_inner=False)
        return _cached(connector, args, owns_inner=connector not in given.values())
    return _cached(_built_in(url, scheme, rest, args), args)


def _built_in(url: str, scheme: str, rest: str, args: StoreArgs) -> Connector:
    if scheme == "file":
        if "\0" in rest:
            raise ConfigError(f"source.url {url!r}: a path has no null bytes")
        return RetryConnector(FileConnector(rest), _policy(args, _NUM_FILE_ATTEMPTS), args.retry.timeout)
    if scheme == "memory":
        raise ConfigError(
            f"source.url {url!r}: memory:// needs a connector with the objects: "
            'loaderkit.build(..., connectors={"memory": MemoryConnector({...})})'
        )
    if scheme == "s3":
        from loaderkit.connectors.s3 import S3Connector  # a tenth of the start-up time, needed only here

        return S3Connector(url, args.s3, args.retry)
    if scheme.removeprefix("fsspec+") in SCHEMES or scheme.startswith("fsspec+"):
        from loaderkit.connectors.fsspec import FsspecConnector  # late, like that of S3

        if "::" in rest and not scheme.startswith("fsspec+"):  # else a folder's name could name another store
            raise ConfigError(
                f"source.url: '::' chains filesystems of fsspec: write fsspec+{scheme}://... if that is intended"
            )
        connector = FsspecConnector(url[len("fsspec+") :] if scheme.startswith("fsspec+") else url)
        return RetryConnector(connector, _policy(args, 10), args.retry.timeout or _TIMEOUT_S)
    raise ConfigError(
        f"source.url {url!r}: no connector for {scheme}://; expected one of {', '.join(SCHEMES)}, or fsspec+{scheme}:// for "
        "a filesystem of fsspec"
    )


def _cached(connector: Connector, args: StoreArgs, *, owns_inner: bool = True) -> Connector:
    if args.cache.dir is None:
        return connector
    from loaderkit.connectors.layers.cache import CacheConnector  # late, like that of S3

    return CacheConnector(connector, args.cache, owns_inner=owns_inner)


def _policy(args: StoreArgs, max_attempts: int) -> RetryPolicy:
    return RetryPolicy(args.retry.total, max_attempts)
