"""Stores that are reached through fsspec: `gs://`, `az://`, `http(s)://`, `hf://`, `memory://` and others.

Each scheme needs its package (gcsfs, adlfs, aiohttp, huggingface_hub), which takes credentials and other settings from the
environment and its configuration files.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO

from loaderkit._internal.text import warn
from loaderkit.connectors.base import BulkConnector, ConnectorTraits, ObjectInfo
from loaderkit.connectors.fsspec_listing import UNUSUAL_PART_OF_LINK, found_below, key_below, name_of_link
from loaderkit.connectors.writing import Parts, WholeWriter, WriteCounts
from loaderkit.errors import (
    AccessDeniedError,
    ConfigError,
    ConnectorError,
    LoaderkitError,
    MissingExtraError,
    ObjectChangedError,
    ObjectNotFoundError,
    ShortReadError,
    TemporaryError,
    ThrottledError,
    UnreachableError,
)

_PACKAGES = {
    "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs", "adl": "adlfs", "hf": "huggingface_hub",
    "http": "aiohttp", "https": "aiohttp", "sftp": "paramiko", "ssh": "paramiko", "smb": "smbprotocol", "oci": "ocifs",
    "hdfs": "pyarrow", "webhdfs": "requests", "dropbox": "dropboxdrivefs", "oss": "ossfs",
}  # fmt: skip
_TAGS = ("etag", "ETag", "md5Hash", "content_md5", "md5", "sha256", "generation", "blob_id", "checksum")
_TIMES = ("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "created", "modified")
_NUM_STATS = 16  # concurrent `stat` calls
_EXPLANATIONS: dict[type[ConnectorError], str] = {
    ObjectNotFoundError: "there is no such object; was it moved or deleted?",
    AccessDeniedError: "the store denies access: check the credentials",
    ThrottledError: "the store asks for fewer requests: lower source.read_ahead.requests",
    UnreachableError: "the connection failed",
}
_NO_FILE = re.compile(r"[?#][^/]*\Z")  # the sorting links of an index page
_UNUSUAL_PART = re.compile(r"(?:\A|/)\.{0,2}(?:/|\Z)")
_PART_BYTES = 8 << 20
# Filesystems that show a file under its name while it is being written; they rename.
_SHOWN_WHILE_WRITTEN = ("file", "local", "sftp", "ssh", "smb", "hdfs", "webhdfs")
_TEMPORARY_NAME = re.compile(r"(?:\A|/)\.[0-9a-f]{16}\.tmp\Z")
_USER = re.compile(r"(://)[^/@]*@")


class FsspecConnector(BulkConnector):
    """The objects below a URL, through the filesystem that fsspec has for its scheme; each process opens its own.

    The etag is compared after a read, if the store has etags, because fsspec cannot request a range of a given version.
    Raises MissingExtraError if fsspec or the package of the scheme is not installed, and ConfigError for `reference://`.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._scheme = url.partition("://")[0].lower()
        self._is_web = self._scheme in ("http", "https")
        self._name = _USER.sub(r"\1", url)
        schemes = {link.partition("://")[0].lower() for link in url.split("::")}
        self.traits = ConnectorTraits(is_remote=True, store=self._name, is_in_process="memory" in schemes)
        if "reference" in schemes:
            raise ConfigError(
                f"source.url {self._name!r}: a reference file is data, and could redirect reads to other stores and to local "
                "files; give the URL of the data itself"
            )
        self._lock = threading.Lock()
        self._system: Any = None
        self._root = ""
        self._pid = 0
        self._num_requests = self._fetched_bytes = 0
        self._counts = WriteCounts()
        self._open()

    def __reduce__(self) -> tuple[Any, ...]:
        return FsspecConnector, (self._url,)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose key starts with `prefix`, ordered by its UTF-8 bytes. Links that lead nowhere, or to folders, are
        left out with a warning, except those to folders of a web page."""
        system, root = self._open()
        folder = prefix.rpartition("/")[0]
        if _UNUSUAL_PART.search(folder) and folder:
            return
        self._count(0)
        try:
            listing, missing = found_below(system, f"{root}/{folder}".rstrip("/"))
        except FileNotFoundError:
            return
        except Exception as error:
            raise self._translated(prefix, error) from None
        infos, unsized = [], []
        for path, details in listing.items():
            key = self._key_of(root, path)
            kind = details.get("type", "file")
            if kind == "directory" or not key.startswith(prefix) or not key or key.endswith("/"):
                continue
            if kind == "file" and details.get("size") is not None:
                infos.append(ObjectInfo(key, int(details["size"]), _tag_of(details)))
            elif not (self._is_web and _NO_FILE.search(key)):
                unsized.append(key)
        lost = [self._key_of(root, path) for path in missing]
        if unsized:  # web servers list names without sizes, and others list links
            with ThreadPoolExecutor(_NUM_STATS, thread_name_prefix="loaderkit-stat") as pool:
                stated = [*pool.map(self._stat_if_there, unsized)]
            lost += [key for key, info in zip(unsized, stated, strict=True) if info is None]
            infos += filter(None, stated)
        if lost:
            warn(
                f"below {self.describe(prefix)} what is listed and is no file is left out ({len(lost)}, such as {lost[0]!r}): "
                "a link that leads nowhere or to a folder, or a name that fsspec reads otherwise than the server wrote it"
            )
        once = {info.key: info for info in infos}  # which a page may link to twice
        yield from sorted(once.values(), key=lambda info: info.key.encode("utf-8", "surrogateescape"))

    def _key_of(self, root: str, path: str) -> str:
        """The key of a listed path; of a link on a web page the name that the file has, so that folders' names, which may be
        classes, are those of a local copy."""
        return name_of_link(root, path) if self._is_web else key_below(root, path)

    def _stat_if_there(self, key: str) -> ObjectInfo | None:
        try:
            return self.stat(key)
        except ObjectNotFoundError:  # a dead link on the page
            return None

    def stat(self, key: str) -> ObjectInfo:
        """Size in bytes and etag of one object; the etag is empty if the store has neither tags nor times."""
        details = self._details(key)
        return ObjectInfo(key, self._size_of(key, details), _tag_of(details))

    def modified_s(self, key: str) -> float | None:
        """When the object was last written, as far as the filesystem says."""
        return next(filter(None, map(_seconds_of, map(self._details(key).get, _TIMES))), None)

    def _details(self, key: str) -> Any:
        """What the filesystem says about an object."""
        system, path = self._path(key)
        self._count(0)
        try:
            system.invalidate_cache(system._parent(path))
            details = system.info(path)
        except Exception as error:
            raise self._translated(key, error) from None
        if details.get("type", "file") != "file":
            raise ObjectNotFoundError(f"{self.describe(key)} is a directory, not an object")
        return details

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        """Fill `buffer` with the object's bytes from `start` on, or raise; see `Connector.read_into`."""
        if start < 0:
            raise ShortReadError(f"{self.describe(key)}: the offset {start} is negative")
        system, path = self._path(key)
        data, wanted = b"", len(buffer)
        if wanted:
            self._count(wanted)
            try:
                data = system.cat_file(path, start=start, end=start + wanted)
            except Exception as error:
                translated = self._translated(key, error)
                if isinstance(translated, (ObjectNotFoundError, AccessDeniedError, TemporaryError)):
                    raise translated from None
                self._check(key, etag)  # some stores answer a range past the end with an unspecific error
                raise self._cut_short(key, 0, wanted, start, translated) from None
        if etag or len(data) != wanted or not wanted:
            self._check(key, etag)
        if len(data) < wanted:
            raise self._cut_short(key, len(data), wanted, start, None)
        if len(data) > wanted:
            raise ConnectorError(
                f"{self.describe(key)}: the server sent {len(data)} bytes where {wanted} were requested: it does not support "
                "range requests"
            )
        buffer[:] = data

    def writes(self) -> FsspecConnector | None:
        """The connector itself; None for web servers."""
        return None if self._is_web else self

    def part_bytes_of(self, size: int) -> int:
        """8 MiB."""
        return _PART_BYTES

    def create(self, key: str, size: int) -> WholeWriter:
        """Begin to write an object of `size` bytes. They are kept in a file without a name in TMPDIR until `commit`, because
        filesystems of fsspec take an object's bytes in order and at once."""
        self._path(key)
        where = self.describe(key)
        return WholeWriter(
            where, Parts(where, size, _PART_BYTES), lambda file: self._upload(key, file, size), self._counts
        )

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        """Create or replace an object by one call."""
        content = bytes(data)
        with self._counts.timed("committing_s", len(content)):
            return self._send(key, len(content), lambda system, path: system.pipe_file(path, content))

    def _upload(self, key: str, file: BinaryIO, size: int) -> ObjectInfo:
        name = f"/proc/self/fd/{file.fileno()}"
        with self._counts.timed("committing_s"):
            if size > _PART_BYTES and self._scheme != "memory":
                return self._send(key, size, lambda system, path: system.put_file(name, path))
            with open(name, "rb") as whole:
                content = whole.read()
            return self._send(key, size, lambda system, path: system.pipe_file(path, content))

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is no error."""
        system, path = self._path(key)
        self._count(0)
        try:
            system.rm_file(path)
        except FileNotFoundError:
            pass
        except Exception as error:
            raise self._translated(key, error) from None

    def rename(self, prefix: str, new_prefix: str) -> bool:
        """False: most filesystems copy, one object after the other."""
        return False

    def sync(self, prefix: str) -> None:
        """Nothing to do: fsspec has no such call."""

    def clear(self, prefix: str, *, deep: bool = True) -> None:
        """Remove temporary objects and the directory, if there is one and nothing else is in it."""
        folder = f"{prefix.removesuffix('/')}/" if prefix else ""
        keys = [info.key for info in self.list(folder)]
        temporary = [
            key for key in keys if _TEMPORARY_NAME.search(key) and (deep or "/" not in key.removeprefix(folder))
        ]
        for key in temporary:
            self.delete(key)
        if prefix and len(temporary) == len(keys):
            system, path = self._path(prefix.removesuffix("/"))
            with suppress(Exception):  # most stores have no directories
                system.rm(path, recursive=True)

    def describe(self, key: str) -> str:
        """The object's URL, without user and password."""
        return f"{self._name.rstrip('/')}/{key}" if not self._name.endswith("://") else f"{self._name}{key}"

    def counters(self) -> dict[str, float]:
        """Requests made, bytes fetched, and what was written."""
        counts = {"num_requests": self._num_requests, "fetched_bytes": self._fetched_bytes}
        return counts | self._counts.counters()

    def close(self) -> None:
        """Drop the filesystem; the next call opens it again."""
        with self._lock:
            self._system = None

    # --------------------------------------------------------------------------------------------------------- parts

    def _open(self) -> tuple[Any, str]:
        """The filesystem of this process, and the path of the URL in it."""
        with self._lock:
            if self._system is None or self._pid != os.getpid():
                try:
                    from fsspec.core import url_to_fs
                except ImportError as error:
                    raise MissingExtraError(
                        f"{self._scheme}:// needs the package fsspec ({error}): pip install 'loaderkit[fsspec]'"
                    ) from error
                try:
                    self._system, root = url_to_fs(self._url, use_listings_cache=False, skip_instance_cache=True)
                except ImportError as error:
                    package = _PACKAGES.get(self._scheme, "that fsspec names")
                    raise MissingExtraError(
                        f"{self._scheme}:// needs the package {package}: pip install {package} ({error})"
                    ) from error
                except LoaderkitError:
                    raise
                except Exception as error:
                    raise ConfigError(f"source.url {self._name!r}: fsspec cannot open it: {_text_of(error)}") from None
                self._root = root.rstrip("/")
                self._pid = os.getpid()
            return self._system, self._root

    def _path(self, key: str) -> tuple[Any, str]:
        unusual_part = UNUSUAL_PART_OF_LINK if self._is_web else _UNUSUAL_PART
        if unusual_part.search(key) or "\0" in key:
            raise ObjectNotFoundError(f"{key!r} is no key: a key has no '.', '..' and empty parts")
        try:
            key.encode()
        except UnicodeEncodeError:
            raise ObjectNotFoundError(f"{key!r} is no key: it is not Unicode text") from None
        system, root = self._open()
        return system, f"{root}/{key}"

    def _send(self, key: str, size: int, send: Callable[[Any, str], None]) -> ObjectInfo:
        """Create or replace an object by `send(filesystem, path)`; after a failure it is what it was, or gone."""
        system, path = self._path(key)
        target = path
        if self._scheme in _SHOWN_WHILE_WRITTEN:
            target = f"{system._parent(path)}/.{secrets.token_hex(8)}.tmp"
            if system.isdir(path):  # the file would be moved into it
                raise ConnectorError(f"{self.describe(key)} is a directory, so no object can have this name")
        before = self._tag_if_there(key)
        self._count(0)
        try:
            if "/" in path:
                system.makedirs(system._parent(path), exist_ok=True)
            send(system, target)
            if target != path:
                system.mv(target, path)
            info = self.stat(key)
            if info.size != size:
                raise TemporaryError(f"{self.describe(key)}: the store kept {info.size} of {size} bytes")
        except Exception as error:
            with suppress(Exception):
                if target != path:
                    system.rm_file(target)
                elif self._tag_if_there(key) != before:  # a part of it, which some filesystems leave
                    system.rm_file(path)
            raise self._translated(key, error) from None
        return info

    def _tag_if_there(self, key: str) -> str | None:
        try:
            return self.stat(key).etag
        except ConnectorError:
            return None

    def _check(self, key: str, etag: str | None) -> None:
        current = self.stat(key).etag
        if etag and etag != current:
            raise ObjectChangedError(
                f"{self.describe(key)} was replaced since it was listed (then {etag}, now {current}); start again, so that "
                "it is listed again"
            )

    def _cut_short(
        self, key: str, num_read: int, wanted: int, start: int, store_error: ConnectorError | None
    ) -> ConnectorError:
        size = self.stat(key).size
        if size >= start + wanted:
            return store_error or TemporaryError(
                f"{self.describe(key)}: the store sent {num_read} of the {wanted} bytes requested at offset {start}, of {size}"
            )
        return ShortReadError(
            f"{self.describe(key)} ended after {num_read} of the {wanted} bytes requested at offset {start}: its size is "
            f"{size}; it is truncated, or its index is stale"
        )

    def _size_of(self, key: str, details: Any) -> int:
        size = details.get("size")
        if size is None:
            raise ConnectorError(f"{self.describe(key)}: the server gives no size, so ranges cannot be read")
        return int(size)

    def _translated(self, key: str, error: Exception) -> ConnectorError:
        """loaderkit's error, without the original's text: it may quote a URL that holds a signature."""
        if isinstance(error, ConnectorError):
            return error
        where, status = self.describe(key), _status_of(error)
        shown = f" ({type(error).__name__}{f', status {status}' if status else ''})"
        reason = error.strerror if isinstance(error, OSError) and error.strerror else ""
        if isinstance(error, NotImplementedError):
            reason = "this filesystem of fsspec cannot do that"
        kind = _kind_of(error, status)
        return kind(f"{where}: {_EXPLANATIONS.get(kind) or reason or 'fsspec failed'}{shown}")

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._num_requests += 1
            self._fetched_bytes += num_bytes


