"""Uploads what is committed in the local directory to the one that lasts, behind training, the newest first.

committed ──> queue ──> is it to be kept there? ──> copied, compared with its manifest on the way ──> committed there
                        no: superseded              (save/copy.py, as fast as `bandwidth` allows)      ──> retention, in both
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loaderkit._internal.system.program_end import ProgramEndsError, program_ends, start_thread
from loaderkit._internal.units import say_seconds, say_size
from loaderkit.checkpoint.manager.bandwidth import Bandwidth
from loaderkit.checkpoint.manager.directory import RunDirectory
from loaderkit.checkpoint.manager.retention import SavedStep, steps_to_keep
from loaderkit.checkpoint.manager.settings import KeepArgs
from loaderkit.checkpoint.save.copy import copy_checkpoint
from loaderkit.checkpoint.save.owner import MAX_SILENCE_S
from loaderkit.connectors.base import Connector
from loaderkit.errors import CheckpointError, ConnectorError, FormatError, printable

logger = logging.getLogger("loaderkit")
_FINAL = (CheckpointError, FormatError)  # another attempt would end like this one
_ENDED = "The program ended without `close`; the next run goes on with the upload"
_NO_TIME = "A notice left no time for it; the next run goes on with the upload"
_NUM_REMEMBERED = 5


class Uploads:
    """The uploads from `near` to `far`, by one thread that is there while there is something to do.

    What the rules `keep` of `far` would not keep, because newer ones are there or wait, is superseded and not uploaded. An
    upload that fails is tried again with the next save, and by `finish`; one that cannot succeed, as its source is damaged, is
    not.
    """

    def __init__(
        self,
        near: RunDirectory,
        far: RunDirectory,
        *,
        keep: KeepArgs | None,
        bandwidth: int | None,
        connectors: dict[str, Connector],
        uploaded: Callable[[], None],
    ) -> None:
        """`uploaded` is called after each upload, from the first save on."""
        self._near, self._far, self._keep, self._connectors = near, far, keep, connectors
        self._bandwidth = Bandwidth(bandwidth)
        self._uploaded = uploaded
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()  # as Ctrl-C in `Thread.join` makes Python 3.11 and 3.12 take a thread for ended
        self._is_asked = False
        self._versions: dict[int, int] = {}  # step -> how often this process has begun to save it
        self._being_saved: int | None = None
        self._done: dict[int, int] = {}  # step -> the version of it that is in `far`
        self._given_up: dict[int, int] = {}
        self._others: set[int] = set()  # saved by this process, and not uploaded as another seems to be at that step
        self._queue: set[int] = set()
        self._last: int | None = None  # the step that was saved last
        self._current: int | None = None
        self._error: Exception | None = None
        self._is_told = False
        self._last_s: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._begin_s: float | None = None  # of the upload that is running
        self._only: int | None = None  # with `end_with`: the one step that is uploaded yet
        self._is_broken_off = False
        self._stats = {
            "num_uploaded": 0,
            "num_superseded": 0,
            "num_failed_uploads": 0,
            "uploaded_bytes": 0,
            "upload_s": 0.0,
        }

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """While the block saves a step in `near`, which may be there already and is replaced."""
        with self._lock:
            self._versions[step] = self._versions.get(step, 0) + 1
            self._being_saved = step
        try:
            yield
        finally:
            with self._lock:
                self._being_saved = None

    def add(self, step: int) -> None:
        """A step is committed in `near`."""
        with self._lock:
            self._queue.add(step)
            self._last = step
        self.start()

    def start(self) -> None:
        """Upload what is in `near` and not in `far`; an earlier run may have left it."""
        try:
            with self._lock:
                self._is_asked = True
                if self._thread is None:
                    # Not a daemon: when the program ends it ends after the part, and clears what it wrote.
                    thread = threading.Thread(target=self._run, name="loaderkit-upload")
                    start_thread(thread)
                    self._thread = thread
                    self._idle.clear()
        except ProgramEndsError:
            self._settle(ConnectorError(_ENDED))

    def end_with(self, step: int | None) -> None:
        """Upload nothing but `step` any more, after what is being uploaded. None: nothing, and break off what is."""
        with self._lock:
            self._only, self._is_broken_off = -1 if step is None else step, step is None

    def times_s(self) -> list[float]:
        """What the last uploads have taken."""
        with self._lock:
            return [*self._last_s]

    def running_s(self) -> float | None:
        """For how long an upload has been running; None: none is."""
        with self._lock:
            return None if self._begin_s is None else time.perf_counter() - self._begin_s

    def finish(self, within_s: float | None = None) -> None:
        """Return once there is nothing to upload any more. What has failed is tried again. Raises what that met, and
        ConnectorError for what was saved and is left to another process. After `within_s` what is left is left to the next
        run."""
        deadline_s = None if within_s is None else time.monotonic() + within_s
        with self._lock:
            is_failed = self._error is not None and not isinstance(self._error, _FINAL)
            is_left = self._thread is None and (is_failed or bool(self._others))
        if is_left:
            self.start()
        while (thread := self._running()) is not None:
            self._idle.wait(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
            if deadline_s is not None and time.monotonic() >= deadline_s:
                self.end_with(None)
                return
            thread.join()
        self.raise_failure()
        with self._lock:
            others = sorted(self._others)
        if others:
            raise ConnectorError(
                f"{self._near.url_of(others[-1])} is not uploaded to {self._far}: another process uploads that step, or has "
                f"died at it within the last {MAX_SILENCE_S / 60:.0f} minutes. It stands; the next run goes on with the upload"
            )

    def _running(self) -> threading.Thread | None:
        with self._lock:
            return self._thread

    def raise_failure(self) -> None:
        """Raise what the last upload met, unless it was raised before, or a later attempt has succeeded."""
        with self._lock:
            error, is_told = self._error, self._is_told
            self._is_told = True
        if error is not None and not is_told:
            raise error

    def stays(self, saved: dict[int, SavedStep]) -> set[int]:
        """Of the steps in `near`, those that may be the only durable ones: they wait for their upload, or are uploaded now."""
        with self._lock:
            current = set() if self._current is None else {self._current}
            return {step for step in self._to_keep(saved) if not self._is_done(step)} | current

    def stats(self) -> dict[str, float]:
        """Counts, bytes and seconds."""
        with self._lock:
            return dict(self._stats)

    # ------------------------------------------------------------------------------------------------------- thread

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._is_asked:
                    self._thread = None
                    self._idle.set()
                    return
                self._is_asked = False
            step = None
            try:
                while (chosen := self._next()) is not None:
                    step, version = chosen
                    self._upload(step, version)
                step = None
                self._settle(None)
            except Exception as error:
                self._settle(error, step)

    def _next(self) -> tuple[int, int] | None:
        """The step to upload now, and its version; None: there is none. Counts those that are superseded.

        The version is that of before the step is read: if it is saved again meanwhile, it is to be uploaded again.
        """
        near = self._near.saved()
        saved = near if self._keep is None else self._far.saved() | near
        with self._lock:
            kept = self._to_keep(saved)
            left = self._queue - kept
            self._queue &= kept
            self._stats["num_superseded"] += len(left)
            ready = (near.keys() & kept) - {self._being_saved}
            wanted = [step for step in ready if not self._is_done(step) and self._only in (None, step)]
            wanted = [step for step in wanted if self._given_up.get(step) != self._versions.get(step, 0)]
            versions = {step: self._versions.get(step, 0) for step in wanted}
        others = {step for step in wanted if self._is_others(step)}
        free = [step for step in sorted(wanted, key=self._order) if step not in others]
        with self._lock:
            self._others = {step for step in others if versions[step]}
            self._current = free[0] if free else None
        return (free[0], versions[free[0]]) if free else None

    def _order(self, step: int) -> tuple[bool, int]:
        return step != self._last, -step

    def _is_others(self, step: int) -> bool:
        """True if another process uploads a step: that is left to it, and looked at again with the next save."""
        if not self._far.is_being_written(step):
            return False
        logger.info("%s is being uploaded by another process", printable(self._near.url_of(step)))
        return True

    def _upload(self, step: int, version: int) -> None:
        begin_s = self._begin_s = time.perf_counter()
        try:
            if not version and self._is_older(step):
                logger.info(
                    "%s was saved before that in %s, which stays", printable(self._near.url_of(step)), self._far
                )
                with self._lock:
                    self._done[step] = version
                return
            self._far.clear_cut_off()
            copied = copy_checkpoint(
                self._near.url_of(step),
                self._far.url,
                connectors=self._connectors,
                pace=self._pace,
                replace=True,
                direct=True,
            )
        except Exception as error:
            self._check_running()
            if self._versions.get(step, 0) != version or step not in self._near.committed():
                # It was removed meanwhile, or saved again, so that its files are others.
                logger.info("%s changed while it was uploaded", printable(self._near.url_of(step)))
            elif isinstance(error, _FINAL) and (not version or self._is_lost_here_only(step)):
                # What an earlier run has left would else end each start, at its first save.
                self._given_up[step] = version
                logger.warning("%s is not uploaded to %s: %s", self._near.url_of(step), self._far, error)
            else:
                raise
            return
        finally:
            with self._lock:
                self._current = self._begin_s = None
        took_s = time.perf_counter() - begin_s
        with self._lock:
            self._done[step] = version
            self._queue.discard(step)
            if not copied.was_there:
                self._stats["num_uploaded"] += 1
                self._stats["uploaded_bytes"] += copied.num_bytes
                self._stats["upload_s"] += took_s
                self._last_s.append(took_s)
        if not copied.was_there:
            logger.info("%s: %s uploaded in %s", printable(copied.url), say_size(copied.num_bytes), say_seconds(took_s))
            known = self._near.saved().get(step)
            if known is not None:
                self._far.note(step, known.metrics, known.time_s)
        if self._last is not None:  # before the first save, a step that is to go may be the one that is being restored
            if not copied.was_there:
                self._far.retain(self._keep, lambda saved: {step})
            self._uploaded()

    def _is_older(self, step: int) -> bool:
        """True for what an earlier run has left of a step that was saved again since, from another machine."""
        return self._far.generations().get(step, -1) > self._near.generations().get(step, 0)

    def _is_lost_here_only(self, step: int) -> bool:
        """True if a step is not whole in `near`, and committed in `far`."""
        if step not in self._far.committed():
            return False
        try:
            self._near.checked(step)
        except (CheckpointError, FormatError):
            return True
        return False

    def _pace(self, num_bytes: int) -> None:
        self._check_running()
        self._bandwidth.wait(num_bytes, self._check_running)

    def _check_running(self) -> None:
        """Raise ConnectorError if the program ends, or `end_with` says so."""
        if self._is_broken_off or program_ends():
            raise ConnectorError(_NO_TIME if self._is_broken_off else _ENDED)

    def _settle(self, error: Exception | None, step: int | None = None) -> None:
        """All is uploaded, or a step has failed."""
        with self._lock:
            if error is None:
                if self._is_told or not isinstance(self._error, _FINAL):
                    self._error = None
                return
            self._error, self._is_told = error, False
            self._stats["num_failed_uploads"] += 1
            if step is not None and isinstance(error, _FINAL):
                self._given_up[step] = self._versions.get(step, 0)
                self._is_asked = True  # there may be others
        what = self._near if step is None else self._near.url_of(step)
        logger.warning("%s is not uploaded to %s; it stands. %s", printable(str(what)), self._far, error)

    # ------------------------------------------------------------------------------------------------- with the lock

    def _to_keep(self, saved: dict[int, SavedStep]) -> set[int]:
        if self._keep is None:
            return set(saved)
        kept = steps_to_keep([*saved.values()], self._keep, time.time())
        return kept if self._last is None else kept | {self._last}

    def _is_done(self, step: int) -> bool:
        return self._done.get(step) == self._versions.get(step, 0)
