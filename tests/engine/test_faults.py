"""Whatever goes wrong, with every executor: no hang, and nothing left."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HELPERS, SEED
from executors import EXECUTORS
from leftovers import nothing_left  # noqa: F401 - a fixture for every test here
from numbers_dataset import Numbers, numbers
from waiting import wait_for

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import ClosedError, LoaderkitError

pytestmark = [pytest.mark.matrix(1), pytest.mark.forked_workers]


def with_all(name: str, cases: Iterable[Any]) -> pytest.MarkDecorator:
    """Every case with every executor. Processes take seconds to start: of theirs only the first case is not left to
    `make prove`."""
    cases = list(cases)
    params = [
        pytest.param(case, executor, marks=[pytest.mark.prove] if "process" in executor and number else [])
        for executor in EXECUTORS
        for number, case in enumerate(cases)
    ]
    return pytest.mark.parametrize((name, "executor"), params)


class Broken(Numbers):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 40:
            raise OSError("forty")
        return super().__getitem__(index)


class Uneven(Numbers):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.zeros(1 + (index == 40))}


def fail_at_40(sample: dict[str, Any]) -> None:
    if "40" in (sample["__key__"], sample["__key__"][0]):
        raise ArithmeticError("forty")


def leave_at_40(sample: dict[str, Any]) -> None:
    if sample["__key__"] == "40":
        sys.exit("forty")


def plain(pipeline: Pipeline) -> Pipeline:
    return pipeline.shuffle("none").read()


FAILURES: dict[str, Callable[[Path], Pipeline]] = {
    "call": lambda photos: plain(Pipeline.dataset(Numbers())).call(fail_at_40).batch(8),
    "read": lambda photos: plain(Pipeline.dataset(Broken())).batch(8),
    "decode": lambda photos: plain(Pipeline.files(photos)).decode().resize([8, 8]).batch(8),
    "resize": lambda photos: plain(Pipeline.files(photos)).decode().random_crop(47).batch(8),
    "call that leaves": lambda photos: plain(Pipeline.dataset(Numbers())).call(leave_at_40).batch(8),
    "batch": lambda photos: plain(Pipeline.dataset(Uneven())).batch(8),
    "call on batches": lambda photos: plain(Pipeline.dataset(Numbers())).batch(8).call(fail_at_40),
    "a pool of its own": lambda photos: plain(Pipeline.dataset(Numbers())).call(fail_at_40, workers=2).batch(8),
}


@with_all("stage", FAILURES)
def test_an_exception_in_a_stage(stage: str, executor: str, photos: Path, tmp_path: Path) -> None:
    """It is raised in its place, and nothing is left even before the loader is closed."""
    folder = tmp_path / "photos"
    for number, photo in enumerate(sorted(photos.rglob("*.jpg"))):
        place = folder / f"{number:03}.jpg"
        place.parent.mkdir(exist_ok=True)
        data = photo.read_bytes()
        place.write_bytes(data[: len(data) // 2] if number == 40 else data)
    pipeline = FAILURES[stage](folder)
    loader = loaderkit.build(pipeline, overrides=EXECUTORS[executor])
    num_batches = 0
    with pytest.raises(LoaderkitError) as caught:
        for _ in loader:
            num_batches += 1
    assert num_batches == (5 if stage != "resize" else num_batches)
    del caught
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loaderkit")]
    loader.close()


@with_all("ending", ["dropped", "closed", "iterated again", "in a with"])
def test_an_early_break(ending: str, executor: str) -> None:
    loader = loaderkit.build(numbers(800), overrides=EXECUTORS[executor])
    for _ in loader:
        break
    if ending == "iterated again":
        for _ in loader:
            break
    if ending == "in a with":
        with loader:
            for _ in loader:
                break
    elif ending == "closed":
        loader.close()
    del loader


def run_in_a_fork(how: str, act: Callable[[], None]) -> int | None:
    """The exit code."""
    if how == "multiprocessing":
        child = multiprocessing.get_context("fork").Process(target=act)
        child.start()
        child.join()
        code = child.exitcode
        child.close()
        return code
    pid = os.fork()
    if pid == 0:
        act()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@with_all("how", ["os.fork", "multiprocessing"])
def test_a_fork_while_it_runs(how: str, executor: str) -> None:
    """The fork cannot continue with the loader, is told so, and takes nothing away; the parent continues."""
    with loaderkit.build(numbers(800), overrides=EXECUTORS[executor]) as loader:
        stream = iter(loader)
        keys = list(next(stream)["__key__"])

        def act() -> None:
            try:
                next(stream)
            except ClosedError:
                loader.close()
                os._exit(5)
            os._exit(6)

        for _ in range(2):
            assert run_in_a_fork(how, act) == 5
            for _ in range(20):
                keys += next(stream)["__key__"]
        keys += [key for batch in stream for key in batch["__key__"]]
    assert keys == [str(n) for n in range(800)]


# ----------------------------------------------------------------------------------------- the interpreter's end

PROGRAM = """
import os, sys
sys.path.insert(0, sys.argv[1])
import loaderkit.loader  # and torch: what Ctrl-C does to their import is theirs
from executors import EXECUTORS
from numbers_dataset import numbers
print("begins", flush=True)
loader = loaderkit.build(numbers(100000), overrides=EXECUTORS[sys.argv[2]])
stream = iter(loader)
batches = [next(stream) for _ in range(3)]
print("runs", flush=True)
"""


FOR_EVER = """
while True:
    for batch in loader: pass
