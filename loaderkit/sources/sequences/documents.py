"""Finds where the documents of one file of tokens lie: by an .idx beside it, by the token that ends each, or by its format.

Megatron's .bin ──> the .idx beside it ──┐
.npy, raw       ──> where `end` stands ──┼──> (first byte, number of tokens) of every document
Arrow           ──> its record batches ──┘
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit._internal.system.user_cache import default_cache_dir
from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.errors import ConfigError, FormatError, ObjectNotFoundError, SourceError
from loaderkit.sources.formats.npy import read_npy_header
from loaderkit.sources.sequences.arrow_lists import load_list_bounds
from loaderkit.sources.sequences.document_ends import load_document_ends
from loaderkit.sources.sequences.megatron import Documents, parse_megatron_index

Form = Literal["megatron", "npy", "raw", "arrow"]


class TokenFormat(NamedTuple):
    """How files say where their documents end: `dtype` and `end` as the user gave them, `column` for an Arrow file."""

    form: Form
    dtype: str | None
    end: int | None
    column: str


def documents_of(connector: Connector, info: ObjectInfo, form: TokenFormat) -> Documents:
    """The documents of one file. Raises `FormatError` if it or its index is not what it should be, `ConfigError` if `form` does
    not fit it, `SourceError` if there are none, and what the connector raises."""
    name = connector.describe(info.key)
    if not info.size:
        raise SourceError(f"{name} is empty (0 bytes): there are no tokens in it")
    if form.form == "megatron":
        return _of_index(connector, info, name)
    if form.form == "arrow":
        return load_list_bounds(connector, info, default_cache_dir(), column=form.column)
    return _by_end(connector, info, form, name)


def _of_index(connector: Connector, info: ObjectInfo, name: str) -> Documents:
    """The documents of Megatron's .bin, by the .idx beside it."""
    key = f"{info.key[: -len('.bin')]}.idx"
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
    num_bytes = documents.lengths * documents.dtype.itemsize
    is_outside = documents.starts > info.size - num_bytes  # a sum might overflow
    if is_outside.any():
        end = max(map(sum, zip(documents.starts[is_outside].tolist(), num_bytes[is_outside].tolist(), strict=True)))
        raise FormatError(
            f"{connector.describe(key)} has documents up to byte {end}, and {name} has {info.size} bytes: one of them "
            "is truncated, or they are not of one data set"
        )
    return documents


def _by_end(connector: Connector, info: ObjectInfo, form: TokenFormat, name: str) -> Documents:
    """The documents of an .npy or raw file, by the token that ends each."""
    if form.form == "npy":
        dtype, first_byte = _npy_of(connector, info, form.dtype, name)
    else:
        dtype, first_byte = np.dtype(form.dtype).newbyteorder("<"), 0
    end = form.end
    assert end is not None
    bounds = np.iinfo(dtype)
    if not bounds.min <= end <= bounds.max:
        raise ConfigError(f"source.end: {end} is no {dtype.name}, which the tokens of {name} are")
    if (info.size - first_byte) % dtype.itemsize:
        raise FormatError(
            f"{name} has {info.size} bytes, which is no multiple of a token's {dtype.itemsize} ({dtype.name}): it is "
            "truncated, or `dtype` is wrong"
        )
    if info.size == first_byte:
        raise SourceError(f"{name} has no tokens")
    ends = load_document_ends(connector, info, default_cache_dir(), first_byte=first_byte, dtype=dtype, end=end)
    if len(ends) == 1:
        last = bytearray(dtype.itemsize)
        connector.read_into(info.key, info.size - dtype.itemsize, memoryview(last), etag=info.etag)
        if np.frombuffer(last, dtype)[0] != end:
            raise SourceError(
                f"{name} has no token {end}, which `end` says ends a document: all of it would be one document. Is `end` "
                "or `dtype` wrong? Windows of one long text are read by kind: array"
            )
    lengths: NDArray[np.int64] = np.diff(ends, prepend=0)
    return Documents(dtype, first_byte + (ends - lengths) * dtype.itemsize, lengths)


def _npy_of(connector: Connector, info: ObjectInfo, given: str | None, name: str) -> tuple[np.dtype[Any], int]:
    """Type and first byte of the tokens of an .npy file."""
    try:
        header = read_npy_header(partial(connector.read_into, info.key, etag=info.etag), info.size)
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
    if given is not None and given != header.dtype.name:
        raise ConfigError(
            f"source.dtype: {given} is not what {name} holds, which is {header.dtype.name} by its header: leave `dtype` "
            "out, an .npy file states it"
        )
    return header.dtype, header.data_start
