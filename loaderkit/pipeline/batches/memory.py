"""The memory of the batches that are read ahead: how many fit, their slabs, and memory for large samples outside of the
slabs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from loaderkit._internal.units import say_bytes
from loaderkit.engine.process.shared_memory import Allocator, check_room
from loaderkit.errors import ConfigError
from loaderkit.pipeline.batches.sample_memory import SampleMemory
from loaderkit.pipeline.batches.slabs import SlabLayout, SlabPool
from loaderkit.samples.chunk import FieldSpec
from loaderkit.samples.slots import Slots, TakeBytes
from loaderkit.sampling.shard import WHOLE, Shard


class BatchMemory:
    """At most `num_batches` batches of `batch_size` samples, in at most `num_bytes`; with worker processes, in each."""

    def __init__(
        self,
        batch_size: int,
        num_batches: int,
        num_bytes: int,
        *,
        shard: Shard = WHOLE,
        pinned_for: torch.device | None = None,
        allocator: Allocator | None = None,
        mean_samples: int | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """`pinned_for`: the CUDA device that slabs are copied to. `allocator` gives shared memory. Batches of unequal numbers
        of samples, `batch_size` at most, have about `mean_samples`, and `num_tokens` at most."""
        self.batch_size = batch_size
        self.num_bytes = num_bytes
        self._num_batches = num_batches
        self._shard = shard
        self._pinned_for = pinned_for
        self._allocator = allocator
        self._mean_samples = mean_samples or batch_size
        self._num_tokens = num_tokens
        self._slabs: SlabPool | None = None
        self._samples: SampleMemory | None = None
        self.take_bytes: TakeBytes | None = None  # memory of a large sample; None if all have one shape
        self._batch_bytes = 0  # of the largest batch yet; at first by the first sample's size

    def prepare(self, specs: Mapping[str, FieldSpec]) -> None:
        """Set the fields of a batch. Raises ConfigError if the memory holds not even one batch."""
        layout = SlabLayout.of(specs, self.batch_size)
        self._batch_bytes = layout.num_bytes + sum(map(self._loose_bytes, specs.values()))
        self._check_bound(self.num_bytes)
        num_open, _ = self.room
        self._check_machine(num_open)
        self._slabs = SlabPool(
            layout,
            num_kept=num_open + 2,
            pinned_for=self._pinned_for,
            allocate=None if self._allocator is None else self._allocator.allocate,
            shard=self._shard,
        )
        if any(spec.kind in ("ragged", "pad") for spec in specs.values()):
            self._samples = SampleMemory(None if self._allocator is None else self._allocator.sample_arena)
            self.take_bytes = self._samples.take

    @property
    def room(self) -> tuple[int, bool]:
        """(batches that may be open, True if memory and not depth limits that)."""
        return self._room_for(self._num_batches, self.num_bytes)

    def note_batch(self, loose_bytes: int) -> None:
        """Note the bytes of a batch outside its slab: if none was as large before, fewer batches may be open. From any
        thread."""
        assert self._slabs is not None
        self._batch_bytes = max(self._batch_bytes, self._slabs.layout.num_bytes + loose_bytes)

    def close(self) -> None:
        """Free the memory that is not in use, and the rest when it is no longer used."""
        if self._samples is not None:
            self._samples.close()

    def take(self) -> dict[str, Slots]:
        """The fields of a free slab, [batch_size, ...] each, uninitialised."""
        assert self._slabs is not None
        return self._slabs.take()

    def share(self, shard: Shard) -> None:
        """Note how many processes there are from now on: each may take an equal part of the machine's memory."""
        self._shard = shard

    def set_depth(self, num_batches: int | None, num_bytes: int | None) -> None:
        """Set how far to read ahead; None leaves a value unchanged. Raises ConfigError if that memory holds not even
        one batch, or if the machine has less."""
        if num_bytes is not None:
            self._check_bound(num_bytes)
        num_batches, num_bytes = num_batches or self._num_batches, num_bytes or self.num_bytes
        room = self._room_for(num_batches, num_bytes)
        if self._slabs is not None:
            self._check_machine(room[0] - self.room[0])
            self._slabs.num_kept = room[0] + 2
        self._num_batches, self.num_bytes = num_batches, num_bytes

    def stats(self, num_open: int) -> dict[str, int]:
        """Bytes of one batch, of open batches, of memory in use and of all memory; for any thread."""
        slabs = self._slabs
        live, allocated = (0, 0) if self._samples is None else self._samples.num_bytes()
        slab_bytes = slabs.layout.num_bytes if slabs is not None else 0
        return {
            "slab_bytes": slab_bytes,
            "batch_bytes": self._batch_bytes,
            "open_bytes": num_open * self._batch_bytes,
            "live_bytes": live + (slabs.num_live * slab_bytes if slabs is not None else 0),
            "allocated_bytes": allocated + (slabs.num_allocated * slab_bytes if slabs is not None else 0),
        }

    def _loose_bytes(self, spec: FieldSpec) -> int:
        """The bytes that a field takes outside of slabs, if all batches are as the first sample is."""
        if self._num_tokens is None or not spec.shape:
            return spec.num_bytes * self._mean_samples
        return spec.num_bytes * self._num_tokens // max(spec.shape[0], 1)

    def _check_bound(self, num_bytes: int) -> None:
        if self._batch_bytes > num_bytes:
            num = self._shard.of
            why = "" if self._num_tokens is None else " samples, as many as the shortest ones could need,"
            each, times = (f" for each of {num} processes", f"{num} times ") if num > 1 else ("", "")
            raise ConfigError(
                f"prefetch.memory is {say_bytes(num_bytes)}{each}, but one batch of {self.batch_size}{why} takes "
                f"{say_bytes(self._batch_bytes)}: allow at least {times}that much, or make "
                f"stages.batch.{'size' if self._num_tokens is None else 'tokens'} smaller"
            )

    def _room_for(self, num_batches: int, num_bytes: int) -> tuple[int, bool]:
        # A later batch that is larger than the memory is made alone.
        allowed = min(num_batches, max(1, num_bytes // self._batch_bytes)) if self._batch_bytes else num_batches
        return allowed, allowed < num_batches

    def _check_machine(self, num_more: int) -> None:
        """Raise ConfigError if the machine has no memory for `num_more` batches in each worker process."""
        if num_more > 0 and self._allocator is not None:
            check_room(self._shard.of * num_more, self._batch_bytes)
