"""The notice that a job will be ended soon: a signal at any rank, upon which all ranks agree on one step.

signal ──> noted by its rank ──> asked at its next step ──> each rank posts the step at which it sees that, and goes on
           (nothing else in the handler)                ──> all have posted: the step after the last of theirs
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from loaderkit.errors import ConfigError
from loaderkit.ranks.board import Board

logger = logging.getLogger("loaderkit")


class SignalNotice:
    """Notes signals instead of letting them end the process, until `close`, which restores what was there.

    A child of `os.fork` has the handlers that were there before: it does not ask for the notice, and its parent ends it
    by a signal (`Process.terminate`, `Pool.terminate`).
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Raises ConfigError outside the main thread, where Python sets no handlers."""
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "notice.signals: signals can be noted in the main thread only: make the CheckpointManager there, or leave "
                "`notice` out"
            )
        self._noted: int | None = None
        self._numbers = {signal.Signals[name].value for name in names}
        for number in self._numbers:
            if signal.getsignal(number) is not _note:
                previous = signal.signal(number, _note)
                _PREVIOUS[number] = signal.SIG_DFL if previous is None else previous
            _NOTICES.setdefault(number, []).append(self)

    def note(self, number: int) -> None:
        """A signal came."""
        self._noted = number

    @property
    def name(self) -> str | None:
        """The signal that came; None: none did."""
        return None if self._noted is None else signal.Signals(self._noted).name

    def close(self) -> None:
        """Put the previous handlers back, unless others were set since, or other notices note the signals. Idempotent."""
        for number in self._numbers:
            notices = _NOTICES.get(number, [])  # a fork's child has none of its parent's
            if self not in notices:
                continue
            notices.remove(self)
            if not notices and signal.getsignal(number) is _note:
                signal.signal(number, _PREVIOUS.pop(number))
        self._numbers = set()


_NOTICES: dict[int, list[SignalNotice]] = {}  # by signal: those that note it
_PREVIOUS: dict[int, Any] = {}  # the handlers before the first of them


def _note(number: int, frame: FrameType | None) -> None:
    for notice in _NOTICES.get(number, ()):
        notice.note(number)


def _leave_to_child() -> None:
    """Give a fork's child the handlers that were there before any notice."""
    for number, previous in _PREVIOUS.items():
        if signal.getsignal(number) is _note:
            signal.signal(number, previous)
    _PREVIOUS.clear()
    _NOTICES.clear()


os.register_at_fork(after_in_child=_leave_to_child)


class StepAgreement:
    """A step that all ranks agree on, because one of them asks for it. Every rank calls `reached` after each of its steps.

    No rank waits for another here: one that has looked already may be in the next step, in a collective that needs this one.
    Once a rank asks, every rank posts the step at which it sees that. When the last one posts, after its step m, no other is
    past step m + 1, whose collectives need that rank; so all see that all have posted after step m + 1, and that is the step.
    """

    def __init__(self, board: Board | None, key: str, asks: Callable[[], str | None]) -> None:
        """`board` is None for a job of one rank; `asks` gives the reason why this rank asks, or None."""
        self._board = board
        self._key = key
        self._asks = asks
        self._has_posted = False
        self._looked: int | None = None
        self._agreed: int | None = None

    def reached(self, step: int) -> bool:
        """True if this is the agreed step, or a later one; the same answer when it is called again for a step."""
        if self._agreed is None and (self._looked is None or step > self._looked):
            self._look(step)
            self._looked = step
        return self._agreed is not None and step >= self._agreed

    def messages(self) -> list[str]:
        """The keys of its messages, which can be removed once all ranks have agreed."""
        ranks = range(len(self._board)) if self._board is not None else ()
        return [f"{self._key}/asked", *(f"{self._key}/at/{rank}" for rank in ranks)]

    def _look(self, step: int) -> None:
        board, key = self._board, self._key
        reason = None if self._has_posted else self._asks()
        if board is None:
            if reason is not None:
                self._agreed = step
                logger.info("after step %d: %s", step, reason)
            return
        if not self._has_posted:
            if reason is not None:
                board.post(f"{key}/asked", reason.encode())
            elif not board.has(f"{key}/asked"):
                return
            board.post(f"{key}/at/{board.rank}", str(step).encode())
            self._has_posted = True
            return
        posted = [f"{key}/at/{rank}" for rank in range(len(board))]
        if board.has(*posted):
            self._agreed = 1 + max(int(board.read(item)) for item in posted)
            logger.info("after step %d: %s", self._agreed, board.read(f"{key}/asked").decode())
