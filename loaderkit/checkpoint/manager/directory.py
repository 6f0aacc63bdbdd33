"""The directory of a run's checkpoints: which steps are committed, which is the newest whole one, and which are to go."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from loaderkit.checkpoint.discovery.detect import METADATA
from loaderkit.checkpoint.discovery.listing import newest_s, url_below
from loaderkit.checkpoint.discovery.locate import SAVING, SaveTarget, save_target
from loaderkit.checkpoint.discovery.manifest import NAME
from loaderkit.checkpoint.formats.dcp import read_metadata
from loaderkit.checkpoint.manager.retention import SavedStep, steps_to_keep
from loaderkit.checkpoint.manager.settings import KeepArgs
from loaderkit.checkpoint.restore.source import OpenCheckpoint
from loaderkit.checkpoint.restore.stateful import OWN_KEY
from loaderkit.checkpoint.save.owner import this_process
from loaderkit.checkpoint.save.placement import Placement, listed, marker_key, put_marker, read_object, unfinished_saves
from loaderkit.checkpoint.save.prune import remove_directory
from loaderkit.connectors.base import Connector, writes_of
from loaderkit.errors import CheckpointError, ConnectorError, FormatError, printable

logger = logging.getLogger("loaderkit")
_METRIC = f"{OWN_KEY}.metrics."
_STEP = re.compile(r"step-(\d+)")


def step_name(step: int) -> str:
    """The name of a step's directory."""
    return f"step-{step:010d}"


class RunDirectory:
    """The directory `url`, which need not be there yet."""

    def __init__(self, url: str, connectors: Mapping[str, Connector]) -> None:
        self._url = url
        self._connectors = connectors
        self._known: dict[int, SavedStep] = {}
        self._foreign: set[str] = set()  # steps without a manifest that no manager has saved

    def url_of(self, step: int) -> str:
        """The URL of a step's checkpoint."""
        return url_below(self._url, step_name(step))

    def committed(self) -> list[int]:
        """The steps that have a manifest, ascending. Raises ConnectorError."""
        target = save_target(self.url_of(0), self._connectors)
        try:
            return sorted(_manifests(target.connector, target.parent))
        finally:
            target.close()

    def newest_whole(self) -> int | None:
        """The largest step whose checkpoint is whole. Those that are damaged are passed over, with a warning that says why."""
        for step in reversed(self.committed()):
            try:
                return self.checked(step)
            except (CheckpointError, FormatError) as error:
                logger.warning("%s is passed over: %s", printable(self.url_of(step)), error)
        return None

    def checked(self, step: int) -> int:
        """The step, if its checkpoint is whole. Raises CheckpointError, FormatError, ConnectorError."""
        with OpenCheckpoint.open(self.url_of(step), self._connectors, "2GiB", True):
            return step

    def retain(self, step: int, metrics: Mapping[str, float], keep: KeepArgs | None) -> None:
        """Remove the steps that no rule of `keep` names, after `step` was committed; it stays in any case. Remove what an
        earlier removal has left that was cut off.

        A store that fails is a warning, as the step is committed all the same: the next call tries again.
        """
        if keep is None:
            return
        self._known[step] = SavedStep(step, time.time(), dict(metrics))
        try:
            target = save_target(self.url_of(0), self._connectors)
        except ConnectorError as error:
            self._warn(error)
            return
        try:
            manifests = _manifests(target.connector, target.parent)
            saved = [self._saved(target.connector, other, key, keep) for other, key in manifests.items()]
            kept = steps_to_keep(saved, keep, time.time()) | {step}
            gone = [step_name(other) for other in sorted(manifests.keys() - kept)]
            for name in [*gone, *self._cut_off(target, {step_name(other) for other in manifests})]:
                _remove(target, name)
            self._known = {other: item for other, item in self._known.items() if other in kept}
        except (CheckpointError, FormatError, ConnectorError) as error:
            self._warn(error)
        finally:
            target.close()

    def _warn(self, error: Exception) -> None:
        logger.warning("old checkpoints in %s are not removed: %s", printable(self._url), error)

    def _cut_off(self, target: SaveTarget, committed: set[str]) -> list[str]:
        """The steps of a manager that have lost their manifest, and that no running process saves."""
        described = {
            info.key for info in listed(target.connector, f"{target.parent}step-") if info.key.endswith(METADATA)
        }
        names = (
            {key[len(target.parent) :].removesuffix(f"/{METADATA}") for key in described} - committed - self._foreign
        )
        if not names:
            return []
        found = []
        running = {save.name for save in unfinished_saves(target) if save.is_running}
        for name in sorted(names - running):
            match = _STEP.fullmatch(name)
            if match is None or name != step_name(int(match[1])):
                continue
            contents = read_metadata(read_object(target.connector, f"{target.parent}{name}/{METADATA}"))
            if f"{OWN_KEY}.step" in contents.values:
                found.append(name)
            else:
                self._foreign.add(name)
        return found

    def _saved(self, connector: Connector, step: int, manifest: str, keep: KeepArgs) -> SavedStep:
        """What the rules ask about a step, which an earlier run of the job may have saved."""
        if step not in self._known:
            metrics = self._metrics(step) if keep.best is not None else {}
            self._known[step] = SavedStep(step, newest_s(connector, [manifest]) or time.time(), metrics)
        return self._known[step]

    def _metrics(self, step: int) -> dict[str, Any]:
        with OpenCheckpoint.open(self.url_of(step), self._connectors, "2GiB", "auto") as source:
            names = [name for name in (*source.contents.values, *source.contents.pickled) if name.startswith(_METRIC)]
            return {name.removeprefix(_METRIC): value for name, value in source.plain_values(names).items()}


def _manifests(connector: Connector, parent: str) -> dict[int, str]:
    """Step -> the key of its manifest, for the directories that are named as `step_name` does."""
    found = {}
    for info in listed(connector, f"{parent}step-"):
        name, _, rest = info.key[len(parent) :].partition("/")
        match = _STEP.fullmatch(name)
        if match is not None and rest == NAME and name == step_name(int(match[1])):
            found[int(match[1])] = info.key
    return found


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
    remove_directory(writes, prefix, list(listed(target.connector, prefix)))
    writes.delete(marker_key(step, placement))
