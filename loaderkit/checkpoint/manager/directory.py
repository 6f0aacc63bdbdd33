"""The directory of a run's checkpoints: which steps are committed, which is the newest whole one, and which are to go."""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from loaderkit.checkpoint.discovery.kinds import METADATA, is_beside, step_in
from loaderkit.checkpoint.discovery.latest import examined
from loaderkit.checkpoint.discovery.listing import candidates_below, newest_s, url_below
from loaderkit.checkpoint.discovery.locate import SAVING, NothingThereError, SaveTarget, locate, save_target
from loaderkit.checkpoint.discovery.manifest import NAME
from loaderkit.checkpoint.formats.dcp import read_metadata
from loaderkit.checkpoint.formats.state_file import STATE, read_state
from loaderkit.checkpoint.left_out import is_left_out
from loaderkit.checkpoint.manager.retention import SavedStep, steps_to_keep
from loaderkit.checkpoint.manager.settings import KeepArgs
from loaderkit.checkpoint.restore.source import OpenCheckpoint
from loaderkit.checkpoint.save.commit import clear_dead
from loaderkit.checkpoint.save.occupied import OccupiedDirectory
from loaderkit.checkpoint.save.owner import this_process
from loaderkit.checkpoint.save.placement import (
    Placement,
    generation_of,
    listed,
    marker_key,
    put_marker,
    read_object,
    unfinished_saves,
)
from loaderkit.checkpoint.save.prune import remove_directory
from loaderkit.checkpoint.structure import OWN_KEY
from loaderkit.connectors.base import Connector, ObjectInfo, writes_of
from loaderkit.errors import CheckpointError, ConfigError, ConnectorError, FormatError, ObjectNotFoundError, printable

logger = logging.getLogger("loaderkit")
_METRIC = f"{OWN_KEY}.metrics."
_STEP = re.compile(r"step-(\d+)")


def step_name(step: int) -> str:
    """The name of a step's directory."""
    return f"step-{step:010d}"


