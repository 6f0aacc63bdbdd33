"""The samples of several files, one behind another: the part that all kinds of such files share."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from loaderkit._internal.system.user_cache import default_cache_dir, path_in_cache
from loaderkit._internal.text import warn
from loaderkit.connectors.base import Connector, ObjectInfo, Ranges, traits_of, version_of
from loaderkit.connectors.config import StoreArgs
from loaderkit.errors import FormatError, LoaderkitError, SourceError
from loaderkit.samples.sample import Table
from loaderkit.sources.bad_shards import BadShards
from loaderkit.sources.base import PackedSize
from loaderkit.sources.fields import Include
from loaderkit.sources.listing import extension_of, list_matching
from loaderkit.sources.patterns import Patterns
from loaderkit.sources.serial.offsets import Int64s, Offsets, Parts, load_offsets
from loaderkit.sources.serial.reader import SerialSource

NUM_THREADS = 4
_NUM_REMOTE_THREADS = 16  # they wait for the store, not for a CPU
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}
_EXTENSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}
_INDEXES = frozenset({"offsets", "idx"})
_ADVICE = "it has no random access: decompress it, or leave it out by `include`, or read it in its own order by kind: iterable"


def names_files(url: str) -> bool:
    """True if a URL names files, not their folder: its last part has a dot, and is no bucket."""
    scheme, separator, path = url.rpartition("://")
    is_bucket = separator and scheme not in {"file", "memory"} and "/" not in path
    return not is_bucket and "." in path[path.rfind("/") + 1 :].lstrip(".")


class SerialArgs(StoreArgs):
    """The arguments of all these kinds that say which files there are."""

    url: Annotated[
        str, Field(min_length=1, description="the folder of the files, or one file (also with globs and braces)")
    ]
    include: Include | None = None

    @property
    @abstractmethod
    def usual(self) -> str:
        """Which files of a folder are read if `include` does not say."""

    @property
    def also_usual(self) -> tuple[str, ...]:
        """The ends of other names that such files have."""
        return ()

    @property
    def names_files(self) -> bool:
        """True if `url` names files, not their folder."""
        return self.include is None and names_files(self.url)

    @property
    def root(self) -> str:
        """The connector's root: `url`, or its directory if it names files."""
        return (self.url[: self.url.rfind("/") + 1] or ".") if self.names_files else self.url

    @property
    def patterns(self) -> Patterns:
        """The patterns of the files below `root`."""
        return Patterns(self.url[self.url.rfind("/") + 1 :] if self.names_files else self.include or self.usual)


def list_files(
    connector: Connector, args: SerialArgs, is_index: Callable[[str, Container[str]], bool], found_bad: BadShards
) -> tuple[list[ObjectInfo], Counter[str]]:
    """The files that are meant, without the indexes beside them, and by extension the number of files left out.
    `is_index` recognises an index by its key and the keys of all files.

    Warns of files that the default `include` leaves out, though their names say that they have the same content. Raises
    as `list_matching` does, and SourceError for a file whose name says that it is compressed.
    """
    left_out: Counter[str] = Counter()
    alike: list[str] = []
    is_folder = not args.names_files

    def leave_out(key: str) -> None:
        extension = extension_of(key)
        if is_folder and extension not in _INDEXES:
            left_out[extension] += 1
            if "/" not in key and _decompressed(key).endswith(args.also_usual):
                alike.append(key)

    infos = list_matching(connector, args.patterns, args.root, NUM_THREADS, leave_out=leave_out, bad_shards=found_bad)
    keys = {info.key for info in infos}
    infos = [info for info in infos if not is_index(info.key, keys)]
    for info in infos:
        for extension, how in _EXTENSIONS.items():
            if info.key.lower().endswith(extension):
                raise SourceError(f"{connector.describe(info.key)} is compressed ({how}), so {_ADVICE}")
    if alike and args.include is None:
        more = f" and {len(alike) - 1} more are" if len(alike) > 1 else " is"
        warn(
            f"{connector.describe(alike[0])}{more} left out, as {args.usual!r} is what is read of a folder: decompress what is "
            f"compressed, name the others in `include`, or write `include: {args.usual!r}` if they are not meant"
        )
    return infos, left_out


