"""The promises of every connector: the order of listings, prefixes, ranges, errors, threads."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest

from loaderkit._internal.packing import pack, unpack
from loaderkit.connectors.base import ByteRange, Connector, Ranges, bulk_of
from loaderkit.connectors.ranges import gather_into
from loaderkit.errors import ConnectorError, ObjectChangedError, ObjectNotFoundError, ShortReadError


@dataclass
class Store:
    """A connector with objects in it.

    `place` turns a test's key into the connector's, where that differs; `replace(key, data)` changes one object; it is
    None if a store of this kind never changes. `is_sent`: worker processes are given the connector.
    """

    connector: Connector
    place: Callable[[str], str] = str
    replace: Callable[[str, bytes], object] | None = None
    is_sent: bool = True

    def gather(self, key: str, starts: list[int], length: int, etag: str | None = None) -> bytes:
        """The ranges [start, start + length) of an object, one behind the other."""
        buffer = bytearray(len(starts) * length)
        place, where = self.place(key), np.array(starts, np.int64)
        gather_into(self.connector, place, where, length, memoryview(buffer), etag=etag)
        return bytes(buffer)

    def read(self, key: str, start: int, num_bytes: int, etag: str | None = None) -> bytes:
        """The bytes [start, start + num_bytes) of an object."""
        buffer = bytearray(num_bytes)
        self.connector.read_into(self.place(key), start, memoryview(buffer), etag=etag)
        return bytes(buffer)

    def etag(self, key: str) -> str:
        """The object's etag now."""
        return self.connector.stat(self.place(key)).etag


MakeStore = Callable[[Mapping[str, bytes]], Store]

# Few letters, so that keys share prefixes: "-" and "!" sort before "/", "0" after it, the others take 2 to 4 bytes.
_LETTERS = "a-!0.é\uffee\U0001f600"
_MISSING = ("b", "dir/b", "dir", "dir/a/b", "x/y/z", "dir/a\0", "n" * 5000, "\ud800")
_LEADING_OUT = ("../etc/passwd", "/etc/passwd", "dir/../b", "..", ".", "", "dir/", "./b", "dir//a", "dir/./a")
_UNUSUAL = (
    "with space", "a+b%20c", "%2e%2e", "naïve/日本語.jpg", "café", "-x", "~", "a\nb", "q?x=1&y#z", "\udce9", "x.tar/y",
)  # fmt: skip


