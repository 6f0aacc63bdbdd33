"""How the passes over an iterable end: at its length, or another; at a close, also while an item is awaited."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import HELPERS
from executors import EXECUTORS
from iterables import Counting, Stateful, Stuck
from torch.utils.data import DataLoader
from waiting import join_threads, messages_with, wait_for

import loaderkit
from loaderkit import Pipeline
from loaderkit.engine.serial_turn import Turn
from loaderkit.errors import ConfigError, SourceError

INLINE = EXECUTORS["inline"]


def test_a_length_is_kept() -> None:
    made = Pipeline.iterable(Stateful(50), length=50).epochs(2).read().batch(4)
    with loaderkit.build(made, rank=1, world_size=3) as loader:
        assert (len(loader), loader.num_samples) == (4, 50)
        assert [len(list(loader)) for _ in range(2)] == [4, 4]  # two are left, which is not one for every rank
    with (
        loaderkit.build(Pipeline.iterable(Stateful(50), length=51).read().batch(4), overrides=INLINE) as loader,
        pytest.raises(
            SourceError, match=r"failed at item 50 of epoch 0: it has ended after 50 items, and source.length is 51"
        ),
    ):
        list(loader)
    with pytest.raises(ConfigError, match="length"):
        loaderkit.build(Pipeline.iterable(Stateful(50), length=0).read().batch(4))


def test_closing_ends_what_it_iterates_over() -> None:
    def batches_of_processes() -> DataLoader[Any]:
        return DataLoader(list(range(64)), batch_size=1, num_workers=1)  # type: ignore[arg-type]

    before = set(multiprocessing.active_children())
    for executor in ("inline", "thread"):
        loader = loaderkit.build(Pipeline.iterable(batches_of_processes).read().batch(4), overrides=EXECUTORS[executor])
        next(iter(loader))
        assert len(set(multiprocessing.active_children()) - before) == 1
        loader.close()
        wait_for(lambda: not set(multiprocessing.active_children()) - before)


def test_there_is_no_length_before_the_end() -> None:
    with loaderkit.build(Pipeline.iterable(Counting(10)).read().batch(4), overrides=INLINE) as loader:
        for unknown in (loader, iter(loader), loader.dataset, loader.batch_sampler):
            with pytest.raises(TypeError, match="there is no length"):
                len(unknown)
        assert "any number of samples" in repr(loader)
        assert [len(batch["x"]) for batch in loader] == [4, 4, 2]
    limited = Pipeline.iterable(Counting(10), limit=6).read().batch(4)
    with loaderkit.build(limited, overrides=INLINE) as loader:
        assert [batch["x"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5]]


def lengths(length: int, *, drop_last: bool, **source: Any) -> Pipeline:
    """Fifty items that are said to be `length`."""
    return (
        Pipeline.iterable("iterables:Stateful", args={"size": 50}, length=length, **source).read().batch(4, drop_last)
    )


@pytest.mark.parametrize(
    ("length", "drop_last", "world_size", "executor"),
    [
        (51, True, 1, "inline"),
        (52, True, 1, "two processes"),
        (51, False, 3, "inline"),
        (59, True, 2, "thread"),
    ],
)
def test_a_length_beyond_the_end_is_an_error(length: int, drop_last: bool, world_size: int, executor: str) -> None:
    """Also where no batch holds the items that are not there; on every rank."""
    for rank in range(world_size):
        made = lengths(length, drop_last=drop_last)
        with (
            loaderkit.build(made, rank=rank, world_size=world_size, overrides=EXECUTORS[executor]) as loader,
            pytest.raises(
                SourceError, match=f"ended after 50 items, and source.length is {length}: set it to the number"
            ),
        ):
            for number, _ in enumerate(loader, 1):
                assert number < len(loader)


@pytest.mark.parametrize(("executor", "drop_last"), [("inline", True), ("inline", False), ("two processes", True)])
def test_a_length_before_the_end_is_said(executor: str, drop_last: bool, caplog: pytest.LogCaptureFixture) -> None:
    said = "has more items than source.length, which is 42: the others are left out of every epoch"
    with loaderkit.build(lengths(42, drop_last=drop_last), overrides=EXECUTORS[executor]) as loader:
        epochs = [[x for batch in loader for x in batch["x"].tolist()] for _ in range(2)]
    assert epochs == [list(range(40 if drop_last else 42))] * 2
    assert any(said in record.getMessage() for record in caplog.records)
    assert len(caplog.records) <= 2, "once in each process"


def test_a_length_is_not_looked_behind_where_a_limit_says_the_same(caplog: pytest.LogCaptureFixture) -> None:
    for right in (
        lengths(40, drop_last=False, limit=40),
        lengths(50, drop_last=True),
        lengths(60, drop_last=True, limit=30),
    ):
        with loaderkit.build(right, overrides=INLINE) as loader:
            for _ in range(2):
                assert len(list(loader)) == len(loader)
    assert not caplog.records


@pytest.fixture
def stuck() -> Iterator[None]:
    """`Stuck` waits in the test, and no longer."""
    Stuck.released.clear()
    yield
    Stuck.released.set()
    join_threads("loaderkit-read")


@pytest.mark.usefixtures("stuck")
@pytest.mark.parametrize("num_items", [0, 8])
def test_a_close_does_not_wait_for_an_item(num_items: int) -> None:
    """Neither for the first nor for a later one; those that wait for their turn end with the close."""
    made = Pipeline.iterable(Stuck(num_items)).read().batch(4)
    with messages_with("waits for the next item of the iterable Stuck, which nothing can end") as messages:
        with loaderkit.build(made, overrides={"prefetch.concurrency": 3}) as loader:
            loader.start()
            wait_for(lambda: Stuck.num_waiting == 1)
        assert "loaderkit-read+batch" in messages.get(timeout=60)
        (left,) = [thread for thread in threading.enumerate() if "loaderkit-read" in thread.name]
        assert left.daemon
        assert messages.empty()


@pytest.mark.usefixtures("stuck")
def test_batches_do_not_wait_for_items_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever worker is first: the one that is to read what has come is held up on its way to the others."""
    take, has_come = Turn.take, threading.Event()

    def late(turn: Turn, number: int) -> threading.Lock | None:
        if number == 0:
            has_come.wait(120)
        taken = take(turn, number)
        if number == 1:
            has_come.set()
        return taken

    monkeypatch.setattr(Turn, "take", late)
    made = Pipeline.iterable(Stuck(4)).read().batch(4)
    overrides = {"prefetch.concurrency": 2, "prefetch.timeout": "60s", "prefetch.on_timeout": "raise"}
    with loaderkit.build(made, overrides=overrides) as loader:
        assert next(iter(loader))["x"].tolist() == [0, 1, 2, 3]


def test_a_process_ends_while_an_item_is_awaited() -> None:
    made = Pipeline.iterable("iterables:Stuck", args={"size": 8}).read().batch(4)
    before = set(multiprocessing.active_children())
    with loaderkit.build(made, overrides=EXECUTORS["process"] | {"prefetch.concurrency": 1}) as loader:
        assert [batch["x"].tolist() for _, batch in zip(range(2), loader, strict=False)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        pid = next(iter(loader.stats().tuning.pids or ()))
    assert set(multiprocessing.active_children()) == before
    assert not Path(f"/proc/{pid}").exists()


PROGRAM = """
import loaderkit
from iterables import Stuck
from waiting import wait_for

loader = loaderkit.build(loaderkit.Pipeline.iterable(Stuck(4)).read().batch(4), overrides={{"prefetch.concurrency": 1}})
next(iter(loader))
wait_for(lambda: Stuck.num_waiting == 1)
{closing}
print("trained")
"""


@pytest.mark.matrix(1)
@pytest.mark.parametrize("closing", ["loader.close()", "del loader", ""])
def test_a_program_ends_while_an_item_is_awaited(closing: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(closing=closing)]
    ran = subprocess.run(command, cwd=HELPERS, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "trained\n"), ran.stderr