"""


def begin(program: str, executor: str, until: str = "runs") -> subprocess.Popen[str]:
    """Start a program in a session of its own, and wait for what it prints."""
    ran = subprocess.Popen(
        [sys.executable, "-c", program, str(HELPERS), executor],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert ran.stdout is not None
    while (line := ran.stdout.readline().strip()) != until:
        assert line, ran.communicate()
    return ran


def members(session: int) -> list[int]:
    """The processes of a session that live."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            state, _, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state not in "ZX":
                found.append(int(entry.name))
    return found


def end(ran: subprocess.Popen[str]) -> str:
    """What it says on stderr until it ends, with all its processes."""
    try:
        _, said = ran.communicate(timeout=60)
        wait_for(lambda: not members(ran.pid))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ran.pid, signal.SIGKILL)
    return said


class TestTheEnd:
    @with_all("last", ["", "sys.exit(7)", "1 / 0", "os._exit(3)", "del loader, stream"])
    def test_with_the_loader_open(self, last: str, executor: str) -> None:
        ran = begin(PROGRAM + last, executor)
        said = end(ran)
        assert ran.returncode == {"sys.exit(7)": 7, "1 / 0": 1, "os._exit(3)": 3}.get(last, 0)
        assert said.count("Traceback") == ("1 / 0" in last)
        assert said == "" or "1 / 0" in last

    @with_all("number", [signal.SIGKILL, signal.SIGTERM])
    def test_killed(self, number: signal.Signals, executor: str) -> None:
        ran = begin(PROGRAM + FOR_EVER, executor)
        ran.send_signal(number)
        assert end(ran) == ""
        assert ran.returncode == -number

    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_forks_that_end_as_programs_do(self, executor: str) -> None:
        """With atexit functions, destructors and all; the loader is the parent's."""
        last = (
            "import warnings; warnings.simplefilter('ignore', DeprecationWarning)\n"  # of forks beside threads: Python 3.12
            "pid = os.fork()\nif pid == 0: sys.exit(0)\nprint(os.waitpid(pid, 0)[1], len(next(stream)['x']))"
        )
        ran = begin(PROGRAM + last, executor)
        assert ran.stdout is not None
        assert ran.stdout.readline().split() == ["0", "8"]
        assert end(ran) == ""
        assert ran.returncode == 0


# ------------------------------------------------------------------------------------------------------- Ctrl-C


def delays(num_moments: int) -> list[float]:
    """Seconds from the loader's beginning: half of them while processes start, half while they run."""
    rng = random.Random(f"{os.environ[SEED]} delays")
    return [rng.uniform(0, 2.5) for _ in range(num_moments)]


def check_ctrl_c(executor: str, delay_s: float) -> None:
    """As at a terminal: every process of the group gets it, and one traceback is all that is seen."""
    ran = begin(PROGRAM + FOR_EVER, executor, until="begins")
    threading.Event().wait(delay_s)  # the moment is what is being varied
    os.killpg(ran.pid, signal.SIGINT)
    said = end(ran)
    assert ran.returncode == -signal.SIGINT, said
    assert said.count("Traceback") == 1, said
    assert said.rstrip().endswith("KeyboardInterrupt"), said


class TestCtrlC:
    @with_all("delay_s", delays(2))
    def test_at_a_terminal(self, delay_s: float, executor: str) -> None:
        check_ctrl_c(executor, delay_s)

    @pytest.mark.prove
    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_at_a_terminal_at_fifty_moments(self, executor: str) -> None:
        for delay_s in delays(50):
            check_ctrl_c(executor, delay_s)

    @pytest.mark.parametrize(
        ("executor", "num_rounds"),
        [
            *(("inline", 3), ("thread", 3), ("process", 1)),
            *(pytest.param(executor, 50, marks=pytest.mark.prove) for executor in EXECUTORS),
        ],
    )
    def test_where_the_interpreter_lives_on(self, executor: str, num_rounds: int) -> None:
        command = [sys.executable, str(HELPERS / "interrupt_at_random.py"), executor, "1", str(num_rounds)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert ran.returncode == 0, ran.stderr
        assert ran.stderr == ""

    @pytest.mark.parametrize(
        ("life", "num_parts"),
        [
            *(
                ("inline", 4),
                ("thread", 8),
                ("records", 8),
                ("pictures", 8),
                ("volumes", 8),
                ("restore", 8),
                ("process", 120),
                ("death", 100),
            ),
            *(
                pytest.param(life, 1, marks=pytest.mark.prove)
                for life in (*EXECUTORS, "death", "records", "pictures", "volumes", "restore")
            ),
        ],
    )
    def test_at_every_place(self, life: str, num_parts: int, rng: random.Random) -> None:
        """Every place of the package where the interpreter looks for it, or one in `num_parts`, drawn anew each time."""
        part = str(rng.randrange(num_parts))
        command = [sys.executable, str(HELPERS / "interrupt_everywhere.py"), life, part, str(num_parts)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=3000)
        assert ran.returncode == 0, ran.stdout + ran.stderr[-5000:]
