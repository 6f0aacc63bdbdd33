"""`kind: tar`: samples in archives, grouped as in WebDataset: members that share a name up to its first dot are one sample.

shards (listing) -> their indexes (a few at a time) -> `tar_samples.group_members`: one pass over the names of a shard
    -> arrays: starts, sizes and extension of all members, first member of every sample, first sample of every shard
"""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from loaderkit import native
from loaderkit._internal.system.user_cache import default_cache_dir
from loaderkit.connectors.base import ByteRange, Connector, ObjectInfo, Ranges, traits_of
from loaderkit.connectors.config import StoreArgs
from loaderkit.errors import AccessDeniedError, LoaderkitError, SourceError
from loaderkit.samples.sample import FieldRange, Table
from loaderkit.sources.bad_shards import BadShards
from loaderkit.sources.base import PackedSize, SourceKind
from loaderkit.sources.fields import FieldMap, Fields, Include, Optional, check_optional, described_fields
from loaderkit.sources.formats.tar_index import TarIndex, load_index
from loaderkit.sources.listing import StringTable, cut_blocks, refuse_unmatched, stat_all
from loaderkit.sources.patterns import Patterns
from loaderkit.sources.ranges import RangeSource
from loaderkit.sources.tar.samples import TarSamples, before_damage, group_members

UNFINISHED = ".loaderkit-shards/plan.json"
"""The file that lies beside shards while `loaderkit pack` has not written all of them."""
MANIFEST = "loaderkit-shards.json"
"""The file that lies beside them once it has: with their names and sizes, among others."""
_NUM_THREADS = 4
_NUM_REMOTE_THREADS = 32  # they wait for the store, not for a CPU


class TarArgs(StoreArgs):
    """The samples in the tar archives below `url`."""

    kind: Literal["tar"] = "tar"
    url: Annotated[
        str, Field(min_length=1, description="the folder of the archives, or one archive (also with braces)")
    ]
    include: Include = Field("*.tar", description='which archives: globs, and braces such as "shard-{000..099}.tar"')
    fields: Fields | None = Field(
        None, description="field -> extensions; default: images are `image`, cls is `label`, others keep their name"
    )
    optional: Optional = ()

    @model_validator(mode="after")
    def _optional_are_fields(self) -> TarArgs:
        check_optional(self.optional, self.fields or ())
        return self

    @model_validator(mode="after")
    def _archives_are_named_once(self) -> TarArgs:
        if self.url.endswith(".tar") and "include" in self.model_fields_set:
            raise ValueError("`url` names the archives already; leave `include` out, or let `url` name their folder")
        return self

    @property
    def root(self) -> str:
        """The connector's root: `url`, or its directory if it names archives."""
        if not self.url.endswith(".tar"):
            return self.url
        directory = self.url[: self.url.rfind("/") + 1]
        return directory or "."

    @property
    def shards(self) -> str | tuple[str, ...]:
        """The patterns of archives below `root`."""
        return self.url[self.url.rfind("/") + 1 :] if self.url.endswith(".tar") else self.include


