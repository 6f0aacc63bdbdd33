"""One save: its copy is written behind training, by all ranks, and committed by rank 0.

first            rank 0: begins ──> plans ──> rank 0: divides, a place ──> shares ──> results ──> rank 0: commit
afterwards       rank 0: begins, a place ──> results ──> rank 0: commit
not as before    rank 0: begins, a place ──> results, or "not as before" ──> rank 0: again ──> plans ──> as the first

An arrow is a message on the board. The plan of a save is kept for the next ones, in which each rank posts its results and
nothing else. One whose state is laid out otherwise than it was, or that has another plan, writes nothing and says so; then what
the others have written is left behind, and all agree on a plan anew. So they do if what several ranks hold does not look alike.
"""

from __future__ import annotations

import atexit
import logging
import pickle
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from loaderkit._internal.system.program_end import ProgramEndsError, start_thread
from loaderkit.checkpoint.manager.layout import LayoutPlanner
from loaderkit.checkpoint.planning.division import Ranks
from loaderkit.checkpoint.planning.held import Held, Unlike, check_alike, shared, without_unlike
from loaderkit.checkpoint.save.dcp_writer import Local, Share, StreamWriter
from loaderkit.checkpoint.save_log import SAVES, SaveRecord
from loaderkit.checkpoint.state import FlatState
from loaderkit.errors import CheckpointError
from loaderkit.ranks.board import Board

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
        self._over = threading.Event()  # as Ctrl-C in `Thread.join` makes Python 3.11 and 3.12 take a thread for ended
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
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once it is committed. Raises what the flush met, and TimeoutError after `timeout_s`."""
        self.join(timeout_s)
        if not self.is_done:
            raise TimeoutError(f"step {self.step} is not committed within {timeout_s} s; it is still being written")
        self.raise_error()

    def raise_error(self) -> None:
        """Raise what the flush met, if anything."""
        if self.error is not None:
            atexit.unregister(self._log_unheard)
            raise self.error

    def join(self, timeout_s: float | None = None) -> None:
        """Return once it is done, or after `timeout_s`."""
        if self._thread.ident is not None and self._over.wait(timeout_s):
            self._thread.join()

    def start(self) -> None:
        """Begin to write; where the program ends and no thread can be begun any more, return once it is done."""
        try:
            start_thread(self._thread)
        except ProgramEndsError:
            self._run()

    def _run(self) -> None:
        try:
            self._write()
        finally:
            self._over.set()

    def _write(self) -> None:
        begin_s = time.perf_counter()
        try:
            self._work(self)
            self._committed = True
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold the copy of the state
            self.error = error
            atexit.register(self._log_unheard)
        finally:
            self.stats["flush_s"] = time.perf_counter() - begin_s
            error_text = None if self.error is None else f"{type(self.error).__name__}: {self.error}"
            SAVES.add(SaveRecord(self.step, time.perf_counter(), dict(self.stats), error_text))
            afterwards = self._afterwards
            del self._work, self._afterwards  # and with them the copy of the state
        if self._committed:
            try:
                afterwards()
            except Exception:
                logger.warning("step %d is committed; what was to be done after that failed", self.step, exc_info=True)

    def _log_unheard(self) -> None:
        """At the end of a program that did not wait for this save, so that its last checkpoint is not missing silently."""
        logger.error(
            "the save of step %d has failed, and the program has ended without `close`, which would have raised it: %s: %s",
            *(self.step, type(self.error).__name__, self.error),
        )


@dataclass
class KeptPlan:
    """The plan of the last save, as this rank has it: it holds as long as all ranks have the same one and their states are laid
    out as they were."""

    number: str = ""  # of the agreement; "": there was none yet
    digest: str = ""
    local: SavePlan | None = None
    own: SavePlan | None = None  # what the coordinator has answered
    metadata: Metadata | None = None  # the coordinator's
    shared: Mapping[Ranks, Sequence[int]] = field(default_factory=dict)  # items of `local` that other ranks hold, too
    unlike: set[str] = field(default_factory=set)  # at the coordinator: names of what ranks held with different values


class _SaveBegin(NamedTuple):
    """How the coordinator begins a save. `number`, `share`: the kept plan to write by, and where to; None: agree on a plan."""

    url: str
    number: str | None = None
    share: Share | None = None


_COMMITTED, _AGAIN = b"committed", b"again"


def write_checkpoint(
    writer: StreamWriter, url: str, state: FlatState, board: Board | None, *, key: str, kept: KeptPlan
) -> None:
    """Write `state`, a copy in host memory, as the checkpoint `url`; returns once it is committed, on every rank.

    The ranks agree over `board`, below `key`, by the plan `kept` of the last save if it still holds: each then posts one
    message. Raises CheckpointError, ConnectorError, and PeerError if another rank failed.
    """
    planner = LayoutPlanner()
    writer.reset(url)
    is_coordinator = board is None or board.rank == 0
    writer.set_up_storage_writer(is_coordinator)
    planner.set_up(state, is_coordinator=is_coordinator)
    try:
        if board is None:
            _write_alone(writer, planner)
        else:
            with board.alive(key):
                _JointSave(writer, planner, board, key, kept).write()
    except BaseException as error:
        if board is not None:
            board.fail(key, error)
        writer.reset()  # what is there of it is then a dead save's, which the next one clears
        raise


def _write_alone(writer: StreamWriter, planner: SavePlanner) -> None:
    plans, metadata = planner.create_global_plan(
        [writer.prepare_local_plan(planner.create_local_plan(), is_alone=True)]
    )
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])


@dataclass
class _JointSave:
    """One save of several ranks, as this one takes part in it."""

    writer: StreamWriter
    planner: LayoutPlanner
    board: Board
    key: str
    kept: KeptPlan

    def write(self) -> None:
        """Return once it is committed."""
        digest = self.planner.digest()
        place = self._begin(digest)
        if place.url != self.writer.checkpoint_id:
            raise CheckpointError(
                f"the ranks save different steps, so nothing is saved: rank 0 {place.url}, and rank {self.board.rank} "
                f"{self.writer.checkpoint_id}"
            )
        if place.share is None or not self._write_as_kept(place.share, place.number == self.kept.number, digest):
            self._write_anew(digest)
        self.board.count(f"{self.key}/seen")

    def _begin(self, digest: str) -> _SaveBegin:
        """The coordinator says whether it would keep the plan, and then where this save's files go."""
        if self.board.rank > 0:
            received: _SaveBegin = self._received("place", "a checkpoint is begun")
            return received
        place = _SaveBegin(self.writer.checkpoint_id)
        if self.kept.number and self.kept.digest == digest:
            (plan,) = self.writer.prepare_global_plan([SavePlan([])])
            place = place._replace(number=self.kept.number, share=plan.storage_data)
        self._post("place", place)
        return place

    def _write_as_kept(self, placed: Share, is_same: bool, digest: str) -> bool:
        """Write by the plan of the last save. A rank for which that does not hold says so in the place of its results.

        False: there was one, and nothing is committed.
        """
        local, own, results = self.kept.local, self.kept.own, None
        if local is not None and own is not None and is_same and digest == self.kept.digest:
            token = self.writer.prepare_local_plan(local, is_alone=False).storage_data.token
            share = own.storage_data._replace(placement=placed.placement, token=token)
            looks = {
                ranks: self.planner.sampled(local.items[number] for number in numbers)
                for ranks, numbers in self.kept.shared.items()
            }
            results = self._results(replace(own, storage_data=share)), looks
        self._post(f"written/{self.board.rank}", results)
        if self.board.rank > 0:
            return bool(self._received("outcome", "a checkpoint is committed") == _COMMITTED)
        written = self._collected("written", "a checkpoint is written")
        holds = self.kept.metadata is not None and None not in written and _look_alike([looks for _, looks in written])
        if self.kept.metadata is not None and holds:
            self.writer.finish(self.kept.metadata, [results for results, _ in written])
        else:
            self.writer.reset(self.writer.checkpoint_id)  # what is written is cleared as the next attempt begins
        self._post("outcome", _COMMITTED if holds else _AGAIN)
        return holds

    def _write_anew(self, digest: str) -> None:
        """Agree on a plan, write by it, and keep it."""
        metadata: Metadata | None = None
        local = self.writer.prepare_local_plan(self.planner.create_local_plan(), is_alone=False)
        self._post(f"plan/{self.board.rank}", local)
        if self.board.rank == 0:
            local_plans, unlike = self._without_unlike(self._collected("plan", "a checkpoint is planned"))
            groups = shared([plan.storage_data.held for plan in local_plans])
            plans, metadata = self.planner.create_global_plan(local_plans)
            number = uuid.uuid4().hex
            for rank, plan in enumerate(self.writer.prepare_global_plan(plans)):
                self._post(f"share/{rank}", (number, plan, groups[rank], unlike))
        number, own, group, unlike = self._received(f"share/{self.board.rank}", "a checkpoint is planned")
        _warn(unlike, self.board.rank)
        self._post(f"written-anew/{self.board.rank}", self._results(own))
        if metadata is not None:
            self.writer.finish(metadata, self._collected("written-anew", "a checkpoint is written"))
            self._post("committed", _COMMITTED)
        self._received("committed", "a checkpoint is committed")
        if self.writer.format == "dcp":  # another's files have names and connections of one save
            vars(self.kept).update(number=number, digest=digest, local=local, own=own, metadata=metadata, shared=group)

    def _without_unlike(self, plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Unlike]:
        """The plans, where only the lowest rank has what ranks hold with different values, as parts of two would be saved; and
        the names that were not known as such."""
        held, unlike = without_unlike([plan.storage_data.held for plan in plans])
        check_alike(held)
        new = Unlike(unlike.tensors - self.kept.unlike, unlike.values - self.kept.unlike)
        self.kept.unlike |= unlike.tensors | unlike.values
        return [_leave_out(plan, one) for plan, one in zip(plans, held, strict=True)], new

    def _results(self, plan: SavePlan) -> list[WriteResult]:
        results: list[WriteResult] = self.writer.write_data(self.planner.finish_plan(plan), self.planner).wait()
        return results

    def _post(self, name: str, content: Any) -> None:
        self.board.post(f"{self.key}/{name}", pickle.dumps(content))

    # Plans and results of other ranks of this job are pickled, as torch.distributed.checkpoint does it.

    def _received(self, name: str, doing: str) -> Any:
        """A message of the coordinator's."""
        return pickle.loads(self.board.wait_for(f"{self.key}/{name}", 0, about=self.key, doing=doing))  # noqa: S301

    def _collected(self, name: str, doing: str) -> list[Any]:
        """The messages of all ranks."""
        messages = self.board.collect(f"{self.key}/{name}", about=self.key, doing=doing)
        return [pickle.loads(message) for message in messages]  # noqa: S301


