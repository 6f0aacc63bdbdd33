"""Where a process begins that takes the place of another, and how batches are dealt to another number of processes."""

from __future__ import annotations

import pytest
from dealt import MOVES, Simulation, said
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples

from loaderkit.pipeline.batches.cursor import BatchCursor
from loaderkit.sampling.dealing import BatchDealing
from loaderkit.sampling.schedule import BatchSampler, GlobalOrder
from loaderkit.sampling.shard import Shard


class TestAProcessInThePlaceOfAnother:
    @settings(max_examples=num_examples(300))
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
        begin = dealing.begin_of(number, num_finished)
        assert begin is not None
        successor = BatchCursor(order, schedule, shard=begin.shard)
        successor.seek(*begin.base)
        assert [said(successor.next()) for _ in own] == own
        assert begin.first == own[0][:2]


@st.composite
def simulations(draw: st.DrawFn) -> Simulation:
    size, world_size = draw(st.integers(1, 60)), draw(st.integers(1, 3))
    batch = draw(st.integers(1, max(1, min(9, size // world_size))))
    schedule = BatchSampler(size, world_size - 1, world_size, batch, draw(st.booleans()) and size >= batch * world_size)
    return Simulation(
        schedule, draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.randoms(use_true_random=False))
    )


class TestAnotherNumberOfProcesses:
    @settings(max_examples=num_examples(200), deadline=None)
    @given(simulations(), st.lists(st.sampled_from(MOVES), max_size=60))
    def test_the_sequence_stays(self, simulation: Simulation, moves: list[str]) -> None:
        """From N to M to K, wherever the loop is, and whoever dies; and no batch is made that another one makes, too."""
        for move in moves:
            simulation.move(move)
        for _ in range(150):
            simulation.step()
        assert simulation.dealing.border is None
        assert len(simulation.workers) == simulation.dealing.num_processes

    @given(simulations(), st.integers(1, 5))
    def test_it_takes_no_more_rounds_than_may_be_open(self, simulation: Simulation, num_processes: int) -> None:
        before = simulation.dealing.num_processes
        simulation.step()
        simulation.redeal(num_processes)
        for _ in range((simulation.depth + 1) * before):
            if simulation.dealing.border is not None:
                simulation.step()
        assert simulation.dealing.border is None

    def test_what_was_begun_already_is_not_dealt_to_another(self) -> None:
        cursor = BatchCursor(GlobalOrder(40, 1), BatchSampler(40, 0, 1, 4, False))
        cursor.next()
        cursor.next()
        with pytest.raises(ValueError, match=r"batch at \(0, 4\) was begun already, and the border is \(0, 4\)"):
            cursor.redeal((0, 4), Shard(0, 2))
