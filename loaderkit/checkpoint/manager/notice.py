"""The notice that a job will be ended soon, at any rank, upon which all ranks agree on one step.

signal, file, URL, time ──> noted by its rank ──> asked at its next step ──> each rank posts the step at which it sees that, and
                            (nothing else in a handler)                      its own end, and goes on
                                                  ──> all have posted: the step after the last of theirs, the first of the ends
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from loaderkit.checkpoint.manager.settings import NoticeArgs
from loaderkit.checkpoint.timing.torchrun import shutdown_timeout_s
from loaderkit.checkpoint.timing.watch import NoticeWatch
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
        self.noted_s = 0.0
        """When the first signal came, in seconds of Unix time."""
        self.names = tuple(names)
        self._numbers = {signal.Signals[name].value for name in names}
        for number in self._numbers:
            if signal.getsignal(number) is not _note:
                previous = signal.signal(number, _note)
                _PREVIOUS[number] = signal.SIG_DFL if previous is None else previous
            _NOTICES.setdefault(number, []).append(self)

    def note(self, number: int) -> None:
        """A signal came."""
        if self._noted is None:
            self.noted_s = time.time()
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


class EndNotice:
    """All that may tell this rank of the end of its job. `clock` gives seconds of Unix time."""

    def __init__(self, args: NoticeArgs, *, clock: Callable[[], float] = time.time) -> None:
        """Raises ConfigError for signals outside the main thread, and for a time that is none."""
        self._within_s, self._clock = args.within, clock
        self._until_s = None if args.until is None else _end_of(args.until)
        if self._until_s is not None and self._until_s <= time.time():
            logger.warning(
                "notice.until: %s was %s, which is over: the job stops after its next step",
                args.until if isinstance(args.until, str) else "the end",
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._until_s)),
            )
        self._signals = SignalNotice(args.signals) if args.signals else None
        is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"
        self._watch = NoticeWatch(args.files, args.urls if is_first_here else ())

    @property
    def reason(self) -> str | None:
        """What told of the end; None: nothing did."""
        if self._signals is not None and self._signals.name is not None:
            return self._signals.name
        if self._watch.noted is not None:
            return self._watch.noted[0]
        if self._until_s is not None and self._within_s is not None and self._clock() >= self._until_s - self._within_s:
            return f"the job ends at {time.strftime('%H:%M:%S', time.localtime(self._until_s))}"
        return None

    @property
    def end_s(self) -> float | None:
        """When this rank must have ended, in seconds of Unix time; None: no notice came, or without `within`."""
        if self._within_s is None:
            return None
        ends = [] if self._until_s is None else [self._until_s]
        if self._signals is not None and self._signals.name is not None:
            killed_s = shutdown_timeout_s(self._signals.name)
            ends.append(self._signals.noted_s + min(self._within_s, killed_s or self._within_s))
        if self._watch.noted is not None:
            ends.append(self._watch.noted[1] + self._within_s)
        return min(ends, default=None)

    @property
    def shutdown_timeout_s(self) -> float | None:
        """How long torchrun lets this process live after one of the signals; None: it has not started it, or handles none."""
        limits = [] if self._signals is None else map(shutdown_timeout_s, self._signals.names)
        return min((limit for limit in limits if limit is not None), default=None)

    def close(self) -> None:
        """Note nothing any more. Idempotent."""
        if self._signals is not None:
            self._signals.close()
        self._watch.close()


def _end_of(until: str | float) -> float | None:
    """The time in an environment variable, in seconds of Unix time; None with a warning if that is not set."""
    if not isinstance(until, str):
        return until
    text = os.environ.get(until, "").strip()
    if not text:
        logger.warning("notice.until: the environment has no %s, so no end of the job is known", until)
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"notice.until: {until} is {text!r}: expected a time in seconds of Unix time") from None


class StepAgreement:
    """A step that all ranks agree on, because one of them asks for it. Every rank calls `reached` after each of its steps.

    No rank waits for another here: one that has looked already may be in the next step, in a collective that needs this one.
    Once a rank asks, every rank posts the step at which it sees that. When the last one posts, after its step m, no other is
    past step m + 1, whose collectives need that rank; so all see that all have posted after step m + 1, and that is the step.
    """

    def __init__(
        self,
        board: Board | None,
        key: str,
        asks: Callable[[], str | None],
        end_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`board` is None for a job of one rank; `asks` gives the reason why this rank asks, or None; `end_s` when it must have
        ended, in seconds of Unix time, or None."""
        self._board = board
        self._key = key
        self._asks = asks
        self._end_s = end_s
        self.end_s: float | None = None
        """The first end of those that the ranks have given, once they have agreed; as good as the machines' clocks agree."""
        self.reason = ""
        """Why they have agreed."""
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
                self._agreed, self.reason, self.end_s = step, reason, self._end_s()
                logger.info("after step %d: %s", step, reason)
            return
        if not self._has_posted:
            if reason is not None:
                board.post(f"{key}/asked", reason.encode())
            elif not board.has(f"{key}/asked"):
                return
            end_s = self._end_s()
            board.post(f"{key}/at/{board.rank}", f"{step} {'' if end_s is None else end_s}".encode())
            self._has_posted = True
            return
        posted = [f"{key}/at/{rank}" for rank in range(len(board))]
        if board.has(*posted):
            said = [board.read(item).decode().partition(" ") for item in posted]
            self._agreed = 1 + max(int(number) for number, _, _ in said)
            self.end_s = min((float(end) for _, _, end in said if end), default=None)
            self.reason = board.read(f"{key}/asked").decode()
            logger.info("after step %d: %s", self._agreed, self.reason)
