"""The stages of the thread that passes batches on: errors, times and accounts, with a clock that the test moves."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from loaderkit.engine.metrics.stalls import WAKEUP, WaitSegment
from loaderkit.engine.remote.delivery import Delivered
from loaderkit.engine.work import Stage
from loaderkit.pipeline.ranks.passing import Passed
from loaderkit.pipeline.ranks.share_stages import ShareStages, cut_wait


def passed(error: BaseException | None = None, *, is_empty: bool = False) -> Passed:
    batch = Delivered(
        epoch=0, end=8, num_items=4, name="batch 1 of epoch 0", result={}, context="context", failures=(), num_dropped=0,
        is_empty=is_empty, is_end=False, source_state=None, error=error, done_s=0.0, segments=(),
    )  # fmt: skip
    return Passed(1, (0, 4), batch)


class TestLaterStages:
    @pytest.fixture(autouse=True)
    def _stages(self) -> None:
        self.now_s = 10.0
        self.seen: list[tuple[dict[str, Any], Any]] = []
        later = [Stage("transfer", "transfer", "batch", self.transfer), Stage("call", "call", "batch", self.fail)]
        self.stages = ShareStages("share", later, lambda: self.now_s)

    def transfer(self, batch: dict[str, Any], context: Any) -> None:
        self.now_s += 2.0
        self.seen.append((batch, context))
        batch["moved"] = True

    def fail(self, batch: dict[str, Any], context: Any) -> None:
        self.now_s += 1.0
        raise ValueError("no memory left")

    def in_its_thread(self, given: Passed) -> tuple[Delivered, list[WaitSegment]]:
        """A worker's clock reads the CPU time of its own thread."""
        made: list[tuple[Delivered, list[WaitSegment]]] = []

        def work() -> None:
            self.stages.enter()
            self.now_s += 4.0
            self.stages.served(given)
            made.append(self.stages.run(given))

        self.stages.begin()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return made[0]

    def test_run_in_order_and_end_at_an_error(self) -> None:
        batch, segments = self.in_its_thread(passed())
        assert str(batch.error) == "no memory left"
        assert self.stages.error is batch.error
        assert batch.result == {"moved": True}
        assert self.seen == [(batch.result, "context")]
        assert segments == [WaitSegment(14.0, 16.0, "transfer"), WaitSegment(16.0, 17.0, "call")]
        rows = {row.name: (row.kind, row.busy_s, row.num_items) for row in self.stages.rows(self.now_s)}
        assert rows == {"share": ("share", 4.0, 4), "transfer": ("transfer", 2.0, 4), "call": ("call", 1.0, 4)}

    @pytest.mark.parametrize("given", [passed(ValueError("before")), passed(is_empty=True)])
    def test_leave_out_what_has_no_result(self, given: Passed) -> None:
        batch, segments = self.in_its_thread(given)
        assert given.batch is not None
        assert batch.error is given.batch.error
        assert segments == []
        assert self.seen == []


def test_a_wait_is_cut_in_proportion() -> None:
    assert cut_wait(1.0, 5.0, {"read": 3.0, "decode": 1.0}) == [
        WaitSegment(1.0, 4.0, "read"),
        WaitSegment(4.0, 5.0, "decode"),
    ]
    assert cut_wait(1.0, 5.0, {}) == [WaitSegment(1.0, 5.0, WAKEUP)]
    assert cut_wait(1.0, 5.0, {"read": 0.0}) == [WaitSegment(1.0, 5.0, "read")]