def _decompressed(key: str) -> str:
    """The name that a file would have if it were not compressed, in lower case."""
    name = key.lower()
    for extension in _EXTENSIONS:
        name = name.removesuffix(extension)
    return name


def refuse_compressed(name: str, begin: memoryview) -> None:
    """Raise FormatError for a file whose first bytes say that it is compressed."""
    for magic, how in _COMPRESSED.items():
        if begin[: len(magic)] == magic:
            raise FormatError(f"{name} is compressed ({how}), whatever its name says, so {_ADVICE}")


class _File:
    """One file: what was listed, and where its samples begin."""

    __slots__ = ("info", "num", "offsets", "skips")

    def __init__(self, info: ObjectInfo, offsets: Offsets, *, skips_blanks: bool) -> None:
        self.info = info
        self.offsets = offsets
        blanks = offsets.blanks if skips_blanks else offsets.blanks[:0]
        self.num = len(offsets.starts) - 1 - len(blanks)
        self.skips: Int64s | None = None  # how many samples come before each blank item
        if len(blanks):
            self.skips = blanks - np.arange(len(blanks))

    def item_of(self, samples: Int64s) -> Int64s:
        """The number of the item that each sample is."""
        return samples if self.skips is None else samples + np.searchsorted(self.skips, samples, "right")

    def samples_before(self, items: Int64s) -> Int64s:
        """How many samples come before each item."""
        return items if self.skips is None else items - np.searchsorted(self.offsets.blanks, items, "left")


