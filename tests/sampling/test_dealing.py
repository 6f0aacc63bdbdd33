"""Where a process begins that takes the place of another, and how batches are dealt to another number of processes."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderkit.pipeline.batches.cursor import BatchCursor
from loaderkit.sampling.dealing import BatchDealing
from loaderkit.sampling.schedule import BatchSampler, GlobalOrder
from loaderkit.sampling.shard import Shard
from loaderkit.stages.base import BatchWork


def said(work_item: BatchWork | None) -> tuple[object, ...]:
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
        seat = dealing.seat(number, num_finished)
        assert seat is not None
        successor = BatchCursor(order, schedule, shard=seat.shard)
        successor.seek(*seat.base)
        assert [said(successor.next()) for _ in own] == own
        assert seat.first == own[0][:2]


class Worker:
    """A process that opens at most `depth` batches that are not delivered, in order."""

    def __init__(self, cursor: BatchCursor, depth: int, finished: deque[BatchWork] | None = None) -> None:
        self.cursor = cursor
        self.depth = depth
        self.finished = finished or deque()  # by one that has died
        self.open: deque[BatchWork] = deque()

    def read_ahead(self, num_batches: int) -> None:
        for _ in range(min(num_batches, self.depth - len(self.open))):
            work_item = self.cursor.next()
            if work_item is None:
                return
            self.open.append(work_item)

    def take(self) -> BatchWork:
        if self.finished:
            return self.finished.popleft()
        self.read_ahead(1)
        return self.open.popleft()


class Simulation:
    """A loop over processes whose number changes, and which die, at drawn moments."""

    def __init__(self, schedule: BatchSampler, num_processes: int, depth: int, rng: random.Random) -> None:
        self.schedule = schedule
        self.order = GlobalOrder(schedule.num_samples, 5)
        self.depth = depth
        self.rng = rng
        self.dealing = BatchDealing(schedule, num_processes)
        self.workers: dict[int, Worker] = {}
        self.whole = self.cursor(Shard(), (0, 0))
        self.seek((0, 0))

    def cursor(self, shard: Shard, place: tuple[int, int]) -> BatchCursor:
        cursor = BatchCursor(self.order, self.schedule, shard=shard)
        cursor.seek(*place)
        return cursor

    def begin(self, number: int, finished: deque[BatchWork]) -> None:
        """A process in the place of one that left `finished`, or a new one."""
        seat, dealing = self.dealing.seat(number, len(finished)), self.dealing
        if seat is None:
            self.workers[number].finished = finished
            return
        worker = self.workers[number] = Worker(self.cursor(seat.shard, seat.base), self.depth, finished)
        if dealing.border is not None and seat.first < dealing.border:
            worker.cursor.redeal(dealing.border, self.shard_behind(number))

    def shard_behind(self, number: int) -> Shard | None:
        return Shard(number, self.dealing.num_behind) if number < self.dealing.num_behind else None

    def seek(self, place: tuple[int, int]) -> None:
        self.dealing.seek(*place)
        self.whole.seek(*place)
        for number in range(self.dealing.num_processes):
            shard = Shard(number, self.dealing.num_processes)
            worker = self.workers.setdefault(number, Worker(self.cursor(shard, place), self.depth))
            head = (worker.open[0].epoch, worker.open[0].begin) if worker.open else worker.cursor.next_position
            if worker.cursor.begins_at(*place, shard) != head:
                worker.cursor.seek(*place, shard)
                worker.open.clear()
            worker.finished.clear()
        self.drop_surplus()

    def drop_surplus(self) -> None:
        for number in [number for number in self.workers if number >= self.dealing.num_processes]:
            del self.workers[number]

    def redeal(self, num_processes: int) -> None:
        if self.dealing.border is not None:
            return
        border = self.dealing.redeal(num_processes, max(len(w.finished) + w.depth for w in self.workers.values()))
        for number, worker in self.workers.items():
            worker.cursor.redeal(border, self.shard_behind(number))
        for number in range(len(self.workers), num_processes):
            self.begin(number, deque())
        self.pass_border()

    def pass_border(self) -> None:
        if self.dealing.is_at_border:
            leaving = [worker for number, worker in self.workers.items() if number >= self.dealing.num_behind]
            assert all(not worker.open and not worker.finished for worker in leaving)
            assert all(worker.cursor.next() is None for worker in leaving)
            self.dealing.pass_border()
            self.drop_surplus()

    def die(self) -> None:
        number = self.rng.choice(list(self.workers))
        worker = self.workers[number]
        num_finished = self.rng.randint(0, len(worker.open))
        worker.finished.extend(list(worker.open)[:num_finished])
        worker.open.clear()
        self.begin(number, worker.finished)

    def step(self) -> None:
        for worker in self.workers.values():
            worker.read_ahead(self.rng.randint(0, self.depth))
        work_item = self.workers[self.dealing.turn].take()
        assert said(work_item) == said(self.whole.next())
        self.dealing.delivered(work_item.epoch, work_item.end)
        self.pass_border()


@st.composite
def simulations(draw: st.DrawFn) -> Simulation:
    size, world_size = draw(st.integers(1, 60)), draw(st.integers(1, 3))
    batch = draw(st.integers(1, max(1, min(9, size // world_size))))
    schedule = BatchSampler(size, world_size - 1, world_size, batch, draw(st.booleans()) and size >= batch * world_size)
    return Simulation(
        schedule, draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.randoms(use_true_random=False))
    )


class TestAnotherNumberOfProcesses:
    @settings(max_examples=500, deadline=None)
    @given(
        simulations(), st.lists(st.sampled_from(["redeal", "die", "seek", "step", "step", "step", "step"]), max_size=60)
    )
    def test_the_sequence_stays(self, simulation: Simulation, moves: list[str]) -> None:
        """From N to M to K, wherever the loop is, and whoever dies; and no batch is made that another one makes, too."""
        rng = simulation.rng
        for move in moves:
            if move == "redeal":
                simulation.redeal(rng.randint(1, 5))
            elif move == "die":
                simulation.die()
            elif move == "seek":
                simulation.seek((rng.randint(0, 3), rng.randint(0, simulation.schedule.num_samples)))
            else:
                simulation.step()
        for _ in range(30):
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