class RunDirectory:
    """The directory `url`, which need not be there yet; `with_metrics`: what `saved` gives has metrics; `partial`: the steps
    that are known to have no state of optimizers. Any thread may ask; one at a time removes."""

    def __init__(
        self,
        url: str,
        connectors: Mapping[str, Connector],
        *,
        with_metrics: bool = False,
        partial: set[int] | None = None,
    ) -> None:
        self._url = url
        self._connectors = connectors
        self._with_metrics = with_metrics
        self._partial = set[int]() if partial is None else partial
        self._known: dict[int, SavedStep] = {}
        self._lock = threading.Lock()
        self._target: SaveTarget | None = None
        self._is_closed = False
        self._occupied: OccupiedDirectory | None = None
        self._has_failed = False  # to remove, so that something of it may be left
        self._has_warned = False
        self._foreign: set[str] = set()  # steps without a manifest that no manager has saved

    def __str__(self) -> str:
        return printable(self._url)

    @property
    def url(self) -> str:
        """The directory's URL."""
        return self._url

    def url_of(self, step: int) -> str:
        """The URL of a step's checkpoint."""
        return url_below(self._url, step_name(step))

    def committed(self) -> list[int]:
        """The steps that have a manifest, ascending. Raises ConnectorError."""
        with self._opened() as target:
            return sorted(_manifests(target))

    def generations(self) -> dict[int, int]:
        """The largest number in the names of files of each committed step; with `local` that is when it was saved, in
        milliseconds. Raises ConnectorError."""
        found: dict[int, int] = {}
        with self._opened() as target:
            infos = list(listed(target.connector, f"{target.parent}step-"))
            committed = _manifests_in(target, infos)
            for info in infos:
                folder, _, name = info.key[len(target.parent) :].partition("/")
                step = _step_in(folder)
                if step in committed:
                    found[step] = max(found.get(step, 0), generation_of(name) or 0)
        return found

    def checked(self, step: int) -> int:
        """The step, if its checkpoint is whole. Raises CheckpointError, FormatError, ConnectorError."""
        with OpenCheckpoint.open(self.url_of(step), self._connectors, "2GiB", True) as source:
            if any(map(is_left_out, (*source.contents.values, *source.contents.pickled))):
                self._partial.add(step)
            return step

    def find_partial(self) -> None:
        """Find out which of the newest steps have no state of optimizers, back to one that has it. Raises ConnectorError."""
        for step in sorted(self.committed(), reverse=True):
            with suppress(CheckpointError, FormatError):
                if self.checked(step) not in self._partial:
                    return

    def of_another_make(self, step: int | None = None) -> Iterator[tuple[int, str]]:
        """(step, URL) of the newest whole checkpoint here that no manager has saved, or of that of `step`, if there is one.

        Raises CheckpointError if there are such checkpoints and none is whole, or none has a name that tells its step.
        """
        try:
            location = locate(self._url, self._connectors)
        except NothingThereError:
            return
        try:
            names = [name for name in candidates_below(location) if not is_beside(name)]
        finally:
            location.close()
        broken: list[str] = []
        unnumbered: list[str] = []
        for name, problem in examined(self._url, names, "auto", self._connectors):
            number, is_named_so = step_in(name), _step_in(name) is not None
            if step is not None and number != step:
                continue
            url = url_below(self._url, name) if name else self._url
            is_own = self._is_own(name) if is_named_so else False
            if problem is not None and is_own is False:
                (unnumbered if number is None else broken).append(str(problem))
            if problem is not None or is_own:
                continue
            if number is None:
                raise CheckpointError(
                    f"{printable(url)} is a whole checkpoint whose name tells no step, and no CheckpointManager has saved one: "
                    "training would begin anew. Restore it by loaderkit.restore(url, into=...), call it step-0, or move it "
                    "elsewhere"
                )
            yield number, url
            return
        if broken:
            raise CheckpointError(
                f"none of the {len(broken)} checkpoints in {self} is whole, so nothing is restored; the newest: {broken[0]}. "
                "To begin anew, remove them or save to another directory"
            )
        if unnumbered and not self._has_warned:
            self._has_warned = True
            logger.warning("no checkpoint is in %s; of what may be one: %s", self, printable(unnumbered[0]))

    def _is_own(self, name: str) -> bool | None:
        """True for what a manager has saved: if it has lost its manifest, it is being removed, or copied.

        None: nothing in it says by whom, as of a save that was cut off.
        """
        with self._opened() as target:
            for description in (METADATA, STATE):
                try:
                    return _is_of_manager(target, name, description)
                except ObjectNotFoundError:
                    continue
                except FormatError:
                    return False
        return None

    def note(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        """Remember what was saved when, in seconds since 1970."""
        self._known[step] = SavedStep(step, time_s, dict(metrics))

    def saved(self) -> dict[int, SavedStep]:
        """What the rules of retention ask about each committed step. Raises ConnectorError."""
        with self._opened() as target:
            return self._saved(target)

    def retain(
        self, keep: KeepArgs | None, others: Callable[[dict[int, SavedStep]], Collection[int]] = lambda saved: ()
    ) -> None:
        """Remove the steps that no rule of `keep` names, and that are not among `others`. Remove what an earlier removal has
        left that was cut off.

        A store that fails is a warning, as what was saved is committed all the same: the next call tries again.
        """
        if keep is None:
            return
        try:
            with self._opened() as target:
                if self._has_failed:  # the next save clears it only if it is one of this process
                    clear_dead(target, writes_of(target.connector))
                    self._has_failed = False
                saved = self._saved(target)
                kept = steps_to_keep([*saved.values()], keep, time.time()) | {*others(saved)}
                for step in sorted(saved.keys() - kept):
                    _remove(target, step_name(step))
                    self._known.pop(step, None)
                for name in self._cut_off(target):
                    _remove(target, name)
        except (CheckpointError, FormatError, ConnectorError) as error:
            self._has_failed = True
            logger.warning("old checkpoints in %s are not removed: %s", self, error)

    def clear_cut_off(self) -> None:
        """Clear what dead saves and copies left, and the steps whose manifest is missing: of a removal or a copy that was cut
        off. Raises ConnectorError."""
        with self._opened() as target:
            clear_dead(target, writes_of(target.connector))
            for name in self._cut_off(target):
                _remove(target, name)

    def is_being_written(self, step: int) -> bool:
        """True if a process that is not known to be dead saves that step here, or copies it. Raises ConnectorError."""
        with self._opened() as target:
            return any(save.name == step_name(step) and save.is_running for save in unfinished_saves(target))

    def occupy(self) -> None:
        """Say that this process saves here, until `close`, and tell of others that do."""
        with self._lock:
            if self._is_closed or self._occupied is not None:
                return
        with self._opened() as target:
            self._occupied = OccupiedDirectory(target, str(self))

    def close(self) -> None:
        """Close the connector, unless it was given; what asks later opens another one. Idempotent."""
        with self._lock:
            self._is_closed = True
            target, self._target = self._target, None
            occupied, self._occupied = self._occupied, None
        if occupied is not None:
            occupied.close()
        if target is not None:
            target.close()

    def read(self, name: str) -> bytes | None:
        """A small file in the directory; None: there is none. Raises ConnectorError."""
        with self._opened() as target:
            try:
                return read_object(target.connector, target.parent + name)
            except ObjectNotFoundError:
                return None

    def has(self, name: str) -> bool:
        """True if there is such a file in the directory, and it can be read."""
        with suppress(ConnectorError):
            return self.read(name) is not None
        return False

    def put(self, name: str, data: bytes) -> None:
        """Write a small file into the directory, durably. Raises ConnectorError."""
        with self._opened() as target:
            writes_of(target.connector).put(target.parent + name, data)

    def names(self, prefix: str) -> list[str]:
        """The names that begin so, of files in the directory and below it. Raises ConnectorError."""
        with self._opened() as target:
            return [info.key[len(target.parent) :] for info in listed(target.connector, target.parent + prefix)]

    def remove(self, name: str) -> None:
        """Remove a small file; a missing one is no error. Raises ConnectorError."""
        with self._opened() as target:
            writes_of(target.connector).delete(target.parent + name)

    @contextmanager
    def probed(self) -> Iterator[str]:
        """Write a small file, and remove it after the block; its name. The next save clears it after a process that died.

        Raises ConnectorError, and ConfigError for a store that is only read.
        """
        with self._opened() as target:
            try:
                writes = writes_of(target.connector)
            except ConnectorError as error:
                raise ConfigError(str(error)) from error
            attempt, probe = secrets.token_hex(8), target._replace(name="probe")
            folder = f"{target.parent}{SAVING}probe.{attempt}/"
            placement = Placement(attempt, 0, this_process(), folder, 0, in_place=False)
            key = marker_key(probe, placement)
            put_marker(probe, writes, placement)
            try:
                yield key[len(target.parent) :]
            finally:
                with suppress(ConnectorError):
                    writes.delete(key)

    @contextmanager
    def _opened(self) -> Iterator[SaveTarget]:
        with self._lock:
            is_closed = self._is_closed
            if not is_closed and self._target is None:
                self._target = save_target(self.url_of(0), self._connectors)
            kept = self._target
        target = save_target(self.url_of(0), self._connectors) if kept is None else kept
        try:
            yield target
        finally:
            if kept is None:
                target.close()

    def _cut_off(self, target: SaveTarget) -> list[str]:
        """The steps of a manager that have lost their manifest, and that no running process saves.

        In this order: what is being saved has a marker first and a manifest before the marker goes.
        """
        described = {
            name: key
            for info in listed(target.connector, f"{target.parent}step-")
            for name, _, key in [info.key[len(target.parent) :].partition("/")]
            if key in (METADATA, STATE)
        }
        names = described.keys() - self._foreign
        if not names:
            return []
        names -= {save.name for save in unfinished_saves(target) if save.is_running}
        names -= {step_name(step) for step in _manifests(target)}
        found = []
        for name in sorted(names):
            if _step_in(name) is None:
                continue
            if _is_of_manager(target, name, described[name]):
                found.append(name)
            else:
                self._foreign.add(name)
        return found

    def _saved(self, target: SaveTarget) -> dict[int, SavedStep]:
        """What an earlier run of the job may have saved is asked for in the store, once."""
        manifests = _manifests(target)
        for step, manifest in manifests.items():
            if step not in self._known:
                metrics = self._metrics(step) if self._with_metrics else {}
                self.note(step, metrics, newest_s(target.connector, [manifest]) or time.time())
        return {step: replace(self._known[step], is_partial=step in self._partial) for step in manifests}

    def _metrics(self, step: int) -> dict[str, Any]:
        """None of a checkpoint that is damaged."""
        try:
            with OpenCheckpoint.open(self.url_of(step), self._connectors, "2GiB", "auto") as source:
                names = [
                    name for name in (*source.contents.values, *source.contents.pickled) if name.startswith(_METRIC)
                ]
                return {name.removeprefix(_METRIC): value for name, value in source.plain_values(names).items()}
        except (CheckpointError, FormatError) as error:
            logger.warning("the metrics of %s count as none: %s", printable(self.url_of(step)), error)
            return {}


def _is_of_manager(target: SaveTarget, name: str, description: str) -> bool:
    """Raises FormatError, ConnectorError."""
    data = read_object(target.connector, f"{target.parent}{name}/{description}")
    values = read_metadata(data).values if description == METADATA else read_state(data).values
    return f"{OWN_KEY}.step" in values


def _manifests(target: SaveTarget) -> dict[int, str]:
    """Step -> the key of its manifest, for the directories that are named as `step_name` does."""
    return _manifests_in(target, listed(target.connector, f"{target.parent}step-"))


def _manifests_in(target: SaveTarget, infos: Iterable[ObjectInfo]) -> dict[int, str]:
    found = {}
    for info in infos:
        name, _, rest = info.key[len(target.parent) :].partition("/")
        step = _step_in(name)
        if step is not None and rest == NAME:
            found[step] = info.key
    return found


def _step_in(name: str) -> int | None:
    """The step of a directory that is named as `step_name` does."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match is not None and name == step_name(int(match[1])) else None


def _remove(target: SaveTarget, name: str) -> None:
    """Remove a step: in one go it is none any more, and what is left when this is cut off is found by the next save.

    Where the store cannot rename, that takes that `.metadata`, which says whose it is, goes last.
    """
    step, writes, prefix = target._replace(name=name), writes_of(target.connector), f"{target.parent}{name}/"
    attempt = secrets.token_hex(8)
    aside = f"{target.parent}{SAVING}{name}.{attempt}/"
    placement = Placement(attempt, 0, this_process(), aside, 0, in_place=False)
    put_marker(step, writes, placement)  # by it the next save finds the directory even when nothing is left in it
    if writes.rename(prefix, aside):
        prefix = aside
    remove_directory(target.connector, prefix, list(listed(target.connector, prefix)))
    writes.delete(marker_key(step, placement))
