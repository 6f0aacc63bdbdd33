"""Compact tables of strings and of listed objects, the objects that patterns match, and the cutting of samples into
blocks."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit import native
from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.errors import AccessDeniedError, LoaderkitError, ObjectNotFoundError, SourceError
from loaderkit.sources.bad_shards import OPTION, BadShards
from loaderkit.sources.patterns import Patterns, is_hidden, said_of_form

_MAX_NAMED = 20
_MAX_LOOKED_AT = 1000
_MAX_EXTENSIONS = 6


class StringTable:
    """Immutable strings in one buffer: their UTF-8 bytes and 8 bytes each (a `str` in a list takes 57 more).

    Lone surrogates, which stand for bytes of file names that are not UTF-8, are kept.
    """

    def __init__(self, strings: Iterable[str] = ()) -> None:
        data = bytearray()
        ends = array("q")
        for text in strings:
            data += text.encode("utf-8", "surrogateescape")
            ends.append(len(data))
        self._data: bytes | memoryview = bytes(data)
        self._ends = np.array(ends, np.int64)

    @classmethod
    def packed(cls, data: bytes | memoryview, ends: NDArray[np.int64]) -> StringTable:
        """The table of strings concatenated in `data`, which does not change, that end at `ends` (int64 [n])."""
        table = cls()
        table._data, table._ends = data, ends
        return table

    @classmethod
    def joined(cls, tables: Iterable[StringTable]) -> StringTable:
        """The strings of all tables, in order."""
        parts = list(tables)
        shifts = np.cumsum([0, *(len(part._data) for part in parts)])
        ends = [part._ends + shift for part, shift in zip(parts, shifts, strict=False)]
        return cls.packed(b"".join(part._data for part in parts), np.concatenate([np.empty(0, np.int64), *ends]))

    def head(self, num: int) -> StringTable:
        """The first `num` strings, or all if there are no more."""
        ends = self._ends[:num]
        return self.packed(self._data[: int(ends[-1]) if len(ends) else 0], ends)

    @property
    def parts(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """What `packed` makes it of."""
        return np.frombuffer(self._data, np.uint8), self._ends

    def __reduce__(self) -> tuple[Any, ...]:
        return StringTable.packed, (bytes(self._data), self._ends)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        num = len(self._ends)
        if not -num <= index < num:
            raise IndexError(f"string {index} of {num}")
        index %= num
        start = int(self._ends[index - 1]) if index else 0
        return str(self._data[start : int(self._ends[index])], "utf-8", "surrogateescape")

    def take(self, indices: NDArray[np.int64]) -> list[str]:
        """The strings at several indices (0 to len - 1), in a tenth of the time of one by one."""
        return native.texts(self._data, self._ends, np.ascontiguousarray(indices, np.int64))

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in self._ends.tolist():
            yield str(self._data[start:end], "utf-8", "surrogateescape")
            start = end

    def digest(self) -> bytes:
        """16 bytes that differ, for all practical purposes, when any string or the order differs."""
        digest = blake2b(self._ends.astype("<i8").tobytes(), digest_size=16)
        digest.update(self._data)
        return digest.digest()


def numbered(indices: NDArray[np.int64]) -> list[str]:
    """The keys of samples that are keyed by number: "0", "1", ... for int64 [n], none below 0."""
    return list(map(repr, indices.tolist()))


class Listing:
    """A listing of objects: their `keys`, `sizes` (bytes, int64 [N]) and `etags`; about 80 bytes an object."""

    def __init__(self, infos: Iterable[ObjectInfo] = ()) -> None:
        sizes = array("q")
        etags: list[str] = []

        def keys() -> Iterator[str]:
            for info in infos:
                sizes.append(info.size)
                etags.append(info.etag)
                yield info.key

        self.keys = StringTable(keys())
        self.sizes = np.array(sizes, np.int64)
        self.etags = StringTable(etags)

    @classmethod
    def packed(cls, keys: StringTable, sizes: NDArray[np.int64], etags: StringTable) -> Listing:
        """The listing of these columns."""
        listing = cls()
        listing.keys, listing.sizes, listing.etags = keys, sizes, etags
        return listing

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> ObjectInfo:
        return ObjectInfo(self.keys[index], int(self.sizes[index]), self.etags[index])

    def part(self, indices: NDArray[np.int64]) -> Listing:
        """The listing of some of the objects."""
        return Listing(map(self.__getitem__, indices.tolist()))

    def take(self, indices: NDArray[np.int64]) -> tuple[list[str], list[int], list[str | None]]:
        """The keys, sizes and etags of several objects."""
        return self.keys.take(indices), self.sizes[indices].tolist(), [*self.etags.take(indices)]


def list_matching(
    connector: Connector,
    patterns: Patterns,
    root: str,
    num_threads: int,
    *,
    leave_out: Callable[[str], None] = lambda key: None,
    bad_shards: BadShards | None = None,
) -> list[ObjectInfo]:
    """The objects that match, in canonical order; named ones also where the store does not list. `leave_out` gets the
    keys of other objects that are listed and not hidden, `bad_shards` objects that are named and missing. Raises
    SourceError, naming `root`, if a pattern matches nothing, and what the connector raises."""
    infos: list[ObjectInfo] = []
    try:
        for info in connector.list(patterns.prefix):
            if patterns.matches(info.key):
                infos.append(info)
            elif not is_hidden(info.key):
                leave_out(info.key)
    except AccessDeniedError:  # listing a bucket needs a separate permission
        if patterns.names is None:
            raise
    if patterns.names is not None and not infos:  # most web servers do not list
        infos = stat_all(connector, patterns.names, num_threads)
    patterns = patterns.narrowed(info.key for info in infos)
    infos = [info for info in infos if patterns.matches(info.key)]
    refuse_unmatched(connector, patterns, (info.key for info in infos), root, bad_shards)
    return infos


def extension_of(key: str) -> str:
    """The extension of a file, as it is written; "" without one."""
    base = key[key.rfind("/") + 1 :]
    return base[base.rfind(".") + 1 :] if "." in base else ""


def said_counts(by_extension: Mapping[str, int]) -> str:
    """Numbers of files by extension, in words: "480 .JPG, 2 .txt, 1 without extension"."""
    most = sorted(by_extension.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{num} .{name}" if name else f"{num} without extension" for name, num in most[:_MAX_EXTENSIONS]]
    rest = sum(num for _, num in most[_MAX_EXTENSIONS:])
    return ", ".join([*named, *([f"{rest} others"] if rest else [])])


def stat_all(
    connector: Connector,
    names: list[str],
    num_threads: int,
    may_be_hidden: Callable[[str], bool] = lambda name: False,
) -> list[ObjectInfo]:
    """The existing ones of the named objects, in canonical order, by one `stat` each. A name that `may_be_hidden` need not be
    accessible."""

    def stat(name: str) -> ObjectInfo | None:
        try:
            return connector.stat(name)
        except ObjectNotFoundError:
            return None
        except AccessDeniedError:  # so a bucket says of what does not exist where it may not be listed
            if may_be_hidden(name):
                return None
            raise

    with ThreadPoolExecutor(num_threads, thread_name_prefix="loaderkit-index") as pool:
        infos = [*filter(None, pool.map(stat, names))]
    return sorted(infos, key=lambda info: info.key.encode("utf-8", "surrogateescape"))


def refuse_unmatched(
    connector: Connector, patterns: Patterns, keys: Iterable[str], root: str, bad_shards: BadShards | None = None
) -> None:
    """Raise SourceError if a pattern matches none of `keys`. Objects that are named and missing are `bad_shards`, if these are
    skipped."""
    missing = patterns.without_match(keys)
    if bad_shards is not None and bad_shards.skips:
        for name in filter(patterns.is_name, missing):
            bad_shards.leave_out(name, connector.describe(name), ObjectNotFoundError("it is not there"))
        missing = [text for text in missing if not patterns.is_name(text)]
    if missing:
        named = ", ".join(map(repr, missing[:_MAX_NAMED]))
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        exists = _describe_folder(connector, missing[0]) or _describe_existing(connector, missing[0])
        option = "" if bad_shards is None or not patterns.is_name(missing[0]) else f"; {OPTION}"
        raise SourceError(f"nothing below {root!r} is called {named}{more}; {exists}{option}")


def _describe_folder(connector: Connector, name: str) -> str:
    """What to write instead of a name that is a folder's; "" if it is no folder."""
    inside: list[str] = []
    with suppress(LoaderkitError):
        inside = [info.key.rpartition("/")[2] for info in islice(connector.list(f"{name}/"), 100)]
    if not inside:
        return ""
    data = [file for file in inside if not file.startswith(("_", "."))] or inside  # as Spark's _SUCCESS
    _, dot, extension = data[0].rpartition(".")
    return f"{name!r} is a folder: name the files in it, as in {f'{name}/*{dot}{extension}'!r}"


