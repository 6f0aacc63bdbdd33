"""`CheckpointManager`: saves the state of a training job behind training, keeps what is to be kept, and restores the newest."""

from __future__ import annotations

import hashlib
import json
import logging
import operator
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, SupportsIndex

import torch

from loaderkit.checkpoint.left_out import saved_left_out
from loaderkit.checkpoint.manager.flush import Copies, Flush, ProcessFlush, ThreadFlush
from loaderkit.checkpoint.manager.notice import EndNotice, StepAgreement
from loaderkit.checkpoint.manager.restoring import restore_newest
from loaderkit.checkpoint.manager.saving import Saving, messages_of, wait_for_others
from loaderkit.checkpoint.manager.settings import save_settings
from loaderkit.checkpoint.manager.tiers import Tiers
from loaderkit.checkpoint.restore.renamed import Renaming
from loaderkit.checkpoint.restore.selection import parse_strict
from loaderkit.checkpoint.restore.stateful import left_out_in, restore_state
from loaderkit.checkpoint.save.safetensors.writer import check_plain_values, model_config_of
from loaderkit.checkpoint.save_log import SAVES
from loaderkit.checkpoint.state import (
    FlatState,
    ResolvedState,
    leaves_of,
    num_bytes_of,
    resolve,
    without_optimizers,
)
from loaderkit.checkpoint.structure import OWN_KEY, RUN, saved_objects, saved_structure, saved_without
from loaderkit.checkpoint.timing.costs import Extent
from loaderkit.checkpoint.timing.pace import SavePace
from loaderkit.connectors.base import Connector
from loaderkit.errors import CheckpointError, ClosedError, ConfigError, printable
from loaderkit.ranks.board import Board, board_with_address, open_board
from loaderkit.ranks.store import default_store

logger = logging.getLogger("loaderkit")
_SECONDS = ("waiting_s", "staging_s", "flush_s", "hashing_s", "writing_s", "syncing_s", "commit_s")


