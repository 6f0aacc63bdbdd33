"""Where the copy of a state is written from: a thread of this process, or a process of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from loaderkit._internal.extensions import Entry
from loaderkit._internal.packing import check_packs
from loaderkit._internal.system.program_end import ProgramEndsError
from loaderkit.checkpoint.discovery.description import Format
from loaderkit.checkpoint.discovery.listing import url_below
from loaderkit.checkpoint.discovery.locate import save_target
from loaderkit.checkpoint.flush.process import FlushProcess
from loaderkit.checkpoint.flush.shared_pages import MappedPages, SharedPages
from loaderkit.checkpoint.flush.transport import ReceivedCopies
from loaderkit.checkpoint.manager.directory import step_name
from loaderkit.checkpoint.manager.saving import KeptPlan, messages_of, write_checkpoint
from loaderkit.checkpoint.manager.settings import CopyArgs
from loaderkit.checkpoint.save.dcp_writer import StreamWriter
from loaderkit.checkpoint.save.safetensors.export import ExportRule
from loaderkit.checkpoint.save.safetensors.export_writer import ExportWriter
from loaderkit.checkpoint.save.staging import HostCopies
from loaderkit.checkpoint.state import FlatState
from loaderkit.connectors.base import Connector, traits_of
from loaderkit.connectors.factory import CONNECTORS, ConnectorFactory
from loaderkit.errors import ConfigError, printable
from loaderkit.ranks.board import Board, BoardAddress

logger = logging.getLogger("loaderkit")


class Flush(Protocol):
    """Copies states, and writes the copies. One state is written at a time, from any thread."""

    def stage(self, state: FlatState) -> FlatState:
        """A copy of the state in host memory that is kept for the next one. Raises CheckpointError without memory for it."""

    def write(self, state: FlatState, url: str, key: str, rule: ExportRule | None = None) -> dict[str, Any]:
        """Write such a copy as the checkpoint `url`, or the export that `rule` makes of it; what it took, once it is committed.
        See `write_checkpoint`."""

    def close(self) -> None:
        """Give up the memory that is kept."""


class ThreadFlush:
    """Writes in the thread that calls. `copies`: what `stage` copies with."""

    def __init__(
        self,
        url: str,
        connectors: Mapping[str, Connector],
        board: Board | None,
        *,
        format: Format = "dcp",  # noqa: A002 (as in the YAML)
        unique_names: bool = False,
        copies: HostCopies | None = None,
    ) -> None:
        self._writer = StreamWriter(url, format=format, unique_names=unique_names, connectors=connectors, copies=copies)
        self._settings = {"connectors": connectors, "copies": copies}
        self._board = board
        self._plan = KeptPlan()

    def stage(self, state: FlatState) -> FlatState:
        return state._replace(values=self._writer.stage(state.values))

    def write(self, state: FlatState, url: str, key: str, rule: ExportRule | None = None) -> dict[str, Any]:
        if rule is not None:
            writer = ExportWriter(url, rule, **self._settings)
            kept = KeptPlan(unlike={*self._plan.unlike})  # which has been said of the checkpoint itself
            write_checkpoint(writer, url, state, self._board, key=key, kept=kept)
            return writer.report
        write_checkpoint(self._writer, url, state, self._board, key=key, kept=self._plan)
        return self._writer.stats or {}

    def close(self) -> None:
        self._writer.close()


class ProcessFlush:
    """Writes in another process, which is started at the first write. The calling thread waits for it, or writes itself where
    the program ends and no process can be started any more."""

    def __init__(
        self,
        url: str,
        connectors: Mapping[str, Connector],
        board: Board | None,
        *,
        format: Format = "dcp",  # noqa: A002 (as in the YAML)
        unique_names: bool = False,
    ) -> None:
        """`board` has an address. Raises ConfigError for what cannot be sent there."""
        _check_sendable(url, connectors)
        memory = SharedPages()
        self._copies = HostCopies(memory.allocate)
        address = None if board is None else board.address
        settings: dict[str, Any] = {"format": format, "unique_names": unique_names}
        self._here = partial(ThreadFlush, url, connectors, board, **settings, copies=self._copies)
        there = partial(_writer_there, url, dict(connectors), address, **settings, schemes=CONNECTORS.registered())
        self._process = FlushProcess(there, memory)

    def stage(self, state: FlatState) -> FlatState:
        return state._replace(values=self._copies.copy(state.values))

    def write(self, state: FlatState, url: str, key: str, rule: ExportRule | None = None) -> dict[str, Any]:
        try:
            stats: dict[str, Any] = self._process.call(state.values, state.paths, url, key, rule)
        except ProgramEndsError:
            return self._here().write(state, url, key, rule)
        return stats

    def close(self) -> None:
        self._process.close()
        self._copies.close()


class Copies:
    """The exports that are made of saves. `keys`: below them are the messages of the ranks about the last ones."""

    def __init__(self, copies: Sequence[CopyArgs], flush: Flush, board: Board | None) -> None:
        self._copies, self._flush, self._board = copies, flush, board
        self.keys: list[str] = []

    def due(self, step: int) -> list[CopyArgs]:
        """Those to be made of a step."""
        return [copy for copy in self._copies if copy.every is None or step % copy.every == 0]

    def write(self, step: int, state: FlatState, of: str, key: str) -> dict[str, Any]:
        """Make them of `state`, a copy that `flush` has made, which was saved as `of`; by URL the bytes, the relative error and
        the seconds of each.

        One that fails is a warning, and `error` in its place: the checkpoint is there.
        """
        made: dict[str, Any] = {}
        before, self.keys = self.keys, []
        for number, copy in enumerate(self.due(step)):
            url, own_key = url_below(copy.to, step_name(step)), f"{key}-copy-{number}"
            rule = ExportRule(copy.globs, getattr(torch, copy.quantize or copy.dtype or ""), of)
            self.keys.append(own_key)
            begin_s = time.perf_counter()
            try:
                made[url] = self._flush.write(state, url, own_key, rule)
            except Exception as error:
                if self._board is not None:
                    self._board.fail(own_key, error)
                logger.warning("%s is not made: %s", printable(url), error)
                made[url] = {"error": f"{type(error).__name__}: {error}"}
            made[url]["flush_s"] = time.perf_counter() - begin_s
        if self._board is not None and self._board.rank == 0:
            self._board.remove([name for old in before for name in messages_of(self._board, old)])
        return made


def _writer_there(
    url: str,
    connectors: Mapping[str, Connector],
    address: BoardAddress | None,
    memory: MappedPages,
    *,
    schemes: Mapping[str, Entry[ConnectorFactory]],
    **settings: Any,
) -> Callable[..., dict[str, Any]]:
    """What the other process calls. `schemes`: what the program has registered."""
    CONNECTORS.adopt(schemes)
    board = None if address is None else address.open()
    copies = ReceivedCopies(memory)
    flush = ThreadFlush(url, connectors, board, **settings, copies=copies)
    return lambda values, paths, *others: flush.write(FlatState(values, paths), *others)


def _check_sendable(url: str, connectors: Mapping[str, Connector]) -> None:
    for name, connector in {**CONNECTORS.registered(), **connectors}.items():
        check_packs(
            f"connectors: {name!r}",
            connector,
            "the process that writes checkpoints (flush: process)",
            "use flush: thread",
        )
    target = save_target(url, connectors)
    try:
        if traits_of(target.connector).is_in_process:
            raise ConfigError(
                f"{url}: what the process that writes checkpoints (flush: process) would keep in its own memory is not seen "
                "here: use flush: thread"
            )
    finally:
        target.close()