def _describe_existing(connector: Connector, name: str) -> str:
    try:
        others = [info.key for info in islice(connector.list(""), _MAX_LOOKED_AT)]
    except AccessDeniedError:
        return "the objects below it cannot be listed"
    if not others:
        return "there is no object at all"
    return f"there are {', '.join(map(repr, others[:3]))} ...{said_of_form(name, others)}"


def cut_blocks(
    sizes: NDArray[np.int64], block_bytes: int, boundaries: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Cut samples of `sizes` bytes (int64 [N]) into runs of about `block_bytes`.

    `boundaries` are the first samples of the objects (ascending; 0 and N may be among them): no run crosses one. Each
    object is cut into equal parts, as many as come nearest to `block_bytes`, so that none ends in a tiny rest.
    Returns the first sample of every run and, last, N: int64 [number of runs + 1].
    """
    num_samples = len(sizes)
    if num_samples == 0:
        return np.zeros(1, np.int64)
    inner = np.zeros(0, np.int64) if boundaries is None else np.asarray(boundaries, np.int64)
    firsts = np.unique(np.concatenate([[0], inner[(inner > 0) & (inner < num_samples)]])).astype(np.int64)
    counts = np.diff(firsts, append=num_samples)
    ends = np.cumsum(sizes)
    offsets = ends - sizes
    totals = ends[firsts + counts - 1] - offsets[firsts]
    num_parts = np.maximum(1, np.rint(totals / block_bytes))
    part_bytes = np.maximum(totals / num_parts, 1.0)
    within = offsets - np.repeat(offsets[firsts], counts)
    part = np.minimum(np.floor(within / np.repeat(part_bytes, counts)), np.repeat(num_parts - 1, counts))
    is_first = np.empty(num_samples, np.bool_)
    is_first[1:] = part[1:] != part[:-1]
    is_first[firsts] = True
    return np.append(np.flatnonzero(is_first), num_samples).astype(np.int64)
