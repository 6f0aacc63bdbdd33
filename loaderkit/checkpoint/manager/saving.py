"""One save: its copy is written behind training, by all ranks, and committed by rank 0.

plan ──> posted ──> rank 0: global plan, a place ──> posted ──> written ──> posted ──> rank 0: commit ──> posted
                                                              (StreamWriter)
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

from loaderkit._internal.save_log import SAVES, SaveRecord
from loaderkit.checkpoint.ranks.board import Board
from loaderkit.checkpoint.save.dcp_writer import StreamWriter
from loaderkit.errors import CheckpointError, PeerError

logger = logging.getLogger("loaderkit")
_FAREWELL_S = 5.0


class Saving:
    """A save that has begun; its bytes are written by a thread. Any thread may ask.

    `step`; `error`: what writing met, or None; `stats`: `waiting_s` for the save before, `staging_s` and `flush_s` in seconds,
    and `StreamWriter.stats`.
    """

    def __init__(self, step: int, work: Callable[[Saving], None], afterwards: Callable[[], None]) -> None:
        """`work` commits the checkpoint or raises; `afterwards` is called once it is committed, and its errors are logged."""
        self.step = step
        self.error: BaseException | None = None
        self.stats: dict[str, Any] = {"flush_s": 0.0}
        self._work, self._afterwards = work, afterwards
        self._committed = False
        # Not a daemon: a program that ends without `close` still completes its last checkpoint.
        self._thread = threading.Thread(target=self._run, name=f"loaderkit-flush-{step}")

    def __repr__(self) -> str:
        state = "committed" if self.is_committed else "failed" if self.error is not None else "being written"
        return f"Saving(step={self.step}, {state})"

    @property
    def is_committed(self) -> bool:
        """True once the checkpoint is whole, durable and visible."""
        return self._committed

    @property
    def is_done(self) -> bool:
        """True once it is committed, or has failed."""
        return not self._thread.is_alive() and (self._committed or self.error is not None)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once it is committed. Raises what the flush met, and TimeoutError after `timeout_s`."""
        self.join(timeout_s)
        if not self.is_done:
            raise TimeoutError(f"step {self.step} is not committed within {timeout_s} s; it is still being written")
        if self.error is not None:
            raise self.error

    def join(self, timeout_s: float | None = None) -> None:
        """Return once it is done, or after `timeout_s`."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def _run(self) -> None:
        begin_s = time.perf_counter()
        try:
            self._work(self)
            self._committed = True
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold the copy of the state
            self.error = error
        finally:
            self.stats["flush_s"] = time.perf_counter() - begin_s
            error_text = None if self.error is None else f"{type(self.error).__name__}: {self.error}"
            SAVES.add(SaveRecord(self.step, time.perf_counter(), dict(self.stats), error_text))
            del self._work  # and with it the copy of the state
        if self._committed:
            try:
                self._afterwards()
            except Exception:
                logger.warning("step %d is committed; what was to be done after that failed", self.step, exc_info=True)


def write_checkpoint(writer: StreamWriter, url: str, state: dict[str, Any], board: Board | None, key: str) -> None:
    """Write `state`, a copy in host memory, as the checkpoint `url`; returns once it is committed, on every rank.

    The ranks exchange their plans over `board`, below `key`. Raises CheckpointError, ConnectorError, and PeerError if another
    rank failed.
    """
    planner = DefaultSavePlanner()
    writer.reset(url)
    is_coordinator = board is None or board.rank == 0
    writer.set_up_storage_writer(is_coordinator)
    planner.set_up_planner(state_dict=state, storage_meta=writer.storage_meta(), is_coordinator=is_coordinator)
    try:
        if board is None:
            _write_alone(writer, planner)
        else:
            with board.alive(key):
                _write_together(writer, planner, board, key)
    except BaseException as error:
        if board is not None:
            board.fail(key, error)
        writer.reset()  # what is there of it is then a dead save's, which the next one clears
        raise


def _write_alone(writer: StreamWriter, planner: SavePlanner) -> None:
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])


def _write_together(writer: StreamWriter, planner: SavePlanner, board: Board, key: str) -> None:
    metadata: Any = None
    local = writer.prepare_local_plan(planner.create_local_plan())
    board.post(f"{key}/plan/{board.rank}", pickle.dumps((writer.checkpoint_id, local)))
    if board.rank == 0:
        received = [
            _received(data) for data in board.collect(f"{key}/plan", about=key, doing="a checkpoint is planned")
        ]
        if len(urls := {url for url, _ in received}) > 1:
            raise CheckpointError(f"the ranks save different steps, so nothing is saved: {', '.join(sorted(urls))}")
        plans, metadata = planner.create_global_plan([plan for _, plan in received])
        for rank, plan in enumerate(writer.prepare_global_plan(plans)):
            board.post(f"{key}/share/{rank}", pickle.dumps(plan))
    share = _received(board.wait_for(f"{key}/share/{board.rank}", 0, about=key, doing="a checkpoint is planned"))
    results = writer.write_data(planner.finish_plan(share), planner).wait()
    board.post(f"{key}/written/{board.rank}", pickle.dumps(results))
    if board.rank == 0:
        written = board.collect(f"{key}/written", about=key, doing="a checkpoint is written")
        writer.finish(metadata, [_received(data) for data in written])
        board.post(f"{key}/committed")
    else:
        board.wait_for(f"{key}/committed", 0, about=key, doing="a checkpoint is committed")
    board.post(f"{key}/seen/{board.rank}")


def wait_for_others(board: Board, key: str) -> None:
    """Return once all ranks have seen that the save `key` is committed, or after a few seconds: this rank's end may be the end
    of the store in which they look."""
    with suppress(PeerError):
        board.collect(f"{key}/seen", about=key, doing="a checkpoint is committed", timeout_s=_FAREWELL_S)


def _received(data: bytes) -> Any:
    """A plan or a result of another rank of this job, pickled as torch.distributed.checkpoint does it."""
    return pickle.loads(data)  # noqa: S301


def messages_of(board: Board, key: str) -> list[str]:
    """The keys of all messages of a save, which can be removed once the next one is under way."""
    ranks = range(len(board))
    return [
        f"{key}/committed",
        *(f"{key}/{kind}/{rank}" for kind in ("plan", "share", "written", "seen", "alive") for rank in ranks),
    ]