class ConnectorContract:
    """A subclass gives the fixture `make_store`: a function that puts objects, {key: bytes}, into a new store, and returns it
    as a `Store`. A test uses one store at a time. It may be read only."""

    letters: str = _LETTERS
    """The letters of which the tests make keys."""
    unusual_keys: Collection[str] = _UNUSUAL
    """Unusual keys for the tests. A subclass leaves out keys that the store cannot have as names of objects."""

    @pytest.fixture
    def make_store(self) -> MakeStore:
        """To be given."""
        raise NotImplementedError(f"{type(self).__name__} gives the fixture make_store: see ConnectorContract")

    def num_examples(self, most: int) -> int:
        """The number of cases to draw, where `most` would be thorough."""
        return most

    # ------------------------------------------------------------------------------------------------- listing

    def test_listing_is_ordered_by_the_bytes_of_the_key(self, make_store: MakeStore) -> None:
        for seed in range(self.num_examples(60)):
            rng = np.random.default_rng(seed)
            keys = self._keys(rng)
            prefix = str(rng.choice(["", *(key[: rng.integers(1, 4)] for key in keys), self._key(rng)]))
            store = make_store({key: key.encode() for key in keys})
            if not keys:
                assert list(store.connector.list("")) == []
                continue
            wanted = sorted((key for key in keys if key.startswith(prefix)), key=str.encode)
            infos = list(store.connector.list(store.place(prefix)))
            assert [info.key for info in infos] == [store.place(key) for key in wanted]
            assert [info.size for info in infos] == [len(key.encode()) for key in wanted]
            assert [store.connector.stat(info.key) for info in infos] == infos

    def test_prefix_is_a_string_not_a_directory(self, make_store: MakeStore) -> None:
        store = make_store({"ab/c": b"1", "abc": b"2", "ab-c": b"3", "b": b"4"})

        def listed(prefix: str) -> list[str]:
            return [info.key.removeprefix(store.place("")) for info in store.connector.list(store.place(prefix))]

        assert listed("ab") == ["ab-c", "ab/c", "abc"]
        assert listed("ab/") == ["ab/c"]
        assert listed("abc") == ["abc"]
        assert listed("abcd") == []
        assert listed("../") == []

    # ------------------------------------------------------------------------------------------------- reading

    def test_any_range_is_the_slice(self, make_store: MakeStore) -> None:
        for seed in range(self.num_examples(40)):
            rng = np.random.default_rng(seed)
            data = rng.bytes(int(rng.integers(0, 2000)))
            start, end = sorted(rng.integers(0, len(data) + 1, 2).tolist())
            store = make_store({"x/data.bin": data, "y": b"neighbour"})
            assert store.read("x/data.bin", start, end - start) == data[start:end]
            assert store.read("x/data.bin", start, end - start, store.etag("x/data.bin")) == data[start:end]

    def test_gathering_is_reading_one_by_one(self, make_store: MakeStore) -> None:
        for seed in range(self.num_examples(40)):
            rng = np.random.default_rng(seed)
            data, length = rng.bytes(int(rng.integers(40, 400))), int(rng.integers(1, 10))
            # Of each place a few neighbours, which may be read together.
            begins = [(int(rng.integers(0, 31)), int(rng.integers(1, 5))) for _ in range(rng.integers(0, 12))]
            starts = [place + n * length for place, num in begins for n in range(num)]
            starts = [start for start in starts if start + length <= len(data)]
            store = make_store({"x/data.bin": data, "y": b"neighbour"})
            etag = store.etag("x/data.bin")
            one_by_one = b"".join(store.read("x/data.bin", start, length, etag) for start in starts)
            assert one_by_one == b"".join(data[start : start + length] for start in starts)
            assert store.gather("x/data.bin", starts, length, etag) == one_by_one

    def test_gathering_fails_as_reading_does(self, make_store: MakeStore) -> None:
        store = make_store({"a": b"0123456789"})
        assert store.gather("a", [8, 0, 4], 2, store.etag("a")) == b"890145"
        with pytest.raises(ShortReadError):
            store.gather("a", [0, 8], 3)
        with pytest.raises(ShortReadError):
            store.gather("a", [0, -2], 2)
        for key in ("b", "../a", "a/b", "a\0"):
            with pytest.raises(ObjectNotFoundError):
                store.gather(key, [0], 2)

    @pytest.mark.parametrize(("start", "num_bytes"), [(0, 11), (10, 1), (9, 2), (500, 4), (1 << 40, 1)])
    def test_reading_past_the_end_is_an_error(self, make_store: MakeStore, start: int, num_bytes: int) -> None:
        store = make_store({"a": b"0123456789", "b": b"x" * 5000})
        with pytest.raises(ShortReadError):
            store.read("a", start, num_bytes)

    def test_reading_before_the_start_is_an_error(self, make_store: MakeStore) -> None:
        store = make_store({"a": b"0123456789"})
        for start in (-1, -5, -512):
            with pytest.raises(ShortReadError):
                store.read("a", start, 4)

    def test_reading_many_is_reading_each(self, make_store: MakeStore) -> None:
        """Ranges in any order, overlapping or with gaps; a range that fails gives its own error, the same as when it is
        read alone."""
        for seed in range(self.num_examples(80)):
            rng = np.random.default_rng(seed)
            data = rng.bytes(int(rng.integers(1, 60))) * 700
            store = make_store({"a": data, "b": data[::-1]})
            read_many = bulk_of(store.connector).read_many
            if read_many is None:
                return
            ranges = self._drawn_ranges(rng, store)
            offsets = [8 + sum(found.length + 3 for found in ranges[:number]) for number in range(len(ranges))]
            buffer = bytearray(8 + sum(found.length + 3 for found in ranges))
            columns = Ranges(*([found[i] for found in ranges] for i in range(4)))  # type: ignore[arg-type]
            errors = read_many(columns, offsets, memoryview(buffer))
            assert errors.keys() <= {*range(len(ranges))}
            for number, (found, offset) in enumerate(zip(ranges, offsets, strict=True)):
                alone = bytearray(found.length)
                try:
                    store.connector.read_into(found.key, found.start, memoryview(alone), etag=found.etag)
                except ConnectorError as expected:
                    error = errors[number]
                    assert (type(error), str(error)) == (type(expected), str(expected))  # noqa: PT017 - two ways are compared
                else:
                    assert number not in errors
                    assert buffer[offset : offset + found.length] == alone

    def test_a_mapping_is_what_reading_gives(self, make_store: MakeStore) -> None:
        data = np.random.default_rng(5).bytes(9000)
        store = make_store({"a": data, "empty": b""})
        map_object = bulk_of(store.connector).map_object
        if map_object is None:
            return
        mapped = map_object(store.place("a"), etag=store.etag("a"))
        assert mapped.readonly
        assert bytes(mapped) == data
        assert bytes(map_object(store.place("empty"))) == b""
        with pytest.raises(ObjectNotFoundError):
            map_object(store.place("b"))
        if store.replace is not None:
            old = store.etag("a")
            store.replace("a", b"new")
            with pytest.raises(ObjectChangedError):
                map_object(store.place("a"), etag=old)

    def test_many_threads(self, make_store: MakeStore) -> None:
        objects = {f"d{i % 7}/{i}": bytes([i]) * (i + 1) for i in range(100)}
        store = make_store(objects)
        etags = {info.key: info.etag for info in store.connector.list(store.place(""))}

        def check(i: int) -> bool:
            key, data = list(objects.items())[i % 100]
            return store.read(key, 0, len(data), etags[store.place(key)]) == data

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(check, range(2000)))

    # ------------------------------------------------------------------------------------------------- errors

    def test_missing_keys(self, make_store: MakeStore) -> None:
        store = make_store({"dir/a": b"0"})
        for key in _MISSING:
            with pytest.raises(ObjectNotFoundError):
                store.read(key, 0, 1)
            with pytest.raises(ObjectNotFoundError):
                store.connector.stat(store.place(key))

    def test_keys_do_not_lead_out(self, make_store: MakeStore) -> None:
        store = make_store({"dir/a": b"0", "b": b"1"})
        for key in _LEADING_OUT:
            with pytest.raises(ObjectNotFoundError):
                store.read(key, 0, 1)
            with pytest.raises(ObjectNotFoundError):
                store.connector.stat(store.place(key))

    def test_a_replaced_object_is_noticed(self, make_store: MakeStore) -> None:
        store = make_store({"a": b"old old old"})
        if store.replace is None:
            pytest.skip("objects of this store are not replaced")
        old = store.etag("a")
        store.replace("a", b"new")
        with pytest.raises(ObjectChangedError):
            store.read("a", 0, 3, old)
        new = store.etag("a")
        assert new != old
        assert store.read("a", 0, 3, new) == b"new"
        with pytest.raises(ObjectChangedError):
            store.read("a", 0, 3, old)

    def test_gathering_of_a_replaced_object_is_noticed(self, make_store: MakeStore) -> None:
        store = make_store({"a": b"0123456789"})
        if store.replace is None:
            pytest.skip("objects of this store are not replaced")
        etag = store.etag("a")
        assert store.gather("a", [8, 0, 4], 2, etag) == b"890145"
        store.replace("a", b"abcdefghijk")

        def gather() -> None:
            # A cache may still serve the object that was replaced, but never a mixture.
            assert store.gather("a", [0, 4], 2, etag) == b"0145"
            store.gather("a", [1, 5], 3, etag)

        with pytest.raises(ObjectChangedError):
            gather()

    def test_unusual_keys(self, make_store: MakeStore) -> None:
        for key in self.unusual_keys:
            store = make_store({key: b"data"})
            assert [info.key for info in store.connector.list(store.place(""))] == [store.place(key)]
            assert store.read(key, 1, 2) == b"at"
            assert store.place(key).split("/")[-1] in store.connector.describe(store.place(key))

    # ------------------------------------------------------------------------------------------------- its life

    def test_it_goes_to_other_processes(self, make_store: MakeStore) -> None:
        store = make_store({"a/b": b"0123456789", "c": b"1"})
        if not store.is_sent:
            pytest.skip("this connector stays in its process")
        there: Connector = unpack(*pack(store.connector))
        try:
            assert list(there.list("")) == list(store.connector.list(""))
            buffer = bytearray(4)
            there.read_into(store.place("a/b"), 3, memoryview(buffer), etag=store.etag("a/b"))
            assert buffer == b"3456"
        finally:
            there.close()

    def test_its_errors_go_to_other_processes(self, make_store: MakeStore) -> None:
        store = make_store({"a": b"0"})
        with pytest.raises(ObjectNotFoundError) as raised:
            store.connector.stat(store.place("b"))
        assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)  # noqa: S301 - made here

    def test_close_twice(self, make_store: MakeStore) -> None:
        store = make_store({"a": b""})
        store.connector.close()
        store.connector.close()

    # ------------------------------------------------------------------------------------------------- drawing

    def _key(self, rng: np.random.Generator) -> str:
        parts = ["".join(rng.choice(list(self.letters), rng.integers(1, 4))) for _ in range(rng.integers(1, 4))]
        return "/".join("a" if part in (".", "..") else part for part in parts)

    def _keys(self, rng: np.random.Generator) -> list[str]:
        """Keys of which none is a directory of another: a file system could not hold both."""
        chosen: list[str] = []
        for key in (self._key(rng) for _ in range(rng.integers(0, 13))):
            if not any(key == one or key.startswith(one + "/") or one.startswith(key + "/") for one in chosen):
                chosen.append(key)
        return chosen

    @staticmethod
    def _drawn_ranges(rng: np.random.Generator, store: Store) -> list[ByteRange]:
        ranges = []
        for _ in range(rng.integers(0, 12)):
            key = str(rng.choice(["a", "a", "b", "none", "../a"])) if rng.random() < 0.8 else "a\0"
            start, length = int(rng.integers(0, 43000)), int(rng.choice([0, 1, 7, 500, 9000]))
            known = store.etag(key) if key in ("a", "b") else ""
            tag = [known, None, "0-0"][int(rng.integers(0, 3))]
            ranges.append(ByteRange(store.place(key), start, length, tag))
        return sorted(ranges, key=lambda one: one[:3]) if rng.random() < 0.5 else ranges
