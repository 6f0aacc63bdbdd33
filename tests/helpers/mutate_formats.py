"""Ways to damage a file of a certain format, so that it is refused late: behind the checksum, in the JSON, by the number."""

from __future__ import annotations

import contextlib
import io
import json
import pickletools
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
from mutate import OPERATORS as PLAIN

T = TypeVar("T")
Rng = np.random.Generator
Operator = Callable[[bytes, Rng], bytes]
MOST_BYTES = 2**19  # what has become longer is not damaged further
NUMBERS = (0, 1, 2, 2**15, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**62, 2**63 - 1, -1, -(2**31), -(2**63))


def pick(rng: Rng, values: Sequence[T]) -> T:
    return values[int(rng.integers(len(values)))]


def put(data: bytes, place: int, new: bytes) -> bytes:
    return data[:place] + new + data[place + len(new) :]


def whole_number(data: bytes, rng: Rng) -> bytes:
    """Two, four or eight bytes become a number at some border, in either order of bytes; mostly where headers are."""
    place = int(rng.integers(min(len(data), pick(rng, (16, 64, 512, len(data)))) or 1))
    size = pick(rng, (2, 4, 8))
    number = pick(rng, NUMBERS) % 256**size
    return put(data, place, number.to_bytes(size, "little" if rng.random() < 0.5 else "big"))[: len(data)]


def number_in_text(data: bytes, rng: Rng) -> bytes:
    """Digits become other digits, or none."""
    found = [*re.finditer(rb"\d+", data)]
    if not found:
        return data
    match = pick(rng, found)
    new = pick(
        rng, (*(str(n).encode() for n in NUMBERS), b"9" * 5000, b"1e999", b"1.5", b"NaN", b"", b"0x" + b"f" * 9000)
    )
    return data[: match.start()] + new + data[match.end() :]


# ------------------------------------------------------------------------------------------------------------ JSON

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 2**31, 2**63, 2**64, 10**4000, 1e308, float("inf"), float("nan"), "", "\ud800", "a\0b",
    "../x", "/", "x" * 5000, [], [[]], {}, {"": None}, [1, "a", None], ["\udfff"],
)  # fmt: skip


