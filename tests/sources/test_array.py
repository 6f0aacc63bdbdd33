"""Where the records and windows of one file lie, and what is said when the file is not what the description says."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from loaderkit.connectors.base import ObjectInfo
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError, FormatError, LoaderkitError, ObjectNotFoundError, SourceError
from loaderkit.sources.base import Source
from loaderkit.sources.records.array import ArrayArgs, ArraySource
from loaderkit.sources.records.reader import RecordSource


def npy(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def source_of(data: bytes | NDArray[Any], **args: Any) -> ArraySource:
    """A source over raw bytes if `dtype` is given, else over an .npy file."""
    raw = "dtype" in args and not args.pop("named_npy", False)
    name = "x.bin" if raw else "x.npy"
    content = data if isinstance(data, bytes) else data.tobytes() if raw else npy(data)
    return ArraySource(MemoryConnector({name: content}), ArrayArgs.model_validate({"url": f"memory://{name}", **args}))


def sample_bytes(source: ArraySource, content: bytes, index: int) -> bytes:
    """The bytes of a sample, of the object's `content`."""
    ((_, _, (_, start, length, _)),) = source.ranges(index)
    return content[start : start + length]


@given(
    shape=st.lists(st.integers(1, 4), max_size=2),
    num_records=st.integers(1, 30),
    window=st.one_of(st.none(), st.integers(1, 30)),
    dtype=st.sampled_from(["bool", "uint8", "int16", "float32", "complex128"]),
    is_npy=st.booleans(),
)
def test_samples_are_numpys_slices(
    shape: list[int], num_records: int, window: int | None, dtype: str, is_npy: bool
) -> None:
    array = np.random.default_rng(0).integers(0, 2, (num_records, *shape)).astype(dtype)
    more = {} if is_npy else {"dtype": dtype, "shape": shape}
    if window is not None and window > num_records:
        with pytest.raises(ConfigError, match=f"window: {window} records are more than the {num_records}"):
            source_of(array, window=window, **more)
        return
    source = source_of(array, window=window, **more)
    checked: tuple[Source, RecordSource] = source, source
    assert len(checked[0]) == num_records - (window or 1) + 1
    wanted = [array[i] if window is None else array[i : i + window] for i in range(len(source))]
    content = npy(array) if is_npy else array.tobytes()
    assert [sample_bytes(source, content, i) for i in range(len(source))] == [w.tobytes() for w in wanted]
    indices = np.arange(len(source))
    assert source.starts(indices).tolist() == [source.ranges(i)[0].range.start for i in range(len(source))]
    assert source.keys(indices) == [source.key(i) for i in range(len(source))] == list(map(str, range(len(source))))
    assert source.records.shape == wanted[0].shape
    assert (source.records.dtype, source.records.num_bytes) == (dtype, wanted[0].nbytes)


def test_blocks_are_equal_runs() -> None:
    source = source_of(np.zeros((1000, 4), np.float32))
    for block_bytes in (1, 16, 100, 1600, 5000, 10**6):
        bounds = source.blocks(block_bytes)
        lengths = np.diff(bounds)
        assert (bounds[0], bounds[-1], bounds.dtype.name) == (0, 1000, "int64")
        assert lengths.min() >= 1
        assert lengths.max() - lengths.min() <= 1
        assert len(lengths) == max(1, min(1000, round(16000 / block_bytes)))
    assert len(source_of(np.zeros(100, np.uint8), window=91).blocks(1)) == 11


class Huge(MemoryConnector):
    """Claims to hold a file of 40 TB."""

    def stat(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, 40 * 10**12, "e")

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        buffer[:] = bytes(len(buffer))


def test_terabytes_cost_nothing() -> None:
    args = ArrayArgs.model_validate({"url": "memory://x.bin", "dtype": "uint16", "window": 2049})
    source = ArraySource(Huge(), args)
    assert len(source) == 20 * 10**12 - 2048
    assert source.ranges(len(source) - 1)[0].range.start + 2 * 2049 == 40 * 10**12
    assert source.starts(np.array([len(source) - 1]))[0] == 2 * (len(source) - 1)
    bounds = source.blocks(1 << 30)
    assert len(bounds) == round(2 * len(source) / (1 << 30)) + 1
    assert bounds[-1] == len(source)
    with pytest.raises(IndexError):
        source.ranges(len(source))


