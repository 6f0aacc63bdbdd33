"""`executor: process` when a process dies, on either side."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from conftest import HELPERS
from executors import executor_of
from leftovers import nothing_left, resources  # noqa: F401 - a fixture for every test here
from numbers_dataset import PROCESS, Numbers, build, is_running, numbers, pid_of
from waiting import wait_for

from loaderkit import Pipeline
from loaderkit._internal.system.child_process import MEANT_FOR_THE_PARENT
from loaderkit.engine.metrics.tuning import Tuning
from loaderkit.engine.process import worker_main
from loaderkit.engine.process.exit_reason import exit_reason
from loaderkit.errors import WorkerDiedError

# ------------------------------------------------------------------------------------------------ deaths

LAST: dict[str, Any] = {"prefetch.restarts": 0}
"""Another process is not started; with one see `test_restarts.py`."""


def die(sample: dict[str, Any], how: str) -> None:
    if sample["__key__"] == "40":
        if how == "leave":
            os._exit(3)
        os.kill(os.getpid(), signal.Signals[how])


class TestDeaths:
    @pytest.mark.matrix(1)
    @pytest.mark.parametrize(
        ("how", "says"), [("SIGKILL", "killed by SIGKILL"), ("SIGSEGV", "crashed"), ("leave", "code 3")]
    )
    def test_of_the_process_that_loads(self, how: str, says: str) -> None:
        loader = build(Pipeline.dataset(Numbers()).shuffle("none").read().call(die, args={"how": how}).batch(8), **LAST)
        keys = []
        with pytest.raises(WorkerDiedError, match=says) as caught:
            for batch in loader:
                keys += batch["__key__"]
        assert keys == [str(n) for n in range(len(keys))]
        assert caught.value.exit_code == (3 if how == "leave" else -signal.Signals[how])
        assert how == "leave" or how in str(caught.value)
        assert loader.stats().num_batches == len(keys) // 8
        assert loader.state_dict()["position"] == len(keys)
        del caught
        loader.close()

    def test_from_outside_and_going_on(self) -> None:
        with build(numbers(), **LAST, **{"prefetch.batches": 2}) as loader:
            stream = iter(loader)
            kept = next(stream)
            os.kill(pid_of(loader), signal.SIGKILL)
            with pytest.raises(WorkerDiedError, match="SIGKILL"):
                for _ in stream:
                    pass
            state = loader.state_dict()
            loader.load_state_dict(state)
            assert next(key for batch in loader for key in batch["__key__"]) == str(state["position"])
        assert kept["filling"][3].tolist() == [3] * 1000

    def test_where_deaths_are_not_announced(self) -> None:
        """With SIGCHLD ignored the exit code is lost, but not the death."""
        told = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            with build(numbers(640), **LAST) as loader:
                stream = iter(loader)
                keys = next(stream)["__key__"]
                pid = pid_of(loader)
                os.kill(pid, signal.SIGKILL)
                with pytest.raises(WorkerDiedError, match="its exit code is lost, as SIGCHLD is ignored") as caught:
                    for batch in stream:
                        keys += batch["__key__"]
            assert keys == [str(n) for n in range(len(keys))]
            assert caught.value.exit_code is None
            del caught
            wait_for(lambda: not is_running(pid))  # nobody can wait for its end in another way
        finally:
            signal.signal(signal.SIGCHLD, told)

    def test_when_it_does_not_answer(self) -> None:
        """A process that is stopped is ended by force; statistics say what was known last."""
        with executor_of(numbers(), **PROCESS) as engine:
            engine.next()
            (pid,) = engine.stats(Tuning(), 0).tuning.pids
            os.kill(pid, signal.SIGSTOP)
            last = engine.stats(Tuning(), 0)
            assert last.stages[0].num_items >= 8
            engine.close(join_s=0.1)
        assert not is_running(pid)

    @pytest.mark.prove
    def test_when_it_has_not_answered_for_long(self) -> None:
        """It is not asked again and again: else there would be no room left to tell it to end."""
        with executor_of(numbers(), **PROCESS) as engine:
            engine.next()
            (process,) = engine.processes
            os.kill(process.pid, signal.SIGSTOP)
            asking = threading.Thread(
                target=lambda: [
                    process.running.connection.ask("stats", None, None, timeout_s=0.0) for _ in range(3000)
                ],
                daemon=True,
            )
            asking.start()
            asking.join(60)
            is_asking = asking.is_alive()
            os.kill(process.pid, signal.SIGCONT)
            assert not is_asking
            wait_for(lambda: process.running.connection.ask("stats", None, None) is not None)
            os.kill(process.pid, signal.SIGSTOP)
            for _ in range(3000):  # orders fill the socket: there is no room to tell it to end
                process.running.connection.ask("resize", "read", 2, timeout_s=0.0)
            engine.close(join_s=0.1)
        assert not is_running(process.pid)

    @pytest.mark.prove
    def test_what_a_scheduler_sends_to_all_is_left_to_the_trainer(self) -> None:
        """SIGUSR1 asks a job for a checkpoint, say: it must not take the process away, also before Python runs in that."""
        with build(numbers(800)) as loader:
            loader.start()
            for moment in range(2):
                for number in MEANT_FOR_THE_PARENT:
                    os.kill(pid_of(loader), number)
                assert len(list(loader)) == 100, moment

    def test_a_signal_that_is_no_crash_is_not_called_one(self) -> None:
        assert "a data set sent that signal" in str(exit_reason(123, -signal.SIGALRM))
        assert "crashed" not in str(exit_reason(123, -signal.SIGALRM, is_early=True))
        assert "a C library crashed" in str(exit_reason(123, -signal.SIGSEGV))

    @pytest.mark.parametrize("code", [0, 7, -11, -9, -64, None])
    def test_every_death_is_described(self, code: int | None) -> None:
        error = exit_reason(123, code).error()
        assert error.exit_code == code
        assert "pid 123" in str(error)
        silent = str(exit_reason(123, None, has_ended=False).error())
        assert silent.startswith("the process that loads (pid 123) does not answer")

    @pytest.mark.parametrize(
        ("num_kills", "says"), [(None, "the system was out of memory"), (0, "counts no kill"), (2, "counts a kill")]
    )
    def test_the_kernels_count_tells_who_killed_it(self, num_kills: int | None, says: str) -> None:
        error = exit_reason(123, -signal.SIGKILL, num_oom_kills=num_kills).error()
        assert says in str(error)
        assert ("out of memory" in str(error)) == (num_kills != 0)


@contextmanager
def descriptors_left(num_left: int) -> Iterator[None]:
    """Only `num_left` more can be opened."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(num_left):
            os.close(held.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in held:
            os.close(descriptor)


class TestNotStarting:
    @pytest.mark.parametrize(
        ("boot", "says"),
        [
            (
                "import os; os._exit(4)",
                r"could not start: it left with exit code 4 before it was ready: see its stderr",
            ),
            (
                "import os; os.kill(os.getpid(), 11)",
                r"could not start: it was killed by SIGSEGV.*while it was imported",
            ),
            (
                worker_main.BOOT.replace("from loaderkit.engine.process.worker_main", "from nowhere"),
                r"could not start: it left with exit code 1 .*\(ModuleNotFoundError: No module named 'nowhere'\)",
            ),
        ],
    )
    def test_no_stage_is_blamed(self, boot: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker_main, "BOOT", boot)
        with build(numbers()) as loader, pytest.raises(WorkerDiedError, match=says) as caught:
            next(iter(loader))
        assert "stage" not in str(caught.value)
        del caught

    @pytest.mark.prove
    @pytest.mark.parametrize("stride", [4, 1])
    def test_without_descriptors(self, stride: int, rng: random.Random) -> None:
        """However many there are left, it starts, or says what is short and leaves nothing."""
        for num_left in range(rng.randrange(stride), 24, stride):
            loader = build(numbers())
            before = resources()
            failed = None
            with descriptors_left(num_left):
                try:
                    next(iter(loader))
                except WorkerDiedError as error:
                    failed = error
            if failed is None:
                loader.close()
                break
            assert resources() == before, num_left
            loader.close()
            assert "could not be started: Too many open files: this process may have 256 descriptors" in str(failed)
        assert 5 <= num_left < 19 + stride


PARENT = """
import sys; sys.path.insert(0, sys.argv[1])
import loaderkit
from numbers_dataset import PROCESS, numbers
loader = loaderkit.build(numbers(100000, has_text=False), overrides=PROCESS)
stream = iter(loader)
batch = next(stream)
print(loader.stats().tuning.pids[0], flush=True)
"""
BUSY = PARENT + "while True: next(stream)\n"


_STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _nothing_runs_on() -> Iterator[None]:
    """A program whose test failed would run for ever, beside all other tests."""
    yield
    while _STARTED:
        _STARTED.pop().kill()


def start_parent(program: str, **options: Any) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-c", program, str(HELPERS)]
    ran = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    _STARTED.append(ran)
    assert ran.stdout is not None
    return ran, int(ran.stdout.readline())


@pytest.mark.forked_workers
class TestDeathsOfTheTrainer:
    def test_killed(self) -> None:
        ran, pid = start_parent(BUSY)
        ran.kill()
        ran.communicate(timeout=60)
        wait_for(lambda: not is_running(pid))

    @pytest.mark.prove
    def test_killed_while_a_fork_of_it_lives_on(self) -> None:
        """The fork holds copies of all sockets, so their end is not noticed; the kernel's signal is."""
        program = PARENT.replace("print(", "import os, time\nif os.fork() == 0: time.sleep(60)\nprint(")
        ran, pid = start_parent(program + "while True: next(stream)\n", start_new_session=True)
        ran.kill()
        wait_for(lambda: not is_running(pid))
        os.killpg(ran.pid, signal.SIGKILL)
        ran.communicate(timeout=60)

    @pytest.mark.parametrize("last", ["", "raise SystemExit(7)", "1 / 0", "del batch"])
    @pytest.mark.prove
    def test_ended_with_the_loader_open(self, last: str) -> None:
        ran, pid = start_parent(PARENT + last)
        _, said = ran.communicate(timeout=60)
        assert ran.returncode == {"raise SystemExit(7)": 7, "1 / 0": 1}.get(last, 0)
        assert ("Traceback" in said) == (last == "1 / 0")
        assert not is_running(pid)

    def test_ctrl_c_reaches_both_and_prints_one_traceback(self) -> None:
        ran, pid = start_parent(BUSY, start_new_session=True)
        os.killpg(ran.pid, signal.SIGINT)  # as a terminal does
        _, said = ran.communicate(timeout=60)
        assert said.count("Traceback") == 1
        assert said.rstrip().endswith("KeyboardInterrupt")
        assert not is_running(pid)

    @pytest.mark.parametrize("moment", [0.0, 0.1, 0.5, 1.5])
    @pytest.mark.prove
    def test_ctrl_c_while_it_starts(self, moment: float) -> None:
        program = BUSY.replace("stream = iter", "print(0, flush=True)\nstream = iter")
        ran, _ = start_parent(program, start_new_session=True)
        threading.Event().wait(moment)  # the moment is what is being varied
        os.killpg(ran.pid, signal.SIGINT)
        _, said = ran.communicate(timeout=60)
        assert said.count("Traceback") == 1
