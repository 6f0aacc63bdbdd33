"""From a tensor to the byte spans that fill it.

A `ByteSpan` is read straight into the tensor's own memory (`target`) where that has the layout of the stored bytes, else to
staging memory, from where `place` copies, casts or transfers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from loaderkit.checkpoint.contents import TensorEntry, TensorShard, strides_of
from loaderkit.checkpoint.formats.shard_archive import ArchivedTensor, Layouts
from loaderkit.errors import FormatError

Shape = tuple[int, ...]


@dataclass(slots=True)
class ByteSpan:
    """Bytes [start, start + length) of an object, for the tensor `label`. Exactly one of `target` and `place` is set; a small
    span with a `target` may be read to staging memory together with its neighbours, and copied."""

    label: str
    key: str
    start: int
    length: int
    target: memoryview | None
    place: Callable[[memoryview], None] | None


class ReadLimits(NamedTuple):
    """`most_bytes`: the most bytes of one read. `coalesce_gap`: unneeded bytes that may be read to save a read.
    `least_direct`: a span with fewer bytes is read together with its neighbours. `edge_bytes`: bytes that are read
    besides a span, because checksums are of whole blocks."""

    most_bytes: int
    coalesce_gap: int
    least_direct: int
    edge_bytes: int = 0


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's own memory, to be written to."""
    # A dimension of size 1 may have any stride, and `view` to another dtype would reject it.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    data: memoryview = flat.numpy().data
    return data


def tensor_spans(label: str, entry: TensorEntry, tensor: torch.Tensor, limits: ReadLimits) -> list[ByteSpan]:
    """The spans that fill a whole tensor of the shape of `entry`; its dtype, device and strides may differ."""
    if len(entry.shards) == 1 and _is_like(tensor, entry):  # most tensors; the general way takes five times as long
        shard, data = entry.shards[0], bytes_of(tensor)
        if len(data) <= limits.most_bytes:
            return [ByteSpan(label, shard.key, shard.start, len(data), data, None)] if data else []
        cuts = _cuts(shard.start, len(data), entry.dtype.itemsize, limits.most_bytes)
        return [ByteSpan(label, shard.key, shard.start + lo, hi - lo, data[lo:hi], None) for lo, hi in cuts]
    spans: list[ByteSpan] = []
    for shard in entry.shards:
        box = tensor
        for dim, (offset, size) in enumerate(zip(shard.offsets, shard.sizes, strict=True)):
            if size != entry.shape[dim]:
                box = box.narrow(dim, offset, size)
        spans += box_spans(label, entry.dtype, shard, box, limits, offsets=(0,) * len(shard.sizes), sizes=shard.sizes)
    return spans


def part_spans(
    label: str, entry: TensorEntry, tensor: torch.Tensor, limits: ReadLimits, *, offsets: Shape
) -> list[ByteSpan]:
    """The spans that fill `tensor` with the part of its shape that begins at `offsets` of the whole tensor."""
    spans: list[ByteSpan] = []
    for shard in entry.shards:
        lows, sizes, view = [], [], tensor
        for dim, (begin, size, start, length) in enumerate(
            zip(offsets, tensor.shape, shard.offsets, shard.sizes, strict=True)
        ):
            low, high = max(begin, start), min(begin + size, start + length)
            lows.append(low - start)
            sizes.append(max(0, high - low))
            view = view.narrow(dim, min(max(low - begin, 0), size), sizes[-1])
        spans += box_spans(label, entry.dtype, shard, view, limits, offsets=tuple(lows), sizes=tuple(sizes))
    return spans


