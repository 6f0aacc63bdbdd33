"""The connection to a cluster: it is begun once, changes nothing of the program's, and no other one is begun in its place."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray_nodes import Nodes, check_nothing_left

from loaderkit.engine.ray.cluster import connect
from loaderkit.errors import ConfigError

_BEGIN = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
import loaderkit, ray
from loaderkit.checkpoint.manager.notice import SignalNotice
from loaderkit.errors import ClosedError
from numbers_dataset import numbers

def build(num=10**6):
    settings = {"address": sys.argv[1], "num_cpus": 0.5}
    overrides = {"prefetch.executor": "ray", "prefetch.processes": 2, "prefetch.ray": settings, "prefetch.batches": 4}
    return loaderkit.build(numbers(num), overrides=overrides)

def refuse(*arguments, **options):
    print("another cluster", flush=True)
    raise ConnectionError

"""


def run(program: str, nodes: Nodes, first: str = "") -> list[str]:
    """What a program prints that begins with `first` and the above; it must not write an error."""
    helpers = Path(__file__).parents[2] / "helpers"
    command = [sys.executable, "-c", first + _BEGIN + program, nodes.address, str(helpers)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    return ran.stdout.splitlines()


def test_a_loader_after_the_end_of_the_connection(ray_nodes: Nodes) -> None:
    # Ray ends the program if any thread is in a call of it meanwhile, so all batches have come, and nothing is looked at.
    program = """
import loaderkit.engine.monitor
from waiting import wait_for

loaderkit.engine.monitor.TICK_S = 1000.0
init = ray.init
for loader in (build(), build(8)):
    stream = iter(loader)
    next(stream)
    is_underway = len(loader) > 1
    if not is_underway:
        assert list(stream) == []
        stream = iter(loader)
    wait_for(lambda: loader.stats().num_ready >= 4)
    ray.init = refuse
    ray.shutdown()
    if not is_underway:
        init(address=sys.argv[1], log_to_driver=False)
    try:
        next(stream)
    except ClosedError as error:
        print(error)
    print(loader.stats().num_batches, ray.is_initialized())
    loader.close()
    ray.shutdown()
    ray.init = init
"""
    said, counted, of_another, counted_then = run(program, ray_nodes)
    assert "to which the loader's actors and batches belong, has ended (by ray.shutdown(), or with the program)" in said
    assert of_another == said
    assert (counted, counted_then) == ("1 False", "1 True")
    check_nothing_left()


def test_a_loader_that_is_open_when_the_program_ends(ray_nodes: Nodes) -> None:
    program = """
loader = build()
stream = iter(loader)
next(stream)
ray.init = refuse
"""
    # Registered before Ray's own, so it runs when there is no connection any more.
    late = "import atexit\natexit.register(lambda: print(loader.stats().num_batches))\n"
    assert run(program, ray_nodes, late) == ["1"]
    check_nothing_left()


def test_a_notice_by_a_signal_stays(ray_nodes: Nodes) -> None:
    program = """
notice = SignalNotice(["SIGTERM"])
with build() as loader:
    next(iter(loader))
    os.kill(os.getpid(), signal.SIGTERM)
    print(notice.name)
"""
    assert run(program, ray_nodes) == ["SIGTERM"]


class FakeRay:
    """Of Ray what begins a connection, once two threads have come, or one has waited for another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_begun = 0
        self.error: Exception | None = None
        self.is_connected = False
        self._both = threading.Barrier(2)
        monkeypatch.setattr(ray, "is_initialized", lambda: self.is_connected)
        monkeypatch.setattr(ray, "init", self._init)

    def _init(self, **_: Any) -> None:
        self.num_begun += 1
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: None)
        else:
            with suppress(threading.BrokenBarrierError):
                self._both.wait(1.0)
        if self.error is not None:
            raise self.error
        self.is_connected = True


def test_two_threads_begin_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch)
    threads = [threading.Thread(target=connect, args=("auto",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fake.num_begun == 1


@pytest.mark.parametrize("error", [None, ConnectionError("nobody there")])
def test_the_handler_of_a_signal_stays(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    FakeRay(monkeypatch).error = error
    own = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with suppress(ConfigError):
            connect("auto")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, own)
