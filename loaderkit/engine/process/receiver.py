"""Receives the batches of a worker process, in order."""

from __future__ import annotations

import time

from loaderkit._internal.system.log_records import relay
from loaderkit.engine.process import messages
from loaderkit.engine.process.connection import WorkerConnection
from loaderkit.engine.process.leases import LeaseTable
from loaderkit.engine.remote import error_transport
from loaderkit.engine.remote.contracts import ReceivedBatch
from loaderkit.engine.remote.delivery import Delivered
from loaderkit.engine.watchdog import HangReport

_MOST_NUMBERS = 10_000  # in one message: a socket takes none of more than 200 kB


class Receiver:
    """Reads the connection in the thread that calls `take`."""

    def __init__(self, connection: WorkerConnection, lease_table: LeaseTable) -> None:
        self._connection = connection
        self._lease_table = lease_table

    def take(self, generation: int = 0, timeout_s: float = 0.0) -> ReceivedBatch | None:
        """See `Inbox`; a batch of a later generation is returned as well."""
        deadline = time.monotonic() + timeout_s  # for all messages together, since log records come in between
        while (message := self._connection.receive(max(0.0, deadline - time.monotonic()))) is not None:
            if isinstance(message, messages.BatchMessage):
                batch = self._open(message)
                if message.generation >= generation:
                    return ReceivedBatch(message.generation, batch.unsealed())
                del batch  # made before the last seek
                self.taken()
                continue
            if isinstance(message, messages.FailureMessage):
                raise error_transport.unpack_error(message.error)
            if isinstance(message, messages.LogMessage):
                relay(message.record)
        return None

    def _open(self, message: messages.BatchMessage) -> Delivered:
        batch: Delivered = message.packed.open(self._lease_table.lend(message.number, message.packed.blocks))
        return batch

    def taken(self) -> None:
        """See `Inbox`."""
        ended = self._lease_table.ended()
        self._release(ended[_MOST_NUMBERS:])
        self._connection.tell("taken", ended[:_MOST_NUMBERS])

    def give_back(self) -> None:
        """See `Inbox`."""
        self._release(self._lease_table.ended())

    def _release(self, ended: list[int]) -> None:
        for first in range(0, len(ended), _MOST_NUMBERS):
            self._connection.tell("released", ended[first : first + _MOST_NUMBERS])

    def report(self) -> HangReport | None:
        """Gives None, because this process runs no stages."""
        return None

    def close(self, join_s: float) -> None:
        """Nothing to drop: `take` keeps no batches."""
