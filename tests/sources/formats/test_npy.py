"""Headers of .npy and members of .npz are what NumPy says they are; whatever is damaged is a FormatError that says where."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from num_examples import num_examples
from numpy.typing import NDArray

from loaderkit.errors import FormatError
from loaderkit.sources.formats.npy import parse_npy_header, read_npy_header, view_npy
from loaderkit.sources.formats.npz import read_npz_members, unpack_member, view_npz

MAGIC = b"\x93NUMPY"
arrays = hnp.arrays(
    st.one_of(
        hnp.boolean_dtypes(),
        hnp.integer_dtypes(endianness="?"),
        hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
        hnp.complex_number_dtypes(endianness="?", sizes=(64, 128)),
        hnp.unicode_string_dtypes(endianness="?", max_len=4),
        hnp.datetime64_dtypes(max_period="D", min_period="s"),
        hnp.array_dtypes(),
    ),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
)


def npy(array: NDArray[Any], version: tuple[int, int] | None = None) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version, allow_pickle=True)
    return buffer.getvalue()


def npz(members: dict[str, NDArray[Any]], *, packed: bool = False) -> bytes:
    buffer = io.BytesIO()
    (np.savez_compressed if packed else np.savez)(buffer, **members)  # type: ignore[arg-type]
    return buffer.getvalue()


def own_npy(text: str, version: int = 1, body: bytes = b"") -> bytes:
    data = text.encode()
    return MAGIC + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(data)) + data + body


class Ranges:
    """Bytes that are read by ranges, which are counted."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked: list[tuple[int, int]] = []

    def __call__(self, start: int, buffer: memoryview) -> None:
        assert 0 <= start <= start + len(buffer) <= len(self.data)
        self.asked.append((start, len(buffer)))
        buffer[:] = self.data[start : start + len(buffer)]


def assert_same(found: NDArray[Any], wanted: NDArray[Any]) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()


# ------------------------------------------------------------------------------------------------------ one array


@pytest.mark.filterwarnings("ignore:Stored array in format")
@given(array=arrays, version=st.sampled_from([(1, 0), (2, 0), (3, 0), None]), is_fortran=st.booleans())
def test_headers_and_views_are_numpys(array: NDArray[Any], version: tuple[int, int] | None, is_fortran: bool) -> None:
    array = np.asfortranarray(array) if is_fortran else array
    try:
        data = npy(array, version)
    except UnicodeEncodeError:
        assume(False)  # a field's name that only version 3 can hold
    read = Ranges(data)
    header = read_npy_header(read, len(data))
    assert header == parse_npy_header(data, len(data))
    assert (header.dtype, header.shape) == (array.dtype, array.shape)
    assert (header.num_bytes, header.data_start + header.num_bytes) == (array.nbytes, len(data))
    assert header.is_c_order == (not header.fortran_order or array.flags.c_contiguous or array.size == 0)
    assert sum(length for _, length in read.asked) <= max(256, header.data_start)
    memory = memoryview(bytearray(data))
    view = view_npy(memory)
    assert_same(view, np.load(io.BytesIO(data)))
    assert array.size == 0 or np.shares_memory(view, np.frombuffer(memory, np.uint8))


def test_a_long_header_takes_a_second_read() -> None:
    array = np.zeros(3, [(f"a name that is rather long {n}", "<f4") for n in range(50)])
    data = npy(array)
    read = Ranges(data)
    assert read_npy_header(read, len(data)).dtype == array.dtype
    assert len(read.asked) == 2


def test_what_python_2_wrote() -> None:
    data = own_npy("{'descr': '<i8', 'fortran_order': False, 'shape': (2L, 3L), }\n", body=bytes(48))
    assert view_npy(memoryview(data)).shape == (2, 3)


def test_bytes_behind_the_array_are_ignored() -> None:
    array = np.arange(5)
    assert_same(view_npy(memoryview(npy(array) + b"more")), array)


GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not an .npy file"),
        (b"PK\3\4 and so on", "not an .npy file: it begins with"),
        (MAGIC, "truncated"),
        (MAGIC + b"\1\0\x76", "truncated"),
        (MAGIC + b"\4\0" + bytes(60), r"version 4\.0 .* unknown \(byte 6\)"),
        (MAGIC + b"\2\0" + b"\xff" * 8, "more than any array needs"),
        (npy(np.arange(9))[:100], "header ends at byte 128, the file at 100"),
        (npy(np.arange(9))[:-1], r"truncated .npy: int64 \[9\] takes 72 bytes from byte 128 on, and 71"),
        (own_npy("{'descr': "), "damaged"),
        (own_npy("(" * 5000), "damaged"),
        (own_npy("-" * 5000 + "1"), "damaged"),
        (own_npy("__import__('os').getpid()"), "damaged"),
        (own_npy("[1, 2]"), "damaged"),
        (own_npy("{1: 2}"), "damaged"),
        (own_npy(GOOD.replace("}", "'more': 1}")), "damaged"),
        (own_npy(GOOD.replace("'<f4'", "'<f5'")), "is no type of NumPy"),
        (own_npy(GOOD.replace("'<f4'", "None")), "is no type of NumPy"),
        (own_npy(GOOD.replace("'<f4'", "'|O'")), "Python objects.*pickle"),
        (own_npy(GOOD.replace("'<f4'", "[('a', '|O')]")), "Python objects.*pickle"),
        (own_npy(GOOD.replace("False", "1")), "fortran_order is 1, not True or False"),
        (own_npy(GOOD.replace("(2,)", "[2]")), r"shape is \[2\]"),
        (own_npy(GOOD.replace("(2,)", "(-2,)")), r"shape is \(-2,\)"),
        (own_npy(GOOD.replace("(2,)", "(True,)")), "shape is"),
        (own_npy(GOOD.replace("(2,)", "(2.0,)")), "shape is"),
        (own_npy(GOOD.replace("(2,)", f"{(1,) * 65}")), "65 dimensions"),
        (own_npy(GOOD.replace("(2,)", "(1 << 40,)")), "damaged"),
        (own_npy(GOOD.replace("(2,)", "(9999999999999999,)")), "truncated"),
        (own_npy("\xff", 3), "damaged"),
    ],
)
def test_damaged_headers(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        view_npy(memoryview(data))


@settings(max_examples=num_examples(300))
@given(place=st.integers(0, 127), value=st.integers(0, 255))
@pytest.mark.filterwarnings("ignore")
def test_any_damaged_byte_of_a_header_is_read_as_numpy_reads_it_or_refused(place: int, value: int) -> None:
    data = bytearray(npy(np.arange(12, dtype=np.int16).reshape(3, 4)))
    data[place] = value
    try:
        found = view_npy(memoryview(data))
    except FormatError:
        return
    except (ValueError, TypeError):
        pytest.fail("a damaged header is a FormatError")
    assert_same(found, np.load(io.BytesIO(data)))


# ----------------------------------------------------------------------------------------------- several in a zip


@pytest.mark.filterwarnings("ignore:Stored array in format")
@settings(max_examples=num_examples(50))
@given(members=st.dictionaries(st.sampled_from(["a", "b/c", "über", "x.npy"]), arrays), packed=st.booleans())
def test_archives_are_numpys(members: dict[str, NDArray[Any]], packed: bool) -> None:
    data = npz(members, packed=packed)
    found = view_npz(memoryview(bytearray(data)))
    with np.load(io.BytesIO(data)) as wanted:
        assert list(found) == wanted.files
        for name in found:
            assert_same(found[name], wanted[name])
            assert found[name].flags.writeable


def test_few_reads_and_views() -> None:
    arrays: dict[str, NDArray[Any]] = {"a": np.arange(100_000), "b": np.zeros((3, 4), np.float32)}
    data = npz(arrays)
    read = Ranges(data)
    members = read_npz_members(read, len(data))
    assert len(read.asked) == 3
    assert sum(length for _, length in read.asked) < 10_000
    for member in members:
        assert not member.is_packed
        header = parse_npy_header(member.head, member.size)
        assert header.shape == arrays[member.name].shape
        at = member.start + header.data_start
        assert data[at : at + header.num_bytes] == arrays[member.name].tobytes()
    memory = memoryview(bytearray(data))
    assert np.shares_memory(view_npz(memory)["a"], np.frombuffer(memory, np.uint8))


def test_a_comment_and_a_prefix() -> None:
    buffer = io.BytesIO()
    buffer.write(b"something before it")
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("a.npy", npy(np.arange(3)))
        archive.comment = b"c" * 30_000
    assert_same(view_npz(memoryview(buffer.getvalue()))["a"], np.arange(3))


def zipped(names: list[str], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name in names:
            archive.writestr(name, npy(np.arange(30)))
    return buffer.getvalue()


def patched(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


ONE = zipped(["a.npy"])
PACKED = zipped(["a.npy"], zipfile.ZIP_DEFLATED)
DIRECTORY = ONE.index(b"PK\1\2")
PACKED_DIRECTORY = PACKED.index(b"PK\1\2")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a whole .npz"),
        (npy(np.arange(3)), "not a whole .npz"),
        (ONE[:-1], "not a whole .npz"),
        (ONE[: len(ONE) // 2], "not a whole .npz"),
        (zipped(["readme.txt"]), r"'readme.txt' .* is no array"),
        (zipped(["a.npy/"]), "is no array"),
        (zipped([".npy"]), "is no array"),
        (zipped(["a.npy"], zipfile.ZIP_LZMA), "method 14"),
        (patched(ONE, DIRECTORY + 8, b"\1"), "encrypted"),
        (patched(ONE, 0, b"XX"), "does not lie where"),
        (patched(ONE, 28, b"\xff\xff"), "does not lie where"),
        (patched(ONE, DIRECTORY + 42, b"\xff\xff"), "damaged"),
        (patched(ONE, DIRECTORY + 24, b"\1"), "cannot be"),
        (patched(PACKED, PACKED_DIRECTORY + 24, b"\xff\xff\xff\x7f"), "cannot be 2147483647 bytes"),
        (patched(PACKED, PACKED_DIRECTORY + 24, b"\xff"), "^array 'a': it is damaged: it unpacks to"),
        (patched(PACKED, PACKED_DIRECTORY + 16, b"\0\0"), "or to others than were packed"),
        (patched(PACKED, 40, b"\xff\xff\xff"), r"'a'.*(cannot be unpacked|is damaged)"),
        (patched(ONE, 40, b"X"), "array 'a': it is damaged: .*CRC-32"),
    ],
)
def test_damaged_archives(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        view_npz(memoryview(data))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_of_one_name() -> None:
    with pytest.raises(FormatError, match="two arrays called 'a'"):
        view_npz(memoryview(zipped(["a.npy", "a.npy"])))


def test_names_are_only_names() -> None:
    assert list(view_npz(memoryview(zipped(["../../etc/x.npy", "/abs.npy"])))) == ["../../etc/x", "/abs"]


@settings(max_examples=num_examples(300))
@given(place=st.integers(0, len(PACKED) - 1), value=st.integers(0, 255), packed=st.booleans())
@pytest.mark.filterwarnings("ignore")
def test_any_damaged_byte_of_an_archive_is_harmless_or_refused(place: int, value: int, packed: bool) -> None:
    data = bytearray(PACKED if packed else ONE)
    data[place] = value
    try:
        found = view_npz(memoryview(data))
    except FormatError:
        return
    for array in found.values():
        array.tobytes()


def test_packed_members_are_unpacked_within_their_size() -> None:
    data = memoryview(npz({"a": np.zeros(1_000_000, np.uint8)}, packed=True))
    (member,) = read_npz_members(Ranges(bytes(data)), len(data))
    assert member.is_packed
    assert member.size == len(unpack_member(member, data)) == 1_000_128
    with pytest.raises(FormatError, match="is damaged"):
        unpack_member(member._replace(size=500_000), data)


def deflated(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", data)
    return buffer.getvalue()


def test_zeros_behind_a_small_array_are_not_unpacked() -> None:
    data = deflated(npy(np.arange(3.0)) + bytes(50_000_000))
    tracemalloc.start()
    with pytest.raises(FormatError, match=r"unpacks to 50000152 bytes, and float64 \[3\] ends at byte 152"):
        view_npz(memoryview(data))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize("packed", [False, True])
def test_what_follows_an_array_is_ignored_as_numpy_does(packed: bool) -> None:
    behind = npy(np.arange(10.0)) + b"trailing"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        archive.writestr("a.npy", behind)
    (expected,) = np.load(io.BytesIO(buffer.getvalue())).values()
    assert np.array_equal(view_npz(memoryview(buffer.getvalue()))["a"], expected)


@pytest.mark.parametrize("num_digits", [19, 2000, 4290])
def test_a_shape_whose_size_has_more_digits_than_python_writes(num_digits: int) -> None:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({'9' * num_digits}, {'9' * num_digits})}}"
    for data in (own_npy(header), deflated(own_npy(header))):
        view = view_npz if data[:2] == b"PK" else view_npy
        with pytest.raises(FormatError) as caught:
            view(memoryview(data))
        assert len(str(caught.value)) < 500


def test_a_backslash_that_python_would_warn_of() -> None:
    with pytest.raises(FormatError, match="backslash"):
        view_npy(memoryview(own_npy(r"{'descr': '<f4', 'fortran_order': False, 'sha\pe': (2,)}")))
    named = np.zeros(3, [("a\\b'\x01", "<f4")])
    assert view_npy(memoryview(npy(named))).dtype == named.dtype


@pytest.mark.parametrize("descr", ["|V0", "|S0", "<U0"])
def test_numbers_of_no_bytes(descr: str) -> None:
    with pytest.raises(FormatError, match="no bytes"):
        view_npy(memoryview(own_npy(f"{{'descr': '{descr}', 'fortran_order': False, 'shape': (1000000000000,)}}")))


def test_arrays_that_share_their_bytes() -> None:
    whole = npz({"a": np.arange(3.0), "b": np.arange(3.0)})
    second = whole.rindex(b"PK\1\2")
    with pytest.raises(FormatError, match="share bytes"):
        view_npz(memoryview(patched(whole, second + 42, b"\0\0\0\0")))


@pytest.mark.parametrize("shape", ["(0x" + "f" * 5000 + ",)", "(0, 9223372036854775808)", "(0, 18446744073709551616)"])
def test_lengths_that_no_number_of_the_machine_holds(shape: str) -> None:
    with pytest.raises(FormatError, match=r"is damaged|is no array|not a tuple of lengths"):
        view_npy(memoryview(own_npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}")))
