"""Byte ranges of any box of any tensor, laid out anyhow, give that box: what resharding stands on."""

from __future__ import annotations

from typing import Any

import torch
from checkpoint_states import random_tensor, same, saved
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples

from loaderkit.checkpoint.contents import TensorEntry, TensorShard, strides_of
from loaderkit.checkpoint.transfer.layout import ByteSpan, ReadLimits, box_spans, tensor_spans
from loaderkit.checkpoint.transfer.plan import coalesce


@st.composite
def boxes(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """(a tensor with any strides, the offsets of a box in it, its sizes)."""
    shape = draw(st.lists(st.integers(1, 7), max_size=3))
    tensor = random_tensor(draw(st.sampled_from([torch.float32, torch.int8, torch.bfloat16])), tuple(shape), 1)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    offsets = [draw(st.integers(0, size - 1)) for size in tensor.shape]
    sizes = [draw(st.integers(1, size - lo)) for size, lo in zip(tensor.shape, offsets, strict=True)]
    return tensor, tuple(offsets), tuple(sizes)


def fill(data: bytes, spans: list[ByteSpan], limits: ReadLimits) -> int:
    """Do what the stages do; the bytes fetched."""
    fetched = 0
    for read in coalesce(spans, limits):
        assert read.end - read.start <= max(limits.most_bytes, *(span.length for span in read.spans))
        buffer = memoryview(bytearray(data[read.start : read.end]))
        fetched += len(buffer)
        for span in read.spans:
            part = buffer[span.start - read.start : span.start - read.start + span.length]
            if span.target is not None:
                span.target[:] = part
            else:
                assert span.place is not None
                span.place(part)
    return fetched


@given(boxes(), st.booleans(), st.integers(0, 40), st.integers(8, 200), st.sampled_from([torch.float32, None]))
@settings(max_examples=num_examples(300))
def test_any_box(box: Any, is_archive: bool, gap: int, most: int, target_dtype: torch.dtype | None) -> None:
    tensor, offsets, sizes = box
    limits = ReadLimits(most, gap, 16)
    dtype = (target_dtype or tensor.dtype) if tensor.dtype.is_floating_point else tensor.dtype
    target = torch.zeros(tuple(reversed(sizes)), dtype=dtype).permute(list(reversed(range(len(sizes)))))
    item = tensor.element_size()
    zeros = (0,) * len(sizes)
    whole = tuple(tensor.shape)
    if is_archive:
        data = b"......" + saved(tensor)
        shard = TensorShard(zeros, whole, "x", 6, len(data) - 6, is_archive=True)
    else:
        storage = tensor.untyped_storage()
        data = b"......" + torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()
        shard = TensorShard(zeros, whole, "x", 6, tensor.numel() * item, tensor.stride())
    spans = box_spans("x", tensor.dtype, shard, target, limits, offsets=offsets, sizes=sizes)
    fetched = fill(data, spans, limits)
    wanted = tensor[tuple(slice(lo, lo + size) for lo, size in zip(offsets, sizes, strict=True))]
    assert same(target, wanted.to(dtype))
    if not is_archive and gap == 0:
        assert fetched == wanted.numel() * item  # not a byte too many


@given(
    shape=st.lists(st.integers(0, 9), max_size=3),
    dtype=st.sampled_from([torch.int8, torch.bfloat16, torch.float64]),
    begin=st.integers(0, 40),
    most=st.integers(1, 200),
)
@settings(max_examples=num_examples(300))
def test_a_tensor_that_lies_as_it_is_stored(shape: list[int], dtype: torch.dtype, begin: int, most: int) -> None:
    """Cut into what is read at a time, at multiples in the object, as it is cut on other ways."""
    tensor = random_tensor(dtype, tuple(shape), 1)
    num_bytes = tensor.numel() * tensor.element_size()
    data = bytes(begin) + tensor.flatten().view(torch.uint8).numpy().tobytes() if num_bytes else bytes(begin)
    shard = TensorShard((0,) * len(shape), tuple(shape), "x", begin, num_bytes, strides_of(tuple(shape)))
    target = torch.zeros(tuple(shape), dtype=dtype)
    limits = ReadLimits(most, 0, 1)
    spans = tensor_spans("x", TensorEntry(dtype, tuple(shape), (shard,)), target, limits)
    assert fill(data, spans, limits) == num_bytes
    assert same(target, tensor)
    item = dtype.itemsize
    assert all(0 < span.length <= max(most, item) and span.target is not None for span in spans)
    if most % item == 0:
        assert all(-(span.start + span.length) % most < item for span in spans[:-1])
    if num_bytes:
        as_boxes = box_spans("x", dtype, shard, target, limits, offsets=(0,) * len(shape), sizes=tuple(shape))
        assert [(span.start, span.length) for span in spans] == [(box.start, box.length) for box in as_boxes]
