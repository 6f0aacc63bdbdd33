"""From a tensor to be filled to the byte ranges that fill it.

A `ByteSpan` is one range of an object and what becomes of its bytes: they are read straight into the tensor's own memory where
that is laid out as they are (`target`), else to staging memory, from where `place` copies, casts or transfers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from loaderkit.checkpoint.contents import TensorEntry, TensorShard, strides_of
from loaderkit.checkpoint.formats import dcp
from loaderkit.errors import FormatError

Shape = tuple[int, ...]


@dataclass(slots=True)
class ByteSpan:
    """Bytes [start, start + length) of an object, for the tensor `label`. Exactly one of `target` and `place` is used to take
    them; a small piece with a `target` may be read to staging memory with its neighbours, and copied."""

    label: str
    key: str
    start: int
    length: int
    target: memoryview | None
    place: Callable[[memoryview], None] | None


class ReadLimits(NamedTuple):
    """`most_bytes` of a range; `coalesce_gap`: what may be read without need rather than begin another range; `least_direct`: a
    piece with fewer bytes is read together with its neighbours; `edge_bytes`: what is read besides a range, for checksums."""

    most_bytes: int
    coalesce_gap: int
    least_direct: int
    edge_bytes: int = 0


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's own memory, to be written to."""
    # Where a dimension has size 1 its stride says nothing, and `view` to another type would mind it all the same.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    found: memoryview = flat.numpy().data
    return found