def json_value(data: bytes, rng: Rng) -> bytes:
    """A value, or the name of one, becomes another of any type."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return data
    places: list[tuple[Any, Any]] = []
    todo = [tree]
    while todo:
        item = todo.pop()
        if isinstance(item, (dict, list)):
            places += [(item, key) for key in (item if isinstance(item, dict) else range(len(item)))]
            todo += item.values() if isinstance(item, dict) else item
    if not places:
        return json.dumps(pick(rng, ODD_VALUES)).encode()
    container, key = pick(rng, places)
    how = int(rng.integers(5))
    if how == 0 and isinstance(container, dict):
        container[pick(rng, ("", "\ud800", "x" * 5000, "__metadata__"))] = container.pop(key)
    elif how == 1:
        del container[key]
    elif how == 2:
        container[key] = pick(rng, places)[0] if container is tree else [container[key]]
    else:
        container[key] = pick(rng, ODD_VALUES)
    try:
        return json.dumps(tree).encode()
    except (ValueError, RecursionError):  # it holds itself now
        return data


def json_twice(data: bytes, rng: Rng) -> bytes:
    """A name stands there twice."""
    found = [*re.finditer(rb'"[^"\\]*":\s*', data)]
    if not found:
        return data
    match = pick(rng, found)
    return data[: match.start()] + match[0] + pick(rng, (b"1", b"{}", b"[]", b"null")) + b", " + data[match.start() :]


def json_depth(data: bytes, rng: Rng) -> bytes:
    """A value becomes lists in lists: as many as recursion bears, somewhat less, or far more."""
    found = [*re.finditer(rb":\s*", data)]
    place = pick(rng, found).end() if found else 0
    depth = pick(rng, (50, 300, 800, 900, 940, 960, 980, 1000, 100_000))
    opening, closing = pick(rng, ((b"[", b"]"), (b'{"a":', b"}")))
    return data[:place] + opening * depth + pick(rng, (b"0" + closing * depth, b"")) + data[place:]


JSON: tuple[Operator, ...] = (json_value, json_value, json_value, json_twice, json_depth, number_in_text, *PLAIN)

# ---------------------------------------------------------------------------------------------------------- pickle

NAMES = (
    b"torch\nFloatStorage", b"torch\nSize", b"torch\nTensor", b"torch\nfloat32", b"torch._utils\n_rebuild_tensor_v2",
    b"torch._utils\n_rebuild_parameter", b"torch._tensor\n_rebuild_from_type_v2", b"collections\nOrderedDict",
    b"collections\ndefaultdict", b"collections\nCounter", b"builtins\nset", b"builtins\nfrozenset",
    b"builtins\ncomplex",
    b"builtins\nbytearray", b"numpy\ndtype", b"numpy\nndarray", b"numpy._core.multiarray\n_reconstruct",
    b"numpy._core.multiarray\nscalar", b"_codecs\nencode", b"posix\nsystem", b"builtins\neval", b"a\nb",
    b"torch.distributed.checkpoint.metadata\nMetadata", b"torch.distributed.checkpoint.metadata\nMetadataIndex",
    b"torch.distributed.checkpoint.metadata\nTensorStorageMetadata",
    b"torch.distributed.checkpoint.filesystem\n_StorageInfo",
)  # fmt: skip
PIECES = (
    b"N", b"]", b"}", b")", b"(", b"0", b"1", b"2", b"R", b"b", b"a", b"e", b"s", b"u", b"t", b"l", b"d", b"o",
    b"Q", b".", b"]2\x86",
    b"\x81", b"\x85", b"\x86", b"\x87", b"\x88", b"\x8f", b"\x90", b"\x91", b"\x92", b"\x93", b"\x94", b"\x97",
    b"\x98",
    b"K\x01", b"J\xff\xff\xff\xff", b"J\xff\xff\xff\x7f", b"G\x7f\xf8\0\0\0\0\0\0",
    b"\x8a\x09" + b"\xff" * 8 + b"\x7f", b"I01\n",
    b"L" + b"9" * 5000 + b"L\n", b"\x8b\xff\xff\xff\x7f", b"\x8b\0\x08\0\0" + b"\x7f" * 2048,
    b"X\xff\xff\xff\xff", b"X\x01\0\0\0\xff",
    b"T\xff\xff\xff\xff", b"\x8d" + b"\xff" * 8, b"\x8e" + b"\xff" * 7 + b"\x7f", b"\x8e\0\0\0\0\x04\0\0\0",
    b"\x96" + b"\xff" * 7 + b"\x7f",
    b"\x96\0\0\0\0\x04\0\0\0", b"\x95" + b"\xff" * 8, b"\x95\0\0\0\0\0\0\0\0", b"r\xff\xff\xff\xff",
    b"r\0\0\0\x20", b"r\0\0\x01\0",
    b"j\xff\xff\xff\xff", b"h\0", b"h\x05", b"q\0", b"p4000000000\n", b"p99999999999999999999\n", b"g0\n",
    b"Px\n", b"S'x'\n", b"V\\ud800\n",
    b"\x8c\x02\xed\xa0", b"\x85" * 5000, b"]a" * 300, b"2\x86" * 60, b"\x8c\x05items", b"\x8c\x09__class__",
    b"\x8c\x0c__setstate__",
    b"}\x8c\x05itemsNsb", b"}\x8c\x08__dict__}sb", b"}\x8c\x04keysK\x01sb", b"NN}\x8c\x05shapeX\x01\0\0\0xs\x86b",
    b"(KKKKKtb", b"\x82\x01",
)  # fmt: skip


def _operations(data: bytes) -> list[tuple[int, int]]:
    """[start, end) of every operation, as far as they can be told."""
    starts: list[int] = []
    with contextlib.suppress(Exception):
        starts += (place for _, _, place in pickletools.genops(data) if place is not None)
    return [*zip(starts, [*starts[1:], len(data)], strict=True)] if starts else [(0, len(data))]


def pickle_operation(data: bytes, rng: Rng) -> bytes:
    """An operation goes, is exchanged with another, comes twice, or makes room for one that no writer writes there."""
    found = _operations(data)
    start, end = pick(rng, found)
    other = pick(rng, found)
    how = int(rng.integers(6))
    if how == 0:
        return data[:start] + data[end:]
    if how == 1:
        return data[:start] + data[other[0] : other[1]] + data[end:]
    if how == 2:
        return data[:end] + data[other[0] : other[1]] + data[end:]
    return data[: pick(rng, (start, end))] + pick(rng, PIECES) + data[end:]


def pickle_global(data: bytes, rng: Rng) -> bytes:
    """A name becomes another."""
    found = [*re.finditer(rb"c[\w.]+\n[\w.]+\n", data)]
    if not found:
        return pickle_operation(data, rng)
    match = pick(rng, found)
    return data[: match.start()] + b"c" + pick(rng, NAMES) + b"\n" + data[match.end() :]


def pickle_memo(data: bytes, rng: Rng) -> bytes:
    """What is stored or taken from store has another number."""
    found = [start for start, _ in _operations(data) if data[start : start + 1] in (b"q", b"h", b"r", b"j")]
    if not found:
        return pickle_operation(data, rng)
    place = pick(rng, found)
    if data[place : place + 1] in (b"q", b"h"):
        return put(data, place + 1, bytes([int(rng.integers(256))]))
    return put(data, place + 1, (pick(rng, NUMBERS) % 2**32).to_bytes(4, "little"))


def pickle_number(data: bytes, rng: Rng) -> bytes:
    """A number becomes one at some border."""
    found = [(start, end) for start, end in _operations(data) if data[start : start + 1] in (b"K", b"M", b"J", b"\x8a")]
    if not found:
        return data
    start, end = pick(rng, found)
    number = pick(rng, (*NUMBERS, 2**200))
    size = number.bit_length() // 8 + 1
    return data[:start] + b"\x8a" + bytes([size]) + number.to_bytes(size, "little", signed=True) + data[end:]


PICKLE: tuple[Operator, ...] = (
    pickle_operation, pickle_operation, pickle_operation, pickle_global, pickle_memo, pickle_number, *PLAIN,
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------------- zip


def _repacked(data: bytes, change: Callable[[str, bytes], bytes], *, packing: int | None = None) -> bytes:
    """An archive anew, its members changed: all its sizes and checksums are right."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w") as new:
        for info in old.infolist():
            new.writestr(
                info.filename, change(info.filename, old.read(info)), packing if packing else info.compress_type
            )
    return file.getvalue()