def _warn(unlike: Unlike, rank: int) -> None:
    """Say what was left out: of tensors on rank 0, and of plain values on every rank, whose own may be lost."""
    if unlike.tensors and rank == 0:
        logger.warning(
            "%s of which ranks hold other values under one name: those of the lowest rank are saved, for all. For what DDP "
            "leaves to each rank, such as the running means of a batch norm, that is right; shards, and what else is a "
            "rank's own, are lost: save DTensors, or give them names with the rank in them",
            _counted(unlike.tensors, "is a tensor", "are tensors"),
        )
    if unlike.values:
        logger.warning(
            "%s of which ranks hold other ones under one name: those of the lowest rank are saved, for all; this is rank %d. "
            "If each rank is to get its own back, put the object into loaderkit.checkpoint.PerRank, or the value under a name "
            "with the rank in it; else give all ranks the same",
            _counted(unlike.values, "is a plain value", "are plain values"),
            rank,
        )


def _counted(names: Collection[str], one: str, several: str) -> str:
    first = min(names)
    return f"{first!r} and {len(names) - 1} more {several}" if len(names) > 1 else f"{first!r} {one}"


def _leave_out(plan: SavePlan, held: Held) -> SavePlan:
    """The plan of a rank without what `held` leaves out."""
    local: Local = plan.storage_data
    offer = local.offer
    if offer is not None and held.left_out:
        names = {held.items[number].index.fqn for number in held.left_out}
        offer = offer._replace(memory={name: number for name, number in offer.memory.items() if name not in names})
    items = [item for number, item in enumerate(plan.items) if number not in held.left_out]
    return replace(plan, items=items, storage_data=local._replace(held=held, offer=offer))


def _look_alike(by_rank: Sequence[Mapping[Ranks, bytes]]) -> bool:
    """True if the ranks of each group hold what has the same samples."""
    known: dict[Ranks, bytes] = {}
    return all(known.setdefault(ranks, digest) == digest for looks in by_rank for ranks, digest in looks.items())


def wait_for_others(board: Board, key: str) -> None:
    """Return once all ranks have seen that the save `key` is committed, or after a few seconds: this rank's end may be the end
    of the store in which they look."""
    board.wait_for_count(f"{key}/seen", len(board), about=key, timeout_s=_FAREWELL_S)


def messages_of(board: Board, key: str) -> list[str]:
    """The keys of all messages of a save, which can be removed once the next one is under way."""
    kinds = ["written", "alive"]
    if board.has(f"{key}/plan/0"):
        kinds += ["plan", "share", "written-anew"]
    return [
        *(f"{key}/{name}" for name in ("place", "outcome", "committed", "seen", "extent")),
        *(f"{key}/{kind}/{rank}" for kind in kinds for rank in range(len(board))),
    ]
