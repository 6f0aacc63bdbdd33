from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from loaderkit.connectors.base import ByteRange
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import SourceError
from loaderkit.samples.sample import FieldRange
from loaderkit.sources.base import Source
from loaderkit.sources.files.source import FilesArgs, FilesSource

LAYOUT = {
    "dog-2/b.jpg": b"123",
    "dog/a.JPG": b"1",
    "dog/sub/c.png": b"",
    "cat/x.2020.jpeg": b"12345",
    "cat/.hidden.jpg": b"1",
    ".git/x.jpg": b"1",
}


def source_of(objects: dict[str, bytes], **args: Any) -> FilesSource:
    return FilesSource(MemoryConnector(objects), FilesArgs.model_validate({"url": "data", **args}))


def keys(source: Source) -> list[str]:
    return [source.key(i) for i in range(len(source))]


def test_samples_classes_and_ranges() -> None:
    source: Source = source_of(LAYOUT, label="parent")
    assert keys(source) == ["cat/x.2020.jpeg", "dog-2/b.jpg", "dog/a.JPG", "dog/sub/c.png"]
    assert source.classes == ["cat", "dog", "dog-2", "sub"]
    assert [source.constants(i) for i in range(4)] == [{"label": 0}, {"label": 2}, {"label": 1}, {"label": 3}]
    etag = MemoryConnector(LAYOUT).stat("dog-2/b.jpg").etag
    assert source.ranges(1) == [FieldRange("image", "jpg", ByteRange("dog-2/b.jpg", 0, 3, etag))]
    assert [source.ranges(i)[0].extension for i in range(4)] == ["jpeg", "jpg", "jpg", "png"]
    assert source.origin(2) == "dog/a.JPG"
    with pytest.raises(IndexError):
        source.key(4)


def test_without_labels() -> None:
    source = source_of({"a.jpg": b"1", "b/c.json": b"2"}, include="**/*")
    assert source.classes is None
    assert source.constants(0) == {}
    assert [source.ranges(i)[0].field for i in range(2)] == ["image", "json"]


def test_include() -> None:
    assert keys(source_of(LAYOUT, include="*/*.{jpg,JPG}")) == ["dog-2/b.jpg", "dog/a.JPG"]
    assert keys(source_of(LAYOUT, include=["dog/**", "cat/*"])) == ["cat/x.2020.jpeg", "dog/a.JPG", "dog/sub/c.png"]
    assert keys(source_of(LAYOUT, include="**/.hidden*")) == ["cat/.hidden.jpg"]


def test_own_fields() -> None:
    objects = {"a.seg.png": b"1", "b.png": b"2"}
    source = source_of(objects, fields={"mask": "seg.png", "image": "png;jpg"})
    assert [source.ranges(i)[0][:2] for i in range(2)] == [("mask", "seg.png"), ("image", "png")]
    with pytest.raises(SourceError, match=r"memory://c\.txt.*image"):
        source_of({**objects, "c.txt": b""}, fields={"image": "png"})


def test_limit_keeps_the_class_numbers() -> None:
    whole = source_of(LAYOUT, label="parent")
    part = source_of(LAYOUT, label="parent", limit=2)
    assert keys(part) == keys(whole)[:2]
    assert part.classes == whole.classes
    assert [part.constants(i) for i in range(2)] == [whole.constants(i) for i in range(2)]
    assert len(source_of(LAYOUT, limit=3)) == 3
    assert len(source_of(LAYOUT, limit=100)) == 4


def test_blocks() -> None:
    source = source_of({f"{i:03d}.bin": bytes(100) for i in range(100)})
    assert source.blocks(1000).tolist() == list(range(0, 101, 10))


def test_fingerprint_is_about_keys_sizes_and_classes() -> None:
    base = source_of(LAYOUT).fingerprint()
    assert base == source_of({**LAYOUT, "dog/a.JPG": b"2"}).fingerprint()
    others = [
        source_of({**LAYOUT, "dog/a.JPG": b"22"}),
        source_of({**LAYOUT, "dog/b.JPG": b"2"}),
        source_of(LAYOUT, limit=2),
        source_of(LAYOUT, label="parent"),
    ]
    assert len({base, *(other.fingerprint() for other in others)}) == 5


def test_nothing_there() -> None:
    with pytest.raises(SourceError, match=r"no file below 'data' matches.*no file at all"):
        source_of({})
    with pytest.raises(SourceError, match=r"'x/\*\.gif'.*: 6 files are there, such as '\.git/x\.jpg'"):
        source_of(LAYOUT, include="x/*.gif")
    with pytest.raises(SourceError, match="1 files are there"):
        source_of({".hidden": b""})


def test_files_that_do_not_fit() -> None:
    with pytest.raises(SourceError, match=r"memory://a\.jpg lies in no folder.*label: none"):
        source_of({"a.jpg": b"", "x/b.jpg": b""}, label="parent")
    with pytest.raises(SourceError, match=r"memory://x/README.*no extension"):
        source_of({"x/README": b"", "x/b.jpg": b""}, include="**/*")


@pytest.mark.parametrize(
    "args",
    [
        {"url": ""},
        {"label": "folder"},
        {"limit": 0},
        {"limit": "3"},
        {"include": []},
        {"fields": {}},
        {"fields": {"a": "jpg", "b": "jpg"}},
        {"fields": {"label": "cls"}, "label": "parent"},
        {"colour": 1},
    ],
)
def test_wrong_arguments(args: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FilesArgs.model_validate({"url": "data", **args})
