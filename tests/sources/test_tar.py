from __future__ import annotations

import gc
import io
import tarfile
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import webdataset
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from loaderkit import native
from loaderkit.connectors.base import Connector
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import FormatError, SourceError
from loaderkit.sources.base import Source
from loaderkit.sources.formats.tar_index import scan_tar
from loaderkit.sources.tar.source import TarArgs, TarSource

Members = list[tuple[str, bytes]]


def archive(members: Members) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def source_over(connector: Connector, **args: Any) -> TarSource:
    return TarSource(connector, TarArgs.model_validate({"url": "data", **args}), lambda info: scan_tar(connector, info))


def source_of(shards: dict[str, Members], **args: Any) -> TarSource:
    return source_over(MemoryConnector({key: archive(members) for key, members in shards.items()}), **args)


def fields_of(source: TarSource, connector: Connector, index: int) -> dict[str, bytes]:
    """Extension -> bytes, read as the read stage would."""
    found = {}
    for _, extension, place in source.ranges(index):
        data = bytearray(place.length)
        connector.read_into(place.key, place.start, memoryview(data), etag=place.etag)
        found[extension] = bytes(data)
    return found


# ------------------------------------------------------------------------------------------- against webdataset

SHARDS: dict[str, Members] = {
    "shard-1.tar": [
        ("__meta__", b"about"),
        ("__info__/x.json", b"{}"),
        ("__info__.json", b"not meta: it has an extension"),
        ("0001.JPG", b"upper"),
        ("0001.cls", b"3"),
        ("0001.seg.png", b"mask"),
        ("dir.v2/0002.jpg", b"dotted directory"),
        ("README", b"no extension"),
        ("dir.v2/0002.cls", b"4"),
        ("n" * 180 + ".txt", b"long name"),
        ("./0003.json", b"{}"),
        ("a b+c%20/日本.txt", b"unicode"),
        ("x/__y__/1.txt", b"not meta: it is below a folder"),
    ],
    "shard-0.tar": [("0001.txt", b""), ("0002.txt", b"x" * 5000)],
    "shard-2.tar": [("only", b"1")],
}


