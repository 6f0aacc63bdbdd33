"""Any range of a tensor's bytes, checksums of pieces, and the plan of a file."""

from __future__ import annotations

import random
import zlib
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from checkpoint_states import DTYPES, bytes_in, random_tensor, tensors
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from loaderkit.checkpoint.save.crc import PieceCrc, combine
from loaderkit.checkpoint.save.file_plan import ALIGNMENT, BytesItem, FilePlan, Item, TensorItem
from loaderkit.checkpoint.save.tensor_bytes import TensorBytes, plain_tensor
from loaderkit.checkpoint.tensor_boxes import boxes_in


@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_boxes_are_a_range_of_the_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    first = data.draw(st.integers(0, array.size))
    end = data.draw(st.integers(first, array.size))
    found = list(boxes_in(tuple(shape), first, end))
    assert [int(n) for box in found for n in np.ravel(array[box.slices])] == list(range(first, end))
    assert all(array[box.slices].shape == box.sizes for box in found)
    assert len(found) <= max(1, 2 * len(shape))


@given(tensors(), st.data())
def test_any_range_of_a_tensor(tensor: torch.Tensor, data: st.DataObject) -> None:
    source = TensorBytes(tensor)
    wanted = bytes_in(tensor)
    assert source.num_bytes == len(wanted)
    item = tensor.itemsize
    lo = data.draw(st.integers(0, tensor.numel()))
    hi = data.draw(st.integers(lo, tensor.numel()))
    memory = np.zeros(len(wanted) + 64, np.uint8)
    target = memory[64 : 64 + (hi - lo) * item]
    source.copy(lo * item, target)
    assert target.tobytes() == wanted[lo * item : hi * item]
    assert not memory[:64].any()
    assert not memory[64 + len(target) :].any()


def test_numbers_that_are_conjugated_or_negated_only_when_they_are_read() -> None:
    numbers = random_tensor(torch.float32, (6, 4), 1).nan_to_num()
    lazy = torch.complex(numbers, -numbers).conj()
    for tensor in (lazy, lazy.imag, lazy.t()):
        target = np.zeros(tensor.numel() * tensor.itemsize, np.uint8)
        TensorBytes(tensor).copy(0, target)
        assert target.tobytes() == bytes_in(tensor.resolve_conj().resolve_neg())


def test_types_that_cannot_be_copied_with_strides() -> None:
    data = random_tensor(torch.uint8, (4, 6), 1)
    for dtype in (torch.bits8, torch.float4_e2m1fn_x2):
        target = np.zeros(24, np.uint8)
        TensorBytes(data.view(dtype).t()).copy(0, target)
        assert target.tobytes() == bytes_in(data.t())


def test_what_is_no_plain_tensor() -> None:
    plain = torch.ones(2)
    assert plain_tensor(plain) is not None
    assert plain_tensor(torch.nn.Parameter(plain)) is not None
    assert plain_tensor(plain.to_sparse()) is None
    assert plain_tensor(torch.empty(2, device="meta")) is None
    assert type(plain_tensor(plain.as_subclass(type("Own", (torch.Tensor,), {})))) is torch.Tensor
    two: Any = TwoTensor
    assert plain_tensor(two(plain, plain)) is None
    assert plain_tensor([plain]) is None


@given(st.binary(max_size=300), st.integers(0, 300))
def test_checksums_are_combined(data: bytes, cut: int) -> None:
    first, second = data[:cut], data[cut:]
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(data)


def test_a_checksum_from_pieces_in_any_order(rng: random.Random) -> None:
    data = rng.randbytes(3 * 2**20)
    cuts = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(20))})
    pieces = list(pairwise(cuts))
    rng.shuffle(pieces)
    crc = PieceCrc(len(data))
    for lo, hi in pieces:
        assert not crc.is_whole
        crc.add(lo, hi - lo, zlib.crc32(data[lo:hi]))
    assert crc.is_whole
    assert crc.value() == zlib.crc32(data)
    assert PieceCrc(0).is_whole
    assert PieceCrc(0).value() == zlib.crc32(b"")


def test_pieces_are_the_file_without_gaps(rng: random.Random) -> None:
    items: list[Item] = [
        BytesItem("b", rng.randbytes(rng.randrange(200)))
        if rng.random() < 0.5
        else TensorItem("t", random_tensor(rng.choice(DTYPES), (rng.randrange(9), 3), n))
        for n in range(30)
    ]
    plan = FilePlan("f", items)
    assert all(start % ALIGNMENT == 0 for start in plan.starts)
    assert plan.size == plan.starts[-1] + items[-1].size
    step = rng.randrange(1, 3000)
    covered = {id(item): 0 for item in items}
    for begin in range(0, plan.size, step):
        for piece in plan.pieces(begin, min(begin + step, plan.size)):
            assert covered[id(piece.item)] == piece.lo < piece.hi
            assert begin + piece.at == plan.starts[items.index(piece.item)] + piece.lo
            covered[id(piece.item)] = piece.hi
    assert all(covered[id(item)] == item.size for item in items)
