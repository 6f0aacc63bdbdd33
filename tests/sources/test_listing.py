from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from loaderkit import native
from loaderkit.connectors.base import ObjectInfo
from loaderkit.sources.fields import FieldMap, Fields, Include
from loaderkit.sources.listing import Listing, StringTable, cut_blocks, numbered
from loaderkit.sources.patterns import Patterns, expand_braces

# ------------------------------------------------------------------------------------------------------- tables


@given(st.lists(st.text(alphabet=st.characters(codec="utf-8")) | st.just("\udce9x")))
def test_string_table_is_the_list(strings: list[str]) -> None:
    table = StringTable(iter(strings))
    assert len(table) == len(strings)
    assert list(table) == strings
    assert [table[i] for i in range(-len(strings), len(strings))] == strings * 2
    assert table.digest() == StringTable(strings).digest()
    with pytest.raises(IndexError):
        table[len(strings)]


@given(st.lists(st.lists(st.text(alphabet=st.characters(codec="utf-8"), max_size=5) | st.just("\udce9x"))), st.data())
def test_tables_are_joined_cut_and_taken_from(parts: list[list[str]], data: st.DataObject) -> None:
    strings = list(itertools.chain(*parts))
    table = StringTable.joined(map(StringTable, parts))
    assert list(table) == strings
    assert table.digest() == StringTable(strings).digest()
    num = data.draw(st.integers(0, len(strings) + 2))
    assert list(table.head(num)) == strings[:num]
    places = np.array(data.draw(st.lists(st.integers(0, len(strings) - 1))) if strings else [], np.int64)
    wanted = [strings[place] for place in places]
    assert table.take(places) == wanted


def test_no_string_is_made_of_what_lies_beside() -> None:
    table = StringTable(["a", "b"])
    for place in (2, -1, 2**62):
        with pytest.raises(IndexError):
            table.take(np.array([place]))
    with pytest.raises(IndexError):
        StringTable.packed(b"ab", np.array([1, 3])).take(np.array([1]))
    with pytest.raises(ValueError, match="64-bit"):
        native.texts(b"ab", np.array([1, 2], np.int32), np.array([0]))


@given(st.lists(st.integers(0, 2**63 - 1)))
def test_numbered_keys_are_the_numbers(numbers: list[int]) -> None:
    assert numbered(np.array(numbers, np.int64)) == list(map(str, numbers))


def test_digest_sees_order_and_borders() -> None:
    tables = [[], [""], ["ab"], ["a", "b"], ["b", "a"], ["", "ab"], ["ab", ""]]
    assert len({StringTable(strings).digest() for strings in tables}) == len(tables)


def test_a_listing_gives_back_what_was_listed_in_little_memory() -> None:
    num = 20_000

    def info(i: int) -> ObjectInfo:
        return ObjectInfo(f"train/n{i % 1000:08d}/{i:08d}.JPEG", 10**12 + i, f"{1700000000000000000 + i:x}-1a2b3")

    tracemalloc.start()
    listing = Listing(info(i) for i in range(num))
    used_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(listing) == num
    assert [listing[i] for i in (0, 1, num - 1)] == [info(i) for i in (0, 1, num - 1)]
    assert used_bytes / num < 100


# ------------------------------------------------------------------------------------------------------- blocks


@given(
    st.lists(st.integers(0, 10**6) | st.just(10**13), max_size=60),
    st.integers(1, 3 * 10**6),
    st.lists(st.integers(0, 60), max_size=6),
)
@example([0, 0, 0], 1, [])
@example([5], 1, [0, 1])
def test_blocks_cover_everything_and_cross_nothing(sizes: list[int], block_bytes: int, cuts: list[int]) -> None:
    boundaries = np.array(sorted(cut for cut in cuts if cut <= len(sizes)), np.int64)
    blocks = cut_blocks(np.array(sizes, np.int64), block_bytes, boundaries)
    assert blocks.dtype == np.int64
    assert blocks[0] == 0
    assert blocks[-1] == len(sizes)
    assert np.all(np.diff(blocks) > 0)
    assert set(boundaries.tolist()) <= set(blocks.tolist())
    largest = max(sizes, default=0)
    for first, last in itertools.pairwise(blocks.tolist()):
        assert sum(sizes[first:last]) <= 1.5 * block_bytes + largest


def test_blocks_are_of_about_the_wanted_size() -> None:
    sizes = np.full(1000, 50_000, np.int64)
    blocks = cut_blocks(sizes, 1_000_000)
    assert np.diff(blocks).tolist() == [20] * 50
    # 8.1 blocks' worth makes eight equal ones, not eight and a rest.
    assert set(np.diff(cut_blocks(sizes[:162], 1_000_000)).tolist()) == {20, 21}
    assert cut_blocks(sizes, 1_000_000, np.array([0, 10, 500])).tolist()[:2] == [0, 10]
    assert cut_blocks(sizes, 1 << 60).tolist() == [0, 1000]
    assert cut_blocks(sizes, 1).tolist() == list(range(1001))


