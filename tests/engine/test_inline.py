"""What `executor: inline` does when a batch is interrupted: the batch is not passed over, and nothing waits for it."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
from executors import executor_of

import loaderkit
from loaderkit import Loader, Pipeline
from loaderkit.diagnosis.stats import Stats
from loaderkit.errors import ClosedError, StageError

INLINE = {"prefetch.executor": "inline"}


class Numbers:
    """Items that are their own numbers; with a type, so that only the first is asked for to see what a batch holds."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> np.int64:
        return np.int64(index)


class Trap:
    """Hands samples on; at one of them it does something else first."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.springs: Any = lambda: None

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if sample["x"] == self.at:
            self.springs()
        return sample


def pipeline(trap: Trap) -> Pipeline:
    return Pipeline.dataset(Numbers(), fields=["x"]).shuffle("none").read().call(trap).batch(8)


def trapped(trap: Trap, **overrides: Any) -> Loader:
    return loaderkit.build(pipeline(trap), overrides={**INLINE, **overrides})


def trapped_engine(trap: Trap) -> AbstractContextManager[Any]:
    return executor_of(pipeline(trap), **INLINE)


def raising(error: BaseException) -> Any:
    def run() -> None:
        raise error

    return run


def test_what_was_interrupted_is_not_passed_over() -> None:
    """The engine raises again, and does not continue behind the batch that was lost."""
    trap = Trap(12)
    trap.springs = raising(KeyboardInterrupt())
    with trapped_engine(trap) as engine:
        engine.next()
        with pytest.raises(KeyboardInterrupt):
            engine.next()
        with pytest.raises(ClosedError, match="interrupted"):
            engine.next()


def test_an_error_from_elsewhere_is_raised_at_the_next_wait() -> None:
    with trapped_engine(Trap(-1)) as engine:
        engine.next()
        engine.fail(OSError("another rank has died"))
        with pytest.raises(OSError, match="another rank has died"):
            engine.next()


def test_the_loop_gets_the_interrupted_batch_when_it_asks_again() -> None:
    trap = Trap(12)
    trap.springs = raising(KeyboardInterrupt())
    with trapped(trap) as loader:
        batches = iter(loader)
        assert next(batches)["x"].tolist() == [*range(8)]
        state = loader.state_dict()
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        assert loader.state_dict() == state
        trap.springs = lambda: None
        loader.load_state_dict(state)
        assert [batch["x"].tolist()[0] for batch in loader] == [8, 16, 24]


def test_a_bad_batch_is_an_error_in_its_place() -> None:
    """The engine continues behind it, as that of threads does."""
    trap = Trap(12)
    trap.springs = raising(ValueError("no good"))
    with trapped_engine(trap) as engine:
        engine.next()
        bad = engine.next()
        assert isinstance(bad.error, StageError)
        assert engine.next().result["x"].tolist() == [*range(16, 24)]


@pytest.mark.parametrize("workers", [{}, {"stages.call.workers": 1}])
def test_a_stage_that_closes_the_loader(workers: dict[str, Any]) -> None:
    trap = Trap(12)
    with trapped(trap, **workers) as loader:
        trap.springs = loader.close
        batches = iter(loader)
        next(batches)
        with pytest.raises(ClosedError):
            next(batches)


def test_another_thread_closes_it_in_the_middle_of_a_batch() -> None:
    trap = Trap(12)
    with trapped(trap) as loader:
        closer = threading.Thread(target=loader.close)

        def spring() -> None:
            closer.start()
            closer.join()

        trap.springs = spring
        batches = iter(loader)
        next(batches)
        with pytest.raises(ClosedError):
            next(batches)


def test_what_is_being_made_is_seen_from_elsewhere() -> None:
    trap = Trap(12)
    seen: list[Stats] = []
    with trapped(trap) as loader:
        trap.springs = lambda: seen.append(loader.stats())
        for number, _ in enumerate(loader):
            if number == 1:
                break
    (found,) = seen
    assert (found.num_ready, found.num_open) == (0, 1)
    assert found.stall_s["call"] > 0
