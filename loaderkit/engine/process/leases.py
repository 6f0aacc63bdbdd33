"""Which batches the trainer's process still references, in memory that another process fills."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any
from weakref import ref

import numpy as np
import torch

from loaderkit._internal.dtypes import Bytes
from loaderkit.engine.process.shared_memory import Block, SharedArena

logger = logging.getLogger("loaderkit")


class Lease:
    """Keeps a slab out of the pool while it lives: the base of every array made over the slab.

    What its end calls is a slot, filled with a function written in C. A `__del__` in Python would be a place for Ctrl-C to
    arrive in: it would be printed, ignored, and the slab lost.
    """

    __slots__ = ("__array_interface__", "__del__", "__weakref__")

    def __init__(self, token: Any, returned: SimpleQueue[Any], interface: dict[str, Any]) -> None:
        """`token` goes to `returned` in the end; it, or `returned`, keeps the memory. `interface` is the `__array_interface__`
        of what is to lie over it, made once, since that takes NumPy longer than a lease; another may be put in its place."""
        # SimpleQueue.put is reentrant: this may run inside any allocation of any thread, even inside another put.
        self.__del__ = partial(returned.put, token)
        self.__array_interface__ = interface


class LeaseTable:
    """Lends the arena's memory, batch by batch, and notes when a batch is no longer referenced.

    A batch may outlive the process that made it and the loader: from `close` on its memory goes back to the system the
    moment it ends.
    """

    def __init__(self, arena: SharedArena, *, pinned_for: torch.device | None = None) -> None:
        """`pinned_for`: the CUDA device that batches are copied to."""
        self._arena = arena
        self._interface = arena.memory.__array_interface__
        self._pins = None if pinned_for is None else _Pins(arena, pinned_for)
        self._ended: SimpleQueue[int] = SimpleQueue()
        self._live: dict[int, tuple[Block, ...]] = {}
        self._leases: dict[int, ref[Lease]] = {}
        self._pid = os.getpid()

    def lend(self, number: int, blocks: tuple[Block, ...]) -> Bytes:
        """The arena's memory for one batch, which lies in `blocks`; whatever is made over it keeps the batch alive."""
        self._live[number] = blocks
        if self._pins is not None:
            self._pins.add(blocks)
        lease = Lease(number, self._ended, self._interface)
        self._leases[number] = ref(lease)
        lent: Bytes = np.asarray(lease)
        return lent

    def _end(self, number: int) -> None:
        """A lease has ended after `close`; called inside a destructor, in any thread, also in a fork's child."""
        if os.getpid() == self._pid:
            ended = self._live.pop(number, ())
            others = {block for blocks in list(self._live.values()) for block in blocks}
            for block in ended:
                if block not in others:
                    self._arena.discard(block.start, block.start + block.size)

    def ended(self) -> list[int]:
        """The batches that have ended since the last call."""
        found = []
        while True:
            try:
                found.append(self._ended.get_nowait())
            except Empty:
                break
        for number in found:
            self._live.pop(number, None)
            self._leases.pop(number, None)
        return found

    def close(self) -> None:
        """The other process is gone: keep the memory of batches that are referenced, and no other."""
        for number, found in list(self._leases.items()):
            if (lease := found()) is not None:
                lease.__del__ = partial(self._end, number)  # the queue has no reader any more
        self._leases.clear()
        self.ended()
        if self._pins is not None:
            self._pins.clear()
        self._arena.discard_all_but([block for blocks in list(self._live.values()) for block in blocks])


class _Pins:
    """Blocks registered with CUDA, so that copies from them run beside the training. Registered once, when first seen."""

    def __init__(self, arena: SharedArena, device: torch.device) -> None:
        self._device = device
        self._address = arena.memory.__array_interface__["data"][0]
        self._pinned: set[Block] = set()
        self._is_refused = False
        self._cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def add(self, blocks: tuple[Block, ...]) -> None:
        for block in blocks:
            if self._is_refused or block in self._pinned:
                continue
            with torch.cuda.device(self._device):  # in a thread that receives batches it would be another one
                code = int(self._cudart.cudaHostRegister(self._address + block.start, block.size, 0))
            if code == 0:
                self._pinned.add(block)
                continue
            self._is_refused = True  # of locked memory there is no more: it would not be granted for the next one
            logger.warning(
                "shared memory cannot be pinned (CUDA error %d): copies to the GPU are slower, and hold up a worker",
                code,
            )
            with suppress(
                RuntimeError
            ):  # CUDA tells of an error again at this thread's next kernel, whoever starts that
                torch.ones(1, device=self._device)

    def clear(self) -> None:
        with torch.cuda.device(self._device):
            for block in self._pinned:
                self._cudart.cudaHostUnregister(self._address + block.start)
        self._pinned.clear()
