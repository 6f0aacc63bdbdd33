"""Batches dealt to processes that come, go and die, as arithmetic: no process runs."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from loaderkit.pipeline.batches.cursor import BatchCursor
from loaderkit.samples.chunk import BatchWork
from loaderkit.sampling.dealing import BatchDealing
from loaderkit.sampling.schedule import BatchSampler, GlobalOrder
from loaderkit.sampling.shard import Shard


def said(work_item: BatchWork | None) -> tuple[object, ...]:
    """Which samples of which epoch, and between which positions."""
    assert work_item is not None
    return work_item.epoch, work_item.begin, work_item.end, work_item.positions.tolist(), work_item.indices.tolist()


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

    def __init__(
        self,
        schedule: BatchSampler,
        num_processes: int,
        depth: int,
        rng: random.Random,
        make_cursor: Callable[[Shard], BatchCursor] | None = None,
    ) -> None:
        self.schedule = schedule
        order = GlobalOrder(schedule.num_samples, 5)
        self.make_cursor = make_cursor or (lambda shard: BatchCursor(order, schedule, shard=shard))
        self.depth = depth
        self.rng = rng
        self.dealing = BatchDealing(schedule, num_processes)
        self.workers: dict[int, Worker] = {}
        self.whole = self.cursor(Shard(), (0, 0))
        self.seek((0, 0))

    def cursor(self, shard: Shard, place: tuple[int, int]) -> BatchCursor:
        cursor = self.make_cursor(shard)
        cursor.seek(*place)
        return cursor

    def begin(self, number: int, finished: deque[BatchWork]) -> None:
        """A process in the place of one that left `finished`, or a new one."""
        begin, dealing = self.dealing.begin_of(number, len(finished)), self.dealing
        if begin is None:
            self.workers[number].finished = finished
            return
        worker = self.workers[number] = Worker(self.cursor(begin.shard, begin.base), self.depth, finished)
        if dealing.border is not None and begin.first < dealing.border:
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

    def move(self, move: str) -> None:
        """Change the number, end a process, go elsewhere, or take a batch."""
        if move == "redeal":
            self.redeal(self.rng.randint(1, 5))
        elif move == "die":
            self.die()
        elif move == "seek":
            epoch = self.rng.randint(0, 3)
            self.seek((epoch, self.rng.randint(0, self.schedule.samples_in(epoch))))
        else:
            self.step()


MOVES = ("redeal", "die", "seek", "step", "step", "step", "step")
