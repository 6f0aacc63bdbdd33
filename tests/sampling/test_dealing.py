"""Where a process begins that takes the place of another, wherever that was."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from loaderkit.pipeline.batches.cursor import BatchCursor
from loaderkit.sampling.dealing import BatchDealing
from loaderkit.sampling.schedule import BatchSampler, GlobalOrder
from loaderkit.sampling.shard import Shard
from loaderkit.stages.base import BatchWork


def said(work_item: BatchWork | None) -> object:
    """Which samples of which epoch, and between which positions."""
    assert work_item is not None
    return work_item.epoch, work_item.begin, work_item.end, work_item.positions.tolist(), work_item.indices.tolist()


class TestAProcessInThePlaceOfAnother:
    @settings(max_examples=300)
    @given(
        size=st.integers(1, 60),
        batch=st.integers(1, 9),
        drop_last=st.booleans(),
        world_size=st.integers(1, 3),
        num_processes=st.integers(1, 5),
        seek=st.tuples(st.integers(0, 3), st.integers(0, 60)),
        num_delivered=st.integers(0, 40),
        number=st.integers(0, 4),
        num_finished=st.integers(0, 4),
    )
    def test_makes_what_the_dead_one_would_have_made(
        self,
        size: int,
        batch: int,
        drop_last: bool,
        world_size: int,
        num_processes: int,
        seek: tuple[int, int],
        num_delivered: int,
        number: int,
        num_finished: int,
    ) -> None:
        schedule = BatchSampler(size, world_size - 1, world_size, batch, drop_last)
        if schedule.num_batches() == 0:
            return
        number %= num_processes
        order, where = GlobalOrder(size, 5), (seek[0], min(seek[1], size))
        whole = BatchCursor(order, schedule)
        whole.seek(*where)
        dealing = BatchDealing(schedule, num_processes)
        dealing.seek(*where)
        for _ in range(num_delivered):
            work_item = whole.next()
            assert work_item is not None
            dealing.delivered(work_item.epoch, work_item.end)
        assert dealing.turn == num_delivered % num_processes
        expected = [said(whole.next()) for _ in range(num_processes * (num_finished + 4))]
        own = expected[(number - dealing.turn) % num_processes + num_finished * num_processes :: num_processes]
        successor = BatchCursor(order, schedule, shard=Shard(number, num_processes))
        successor.seek(*dealing.base(number, num_finished))
        assert [said(successor.next()) for _ in own] == own
        assert dealing.unfinished(number, num_finished) == own[0][:2]  # type: ignore[index]