class CheckpointManager:
    """The checkpoints of a training job: directories `step-0000001000/` in one directory, in torch.distributed.checkpoint's
    format, or as safetensors (see `StreamWriter`).

    `target` is the directory (a path, or a URL such as s3://bucket/runs/a), a mapping, or the path of a .yaml file with `to`,
    `local`, `every`, `mtbf`, `keep`, `format`, `optimizer_keys`, `when_busy`, `flush`, `copies`, `replicas` and `notice`; each
    may be given by name instead. With `local` they are committed there first, and uploaded by rank 0 behind training; with
    `replicas` each node has its own, and a part of another's. With several ranks of torch.distributed, or of `process_group`,
    each makes one and calls the same methods. `timeout_s`: how long a rank waits for another of which it hears nothing. It is a
    context manager: at the end, what is being written, replicated and uploaded is waited for.

    The state is a nested dict of tensors, DTensors, plain values and objects with `state_dict` and `load_state_dict`: modules,
    optimizers, schedulers, the loader, `loaderkit.checkpoint.RngState()`; what each rank has for itself as a `PerRank`.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | Mapping[str, Any],
        *,
        local: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        every: int | str | None = None,
        mtbf: float | str | None = None,
        keep: Mapping[str, Any] | None = None,
        format: str | None = None,  # noqa: A002 (as in the YAML)
        optimizer_keys: str | None = None,
        when_busy: str | None = None,
        flush: str | None = None,
        copies: Sequence[Mapping[str, Any]] | None = None,
        replicas: int | None = None,
        notice: Mapping[str, Any] | None = None,
        timeout_s: float = 300.0,
        process_group: Any = None,
        connectors: Mapping[str, Connector] | None = None,
    ) -> None:
        """Raises ConfigError that names file, line and key, also if the directories cannot be written to, which rank 0 tries;
        MissingExtraError without the package for the store; ConnectorError if `local` cannot be read."""
        self.settings = save_settings(
            target,
            local=local,
            every=every,
            mtbf=mtbf,
            keep=keep,
            format=format,
            optimizer_keys=optimizer_keys,
            when_busy=when_busy,
            flush=flush,
            copies=copies,
            replicas=replicas,
            notice=notice,
        )
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
            raise ConfigError(f"timeout_s {timeout_s!r}: expected a number of seconds above 0")
        self._process_group, self._timeout_s = process_group, timeout_s
        self._connectors = dict(connectors or {})
        is_apart = self.settings.flush == "process"
        self._board = _board(process_group, timeout_s, with_address=is_apart)
        self._tiers = Tiers(self.settings, self._connectors, self._board, timeout_s=timeout_s)
        self._starts = self._tiers.starts
        self._flush: Flush = (ProcessFlush if is_apart else ThreadFlush)(
            self._tiers.url_of(0),
            self._connectors,
            self._board,
            format=self.settings.format,
            unique_names=self.settings.local is not None,
        )
        self._copies = Copies(self.settings.copies, self._flush, self._board)
        self._saving: Saving | None = None
        self._num_saves = self._num_restores = self._num_asked = 0
        self._answers: list[str] = []  # keys of what rank 0 has said since the last save began
        self._last_step: int | None = None
        self._chosen: int | None = None  # the step that `restore` was told to take, until a save after it
        self._last_s = monotonic()
        self._stats = {"num_saved": 0, "num_skipped": 0} | dict.fromkeys(_SECONDS, 0.0)
        self._last_stats: dict[str, Any] | None = None
        self._closed = False
        self._extent: Extent | None = None  # of the save upon a notice that leaves a time
        self._pace = SavePace(
            self._tiers,
            mtbf_s=self.settings.mtbf,
            has_local=self.settings.local is not None,
            uploads_all=self.settings.local is not None and self.settings.keep is None,
        )
        try:
            self._notice = None if self.settings.notice is None else EndNotice(self.settings.notice)
        except BaseException:
            self._flush.close()
            self._tiers.close()
            raise
        self._preemption = StepAgreement(self._board, "notice", self._noticed, self._end_s)
        self._due = self._next_due()
        self._tiers.start()

    # ------------------------------------------------------------------------------------------------------- when

    def should_save(self, step: SupportsIndex) -> bool:
        """True if `save(step, ...)` would save: `every` says so, or a notice came. All ranks agree on the step."""
        number = _whole(step)
        self._has_stepped()
        if number == self._last_step:
            return False
        return self._is_due(number) or self.reached_preemption(number)

    def reached_preemption(self, step: SupportsIndex) -> bool:
        """True from the step on after which the job is to stop, the same on every rank; that step is saved, if `save` is called
        for every step before this."""
        self._has_stepped()
        if self.settings.notice is None:
            return False
        return self._preemption.reached(_whole(step))

    def _has_stepped(self) -> None:
        """The start has come to a step: what it has restored did not end it."""
        if self._starts is not None:
            self._starts.done()

    def _noticed(self) -> str | None:
        return None if self._notice is None else self._notice.reason

    def _end_s(self) -> float | None:
        return None if self._notice is None else self._notice.end_s

    def _is_due(self, step: int) -> bool:
        every = self.settings.every
        if every is None:
            return True
        return step % every.steps == 0 if every.steps is not None else self._due.reached(step)

    def _next_due(self) -> StepAgreement:
        """The agreement on the next step that a duration in `every` asks for; rank 0 has the clock."""
        every, begin_s = self.settings.every, self._last_s
        has_clock = self._board is None or self._board.rank == 0

        def asks() -> str | None:
            if not has_clock or every is None or every.steps is not None:
                return None
            seconds = self._pace.interval_s() if every.seconds is None else every.seconds
            return "the time is over" if monotonic() - begin_s >= seconds else None

        return StepAgreement(self._board, f"due-{self._num_saves}", asks)

    # ------------------------------------------------------------------------------------------------------- save

    def save(
        self,
        step: SupportsIndex,
        state: dict[str, Any],
        *,
        force: bool = False,
        wait: bool = False,
        metrics: Mapping[str, Any] | None = None,
    ) -> Saving | None:
        """Save `state` as step `step`, if that is due, or with `force`; None: it was not, or was skipped.

        Returns once the state is copied to host memory; a thread or a process writes and commits it. `wait`: returns once it
        is committed. `metrics` are numbers for `keep.best`, which may be NumPy's or tensors of one element. Raises what the
        previous save met; its checkpoint is then not there, and those before it stand. Raises what an upload has met, on rank
        0: this step is being saved all the same, and the upload is tried again. Raises ConfigError for a state that could not
        be restored, and after `restore(state, step=)` if there are later whole steps than this one, as the next start would
        take those.
        """
        self._check_open()
        number, numbers = _whole(step), _numbers(metrics or {})
        self._has_stepped()
        if self._chosen is not None:
            self._tiers.check_rewound(self._chosen, number)
            self._chosen = None
        if self._saving is not None and self._saving.step == number and self._saving.error is not None:
            self._wait()  # raises it: that step is not there
        if not force and not self.should_save(number):
            return None
        is_end = force or self.reached_preemption(number)
        if self._is_skipped(number, is_end):
            self._stats["num_skipped"] += 1
            return None
        waited_s = self._wait()
        saving = self._begin(number, state, numbers, waited_s, is_end=is_end)
        if wait:
            self._wait()
        self._tiers.raise_failure()
        return saving

    def _is_skipped(self, step: int, is_forced: bool) -> bool:
        """True if a save is being written, and this one is left out for that; rank 0 decides."""
        if self.settings.when_busy == "wait" or is_forced:
            return False
        is_busy = self._saving is not None and not self._saving.is_done
        if self._board is None:
            return is_busy
        key = f"busy/{self._num_asked}"
        self._num_asked += 1  # what was said of a step before does not hold when it is tried again
        if self._board.rank == 0:
            self._board.post(key, b"1" if is_busy else b"0")
            self._answers.append(key)
            return is_busy
        return self._board.wait_for(key, 0, about=key, doing="the ranks agree on whether to skip a save") == b"1"

    def _begin(
        self, step: int, state: dict[str, Any], metrics: Mapping[str, float], waited_s: float, *, is_end: bool
    ) -> Saving:
        begin_s = time.perf_counter()
        key, last_key = f"save-{self._num_saves}", f"save-{self._num_saves - 1}"
        self._num_saves += 1
        try:
            copy = self._flush.stage(self._resolved(state, step, metrics, key, is_end=is_end))
        except BaseException as error:
            if self._board is not None:
                self._board.fail(key, error)
            raise
        staging_s = time.perf_counter() - begin_s
        self._stats["staging_s"] += staging_s
        SAVES.add_pause(staging_s=staging_s)
        board, extent = self._board, self._extent
        states, asked = [copy], [*self._due.messages(), *self._answers]
        self._answers = []
        del copy

        def work(saving: Saving) -> None:
            state = states.pop()
            try:
                with self._tiers.writing(step):
                    stats = self._flush.write(state, self._tiers.url_of(step), key)
            except BaseException as error:
                if board is not None:
                    board.fail(key, error)
                raise
            saving.stats |= stats
            if self._copies.due(step) and extent is None:
                states.append(state)

        def afterwards() -> None:
            self._tiers.replicate(step)
            if self._is_first():
                if board is not None:
                    board.remove([*messages_of(board, last_key), *asked])
                self._committed(saving, metrics, extent)
            if states:
                saving.stats["copies"] = self._copies.write(step, states.pop(), self._tiers.url_of(step), key)

        self._saving = saving = Saving(step, work, afterwards)
        saving.stats |= {"waiting_s": waited_s, "staging_s": staging_s}
        if extent is not None:
            saving.stats["extent"] = extent._asdict()
        self._last_step, self._last_s = step, monotonic()
        self._due = self._next_due()
        saving.start()
        return saving

    def _committed(self, saving: Saving, metrics: Mapping[str, float], extent: Extent | None) -> None:
        """Rank 0's part of what is to be done after a commit."""
        if extent is None:
            self._pace.add(saving.stats, None if self._notice is None else self._notice.shutdown_timeout_s)
        self._tiers.committed(saving.step, metrics, extent)

    def _is_first(self) -> bool:
        return self._board is None or self._board.rank == 0

    def _resolved(
        self, state: dict[str, Any], step: int, metrics: Mapping[str, float], key: str, *, is_end: bool
    ) -> FlatState:
        """What to save of the state, with step and metrics, which are rank 0's. Raises ConfigError for what could not be
        restored."""
        if isinstance(state, dict) and OWN_KEY in state:
            raise ConfigError(f"state: the key {OWN_KEY!r} is the manager's own: give it another name")
        keys, own = self.settings.optimizer_keys, dict[str, Any]()
        if keys == "auto" and self.settings.format != "dcp":
            keys = "numbers"
        resolved = resolve(state, keys)
        if self._board is not None:
            own |= saved_objects(resolved.objects)
        if self.settings.format == "safetensors":
            check_plain_values(resolved.flat.values)
        if self.settings.format == "safetensors" or self.settings.copies:
            own |= model_config_of(state)
        if self._is_first():
            own |= {"step": step, "metrics": dict(metrics)}
            if self._is_paced():
                own |= {RUN.removeprefix(f"{OWN_KEY}."): self._pace.saved(is_end=is_end)}
        self._extent = self._extent_of(step, resolved, key)
        if self._extent is not None and not self._extent.whole:
            flat = resolved.flat
            resolved, without = without_optimizers(resolved)
            own |= saved_without(saved_left_out(without, flat))
        return resolved.flat.plus({OWN_KEY: own | saved_structure(resolved.containers)})

    def _is_paced(self) -> bool:
        """True if what saving costs decides something in this run."""
        every, notice = self.settings.every, self.settings.notice
        return (every is not None and every.is_auto) or (notice is not None and notice.within is not None)

    def _extent_of(self, step: int, resolved: ResolvedState, key: str) -> Extent | None:
        """How much is saved where a notice leaves a time, as rank 0 says; None: the whole, however long that takes."""
        notice = self._preemption
        if self.settings.notice is None or not notice.reached(step) or notice.end_s is None:
            return None
        board, about = self._board, f"{key}/extent"
        if board is not None and board.rank > 0:
            said = board.wait_for(about, 0, about=key, doing="the ranks agree on how much to save")
            return Extent(*json.loads(said))
        without, left_out = without_optimizers(resolved)
        whole_bytes = num_bytes_of(resolved.flat)
        share = num_bytes_of(without.flat) / whole_bytes if left_out and whole_bytes else None
        extent = self._pace.extent(step, notice.reason, notice.end_s, share)
        if board is not None:
            board.post(about, json.dumps(extent).encode())
        return extent

    def wait_until_finished(self) -> None:
        """Return once nothing is being written, and all is uploaded. Raises what the last save or an upload met, once; an
        upload that has failed before is tried again."""
        self._check_open()
        self._wait()
        self._tiers.finish_replicas()
        self._tiers.finish()

    def _wait(self) -> float:
        """Wait for the save that is being written; for how long, in seconds. Raises what it met."""
        saving = self._saving
        if saving is None:
            return 0.0
        begin_s = time.perf_counter()
        saving.join()
        waited_s = time.perf_counter() - begin_s
        SAVES.add_pause(waiting_s=waited_s)
        self._stats["waiting_s"] += waited_s
        self._add_flush(saving.stats)
        self._saving = None
        if not saving.is_committed and self._last_step == saving.step:
            self._last_step = None  # it may be saved again
        saving.raise_error()
        if not saving.is_committed:
            raise CheckpointError(
                f"the save of step {saving.step} was interrupted before writing began: it is not there"
            )
        self._stats["num_saved"] += 1
        return waited_s

    def _add_flush(self, stats: Mapping[str, Any]) -> None:
        self._last_stats = dict(stats)
        for name in ("flush_s", "commit_s"):
            self._stats[name] += stats.get(name) or 0.0
        for times in (times for files in stats.get("ranks", {}).values() for times in files.values()):
            for name in ("hashing_s", "writing_s", "syncing_s"):
                self._stats[name] += times[name]

    # ----------------------------------------------------------------------------------------------------- restore

    def restore(
        self,
        state: dict[str, Any],
        step: SupportsIndex | None = None,
        *,
        strict: bool | Mapping[str, str | Iterable[str]] = True,
        rename: Mapping[str, str] | None = None,
    ) -> int | None:
        """Restore `state` in place from the newest whole checkpoint, or from that of `step`; the step. None: there is none.

        It may have been saved by any number of ranks. One that is damaged is passed over with a warning that says why, also if
        that shows only while it is read: of a step in `local` for the same in `to`, then for the one before. If none is left,
        that is an error. One that two starts have restored that then ended, by an error or killed, before the first call of
        `save`, is passed over likewise, unless it is asked for by `step`. Where no CheckpointManager has saved one, the newest
        of another make is taken, such as of dcp.save or torch.save, if its name tells its step. Raises CheckpointError, before
        anything is written, if names, shapes or dtypes do not fit, and if there are checkpoints and none can be taken.

        `strict` and `rename` are those of `loaderkit.restore`, with names as in "model.head.weight":
        `strict={"missing": "model.head.*", "unexpected": "model.rotary.*"}` gives globs: what the checkpoint lacks of the
        state, or has in another shape, keeps its values, and what only the checkpoint has is left out (all of that with
        `strict=False`); `rename={"net.": "model."}` maps how names begin in the checkpoint to how they begin here. All ranks
        give the same.
        """
        self._check_open()
        strictness = parse_strict(strict)
        if rename:
            Renaming(rename)  # raises ConfigError
        number = None if step is None else _whole(step)
        leaves_of(state)
        self._wait()
        key = f"restore-{self._num_restores}"
        self._num_restores += 1

        run: str | None = None

        def restore(url: str, of: str | None, begun: set[str]) -> None:
            nonlocal run
            run = restore_state(
                url,
                state,
                process_group=self._process_group,
                timeout_s=self._timeout_s,
                connectors=self._connectors,
                strict=strictness,
                rename=rename,
                only=None if of is None else left_out_in(of, connectors=self._connectors, rename=rename),
                begun=begun,
            )

        with nullcontext() if self._starts is None else self._starts.told():
            chosen = restore_newest(
                self._tiers, number, restore, board=self._board, key=key, connectors=self._connectors
            )
        if chosen is not None:
            self._last_step = chosen
            self._chosen = number
            self._pace.resume(run)
        return chosen

    def latest_step(self) -> int | None:
        """The largest step of which there is a committed checkpoint, as `all_steps` has them; None: there is none."""
        return max(self.all_steps(), default=None)

    def all_steps(self) -> list[int]:
        """The steps of which there is a committed checkpoint, in `local` or `to`, ascending. Where no CheckpointManager has
        saved one, the newest of another make."""
        return self._tiers.steps()

    # ------------------------------------------------------------------------------------------------------- end

    def stats(self) -> dict[str, Any]:
        """Counts, and seconds of all saves so far.

        `waiting_s` for the save before and `staging_s` to copy to host memory are training's pause; `flush_s` from then until
        it was committed. `hashing_s`, `writing_s`, `syncing_s`: of all threads together, of the ranks that this one knows of
        (itself, or at rank 0 all). `commit_s`: at rank 0. `last`: `Saving.stats` of the last save that is over, with the same
        by rank and file; None: there is none. At rank 0 with `local`: `num_uploaded`, `num_superseded` (not uploaded, as `keep`
        names newer ones only), `num_failed_uploads`, `uploaded_bytes`, `upload_s`. At the first rank of each node with
        `replicas`: `num_replicated`, `num_failed_replicas`, `replicated_bytes`, `replica_s`. A save upon a notice with `within`
        has `extent`: `whole`, `place` and the `seconds` that were expected.
        """
        return {**self._stats, **self._tiers.stats(), "last": self._last_stats}

    def close(self) -> None:
        """Wait for what is being written and uploaded, and end. Raises what it met. Idempotent."""
        for _, failure in self._end():
            raise failure

    def _end(self, cause: BaseException | None = None) -> list[tuple[str, Exception]]:
        """Close; what was not done, and why. `cause`: what this rank has met, with which the others cannot go on."""
        if self._closed:
            return []
        self._closed = True
        if self._starts is not None:
            self._starts.end(cause)
        failures = []
        try:
            for what, end in (("saved", self._end_saving), ("uploaded", partial(self._end_uploads, cause))):
                try:
                    end()
                except Exception as failure:
                    failures.append((what, failure))
        finally:
            if self._notice is not None:
                self._notice.close()
            self._flush.close()
            self._tiers.close()
        return failures

    def _end_saving(self) -> None:
        self._wait()
        if self._board is not None and self._board.rank == 0 and self._num_saves:
            for key in (f"save-{self._num_saves - 1}", *self._copies.keys):
                wait_for_others(self._board, key)

    def _end_uploads(self, cause: BaseException | None) -> None:
        if cause is not None and self._board is not None:
            if self._saving is None:  # an interrupted wait leaves the last save to its thread
                self._board.leave("the block of its CheckpointManager", cause)
            if self._board.rank > 0:
                return
        if self._extent is not None:
            self._end_in_time(self._extent, cause)
        else:
            try:
                if cause is None:
                    self._tiers.finish_replicas()
            finally:
                self._tiers.finish()
        key = self._tiers.last_key
        if cause is None and self._board is not None and self._board.rank == 0 and key is not None:
            wait_for_others(self._board, key)

    def _end_in_time(self, extent: Extent, cause: BaseException | None) -> None:
        """After a save upon a notice: wait for what it saved, as long as there is time. The next run does the rest."""
        end_s = self._preemption.end_s
        if end_s is None:
            return
        try:
            if extent.place == "to":
                self._tiers.finish(max(0.0, self._pace.left_s(end_s)))
        finally:
            if cause is None:
                self._tiers.finish_replicas(max(0.0, self._pace.left_s(end_s)))

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # sys.exit() in the block is an orderly end, too.
        cause = None if isinstance(error, SystemExit) and error.code in (None, 0) else error
        for what, failure in self._end(cause):
            if error is None:
                raise failure
            logger.warning("the last checkpoint was not %s: %s", what, failure)  # the error of the block says more

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this CheckpointManager is closed: make another one")


