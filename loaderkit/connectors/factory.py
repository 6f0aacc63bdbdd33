"""Opens a connector from a URL and its settings: for files, S3, fsspec or of a package, with retries and a cache around
it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from loaderkit._internal.config.diagnostics import nearest
from loaderkit._internal.extensions import Registry
from loaderkit.connectors.base import Connector
from loaderkit.connectors.config import RetryArgs, StoreArgs
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.layers.retry_layer import RetryConnector
from loaderkit.connectors.retries import RetryPolicy
from loaderkit.errors import ConfigError

ConnectorFactory = Callable[[str, StoreArgs], Connector]
"""(URL with its scheme, settings of the source) -> the connector whose keys lie below the URL. Raises ConfigError."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_TIMEOUT_S = 10.0
_NUM_FILE_ATTEMPTS = 5  # within 3 s: the kernel has waited already, and a broken disk stays broken


def open_connector(url: str, given: Mapping[str, Connector], args: StoreArgs | None = None) -> Connector:
    """The connector of a URL or path: from `given` by its scheme, else one of ours, else one of a package or of the
    program. Raises ConfigError, MissingExtraError."""
    args = args or StoreArgs()
    scheme = scheme_of(url)
    if scheme in given:
        connector = given[scheme]
        if args.retry != RetryArgs():
            connector = RetryConnector(connector, _policy(args, 10), args.retry.timeout, owns_inner=False)
        return _cached(connector, args, owns_inner=connector not in given.values())
    if scheme.startswith("fsspec+"):
        return _cached(_open_fsspec(url.partition("+")[2], args), args)
    if CONNECTORS.is_ours(scheme):
        return _cached(CONNECTORS[scheme](url, args), args)
    if scheme not in CONNECTORS:
        raise ConfigError(
            f"source.url {url!r}: no connector for {scheme}://; {nearest(scheme, CONNECTORS)}; "
            f"for a filesystem of fsspec write fsspec+{scheme}://; commands find a class of yours by the entry point of a "
            "package"
        )
    connector = RetryConnector(CONNECTORS[scheme](url, args), _policy(args, 10), args.retry.timeout)
    return _cached(connector, args, store=url)  # what it calls its objects in messages may be only their keys


def scheme_of(url: str) -> str:
    """The scheme of a URL in lower case; "file" for a path."""
    match = _URL.fullmatch(url)
    return match[1].lower() if match else "file"


def _open_file(url: str, args: StoreArgs) -> Connector:
    match = _URL.fullmatch(url)
    path = match[2] if match else url
    if "\0" in path:
        raise ConfigError(f"source.url {url!r}: a path has no null bytes")
    return RetryConnector(FileConnector(path), _policy(args, _NUM_FILE_ATTEMPTS), args.retry.timeout)


def _no_memory(url: str, args: StoreArgs) -> Connector:
    raise ConfigError(
        f"source.url {url!r}: memory:// needs a connector with the objects: "
        'loaderkit.build(..., connectors={"memory": MemoryConnector({...})})'
    )


def _open_s3(url: str, args: StoreArgs) -> Connector:
    from loaderkit.connectors.s3 import S3Connector  # a tenth of the start-up time, needed only here

    return S3Connector(url, args.s3, args.retry)


def _open_known_fsspec(url: str, args: StoreArgs) -> Connector:
    scheme, _, rest = url.partition("://")
    if "::" in rest:  # else a folder's name could name another store
        raise ConfigError(
            f"source.url: '::' chains filesystems of fsspec: write fsspec+{scheme}://... if that is intended"
        )
    return _open_fsspec(url, args)


def _open_fsspec(url: str, args: StoreArgs) -> Connector:
    from loaderkit.connectors.fsspec import FsspecConnector  # late, like the import for S3

    return RetryConnector(FsspecConnector(url), _policy(args, 10), args.retry.timeout or _TIMEOUT_S)


def _is_factory(item: Any) -> bool:
    """True for what can be called with a URL and settings, as far as its parameters are known."""
    if not callable(item):
        return False
    try:
        signature = inspect.signature(item, follow_wrapped=False)
    except Exception:  # what is built in tells none, and an annotation may be of a name that is not there
        return True
    try:
        signature.bind("", StoreArgs())
    except TypeError:
        return False
    return True


CONNECTORS: Registry[ConnectorFactory] = Registry(
    "connectors",
    "connector",
    "a class or function that is called with (url, settings), a text and a loaderkit.extend.StoreArgs, and gives a connector, "
    "as in `def __init__(self, url, settings=None)`",
    _is_factory,
    {
        "file": _open_file,
        "memory": _no_memory,
        "s3": _open_s3,
        **dict.fromkeys(("gs", "gcs", "az", "abfs", "http", "https", "hf"), _open_known_fsspec),
    },
)


def _cached(connector: Connector, args: StoreArgs, *, owns_inner: bool = True, store: str | None = None) -> Connector:
    if args.cache.dir is None:
        return connector
    from loaderkit.connectors.layers.cache import CacheConnector  # late, like the import for S3

    return CacheConnector(connector, args.cache, owns_inner=owns_inner, store=store)


def _policy(args: StoreArgs, max_attempts: int) -> RetryPolicy:
    return RetryPolicy(args.retry.total, max_attempts)
