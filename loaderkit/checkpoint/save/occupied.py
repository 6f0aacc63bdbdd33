"""Says in the directory of a run that this job saves there, and tells of others that do.

<parent>/.saving-job.<attempt>.json     from the first save on until `close`; what a dead job left is cleared by the next save
"""

from __future__ import annotations

import logging
import os
import secrets
import time
import weakref
from contextlib import suppress
from functools import partial

from loaderkit.checkpoint.discovery.locate import SAVING, SaveTarget
from loaderkit.checkpoint.save.owner import MAX_SILENCE_S, Heartbeat, Owner, this_process
from loaderkit.checkpoint.save.placement import Placement, marker_key, put_marker, unfinished_saves
from loaderkit.connectors.base import writes_of
from loaderkit.errors import ConnectorError, printable

logger = logging.getLogger("loaderkit")
_NAME = "job"


class OccupiedDirectory:
    """The directory that `target` is in, in which this process saves until `close`, or until it ends. `text` names it in
    messages."""

    def __init__(self, target: SaveTarget, text: str) -> None:
        """A store that fails is no error: nothing depends on it."""
        attempt = secrets.token_hex(8)
        folder = f"{target.parent}{SAVING}{_NAME}.{attempt}/"
        target = target._replace(name=_NAME)
        placement = Placement(attempt, time.monotonic_ns(), this_process(), folder, 0, in_place=False)
        renew = partial(_renew, target, text, placement, set[Owner]())  # without `self`, which the thread would keep
        self._heartbeat = Heartbeat(attempt, renew)
        self._leave = weakref.finalize(self, _leave, target, placement)
        with suppress(ConnectorError):
            renew()

    def close(self) -> None:
        """This process saves there no longer. Idempotent."""
        self._heartbeat.stop()
        self._leave()


def _renew(target: SaveTarget, text: str, placement: Placement, told: set[Owner]) -> None:
    """Say that this process saves there, and name others that do, once each."""
    put_marker(target, writes_of(target.connector), placement)
    for save in unfinished_saves(target):
        owner = None if save.placement is None else save.placement.owner
        if save.name != _NAME or owner is None or owner in {placement.owner, *told} or not save.is_running:
            continue
        told.add(owner)
        logger.warning(
            "process %d on %s saves into %s, too%s: each removes what its own `keep` does not name, and the next start "
            "goes on from the newest step of either. Stop one of the two, or give it another directory",
            *(owner.pid, printable(owner.host), text),
            "" if owner.is_alive() else f", or has died within the last {MAX_SILENCE_S / 60:.0f} minutes",
        )


def _leave(target: SaveTarget, placement: Placement) -> None:
    if placement.owner.pid != os.getpid():  # a fork's child ends
        return
    with suppress(Exception):  # at the end of a program its store may be closed
        writes_of(target.connector).delete(marker_key(target, placement))
