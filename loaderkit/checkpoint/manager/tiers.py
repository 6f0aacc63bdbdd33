"""Where the checkpoints of a run are: in the directory `to`, and before that in `local`, if there is one.

save ──> local: committed ──> Uploads ──> to: committed
restore <── the newest whole one of both; of a step the local one first
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import takewhile
from typing import Any

from loaderkit.checkpoint.discovery.kinds import step_in
from loaderkit.checkpoint.discovery.latest import is_there
from loaderkit.checkpoint.manager.directory import RunDirectory, step_name
from loaderkit.checkpoint.manager.settings import SaveSettings
from loaderkit.checkpoint.manager.uploads import Uploads
from loaderkit.checkpoint.nodes.joining import JobNodes
from loaderkit.checkpoint.save.starts import StartLog
from loaderkit.checkpoint.timing.costs import Extent
from loaderkit.connectors.base import Connector
from loaderkit.errors import (
    AccessDeniedError,
    CheckpointError,
    ConfigError,
    ConnectorError,
    FormatError,
    ObjectNotFoundError,
    printable,
)
from loaderkit.ranks.board import Board

logger = logging.getLogger("loaderkit")
_CLAIM = "loaderkit-local.json"  # in the local directory: whose it is
_CHECKED, _SEEN = "directories", "local-directory"
_DOING = "the ranks look at the directories of the checkpoints"
_NODES = "loaderkit-nodes"  # the scheme of the folders of all nodes


class Tiers:
    """The directories of a run; rank 0 uploads. `near` is where saves go, `far` where checkpoints last; without `local` that is
    the same one. With `replicas` the local directories of all nodes are one store, which `connectors` gets."""

    def __init__(
        self, settings: SaveSettings, connectors: dict[str, Connector], board: Board | None, *, timeout_s: float
    ) -> None:
        """Raises ConfigError if a directory cannot be written to, if the local one is another run's or the same as `to`, or
        if the ranks do not share it; PeerError on the other ranks."""
        self._keep, self._local, self._board = settings.keep, settings.local, board
        self._copies, self._connectors = [copy.to for copy in settings.copies], connectors
        rules = [settings.keep, None if settings.local is None else settings.local.keep]
        with_metrics = any(keep is not None and keep.best is not None for keep in rules)
        self._partial: set[int] = set()
        kinds: Any = {"with_metrics": with_metrics, "partial": self._partial}
        self._far = RunDirectory(settings.to, connectors, **kinds)
        self._near, self._uploads = self._far, None
        self._num_finished = self._num_rewound = 0
        self._is_claimed = self._has_saved = False
        self._saving = threading.Lock()  # while something in `near` is being written or removed
        self._nodes: JobNodes | None = None
        if settings.local is not None:
            near = settings.local.path
            if settings.replicas:
                self._nodes = JobNodes(near, board, timeout_s, replicated=self._retain_unless_saving)
                connectors[_NODES], near = self._nodes.store, f"{_NODES}://"
            self._near = RunDirectory(near, connectors, **kinds)
        self.starts = StartLog(self._near) if board is None or board.rank == 0 else None
        try:
            self._agree_on_directories()
        except BaseException:
            self.close()
            raise
        if settings.local is None:
            return
        if board is None or board.rank == 0:
            self._uploads = Uploads(
                self._near,
                self._far,
                keep=settings.keep,
                bandwidth=settings.local.upload.bandwidth,
                connectors=connectors,
                uploaded=self._retain_unless_saving,
            )

    def start(self) -> None:
        """Begin to upload what an earlier run has left."""
        if self._uploads is not None:
            with suppress(ConnectorError):  # which uploads meet, too
                self._near.find_partial()  # what a restore needs with a step without optimizers is uploaded as well
            self._uploads.start()

    # ------------------------------------------------------------------------------------------------------- save

    def url_of(self, step: int) -> str:
        """Where a step is saved."""
        return self._near.url_of(step)

    @contextmanager
    def writing(self, step: int) -> Iterator[None]:
        """While a step is being written nothing is removed from where it goes. Raises ConnectorError."""
        with self._saving, nullcontext() if self._uploads is None else self._uploads.saving(step):
            if self._uploads is not None and not self._is_claimed:
                self._near.put(_CLAIM, json.dumps({"version": 1, "to": self._far.url}).encode())
                self._is_claimed = True
            yield
            if self._board is None or self._board.rank == 0:  # now, as nothing local waits for a far store that is slow
                self._far.occupy()

    def check_rewound(self, chosen: int, step: int) -> None:
        """Raise ConfigError on every rank if there are later whole steps than `step`: a job that went back to `chosen` would
        save beside them, and the next start would take them."""
        board, key = self._board, f"rewound-{self._num_rewound}"
        self._num_rewound += 1
        if board is not None and board.rank > 0:
            later = [int(one) for one in board.wait_for(key, 0, about=key, doing=_DOING).split()]
        else:
            try:
                with nullcontext() if board is None else board.alive(key):
                    later = self._whole_after(step)
            except BaseException as error:
                if board is not None:
                    board.fail(key, error)
                raise
            if board is not None:
                board.post(key, b" ".join(b"%d" % other for other in later))
        if later:
            names = ", ".join(step_name(other) for other in later[:3]) + (", ..." if len(later) > 3 else "")
            where = " and ".join(map(str, self._directories()))
            raise ConfigError(
                f"step {step} is not saved: step {chosen} was restored by number, and {where} has {len(later)} later steps "
                f"({names}): the next start would go on from the newest of them, and not from what is saved now. Remove them, "
                "or save to another directory"
            )

    def _whole_after(self, step: int) -> list[int]:
        """The later steps of which there is a whole checkpoint, ascending; others are passed over with a warning."""
        with suppress(CheckpointError):  # none is whole
            return sorted({other for other, _ in takewhile(lambda found: found[0] > step, self.whole())})
        return []

    def replicate(self, step: int) -> None:
        """A step is committed, on this rank: bring the part of another node here, behind training."""
        if self._nodes is not None:
            self._nodes.committed(step_name(step))

    def committed(self, step: int, metrics: Mapping[str, float], extent: Extent | None = None) -> None:
        """A step is committed, on rank 0: upload it, and remove what is not to be kept any more. With the extent that a notice
        has left time for nothing is removed, and nothing else is uploaded."""
        self._near.note(step, metrics, time.time())
        if self.starts is not None:
            self.starts.forget(step)
        (self._partial.discard if extent is None or extent.whole else self._partial.add)(step)
        if extent is not None:
            if self._uploads is not None:
                is_uploaded = extent.place == "to"
                self._uploads.end_with(step if is_uploaded else None)
                if is_uploaded:
                    self._uploads.add(step)
            return
        if not self._has_saved:
            self._has_saved = True
            self._warn_of_later(step)
            self._warn_of_metrics(metrics)
        if self._uploads is None or self._local is None:
            self._far.retain(self._keep, lambda saved: {step})
            return
        self._uploads.add(step)
        with self._saving:
            self._retain_near(step)

    def _warn_of_metrics(self, metrics: Mapping[str, float]) -> None:
        for keep in (self._keep, None if self._local is None else self._local.keep):
            if keep is not None and keep.best is not None and keep.best.metric not in metrics:
                given = ", ".join(sorted(metrics)) or "none"
                logger.warning(
                    "keep.best: the first save has no metric %r (given: %s); without it none is the best",
                    keep.best.metric,
                    given,
                )

    def _warn_of_later(self, step: int) -> None:
        later: list[int] = []
        with suppress(ConnectorError):
            later = [other for other in self._near.committed() if other > step]
        if later:
            logger.warning(
                "step %d is saved, and %s has %d later ones, of an earlier run: the next start "
                "restores step %d, and `keep` counts them as the newest. Remove them, or save to another directory",
                *(step, self._near, len(later), later[-1]),
            )

    def _retain_unless_saving(self) -> None:
        if self._saving.acquire(blocking=False):  # else it is done once that save is committed
            try:
                self._retain_near()
            finally:
                self._saving.release()

    def _retain_near(self, *steps: int) -> None:
        uploads, local = self._uploads, self._local
        assert uploads is not None
        assert local is not None
        names = set() if self._nodes is None else self._nodes.stays()
        stays = {*steps, *(step for step in map(step_in, names) if step is not None)}
        self._near.retain(local.keep, lambda saved: uploads.stays(saved) | stays)

    # ----------------------------------------------------------------------------------------------------- restore

    def steps(self) -> list[int]:
        """The committed steps of both, ascending; without any the newest of another make. Raises ConnectorError, and
        CheckpointError as `whole` does."""
        committed = sorted({step for directory in self._directories() for step in directory.committed()})
        return committed or [step for step, _ in self._far.of_another_make()]

    def whole(self, step: int | None = None) -> Iterator[tuple[int, str]]:
        """(step, URL) of the checkpoints that are whole, of this step or of all: the newest first, of a step the local one,
        unless that was saved before the other.

        Those that are damaged, or have ended two starts, are passed over, with a warning that says why. Where no manager has
        saved any, the newest whole one of another make. Raises ConnectorError for a failure of the store `to`, CheckpointError
        if there are checkpoints and none is whole, or none tells its step, and for `step` what is wrong with it, FormatError.
        """
        if self._nodes is not None:
            self._warn_of_missing(self._nodes)
        found = self._whole(step)
        return found if step is not None or self.starts is None else self.starts.passing(found)

    def _whole(self, step: int | None) -> Iterator[tuple[int, str]]:
        problem: Exception | None = None
        has_found = False
        tried: set[int] = set()
        while True:
            there = self._generations()
            steps = sorted({number for found in there.values() for number in found}, reverse=True)
            # What was tried may be gone because newer ones were saved: those are next.
            left = [number for number in (steps if step is None else [step]) if number not in tried]
            for number in left:
                for url, error in self._looked_at(number, there, is_chosen=step is not None):
                    if error is None:
                        has_found = True
                        yield number, url
                    problem = problem or error
            tried |= {*left}
            if not left:
                break
        if not has_found and step not in steps and (step is not None or not tried):
            for found in self._far.of_another_make(step):
                has_found = True
                yield found
        if has_found or problem is None:
            return
        if step is not None and step not in steps:
            there_are = (
                f"there are {', '.join(map(str, steps[:8]))}{', ...' if len(steps) > 8 else ''}"
                if steps
                else "none is there"
            )
            raise CheckpointError(f"{problem}. Of the steps that are committed {there_are}") from problem
        if step is not None:
            raise problem
        raise CheckpointError(
            f"none of the {len(steps)} checkpoints in {' and '.join(there)} is whole, so nothing is restored; the newest: "
            f"{problem}. To begin anew, remove them or save to another directory"
        )

    def _generations(self) -> dict[str, dict[int, int]]:
        """By directory. Nodes that have a whole step can do without an answer from `to`."""
        there = {self._near.url: self._near.generations()}
        try:
            return there | {directory.url: directory.generations() for directory in self._directories()[1:]}
        except ConnectorError as error:
            if self._nodes is None or not there[self._near.url]:
                raise
            logger.warning("%s may have newer checkpoints than the nodes do, and cannot be asked: %s", self._far, error)
            return there | {self._far.url: {}}

    def _warn_of_missing(self, nodes: JobNodes) -> None:
        for name, missing in sorted(nodes.store.view("step-").missing.items()):
            logger.warning(
                "%s is passed over: none of %d nodes has %s%s of it",
                *(name, len(nodes.members), missing[0], f" and {len(missing) - 1} more files" if missing[1:] else ""),
            )

    def _looked_at(
        self, step: int, there: Mapping[str, Mapping[int, int]], *, is_chosen: bool
    ) -> Iterator[tuple[str, Exception | None]]:
        """(URL, what is wrong with it, None if it is whole) of a step, by the directories' `generations`."""
        # Another machine may have saved it since; of the same age the local one comes first.
        ages = {url: generations.get(step, -1) for url, generations in there.items()}
        for directory in sorted(self._directories(), key=lambda item: -ages[item.url]):
            is_last = directory is self._far
            if ages[directory.url] < 0 and not (is_chosen and is_last):
                continue
            try:
                directory.checked(step)
            except (CheckpointError, FormatError, ConnectorError) as error:
                if not is_chosen and not is_there(directory.url_of(step), self._connectors):
                    continue  # removed since it was listed
                if is_last and isinstance(error, ConnectorError):
                    raise
                if not (is_chosen and is_last):
                    warn_damaged(directory.url_of(step), error)
                yield directory.url_of(step), error
            else:
                yield directory.url_of(step), None

    def base_of(self, step: int) -> str | None:
        """For a step that was found to have no state of optimizers: the URL of the newest whole one before it that has; None:
        there is none."""
        with suppress(CheckpointError):
            for other, url in self.whole():
                if other < step and other not in self._partial:
                    return url
        return None

    def is_partial(self, step: int) -> bool:
        """True for a step that was found to have no state of optimizers."""
        return step in self._partial

    def is_local(self, url: str) -> bool:
        """True for a checkpoint that is not where checkpoints last."""
        return self._near is not self._far and url.startswith(self._near.url_of(0)[: -len(step_name(0))])

    def _directories(self) -> list[RunDirectory]:
        return [self._far] if self._near is self._far else [self._near, self._far]

    # ----------------------------------------------------------------------------------------------------- uploads

    def raise_failure(self) -> None:
        """Raise what an upload has met, once, on rank 0."""
        if self._uploads is not None:
            self._uploads.raise_failure()

    def finish_replicas(self, within_s: float | None = None) -> None:
        """Return once all nodes have their replicas, or after `within_s`, on every rank. Raises PeerError."""
        if self._nodes is not None:
            self._nodes.finish(within_s)

    def upload_s(self, chosen: Callable[[Iterable[float]], float]) -> float | None:
        """Of what the last uploads have taken; None: there was none, or this is not rank 0."""
        times_s = [] if self._uploads is None else self._uploads.times_s()
        return float(chosen(times_s)) if times_s else None

    def upload_running_s(self) -> float | None:
        """For how long an upload has been running; None: none is."""
        return None if self._uploads is None else self._uploads.running_s()

    def finish(self, within_s: float | None = None) -> None:
        """Return once all is uploaded, or after `within_s`, on every rank. Raises what that met; PeerError on ranks other than
        0."""
        if self._local is None:
            return
        board, key = self._board, f"uploads-{self._num_finished}"
        self._num_finished += 1
        if self._uploads is None:
            assert board is not None
            board.wait_for(key, 0, about=key, doing="rank 0 uploads checkpoints")
            board.count(f"{key}/seen")
        elif board is None:
            self._uploads.finish(within_s)
        else:
            try:
                with board.alive(key):
                    self._uploads.finish(within_s)
            except BaseException as error:
                board.fail(key, error)
                raise
            board.post(key)
            board.count(f"{key}/seen")

    @property
    def last_key(self) -> str | None:
        """What the messages of the last `finish` begin with."""
        return None if self._num_finished == 0 else f"uploads-{self._num_finished - 1}"

    def stats(self) -> dict[str, float]:
        """Of the uploads, on rank 0, and of the replicas, on the first rank of each node."""
        uploads = {} if self._uploads is None else self._uploads.stats()
        return uploads | ({} if self._nodes is None else self._nodes.stats())

    def close(self) -> None:
        """Close the connectors, and give other nodes nothing any more. Idempotent."""
        if self._nodes is not None:
            self._nodes.close()
        for directory in self._directories():
            directory.close()

    # ---------------------------------------------------------------------------------------------- at the beginning

    def _agree_on_directories(self) -> None:
        """Raise on every rank if the directories are not to be used: what is wrong shows now, and not hours later."""
        board = self._board
        if board is None:
            with self._checked():
                return
        if board.rank > 0:
            name = board.wait_for(_CHECKED, 0, about=_CHECKED, doing=_DOING).decode()
            self._look_for(name)
            return
        with ExitStack() as probes:
            try:
                name = probes.enter_context(self._checked())
            except BaseException as error:
                board.fail(_CHECKED, error)
                raise
            board.post(_CHECKED, name.encode())
            self._look_for(name)

    @contextmanager
    def _checked(self) -> Iterator[str]:
        """The directories can be written to, and no two are the same; the name of a file in the local one, "" without.

        Raises ConfigError.
        """
        if self._near is not self._far:
            self._check_claim()
        copies = [RunDirectory(url, self._connectors) for url in self._copies]
        roles = [("to", self._far), *([("local", self._near)] if self._near is not self._far else [])]
        names: dict[str, str] = {}
        with ExitStack() as probes:
            for copy in copies:
                probes.callback(copy.close)
            for key, directory in [*roles, *(("copies", copy) for copy in copies)]:
                for other, name in names.items():
                    if name and directory.has(name):
                        raise ConfigError(
                            f"{key}: {directory} is the same directory as that of {other!r}: give another"
                        )
                names[key if key != "copies" else str(directory)] = probes.enter_context(self._probed(directory, key))
            yield names.get("local", "")

    @contextmanager
    def _probed(self, directory: RunDirectory, key: str) -> Iterator[str]:
        """While there is a file of this name in the directory; "": it has failed in a way that may be over soon."""
        with ExitStack() as probes:
            try:
                name = probes.enter_context(directory.probed())
            except (ConfigError, AccessDeniedError, ObjectNotFoundError) as error:
                raise ConfigError(
                    f"{key}: checkpoints cannot be saved to {directory}: {error}. A job that only reads checkpoints needs no "
                    "manager: loaderkit.restore(loaderkit.checkpoint.latest(url), nested=True)"
                ) from error
            except ConnectorError as error:
                logger.warning("%s cannot be written to now, and saving will fail if that lasts: %s", directory, error)
                name = ""
            yield name

    def _look_for(self, name: str) -> None:
        """Raise ConfigError unless all ranks see the file in the local directory."""
        board = self._board
        assert board is not None
        if not name or self._nodes is not None:
            return
        is_there = False
        with suppress(ConnectorError):
            is_there = self._near.read(name) is not None
        board.post(f"{_SEEN}/{board.rank}", b"" if is_there else socket.gethostname().encode())
        hosts = [data.decode() for data in board.collect(_SEEN, doing=_DOING)]
        blind = [(rank, host) for rank, host in enumerate(hosts) if host]
        if blind:
            rank, host = blind[0]
            raise ConfigError(
                f"local: {len(blind)} of {len(board)} ranks, such as {board.global_ranks[rank]} on {host}, do not see in "
                f"{self._near} what rank {board.global_ranks[0]} has written there: a checkpoint would be split over the "
                "machines. Give a directory that all ranks share, or `replicas: 1`, with which each machine has its own"
            )

    def _check_claim(self) -> None:
        data = self._near.read(_CLAIM)
        claims = [] if data is None else [data] if self._nodes is None else self._nodes.store.copies_of(_CLAIM)
        for claim in claims:
            try:
                owner = json.loads(claim)["to"]
            except (ValueError, KeyError, TypeError):
                owner = "?"
            if owner != self._far.url:
                raise ConfigError(
                    f"local: {self._near} holds checkpoints that belong to {owner}, not to {self._far}: restoring would take "
                    f"them for this run's. Give each run its own directory; if `to` has moved, remove {self._near}/{_CLAIM}"
                )
        self._is_claimed = bool(claims) and self._nodes is None  # a node that is new has none


def warn_damaged(url: str, error: object) -> None:
    """Say that a checkpoint is passed over, and why."""
    logger.warning("%s is passed over: %s", printable(url), error)