def _cuts(start: int, num_bytes: int, item: int, most_bytes: int) -> list[tuple[int, int]]:
    """The reads [lo, hi) of the `num_bytes` of an object from `start` on. Long ones are cut at multiples of
    `most_bytes` in the object, where blocks with checksums end, too, or as near to that as whole elements of `item`
    bytes allow."""
    if num_bytes <= most_bytes:
        return [(0, num_bytes)] if num_bytes else []
    step = max(item, most_bytes // item * item)
    first = (most_bytes - start % most_bytes) // item * item or step
    return list(pairwise([0, *range(first, num_bytes, step), num_bytes]))


def _is_like(tensor: torch.Tensor, entry: TensorEntry) -> bool:
    """True if the stored bytes of the only shard are the tensor's own, in order."""
    shard = entry.shards[0]
    is_same = shard.strides == tensor.stride() and not shard.is_archive
    return is_same and tensor.dtype == entry.dtype and tensor.is_cpu and tensor.is_contiguous()


def box_spans(
    label: str,
    dtype: torch.dtype,
    shard: TensorShard,
    tensor: torch.Tensor,
    limits: ReadLimits,
    *,
    offsets: Shape,
    sizes: Shape,
) -> list[ByteSpan]:
    """The spans that fill `tensor` with the box at `offsets` of `sizes` inside a shard."""
    if 0 in sizes:
        return []
    if shard.is_archive:
        place = _unpack(dtype, shard, offsets, sizes, tensor)
        return [ByteSpan(label, shard.key, shard.start, shard.length, None, place)]
    start = shard.start + sum(o * s for o, s in zip(offsets, shard.strides, strict=True)) * dtype.itemsize
    # The stride of size 1 has no meaning. Dimensions are ordered by their stored strides: a transposed tensor is contiguous.
    strides = tuple(0 if size == 1 else stride for size, stride in zip(sizes, shard.strides, strict=True))
    order = sorted(range(len(sizes)), key=lambda dim: -strides[dim])
    source = _StridedRun(dtype, start, tuple(sizes[d] for d in order), tuple(strides[d] for d in order))
    return [_span(label, shard.key, run, view) for run, view in _split(source, tensor.permute(order), limits)]


class _StridedRun(NamedTuple):
    """A strided run of elements in an object, from byte `start` on; strides in elements, descending."""

    dtype: torch.dtype
    start: int
    shape: Shape
    strides: Shape

    @property
    def num_bytes(self) -> int:
        """Bytes from the first element to behind the last."""
        spanned = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return spanned * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        whole = strides_of(self.shape)
        return all(n == 1 or a == b for n, a, b in zip(self.shape, self.strides, whole, strict=True))

    def rows(self, lo: int, hi: int) -> _StridedRun:
        start = self.start + lo * self.strides[0] * self.dtype.itemsize
        return self._replace(start=start, shape=(hi - lo, *self.shape[1:]))

    def row(self, number: int) -> _StridedRun:
        start = self.start + number * self.strides[0] * self.dtype.itemsize
        return _StridedRun(self.dtype, start, self.shape[1:], self.strides[1:])


def _split(source: _StridedRun, tensor: torch.Tensor, limits: ReadLimits) -> Iterator[tuple[_StridedRun, torch.Tensor]]:
    """Cut a source, and the tensor alike, until no run exceeds the limits in length or in the gaps that it holds."""
    is_dense = source.is_dense
    item = source.dtype.itemsize
    if is_dense and tensor.is_contiguous():
        flat, num_bytes = tensor.view(-1), item * int(np.prod(source.shape, dtype=np.int64))
        for lo, hi in _cuts(source.start, num_bytes, item, limits.most_bytes):
            yield (
                _StridedRun(source.dtype, source.start + lo, ((hi - lo) // item,), (1,)),
                flat[lo // item : hi // item],
            )
        return
    if not source.shape or (
        source.num_bytes <= limits.most_bytes and (is_dense or _largest_gap(source) <= limits.coalesce_gap)
    ):
        yield source, tensor
        return
    inner = source.row(0)
    row_bytes = max(source.strides[0] * item, inner.num_bytes)
    can_join = inner.num_bytes <= limits.most_bytes and _largest_gap(source) <= limits.coalesce_gap
    num_rows = max(1, limits.most_bytes // row_bytes) if can_join else 1
    for lo in range(0, source.shape[0], num_rows):
        hi = min(source.shape[0], lo + num_rows)
        if hi - lo == 1:
            yield from _split(source.row(lo), tensor[lo], limits)
        else:
            yield source.rows(lo, hi), tensor[lo:hi]


def _largest_gap(source: _StridedRun) -> int:
    """The largest number of neighbouring bytes inside a source that belong to none of its elements."""
    gap, inside = 0, 1
    for size, stride in zip(reversed(source.shape), reversed(source.strides), strict=True):
        if size > 1:
            gap = max(gap, stride - inside)
            inside = max(inside, (size - 1) * stride + inside)
    return gap * source.dtype.itemsize


def _span(label: str, key: str, source: _StridedRun, view: torch.Tensor) -> ByteSpan:
    is_same = view.dtype == source.dtype and view.device.type == "cpu"
    if is_same and source.is_dense and view.is_contiguous():
        return ByteSpan(label, key, source.start, source.num_bytes, bytes_of(view), None)

    def place(data: memoryview) -> None:
        _copy(view, as_tensor(data, source.dtype, source.shape, source.strides))

    return ByteSpan(label, key, source.start, source.num_bytes, None, place)


def as_tensor(data: memoryview, dtype: torch.dtype, shape: Shape, strides: Shape) -> torch.Tensor:
    """Bytes as a tensor over the same memory; over a copy where they are not aligned as the dtype needs, or read-only."""
    array = np.frombuffer(data, np.uint8)
    if array.ctypes.data % max(dtype.itemsize, 1):
        array = array.copy()
    elif not array.flags.writeable:
        array = np.frombuffer(bytearray(data), np.uint8)
    return torch.from_numpy(array).view(dtype).as_strided(shape, strides)


def _copy(view: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, cast and transfer. A GPU gets the bytes as they are and casts them; that copy may still be running on return."""
    if view.device.type != "cpu" and (view.dtype != source.dtype or not source.is_contiguous()):
        source = source.contiguous().to(view.device, non_blocking=True)
    view.copy_(source, non_blocking=True)


def _unpack(
    dtype: torch.dtype, shard: TensorShard, offsets: Shape, sizes: Shape, view: torch.Tensor
) -> Callable[[memoryview], None]:
    """The `place` of a span that is an archive: it copies a box of the tensor in it to `view`."""

    def place(data: memoryview) -> None:
        stored = (shard.layouts or Layouts()).read(data)
        _check_archived(stored, dtype, shard)
        item = dtype.itemsize
        start = stored.start + sum(o * s for o, s in zip(offsets, stored.strides, strict=True)) * item
        spanned = 1 + sum((n - 1) * stride for n, stride in zip(sizes, stored.strides, strict=True))
        _copy(view, as_tensor(data[start : start + spanned * item], dtype, sizes, stored.strides))

    return place


def _check_archived(stored: ArchivedTensor, dtype: torch.dtype, shard: TensorShard) -> None:
    """Raise FormatError unless an archive holds what `.metadata` says."""
    if stored.dtype != dtype or stored.shape != shard.sizes:
        raise FormatError(
            f"it holds {stored.dtype} {list(stored.shape)}, and .metadata says {dtype} {list(shard.sizes)}: the two do not "
            "belong together"
        )


def unpacked(shard: TensorShard, dtype: torch.dtype, stored: ArchivedTensor) -> TensorShard:
    """The shard as plain bytes, once the layout of its archive is known. Raises FormatError."""
    _check_archived(stored, dtype, shard)
    spanned = 1 + sum((n - 1) * stride for n, stride in zip(shard.sizes, stored.strides, strict=True))
    start = shard.start + stored.start
    return replace(shard, start=start, length=spanned * dtype.itemsize, strides=stored.strides, is_archive=False)
