"""Says in the directory of a run that this job saves there, and tells of others that do.

<parent>/.saving-job.<attempt>.json     from the first save to `close`; what a dead job left is cleared by the next save
"""

from __future__ import annotations

import logging
import secrets
import time
from contextlib import suppress

from loaderkit.checkpoint.discovery.locate import SAVING, SaveTarget
from loaderkit.checkpoint.save.owner import MAX_SILENCE_S, Heartbeat, Owner, this_process
from loaderkit.checkpoint.save.placement import Placement, marker_key, put_marker, unfinished_saves
from loaderkit.connectors.base import writes_of
from loaderkit.errors import ConnectorError, printable

logger = logging.getLogger("loaderkit")
_NAME = "job"


class OccupiedDirectory:
    """The directory that `target` is in, in which this process saves until `close`. `text` names it in messages."""

    def __init__(self, target: SaveTarget, text: str) -> None:
        """A store that fails is no error: nothing depends on it."""
        attempt = secrets.token_hex(8)
        folder = f"{target.parent}{SAVING}{_NAME}.{attempt}/"
        self._target, self._text = target._replace(name=_NAME), text
        self._placement = Placement(attempt, time.monotonic_ns(), this_process(), folder, 0, in_place=False)
        self._told: set[Owner] = set()
        self._heartbeat = Heartbeat(attempt, self._renew)
        with suppress(ConnectorError):
            self._renew()

    def _renew(self) -> None:
        put_marker(self._target, writes_of(self._target.connector), self._placement)
        for save in unfinished_saves(self._target):
            owner = None if save.placement is None else save.placement.owner
            if save.name != _NAME or owner in (None, this_process(), *self._told) or not save.is_running:
                continue
            self._told.add(owner)
            is_sure = owner.is_alive()
            logger.warning(
                "process %d on %s saves into %s, too%s: each removes what its own `keep` does not name, and the next start "
                "goes on from the newest step of either. Stop one of the two, or give it another directory",
                *(owner.pid, printable(owner.host), self._text),
                "" if is_sure else f", or has died within the last {MAX_SILENCE_S / 60:.0f} minutes",
            )

    def close(self) -> None:
        """This process saves there no longer. Idempotent."""
        self._heartbeat.stop()
        with suppress(ConnectorError):
            writes_of(self._target.connector).delete(marker_key(self._target, self._placement))
