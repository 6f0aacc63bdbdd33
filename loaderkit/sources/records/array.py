"""`kind: array`: one file of fixed-size records, `.npy` or raw, whose samples are its records, or windows of them.

A sample's range is computed: sample i begins at data_start + i * record bytes, and is `window` records long. So a file of any
size takes no memory except for the boundaries of blocks.
"""

from __future__ import annotations

import sys
from functools import partial
from hashlib import blake2b
from math import prod
from typing import Annotated, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from loaderkit._internal.config.settings import as_tuple
from loaderkit.connectors.base import Connector
from loaderkit.connectors.config import StoreArgs
from loaderkit.errors import ConfigError, FormatError, SourceError
from loaderkit.sources.bad_shards import BadShards
from loaderkit.sources.base import PackedSize, SourceKind
from loaderkit.sources.formats.npy import NpyHeader, read_npy_header
from loaderkit.sources.listing import numbered
from loaderkit.sources.records.reader import Records, RecordSource

DType = Literal[
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip
_ITEM_BYTES = {"bfloat16": 2}
_IN_NUMPY = frozenset(get_args(DType)) - {"bfloat16"}


class ArrayArgs(StoreArgs):
    """The records of one file: an array's rows, or all windows of them."""

    kind: Literal["array"] = "array"
    url: Annotated[str, Field(min_length=1, description="the file: .npy, or raw records (with `dtype`)")]
    dtype: DType | None = Field(None, description="of a raw file, little-endian; an .npy file states it")
    shape: Annotated[
        tuple[PositiveInt, ...] | None,
        BeforeValidator(as_tuple),
    ] = Field(None, description="of one record of a raw file; default: [], single numbers")
    window: PositiveInt | None = Field(
        None,
        description="samples are all windows of this many consecutive records, [window, ...]; default: the records",
    )
    field: str = Field("data", min_length=1, description="its name in the batch")

    @model_validator(mode="after")
    def _is_one_file(self) -> ArrayArgs:
        if not self.key:
            raise ValueError(
                f"`url` must name one file, not the folder {self.url!r} (for files as samples: kind: files)"
            )
        if self.dtype is None and not self.is_npy:
            raise ValueError(
                f"`dtype` is missing: {self.key!r} is no .npy file, so give the type of its numbers (dtype: uint16)"
            )
        if self.field.startswith("__"):
            raise ValueError(f"`field` {self.field!r}: names that begin with two underscores are reserved")
        return self

    @property
    def root(self) -> str:
        """The connector's root: the file's folder."""
        return self.url[: self.url.rfind("/") + 1] or "."

    @property
    def key(self) -> str:
        """The file's key below `root`."""
        return self.url[self.url.rfind("/") + 1 :]

    @property
    def is_npy(self) -> bool:
        return self.key.lower().endswith(".npy")


class ArraySource(RecordSource):
    """The records of one object of `connector`, or the windows of them.

    Raises `FormatError` if the file is not what it should be, `ConfigError` if `args` do not fit it, `SourceError` if it is
    empty, and what the connector raises. With `found_bad`, a file that is cut is reported to it, and its whole records stay.
    """

    def __init__(self, connector: Connector, args: ArrayArgs, found_bad: BadShards | None = None) -> None:
        self._connector = connector
        self._args = args
        self._found_bad = found_bad or BadShards()
        self.file = connector.stat(args.key)
        self._name = connector.describe(args.key)
        if not self.file.size:
            raise SourceError(f"{self._name} is empty (0 bytes): there are no records in it")
        dtype, is_swapped, shape, self._data_start = self._of_npy() if args.is_npy else self._of_raw()
        item_bytes = _ITEM_BYTES.get(dtype) or np.dtype(dtype).itemsize
        self._record_bytes = item_bytes * prod(shape)
        self._num_records = self._counted()
        self._size = self._num_samples()
        window = (args.window,) if args.window is not None else ()
        # As arrays: converting the numbers takes longer than to multiply and to add.
        self._stride, self._first = np.array(self._record_bytes), np.array(self._data_start)
        self.records = Records(args.field, dtype, (*window, *shape), is_swapped, self._record_bytes * prod(window))

    def __len__(self) -> int:
        return self._size

    def key(self, index: int) -> str:
        """The sample's number."""
        return str(index)

    def keys(self, indices: NDArray[np.int64]) -> list[str]:
        """The samples' numbers."""
        return numbered(indices)

    def origin(self, index: int) -> str:
        """The key of the file."""
        return self.file.key

    def starts(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first byte of every sample in the file: int64 [n]."""
        starts: NDArray[np.int64] = indices * self._stride + self._first
        return starts

    def blocks(self, block_bytes: int) -> NDArray[np.int64]:
        """Equal runs of samples of about `block_bytes` each: int64 [number of runs + 1].

        A window counts as one record, as it shares the rest with its neighbours.
        """
        num_runs = max(1, min(self._size, round(self._size * self._record_bytes / block_bytes)))
        each, rest = divmod(self._size, num_runs)
        numbers = np.arange(num_runs + 1, dtype=np.int64)
        return numbers * each + np.minimum(numbers, rest)

    def packed(self) -> PackedSize:
        """Windows overlap, so that the samples have more bytes than the file."""
        return PackedSize(len(self), len(self) * self.records.num_bytes, self.file.size)

    def fingerprint(self) -> str:
        """16 hexadecimal digits from type, shape, window, number of samples and size of the file."""
        records = self.records
        parts = (records.dtype, records.is_swapped, records.shape, self._args.window, self._size, self.file.size)
        return blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    # ------------------------------------------------------------------------------------------------- building

    def _of_npy(self) -> tuple[str, bool, tuple[int, ...], int]:
        """The type, whether its bytes are swapped, a record's shape, and the offset of the first record."""
        try:
            read = partial(self._connector.read_into, self.file.key, etag=self.file.etag)
            header = read_npy_header(read, self.file.size)
            self._check_npy(header)
        except FormatError as error:
            raise FormatError(f"{self._name}: {error}") from None
        whole = header.data_start + header.num_bytes
        if self.file.size < whole:
            self._keep_whole_records(
                f"it is truncated: {header.dtype.name} {list(header.shape)} ends at byte {whole}, the file at "
                f"{self.file.size}",
                (self.file.size - header.data_start) // (header.num_bytes // header.shape[0]),
            )
        dtype, shape = header.dtype.name, header.shape[1:]
        for name, configured, actual in (("dtype", self._args.dtype, dtype), ("shape", self._args.shape, shape)):
            if configured is not None and configured != actual:
                shown = [list(value) if isinstance(value, tuple) else value for value in (configured, actual)]
                raise ConfigError(
                    f"source.{name}: {shown[0]} is not what {self._name} holds, which is {shown[1]} by its header: "
                    f"leave `{name}` out, an .npy file states it"
                )
        return dtype, not header.dtype.isnative, shape, header.data_start

    def _check_npy(self, header: NpyHeader) -> None:
        """Raise `FormatError` unless the array can be read record by record."""
        dtype, shape = header.dtype, header.shape
        if dtype.name not in _IN_NUMPY:
            problem = "structured records" if dtype.names else f"{dtype.name} values"
            raise FormatError(
                f"it holds {problem} ({str(dtype)[:200]}), for which torch has no type: save it as numbers of a type among "
                f"{', '.join(sorted(_IN_NUMPY))}" + (", one array a field" if dtype.names else "")
            )
        if not shape or not prod(shape):
            problem = "a single number" if not shape else f"an array of shape {list(shape)}, which is empty"
            raise FormatError(f"it holds {problem}: its records are counted by the first index, and there must be some")
        if not header.is_c_order:
            raise FormatError(
                "its array is in Fortran order, so a record is spread over the whole file: save it again with "
                "np.save(path, np.ascontiguousarray(array))"
            )
        whole = header.data_start + header.num_bytes
        if whole < self.file.size:
            raise FormatError(
                f"it is longer than its header says (several arrays in one file?): {dtype.name} {list(shape)} ends at byte "
                f"{whole}, the file at {self.file.size}"
            )

    def _of_raw(self) -> tuple[str, bool, tuple[int, ...], int]:
        begin = bytearray(min(6, self.file.size))
        self._connector.read_into(self.file.key, 0, memoryview(begin), etag=self.file.etag)
        if begin == b"\x93NUMPY":
            raise ConfigError(
                f"source.url: {self._name} begins like an .npy file, and its header would be read as samples: "
                "name it .npy, and leave `dtype` out"
            )
        assert self._args.dtype is not None
        return self._args.dtype, sys.byteorder != "little", self._args.shape or (), 0

    def _counted(self) -> int:
        num_records, rest = divmod(self.file.size - self._data_start, self._record_bytes)
        if rest and not self._args.is_npy:
            self._keep_whole_records(
                f"it has {self.file.size} bytes, which is no multiple of a record's {self._record_bytes} "
                f"({self._args.dtype} {list(self._args.shape or ())}): it is truncated, or `dtype` or `shape` is wrong",
                num_records,
            )
        return num_records

    def _keep_whole_records(self, problem: str, num: int) -> None:
        """Note that the file is cut behind `num` records. Raises FormatError if the file must be whole, or if no record
        is left."""
        self._found_bad.leave_out(self.file.key, self._name, FormatError(f"{self._name}: {problem}"), num)
        if not num:
            self._found_bad.refuse_empty()

    def _num_samples(self) -> int:
        window = self._args.window or 1
        if window > self._num_records:
            raise ConfigError(
                f"source.window: {window} records are more than the {self._num_records} of {self._name}: "
                "there is not one window; make it smaller"
            )
        num_samples = self._num_records - window + 1
        return num_samples if self._args.limit is None else min(num_samples, self._args.limit)


ARRAY = SourceKind(
    ArrayArgs,
    lambda args, connector, found_bad: ArraySource(connector, args, found_bad),
    lambda args: args.root,
    has_shards=True,
)
