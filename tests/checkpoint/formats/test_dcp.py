"""The description of a torch.distributed.checkpoint directory: pieces that cover a tensor once, places that nothing shares."""

from __future__ import annotations

import pickle
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from loaderkit.checkpoint.contents import TensorEntry
from loaderkit.checkpoint.formats.dcp import read_metadata
from loaderkit.errors import FormatError

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def described(shape: tuple[int, ...], boxes: list[Box], **places: Any) -> bytes:
    """A `.metadata` of one tensor, "w", of float32 in these shards, one behind the other in one file."""
    stored: dict[Any, Any] = {}
    start = 0
    for offsets, sizes in boxes:
        length = 4 * int(np.prod(sizes, dtype=object)) + 500
        stored[MetadataIndex("w", torch.Size(offsets))] = _StorageInfo("__0_0.distcp", start, length)
        start += length
    stored |= {MetadataIndex(name): place for name, place in places.items()}
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), chunks)
    values = {name: BytesStorageMetadata() for name in places}
    return pickle.dumps(Metadata({"w": tensor, **values}, None, stored))


def tensor_in(data: bytes) -> TensorEntry:
    return read_metadata(data).tensors["w"]


def grid(shape: tuple[int, ...], cuts: list[list[int]]) -> list[Box]:
    sides = [list(pairwise([0, *cut, size])) for cut, size in zip(cuts, shape, strict=True)]
    return [(tuple(lo for lo, _ in box), tuple(hi - lo for lo, hi in box)) for box in product(*sides)]


class TestCover:
    @pytest.mark.parametrize(
        ("shape", "boxes"),
        [
            ((), [((), ())]),
            ((0, 3), []),
            ((0, 3), [((0, 0), (0, 3)), ((0, 2), (0, 1))]),
            ((5,), [((0,), (2,)), ((2,), (0,)), ((2,), (3,))]),
            ((9, 9), grid((9, 9), [[3, 6], [1, 5]])),
            ((3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]),
            ((4, 6, 8), grid((4, 6, 8), [[1, 2], [3], [2, 4, 6]])),
            ((3000, 2), grid((3000, 2), [[*range(1, 3000)], []])),
            ((2, 3000), grid((2, 3000), [[1], [*range(1, 3000)]])),
        ],
    )
    def test_is_accepted(self, shape: tuple[int, ...], boxes: list[Box]) -> None:
        assert [(shard.offsets, shard.sizes) for shard in tensor_in(described(shape, boxes)).shards] == boxes

    @pytest.mark.parametrize("num_shards", [2, 4, 1500])
    def test_one_shard_twice_and_one_missing(self, num_shards: int) -> None:
        boxes = grid((num_shards, 3), [[*range(1, num_shards)], []])
        with pytest.raises(FormatError, match="two shards of 'w' overlap"):
            tensor_in(described((num_shards, 3), [*boxes[:-1], boxes[0]]))

    def test_one_shard_missing(self) -> None:
        with pytest.raises(FormatError, match="do not cover its shape"):
            tensor_in(described((9, 9), grid((9, 9), [[3], [5]])[1:]))

    @given(st.data())
    @settings(max_examples=num_examples(300))
    def test_is_what_counting_says(self, data: st.DataObject) -> None:
        shape = tuple(data.draw(st.lists(st.integers(1, 3), max_size=3)))
        cuts = [sorted(data.draw(st.sets(st.integers(1, size - 1)))) if size > 1 else [] for size in shape]
        boxes = grid(shape, cuts)
        if data.draw(st.booleans()):
            offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
            sizes = tuple(data.draw(st.integers(0, size - lo)) for lo, size in zip(offsets, shape, strict=True))
            boxes[data.draw(st.integers(0, len(boxes) - 1))] = offsets, sizes
        counts = np.zeros(shape, int)
        for offsets, sizes in boxes:
            counts[tuple(slice(lo, lo + size) for lo, size in zip(offsets, sizes, strict=True))] += 1
        if (counts == 1).all():
            assert len(tensor_in(described(shape, boxes)).shards) == len(boxes)
        else:
            with pytest.raises(FormatError, match="overlap"):
                tensor_in(described(shape, boxes))

    def test_bounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(FormatError, match="65 dimensions"):
            tensor_in(described((1,) * 65, [((0,) * 65, (1,) * 65)]))
        with pytest.raises(FormatError, match="cut along 9 dimensions"):
            tensor_in(described((2,) * 9, grid((2,) * 9, [[1]] * 9)))
        with pytest.raises(FormatError, match="larger than anything"):
            tensor_in(described((0, 2**62, 4), []))
        monkeypatch.setattr("loaderkit.checkpoint.formats.dcp._MAX_CORNERS", 2**17)
        rows = [[*range(1, 4)], [*range(1, 4)], *[[1]] * 5]
        boxes = grid((4, 4, *[2] * 5), rows)
        with pytest.raises(FormatError, match="along 7 dimensions into 512 shards"):
            tensor_in(described((4, 4, *[2] * 5), boxes))
        monkeypatch.setattr("loaderkit.checkpoint.formats.dcp._MAX_CORNERS", 7 * 512 * 2**7)
        assert len(tensor_in(described((4, 4, *[2] * 5), boxes)).shards) == 512

    def test_shards_without_elements_overlap_nothing(self) -> None:
        empty = [((1,), (0,)), ((4,), (0,))]
        assert len(tensor_in(described((4,), [*grid((4,), [[2]]), *empty])).shards) == 4


