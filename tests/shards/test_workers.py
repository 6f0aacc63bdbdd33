"""What surrounds the processes that make shards: nothing is left of them, and Ctrl-C is their parent's alone."""

from __future__ import annotations

import random
import signal
import socket
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from loaderkit.shards import workers


class Pool:
    """Begins no process; looks at what one would have found."""

    def __init__(self, num: int, context: Any, begin: Any, arguments: tuple[Any, ...]) -> None:
        *_, self.path = arguments
        self.jobs: list[bytes] = []
        self.named: list[Path] = []
        self.blocked: list[set[int]] = []
        self.is_ended = False
        POOLS.append(self)

    def submit(self, function: Any, number: int) -> Future[Any]:
        self.jobs.append(Path(self.path).read_bytes())
        self.named += Path(tempfile.gettempdir()).iterdir()
        self.blocked.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        made: Future[Any] = Future()
        made.set_result(number)
        return made

    def shutdown(self, *, cancel_futures: bool) -> None:
        self.is_ended = True


POOLS: list[Pool] = []


@pytest.fixture(autouse=True)
def _without_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(workers, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(workers, "pack_job", lambda job: job * 1000)


def test_the_job_has_no_name_and_processes_are_begun_without_ctrl_c() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    job: Any = b"a job"
    made: set[Any] = {*workers.make_in_processes(job, range(3), 2)}
    assert made == {0, 1, 2}
    pool = POOLS.pop()
    assert pool.jobs == [job * 1000] * 3
    assert pool.named == [], "a killed run would leave it"
    assert all(signal.SIGINT in blocked for blocked in pool.blocked)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_ctrl_c_while_processes_are_begun_comes_when_they_are(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool has locks of its own. Another thread, of BLAS say, takes the signal, and Python raises in the main thread."""
    ends = threading.Event()
    other = threading.Thread(target=ends.wait)
    other.start()
    num, submit = rng.randint(1, 9), Pool.submit
    number_of_it = rng.randrange(num)
    taken, told = socket.socketpair()
    told.setblocking(False)
    before_fd = signal.set_wakeup_fd(told.fileno())

    def interrupted(pool: Pool, function: Any, number: int) -> Future[Any]:
        if number == number_of_it:
            assert other.ident is not None
            signal.pthread_kill(other.ident, signal.SIGINT)
            taken.recv(1)
        return submit(pool, function, number)

    monkeypatch.setattr(Pool, "submit", interrupted)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGINT)
    job: Any = b"a job"
    try:
        with pytest.raises(KeyboardInterrupt):
            next(workers.make_in_processes(job, range(num), 2))
    finally:
        ends.set()
        other.join()
        signal.set_wakeup_fd(before_fd)
        taken.close()
        told.close()
    pool = POOLS.pop()
    assert len(pool.jobs) == num
    assert pool.is_ended
    assert (signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGINT)) == before
