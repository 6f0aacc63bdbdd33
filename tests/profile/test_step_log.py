"""The loop cut at its batches: the parts sum to the whole, whatever the loop does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderkit.profile.step_log import StepLog


class Clock:
    """Time that stands still until it is told to go on."""

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