class TarSource(RangeSource):
    """The samples of all matching archives: archives by the UTF-8 bytes of their keys, samples in archive order.

    `connector` reads below `args.root`; `load` returns the members of one archive, and is called from several threads.
    A key is the member's name up to the first dot of its base name. `num_ignored` counts the members that belong to no sample:
    hidden ones, and those without an extension. Raises `SourceError` if a named archive is missing, there is no sample, the
    members of a sample are not adjacent, or two members of a sample are the same field; and what `load` raises. With
    `found_bad`, archives that are missing or damaged are reported to it instead; if an archive has an index up to the
    damage, the samples before it stay.
    """

    def __init__(
        self,
        connector: Connector,
        args: TarArgs,
        load: Callable[[ObjectInfo], TarIndex],
        found_bad: BadShards | None = None,
    ) -> None:
        self._connector = connector
        self._args = args
        self._found_bad = found_bad or BadShards()
        self._misfits: dict[str, SourceError] = {}  # archives of another size than they were written with
        self._field_map = FieldMap(args.fields, {"cls": "label"})
        self._shards = self._list_shards()
        self._extension_ids: dict[str, int] = {}
        self.num_ignored = 0
        self._collect(load)
        self._shard_keys = [info.key for info in self._shards]
        self._shard_etags = [info.etag for info in self._shards]
        self._extensions = list(self._extension_ids)
        self._fields = [self._field_map.field_of(extension) for extension in self._extensions]  # by extension id
        self._check_fields()
        self._layout = self._common_layout()

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def key(self, index: int) -> str:
        """The common name of the sample's members: directories kept, no extension."""
        return self._keys[index]

    def origin(self, index: int) -> str:
        """The key of the archive."""
        return self._shards[self._shard_of(index)].key

    def ranges(self, index: int) -> list[FieldRange]:
        """One range per field: in the order of `fields` if given, else in archive order.

        Raises `SourceError` if the sample lacks a field.
        """
        shard = self._shards[self._shard_of(index)]
        ranges: dict[str, FieldRange] = {}
        members = self._members_of(index)
        extension_ids = self._member_extensions[members].tolist()
        for extension_id, start, size in zip(
            extension_ids, self._starts[members].tolist(), self._sizes[members].tolist(), strict=True
        ):
            field = self._fields[extension_id]
            if field is not None:
                byte_range = ByteRange(shard.key, start, size, shard.etag)
                ranges[field] = FieldRange(field, self._extensions[extension_id], byte_range)
        for field in self._args.optional:
            if field not in ranges:
                extension = (self._args.fields or {})[field].partition(";")[0].strip().lower().removeprefix(".")
                nothing = ByteRange(shard.key, int(self._starts[members.start]), 0, shard.etag)
                ranges[field] = FieldRange(field, extension, nothing)
        if self._field_map.names is None:
            return list(ranges.values())
        try:
            return [ranges[name] for name in self._field_map.names]
        except KeyError as error:
            wanted = (self._args.fields or {})[error.args[0]]
            raise SourceError(
                f"sample {self.key(index)!r} in {self._connector.describe(shard.key)} has no {error.args[0]!r} "
                f"({wanted!r} wanted; it has: {', '.join(self._extensions_of(index))})"
            ) from None

    def table(self, indices: NDArray[np.int64]) -> Table | None:
        """The ranges of several samples, if all samples have the same extensions in the same order."""
        if self._layout is None:
            return None
        offsets, fields = self._layout
        num_members = len(self._starts) // len(self)
        shards = self._shard_firsts, self._shard_keys, self._shard_etags
        return Table(fields, Ranges(*native.members(indices, offsets, num_members, self._starts, self._sizes, *shards)))

    def keys(self, indices: NDArray[np.int64]) -> list[str]:
        """The keys of several samples."""
        return self._keys.take(indices)

    def blocks(self, block_bytes: int) -> NDArray[np.int64]:
        """Runs of samples whose fields take about `block_bytes`, never across an archive: int64 [runs + 1]."""
        return cut_blocks(self._sample_sizes, block_bytes, self._shard_firsts)

    def packed(self) -> PackedSize:
        """The number of members, also of members that are no field, and the bytes of the members that are fields."""
        num_bytes = int(self._sample_sizes.sum())
        return PackedSize(len(self._starts), num_bytes, num_bytes)

    def fingerprint(self) -> str:
        """16 hexadecimal digits from the archives' and samples' keys and the sizes and extensions of all members."""
        digest = blake2b(StringTable(info.key for info in self._shards).digest(), digest_size=8)
        digest.update(self._keys.digest())
        for numbers in (self._shard_firsts, self._firsts, self._sizes, self._member_extensions):
            digest.update(numbers.astype("<i8").tobytes())
        digest.update("\0".join(self._extensions).encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def lacking(self) -> dict[str, NDArray[np.int64]]:
        """The samples without a member for a field that is wanted, or, without `fields`, that others have."""
        field_of = self._field_map.field_of
        names = self._field_map.names or dict.fromkeys(filter(None, map(field_of, self._extensions)))
        lacking: dict[str, NDArray[np.int64]] = {}
        for name in names:
            ids = [number for number, extension in enumerate(self._extensions) if field_of(extension) == name]
            has_it = np.add.reduceat(np.isin(self._member_extensions, ids), self._firsts[:-1]) > 0
            if name not in self._args.optional and not has_it.all():
                lacking[name] = np.flatnonzero(~has_it)
        return lacking

    # ------------------------------------------------------------------------------------------------- building

    def _list_shards(self) -> list[ObjectInfo]:
        patterns = Patterns(self._args.shards)
        is_listed = True
        try:
            listed = list(self._matching(patterns))
        except AccessDeniedError:  # listing a bucket needs a separate permission
            if patterns.names is None:
                raise
            listed, is_listed = [], False
        if patterns.names is not None and not listed:  # most web servers do not list
            listed, is_listed = self._stat_all(patterns.names), False
        patterns = patterns.narrowed(info.key for info in listed)
        infos = [info for info in listed if patterns.matches(info.key)]
        self._check_packs(patterns, infos, listed if is_listed else None)
        refuse_unmatched(self._connector, patterns, (info.key for info in infos), self._args.root, self._found_bad)
        return infos

    def _matching(self, patterns: Patterns) -> Iterator[ObjectInfo]:
        """The archives, and what `loaderkit pack` has written beside some."""
        for info in self._connector.list(patterns.prefix):
            if patterns.matches(info.key) or _is_of_pack(info.key):
                yield info

    def _check_packs(self, patterns: Patterns, infos: list[ObjectInfo], listed: list[ObjectInfo] | None) -> None:
        """Compare the archives with the manifests of `loaderkit pack` in their folders; take the classes' names from these.

        Raises SourceError for shards that are not all written, that are missing or have other sizes, and for other
        archives among them.
        """
        beside = {info.key: info for info in listed or () if _is_of_pack(info.key)}
        folders = [_folder_of(key) for key in (patterns.prefix, *(patterns.names or ()))]
        folders += [key.removesuffix(UNFINISHED).removesuffix(MANIFEST) for key in beside]
        sizes: dict[str, dict[str, int]] = {folder: {} for folder in folders}
        for info in infos:
            sizes.setdefault(_folder_of(info.key), {})[info.key] = info.size
        unseen = [folder for folder in sizes if listed is None or not folder.startswith(patterns.prefix)]
        names = [folder + name for folder in unseen for name in (UNFINISHED, MANIFEST)]
        stated = self._stat_all(names)
        if listed is None:  # some web servers have a page for every name
            stated = [info for info in stated if self._begins_as_json(info)]
        beside |= {info.key: info for info in stated}
        classes: list[Any] = []
        for folder, sizes_there in sizes.items():
            if folder + UNFINISHED in beside and (sizes_there or patterns.matches(f"{folder}shard-000000.tar")):
                raise SourceError(
                    f"the shards in {self._connector.describe(folder)} are being written, or `loaderkit pack` was cut off, so "
                    "some may be missing: wait for it, or run it again, and it goes on"
                )
            manifest = beside.get(folder + MANIFEST)
            found = None if manifest is None else self._compare(manifest, patterns, sizes_there)
            classes += [found] if sizes_there else []
        if classes and all(each == classes[0] for each in classes):
            self.classes = classes[0]

    def _begins_as_json(self, info: ObjectInfo) -> bool:
        first = bytearray(min(1, info.size))
        self._connector.read_into(info.key, 0, memoryview(first), etag=info.etag)
        return first == b"{"

    def _compare(self, manifest: ObjectInfo, patterns: Patterns, sizes: dict[str, int]) -> list[str] | None:
        """The classes' names in a manifest that lies beside archives of these sizes, by key; see `_check_packs`."""
        data = bytearray(manifest.size)
        self._connector.read_into(manifest.key, 0, memoryview(data), etag=manifest.etag)
        folder = _folder_of(manifest.key)
        try:
            written = json.loads(data)
            shards = {folder + shard["name"]: shard["num_bytes"] for shard in written["shards"]}
            classes: list[str] | None = written["classes"]
        except (ValueError, TypeError, KeyError):  # another program's
            return None
        wanted = {key: num_bytes for key, num_bytes in shards.items() if patterns.matches(key)}
        for key, num_bytes in wanted.items():
            if sizes.get(key) != num_bytes:
                there = f"has {sizes[key]} bytes" if key in sizes else "is not there"
                where = self._connector.describe(key)
                error = SourceError(
                    f"{where} {there}, and {MANIFEST} beside it has it with {num_bytes}: run `loaderkit pack` again, which "
                    "makes it anew; if the shards are meant to be others now, remove that file"
                )
                if key in sizes and self._found_bad.skips:
                    self._misfits[key] = error  # the samples before a cut stay
                else:
                    self._found_bad.leave_out(key, where, error)
        others = [key for key in sizes if key not in shards]
        if wanted and others:
            more = f", nor are {len(others) - 1} more" if len(others) > 1 else ""
            raise SourceError(
                f"{self._connector.describe(others[0])} is none of the shards in {MANIFEST} beside it{more}: it is of another "
                "run, or was added: remove it, or say in `include` which archives are meant"
            )
        return classes if wanted else None

    def _stat_all(self, names: list[str]) -> list[ObjectInfo]:
        """The existing ones of the named objects, by one `stat` each."""
        return stat_all(self._connector, names, self._num_threads, may_be_hidden=_is_of_pack)

    @property
    def _num_threads(self) -> int:
        return _NUM_REMOTE_THREADS if traits_of(self._connector).is_remote else _NUM_THREADS

    def _loaded(self, load: Callable[[ObjectInfo], TarIndex]) -> Iterator[tuple[ObjectInfo, TarIndex | LoaderkitError]]:
        """All archives with their indexes, or errors; a few are loaded ahead."""
        infos, num_threads = self._shards, self._num_threads
        tried = self._found_bad.tried(load)
        with ThreadPoolExecutor(num_threads, thread_name_prefix="loaderkit-index") as pool:
            for first in range(0, len(infos), 4 * num_threads):
                batch = infos[first : first + 4 * num_threads]
                yield from zip(batch, pool.map(tried, batch), strict=True)

    def _samples_of(self, info: ObjectInfo, index: TarIndex | LoaderkitError) -> TarSamples | None:
        """The samples of an archive, up to its damage, or None if it is left out."""
        where = self._connector.describe(info.key)
        if isinstance(index, LoaderkitError):
            self._found_bad.leave_out(info.key, where, index)
            return None
        if index.damage is None and info.key in self._misfits:
            self._found_bad.leave_out(info.key, where, self._misfits[info.key])
            return None
        samples, num_ignored = group_members(index, where, self._extension_ids)
        if index.damage is not None:
            samples = before_damage(samples, index.damage, self._fields_of, self._field_map.names)
            self._found_bad.leave_out(info.key, where, index.damage.error, len(samples.keys))
            if not len(samples.keys):
                return None
        self.num_ignored += num_ignored
        return samples

    def _fields_of(self, extension_ids: NDArray[np.int32]) -> set[str | None]:
        extensions = list(self._extension_ids)
        return {self._field_map.field_of(extensions[number]) for number in extension_ids.tolist()}

    def _collect(self, load: Callable[[ObjectInfo], TarIndex]) -> None:
        """Group the members of all archives (up to `limit` samples) and store the result in arrays."""
        limit = self._args.limit
        num = 0
        shard_firsts: list[int] = []
        groups: list[TarSamples] = []
        starts, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        left_out: set[str] = set()
        for info, index in self._loaded(load):
            samples = self._samples_of(info, index)
            if samples is None or isinstance(index, LoaderkitError):
                left_out.add(info.key)
                continue
            if limit is not None:
                samples = samples.head(limit - num)
            shard_firsts.append(num)
            num += len(samples.keys)
            groups.append(samples)
            starts.append(index.starts[samples.members])
            sizes.append(index.sizes[samples.members])
            if num == limit:
                break
        self._shards = [info for info in self._shards if info.key not in left_out]
        if not num:
            self._found_bad.refuse_empty()
            raise SourceError(
                f"the {len(self._shards)} archives below {self._args.root!r} have no sample ({self.num_ignored} "
                "members are hidden or have no extension); a sample's members are named <key>.<extension>"
            )
        self._keys = StringTable.joined(samples.keys for samples in groups)
        self._starts = np.concatenate(starts)
        self._sizes = np.concatenate(sizes)
        self._member_extensions = np.concatenate([samples.extensions for samples in groups])
        self._firsts = np.cumsum(np.concatenate([[0], *(samples.counts for samples in groups)]), dtype=np.int64)
        self._shard_firsts = np.array(shard_firsts, np.int64)
        self._shard_starts = shard_firsts  # as a list, which `bisect` searches ten times as fast

    def _check_fields(self) -> None:
        """Compute the samples' sizes, and raise if two members of one sample are the same field."""
        sample_of = np.repeat(np.arange(len(self)), np.diff(self._firsts))
        names = list(dict.fromkeys(name for name in self._fields if name is not None))
        numbers = {name: number for number, name in enumerate(names)}
        field_ids = np.array([-1 if name is None else numbers[name] for name in self._fields], np.int64)
        field_of = field_ids[self._member_extensions]
        is_wanted = field_of >= 0
        bytes_before = np.concatenate([[0], np.cumsum(np.where(is_wanted, self._sizes, 0))])
        self._sample_sizes = np.diff(bytes_before[self._firsts])
        pairs = (sample_of * max(1, len(names)) + field_of)[is_wanted]
        ordered = np.sort(pairs, kind="stable")  # nearly in order, so a stable sort takes a seventh of the time
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            index, field_id = divmod(int(twice[0]), len(names))
            name = names[field_id]
            both = [e for e in self._extensions_of(index) if self._field_map.field_of(e) == name]
            raise SourceError(
                f"sample {self.key(index)!r} in {self._connector.describe(self.origin(index))} has several members for "
                f"the field {name!r}: {' and '.join(f'{self.key(index)}.{e}' for e in both)}; say in `fields` which "
                "extension is which field"
            )

    def _common_layout(self) -> tuple[NDArray[np.int64], tuple[tuple[str, str], ...]] | None:
        """The fields' indices among a sample's members, and the fields, if they are the same for all samples."""
        num_members = len(self._extensions_of(0))
        if len(self._sizes) != num_members * len(self) or (np.diff(self._firsts) != num_members).any():
            return None
        rows = self._member_extensions.reshape(len(self), num_members)
        if (rows != rows[0]).any():
            return None
        try:
            ranges = self.ranges(0)
        except SourceError:
            return None
        extensions = self._extensions_of(0)
        offsets = np.array([extensions.index(extension) for _, extension, _ in ranges], np.int64)
        return offsets, tuple((field, extension) for field, extension, _ in ranges)

    def _shard_of(self, index: int) -> int:
        return bisect_right(self._shard_starts, self._checked(index)) - 1

    def _members_of(self, index: int) -> slice:
        number = self._checked(index)
        return slice(int(self._firsts[number]), int(self._firsts[number + 1]))

    def _checked(self, index: int) -> int:
        num = len(self._firsts) - 1
        if not -num <= index < num:
            raise IndexError(f"sample {index} of {num}")
        return index % num

    def _extensions_of(self, index: int) -> list[str]:
        return [self._extensions[i] for i in self._member_extensions[self._members_of(index)]]


def _folder_of(key: str) -> str:
    """With its slash; "" at the top."""
    return key[: key.rfind("/") + 1]


def _is_of_pack(key: str) -> bool:
    return f"/{key}".endswith((f"/{UNFINISHED}", f"/{MANIFEST}"))


class _Timed:
    """A function for concurrent calls; `seconds` is the time during which at least one of them ran."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._num_running = 0
        self._since_s = 0.0
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self._num_running == 0:
                self._since_s = time.perf_counter()
            self._num_running += 1
        try:
            return self._function(*args, **kwargs)
        finally:
            with self._lock:
                self._num_running -= 1
                if self._num_running == 0:
                    self.seconds += time.perf_counter() - self._since_s


def _open(args: TarArgs, connector: Connector, found_bad: BadShards) -> TarSource:
    load = _Timed(partial(load_index, connector, cache_dir=default_cache_dir(), up_to_damage=found_bad.skips))
    source = TarSource(connector, args, load, found_bad)
    source.index_s = load.seconds
    return source


def _fields_of(args: TarArgs) -> dict[str, str] | None:
    return None if args.fields is None else described_fields(args.fields)


TAR = SourceKind(TarArgs, _open, lambda args: args.root, _fields_of, encoded="all", has_shards=True)
