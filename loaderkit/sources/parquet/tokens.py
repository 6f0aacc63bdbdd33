"""Documents of tokens in Parquet files, for `kind: tokens`: lists of a column, which is decoded once for their lengths."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from loaderkit._internal.system.cgroups import num_cpus
from loaderkit._internal.system.user_cache import default_cache_dir
from loaderkit.connectors.base import Connector
from loaderkit.errors import ConfigError, FormatError, LoaderkitError
from loaderkit.sources.arrow.columns import ListColumn
from loaderkit.sources.bad_shards import BadShards
from loaderkit.sources.lengths import LengthIndex
from loaderkit.sources.listing import StringTable
from loaderkit.sources.parquet.footers import load_footer
from loaderkit.sources.parquet.groups import GroupReader
from loaderkit.sources.parquet.source import ParquetArgs, ParquetSource

Int64 = NDArray[np.int64]


class ParquetDocuments(ParquetSource):
    """The rows of one column of lists of whole numbers, a document each. Raises as `ParquetSource` does, and _DamagedError for
    files that are left out, as lists in them cannot be decoded."""

    def __init__(self, connector: Connector, args: ParquetArgs, field: str, column: str, found_bad: BadShards) -> None:
        begin_s = time.perf_counter()
        load = partial(load_footer, connector, cache_dir=default_cache_dir(), checks_begin=found_bad.skips)
        super().__init__(connector, args, load, found_bad)
        kind = self.types[column]
        if kind.content != "number" or len(kind.shape) != 1 or np.dtype(kind.dtype).kind not in "iu":
            raise ConfigError(
                f"source.column: {column!r} of {connector.describe(self.origin(0))} holds {kind}, and documents of tokens are "
                "lists of whole numbers"
            )
        self.length_field, self._column = field, column
        index = LengthIndex(default_cache_dir(), self._made_of(connector))
        found = index.load(len(self))
        self.lengths = self._measured(connector) if found is None else found[0]
        if found is None:
            with suppress(OSError):  # as when the disk is full: that only costs time at the next start
                index.save(self.lengths, 0)
        self.lengths.setflags(write=False)
        self.index_s = time.perf_counter() - begin_s

    def _made_of(self, connector: Connector) -> str:
        etags = blake2b(StringTable(info.etag for info in self._files).digest(), digest_size=8).hexdigest()
        return f"parquet {connector.describe('')} {self._column} {self.fingerprint()} {etags}"

    def _measured(self, connector: Connector) -> Int64:
        """The lengths of all rows, by decoding their column."""
        read = GroupReader(self, connector).read
        num_rows = np.diff(self._firsts)  # of the last row group, those within `limit`

        def lengths_in(group: int) -> Int64:
            (column,) = read(group).columns.values()
            lengths = column.lengths() if isinstance(column, ListColumn) else np.full(num_rows[group], self._length)
            if lengths is None:
                info, number = self.file_of(group)
                raise FormatError(
                    f"{connector.describe(info.key)}: the column {self._column!r} has nulls, in row group {number}: leave "
                    "these rows out when you write it"
                )
            return lengths[: num_rows[group]]

        with ThreadPoolExecutor(num_cpus(), thread_name_prefix="loaderkit-index") as pool:
            tried = [*pool.map(BadShards.tried(lengths_in), range(len(num_rows)))]
        damaged: dict[str, LoaderkitError] = {}
        for group, found in enumerate(tried):
            if isinstance(found, LoaderkitError):
                damaged.setdefault(self.file_of(group)[0].key, found)
        for key, error in damaged.items():
            self._found_bad.leave_out(key, connector.describe(key), error)
        if damaged:
            raise _DamagedError(*damaged)
        return np.concatenate([found for found in tried if not isinstance(found, LoaderkitError)]).astype(np.int64)

    @property
    def _length(self) -> int:
        """That of all lists, if it is the same."""
        return self.types[self._column].shape[0] or 0


class _DamagedError(Exception):
    """The keys of files that are to be left out."""


def open_documents(
    connector: Connector,
    *,
    root: str,
    files: tuple[str, ...],
    column: str,
    field: str,
    limit: int | None,
    memory: int,
    found_bad: BadShards,
) -> ParquetDocuments:
    """The documents in these files below `root`, the connector's, without those that are told to `found_bad`."""
    while files:
        args = ParquetArgs(
            url=f"{root.rstrip('/')}/",
            include=files,
            columns=(column,),
            fields={field: column},
            limit=limit,
            memory=memory,
        )
        try:
            return ParquetDocuments(connector, args, field, column, found_bad)
        except _DamagedError as damaged:
            files = tuple(name for name in files if name not in damaged.args)
    found_bad.refuse_empty()
    raise AssertionError("files are left out that no one was told of")
