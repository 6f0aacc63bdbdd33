"""The footers of Parquet files, read by one or two ranges, and kept in the user's cache directory for remote stores."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from loaderkit._internal.system.user_cache import keep, path_in_cache
from loaderkit.connectors.base import Connector, ObjectInfo, traits_of
from loaderkit.errors import FormatError

_VERSION = 1
_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_END_BYTES = 8  # the length of the footer, and the magic bytes
_FIRST_BYTES = 64 << 10  # read at once: most footers are shorter
_DIGEST_BYTES = 16


def load_footer(connector: Connector, info: ObjectInfo, cache_dir: Path | None, *, checks_begin: bool = False) -> bytes:
    """The footer of a file, with its length and the magic bytes behind it. `checks_begin`: also check the file's first
    bytes, which takes one more read.

    The footer of an object in a remote store comes from `cache_dir` if a copy there has the object's size and etag;
    else a copy is kept, and a failure to keep it is no error. Raises FormatError naming the file, and what the
    connector raises.
    """
    if checks_begin:
        _check_begin(connector, info)
    if cache_dir is None or not traits_of(connector).is_remote:
        return _read(connector, info)
    path = path_in_cache(cache_dir, "parquet-footers", connector.describe(info.key), "")
    head = f"{_VERSION} {info.size} {info.etag}\n".encode("utf-8", "surrogateescape")
    footer = _load_copy(path, head)
    if footer is None:
        footer = _read(connector, info)
        keep(path, lambda file: file.write(head + _digest(footer) + footer))
    return footer


def _read(connector: Connector, info: ObjectInfo) -> bytes:
    where = connector.describe(info.key)
    if info.size < len(_MAGIC) + _END_BYTES:
        raise FormatError(f"{where} has {info.size} bytes, too few for a Parquet file: it is truncated, or none")
    data = _range(connector, info, max(0, info.size - _FIRST_BYTES))
    if data[-4:] == _ENCRYPTED:
        raise FormatError(f"{where} has an encrypted footer, which is not read: decrypt the file")
    if data[-4:] != _MAGIC:
        raise FormatError(
            f"{where} does not end as a Parquet file does, by {_MAGIC!r}, but by {data[-4:]!r}: it is truncated, or none"
        )
    size = int.from_bytes(data[-8:-4], "little") + _END_BYTES
    if size > info.size - len(_MAGIC):
        raise FormatError(f"{where} has {info.size} bytes, and its footer is to have {size}: it is damaged")
    if size > len(data):
        data = _range(connector, info, info.size - size)
    return data[-size:]


def _check_begin(connector: Connector, info: ObjectInfo) -> None:
    begin = bytearray(min(len(_MAGIC), info.size))
    connector.read_into(info.key, 0, memoryview(begin), etag=info.etag)
    if begin != _MAGIC:
        raise FormatError(
            f"{connector.describe(info.key)} does not begin as a Parquet file does, by {_MAGIC!r}, but by {bytes(begin)!r}: it "
            "is damaged, or none"
        )


def _range(connector: Connector, info: ObjectInfo, start: int) -> bytes:
    data = bytearray(info.size - start)
    connector.read_into(info.key, start, memoryview(data), etag=info.etag)
    return bytes(data)


def _load_copy(path: Path, head: bytes) -> bytes | None:
    """The copy on this machine; None if it is missing, damaged, or of another version of the object."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    footer = data[len(head) + _DIGEST_BYTES :]
    is_whole = data[len(head) : len(head) + _DIGEST_BYTES] == _digest(footer)
    return footer if data.startswith(head) and is_whole else None


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()
