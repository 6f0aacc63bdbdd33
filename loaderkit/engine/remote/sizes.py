"""The sizes that all processes of an engine have together, and the part of them that each process is told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from loaderkit.engine.remote.contracts import WorkerSpec
from loaderkit.engine.remote.remote_process import RemoteProcess
from loaderkit.errors import ConfigError
from loaderkit.sampling.shard import Shard

logger = logging.getLogger("loaderkit")


class SharedSizes:
    """Workers, batches ahead and memory. `lock` is held while they change, and while a process that gets them is started."""

    def __init__(self, spec: WorkerSpec, num_processes: int) -> None:
        self._spec = spec
        self.lock = threading.RLock()
        self.num_sharing = num_processes  # with a border ahead, the larger of the numbers before and behind it
        self._workers = {row.name: num_processes * row.workers for row in spec.rows}
        self._depth = (spec.num_batches, spec.memory_bytes)
        self._deepest = spec.num_batches  # since the last seek

    def resize(self, processes: Sequence[RemoteProcess], stage: str, num_workers: int) -> None:
        """Set the workers of a stage. Raises ConfigError for a stage they do not run, and where the system has no more threads;
        nothing is changed then."""
        pool = next((pool for pool in self._spec.pools if stage in pool), None)
        if pool is None:
            names = [row.name for row in self._spec.rows]
            why = "runs in the trainer's process, by one thread" if self._spec.trainer_stages else "does not exist"
            raise ConfigError(f"stage {stage!r} {why} and cannot be resized; {', '.join(names)} can")
        with self.lock:
            self._order(processes, "resize", (stage, num_workers), (stage, self._workers[stage]))
            self._workers.update(dict.fromkeys(pool, num_workers))

    def set_depth(self, processes: Sequence[RemoteProcess], num_batches: int | None, memory_bytes: int | None) -> None:
        """Set how far they read ahead. Raises ConfigError if the memory holds not even one batch."""
        with self.lock:
            self._order(processes, "set_depth", (num_batches, memory_bytes), self._depth)
            self._depth = (num_batches or self._depth[0], memory_bytes or self._depth[1])
            self._deepest = max(self._deepest, self._depth[0])

    def _order(
        self, processes: Sequence[RemoteProcess], name: str, sizes: tuple[Any, ...], before: tuple[Any, ...]
    ) -> None:
        """Send an order to all processes. If one refuses it, undo it in the others and raise that error."""
        for number, process in enumerate(processes):
            refused = process.order(name, *self._sizes_of(process, name, sizes))
            if refused is not None:
                for other in processes[:number]:
                    other.order(name, *self._sizes_of(other, name, before))
                raise refused

    def _sizes_of(self, process: RemoteProcess, name: str, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same sizes, but only one batch for a process that is cautious."""
        if name != "set_depth" or not process.num_cautious or sizes[0] is None:
            return sizes
        return (self.num_sharing, *sizes[1:])

    def forget_depth(self) -> None:
        """Note that nothing is read ahead, after a seek."""
        self._deepest = self._depth[0]

    def most_ahead(self, processes: Sequence[RemoteProcess]) -> int:
        """How many batches any of them may have begun that are not taken."""
        return max(process.num_finished + process.shard.num_batches(self._deepest) for process in processes)

    def num_of_each(self, num_processes: int) -> int:
        """How many batches each of `num_processes` may have ahead, at least."""
        return Shard(num_processes - 1, num_processes).num_batches(self._depth[0])

    def be_cautious(self, process: RemoteProcess, num_finished: int) -> None:
        """Let a process that replaces a dead one make one batch at a time, until all batches are taken that may have
        been in work when that one died."""
        process.num_cautious = num_finished + Shard(process.number, self.num_sharing).num_batches(self._depth[0])

    def count_taken(self, process: RemoteProcess) -> None:
        """Let a process read ahead once it has made all batches that may have ended the process before it."""
        if not process.num_cautious:
            return
        process.num_cautious -= 1
        if not process.num_cautious:
            with self.lock:
                refused = process.order("set_depth", *self._depth)
            if refused is not None:
                logger.warning("%s reads no more than a batch ahead: %s", process.name, refused)

    def order_for(self, process: RemoteProcess) -> tuple[Any, ...]:
        """The command that tells a process its part of the present sizes."""
        num_batches = self.num_sharing if process.num_cautious else self._depth[0]
        workers = {pool[0]: self._workers[pool[0]] for pool in self._spec.pools}
        return ("share", Shard(process.number, self.num_sharing), num_batches, self._depth[1], workers)

    def share_out(self, processes: Sequence[RemoteProcess], num_sharing: int) -> None:
        """Divide the sizes among another number of processes."""
        with self.lock:
            if num_sharing != self.num_sharing:
                for name in self._spec.scaled_stages:
                    self._workers[name] = -(-self._workers[name] // self.num_sharing) * num_sharing
                self.num_sharing = num_sharing
                for process in processes:
                    process.tell(*self.order_for(process))