class SerialFiles(SerialSource):
    """The samples of all files: files by the UTF-8 bytes of their keys, samples in the order of the file.

    The index of a file takes 8 bytes a sample, which are mapped from disk, not held in memory. A key is the file's key, ":" and
    the number of the line or record. Files that are damaged or missing are reported to `found_bad`. Raises SourceError
    if there is no sample, and what `load` raises.
    """

    first_number = 0  # of the items of a file, in keys

    def __init__(
        self,
        connector: Connector,
        infos: list[ObjectInfo],
        limit: int | None,
        found_bad: BadShards,
        *,
        skips_blanks: bool = False,
    ) -> None:
        self._connector = connector
        self._skips_blanks = skips_blanks
        self._files: list[_File] = []
        num = 0
        for info, offsets in self._loaded(infos, limit):
            if isinstance(offsets, LoaderkitError):
                found_bad.leave_out(info.key, connector.describe(info.key), offsets)
                continue
            file = _File(info, offsets, skips_blanks=skips_blanks)
            num += file.num
            self._files.append(file)
            if limit is not None and num >= limit:
                num = limit
                break
        self._firsts = np.cumsum([0, *(file.num for file in self._files)], dtype=np.int64)
        self._firsts[-1] = num
        if not num:
            found_bad.refuse_empty()
            raise SourceError(
                f"{connector.describe(infos[0].key)} is empty" + (", as the others are" * (len(infos) > 1))
            )

    @abstractmethod
    def load(self, info: ObjectInfo) -> Offsets:
        """The index of a file; called from several threads."""

    def _loaded(
        self, infos: list[ObjectInfo], limit: int | None
    ) -> Iterator[tuple[ObjectInfo, Offsets | LoaderkitError]]:
        """All files with their indexes, or errors; a few are loaded ahead, none with a `limit`, which may need only the
        first."""
        num_threads = _NUM_REMOTE_THREADS if traits_of(self._connector).is_remote else NUM_THREADS
        num_ahead = 4 * num_threads if limit is None else 1
        with ThreadPoolExecutor(num_threads, thread_name_prefix="loaderkit-index") as pool:
            for first in range(0, len(infos), num_ahead):
                some = infos[first : first + num_ahead]
                yield from zip(some, pool.map(BadShards.tried(self.load), some), strict=True)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def _places(self, indices: Int64s) -> tuple[list[int], Int64s, Int64s]:
        """The number of each sample's file, of the item in it, and of the item at which the sample ends: blank items
        behind it are read with it, to check that they are still blank."""
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"samples {indices.min()} to {indices.max()} of {len(self)}")
        numbers = np.searchsorted(self._firsts, indices, "right") - 1
        items = indices - self._firsts[numbers]
        ends = items + 1
        if self._skips_blanks:
            for number in np.unique(numbers).tolist():
                is_own = numbers == number
                items[is_own], ends[is_own] = (self._files[number].item_of(those[is_own]) for those in (items, ends))
        return numbers.tolist(), items, ends

    def _place(self, index: int) -> tuple[_File, int, int]:
        (number,), items, ends = self._places(np.array([index], np.int64))
        return self._files[number], items.item(), ends.item()

    def key(self, index: int) -> str:
        """The file's key, and the number of the item in it."""
        file, item, _ = self._place(index)
        return f"{file.info.key}:{item + self.first_number}"

    def keys(self, indices: Int64s) -> list[str]:
        """The keys of several samples."""
        files, first = self._files, self.first_number
        numbers, items, _ = self._places(indices)
        return [
            f"{files[number].info.key}:{item + first}" for number, item in zip(numbers, items.tolist(), strict=True)
        ]

    def origin(self, index: int) -> str:
        """The key of the file."""
        return self._place(index)[0].info.key

    def is_last(self, index: int) -> bool:
        """True for the last sample of a file."""
        file, _, end = self._place(index)
        return end + 1 == len(file.offsets.starts)

    def table(self, indices: Int64s) -> Table:
        """The ranges of several samples."""
        files = self._files
        numbers, items, ends = self._places(indices)
        if len(files) == 1:
            starts, num = files[0].offsets.starts, len(items)
            firsts = starts[items]
            lengths = (starts[ends] - firsts).tolist()
            info = files[0].info
            return Table((("", ""),), Ranges([info.key] * num, firsts.tolist(), lengths, [info.etag] * num))
        ranges = Ranges([], [], [], [])
        for number, item, end in zip(numbers, items.tolist(), ends.tolist(), strict=True):
            file = files[number]
            starts = file.offsets.starts
            start = starts.item(item)
            ranges.keys.append(file.info.key)
            ranges.starts.append(start)
            ranges.lengths.append(starts.item(end) - start)
            ranges.etags.append(file.info.etag)
        return Table((("", ""),), ranges)

    def blocks(self, block_bytes: int) -> NDArray[np.int64]:
        """Runs of samples of about `block_bytes`, never across a file: int64 [runs + 1]."""
        bounds = [np.zeros(0, np.int64)]
        for file, first, end in zip(self._files, self._firsts[:-1].tolist(), self._firsts[1:].tolist(), strict=True):
            starts = file.offsets.starts
            num_bytes = int(starts[-1] - starts[0])
            num_parts = max(1, round(num_bytes / block_bytes))
            if num_parts >= file.num:
                firsts = np.arange(file.num, dtype=np.int64)
            else:
                wanted = starts[0] + np.arange(num_parts, dtype=np.int64) * num_bytes // num_parts
                firsts = np.unique(file.samples_before(np.searchsorted(starts, wanted)))
            bounds.append(first + firsts[firsts < end - first])
        return np.append(np.concatenate(bounds), len(self)).astype(np.int64)

    def packed(self) -> PackedSize:
        """All of the files."""
        num_bytes = sum(file.info.size for file in self._files)
        return PackedSize(len(self), num_bytes, num_bytes)

    def fingerprint(self) -> str:
        """16 hexadecimal digits from the files' keys and the sizes of all samples."""
        digest = blake2b(f"{self._skips_blanks} {len(self)}".encode(), digest_size=8)
        for file in self._files:
            digest.update(file.info.key.encode("utf-8", "surrogateescape") + b"\0" + file.offsets.digest)
        return digest.hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        """Other processes get the numbers of indexes that are held in memory; mapped ones they load themselves."""
        files = [(file.info, file.offsets if file.offsets.path is None else None) for file in self._files]
        return {**self.__dict__, "_files": files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        loaded = [(info, self.load(info) if offsets is None else offsets) for info, offsets in state["_files"]]
        self._files = [_File(info, offsets, skips_blanks=self._skips_blanks) for info, offsets in loaded]


def load_with(
    connector: Connector, info: ObjectInfo, kind: str, find: Callable[[Connector, ObjectInfo], Parts]
) -> Offsets:
    """The index of a file: its copy on this machine, or what `find` finds."""
    path = path_in_cache(default_cache_dir(), kind, connector.describe(info.key), ".offsets")
    version = info._replace(etag=version_of(connector, info))
    return load_offsets(version, path, lambda: find(connector, info))