def of_member(end_of_name: str, operators: tuple[Operator, ...]) -> Operator:
    """One member whose name ends so is damaged, and the archive around it is right."""

    def change(data: bytes, rng: Rng) -> bytes:
        operator = pick(rng, operators)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                wanted = pick(rng, [name for name in archive.namelist() if name.endswith(end_of_name)])
            return _repacked(data, lambda name, inside: operator(inside, rng) if name == wanted and inside else inside)
        except Exception:  # it was damaged before
            return data

    return change


def zip_number(data: bytes, rng: Rng) -> bytes:
    """A size, a place, a flag or a packing in the directory, in its end or before a member becomes another."""
    signature = pick(rng, (b"PK\1\2", b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7"))
    places = [match.start() for match in re.finditer(re.escape(signature), data)]
    if not places:
        return data
    place = pick(rng, places) + 4 + 2 * int(rng.integers(21))
    size = pick(rng, (2, 4, 8))
    number = pick(rng, (*NUMBERS, len(data), len(data) - 1, len(data) + 1, int(rng.integers(2 * len(data)))))
    return put(data, place, (number % 256**size).to_bytes(size, "little"))[: len(data)]


@cache
def _zeros(num_mb: int) -> bytes:
    """`num_mb` MB of zeros, packed to a thousandth."""
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    return b"".join([*(packer.compress(bytes(10**6)) for _ in range(num_mb)), packer.flush()])


def zip_bomb(data: bytes, rng: Rng) -> bytes:
    """A member of 300 MB of zeros in 300 kB: behind its header, or as all of it; the directory may deny it."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            name = pick(rng, archive.namelist())
            head = archive.read(name) if rng.random() < 0.7 else b""
    except Exception:
        return data
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    packed = packer.compress(head) + packer.flush(zlib.Z_SYNC_FLUSH) + _zeros(300)
    size = len(head) + 300 * 10**6
    said = pick(rng, (size, size, len(head), len(packed)))
    fields = (20, 0, 8, 0, 33, 0, len(packed), said, len(name), 0)
    local = struct.pack("<4s5H3L2H", b"PK\3\4", *fields) + name.encode()
    entry = struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, *fields, 0, 0, 0, 0, 0) + name.encode()
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(entry), len(local) + len(packed), 0)
    return local + packed + entry + end


def zip_twice(data: bytes, rng: Rng) -> bytes:
    """Entries of the directory stand there many times: members that share their bytes."""
    end = data.rfind(b"PK\5\6")
    first = data.find(b"PK\1\2")
    if first < 0 or end <= first or end + 22 > len(data):
        return data
    times = min(pick(rng, (2, 30, 300)), 2**20 // (end - first))
    entries = data[first:end] * times
    count, length = struct.unpack_from("<HL", data, end + 10)
    tail = put(data[end:], 8, struct.pack("<HHL", count * times % 2**16, count * times % 2**16, length * times))
    return data[:first] + entries + tail


ZIP: tuple[Operator, ...] = (zip_number, zip_number, zip_number, zip_twice, *PLAIN)

# ------------------------------------------------------------------------------------------------------------- tar

_FIELDS = (
    (0, 100),
    (100, 8),
    (108, 8),
    (116, 8),
    (124, 12),
    (136, 12),
    (156, 1),
    (157, 100),
    (257, 8),
    (329, 8),
    (345, 155),
)


def with_sum(header: bytes) -> bytes:
    """A tar header with its checksum made right."""
    total = sum(header[:148]) + 8 * 32 + sum(header[156:])
    return put(header, 148, b"%06o\0 " % total)


def _headers(data: bytes) -> list[int]:
    return [place for place in range(0, len(data) - 511, 512) if data[place + 257 : place + 262] == b"ustar"]


def tar_field(data: bytes, rng: Rng) -> bytes:
    """A field of a header becomes something else, and the checksum is right."""
    places = _headers(data)
    if not places:
        return data
    place = pick(rng, places)
    start, size = pick(rng, (*_FIELDS, (124, 12), (124, 12), (156, 1)))
    number = pick(rng, (*NUMBERS, 2**94, len(data), len(data) - place - 512))
    new = pick(
        rng,
        (
            b"%o" % abs(number), b"%011o" % (abs(number) % 8**11),
            b"\x80" + (abs(number) % 2**88).to_bytes(11, "big"), b"\xff" * 12,
            b"\xc0" + b"\0" * 11, b"\x80" + b"\xff" * 11, b"99999999999", b"", b" " * 12, b"\0" * 12, b"-1",
            b"\xff" * 100, b"/" * 100, b"a\0b",
            *(bytes([kind]) for kind in b"0123457LKxXgSMDVA\0\xff"),
        ),
    )  # fmt: skip
    header = put(data[place : place + 512], start, new[:size].ljust(size, b"\0"))
    return data[:place] + with_sum(header) + data[place + 512 :]


def _member(name: bytes, kind: bytes, body: bytes, size: bytes | None = None) -> bytes:
    header = (
        name[:100].ljust(100, b"\0")
        + b"0000644\0"
        + b"0000000\0" * 2
        + (size or b"%011o\0" % len(body))
        + b"0" * 11
        + b"\0"
    )
    header = (header + b" " * 8 + kind).ljust(257, b"\0") + b"ustar\x0000"
    return with_sum(header.ljust(512, b"\0")) + body.ljust(-(-len(body) // 512) * 512, b"\0")


def tar_extended(data: bytes, rng: Rng) -> bytes:
    """An extended header comes before a member: a long name, records of pax with odd lengths and values, or a sparse file's."""
    key = pick(
        rng,
        (
            b"path",
            b"size",
            b"GNU.sparse.name",
            b"GNU.sparse.map",
            b"GNU.sparse.size",
            b"linkpath",
            b"charset",
            b"",
            b"x" * 600,
        ),
    )
    value = pick(
        rng,
        (b"", b"a.jpg", b"0", b"-1", b"9" * 20, b"9" * 5000, b"1e5", b"\xff\xfe", b"a\0b", b"../x", b"1,2,3", b"x" * 9000),
    )  # fmt: skip
    record = b" " + key + pick(rng, (b"=", b"=", b"=", b"")) + value + pick(rng, (b"\n", b"\n", b"\n", b""))
    length = len(record) + len(str(len(record) + 2))
    said = pick(rng, (str(length), str(length), str(length), "0", "1", "-1", "999999", "9" * 30, "", str(length + 1)))
    body = pick(
        rng, (said.encode() + record, said.encode() + record, value, b"\0" * 20, (b"%d" % length + record) * 50)
    )
    kind = pick(rng, (b"x", b"x", b"g", b"L", b"K", b"X", b"S"))
    size = pick(rng, (None, None, None, b"\x80" + b"\xff" * 11, b"%011o\0" % (2**20 + 1), b"77777777777\0"))
    place = pick(rng, [*_headers(data), len(data)])
    return data[:place] + _member(pick(rng, (b"././@LongLink", b"x", b"")), kind, body, size) + data[place:]


TAR: tuple[Operator, ...] = (tar_field, tar_field, tar_field, tar_extended, tar_extended, *PLAIN)

# ------------------------------------------------------------------------------------------------- lengths in front


def behind_length(operators: tuple[Operator, ...]) -> Operator:
    """The header of a safetensors file is damaged, and the eight bytes before it say how long it is then."""

    def change(data: bytes, rng: Rng) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = data[8 : 8 + length]
        header = pick(rng, operators)(header, rng) if header else b""
        return len(header).to_bytes(8, "little") + header + data[8 + length :]

    return change


def behind_npy_length(data: bytes, rng: Rng) -> bytes:
    """The same for the header of an .npy file: its text becomes another one, with other types and shapes."""
    if len(data) < 10:
        return data
    length = int.from_bytes(data[8:10], "little")
    text = data[10 : 10 + length]
    what = pick(rng, (b"descr", b"shape", b"fortran_order", b""))
    if what:
        text = re.sub(
            rb"'" + what + rb"': ('[^']*'|\([^)]*\)|\[[^]]*\]|True|False)",
            lambda _: b"'" + what + b"': " + pick(rng, NPY_VALUES),
            text,
        )
    else:
        text = number_in_text(text, rng)
    return data[:8] + (len(text) % 2**16).to_bytes(2, "little") + text + data[10 + length :]


NPY_VALUES = (
    b"'|O'", b"'<f4'", b"'V0'", b"'<V2147483647'", b"'S0'", b"'<U536870911'", b"'<U536870912'", b"'f4,f4'",
    b"'<M8[ns]'", b"''", b"'\\ud800'",
    b"[('a', '<f4', (2,))]", b"[('a', '<f4', (99999999999,))]", b"[('a', '<f4', 0x" + b"f" * 4000 + b")]",
    b"('<f4', (2, 3))", b"('|V8', {})",
    b"(0,)", b"(9223372036854775807,)", b"(9223372036854775808, 0)", b"(18446744073709551616,)",
    b"(4611686018427387904, 4)", b"(-1,)", b"(True,)",
    b"(1.5,)", b"(0x" + b"f" * 5000 + b",)", b"(0, 0x" + b"f" * 5000 + b")", b"(" + b"1, " * 65 + b")",
    b"(" + b"1, " * 64 + b")", b"()", b"[]", b"{}",
    b"(" * 500 + b")" * 500, b"[" * 90 + b"]" * 90, b"-" * 5000 + b"1", b"1" + b"+1j" * 2000,
    b"(10000000000000,)", b"1", b"None", b"f(1)", b"'a' 'b'", b"b'<f4'",
)  # fmt: skip

# ---------------------------------------------------------------------------------------------------------- lists


def damaged(data: bytes, operators: tuple[Operator, ...], rng: Rng) -> bytes:
    """The data damaged in one way, in two or in three."""
    for _ in range(int(pick(rng, (1, 1, 1, 2, 3)))):
        if 0 < len(data) <= MOST_BYTES:
            data = pick(rng, operators)(data, rng)
    return data
