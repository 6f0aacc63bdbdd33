"""Which starts have begun with a checkpoint and did not come to a step: a small file for each, beside the checkpoint.

restore ──> .starting-STEP.ID.json written ──> restored ──> first step, or an orderly end ──> removed
                                               killed, or an error before that: it stays, and counts against the step

Rank 0 alone does this. StartLog at the same time have files of their own, so none writes over another's.
"""

from __future__ import annotations

import atexit
import json
import logging
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from loaderkit.checkpoint.discovery.kinds import step_in
from loaderkit.checkpoint.discovery.locate import STARTING
from loaderkit.checkpoint.save.owner import Owner, this_process
from loaderkit.errors import CheckpointError, ConnectorError, PeerError, printable

logger = logging.getLogger("loaderkit")
MAX_STARTS = 2
"""After so many starts that ended, a checkpoint is passed over."""
_NAME = re.compile(re.escape(STARTING) + r"step-(\d+)\.[0-9a-f]{16}\.json")


class Notes(Protocol):
    """A directory with small files. Each call may raise ConnectorError."""

    def names(self, prefix: str) -> list[str]:
        """The names that begin so."""

    def read(self, name: str) -> bytes | None:
        """A file; None: there is none."""

    def put(self, name: str, data: bytes) -> None:
        """Write a file, durably."""

    def remove(self, name: str) -> None:
        """Remove a file; a missing one is no error."""


class StartLog:
    """The starts of a run, in its directory. What the store does not let happen is a warning: it holds up no start."""

    def __init__(self, directory: Notes) -> None:
        self._directory = directory
        self._own: str | None = None
        self._counted: set[int] | None = None  # the steps that starts have ended with

    def passing(self, found: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        """Of checkpoints (step, URL) those that did not end two starts; a warning names each of the others.

        Raises CheckpointError if that is all of them.
        """
        ended: Counter[int] | None = None
        passed: set[int] = set()
        has_passed_one_on = False
        for step, url in found:
            ended = self._ended() if ended is None else ended
            if ended[step] < MAX_STARTS:
                has_passed_one_on = True
                yield step, url
            elif step not in passed:
                passed.add(step)
                logger.warning(
                    "%s is passed over: %d starts that restored it ended before their first step, killed or by an error. To "
                    "take it all the same: restore(state, step=%d), or remove %sstep-%010d.* beside it",
                    *(printable(url), ended[step], step, STARTING, step),
                )
        if passed and not has_passed_one_on:
            raise CheckpointError(
                f"every checkpoint in {self._directory} has ended {MAX_STARTS} starts, the newest that of step {max(passed)}: "
                "nothing is restored, and training does not begin anew. If the fault was not in them: "
                f"restore(state, step={max(passed)}), or remove the files {STARTING}* there"
            )

    def begin(self, url: str) -> None:
        """This start begins to restore the checkpoint `url`."""
        self.done()
        step = step_in(url.rstrip("/").rpartition("/")[2])
        if step is None:
            return
        name = f"{STARTING}step-{step:010d}.{secrets.token_hex(8)}.json"
        said = {"version": 1, "time_s": time.time(), "owner": this_process()._asdict()}
        try:
            self._directory.put(name, json.dumps(said).encode())
        except ConnectorError as error:
            logger.warning("if %s ends this start, the next one will not know: %s", printable(url), error)
            return
        self._own = name
        atexit.register(self._at_exit)

    @contextmanager
    def told(self) -> Iterator[None]:
        """An error of the block is the program's to tell, and does not count. That another rank has died does."""
        try:
            yield
        except PeerError:
            raise
        except BaseException:
            self.done()
            raise

    def done(self) -> None:
        """This start has come to a step."""
        if self._own is None:
            return
        name, self._own = self._own, None
        atexit.unregister(self._at_exit)
        with suppress(ConnectorError):
            self._directory.remove(name)

    def end(self, cause: BaseException | None) -> None:
        """This start ends, by the error `cause` or in order. A signal that was noted, and Ctrl-C, make an orderly end."""
        if cause is None or isinstance(cause, KeyboardInterrupt):
            self.done()
        self._own = None
        atexit.unregister(self._at_exit)

    def forget(self, step: int) -> None:
        """The step was saved anew."""
        with suppress(ConnectorError):
            if self._counted is None:
                self._ended()
            if self._counted and step in self._counted:
                self._counted.discard(step)
                for name in self._directory.names(f"{STARTING}step-{step:010d}."):
                    self._directory.remove(name)

    def _ended(self) -> Counter[int]:
        """How many starts have ended with each step. One that still runs on this machine is none."""
        ended: Counter[int] = Counter()
        try:
            for name in self._directory.names(STARTING):
                match = _NAME.fullmatch(name)
                if match is not None and name != self._own and not _is_alive(self._directory.read(name)):
                    ended[int(match[1])] += 1
        except ConnectorError as error:
            logger.warning("whether checkpoints have ended starts is not known: %s", error)
        self._counted = {*ended}
        return ended

    def _at_exit(self) -> None:
        """The program ends without `close`; in order, unless an error that nothing caught ends it."""
        self.end(getattr(sys, "last_value", None))


def _is_alive(data: bytes | None) -> bool:
    try:
        said: Any = json.loads(data or b"")
        return Owner(**said["owner"]).is_alive() is True
    except (ValueError, KeyError, TypeError):
        return data is None  # removed meanwhile
