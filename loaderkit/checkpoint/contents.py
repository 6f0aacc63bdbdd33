"""What every format is reduced to: tensors as boxes of bytes in objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from loaderkit.checkpoint.formats.dcp import Layouts
from loaderkit.connectors.base import ByteRange, Connector, ObjectInfo

SMALL_BLOB = 256 * 2**10  # an archive of so many bytes is read whole, at once


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A box of a tensor (all of it, mostly) and its bytes: `length` of them from `start` on, in the object `key`.

    They are laid out by `strides` (in elements), the box's first element first. With `is_blob` they are an archive of
    torch.save that holds the box, and the strides are known when it is read.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    key: str
    start: int
    length: int
    strides: tuple[int, ...] = ()
    is_blob: bool = False
    layouts: Layouts | None = field(default=None, compare=False, repr=False)  # of archives; one for a checkpoint


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a checkpoint. `storage` is the record it is a view of, (key, start, bytes), where tensors may share one."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[TensorShard, ...]
    storage: tuple[str, int, int] | None = None

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole: every object it needs is there and long enough.

    `values` are what it holds besides tensors; `pickled` are those that still have to be read, each an archive of its own.
    `read` are the keys of the objects that were read to learn this.
    """

    name: str
    format: str
    connector: Connector
    prefix: str
    objects: dict[str, ObjectInfo]
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    pickled: dict[str, ByteRange] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # name -> path in the nested state it came from
    empty: list[tuple[Any, ...]] = field(default_factory=list)  # paths of empty tables

    def describe(self, key: str) -> str:
        """An object's full name."""
        return self.connector.describe(key)


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a C-contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
