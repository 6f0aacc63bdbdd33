"""A wait that gets long is reported at a quarter of the limit and at the limit, and is an error if that is asked for."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from numbers_dataset import PROCESS, Numbers, hang
from waiting import wait_for

import loaderkit
from loaderkit import Loader, Pipeline
from loaderkit.engine.watchdog import HangReport, Patience
from loaderkit.errors import LoaderkitError, StallTimeout

REPORT = HangReport("where everything is", "decode", "cat/007.jpg")


class TestPatience:
    def test_a_quarter_then_the_rest_then_again_and_again(self, caplog: pytest.LogCaptureFixture) -> None:
        patience = Patience(60.0, raises=False)
        waits = []
        with caplog.at_level(logging.WARNING, "loaderkit"):
            for _ in range(4):
                waits.append(patience.next_s)
                patience.ends(lambda: REPORT)
        assert waits == [15, 45, 60, 60]
        messages = [record.getMessage() for record in caplog.records]
        assert [message.partition(" s")[0] for message in messages] == [f"no batch for {n}" for n in (15, 60, 120, 180)]
        assert all("it is in decode, at sample 'cat/007.jpg'" in message for message in messages)
        assert all("where everything is" in message for message in messages)

    def test_the_limit_is_an_error_if_asked_for(self, caplog: pytest.LogCaptureFixture) -> None:
        patience = Patience(60.0, raises=True)
        patience.ends(lambda: REPORT)
        assert len(caplog.records) == 1
        with pytest.raises(StallTimeout, match="no batch for 60 s") as caught:
            patience.ends(lambda: REPORT)
        error = caught.value
        assert (error.waited_s, error.stage, error.key) == (60.0, "decode", "cat/007.jpg")
        assert isinstance(error, LoaderkitError)
        assert isinstance(error, TimeoutError)
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.waited_s, again.stage, again.key) == (str(error), 60.0, "decode", "cat/007.jpg")


class Stuck:
    """One item comes when it is let go."""

    def __init__(self, number: int = 20) -> None:
        self.number = number
        self.is_in = threading.Event()
        self.is_free = threading.Event()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.number:
            self.is_in.set()
            self.is_free.wait(60)
        return torch.tensor(index)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    found = Stuck()
    yield found
    found.is_free.set()


def test_a_sample_that_hangs_is_named(stuck: Stuck, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = Pipeline.dataset(stuck).shuffle("none").read().batch(8)
    patience: dict[str, Any] = {"prefetch.timeout": "1s", "prefetch.on_timeout": "raise"}
    with loaderkit.build(pipeline, overrides={"prefetch.concurrency": 1, **patience}) as loader:
        loader.start()
        assert stuck.is_in.wait(60)  # two batches are ready
        batches = iter(loader)
        next(batches)
        next(batches)
        with pytest.raises(StallTimeout, match="in read") as caught:
            next(batches)
        assert (caught.value.stage, caught.value.key) == ("read", "20")
        assert "__getitem__" in str(caught.value), "the stacks of the workers"
        assert loader.state_dict()["position"] == 16
        stuck.is_free.set()
        assert [batch["0"].tolist()[0] for batch in loader] == list(range(0, 64, 8))  # the next epoch, with new workers


def test_a_sample_that_hangs_in_another_process_is_named() -> None:
    pipeline = Pipeline.dataset(Numbers()).shuffle("none").read().call(hang, thread_safe=True).batch(8)
    overrides = {**PROCESS, "prefetch.concurrency": 1, "prefetch.timeout": "1s", "prefetch.on_timeout": "raise"}
    with loaderkit.build(pipeline, overrides=overrides) as loader:
        begin(loader)
        with pytest.raises(StallTimeout) as caught:
            list(loader)
        assert (caught.value.stage, caught.value.key) == ("call", "20")


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_sample_that_hangs_among_those_looked_at_first_is_named(is_mixed: bool) -> None:
    stuck = Stuck(0)
    made = Pipeline.dataset(stuck)
    if is_mixed:
        made = Pipeline.mix({"a": Pipeline.dataset(Stuck(-1)), "b": made}, {"a": 1, "b": 1})
    overrides = {"prefetch.timeout": "400ms", "prefetch.on_timeout": "raise", "prefetch.executor": "thread"}
    with loaderkit.build(made.read().batch(8), overrides=overrides) as loader:
        loader.start()
        assert stuck.is_in.wait(60)
        with pytest.raises(StallTimeout, match=r"first samples are looked at.*in read") as caught:
            next(iter(loader))
        assert (caught.value.stage, caught.value.key) == ("read.b" if is_mixed else "read", "0")
        stuck.is_free.set()


def begin(loader: Loader) -> None:
    """Start the process and wait for all batches before the one that hangs: how long they take says nothing of a hang."""
    loader.start()
    wait_for(lambda: loader.stats().num_ready == 2)


class Complaining(Numbers):
    """Says ten times a second that it waits for item 20."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        while index == 20:
            logging.getLogger("loaderkit").warning("still waiting")
            threading.Event().wait(0.1)
        return super().__getitem__(index)


def test_messages_of_the_other_process_are_no_sign_of_a_batch() -> None:
    pipeline = Pipeline.dataset(Complaining()).shuffle("none").read().batch(8)
    overrides = {**PROCESS, "prefetch.concurrency": 1, "prefetch.timeout": "1s", "prefetch.on_timeout": "raise"}
    with loaderkit.build(pipeline, overrides=overrides) as loader:
        begin(loader)
        closer = threading.Timer(120, loader.close)  # else it would never end
        closer.start()
        try:
            with pytest.raises(StallTimeout) as caught:
                list(loader)
        finally:
            closer.cancel()
            closer.join()
        assert (caught.value.stage, caught.value.key) == ("read", "20")
