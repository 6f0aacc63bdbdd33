"""Knows which batches in shared memory the trainer's process still references."""

from __future__ import annotations

import os
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any
from weakref import ref

import numpy as np

from loaderkit._internal.cuda.device import Device
from loaderkit._internal.cuda.pinned import RegisteredMemory
from loaderkit._internal.dtypes import Bytes
from loaderkit.engine.process.shared_memory import Block, SharedArena


class Lease:
    """Keeps a slab out of the pool while it lives: the base of every array made over the slab.

    Its `__del__` is a slot that holds a function written in C. In a `__del__` written in Python Ctrl-C could arrive: it would
    be printed and ignored, and the slab lost.
    """

    __slots__ = ("__array_interface__", "__del__", "__weakref__")

    def __init__(self, token: Any, returned: SimpleQueue[Any], interface: dict[str, Any]) -> None:
        """The lease puts `token` into `returned` when it ends; one of these two objects keeps the memory alive.
        `interface` is the `__array_interface__` of the slab, made once, since NumPy takes longer for it than a lease
        does; it may be replaced."""
        # SimpleQueue.put is reentrant: this may run inside any allocation of any thread, even inside another put.
        self.__del__ = partial(returned.put, token)
        self.__array_interface__ = interface


class LeaseTable:
    """Gives out the arena's memory, batch by batch, and notes when a batch is no longer referenced.

    A batch may outlive the process that made it and the loader: after `close` its memory is given back to the system as soon
    as it ends.
    """

    def __init__(self, arena: SharedArena, *, pinned_for: Device | None = None) -> None:
        """`pinned_for`: the CUDA device that batches are copied to."""
        self._arena = arena
        self._interface = arena.memory.__array_interface__
        self._pins = None if pinned_for is None else RegisteredMemory(arena.memory, pinned_for)
        self._ended: SimpleQueue[int] = SimpleQueue()
        self._live: dict[int, tuple[Block, ...]] = {}
        self._leases: dict[int, ref[Lease]] = {}
        self._pid = os.getpid()

    def lend(self, number: int, blocks: tuple[Block, ...]) -> Bytes:
        """The arena's memory for one batch, which lies in `blocks`; every array over it keeps the batch alive."""
        self._live[number] = blocks
        if self._pins is not None:
            for block in blocks:
                self._pins.add(block.start, block.size)
        lease = Lease(number, self._ended, self._interface)
        self._leases[number] = ref(lease)
        lent: Bytes = np.asarray(lease)
        return lent

    def _end(self, number: int) -> None:
        """A lease has ended after `close`; called inside a destructor, in any thread, also in a fork's child."""
        if os.getpid() == self._pid:
            ended = self._live.pop(number, ())
            others = [block for blocks in list(self._live.values()) for block in blocks]
            for block in ended:
                if not any(block.start < other.end and other.start < block.end for other in others):
                    self._arena.discard(block.start, block.end)

    def ended(self) -> list[int]:
        """The batches that have ended since the last call."""
        ended = []
        while True:
            try:
                ended.append(self._ended.get_nowait())
            except Empty:
                break
        for number in ended:
            self._live.pop(number, None)
            self._leases.pop(number, None)
        return ended

    def close(self) -> None:
        """Free all memory except the memory of batches that are still referenced; the other process has ended."""
        for number, lease_ref in list(self._leases.items()):
            if (lease := lease_ref()) is not None:
                lease.__del__ = partial(self._end, number)  # the queue has no reader any more
        self._leases.clear()
        self.ended()
        if self._pins is not None:
            self._pins.clear()
        self._arena.discard_all_but([block for blocks in list(self._live.values()) for block in blocks])