def by_webdataset(paths: list[Path]) -> list[tuple[str, dict[str, bytes]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves its files for the garbage collector to close
        samples = list(webdataset.WebDataset([str(path) for path in paths], shardshuffle=False, empty_check=False))
        gc.collect(1)
    return [(s["__key__"], {k: v for k, v in s.items() if not k.startswith("__")}) for s in samples]


def test_same_samples_as_webdataset(tmp_path: Path) -> None:
    for key, members in SHARDS.items():
        (tmp_path / key).write_bytes(archive(members))
    connector = FileConnector(tmp_path)
    source = source_over(connector)
    expected = by_webdataset([tmp_path / key for key in sorted(SHARDS)])
    assert len(source) == 9
    assert [(source.key(i), fields_of(source, connector, i)) for i in range(len(source))] == expected
    assert source.num_ignored == 2
    assert [source.origin(i) for i in range(len(source))] == ["shard-0.tar"] * 2 + ["shard-1.tar"] * 7


NAMES = st.builds(
    lambda folder, base, extension: folder + base + extension,
    st.sampled_from(["", "d/", "d.x/", "__m__/", "d/__m__/"]),
    st.sampled_from(["a", "b", "aa", "__a", "__a__", "é"]),
    st.sampled_from(["", ".jpg", ".JPG", ".seg.png", ".cls", ".x y"]),
)


def grouped(members: Members) -> Any:
    """Keys, member names and sizes of all samples, and the number of members in none; or the error."""
    try:
        source = source_of({"s.tar": members})
    except SourceError as error:
        return str(error)
    return [(source.key(i), source.ranges(i)) for i in range(len(source))], source.num_ignored


@given(
    st.lists(NAMES | st.sampled_from(["__a__", "a.b/c.txt", "a.B", "a.b", "a.", "d/.x", "é.é", "a.b.c"]), max_size=12)
)
@example(["a.b", "a.b/c.txt"])
@example(["a.x", "noext", "a.y"])
@example(["a.x", "b.x", "a.y"])
@example(["a.x", "a.X"])
@example([f"a.{n}" for n in range(80)])
def test_names_are_grouped_as_one_by_one(names: list[str]) -> None:
    members = [(name, name.encode()) for name in names]
    quick = grouped(members)
    with mock.patch.object(native, "group_names", return_value=None):
        assert grouped(members) == quick


def test_names_that_do_not_fit_their_number_are_refused() -> None:
    for names, num in ((b"a.b\0", 2), (b"a.b", 1), (b"a.b\0c", 1), (b"", 1)):
        with pytest.raises(ValueError, match="NUL"):
            native.group_names(names, num)


@given(st.lists(NAMES, min_size=1, max_size=10, unique_by=str.lower).map(sorted))
def test_random_names_as_webdataset(names: list[str]) -> None:
    data = archive([(name, name.encode()) for name in names])
    connector = MemoryConnector({"s.tar": data})
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "s.tar"
        path.write_bytes(data)
        expected = by_webdataset([path])
    found_keys = [key for key, _ in expected]
    if not found_keys or len(set(found_keys)) < len(found_keys):
        # WebDataset yields nothing here, or two halves of one sample.
        with pytest.raises(SourceError, match="comes back" if found_keys else "no sample"):
            source_over(connector)
        return
    source = source_over(connector)
    assert [(source.key(i), fields_of(source, connector, i)) for i in range(len(source))] == expected


# ----------------------------------------------------------------------------------------------------- own rules


def test_contract_and_default_fields() -> None:
    source: Source = source_of({"s.tar": [("1.jpg", b"12"), ("1.cls", b"3"), ("1.seg.png", b"4"), ("2.txt", b"")]})
    assert source.classes is None
    assert source.constants(0) == {}
    assert [found[:2] for found in source.ranges(0)] == [("image", "jpg"), ("label", "cls"), ("seg.png", "seg.png")]
    assert [found.range.length for found in source.ranges(0)] == [2, 1, 1]
    assert source.ranges(-2) == source.ranges(0)
    for index in (2, -3):
        with pytest.raises(IndexError):
            source.ranges(index)


def test_own_fields_choose_and_order() -> None:
    shards = {"s.tar": [("1.cls", b"3"), ("1.jpg", b"12"), ("1.json", b"{}"), ("2.png", b""), ("2.json", b"")]}
    source = source_of(shards, fields={"picture": "jpg;png", "label": "cls"})
    assert [found[:2] for found in source.ranges(0)] == [("picture", "jpg"), ("label", "cls")]
    with pytest.raises(SourceError, match=r"sample '2' in memory://s\.tar has no 'label'.*it has: png, json"):
        source.ranges(1)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any),
    st.permutations(["jpg", "cls", "txt"]),
    st.integers(1, 3),
    st.data(),
)
def test_a_table_is_the_ranges_of_its_samples(
    num_samples: list[int], extensions: list[str], num_wanted: int, data: st.DataObject
) -> None:
    """Of archives with any number of samples, none among them, some of the members, in any order."""
    shards = {
        f"shard-{shard}.tar": [
            (f"{number}.{extension}", bytes(shard + number))
            for number in range(num)
            for extension in sorted(extensions)
        ]
        for shard, num in enumerate(num_samples)
    }
    limit = data.draw(st.none() | st.integers(1, sum(num_samples)))
    source = source_of(shards, fields={f"the {one}": one for one in extensions[:num_wanted]}, limit=limit)
    indices = data.draw(st.lists(st.integers(0, len(source) - 1), max_size=20))
    expected = [one for index in indices for one in source.ranges(index)]
    table = source.table(np.array(indices, np.int64))
    assert table is not None
    assert list(zip(*table.ranges, strict=True)) == [tuple(one.range) for one in expected]
    assert list(table.fields) * len(indices) == [(one.field, one.extension) for one in expected]


def test_members_are_looked_for_where_there_are_some() -> None:
    starts = np.arange(6)
    right: list[Any] = [np.array([2, 0]), np.array([1]), 2, starts, starts, np.array([0, 1]), ["a", "b"], ["x", None]]
    assert native.members(*right) == (["b", "a"], [5, 1], [5, 1], [None, "x"])
    wrong: list[tuple[int, Any]] = [
        (0, np.array([3])),
        (0, np.array([-1])),
        (0, np.array([1], np.int32)),
        (1, np.array([2])),
    ]
    wrong += [(1, np.array([-1])), (2, 0), (4, np.arange(5)), (5, np.empty(0, np.int64)), (6, ["a"]), (7, ["x"])]
    for place, value in wrong:
        with pytest.raises((ValueError, IndexError)):
            native.members(*[value if number == place else other for number, other in enumerate(right)])


def test_hidden_members_are_ignored() -> None:
    source = source_of({"s.tar": [("d/.a.jpg", b""), (".b.jpg", b""), ("c.", b""), ("d.jpg", b"")]})
    assert [source.key(i) for i in range(len(source))] == ["d"]
    assert source.num_ignored == 3


def test_two_members_for_one_field() -> None:
    with pytest.raises(SourceError, match=r"sample '2' in memory://s\.tar.*'image': 2\.jpg and 2\.png"):
        source_of({"s.tar": [("1.jpg", b""), ("2.jpg", b""), ("2.png", b"")]})
    fine = source_of({"s.tar": [("2.jpg", b""), ("2.png", b"")]}, fields={"image": "jpg", "mask": "png"})
    assert len(fine) == 1


