"""What an executor's consumer waited for and was given, by a clock of the test's own."""

from __future__ import annotations

import random

import pytest

from loaderkit.engine.metrics.consumer_account import ConsumerAccount
from loaderkit.engine.remote.delivery import Delivered
from loaderkit.engine.work import SourceCounts


def _drawn(rng: random.Random, epoch: int, end: int) -> Delivered:
    num_items = rng.randint(1, 9)
    num_dropped = rng.randint(0, num_items)
    num_skipped = rng.randint(0, num_items - num_dropped)
    is_empty = num_dropped + num_skipped == num_items
    return Delivered(
        epoch=epoch,
        end=end,
        num_items=num_items,
        name="",
        result=None,
        context=None,
        failures=(),
        num_dropped=num_dropped,
        num_skipped=num_skipped,
        is_empty=is_empty,
        is_end=is_empty and rng.random() < 0.5,
        source_state=None,
        error=OSError() if rng.random() < 0.1 else None,
        done_s=0.0,
        segments=(),
        by_source=SourceCounts((num_items - num_dropped - num_skipped, rng.randint(0, 9))),
    )


def _halves(given: Delivered, begin_s: float, end_s: float) -> dict[str, float]:
    return dict.fromkeys(("read", "decode"), (end_s - begin_s) / 2)


def test_sums_are_those_of_what_was_given(rng: random.Random) -> None:
    """Errors and ends of epochs do not count, but the waits for them do; waits that gave nothing do not."""
    now_s = [5.0]
    account = ConsumerAccount(lambda: now_s[0])
    assert (account.read().wall_s, account.next_position) == (0.0, None)
    account.record(1000)
    now_s[0] += 3.0  # not counted: the first wait is later
    counted: list[Delivered] = []
    waits: list[tuple[float, float, Delivered]] = []
    first_s = now_s[0]

    for number in range(200):
        given, wait_s, is_interrupted = _drawn(rng, number, number), float(rng.randint(0, 3)), rng.random() < 0.2

        def wait(given: Delivered = given, wait_s: float = wait_s, is_interrupted: bool = is_interrupted) -> Delivered:
            now_s[0] += wait_s
            assert account.next_position is None, "it is to be made again if it does not come"
            assert account.read().waiting_since_s == now_s[0] - wait_s
            if is_interrupted:
                raise KeyboardInterrupt
            return given

        if is_interrupted:
            with pytest.raises(KeyboardInterrupt):
                account.take(wait, lambda *_: {"read": 1.0})
            assert account.next_position is None
        else:
            assert account.take(wait, _halves) is given
            waits.append((now_s[0] - wait_s, now_s[0], given))
            now_s[0] += rng.randint(0, 3)  # the loop's step
            is_counted = given.error is None and not given.is_end
            counted += [given] * is_counted
            assert account.next_position == ((number, number) if is_counted else None)

    now_s[0] += 2.0
    read = account.read()
    counters = read.counters({"read": 7.0})
    waited_s = sum(until_s - since_s for since_s, until_s, _ in waits)
    by_source = [given.by_source.samples for given in counted if given.by_source is not None]
    assert read.waiting_since_s is None
    assert counters == {
        "now_s": now_s[0],
        "wall_s": now_s[0] - first_s,
        "num_batches": len([given for given in counted if not given.is_empty]),
        "num_samples": sum(given.num_items - given.num_dropped - given.num_skipped for given in counted),
        "num_dropped": sum(given.num_dropped for given in counted),
        "by_source": SourceCounts(tuple(sum(numbers) for numbers in zip(*by_source, strict=True))),
        "waits_s": {"read": waited_s / 2 + 7.0, "decode": waited_s / 2},
    }
    handoffs = account.recorded()
    assert [handoff[:5] for handoff in handoffs] == [
        (since_s, until_s, given.epoch, given.end, given.num_items) for since_s, until_s, given in waits
    ]
    assert account.recorded() == []
