"""A worker process of this machine, from the trainer's side: its memory, its spec and its end.

A process that takes the place of a dead one has an arena, sockets and a keeper thread of its own.
"""

from __future__ import annotations

import errno
import logging
import pickle
import resource
from collections.abc import Sequence
from typing import Any

from loaderkit._internal import torch_threads
from loaderkit._internal.config import keys
from loaderkit._internal.system.log_records import relay
from loaderkit.engine.process import messages
from loaderkit.engine.process.connection import WorkerConnection
from loaderkit.engine.process.leases import LeaseTable
from loaderkit.engine.process.receiver import Receiver
from loaderkit.engine.process.shared_memory import Allocator, SharedArena
from loaderkit.engine.remote.contracts import WorkerSpec
from loaderkit.engine.restarts import Death
from loaderkit.errors import WorkerDiedError
from loaderkit.native.identity import identity
from loaderkit.sampling.shard import Shard

logger = logging.getLogger("loaderkit")


class WorkerProcess:
    """A `RunningProcess` on this machine, over shared memory."""

    def __init__(self, spec: WorkerSpec, shard: Shard) -> None:
        self._spec = spec
        self._shard = shard
        self.connection: WorkerConnection | None = None
        self._lease_table: LeaseTable | None = None
        self._receiver: Receiver | None = None

    def start(self, next_position: tuple[int, int], generation: int, orders: Sequence[tuple[Any, ...]]) -> None:
        """See `RunningProcess`."""
        try:
            arena = SharedArena.create(self._shard.of)
            try:
                allocator = Allocator(arena)
                self.connection = WorkerConnection(arena, allocator, self._spec.preload)
                for order in orders:
                    self.connection.tell(*order)
                self._send_spec(self.connection, arena, allocator, next_position, generation)
            finally:
                arena.release_descriptor()
        except (OSError, RuntimeError) as error:
            raise _not_started(error) from error.with_traceback(None)
        self._lease_table = LeaseTable(arena, pinned_for=self._spec.pinned_for)
        self._receiver = Receiver(self.connection, self._lease_table)

    def _send_spec(
        self,
        connection: WorkerConnection,
        arena: SharedArena,
        allocator: Allocator,
        next_position: tuple[int, int],
        generation: int,
    ) -> None:
        spec = (self._spec.make_engine, self._shard, torch_threads.get_num_threads())
        packed, _ = messages.post(spec, arena, allocator)
        epoch, position = next_position
        settings = {
            "spec": packed,
            "begin": allocator.end,
            "keep_pages": self._spec.pinned_for is not None,
            "epoch": epoch,
            "position": position,
            "generation": generation,
            "log_level": logger.getEffectiveLevel(),
            "program": tuple(identity()),
        }
        connection.tell("spec", pickle.dumps(settings, 5))

    @property
    def pid(self) -> int | None:
        """None before it is started."""
        return None if self.connection is None else self.connection.pid

    @property
    def node(self) -> None:
        """See `RunningProcess`."""
        return None

    @property
    def where(self) -> str:
        """See `RunningProcess`."""
        return f"pid {self.pid}"

    @property
    def inbox(self) -> Receiver:
        """See `RunningProcess`."""
        assert self._receiver is not None
        return self._receiver

    @property
    def is_awake(self) -> bool:
        """See `RunningProcess`."""
        return self.connection is not None and self.connection.is_awake

    @property
    def has_ended(self) -> bool:
        """See `RunningProcess`."""
        return self.connection is not None and self.connection.has_ended

    def tell(self, name: str, *arguments: object) -> None:
        """See `RunningProcess`."""
        if self.connection is not None:
            self.connection.tell(name, *arguments)

    def ask(self, question: str, *arguments: object) -> object:
        """See `RunningProcess`."""
        return None if self.connection is None else self.connection.ask(question, *arguments)

    def death(self) -> Death:
        """See `RunningProcess`."""
        assert self.connection is not None
        return self.connection.death()

    def begin_closing(self, join_s: float) -> None:
        """See `RunningProcess`."""
        if self.connection is not None:
            self.connection.begin_closing(join_s)

    def close(self, join_s: float) -> None:
        """See `RunningProcess`."""
        for message in self.connection.close(join_s) if self.connection is not None else ():
            if isinstance(message, messages.LogMessage):
                relay(message.record)

    def release(self) -> None:
        """See `RunningProcess`."""
        if self._lease_table is not None:
            self._lease_table.close()
        self._lease_table = self._receiver = None  # an error's traceback would keep all of it alive


def _not_started(error: OSError | RuntimeError) -> WorkerDiedError:
    """The error for a process that could not be started: the system lacks a descriptor, process or memory."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        reason += f": this process may have {limit} descriptors (`ulimit -n`): raise that, or keep fewer files open"
    return WorkerDiedError(
        f"the process that loads could not be started: {reason}; or use {keys.EXECUTOR}: thread, which needs no process"
    )
