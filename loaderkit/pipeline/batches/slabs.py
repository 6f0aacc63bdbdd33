"""The memory of batches: slabs, taken when a batch is opened and returned to the pool when no object refers to them.

A slab's tensors share no storage with one another, but every storage keeps one `Lease` alive. The lease dies with the last
tensor, view, NumPy array or DLPack export made from any of them, and its death returns the slab. So a slab is reused
only when no reference to its memory is left, whether it was delivered, dropped after a `break`, or never finished.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch

from loaderkit._internal.cuda.pinned import PinnedMemory
from loaderkit._internal.dtypes import Bytes, num_bytes_of, type_in_numpy
from loaderkit._internal.units import say_bytes
from loaderkit.engine.process.leases import Lease
from loaderkit.samples.chunk import FieldSpec
from loaderkit.samples.slots import Slots
from loaderkit.sampling.shard import WHOLE, Shard

_ALIGNMENT = 64
logger = logging.getLogger("loaderkit")


@dataclass(frozen=True)
class SlabLayout:
    """Where each field of a batch of `num_slots` samples lies in a slab."""

    num_slots: int
    fields: tuple[tuple[str, int, int, tuple[int, ...], str], ...]  # name, start, end, shape, dtype
    num_bytes: int

    @classmethod
    def of(cls, specs: Mapping[str, FieldSpec], num_slots: int) -> SlabLayout:
        fields = []
        offset = 0
        for name, spec in specs.items():
            if spec.kind == "slab":
                assert spec.dtype is not None
                shape = (num_slots, *spec.shape)
                end = offset + prod(shape) * num_bytes_of(spec.dtype)
                fields.append((name, offset, end, shape, spec.dtype))
                offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        return cls(num_slots, tuple(fields), offset)


class Slab(NamedTuple):
    """The memory of one batch, and its fields: (name, `__array_interface__`, shape, dtype). For a dtype that NumPy
    lacks, the interface describes bytes."""

    memory: Bytes
    fields: list[tuple[str, dict[str, Any], tuple[int, ...], str]]


class SlabPool:
    """Slabs of one layout. `take` is called under the engine's lock; leases may end anywhere."""

    def __init__(
        self,
        layout: SlabLayout,
        *,
        num_kept: int,
        pinned_for: torch.device | None = None,
        allocate: Callable[[int], Bytes] | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        self.layout = layout
        self.num_allocated = 0
        self.num_kept = num_kept
        self._pinned = None if pinned_for is None else PinnedMemory(pinned_for)
        self._allocate_memory = allocate
        self._free: SimpleQueue[Slab] = SimpleQueue()
        self._shard = shard
        self._is_warned = shard.number > 0  # one process warns for all

    @property
    def num_live(self) -> int:
        """Slabs in use: being filled, ready, or referenced by the user."""
        return self.num_allocated - self._free.qsize()

    def take(self) -> dict[str, Slots]:
        """The fields of a free slab, [num_slots, ...] each, uninitialised."""
        if not self.layout.fields:
            return {}
        while self._free.qsize() > self.num_kept:
            self._free.get()
            self.num_allocated -= 1
        try:
            slab = self._free.get_nowait()
        except Empty:
            slab = self._allocate()
        lease = Lease(slab, self._free, slab.fields[0][1])
        fields = {}
        for name, interface, shape, dtype in slab.fields:
            lease.__array_interface__ = interface
            fields[name] = Slots(np.asarray(lease), shape, dtype)
        return fields

    def _allocate(self) -> Slab:
        if self.num_allocated >= 2 * self.num_kept + 8 and not self._is_warned:
            self._is_warned = True
            logger.warning(
                "%d delivered batches are still referenced, each keeping %s alive: copy what you keep, or drop the batches",
                self._shard.of * (self.num_live + 1 - self.num_kept),
                say_bytes(self.layout.num_bytes),
            )
        memory = self._new_memory(self.layout.num_bytes)
        self.num_allocated += 1
        slab = Slab(memory, [])
        for name, start, end, shape, dtype in self.layout.fields:
            span = memory[start:end]
            known = type_in_numpy(dtype)
            base = span if known is None else span.view(known).reshape(shape)
            slab.fields.append((name, base.__array_interface__, shape, dtype))
        return slab

    def _new_memory(self, size: int) -> Bytes:
        if self._allocate_memory is not None:
            return self._allocate_memory(size)
        pinned = None if self._pinned is None else self._pinned.take(size)
        if pinned is not None:
            return pinned
        memory = np.empty(size + _ALIGNMENT, np.uint8)
        offset = -memory.ctypes.data % _ALIGNMENT
        return memory[offset : offset + size]
