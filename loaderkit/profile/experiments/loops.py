"""The loops that a report or an experiment runs: endless batches, and a step after each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from random import Random
from typing import Any, Protocol

from loaderkit._internal.imports import import_named, is_name
from loaderkit.errors import ConfigError

Step = Callable[[Any], object]
"""What the loop does with a batch."""


class Batches(Iterable[Any], Sized, Protocol):
    """The part of a loader that a loop needs."""


def endless(loader: Batches) -> Iterator[Any]:
    """Epoch after epoch; it ends where the pipeline has `order.epochs`."""
    while True:
        num_batches = 0
        for batch in loader:
            num_batches += 1
            yield batch
        if num_batches == 0:
            return


def sleep_step(seconds: float, deviation_s: float = 0.0, sleep: Callable[[float], object] = time.sleep) -> Step:
    """A step that sleeps: it leaves the CPUs and the GIL to the workers, as a step on a GPU does. Its times are normally
    distributed, none below 0, and the same ones in every run."""
    random = Random(0)  # noqa: S311 -- so that two runs compare

    def rest(batch: Any) -> None:
        drawn_s = random.gauss(seconds, deviation_s)
        if drawn_s > 0:
            sleep(drawn_s)

    return rest


def open_consumer(name: str) -> Step:
    """The function of "package.module:name", called with every batch. Raises ConfigError."""
    if not is_name(name):
        raise ConfigError(f'a consumer is named as "package.module:function", not {name!r}')
    try:
        consumer: Any = import_named(name)
    except Exception as error:
        raise ConfigError(f"the consumer {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(consumer):
        raise ConfigError(f"the consumer {name!r} is a {type(consumer).__name__}, which cannot be called with a batch")
    step: Step = consumer
    return step


def run_steps(
    batches: Iterator[Any],
    step: Step,
    *,
    num_steps: int | None = None,
    seconds: float | None = None,
    show: Callable[[int], object] = lambda num_steps: None,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Take batches and run a step with each, until `num_steps` are done or `seconds` have passed; returns their number.

    A step counts as done when the next batch is there, as it does in the report: one batch more is taken.
    """
    begin_s = clock()
    done = -1
    for batch in batches:
        done += 1
        show(done)
        if (num_steps is not None and done >= num_steps) or (seconds is not None and clock() - begin_s >= seconds):
            break
        step(batch)
    return max(0, done)
