"""`kind: tokens`: the documents of one file of tokens, which differ in length.

Megatron's .bin ──> the .idx beside it ──┐
.npy, raw       ──> where `end` stands ──┴──> (first byte, number of tokens) of every document ──> one range a sample
"""

from __future__ import annotations

import time
from functools import partial
from hashlib import blake2b
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from loaderkit._internal.system.user_cache import default_cache_dir
from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.connectors.config import StoreArgs
from loaderkit.errors import ConfigError, FormatError, ObjectNotFoundError, SourceError
from loaderkit.sources.base import PackedSize, SourceKind
from loaderkit.sources.formats.npy import read_npy_header
from loaderkit.sources.listing import numbered
from loaderkit.sources.sequences.document_ends import load_document_ends
from loaderkit.sources.sequences.megatron import Documents, parse_megatron_index
from loaderkit.sources.sequences.reader import Sequences, SequenceSource

TokenType = Literal["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]


class TokensArgs(StoreArgs):
    """The documents of one file of tokens: Megatron's `.bin` and `.idx`, an `.npy` file, or raw numbers."""

    kind: Literal["tokens"] = "tokens"
    url: Annotated[
        str,
        Field(
            min_length=1,
            description="the file: a .bin with its .idx beside it (without `dtype`), .npy, or raw (with `dtype`)",
        ),
    ]
    dtype: TokenType | None = Field(None, description="of a raw file, little-endian; .npy and .idx state it")
    end: int | None = Field(None, description="the token that ends a document and is its last; an .idx states the ends")
    field: str = Field("tokens", min_length=1, description="its name in the batch")

    @model_validator(mode="after")
    def _fits(self) -> TokensArgs:
        if not self.key:
            raise ValueError(f"`url` must name one file, not the folder {self.url!r}")
        if self.form == "raw" and self.dtype is None:
            raise ValueError(
                f"`dtype` is missing: {self.key!r} is neither .npy nor .bin, so give the type of its tokens (dtype: uint16)"
            )
        if self.form == "megatron" and self.end is not None:
            raise ValueError(
                f"`end` is for .npy and raw files: the documents of {self.key!r} are in its .idx (for raw tokens in a .bin, "
                "give `dtype`, too)"
            )
        if self.form != "megatron" and self.end is None:
            raise ValueError("`end` is missing: the token that ends a document")
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
    def form(self) -> Literal["megatron", "npy", "raw"]:
        """How the file says where its documents end."""
        name = self.key.lower()
        if name.endswith(".npy"):
            return "npy"
        return "megatron" if name.endswith(".bin") and self.dtype is None else "raw"


class TokensSource(SequenceSource):
    """The documents of one object of `connector`. In memory 16 bytes a document.

    Raises `FormatError` if the file or its index is not what it should be, `ConfigError` if `args` do not fit it, `SourceError`
    if there are no tokens, and what the connector raises.
    """

    def __init__(self, connector: Connector, args: TokensArgs) -> None:
        self.file = connector.stat(args.key)
        name = connector.describe(args.key)
        if not self.file.size:
            raise SourceError(f"{name} is empty (0 bytes): there are no tokens in it")
        begin_s = time.perf_counter()
        find = _documents_of_index if args.form == "megatron" else _documents_by_end
        dtype, starts, lengths = find(connector, args, self.file, name)
        self.index_s = time.perf_counter() - begin_s
        if not len(starts):
            raise SourceError(f"{name} has no documents")
        self.starts, self.lengths = starts[: args.limit], lengths[: args.limit]
        for values in (self.starts, self.lengths):
            values.setflags(write=False)
        self.sequences = Sequences(args.field, dtype.name, not dtype.isnative, dtype.itemsize)

    def __len__(self) -> int:
        return len(self.starts)

    def key(self, index: int) -> str:
        """The document's number."""
        return str(index)

    def keys(self, indices: NDArray[np.int64]) -> list[str]:
        """The documents' numbers."""
        return numbered(indices)

    def origin(self, index: int) -> str:
        """The key of the file."""
        return self.file.key

    def blocks(self, block_bytes: int) -> NDArray[np.int64]:
        """Runs of documents of about `block_bytes`, each at least one: int64 [number of runs + 1]."""
        ends = np.cumsum(self.lengths * self.sequences.item_bytes)
        numbers = np.concatenate(([0], ends[:-1])) // block_bytes
        return np.concatenate(([0], np.flatnonzero(np.diff(numbers)) + 1, [len(self)])).astype(np.int64)

    def packed(self) -> PackedSize:
        return PackedSize(len(self), int(self.lengths.sum()) * self.sequences.item_bytes, self.file.size)

    def fingerprint(self) -> str:
        """16 hexadecimal digits from the type and the lengths of all documents."""
        digest = blake2b(self.sequences.dtype.encode(), digest_size=8)
        digest.update(np.ascontiguousarray(self.lengths).data)
        return digest.hexdigest()


def _documents_of_index(connector: Connector, args: TokensArgs, info: ObjectInfo, name: str) -> Documents:
    """The documents of Megatron's .bin, by the .idx beside it."""
    key = f"{args.key[: -len('.bin')]}.idx"
    try:
        index = connector.stat(key)
    except ObjectNotFoundError as error:
        raise ConfigError(
            f"source.dtype: {name} has no {key} beside it, which Megatron's .bin have: put it there, or, for raw tokens, "
            "give `dtype` and `end`"
        ) from error
    data = bytearray(index.size)
    connector.read_into(key, 0, memoryview(data), etag=index.etag)
    try:
        documents = parse_megatron_index(data)
    except FormatError as error:
        raise FormatError(f"{connector.describe(key)}: {error}") from None
    ends = documents.starts + documents.lengths * documents.dtype.itemsize
    if len(ends) and ends.max() > info.size:
        raise FormatError(
            f"{connector.describe(key)} has documents up to byte {ends.max()}, and {name} has {info.size} bytes: one of them "
            "is truncated, or they are not of one data set"
        )
    return documents


def _documents_by_end(connector: Connector, args: TokensArgs, info: ObjectInfo, name: str) -> Documents:
    """The documents of an .npy or raw file, by the token that ends each."""
    if args.form == "npy":
        dtype, first_byte = _npy_of(connector, args, info, name)
    else:
        dtype, first_byte = np.dtype(args.dtype).newbyteorder("<"), 0
    assert args.end is not None
    bounds = np.iinfo(dtype)
    if not bounds.min <= args.end <= bounds.max:
        raise ConfigError(f"source.end: {args.end} is no {dtype.name}, which the tokens of {name} are")
    if (info.size - first_byte) % dtype.itemsize:
        raise FormatError(
            f"{name} has {info.size} bytes, which is no multiple of a token's {dtype.itemsize} ({dtype.name}): it is "
            "truncated, or `dtype` is wrong"
        )
    if info.size == first_byte:
        raise SourceError(f"{name} has no tokens")
    ends = load_document_ends(connector, info, default_cache_dir(), first_byte=first_byte, dtype=dtype, end=args.end)
    if len(ends) == 1:
        last = bytearray(dtype.itemsize)
        connector.read_into(args.key, info.size - dtype.itemsize, memoryview(last), etag=info.etag)
        if np.frombuffer(last, dtype)[0] != args.end:
            raise SourceError(
                f"{name} has no token {args.end}, which `end` says ends a document: all of it would be one document. Is `end` "
                "or `dtype` wrong? Windows of one long text are read by kind: array"
            )
    lengths = np.diff(ends, prepend=0)
    return Documents(dtype, first_byte + (ends - lengths) * dtype.itemsize, lengths)


def _npy_of(connector: Connector, args: TokensArgs, info: ObjectInfo, name: str) -> tuple[np.dtype[Any], int]:
    """Type and first byte of the tokens of an .npy file."""
    try:
        header = read_npy_header(partial(connector.read_into, args.key, etag=info.etag), info.size)
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None
    if len(header.shape) != 1 or header.dtype.kind not in "iu":
        raise FormatError(
            f"{name} is {header.dtype.name} {list(header.shape)}: tokens are whole numbers in one dimension (for rows of one "
            "length: kind: array)"
        )
    if header.data_start + header.num_bytes != info.size:
        raise FormatError(
            f"{name} has {info.size} bytes, and its header promises {header.data_start + header.num_bytes}: it is truncated, "
            "or something follows the array"
        )
    if args.dtype is not None and args.dtype != header.dtype.name:
        raise ConfigError(
            f"source.dtype: {args.dtype} is not what {name} holds, which is {header.dtype.name} by its header: leave `dtype` "
            "out, an .npy file states it"
        )
    return header.dtype, header.data_start


TOKENS = SourceKind(
    TokensArgs,
    lambda args, connector: TokensSource(connector, args),
    lambda args: args.root,
    lambda args: {args.field: "a document's tokens"},
)
