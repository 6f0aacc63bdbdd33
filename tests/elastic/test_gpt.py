"""A GPT that is trained on packed documents of two sources, interrupted, and continued by another number of ranks."""

from __future__ import annotations

import random
from pathlib import Path

import gpt_ranks
import pytest
import rank_programs

NUM_STEPS = 16
WORLD_SIZES = (1, 2, 3, 4, 6)  # each shares the twelve sequences of a step evenly


class Job:
    """A training job with its own checkpoints, on a text that all jobs of a test share."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder / name
        self.folder.mkdir()
        (folder / "text").mkdir(exist_ok=True)
        (self.folder / "text").symlink_to(folder / "text")
        self._cache = folder / "cache"
        self._num_runs = 0

    def run(self, num_ranks: int, num_steps: int, *, save_every: int = 5, dies_at: int | None = None) -> dict[int, str]:
        """Train up to `num_steps`, or die; (epoch, loss to the last bit) of each step made."""
        self._num_runs += 1
        log = self.folder / f"log-{self._num_runs}"
        arguments = ["--steps", num_steps, "--folder", self.folder, "--save-every", save_every, "--speeches", 60]
        codes = rank_programs.run_ranks(
            gpt_ranks.train, num_ranks, log, self._cache, list(map(str, arguments)), dies_at, die_together=True
        )
        assert codes == [0] * num_ranks if dies_at is None else any(codes), codes
        lines = [line.split() for line in log.read_text().splitlines() if line.startswith("step ")]
        return {int(line[1]): f"{line[3]} {line[-1]}" for line in lines}


def test_losses_are_the_same_to_the_last_bit(tmp_path: Path, rng: random.Random) -> None:
    whole = Job(tmp_path, "whole").run(rng.choice([1, 2]), NUM_STEPS)
    assert sorted(whole) == list(range(1, NUM_STEPS + 1))
    first, *_, last = (float.fromhex(text.split()[1]) for _, text in sorted(whole.items()))
    assert last < first - 1, "it learns"
    assert {text.split()[0] for text in whole.values()} == {"0", "1"}, "over the end of an epoch"
    before, after = rng.sample([1, 2, 3, 4], 2)
    at = rng.randrange(1, NUM_STEPS)
    job = Job(tmp_path, "parts")
    if rng.random() < 0.5:  # stopped, and saved
        losses = job.run(before, at)
        losses |= job.run(after, NUM_STEPS)
        assert sorted(losses) == sorted(whole)
    else:  # killed before it could print the loss of that step, and maybe while a checkpoint was being written
        losses = job.run(before, NUM_STEPS, save_every=rng.choice([1, 3]), dies_at=at)
        assert sorted(losses) == list(range(1, at))
        resumed = job.run(after, NUM_STEPS)
        assert min(resumed) <= at
        assert resumed | losses == losses | resumed, "steps that are made again have the same losses"
        losses |= resumed
    assert losses == whole, (before, at, after)


@pytest.mark.prove
@pytest.mark.parametrize("number", range(4))
def test_killed_again_and_again(tmp_path: Path, rng: random.Random, number: int) -> None:
    whole = Job(tmp_path, "whole").run(rng.choice(WORLD_SIZES), 30)
    job, losses = Job(tmp_path, "parts"), dict[int, str]()
    while max(losses, default=0) < 30:
        at = max(losses, default=0) + rng.randrange(2, 12)
        some = job.run(rng.choice(WORLD_SIZES), 30, save_every=rng.choice([1, 2, 5]), dies_at=at if at <= 30 else None)
        assert some | losses == losses | some
        losses |= some
    assert losses == whole