def test_members_that_do_not_lie_together() -> None:
    with pytest.raises(SourceError, match=r"memory://s\.tar: sample '1' continues with '1\.cls'.*--sort=name"):
        source_of({"s.tar": [("1.jpg", b""), ("2.jpg", b""), ("1.cls", b"")]})
    assert len(source_of({"s.tar": [("1.jpg", b""), ("README", b""), ("1.cls", b"")]})) == 1
    assert len(source_of({"a.tar": [("1.jpg", b"")], "b.tar": [("1.jpg", b"")]})) == 2


def test_the_same_member_twice() -> None:
    for names in (["1.jpg", "1.jpg"], ["1.jpg", "1.JPG"]):
        with pytest.raises(SourceError, match=r"memory://s\.tar: sample '1' has the extension 'jpg' twice"):
            source_of({"s.tar": [(name, b"") for name in names]})


def test_missing_shards_are_named() -> None:
    shards: dict[str, Members] = {f"shard-{i:03d}.tar": [("1.jpg", b"")] for i in range(10) if i not in (2, 5, 7)}
    with pytest.raises(SourceError) as caught:
        source_of(shards, include="shard-{000..009}.tar")
    message = str(caught.value).partition(";")[0]
    assert [i for i in range(10) if f"'shard-{i:03d}.tar'" in message] == [2, 5, 7]
    assert len(source_of(shards, include=["shard-00[01].tar", "shard-003.tar"])) == 3
    with pytest.raises(SourceError, match=r"'x\*\.tar'"):
        source_of(shards, include=["shard-*.tar", "x*.tar"])
    with pytest.raises(SourceError, match="no object at all"):
        source_of({})


def test_no_sample_at_all() -> None:
    with pytest.raises(SourceError, match=r"have no sample.*2 members"):
        source_of({"s.tar": [("README", b""), (".x", b"")]})


def test_url_of_one_archive() -> None:
    args = TarArgs.model_validate({"url": "s3://bucket/dir/train.tar"})
    assert (args.root, args.shards) == ("s3://bucket/dir/", "train.tar")
    assert TarArgs.model_validate({"url": "train-{0..3}.tar"}).root == "."
    assert TarArgs.model_validate({"url": "/data"}).shards == "*.tar"
    assert len(source_of({"a.tar": [("1.jpg", b"")], "b.tar": [("1.jpg", b"")]}, url="x/b.tar")) == 1
    with pytest.raises(ValidationError, match="names the archives already"):
        TarArgs.model_validate({"url": "a.tar", "include": "b.tar"})


def test_limit_and_blocks_and_fingerprint() -> None:
    shards: dict[str, Members] = {
        f"{s}.tar": [(f"{i:03d}.jpg", bytes(1000)) for i in range(50)] for s in ("a", "b", "c")
    }
    shards["aa.tar"] = []
    whole = source_of(shards)
    assert whole.blocks(10_000).tolist() == list(range(0, 151, 10))
    assert {50, 100} <= set(whole.blocks(30_000).tolist())
    assert [whole.origin(i) for i in (0, 49, 50, 100, -1)] == ["a.tar", "a.tar", "b.tar", "c.tar", "c.tar"]
    for limit in (1, 50, 51, 150, 1000):
        part = source_of(shards, limit=limit)
        assert len(part) == min(limit, 150)
        assert [part.key(i) + part.origin(i) for i in range(len(part))] == [
            whole.key(i) + whole.origin(i) for i in range(len(part))
        ]
        assert (part.fingerprint() == whole.fingerprint()) == (limit >= 150)
    renamed = {**shards, "c.tar": [(f"{i:03d}.png", bytes(1000)) for i in range(50)]}
    assert len({whole.fingerprint(), source_of(renamed).fingerprint()}) == 2
    assert source_of(shards).fingerprint() == whole.fingerprint()


def test_limit_opens_only_the_shards_it_needs() -> None:
    connector = MemoryConnector({f"{i:03d}.tar": archive([("1.jpg", b"")]) for i in range(100)})
    opened: list[str] = []

    def load(info: Any) -> Any:
        opened.append(info.key)
        return scan_tar(connector, info)

    assert len(TarSource(connector, TarArgs(url="x", limit=3), load)) == 3
    assert len(opened) < 30


def test_blocks_count_only_wanted_fields() -> None:
    members: Members = [(f"{i:03d}.{e}", bytes(n)) for i in range(100) for e, n in (("jpg", 10), ("mp4", 5000))]
    assert source_of({"s.tar": members}, fields={"image": "jpg"}).blocks(100).tolist() == list(range(0, 101, 10))


def test_a_damaged_archive_is_named() -> None:
    connector = MemoryConnector({"a.tar": archive([("1.jpg", b"")]), "b.tar": b"nonsense"})
    with pytest.raises(FormatError, match=r"memory://b\.tar"):
        source_over(connector)