def test_what_a_fingerprint_depends_on() -> None:
    array = np.arange(24, dtype=np.int32)
    prints = [
        source_of(array),
        source_of(array.reshape(12, 2)),
        source_of(array, window=2),
        source_of(array, limit=3),
        source_of(array.astype(np.float32)),
        source_of(array.astype(">i4")),
        source_of(np.arange(25, dtype=np.int32)),
        source_of(array, dtype="int32"),
    ]
    assert len({source.fingerprint() for source in prints}) == len(prints)
    assert source_of(array).fingerprint() == source_of(array[::-1].copy()).fingerprint()


def test_types_may_be_said_again() -> None:
    array = np.zeros((3, 2), ">f4")
    source = source_of(array, dtype="float32", shape=[2], named_npy=True)
    assert source.records == ("data", "float32", (2,), True, 8)
    with pytest.raises(ConfigError, match=r"source.dtype: int8 is not what memory://x.npy holds, which is float32"):
        source_of(array, dtype="int8", named_npy=True)
    with pytest.raises(ConfigError, match=r"source.shape: \[3\] is not what .* which is \[2\]"):
        source_of(array, shape=[3])


def test_fortran_order_of_one_dimension_is_no_difference() -> None:
    array = np.asfortranarray(np.arange(6).reshape(6, 1))
    assert sample_bytes(source_of(array), npy(array), 4) == np.int64(4).tobytes()


@pytest.mark.parametrize(
    ("data", "args", "kind", "message"),
    [
        (b"", {"dtype": "int8"}, SourceError, "empty"),
        (b"", {}, SourceError, "empty"),
        (b"12345", {"dtype": "int16"}, FormatError, r"5 bytes, which is no multiple of a record's 2 \(int16 \[\]\)"),
        (bytes(20), {"dtype": "int16", "shape": [4]}, FormatError, r"no multiple of a record's 8 \(int16 \[4\]\)"),
        (npy(np.zeros(4)), {"dtype": "int8"}, ConfigError, "begins like an .npy file"),
        (b"nothing", {}, FormatError, "memory://x.npy: not an .npy file"),
        (npy(np.zeros(4))[:-1], {}, FormatError, r"truncated: float64 \[4\] ends at byte 160, the file at 159"),
        (npy(np.zeros(4))[:90], {}, FormatError, "truncated"),
        (npy(np.zeros(4)) * 2, {}, FormatError, "several arrays in one file"),
        (np.zeros((3, 4), order="F"), {}, FormatError, r"Fortran order.*ascontiguousarray"),
        (np.zeros(3, "<M8[s]"), {}, FormatError, r"datetime64.* for which torch has no type"),
        (np.zeros(3, "<U3"), {}, FormatError, "torch has no type"),
        (np.zeros(3, "S3"), {}, FormatError, "torch has no type"),
        (np.zeros(3, np.longdouble), {}, FormatError, "torch has no type"),
        (np.zeros(3, "f4,i4"), {}, FormatError, "structured records.*one array a field"),
        (np.array([None]), {}, FormatError, "Python objects"),
        (np.array(3.0), {}, FormatError, "a single number"),
        (np.zeros((0, 3)), {}, FormatError, r"shape \[0, 3\], which is empty"),
        (np.zeros((3, 0)), {}, FormatError, r"shape \[3, 0\], which is empty"),
        (np.zeros(4), {"window": 5}, ConfigError, "5 records are more than the 4"),
    ],
)
def test_files_that_do_not_fit(
    data: bytes | NDArray[Any], args: dict[str, Any], kind: type[LoaderkitError], message: str
) -> None:
    content = data if isinstance(data, bytes) else _saved(data)
    with pytest.raises(kind, match=message):
        source_of(content, **args)


def _saved(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ObjectNotFoundError):
        ArraySource(MemoryConnector(), ArrayArgs.model_validate({"url": "memory://x.npy"}))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"url": "data/"}, "must name one file"),
        ({"url": ""}, "at least 1"),
        ({"url": "tokens.bin"}, "`dtype` is missing"),
        ({"url": "x.bin", "dtype": "float128"}, "dtype"),
        ({"url": "x.bin", "dtype": "int8", "shape": [0]}, "greater than 0"),
        ({"url": "x.bin", "dtype": "int8", "shape": 3}, "shape"),
        ({"url": "x.npy", "window": 0}, "greater than 0"),
        ({"url": "x.npy", "limit": 0}, "greater than 0"),
        ({"url": "x.npy", "field": "__key__"}, "field"),
        ({"url": "x.npy", "field": ""}, "field"),
        ({"url": "x.npy", "label": "parent"}, "label"),
    ],
)
def test_wrong_arguments(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ArrayArgs.model_validate(args)