def _whole(step: Any) -> int:
    """The number of a step; NumPy's and tensors of one element count. Raises ConfigError."""
    with suppress(TypeError, ValueError, RuntimeError):
        number = -1 if isinstance(step, bool) else operator.index(step)
        if number >= 0:
            return number
    raise ConfigError(f"step {step!r}: expected a number of steps from 0 on")


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Raises ConfigError."""
    numbers = {}
    for name, value in metrics.items():
        try:
            if type(name) is not str or isinstance(value, (bool, str)):
                raise TypeError
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise ConfigError(
                f"metrics: expected numbers by name, such as {{'loss': 0.5}}, not {name!r}: {value!r}"
            ) from None
    return numbers


def _board(process_group: Any, timeout_s: float, *, with_address: bool) -> Board | None:
    """What the ranks agree by; None for one rank."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        if (num := os.environ.get("WORLD_SIZE", "1")) not in ("", "0", "1"):
            logger.warning(
                "WORLD_SIZE is %s, and torch.distributed is not initialised: this rank saves and restores alone, as the others "
                "do, and in one directory they replace one another's steps. Call init_process_group before making the "
                "CheckpointManager; if each rank has a directory of its own, that is all right",
                printable(num),
            )
        return None
    if distributed.get_world_size(process_group) == 1:
        return None
    ranks = distributed.get_process_group_ranks(process_group or distributed.group.WORLD)
    group = hashlib.sha256(repr(ranks).encode()).hexdigest()[:12]
    # Equal on all ranks, as all of them make each manager.
    number = default_store().add(f"loaderkit/managers/{group}/{distributed.get_rank()}", 1)
    board = open_board(f"manager-{group}-{number}", process_group, timeout_s=timeout_s)
    return board_with_address(board) if with_address else board
