"""The contents of a checkpoint, the same for every format: tensors as shards, each a box of elements and its bytes; and the
checksums of its objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from loaderkit.checkpoint.formats.shard_archive import Layouts
from loaderkit.checkpoint.structure import Containers
from loaderkit.connectors.base import ByteRange, Connector, ObjectInfo

SMALL_ARCHIVE = 256 * 2**10  # bytes; an archive up to this size is read whole, in one read
MAX_BLOCK_BYTES = 256 * 2**10
ShardId = tuple[str, tuple[int, ...]]  # the tensor's name, and the offsets of the shard in it


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A box of a tensor, usually the whole tensor, and the `length` bytes from `start` on of the object `key` that store it.

    `strides` (in elements) give the layout of these bytes, beginning with the first element of the box. With
    `is_archive` the bytes are an archive of torch.save that holds the box, and the strides are known only once it is
    read.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    key: str
    start: int
    length: int
    strides: tuple[int, ...] = ()
    is_archive: bool = False
    layouts: Layouts | None = field(default=None, compare=False, repr=False)  # of archives; one for a whole checkpoint


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a checkpoint. If it is a view, `storage` is the record that it is a view of, (key, start, bytes);
    several tensors may share one."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[TensorShard, ...]
    storage: tuple[str, int, int] | None = None

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is whole: every object that it needs is there and long enough.

    `values` are its plain values; those in `pickled` have not been read yet, and each is an archive of its own.
    `read` are the keys of the objects that were read to learn the contents.
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
    containers: Containers = field(default_factory=dict)  # of torch.save files, which tell them by themselves
    beside: list[str] = field(default_factory=list)  # files and folders with weights that are no part of it

    @property
    def tells_containers(self) -> bool:
        """True if the checkpoint itself records which containers it has, tuples included."""
        return self.format in ("torch", "deepspeed")

    def describe(self, key: str) -> str:
        """An object's full name."""
        return self.connector.describe(key)

    def shards_of(self, names: Iterable[str]) -> list[tuple[str, TensorShard]]:
        """The shards of these tensors, each with its tensor's name."""
        return [(name, shard) for name in names for shard in self.tensors[name].shards]

    def shards_by_id(self) -> dict[ShardId, TensorShard]:
        """All shards by tensor name and offsets."""
        return {(name, shard.offsets): shard for name, shard in self.shards_of(self.tensors)}

    def with_shards(self, shards: dict[ShardId, TensorShard]) -> Checkpoint:
        """The checkpoint with some of its shards replaced."""
        if not shards:
            return self
        tensors = dict(self.tensors)
        for name in dict.fromkeys(name for name, _ in shards):
            entry = tensors[name]
            changed = tuple(shards.get((name, shard.offsets), shard) for shard in entry.shards)
            tensors[name] = replace(entry, shards=changed)
        return replace(self, tensors=tensors)


class Checksums(NamedTuple):
    """xxh3_64 hashes, as hexadecimal digits, of an object's blocks of `block_bytes`; the last block may be shorter."""

    block_bytes: int
    num_bytes: int
    hashes: Sequence[str]

    def end_of(self, number: int) -> int:
        """The end of a block, in bytes."""
        return min((number + 1) * self.block_bytes, self.num_bytes)


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a C-contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
