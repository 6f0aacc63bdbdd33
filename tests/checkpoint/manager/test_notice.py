"""A signal is only noted where it comes, and all ranks agree on the step that any of them asks for."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

from loaderkit.checkpoint.manager.notice import SignalNotice, StepAgreement
from loaderkit.errors import ConfigError
from loaderkit.ranks.board import Board


def forked(work: Callable[[], None]) -> int:
    """The exit code of a forked child that does `work`, as of subprocess: the negative number of a signal that ended it."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            work()
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class TestSignals:
    def test_it_is_noted_and_the_handlers_come_back(self) -> None:
        before = signal.getsignal(signal.SIGUSR1)
        notice = SignalNotice(["SIGUSR1", "SIGTERM"])
        seen = [notice.name]
        os.kill(os.getpid(), signal.SIGTERM)
        seen.append(notice.name)
        assert seen == [None, "SIGTERM"]
        notice.close()
        notice.close()
        assert signal.getsignal(signal.SIGUSR1) == before
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    def test_a_handler_that_was_set_since_stays(self) -> None:
        before = signal.getsignal(signal.SIGUSR1)
        notice = SignalNotice(["SIGUSR1"])
        try:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            notice.close()
            assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        finally:
            signal.signal(signal.SIGUSR1, before)

    def test_several_note_the_same_signal_and_end_in_any_order(self) -> None:
        before = signal.getsignal(signal.SIGUSR1)
        first, second = SignalNotice(["SIGUSR1"]), SignalNotice(["SIGUSR1", "SIGUSR2"])
        os.kill(os.getpid(), signal.SIGUSR1)
        assert first.name == second.name == "SIGUSR1"
        first.close()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert (first.name, second.name) == ("SIGUSR1", "SIGUSR2")
        assert signal.getsignal(signal.SIGUSR1) != before
        second.close()
        assert signal.getsignal(signal.SIGUSR1) == before

    def test_children_of_fork_have_the_handlers_of_before(self, rng: random.Random) -> None:
        """A signal of the notice ends them, or is handled as it was; they may note signals themselves; the parent's stay."""
        names = rng.sample(["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"], 3)
        *numbers, ignored = [signal.Signals[name].value for name in names]
        before = {number: signal.signal(number, signal.SIG_DFL) for number in (*numbers, ignored)}
        signal.signal(ignored, signal.SIG_IGN)
        notices = [SignalNotice(names), SignalNotice(names[:1])]
        try:

            def note_and_end() -> None:
                assert [signal.getsignal(number) for number in (*numbers, ignored)] == [0, 0, signal.SIG_IGN]
                own = SignalNotice(names[:1])
                os.kill(os.getpid(), numbers[0])
                assert own.name == names[0]
                notices[0].close()
                own.close()
                os.kill(os.getpid(), ignored)
                os.kill(os.getpid(), numbers[0])

            ends = [forked(note_and_end), forked(lambda: os.kill(os.getpid(), numbers[1]))]
            thread = threading.Thread(target=lambda: ends.append(forked(note_and_end)))
            thread.start()
            thread.join()
            assert ends == [-numbers[0], -numbers[1], -numbers[0]]
            assert [notice.name for notice in notices] == [None, None]
            os.kill(os.getpid(), ignored)
            assert [notice.name for notice in notices] == [names[2], None]
        finally:
            for notice in notices:
                notice.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def test_other_threads_cannot(self) -> None:
        errors: list[Exception] = []

        def make() -> None:
            try:
                SignalNotice(["SIGUSR1"])
            except ConfigError as error:
                errors.append(error)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        assert "in the main thread only" in str(errors[0])


class Messages:
    """A store in memory, for ranks that are threads."""

    def __init__(self) -> None:
        self.messages: dict[str, bytes] = {}

    def set(self, key: str, data: bytes) -> None:
        self.messages[key] = data

    def check(self, keys: list[str]) -> bool:
        return all(key in self.messages for key in keys)

    def get(self, key: str) -> bytes:
        return self.messages[key]


def run_steps(num_ranks: int, asks_at: dict[int, int], rng: random.Random) -> list[int | None]:
    """The step at which each rank stops. A rank in `asks_at` asks from that step on. A rank is done with a step when all have
    entered it, as with training's collectives; which of them looks first is left to the threads."""
    store = Messages()
    stopped: list[int | None] = [None] * num_ranks
    entered = [0] * num_ranks
    changed = threading.Condition()

    def train(rank: int) -> None:
        board = Board(store, rank, range(num_ranks), timeout_s=60.0)
        asks_from = asks_at.get(rank, 10**9)
        agreement = StepAgreement(board, "notice", lambda: "SIGTERM" if entered[rank] >= asks_from else None)
        for step in range(60):
            with changed:
                entered[rank] = step
                changed.notify_all()
                while min(entered) < step:
                    changed.wait()
            if agreement.reached(step):
                stopped[rank] = step
                return

    threads = [threading.Thread(target=train, args=(rank,)) for rank in rng.sample(range(num_ranks), num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return stopped


class TestAgreement:
    def test_one_rank_stops_at_once(self) -> None:
        step = 0
        agreement = StepAgreement(None, "notice", lambda: "SIGTERM" if step >= 3 else None)
        for step in range(3):
            assert not agreement.reached(step)
        step = 3
        assert agreement.reached(3)
        assert agreement.reached(4)
        assert not agreement.reached(2)

    def test_a_notice_between_two_questions_of_one_step_counts_from_the_next(self) -> None:
        """`save` asks first, and does not save; what `reached_preemption` says must be the same."""
        noted: list[str] = []
        agreement = StepAgreement(None, "notice", lambda: noted[0] if noted else None)
        assert not agreement.reached(7)
        noted.append("SIGTERM")
        assert not agreement.reached(7)
        assert agreement.reached(8)

    def test_all_ranks_stop_at_the_same_step(self, rng: random.Random) -> None:
        for _ in range(10):
            num_ranks = rng.randint(2, 5)
            asks_at = {rank: rng.randint(0, 20) for rank in rng.sample(range(num_ranks), rng.randint(1, num_ranks))}
            stopped = run_steps(num_ranks, asks_at, rng)
            assert None not in stopped, (asks_at, stopped)
            assert len(set(stopped)) == 1, (asks_at, stopped)
            assert stopped[0] is not None
            assert min(asks_at.values()) < stopped[0] <= min(asks_at.values()) + 2
