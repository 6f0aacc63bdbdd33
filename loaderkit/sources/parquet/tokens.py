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
from loaderkit.errors import ConfigError, FormatError
from loaderkit.sources.arrow.columns import ListColumn
from loaderkit.sources.lengths import LengthIndex
from loaderkit.sources.listing import StringTable
from loaderkit.sources.parquet.footers import load_footer
from loaderkit.sources.parquet.groups import GroupReader
from loaderkit.sources.parquet.source import ParquetArgs, ParquetSource

Int64 = NDArray[np.int64]


class ParquetDocuments(ParquetSource):
    """The rows of one column of lists of whole numbers, a document each. Raises as `ParquetSource` does."""

    def __init__(self, connector: Connector, args: ParquetArgs, field: str, column: str) -> None:
        begin_s = time.perf_counter()
        super().__init__(connector, args, partial(load_footer, connector, cache_dir=default_cache_dir()))
        kind = self._types[column]
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
            return np.concatenate(list(pool.map(lengths_in, range(len(num_rows))))).astype(np.int64)

    @property
    def _length(self) -> int:
        """The length of all lists, if it is the same for all."""
        return self._types[self._column].shape[0] or 0


def open_documents(
    connector: Connector,
    *,
    root: str,
    files: str | tuple[str, ...],
    column: str,
    field: str,
    limit: int | None,
    memory: int,
) -> ParquetDocuments:
    """The documents in the files that match below `root`, the connector's."""
    args = ParquetArgs(
        url=f"{root.rstrip('/')}/", include=files, columns=(column,), fields={field: column}, limit=limit, memory=memory
    )
    return ParquetDocuments(connector, args, field, column)
