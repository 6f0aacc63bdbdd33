"""The engine of an actor: finished batches as values for Ray's object store."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from loaderkit._internal import torch_threads
from loaderkit._internal.config import keys
from loaderkit._internal.packing import pack, unpack
from loaderkit.engine.ray.messages import ActorSpec, PackedBatch, PackedEngine
from loaderkit.engine.remote.batch_server import BatchServer, unsendable, without_result
from loaderkit.engine.threaded import ThreadEngine
from loaderkit.errors import ConfigError
from loaderkit.sampling.shard import Shard

MakeEngine = Callable[[None, Shard], ThreadEngine]


class ActorServer(BatchServer):
    """Gives batches to the thread that calls `next`; they leave the budget when the trainer has taken them."""

    def __init__(self, packed: PackedEngine, spec: ActorSpec) -> None:
        make_engine, shard = _opened(packed), Shard(*spec.shard)
        torch_threads.set_num_threads(spec.num_torch_threads)
        engine = make_engine(None, shard)
        super().__init__(engine, shard, generation=spec.generation)
        engine.seek(*spec.next_position)
        self._seeks = threading.Condition()
        self._is_closed = False
        self._failure: Exception | None = None

    def next(self, generation: int) -> PackedBatch | None:
        """The next batch after `generation` seeks, once it is finished; None if there were more, or at the end. Raises the
        error that stopped the workers."""
        with self._seeks:  # the call may have overtaken the command to seek
            self._seeks.wait_for(lambda: self._is_closed or self._failure or self.generation >= generation)
            if self._failure is not None:
                raise self._failure
        finished = self.finished(generation)
        if finished is None:
            return None
        found, work_item = finished
        record = self.delivered(work_item)
        try:
            stream, buffers = pack(record.sealed())
        except Exception as error:
            stream, buffers = pack(without_result(record, unsendable(work_item, error)).sealed())
        return PackedBatch(found, stream, [np.frombuffer(buffer, np.uint8) for buffer in buffers])

    def fail(self, error: Exception) -> None:
        """Raise this from `next` on, as a command has failed: a call that waits for a seek would wait for ever."""
        with self._seeks:
            self._failure = error
            self._seeks.notify_all()

    def taken(self, generation: int, count: int) -> None:
        """Take batches of after `generation` seeks, which the trainer has taken, out of the budget; from any thread."""
        self.leave(count, generation=generation)

    def seek(self, generation: int, epoch: int, position: int, shard: Shard) -> int:
        """Continue at another position. The trainer drops all batches of before."""
        return self._drop(super().seek(generation, epoch, position, shard))

    def begin(self, generation: int, epoch: int, position: int, shard: Shard) -> int:
        """Begin after `hold`. The trainer drops all batches of before."""
        return self._drop(super().begin(generation, epoch, position, shard))

    def _drop(self, num_underway: int) -> int:
        self.leave(num_underway)
        with self._seeks:
            self._seeks.notify_all()
        return 0

    def close(self, join_s: float) -> None:
        """Stop the workers."""
        with self._seeks:
            self._is_closed = True
            self._seeks.notify_all()
        super().close(join_s)


def _opened(packed: PackedEngine) -> MakeEngine:
    try:
        # Copies: a data set may write to its arrays, and all actors of the node share the store's memory.
        buffers = [
            buffer if is_constant else buffer.copy()
            for buffer, is_constant in zip(packed.buffers, packed.is_constant, strict=True)
        ]
        opened: MakeEngine = unpack(packed.stream.data, buffers)
    except Exception as error:
        raise ConfigError(
            f"{keys.EXECUTOR}: ray: what the pipeline was given cannot be made again in an actor "
            f"({type(error).__name__}: {error}): put functions and classes into a module that can be imported on all nodes, or "
            "use executor: thread"
        ) from error
    return opened
