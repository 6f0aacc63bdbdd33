"""Indexes of archives against Python's tarfile, and of damaged archives."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from tar_archives import FORMATS, Recording, archive, by_tarfile, other_kind, scanned

from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import FormatError
from loaderkit.sources.formats.tar_index import (
    load_index,
    scan_tar,
)
from loaderkit.sources.formats.tar_index.index import Member, sample_key_and_extension

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


@settings(max_examples=num_examples(150))
@given(entries=ENTRIES, form=st.sampled_from(list(FORMATS)))
def test_same_members_as_tarfile(entries: list[tarfile.TarInfo | tuple[str, bytes]], form: str) -> None:
    try:
        data = archive(entries, form)
    except ValueError:  # ustar cannot hold every long name
        return
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        index = scanned(data)
    assert list(index) == by_tarfile(data)
    assert index.members() == [index[i] for i in range(len(index))] == index[:]
    links = (tarfile.SYMTYPE, tarfile.LNKTYPE)
    lacking = [e for e in entries if isinstance(e, tarfile.TarInfo) and e.type in links]
    lacking = [link for link in lacking if sample_key_and_extension(link.name) is not None]
    assert index.is_whole == (not warned) == (not lacking)


def test_links_that_would_be_samples_are_warned_about_each_time(tmp_path: Path) -> None:
    """GNU tar stores the second name of a file as a link, and its sample would be missing without a word."""
    hard, soft = other_kind("b.txt", tarfile.LNKTYPE, "a.txt"), other_kind("c.txt", tarfile.SYMTYPE, "a.txt")
    other = other_kind("latest", tarfile.SYMTYPE)
    connector = MemoryConnector({"s.tar": archive([("a.txt", b"1"), hard, other, ("d.txt", b"2"), soft])})
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"s\.tar: links are left out.*\(2, such as 'b\.txt'\).*hard-dereference"):
            assert len(load_index(connector, connector.stat("s.tar"), tmp_path)) == 2


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


def test_the_size_of_a_pax_header_counts_whatever_the_plain_one_says(rng: random.Random) -> None:
    """Some writers leave what fits of a large size in the plain header."""
    members = []
    for number in range(3):
        data = rng.randbytes(rng.randrange(1, 2000))
        info = tarfile.TarInfo(f"{number}.txt")
        info.pax_headers = {"size": f"{len(data)}"}
        header = bytearray(info.tobuf(tarfile.PAX_FORMAT))
        header[-512 + 124 : -512 + 136] = b"%011o\0" % rng.randrange(1, 5000)
        header[-512 + 148 : -512 + 156] = b" " * 8
        header[-512 + 148 : -512 + 156] = b"%06o\0 " % sum(header[-512:])
        members.append(bytes(header) + data + bytes(-len(data) % 512))
    archived = b"".join(members) + bytes(1024)
    assert list(scanned(archived)) == by_tarfile(archived)
    assert len(by_tarfile(archived)) == 3


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


@pytest.mark.matrix(1)
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
            assert "may be truncated" in str(caught[0].message)
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
        (b"0", b"77777777777\0", "truncated"),
        (b"0", b"\x80" + b"\x7f" * 11, "truncated"),
        (b"L", b"77777777777\0", "extended header of"),
        (b"x", b"\xff" * 12, "extended header of"),
        (b"x", b"00000004000\0", "truncated"),
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


def test_one_block_of_zeros_is_no_end() -> None:
    """A page of a file that was lost, with members behind it."""
    data = bytearray(archive([("a.txt", b"x"), ("b.txt", b"x")], "ustar"))
    data[1024:1536] = bytes(512)
    with pytest.raises(FormatError, match=r"byte 1024: zeros in the place of a header"):
        scanned(bytes(data))


def test_joined_archives_are_warned_about() -> None:
    data = archive([("a.txt", b"x")])
    with pytest.warns(UserWarning, match="data after the end-of-archive mark"):
        assert len(scanned(data + data)) == 1