# ----------------------------------------------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("pattern", "expanded"),
    [
        ("a", ["a"]),
        ("{a,b}c", ["ac", "bc"]),
        ("x{008..011}", ["x008", "x009", "x010", "x011"]),
        ("{8..11}", ["8", "9", "10", "11"]),
        ("{0..9..4}", ["0", "4", "8"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{a..c}", ["a", "b", "c"]),
        ("{a,b{1,2}}{x,y}", ["ax", "ay", "b1x", "b1y", "b2x", "b2y"]),
        ("{a{1,2},b{3..4}}", ["a1", "a2", "b3", "b4"]),
        ("{,.bak}", ["", ".bak"]),
        ("{abc}", ["{abc}"]),
        ("{{a,b}}", ["{a}", "{b}"]),
        ("a{b", ["a{b"]),
        ("a{b,{c,d}", ["a{b,c", "a{b,d"]),
        ("{}", ["{}"]),
    ],
)
def test_braces(pattern: str, expanded: list[str]) -> None:
    assert expand_braces(pattern) == expanded


def test_too_many_braces() -> None:
    for pattern in ("{0..99999999}", "{0..9999}{0..9999}"):
        with pytest.raises(ValueError, match="more than 1000000"):
            expand_braces(pattern)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("**/*", ["a", "a/b", "a/b/c.jpg"], [".a", "a/.b", ".a/b"]),
        ("**", ["a", "a/b"], [".a", "a/.b"]),
        (
            "**/*.jpg",
            ["a.jpg", "x/y/a.jpg", "x//a.jpg", "/a.jpg"],
            ["a.JPG", "a.jpg.txt", "ajpg", ".jpg", "x/.y/a.jpg"],
        ),
        ("*.jpg", ["a.jpg"], ["x/a.jpg", ".a.jpg"]),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b", "a//b"], ["a/.x/b", "ab", "xa/b"]),
        ("a/**", ["a/b", "a/b/c"], ["a", "ab/c"]),
        (".*/*", [".a/b"], ["a/b", ".a/.b"]),
        ("**/.hidden/*", [".hidden/a", "x/.hidden/a"], [".x/.hidden/a"]),
        ("?.[jp]*", ["a.jpg", "é.png"], ["ab.jpg", "a.gif", "/.jpg"]),
        ("[!a-c]x", ["dx"], ["ax", "/x", "bx"]),
        ("[]x]", ["]", "x"], ["["]),
        ("a[", ["a["], ["a"]),
        ("a+(b).tar", ["a+(b).tar"], ["aab.tar"]),
        ("{train,val}/**/*.{jpg,png}", ["train/a.jpg", "val/x/y.png"], ["test/a.jpg", "train/a.gif"]),
        ("a\n*", ["a\nb\nc"], ["a"]),
    ],
)
def test_globs(pattern: str, matching: list[str], others: list[str]) -> None:
    patterns = Patterns(pattern)
    assert [key for key in matching + others if patterns.matches(key)] == matching
    assert all(key.startswith(patterns.prefix) for key in matching)


def test_several_patterns() -> None:
    patterns = Patterns(["shard-{00..03}.tar", "shard-x*.tar", "shard-y*.tar"])
    assert patterns.prefix == "shard-"
    keys = ["shard-00.tar", "shard-02.tar", "shard-xx.tar"]
    assert all(map(patterns.matches, keys))
    assert patterns.without_match(keys) == ["shard-01.tar", "shard-03.tar", "shard-y*.tar"]
    assert "shard-x*.tar" in str(patterns)


def test_include_in_a_configuration() -> None:
    include: TypeAdapter[str | tuple[str, ...]] = TypeAdapter(Include)
    assert include.validate_python(["a", "b"], strict=True) == ("a", "b")
    assert include.validate_python("a", strict=True) == "a"
    for wrong in ("", [], [1], 3, "{0..9999999}", "[z-a]"):
        with pytest.raises(ValidationError):
            include.validate_python(wrong, strict=True)


# ------------------------------------------------------------------------------------------------------- fields


def test_fields_by_extension() -> None:
    fields = FieldMap({"image": "jpg;JPEG", "mask": ".seg.png ; mask"})
    assert fields.split_key("a/x.JPG") == ("image", "jpg")
    assert fields.split_key("a/x.2020.jpeg") == ("image", "jpeg")
    assert fields.split_key("a.b/x.seg.png") == ("mask", "seg.png")
    assert fields.split_key("x.png") is None
    assert fields.split_key("a.jpg/x") is None
    assert fields.field_of("seg.png") == "mask"
    assert fields.field_of("json") is None


def test_default_fields() -> None:
    fields = FieldMap(None, {"cls": "label"})
    assert fields.split_key("a.b.WEBP") == ("image", "webp")
    assert fields.split_key("a.b.json") == ("json", "json")
    assert fields.split_key("a.cls") == ("label", "cls")
    assert fields.split_key("README") is None
    assert fields.split_key("a.") is None
    assert fields.split_key(".jpg") is None
    assert fields.field_of("seg.png") == "seg.png"


def test_fields_in_a_configuration() -> None:
    fields: TypeAdapter[dict[str, str]] = TypeAdapter(Fields)
    assert fields.validate_python({"image": "jpg;png"}) == {"image": "jpg;png"}
    for wrong in ({}, {"image": ""}, {"image": "jpg;;png"}, {"": "jpg"}, {"a": "jpg", "b": "png;JPG"}):
        with pytest.raises(ValidationError):
            fields.validate_python(wrong)
