"""The text index beside an archive: written, read, and refused where it does not fit."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator

import numpy as np
import pytest
from tar_archives import Recording, archive, by_tarfile, other_kind, scanned

from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import FormatError
from loaderkit.sources.formats.tar_index import (
    TarIndex,
    load_index,
    parse_wds_index,
    wds_index_key,
    write_wds_index,
)

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
    other_kind("link", tarfile.SYMTYPE),
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
        ("v1.2 1\njpg 512 1 a.jpg", "line 2: the last line is incomplete"),
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
    yield "longer", [*members, ("4.jpg", b"")], "continues with '4.jpg'"
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
