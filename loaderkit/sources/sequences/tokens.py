"""`kind: tokens`: the documents of files of tokens, which differ in length.

one file, a folder, a glob, a list ──> documents.py: (first byte, number of tokens) of every document ──> one range a sample
Parquet ──────────────────────────────> rows of row groups, whose lengths are found once (given by `tokens_kind`)
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from loaderkit._internal.config.settings import ByteSize, as_tuple
from loaderkit.connectors.base import Connector, ObjectInfo, traits_of
from loaderkit.connectors.config import StoreArgs
from loaderkit.errors import ConfigError, FormatError, LoaderkitError, ObjectNotFoundError, SourceError
from loaderkit.sources.bad_shards import BadShards
from loaderkit.sources.base import PackedSize, Source, SourceKind
from loaderkit.sources.fields import Include
from loaderkit.sources.listing import StringTable, extension_of, list_matching, numbered, said_counts
from loaderkit.sources.patterns import Patterns
from loaderkit.sources.sequences.data_sets import SPLITS, STATE, own_data, several_splits
from loaderkit.sources.sequences.documents import Form, TokenFormat, documents_of
from loaderkit.sources.sequences.megatron import Documents
from loaderkit.sources.sequences.reader import Sequences, SequenceSource

TokenType = Literal["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]
_USUAL = {"bin": "*.bin", "npy": "*.npy", "arrow": "*.arrow", "parquet": "*.parquet"}
"""By extension, what is read of a folder."""
_UNDERSCORED = r"(?i:\.(?:arrow|parquet))"  # of these what begins with `_` is hidden, as for `kind: parquet`
_NUM_THREADS, _NUM_REMOTE_THREADS = 4, 32  # the latter wait for the store, not for a CPU


class TokensArgs(StoreArgs):
    """The documents of files of tokens: Megatron's `.bin` and `.idx`, `.npy`, raw numbers, `input_ids` in Arrow or Parquet."""

    kind: Literal["tokens"] = "tokens"
    url: Annotated[
        str | tuple[str, ...],
        BeforeValidator(as_tuple),
        Field(
            min_length=1,
            description="the folder of the files, or one file, or a list (also with globs and braces): .bin with its .idx "
            "beside it (without `dtype`), .npy, .arrow, .parquet, or raw (with `dtype`)",
        ),
    ]
    include: Include | None = Field(
        None,
        description="which files of the folder `url`: globs and braces, or a list; default: all of the form that is there",
    )
    dtype: TokenType | None = Field(None, description="of raw files, little-endian; .npy and .idx state it")
    end: int | None = Field(
        None,
        description="of .npy and raw files: the token that ends a document and is its last; other files say where they end",
    )
    column: str = Field("input_ids", min_length=1, description="of Arrow and Parquet files: the lists of tokens")
    field: str = Field("tokens", min_length=1, description="its name in the batch")
    memory: ByteSize = Field(
        2 * 2**30, description="of Parquet files: bound on the decoded row groups that each loading process holds"
    )

    @model_validator(mode="after")
    def _fits(self) -> TokensArgs:
        if self.field.startswith("__"):
            raise ValueError(f"`field` {self.field!r}: names that begin with two underscores are reserved")
        if (
            len(self._urls) > 1
            and any("://" in url for url in self._urls)
            and not re.fullmatch(r"(?:memory|file)://.*|.+://[^/].*", self.root)
        ):
            raise ValueError(
                "`url` lists files in several stores: make each a source of its own, and mix them (`sources`)"
            )
        if self.include is not None and self.names_files:
            raise ValueError("`url` names the files already; leave `include` out, or let `url` name their folder")
        if self.extension is not None:
            check_form(self, self.extension)
        return self

    @property
    def names_files(self) -> bool:
        """True if `url` names files, not their folder: it is a list, a pattern, or its last part has an extension. A raw file
        needs none."""
        if not isinstance(self.url, str):
            return True
        scheme, separator, path = self.url.rpartition("://")
        is_bucket = separator and scheme not in {"file", "memory"} and "/" not in path
        last = path[path.rfind("/") + 1 :]
        if is_bucket or not last:
            return False
        return "." in last.lstrip(".") or (self.include is None and (self.dtype is not None or _is_pattern(last)))

    @property
    def root(self) -> str:
        """The connector's root: `url`, or the folder that all files are in."""
        if not self.names_files:
            assert isinstance(self.url, str)
            return self.url
        return _common_folder(self._urls) or "."

    @property
    def _urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else self.url

    @property
    def written(self) -> tuple[str, ...] | None:
        """The patterns of files below `root`, or None for the usual ones."""
        if self.names_files:
            begin = len(_common_folder(self._urls))
            return tuple(url[begin:] for url in self._urls)
        return (self.include,) if isinstance(self.include, str) else self.include

    @property
    def extension(self) -> str | None:
        """The extension that all files have by the patterns; None if only the listing can tell."""
        return None if self.written is None else _one_extension(self.written)


