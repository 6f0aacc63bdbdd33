from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderkit.connectors.base import ObjectInfo
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import FormatError
from loaderkit.sources.formats.tar_index import (
    TarIndex,
    default_cache_dir,
    load_index,
    parse_wds_index,
    scan_tar,
    wds_index_key,
    write_wds_index,
)
from loaderkit.sources.formats.tar_index.index import Member

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


class Recording(MemoryConnector):
    """Notes every read: key, start, number of bytes."""

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        super().__init__(objects)
        self.reads: list[tuple[str, int, int]] = []

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self.reads.append((key, start, len(buffer)))
        super().read_into(key, start, buffer, etag=etag)


def archive(members: list[tarfile.TarInfo | tuple[str, bytes]], form: str = "pax") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=FORMATS[form], errors="surrogateescape") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return file.getvalue()


def scanned(data: bytes, key: str = "shard.tar") -> TarIndex:
    connector = MemoryConnector({key: data})
    return scan_tar(connector, connector.stat(key))


def by_tarfile(data: bytes) -> list[Member]:
    """What Python's own reader finds."""
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as tar:
        return [Member(m.name, m.offset_data, m.size) for m in tar if m.isreg()]


def other_kind(name: str, kind: bytes, target: str = "target") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info


# ------------------------------------------------------------------------------------- against Python's tarfile

NAMES = st.one_of(
    st.text(alphabet="ab./-_é日\udce9", min_size=1, max_size=12),
    st.text(alphabet="ab/é", min_size=90, max_size=300),
).filter(lambda name: not name.startswith("/") and not name.endswith("/"))
ENTRIES = st.lists(
    st.one_of(
        st.tuples(NAMES, st.sampled_from([0, 1, 511, 512, 513, 5000]).map(lambda n: bytes([n % 251]) * n)),
        st.builds(
            other_kind,
            NAMES,
            st.sampled_from([tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]),
            st.sampled_from(["target", "t" * 150]),
        ),
    ),
    max_size=12,
)


@settings(max_examples=150)
@given(entries=ENTRIES, form=st.sampled_from(list(FORMATS)))
def test_same_members_as_tarfile(entries: list[tarfile.TarInfo | tuple[str, bytes]], form: str) -> None:
    try:
        data = archive(entries, form)
    except ValueError:  # ustar cannot hold every long name
        return
    index = scanned(data)
    assert list(index) == by_tarfile(data)
    assert index.members() == [index[i] for i in range(len(index))] == index[:]
    assert index.is_whole


def test_many_members_share_reads_and_large_ones_are_jumped_over() -> None:
    small = archive([(f"{i:06d}.txt", b"x" * 100) for i in range(5000)], "ustar")
    large = archive([(f"{i}.bin", bytes(9 << 20)) for i in range(4)], "ustar")
    connector = Recording({"small.tar": small, "large.tar": large})
    ticks = iter(range(1, 1 << 30))
    assert len(scan_tar(connector, connector.stat("small.tar"), clock=lambda: float(next(ticks)))) == 5000
    assert len(connector.reads) < 25
    connector.reads.clear()
    assert len(scan_tar(connector, connector.stat("large.tar"))) == 4
    assert sum(num for _, _, num in connector.reads) < 1 << 20


