"""An index of lines that lies beside its file, as `loaderkit index` writes it: `x.jsonl.offsets`."""

from __future__ import annotations

import io
from collections.abc import Container, Iterator
from hashlib import blake2b

from loaderkit._internal.text import warn
from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.errors import AccessDeniedError, FormatError, ObjectNotFoundError
from loaderkit.sources.serial.offsets import Int64s, Offsets, Parts, pack, parse
from loaderkit.sources.serial.scan import find_lines

_END_BYTES = 4096


def key_beside(key: str) -> str:
    """The key of the index of a file."""
    return f"{key}.offsets"


def is_beside(key: str, keys: Container[str]) -> bool:
    """True if `key` is the index of one of the files `keys`."""
    return key.endswith(".offsets") and key.removesuffix(".offsets") in keys


def write_index(connector: Connector, info: ObjectInfo, parts: Parts) -> bytes:
    """The content of the index of a file."""
    file = io.BytesIO()
    pack(info, parts, _tag_of_ends(connector, info), file)
    return file.getvalue()


def read_index(connector: Connector, info: ObjectInfo) -> Offsets | None:
    """The index beside a file; None if there is none. Raises FormatError, which names it, if it does not fit, and what the
    connector raises."""
    key = key_beside(info.key)
    try:
        beside = connector.stat(key)
        data = bytearray(beside.size)
        connector.read_into(key, 0, memoryview(data), etag=beside.etag)
    except (ObjectNotFoundError, AccessDeniedError):  # a store may answer "denied" for what does not exist
        return None
    try:
        return parse(data, info, _tag_of_ends(connector, info))
    except FormatError as error:
        raise FormatError(f"the index {connector.describe(key)} is not used: {error}") from None


def beside_or_found(connector: Connector, info: ObjectInfo) -> Iterator[tuple[Int64s, Int64s]]:
    """Where the lines of a file begin, and which are blank: by the index beside it, else by reading it. An index that
    does not fit gives a warning. Raises the same errors as `find_lines`."""
    offsets = None
    try:
        offsets = read_index(connector, info)
    except FormatError as error:
        warn(f"{error}; write it again (`loaderkit index`) or delete it")
    if offsets is None:
        yield from find_lines(connector, info)
    else:
        yield offsets.starts, offsets.blanks


def _tag_of_ends(connector: Connector, info: ObjectInfo) -> bytes:
    """A digest of the first and the last bytes of a file: etags differ from store to store."""
    digest = blake2b(digest_size=16)
    for begin in (0, max(0, info.size - _END_BYTES)):
        data = bytearray(min(_END_BYTES, info.size))
        connector.read_into(info.key, begin, memoryview(data), etag=info.etag)
        digest.update(data)
    return digest.digest()