class TestPlaces:
    def test_are_not_shared(self) -> None:
        boxes = grid((4,), [[2]])
        first = tensor_in(described((4,), boxes)).shards[0]
        assert read_metadata(described((4,), boxes, k=_StorageInfo("__1_0.distcp", 0, 9))).values["k"].length == 9
        for start in (first.start, first.start + first.length - 1):
            place = _StorageInfo(first.key, start, first.length)
            with pytest.raises(FormatError, match=r"lie at the same bytes of '__0_0\.distcp'"):
                read_metadata(described((4,), boxes, k=place))

    def test_are_shared_by_a_few_tied_tensors(self) -> None:
        def metadata(num_names: int, num_shards: int = 1, length: int = 504) -> bytes:
            offsets = [torch.Size((2 * n,)) for n in range(num_shards)]
            chunks = [ChunkStorageMetadata(offset, torch.Size((2,))) for offset in offsets]
            shape = torch.Size((2 * num_shards,))
            names = [f"w{n}" for n in range(num_names)]
            tensors = {name: TensorStorageMetadata(TensorProperties(torch.float32), shape, chunks) for name in names}
            places = {
                MetadataIndex(name, offset): _StorageInfo("__0_0.distcp", 0, length if name == "w1" else 504)
                for name in names
                for offset in offsets
            }
            return pickle.dumps(Metadata(dict(tensors), None, places))

        assert len(read_metadata(metadata(32)).tensors) == 32
        for data in (metadata(33), metadata(1, 2), metadata(2, 1, 503)):
            with pytest.raises(FormatError, match="lie at the same bytes"):
                read_metadata(data)

    def test_hold_what_they_are_said_to(self) -> None:
        data = described((2000,), [((0,), (2000,))])
        assert tensor_in(data).shards[0].length == 8500
        short = data.replace((8500).to_bytes(2, "little"), (7999).to_bytes(2, "little"))
        with pytest.raises(FormatError, match="cannot lie in 7999 bytes"):
            tensor_in(short)

    @pytest.mark.parametrize("offset", [3, "x", (1.5,), (-1,), (10**5000,), [[0]]])
    def test_at_an_offset_that_is_none(self, offset: Any) -> None:
        stored = {MetadataIndex("w"): _StorageInfo("__0_0.distcp", 0, 504)}
        index = next(iter(stored))
        object.__setattr__(index, "offset", offset)
        tensor = TensorStorageMetadata(
            TensorProperties(torch.float32),
            torch.Size((1,)),
            [ChunkStorageMetadata(torch.Size((0,)), torch.Size((1,)))],
        )
        with pytest.raises(FormatError, match=r"the offsets .* of a shard of"):
            read_metadata(pickle.dumps(Metadata({"w": tensor}, None, stored)))

    def test_of_a_number_too_long_to_be_written(self) -> None:
        with pytest.raises(FormatError, match="a int"):
            read_metadata(described((1,), [((0,), (1,))], k=_StorageInfo("__1_0.distcp", 10**5000, 9)))


@pytest.mark.parametrize(
    "kind", [Metadata, MetadataIndex, _StorageInfo, TensorStorageMetadata, ChunkStorageMetadata, TensorProperties]
)
def test_an_object_without_its_state_is_refused(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pickle only says of which class it is."""
    monkeypatch.setattr(kind, "__getstate__", lambda self: None, raising=False)
    with pytest.raises(FormatError):
        read_metadata(described((1,), [((0,), (1,))]))