@pytest.mark.parametrize(
    ("times_s", "sizes_kb"),
    [
        ([0.5e-3, 2e-5, 6e-5], [4, 4, 512]),  # the process was new: the second request tells that the store is memory
        ([5e-4, 4e-4, 6e-5], [4, 4, 4096]),  # a disk far away, which reads fast
        ([5e-3, 2e-3], [4, 4096]),  # a store: another request just to know more would cost as much
    ],
)
def test_how_much_is_read_at_a_time(times_s: list[float], sizes_kb: list[int]) -> None:
    """By a clock of its own: `times_s` of the requests, the last one of all that follow."""
    data = archive([(f"{i:06d}.txt", b"x" * 700) for i in range(9000)], "ustar")
    connector = Recording({"a.tar": data})
    now, num_asked = 0.0, 0

    def clock() -> float:
        nonlocal now, num_asked
        if num_asked % 2:
            now += times_s[min(num_asked // 2, len(times_s) - 1)]
        num_asked += 1
        return now

    assert len(scan_tar(connector, connector.stat("a.tar"), clock=clock)) == 9000
    found = [num // 1024 for _, _, num in connector.reads]
    num_small = found.index(next(size for size in found if size > 4))
    assert found[:num_small] == sizes_kb[:-1]
    assert max(found) == sizes_kb[-1]


def test_header_on_the_edge_of_a_window() -> None:
    for num in (7, 8, 9):  # 4 KiB, the first read of a large archive, ends before, in and after a header
        data = archive([("a" * 60, bytes(512 * num - 1)), *((f"{i}", bytes(700)) for i in range(900))], "gnu")
        assert list(scanned(data)) == by_tarfile(data)


def test_global_pax_header_and_size_record() -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "hé"}) as tar:
        for i in range(3):
            info = tarfile.TarInfo(f"{i}.txt")
            info.size = 3
            info.pax_headers = {"size": "3", "mtime": "1.5"} if i else {}
            tar.addfile(info, io.BytesIO(b"abc"))
    assert list(scanned(file.getvalue())) == by_tarfile(file.getvalue())


def test_v7_and_signed_checksum_and_base_256() -> None:
    header = bytearray(archive([("é" * 5, b"12345")], "gnu")[:512])
    header[257:512] = bytes(255)  # v7 has nothing there
    header[156] = 0
    header[124:136] = b"\x80" + (5).to_bytes(11, "big")

    def with_checksum(signed: bool) -> bytes:
        header[148:156] = b" " * 8
        total = sum(b - 256 if signed and b > 127 else b for b in header)
        header[148:156] = f"{total:06o}\0 ".encode()
        return bytes(header) + b"12345".ljust(512, b"\0") + bytes(1024)

    for signed in (False, True):
        assert list(scanned(with_checksum(signed))) == [Member("é" * 5, 512, 5)]


# --------------------------------------------------------------------------------------------- damaged archives


@pytest.mark.parametrize("form", list(FORMATS))
def test_cut_at_every_byte(form: str) -> None:
    members: list[tarfile.TarInfo | tuple[str, bytes]] = [("a.txt", b"x" * 700), ("b" * 99, b""), ("c.txt", b"y" * 512)]
    if form != "ustar":
        members.insert(1, ("long/" * 40 + "z", b"z"))
    whole = archive(members, form)
    expected = by_tarfile(whole)
    mark = whole.rindex(b"y") + 1
    num_warned = num_whole = 0
    refusals: list[str] = []
    for cut in range(len(whole) + 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = list(scanned(whole[:cut]))
            except FormatError as error:
                refusals.append(str(error))
                continue
        assert found == expected[: len(found)]
        if caught:
            assert "may have been cut short" in str(caught[0].message)
            assert len(caught) == 1
            num_warned += 1
        else:
            assert found == expected
            assert cut >= mark + 512
            num_whole += 1
    assert all("memory://shard.tar" in message for message in refusals)
    # Cut between two members (also twice where one has no data), or within the first block of zeros.
    assert num_warned >= len(expected) - 1 + 511
    assert num_whole == len(whole) - mark - 512 + 1


@pytest.mark.parametrize("seed", range(300))
def test_damaged_bytes_give_a_format_error_or_nothing_worse(seed: int) -> None:
    rng = random.Random(seed)
    whole = bytearray(archive([("a.txt", b"x" * 700), ("n" * 150, b"1"), ("c.txt", b"y")], rng.choice(["gnu", "pax"])))
    for _ in range(rng.randint(1, 6)):
        whole[rng.randrange(6 * 512)] = rng.choice([0, 0x20, 0x30, 0x37, 0x80, 0xFF, rng.randrange(256)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            index = scanned(bytes(whole))
        except FormatError:
            return
    assert np.all(index.starts + index.sizes <= len(whole))


def forged(header: bytearray) -> bytes:
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return bytes(header)


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        (b"0", b"\xff" * 12, "no number"),
        (b"0", b"-0000000001\0", "no number"),
        (b"0", b"0o7\0", "no number"),
        (b"0", b"00000000009\0", "no number"),
        (b"0", b"77777777777\0", "cut short"),
        (b"0", b"\x80" + b"\x7f" * 11, "cut short"),
        (b"L", b"77777777777\0", "extended header of"),
        (b"x", b"\xff" * 12, "extended header of"),
        (b"x", b"00000004000\0", "cut short"),
        (b"S", b"00000000001\0", "without --sparse"),
        (b"M", b"00000000001\0", "another volume"),
    ],
)
def test_absurd_headers(kind: bytes, size: bytes, message: str) -> None:
    data = archive([("name.txt", b"x")], "gnu")
    header = bytearray(data[:512])
    header[156:157], header[124:136] = kind, size.ljust(12, b"\0")
    with pytest.raises(FormatError, match=message):
        scanned(forged(header) + data[512:1536])


@pytest.mark.parametrize("body", [b"99999999999999999999 a=b\n", b"5 a=b\n", b"abc\n", b"3 \n", b"9" * 500, b"6 abc\n"])
def test_damaged_pax_records(body: bytes) -> None:
    header = bytearray(archive([("name.txt", b"x" * len(body))], "ustar")[:512])
    header[156:157] = b"x"
    member = archive([("name.txt", b"x")], "ustar")
    with pytest.raises(FormatError, match="damaged PAX header"):
        scanned(forged(header) + body.ljust(512, b"\0") + member)


def test_pax_sparse_is_refused_by_name() -> None:
    info = tarfile.TarInfo("./GNUSparseFile.1/holes.bin")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.name": "holes.bin"}
    with pytest.raises(FormatError, match=r"'holes\.bin' is stored sparse"):
        scanned(archive([info], "pax"))


def test_what_is_no_tar() -> None:
    tar = archive([("a.txt", b"x")])
    for data, name in [(gzip.compress(tar), "gzip"), (bz2.compress(tar), "bzip2"), (lzma.compress(tar), "xz")]:
        with pytest.raises(FormatError, match=f"compressed with {name}.*decompress"):
            scanned(data)
    with pytest.raises(FormatError, match="compressed with zstd"):
        scanned(b"\x28\xb5\x2f\xfd" + bytes(3000))
    for data in (b"PK\3\4" + bytes(2000), b"<html>", os.urandom(5000)):
        with pytest.raises(FormatError, match="not a tar archive"):
            scanned(data)
    with pytest.raises(FormatError, match="0 bytes"):
        scanned(b"")
    assert list(scanned(bytes(10240))) == []


def test_bad_checksum_in_the_middle_names_the_offset() -> None:
    data = bytearray(archive([("a.txt", b"x"), ("b.txt", b"x")], "ustar"))
    data[1024] ^= 1
    with pytest.raises(FormatError, match=r"memory://shard\.tar, byte 1024: .*checksum"):
        scanned(bytes(data))


def test_joined_archives_are_warned_about() -> None:
    data = archive([("a.txt", b"x")])
    with pytest.warns(UserWarning, match="more data follow"):
        assert len(scanned(data + data)) == 1


# ------------------------------------------------------------------------------------------------ text index

WDS_MEMBERS: list[tarfile.TarInfo | tuple[str, bytes]] = [
    ("dir/0001.jpg", b"1" * 1000),
    ("dir/0001.seg.png", b"2"),
    ("dir/.hidden.jpg", b"3"),
    ("README", b"4"),
    other_kind("dir", tarfile.DIRTYPE),
    ("dir/0002.JPG", b""),
    ("x.y/0002.jpg", b"6" * 513),
    ("x.y/0002.cls", b"7"),
    ("é" * 120 + ".cls", b"8"),
    other_kind("link.jpg", tarfile.SYMTYPE),
]


def reference_wds_index(data: bytes) -> str:
    """The rules of `wds2idx`, straightforwardly."""
    groups: list[tuple[str, list[str]]] = []
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as tar:
        for member in tar:
            if member.type != tarfile.REGTYPE:
                continue
            directory, slash, base = member.name.rpartition("/")
            stem, dot, extension = base.partition(".")
            if not stem or not dot:
                continue
            key = directory + slash + stem
            if not groups or groups[-1][0] != key:
                groups.append((key, []))
            groups[-1][1].append(f"{extension} {member.offset_data} {member.size} {member.name}")
    return f"v1.2 {len(groups)}\n" + "".join(" ".join(parts) + "\n" for _, parts in groups)


@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_text_index_is_interchangeable(form: str) -> None:
    data = archive(WDS_MEMBERS, form)
    text = write_wds_index(scanned(data))
    assert text == reference_wds_index(data)
    assert text.startswith("v1.2 4\n")
    parsed = parse_wds_index(reference_wds_index(data), "x.idx")
    assert parsed is not None
    left_out = ("dir/.hidden.jpg", "README")
    assert list(parsed) == [member for member in by_tarfile(data) if member.name not in left_out]
    assert write_wds_index(parsed) == text
    connector = Recording({"a/s.tar": data, "a/s.idx": text.encode("utf-8", "surrogateescape")})
    assert list(load_index(connector, connector.stat("a/s.tar"), None)) == list(parsed)
    assert list(load_index(connector, connector.stat("a/s.tar"), None, use_wds_index=False)) == by_tarfile(data)


def test_an_index_longer_than_any_is_not_read() -> None:
    """Longest is one of long names that are nearly all extension."""
    names = [f"{number}.{'x' * 3000}" for number in range(20)]
    data = archive([(name, b"") for name in names], "gnu")
    text = write_wds_index(scanned(data))
    assert len(data) < len(text) < 2 * len(data)
    connector = Recording({"s.tar": data, "s.idx": text.encode()})
    assert load_index(connector, connector.stat("s.tar"), None).names() == names
    assert ("s.idx", 0, len(text)) in connector.reads
    connector = Recording({"s.tar": data, "s.idx": text.encode() + b" " * (2 * len(data))})
    with pytest.warns(UserWarning, match="does not fit its archive: it has .* bytes"):
        assert load_index(connector, connector.stat("s.tar"), None).names() == names
    assert not any(length for key, _, length in connector.reads if key == "s.idx")


@pytest.mark.parametrize(
    ("key", "index_key"),
    [
        ("a/shard-0.tar", "a/shard-0.idx"),
        ("shard.v2.tar", "shard.idx"),
        ("a.b/x.tar", "a.b/x.idx"),
        ("a/.x.tar", "a/.x.idx"),
    ],
)
def test_index_key(key: str, index_key: str) -> None:
    assert wds_index_key(key) == index_key


@pytest.mark.parametrize("name", ["a b.jpg", "a.j pg", " a.jpg", "a.jpg\n", "a\t.jpg"])
def test_names_the_text_cannot_hold(name: str) -> None:
    packed = name.encode() + b"\0"
    with pytest.raises(FormatError, match="cannot hold the member"):
        write_wds_index(TarIndex(np.array([512]), np.array([1]), packed))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1"),
        ("v1.2\n", "line 1"),
        ("v2.0 1\n", "line 1"),
        ("v1.2 x\n", "line 1"),
        ("v1.2 2\njpg 512 1 a.jpg\n", "promises 2 samples, but 1"),
        ("v1.2 1\njpg 512 1 a.jpg", "line 2: the last line does not end"),
        ("v1.2 1\njpg 512 1\n", "line 2: groups"),
        ("v1.2 2\njpg 512 1 a.jpg\n\n", "line 3: groups"),
        ("v1.2 1\njpg 5x2 1 a.jpg\n", "line 2: an offset"),
        ("v1.2 1\npng 512 1 a.jpg\n", "line 2: 'a.jpg' has not the extension 'png'"),
        ("v1.2 1\njpg 512 -1 a.jpg\n", "negative size"),
        ("v1.2 1\njpg 100 1 a.jpg\n", "no member of a tar can have"),
        ("v1.2 1\njpg 99999999999999999999999 1 a.jpg\n", "out of range"),
        ("v1.2 1\njpg 512 1 a\0.jpg\n", "NUL"),
    ],
)
def test_malformed_text(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        parse_wds_index(text, "here.idx")
    assert "here.idx" in str(caught.value)


def test_old_versions_are_not_used() -> None:
    assert parse_wds_index("v1.1 1\njpg 512 1\n", "x.idx") is None
    assert parse_wds_index("v1.0 1\njpg\n", "x.idx") is None
    data = archive([("a.jpg", b"1")])
    connector = MemoryConnector({"s.tar": data, "s.idx": b"v1.1 1\njpg 1536 1\n"})
    assert list(load_index(connector, connector.stat("s.tar"), None)) == by_tarfile(data)


def stale_cases() -> Iterator[tuple[str, list[tarfile.TarInfo | tuple[str, bytes]], str]]:
    members: list[tarfile.TarInfo | tuple[str, bytes]] = [(f"{i}.jpg", b"x" * 600) for i in range(4)]
    yield "shorter", members[:2], "beyond the archive"
    yield "longer", [*members, ("4.jpg", b"")], "goes on with '4.jpg'"
    yield "first", [("9.jpg", b"x" * 600), *members[1:]], "where the archive has '9.jpg'"
    yield "last", [*members[:3], ("9.jpg", b"x" * 600)], "where the archive has '9.jpg'"
    yield "sizes", [*members[:3], ("3.jpg", b"x" * 601)], r"where the archive has '3.jpg' \(601\)"
    yield "before", [("0.a", b""), *members[1:], ("0.jpg", b"x" * 600)], "where the archive has '0.a'"


@pytest.mark.parametrize(
    ("members", "message"), [case[1:] for case in stale_cases()], ids=[c[0] for c in stale_cases()]
)
def test_stale_text_index(members: list[tarfile.TarInfo | tuple[str, bytes]], message: str) -> None:
    old = archive([(f"{i}.jpg", b"x" * 600) for i in range(4)], "ustar")
    data = archive(members, "ustar")
    if message.startswith("beyond"):
        data = data[:4096]
    connector = MemoryConnector({"s.tar": data, "s.idx": reference_wds_index(old).encode()})
    with pytest.warns(UserWarning, match=f"s.idx is not used.*{message}"):
        index = load_index(connector, connector.stat("s.tar"), None)
    assert list(index) == by_tarfile(data)


@pytest.mark.parametrize(
    "numbers", ["512 9223372036854775807", "9223372036854775296 512", "9223372036854775296 9223372036854775807"]
)
def test_an_index_whose_sums_are_larger_than_any_number(numbers: str) -> None:
    data = archive([("a.jpg", b"1")])
    connector = MemoryConnector({"s.tar": data, "s.idx": f"v1.2 1\njpg {numbers} a.jpg\n".encode()})
    with pytest.warns(UserWarning, match="beyond the archive"):
        assert list(load_index(connector, connector.stat("s.tar"), None)) == by_tarfile(data)


def test_malformed_index_beside_an_archive_is_warned_about() -> None:
    data = archive([("a.jpg", b"1")])
    connector = MemoryConnector({"s.tar": data, "s.idx": b"\xff\xfe nonsense"})
    with pytest.warns(UserWarning, match="not used"):
        assert list(load_index(connector, connector.stat("s.tar"), None)) == by_tarfile(data)


def test_text_index_costs_a_few_small_reads() -> None:
    data = archive([(f"{i}.bin", bytes(100_000)) for i in range(100)], "ustar")
    connector = Recording({"s.tar": data, "s.idx": reference_wds_index(data).encode()})
    assert len(load_index(connector, connector.stat("s.tar"), None)) == 100
    assert len([key for key, _, _ in connector.reads if key == "s.tar"]) <= 3


# ------------------------------------------------------------------------------------------- kept on this machine


def test_kept_index_is_used_until_the_object_changes(tmp_path: Path) -> None:
    first = archive([(f"{i}.jpg", b"x" * 600) for i in range(40)])
    connector = Recording({"s.tar": first})
    cold = load_index(connector, connector.stat("s.tar"), tmp_path)
    assert connector.reads
    connector.reads.clear()
    warm = load_index(connector, connector.stat("s.tar"), tmp_path)
    assert connector.reads == []
    assert list(warm) == list(cold) == by_tarfile(first)

    second = archive([(f"{i}.jpg", b"y" * 600) for i in range(39, -1, -1)])
    assert len(second) == len(first)
    connector.write("s.tar", second)
    assert list(load_index(connector, connector.stat("s.tar"), tmp_path)) == by_tarfile(second)
    assert connector.reads
    assert not list(tmp_path.rglob("*.tmp"))


def test_damaged_copy_is_made_again(tmp_path: Path) -> None:
    data = archive([(f"{i}.jpg", b"x" * 600) for i in range(40)])
    connector = Recording({"s.tar": data})
    info = connector.stat("s.tar")
    load_index(connector, info, tmp_path)
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    good = path.read_bytes()
    rng = random.Random(0)
    damaged = [b"", b"PK", good[:-30], good[: len(good) // 2], bytes(len(good))]
    for _ in range(40):
        place = rng.randrange(len(good))
        damaged.append(good[:place] + bytes([good[place] ^ 255]) + good[place + 1 :])
    for bad in damaged:
        path.write_bytes(bad)
        assert list(load_index(connector, info, tmp_path)) == by_tarfile(data)
    path.unlink()
    path.mkdir()
    assert list(load_index(connector, info, tmp_path)) == by_tarfile(data)


def test_nowhere_to_keep_it(tmp_path: Path) -> None:
    data = archive([("a.jpg", b"1")])
    connector = MemoryConnector({"s.tar": data})
    (tmp_path / "file").write_bytes(b"")
    for cache_dir in (None, tmp_path / "file", tmp_path / "file" / "below"):
        assert list(load_index(connector, connector.stat("s.tar"), cache_dir)) == by_tarfile(data)


def test_a_cut_archive_is_warned_about_every_time(tmp_path: Path) -> None:
    data = archive([("a.jpg", b"1"), ("b.jpg", b"2")], "ustar")[:2048]
    connector = MemoryConnector({"s.tar": data})
    for _ in range(2):
        with pytest.warns(UserWarning, match="may have been cut short"):
            assert len(load_index(connector, connector.stat("s.tar"), tmp_path)) == 2


def test_default_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOADERKIT_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == Path.home() / ".cache" / "loaderkit"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_cache_dir() == Path("/x/loaderkit")
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", "/y/z")
    assert default_cache_dir() == Path("/y/z")


def test_index_refuses_parts_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        TarIndex(np.array([512]), np.array([1]), b"a")
    with pytest.raises(IndexError):
        TarIndex(np.array([512]), np.array([1]), b"a\0")[1]


def test_an_object_replaced_while_scanning_is_noticed() -> None:
    data = archive([("a.jpg", b"1")])
    connector = MemoryConnector({"s.tar": data})
    info = connector.stat("s.tar")
    connector.write("s.tar", data + bytes(512))
    with pytest.raises(OSError, match="was replaced"):
        scan_tar(connector, ObjectInfo(*info))
