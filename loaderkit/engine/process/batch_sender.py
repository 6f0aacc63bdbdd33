"""Sends the batches of a worker process's engine to the trainer, over shared memory.

A finished batch is sent at once. Its memory is reused when the trainer has no reference to it any more.
"""

from __future__ import annotations

import io
import pickle
import socket
from collections.abc import Callable
from typing import Any

from loaderkit._internal import torch_threads
from loaderkit._internal.config import keys
from loaderkit.engine.process import messages
from loaderkit.engine.process.shared_memory import Allocator, Block, SharedArena
from loaderkit.engine.remote.batch_server import BatchServer, unsendable, without_result
from loaderkit.engine.threaded import ThreadEngine
from loaderkit.engine.work import WorkItem
from loaderkit.errors import ConfigError
from loaderkit.sampling.shard import Shard

MakeEngine = Callable[[Allocator, Shard], ThreadEngine]


class BatchSender(BatchServer):
    """Sends batches from the thread that calls `run`.

    `spec` is (a function that makes the engine from an allocator and a shard, the shard, the trainer's number of torch
    threads). The arena is free from its byte `begin` on; batches start at (`epoch`, `position`), after `generation`
    seeks.
    """

    def __init__(
        self,
        outbox: socket.socket,
        descriptor: int,
        spec: messages.PackedValue,
        *,
        begin: int,
        keep_pages: bool,
        epoch: int,
        position: int,
        generation: int,
    ) -> None:
        self._outbox = outbox
        self._arena = SharedArena(io.FileIO(descriptor, "r+"))
        self._allocator = Allocator(self._arena, begin=begin, keep_pages=keep_pages)
        make_engine, shard, num_torch_threads = _open_spec(spec, self._arena)
        torch_threads.set_num_threads(num_torch_threads)
        engine = make_engine(self._allocator, shard)
        super().__init__(engine, shard, generation=generation)
        self._held: dict[int, tuple[Any, list[Block]]] = {}  # the memory of batches that the trainer has not released
        self._number = 0
        engine.seek(epoch, position)

    def run(self) -> None:
        """Send every batch when it is complete, until the engine is closed. Raises the error that stopped the workers."""
        self.start()
        while (finished := self.finished()) is not None:
            self._send(*finished)
            del finished

    def _send(self, generation: int, work_item: WorkItem) -> None:
        number = self._number = self._number + 1
        record = self.delivered(work_item)
        try:
            packed, borrowed = messages.post(record.sealed(), self._arena, self._allocator)
        except Exception as error:
            record = without_result(record, unsendable(work_item, error))
            packed, borrowed = messages.post(record.sealed(), self._arena, self._allocator)
        self._held[number] = (record.result, borrowed)
        self._outbox.send(pickle.dumps(messages.BatchMessage(generation, number, packed), 5))

    # ------------------------------------------------------------------------------------------- commands of the trainer

    def taken(self, released: list[int]) -> None:
        """Take a batch that the trainer has taken, or dropped after a seek, out of the budget, and free the memory of the
        batches `released`."""
        self.released(released)
        self.leave()

    def released(self, numbers: list[int]) -> None:
        """Free the memory of batches that the trainer no longer references."""
        for number in numbers:
            _, borrowed = self._held.pop(number)
            for block in borrowed:
                self._allocator.spare(block)


def _open_spec(spec: messages.PackedValue, arena: SharedArena) -> tuple[MakeEngine, Shard, int]:
    try:
        opened: tuple[MakeEngine, Shard, int] = spec.open(arena.memory)
    except Exception as error:
        raise ConfigError(
            f"{keys.EXECUTOR}: process: what the pipeline was given cannot be made again in the process that loads "
            f"({type(error).__name__}: {error}): put functions and classes into a module that can be imported, or use "
            "executor: thread"
        ) from error
    if isinstance(spec.body, Block):
        # Memory beside it may hold a data set's tensors.
        arena.discard(spec.body.start, spec.body.start + spec.body.size)
    return opened
