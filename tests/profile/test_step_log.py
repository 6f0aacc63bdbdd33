"""The loop cut at its batches: the parts sum to the whole, whatever the loop does."""

from __future__ import annotations

import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderkit.profile.build import utilisation
from loaderkit.profile.step_log import StepLog


class Clock:
    """A clock that stands still until it is advanced."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


durations = st.floats(0, 100, allow_nan=False)
epochs = st.lists(
    st.tuples(st.lists(st.tuples(durations, durations), max_size=6), durations, st.booleans()), max_size=5
)


@given(epochs)
def test_the_parts_sum_to_the_whole(passes: list[tuple[list[tuple[float, float]], float, bool]]) -> None:
    clock = Clock()
    log = StepLog(clock)
    waited_s = computed_s = 0.0
    for steps, pause_s, breaks in passes:
        log.on_epoch()
        computed_s += sum(compute_s for _, compute_s in (steps[:-1] if breaks else steps))
        for wait_s, compute_s in steps:
            log.on_request()
            clock.now_s += wait_s
            waited_s += wait_s
            log.on_batch()
            clock.now_s += compute_s
        if not breaks:
            log.on_request()
            log.on_end()
        clock.now_s += pause_s
    log.close()
    assert log.compute_s + log.next_s + log.outside_s == pytest.approx(clock.now_s)
    assert log.next_s == pytest.approx(waited_s)
    assert log.compute_s == pytest.approx(computed_s), "a pause after `break` is no computing"
    assert log.num_batches == sum(len(steps) for steps, _, _ in passes)


def test_a_step_computes_and_then_waits() -> None:
    clock = Clock()
    log = StepLog(clock)
    clock.now_s = 5.0  # before the loop
    for wait_s, compute_s in ((2.0, 1.0), (0.5, 3.0)):
        log.on_request()
        clock.now_s += wait_s
        log.on_batch()
        clock.now_s += compute_s
    log.on_request()
    log.on_end()
    clock.now_s += 7.0  # after it
    log.close()
    assert log.kept() == [(7.0, 1.0, 0.5), (8.5, 3.0, 0.0)]
    assert (log.compute_s, log.next_s, log.outside_s, log.first_wait_s) == (4.0, 2.5, 12.0, 2.0)


def test_a_batch_after_which_none_is_asked_for_is_no_step() -> None:
    clock = Clock()
    log = StepLog(clock)
    log.on_request()
    log.on_batch()
    clock.now_s += 3.0
    log.close()
    assert (log.num_batches, log.num_steps, log.compute_s, log.outside_s) == (1, 0, 0.0, 3.0)


def test_memory_is_bounded() -> None:
    clock = Clock()
    log = StepLog(clock)
    for _ in range(20_000):
        log.on_request()
        log.on_batch()
        clock.now_s += 1.0
    log.close()
    kept = log.kept()
    assert len(kept) <= 2048
    assert log.num_steps == 19_999
    assert [at_s for at_s, _, _ in kept] == [n * log.every for n in range(len(kept))]


class Memory:
    """It takes 2 s to give it back, unless the loop keeps a reference."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __del__(self) -> None:
        self._clock.now_s += 2.0


@pytest.mark.parametrize("deletes", [False, True])
@pytest.mark.parametrize("as_tuple", [False, True])
def test_dropping_a_batch_is_no_computing(*, deletes: bool, as_tuple: bool) -> None:
    clock = Clock()
    log = StepLog(clock)
    batch: object = None
    for _ in range(5):
        log.on_request()
        clock.now_s += 0.5
        following = (Memory(clock),) if as_tuple else {"x": Memory(clock)}
        log.on_batch(following)
        batch = following  # as `for batch in loader` does
        clock.now_s += 1.0
        if isinstance(batch, dict):
            batch["x"] = None  # moved to a GPU, say
        del following
        if deletes:
            batch = None
    log.on_request()
    log.on_end()
    log.close()
    assert log.compute_s == 5.0
    assert log.release_s == 2.0 * 4, "the last one is still held"
    assert log.next_s == 0.5 * 5 + log.release_s
    assert log.compute_s + log.next_s + log.outside_s == log.end_s - log.begin_s
    assert [wait_s for _, _, wait_s in log.kept()] == [0.5, 2.5, 2.5, 2.5, 0.0]


def test_what_the_loop_keeps_is_not_dropped() -> None:
    clock = Clock()
    log = StepLog(clock)
    kept = []
    for _ in range(5):
        log.on_request()
        kept.append((Memory(clock),))
        log.on_batch(kept[-1])
    log.close()
    assert log.release_s == 0.0


def loop(log: StepLog, clock: Clock, epochs: list[list[tuple[float, float]]]) -> None:
    """Steps of (wait, compute) in s, and a validation of 100 s behind every epoch."""
    for steps in epochs:
        log.on_epoch()
        for wait_s, compute_s in steps:
            log.on_request()
            clock.now_s += wait_s
            log.on_batch()
            clock.now_s += compute_s
        log.on_request()
        log.on_end()
        clock.now_s += 100.0
    log.close()


@given(st.lists(st.lists(st.tuples(durations, durations.map(lambda s: s + 1)), min_size=2, max_size=6), min_size=1))
def test_utilisation_is_that_of_mlperf_storage(epochs: list[list[tuple[float, float]]]) -> None:
    """As DLIO counts it: compute time / total time by epoch, without the first step of each."""
    clock = Clock()
    log = StepLog(clock)
    loop(log, clock, epochs)
    found = utilisation(log)
    assert found is not None
    shares = [sum(compute for _, compute in steps[1:]) / sum(map(sum, steps[1:])) for steps in epochs]
    counts = [len(steps) - 1 for steps in epochs]
    assert found.percent == pytest.approx(100 * sum(map(operator.mul, shares, counts)) / sum(counts))
    steps = [step for epoch in epochs for step in epoch]
    assert found.whole_run_percent == pytest.approx(100 * sum(compute for _, compute in steps) / sum(map(sum, steps)))
    assert [mark.passes for mark in found.marks] == [found.percent >= 90, found.percent >= 70]


def test_there_is_no_utilisation_without_a_step_that_counts() -> None:
    clock = Clock()
    log = StepLog(clock)
    loop(log, clock, [[(1.0, 1.0)], [(1.0, 1.0)]])
    assert (log.num_steps, utilisation(log)) == (2, None)