def _status_of(error: Exception) -> int:
    """The HTTP status that an exception of any HTTP library carries, or 0 if it carries none."""
    values = (str(getattr(error, name, "")) for name in ("status", "code", "status_code"))
    return next((int(value) for value in values if value.isdigit()), 0)


def _kind_of(error: Exception, status: int) -> type[ConnectorError]:
    number = error.errno if isinstance(error, OSError) else None
    is_transport_error = isinstance(error, ConnectionError) or type(error).__module__.partition(".")[0] == "aiohttp"
    kinds: dict[type[ConnectorError], bool] = {
        ObjectNotFoundError: isinstance(error, (FileNotFoundError, IsADirectoryError))
        or number in (errno.ENOENT, errno.ENAMETOOLONG, errno.ENOTDIR)
        or status in (404, 410),
        AccessDeniedError: isinstance(error, PermissionError) or status in (401, 403),
        ThrottledError: status in (429, 503),
        UnreachableError: is_transport_error and not status,
        TemporaryError: status >= 500 or (isinstance(error, OSError) and not status),
    }
    return next((kind for kind, fits in kinds.items() if fits), ConnectorError)


def _tag_of(details: Any) -> str:
    """A value that changes with the object's content, as far as the store gives one."""
    for name in _TAGS:
        if details.get(name):
            return str(details[name]).strip('"')
    for name in _TIMES:
        if details.get(name):
            value = details[name]
            return f"{value.timestamp() if hasattr(value, 'timestamp') else value}-{details.get('size')}"
    return ""


def _seconds_of(value: Any) -> float | None:
    """Seconds since 1970 of a number, a date with its zone, or a text of HTTP or ISO 8601; None for any other value."""
    if isinstance(value, str):
        try:
            value = parsedate_to_datetime(value) if "," in value else datetime.fromisoformat(value)
        except ValueError:
            return None
    if isinstance(value, datetime):
        return value.timestamp() if value.tzinfo is not None else value.replace(tzinfo=UTC).timestamp()
    return float(value) if isinstance(value, (int, float)) and value > 0 else None


def _text_of(error: Exception) -> str:
    return _USER.sub(r"\1", str(error)) or type(error).__name__