def _is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[{")


def _common_folder(urls: tuple[str, ...]) -> str:
    """The longest folder, with a slash at its end, that all URLs begin with; only the part before a sign of a pattern
    counts."""
    folders = [re.split(r"[*?\[{]", url, maxsplit=1)[0].rpartition("/")[0].split("/") for url in urls]
    common = [parts[0] for parts in itertools.takewhile(lambda parts: len({*parts}) == 1, zip(*folders, strict=False))]
    folder = "/".join(common)
    is_whole = "/" in urls[0] and bool(common)
    return f"{folder}/" if is_whole else ""


def _one_extension(names: tuple[str, ...]) -> str | None:
    """The extension that all names have; None if they differ, or their patterns leave it open."""
    found = {extension_of(name).lower() for name in names}
    extension = found.pop() if len(found) == 1 else None
    is_open = extension is None or _is_pattern(extension) or (not extension and any(map(_is_pattern, names)))
    return None if is_open else extension


def check_form(args: TokensArgs, extension: str) -> str:
    """How files with this extension hold tokens: a `Form`, or "parquet". Raises ValueError if `args` do not fit."""
    form: str = extension if extension in ("npy", "arrow", "parquet") else "raw"
    if extension == "bin" and args.dtype is None:
        form = "megatron"
    shown = f"*.{extension}" if extension else "files without an extension"
    if form == "raw" and args.dtype is None:
        raise ValueError(
            f"`dtype` is missing: {shown} are none of .bin with .idx, .npy, .arrow and .parquet, so give the type of their "
            "tokens (dtype: uint16)"
        )
    if form in ("npy", "raw") and args.end is None:
        raise ValueError("`end` is missing: the token that ends a document")
    if form not in ("npy", "raw") and args.end is not None:
        where = (
            "in the .idx (for raw tokens in a .bin, give `dtype`, too)"
            if form == "megatron"
            else "the lists of a column"
        )
        raise ValueError(f"`end` is for .npy and raw files: the documents of {shown} are {where}")
    if form in ("arrow", "parquet") and args.dtype is not None:
        raise ValueError(f"`dtype` is for raw files: {shown} state the type of their tokens")
    return form


class TokensSource(SequenceSource):
    """The documents of objects of `connector`, file by file. In memory 16 bytes a document.

    A key is the number of the document, of several files behind the file's: "shard-003.bin/17". Raises `FormatError` if a file
    or its index is not what it should be, or files differ in type, `ConfigError` if `args` do not fit, `SourceError` if there
    are no tokens, and what the connector raises. With `found_bad` files that are damaged are told to that.
    """

    def __init__(
        self,
        connector: Connector,
        args: TokensArgs,
        infos: list[ObjectInfo],
        form: Form,
        found_bad: BadShards | None = None,
    ) -> None:
        found_bad = found_bad or BadShards()
        begin_s = time.perf_counter()
        token_format = TokenFormat(form, args.dtype, args.end, args.column)
        files: list[ObjectInfo] = []
        parts: list[Documents] = []
        num = 0
        is_one = len(infos) + len(found_bad.found) == 1
        load = partial(_documents, connector, token_format, skips=found_bad.skips and not is_one)
        for info, found in _opened(connector, infos, load, args.limit):
            if isinstance(found, LoaderkitError):
                found_bad.leave_out(info.key, connector.describe(info.key), found)
                continue
            if len(found.starts) or len(infos) == 1:
                files.append(info)
                parts.append(found)
                num += len(found.starts)
            if args.limit is not None and num >= args.limit:
                break
        self.index_s = time.perf_counter() - begin_s
        if not num:
            found_bad.refuse_empty()
            more = f", and so have the other {len(infos) - 1}" if len(infos) > 1 else ""
            raise SourceError(f"{connector.describe(infos[0].key)} has no documents{more}")
        dtype = parts[0].dtype
        for info, part in zip(files, parts, strict=True):
            if part.dtype != dtype:
                raise FormatError(
                    f"{connector.describe(info.key)} has tokens of {part.dtype.str}, and {connector.describe(files[0].key)} of "
                    f"{dtype.str}: files of one source have one type. Choose some by `include`, or mix two sources"
                )
        self.files, self._has_names = tuple(files), not is_one  # also if `limit` leaves one
        self.firsts = np.cumsum([0, *(len(part.starts) for part in parts)])
        self.firsts[-1] = min(num, args.limit or num)
        self.starts = np.concatenate([part.starts for part in parts])[: args.limit]
        self.lengths = np.concatenate([part.lengths for part in parts])[: args.limit]
        for values in (self.starts, self.lengths):
            values.setflags(write=False)
        self.sequences = Sequences(args.field, dtype.name, not dtype.isnative, dtype.itemsize)

    def __len__(self) -> int:
        return len(self.starts)

    def key(self, index: int) -> str:
        """The document's number, behind its file if there are several."""
        return self.keys(np.array([index]))[0]

    def keys(self, indices: NDArray[np.int64]) -> list[str]:
        """The keys of several documents."""
        if not self._has_names:
            return numbered(indices)
        numbers = self.file_numbers(indices)
        within = zip(numbers.tolist(), (indices - self.firsts[numbers]).tolist(), strict=True)
        return [f"{self.files[number].key}/{place}" for number, place in within]

    def origin(self, index: int) -> str:
        """The key of the file."""
        return self.files[int(self.file_numbers(np.array([index]))[0])].key

    def blocks(self, block_bytes: int) -> NDArray[np.int64]:
        """Runs of documents of about `block_bytes`, each at least one and of one file: int64 [number of runs + 1]."""
        ends = np.cumsum(self.lengths * self.sequences.item_bytes)
        numbers = np.concatenate(([0], ends[:-1])) // block_bytes
        bounds = np.concatenate((self.firsts, np.flatnonzero(np.diff(numbers)) + 1))
        return np.unique(bounds).astype(np.int64)

    def packed(self) -> PackedSize:
        num_bytes = int(self.lengths.sum()) * self.sequences.item_bytes
        return PackedSize(len(self), num_bytes, sum(info.size for info in self.files))

    def fingerprint(self) -> str:
        """16 hexadecimal digits from the type and the lengths of all documents, and the keys of files, if there are several."""
        digest = blake2b(self.sequences.dtype.encode(), digest_size=8)
        digest.update(np.ascontiguousarray(self.lengths).data)
        if self._has_names:
            digest.update(StringTable(info.key for info in self.files).digest())
        return digest.hexdigest()


def _opened(
    connector: Connector, infos: list[ObjectInfo], load: Callable[[ObjectInfo], Documents], limit: int | None
) -> Iterator[tuple[ObjectInfo, Documents | LoaderkitError]]:
    """All files with their documents, or the error of one that is damaged; a few are loaded ahead, none with a `limit`, which
    may need only the first."""
    num_threads = _NUM_REMOTE_THREADS if traits_of(connector).is_remote else _NUM_THREADS
    num_ahead = 4 * num_threads if limit is None else 1
    with ThreadPoolExecutor(num_threads, thread_name_prefix="loaderkit-index") as pool:
        for first in range(0, len(infos), num_ahead):
            some = infos[first : first + num_ahead]
            yield from zip(some, pool.map(BadShards.tried(load), some), strict=True)


def _documents(connector: Connector, token_format: TokenFormat, info: ObjectInfo, *, skips: bool) -> Documents:
    """The documents of a file. Where damaged ones are left out of several, one without an index, or without any document, is
    damaged, and else a mistake of the user's."""
    try:
        return documents_of(connector, info, token_format)
    except (ConfigError, SourceError) as error:
        if skips and (isinstance(error, SourceError) or isinstance(error.__cause__, ObjectNotFoundError)):
            raise FormatError(str(error)) from error
        raise


def _listed(connector: Connector, args: TokensArgs, found_bad: BadShards) -> tuple[list[ObjectInfo], str]:
    """The files that are meant, and their extension; `found_bad` is told of those that are named and missing.

    Raises SourceError if there are none, or of several forms.
    """
    written = args.written
    if written is None:
        infos = _usual(connector, args, found_bad)
    elif len(written) == 1 and Patterns(written).names == [*written]:
        infos = own_data(connector, [_only(connector, args, written[0])], Patterns(written), args.root, found_bad)
    else:
        patterns = Patterns(written, underscored=_UNDERSCORED)
        infos = list_matching(connector, patterns, args.root, _NUM_THREADS, bad_shards=found_bad)
        keys = {info.key for info in infos}
        infos = [info for info in infos if not (info.key.endswith(".idx") and f"{info.key[:-4]}.bin" in keys)]
        infos = own_data(connector, infos, patterns, args.root, found_bad)
    if not infos:
        found_bad.refuse_empty()
        raise SourceError(
            f"{args.url!r}: what matches is no data of the data set's, but what datasets has written beside it: name other "
            "files, or one of these without a pattern"
        )
    extension = _one_extension(tuple(info.key for info in infos))
    if extension is None:
        counts = _counted(infos)
        raise SourceError(
            f"the files of {args.url!r} are of several forms ({said_counts(counts)}): choose those of one by `include`, as in "
            f"include: '*.{min(counts)}'"
        )
    return infos, extension


def _only(connector: Connector, args: TokensArgs, key: str) -> ObjectInfo:
    """The one file that `url` names."""
    try:
        return connector.stat(key)
    except ObjectNotFoundError:
        if next(iter(connector.list(f"{key}/")), None) is None:
            raise
        raise SourceError(
            f"{connector.describe(key)} is a folder: say which of its files, as by `include: '*.bin'`"
        ) from None


def _usual(connector: Connector, args: TokensArgs, found_bad: BadShards) -> list[ObjectInfo]:
    """The files of a folder that hold tokens by their extension."""
    every = list(connector.list(""))
    patterns = Patterns(tuple(_USUAL.values()), underscored=_UNDERSCORED)
    infos = [info for info in every if patterns.matches(info.key)]
    folders = ("",) * any(info.key == STATE for info in every)
    infos = own_data(connector, infos, patterns, args.root, found_bad, also_in=folders)
    if infos or found_bad.found:
        return infos
    if any(info.key == SPLITS for info in every):
        found = re.compile(f"([^/]+)/{re.escape(STATE)}").fullmatch
        splits = [match[1] for info in every if (match := found(info.key))]
        raise several_splits(dict(zip(splits, splits, strict=True)), args.root)
    deeper = [info.key for info in every if extension_of(info.key).lower() in _USUAL]
    deeper.sort(key=lambda key: "/cache-" in key)  # copies of datasets' are no example
    if deeper:
        hint = f"there are some in folders below, as {deeper[0]!r}: say `include: '**/*.{extension_of(deeper[0])}'`"
    elif every:
        hint = (
            f"there are {said_counts(_counted(every))}: name them in `include`, and of raw files the `dtype` and `end`"
        )
    else:
        hint = "there is no file at all"
    raise SourceError(f"no files of tokens ({', '.join(_USUAL.values())}) are in {args.root!r}; {hint}")


def _counted(infos: list[ObjectInfo]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for info in infos:
        counts[extension_of(info.key)] = counts.get(extension_of(info.key), 0) + 1
    return counts


OpenParquet = Callable[..., Source]
"""Opens the documents of Parquet files, by the connector and `root`, `files`, `column`, `field`, `limit`, `memory` and
`found_bad`."""


def _open(args: TokensArgs, connector: Connector, found_bad: BadShards, open_parquet: OpenParquet) -> Source:
    infos, extension = _listed(connector, args, found_bad)
    try:
        form: Any = check_form(args, extension)
    except ValueError as error:
        raise ConfigError(f"source: {error}") from None
    if form != "parquet":
        return TokensSource(connector, args, infos, form, found_bad)
    names = tuple(info.key for info in infos)
    given = {name: getattr(args, name) for name in ("root", "column", "field", "limit", "memory")}
    return open_parquet(connector, files=names, found_bad=found_bad, **given)


def tokens_kind(open_parquet: OpenParquet) -> SourceKind:
    """`kind: tokens`, which leaves Parquet to another kind's source."""
    return SourceKind(
        TokensArgs,
        partial(_open, open_parquet=open_parquet),
        _root_of,
        lambda args: {args.field: "a document's tokens"},
        has_shards=True,
    )


def _root_of(args: TokensArgs) -> str:
    return args.root