def lay(label: str, stored: TensorEntry, tensor: torch.Tensor, limits: ReadLimits) -> list[ByteSpan]:
    """The pieces that fill a whole tensor of the shape `stored` has; dtype, device and strides may be others."""
    if len(stored.parts) == 1 and _is_like(tensor, stored):  # most tensors: what follows takes five times as long
        part, data = stored.parts[0], bytes_of(tensor)
        cuts = _cuts(part.start, stored.num_bytes, stored.dtype.itemsize, limits.most_bytes)
        return [ByteSpan(label, part.key, part.start + lo, hi - lo, data[lo:hi], None) for lo, hi in cuts]
    found: list[ByteSpan] = []
    for part in stored.parts:
        box = tensor
        for dim, (offset, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
            if size != stored.shape[dim]:
                box = box.narrow(dim, offset, size)
        found += lay_box(label, stored.dtype, part, box, limits, offsets=(0,) * len(part.sizes), sizes=part.sizes)
    return found


def _cuts(start: int, num_bytes: int, item: int, most_bytes: int) -> list[tuple[int, int]]:
    """[lo, hi) of the parts in which so many bytes from `start` of an object on are read: at once; or where they are too
    many, up to multiples in the object, where blocks with checksums end, too, or as near to that as whole elements allow."""
    if num_bytes <= most_bytes:
        return [(0, num_bytes)] if num_bytes else []
    step = max(item, most_bytes // item * item)
    first = (most_bytes - start % most_bytes) // item * item or step
    return list(pairwise([0, *range(first, num_bytes, step), num_bytes]))


def _is_like(tensor: torch.Tensor, stored: TensorEntry) -> bool:
    """Whether a tensor's bytes are those of a checkpoint, one by one."""
    part = stored.parts[0]
    is_dense = not part.is_blob and part.strides == strides_of(stored.shape)
    return is_dense and tensor.dtype == stored.dtype and tensor.device.type == "cpu" and tensor.is_contiguous()


def lay_box(
    label: str,
    dtype: torch.dtype,
    part: TensorShard,
    tensor: torch.Tensor,
    limits: ReadLimits,
    *,
    offsets: Shape,
    sizes: Shape,
) -> list[ByteSpan]:
    """The pieces that fill `tensor` with the box at `offsets` of `sizes` inside a part."""
    if 0 in sizes:
        return []
    if part.is_blob:
        place = _unpack(dtype, part, offsets, sizes, tensor)
        return [ByteSpan(label, part.key, part.start, part.length, None, place)]
    start = part.start + sum(o * s for o, s in zip(offsets, part.strides, strict=True)) * dtype.itemsize
    # Size 1: the stride says nothing. Source dimensions in the order of their strides: a transposed tensor is contiguous.
    strides = tuple(0 if size == 1 else stride for size, stride in zip(sizes, part.strides, strict=True))
    order = sorted(range(len(sizes)), key=lambda dim: -strides[dim])
    source = _Source(dtype, start, tuple(sizes[d] for d in order), tuple(strides[d] for d in order))
    leaves = _split(source, tensor.permute(order), limits)
    return [_piece(label, part.key, leaf, view) for leaf, view in leaves]


class _Source(NamedTuple):
    """A strided run of elements in an object, from byte `start` on; strides in elements, descending."""

    dtype: torch.dtype
    start: int
    shape: Shape
    strides: Shape

    @property
    def num_bytes(self) -> int:
        """From the first element to behind the last."""
        spanned = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return spanned * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        whole = strides_of(self.shape)
        return all(n == 1 or a == b for n, a, b in zip(self.shape, self.strides, whole, strict=True))

    def rows(self, lo: int, hi: int) -> _Source:
        start = self.start + lo * self.strides[0] * self.dtype.itemsize
        return self._replace(start=start, shape=(hi - lo, *self.shape[1:]))

    def row(self, number: int) -> _Source:
        start = self.start + number * self.strides[0] * self.dtype.itemsize
        return _Source(self.dtype, start, self.shape[1:], self.strides[1:])


def _split(source: _Source, tensor: torch.Tensor, limits: ReadLimits) -> Iterator[tuple[_Source, torch.Tensor]]:
    """Cut until no piece is longer than allowed, nor holds a gap larger than allowed."""
    is_dense = source.is_dense
    item = source.dtype.itemsize
    if is_dense and tensor.is_contiguous():
        flat, num_bytes = tensor.view(-1), item * int(np.prod(source.shape, dtype=np.int64))
        for lo, hi in _cuts(source.start, num_bytes, item, limits.most_bytes):
            yield _Source(source.dtype, source.start + lo, ((hi - lo) // item,), (1,)), flat[lo // item : hi // item]
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


def _largest_gap(source: _Source) -> int:
    """The longest run of bytes inside a source that belong to none of its elements."""
    gap, inside = 0, 1
    for size, stride in zip(reversed(source.shape), reversed(source.strides), strict=True):
        if size > 1:
            gap = max(gap, stride - inside)
            inside = max(inside, (size - 1) * stride + inside)
    return gap * source.dtype.itemsize


def _piece(label: str, key: str, source: _Source, view: torch.Tensor) -> ByteSpan:
    is_same = view.dtype == source.dtype and view.device.type == "cpu"
    if is_same and source.is_dense and view.is_contiguous():
        return ByteSpan(label, key, source.start, source.num_bytes, bytes_of(view), None)

    def place(data: memoryview) -> None:
        put(view, as_tensor(data, source.dtype, source.shape, source.strides))

    return ByteSpan(label, key, source.start, source.num_bytes, None, place)


def as_tensor(data: memoryview, dtype: torch.dtype, shape: Shape, strides: Shape) -> torch.Tensor:
    """Bytes as a tensor over the same memory; over a copy where they do not lie as the type needs."""
    array = np.frombuffer(data, np.uint8)
    if array.ctypes.data % max(dtype.itemsize, 1):
        array = array.copy()
    elif not array.flags.writeable:
        array = np.frombuffer(bytearray(data), np.uint8)
    return torch.from_numpy(array).view(dtype).as_strided(shape, strides)


def put(view: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, cast and transfer. To a GPU the bytes go as they are, and are cast there; the copy may still be under way."""
    if view.device.type != "cpu" and (view.dtype != source.dtype or not source.is_contiguous()):
        source = source.contiguous().to(view.device, non_blocking=True)
    view.copy_(source, non_blocking=True)


def _unpack(
    dtype: torch.dtype, part: TensorShard, offsets: Shape, sizes: Shape, view: torch.Tensor
) -> Callable[[memoryview], None]:
    """What takes the archive of a part and puts the box in it into `view`."""

    def place(data: memoryview) -> None:
        blob = (part.layouts or dcp.Layouts()).blob(data)
        check_blob(blob, dtype, part)
        item = dtype.itemsize
        start = blob.start + sum(o * s for o, s in zip(offsets, blob.strides, strict=True)) * item
        spanned = 1 + sum((n - 1) * stride for n, stride in zip(sizes, blob.strides, strict=True))
        put(view, as_tensor(data[start : start + spanned * item], dtype, sizes, blob.strides))

    return place


def check_blob(blob: dcp.Blob, dtype: torch.dtype, part: TensorShard) -> None:
    """Raise FormatError unless an archive holds what `.metadata` says."""
    if blob.dtype != dtype or blob.shape != part.sizes:
        raise FormatError(
            f"it holds {blob.dtype} {list(blob.shape)}, and .metadata says {dtype} {list(part.sizes)}: the two do not "
            "belong together"
        )


def unpacked(part: TensorShard, dtype: torch.dtype, blob: dcp.Blob) -> TensorShard:
    """The part as plain bytes, once the place and layout of its elements in the archive are known."""
    check_blob(blob, dtype, part)
    spanned = 1 + sum((n - 1) * stride for n, stride in zip(part.sizes, blob.strides, strict=True))
    start = part.start + blob.start
    return replace(part, start=start, length=spanned * dtype.itemsize, strides=blob.strides, is_blob=False)
