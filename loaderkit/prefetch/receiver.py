"""What arrives from the process that loads, as batches in order."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from loaderkit.prefetch import wire
from loaderkit.prefetch.ledger import Ledger
from loaderkit.prefetch.link import Link
from loaderkit.types import FieldSpec

logger = logging.getLogger("loaderkit")


@dataclass
class Arrived:
    """A batch over the shared memory, and how many seeks were asked for before it was sent."""

    generation: int
    batch: wire.Delivered
    specs: Mapping[str, FieldSpec] = field(default_factory=dict)


class Inbox(Protocol):
    """Where the consumer takes batches from: the socket itself, or a thread that runs stages on them first."""

    def take(self, generation: int, timeout_s: float) -> wire.Delivered | None:
        """The next batch of `generation`; None if none came in time. Raises what made the other process stop, and
        EOFError if that has ended."""

    def close(self) -> None:
        """Let go of what has arrived. The link is closed already."""


class Receiver:
    """Reads the link in the thread that calls `take`."""

    def __init__(self, link: Link, ledger: Ledger) -> None:
        self._link = link
        self._ledger = ledger
        self._specs: Mapping[str, FieldSpec] = {}

    def take(self, generation: int, timeout_s: float) -> wire.Delivered | None:
        """See `Inbox`."""
        while True:
            arrived = self.arrive(timeout_s, generation)
            if arrived is None or arrived.generation == generation:
                return None if arrived is None else arrived.batch

    def arrive(self, timeout_s: float, generation: int = 0) -> Arrived | None:
        """The next batch that was sent behind seek number `generation`, or a later one. See `take`."""
        while (message := self._link.receive(timeout_s)) is not None:
            if isinstance(message, wire.BatchMessage):
                memory = self._ledger.lend(message.number, message.parcel.blocks)
                if message.generation < generation:
                    continue  # read ahead for a place that nobody wants any more: the lease ends here
                batch: wire.Delivered = message.parcel.open(memory)
                self._specs = batch.specs or self._specs
                return Arrived(message.generation, batch.unsealed(), self._specs)
            if isinstance(message, wire.FailureMessage):
                raise wire.unpack_error(message.error)
            relay(message)
        return None

    def close(self) -> None:
        """Nothing is held here."""


def relay(message: wire.LogMessage) -> None:
    """Log a record of the other process as if it had been logged here."""
    record = logging.makeLogRecord(message.record)
    if logger.isEnabledFor(record.levelno):
        logging.getLogger(record.name).handle(record)
