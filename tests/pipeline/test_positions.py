"""Where the loop is, and where its executor reads ahead: the batches are those of the loop's place, wherever it was before."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any
from unittest.mock import Mock

import pytest
from numbers_dataset import Numbers

import loaderkit
from loaderkit import Pipeline


def _numbers_of(batch: dict[str, Any]) -> tuple[int, ...]:
    return tuple(batch["x"].tolist())


@pytest.mark.parametrize("executor", ["inline", "thread"])
def test_batches_follow_the_state_that_was_loaded_last(executor: str, rng: random.Random) -> None:
    """Also if others were loaded before it, and read ahead from; that of the place where the executor stopped is among them."""
    pipeline = Pipeline.dataset(Numbers(rng.randint(20, 40))).shuffle("global", seed=rng.randint(0, 99)).read()
    overrides = {"prefetch.executor": executor, "prefetch.batches": rng.randint(1, 9)}
    states: list[dict[str, Any]] = []
    batches: list[tuple[int, ...]] = []
    with loaderkit.build(pipeline.batch(rng.randint(2, 7)).epochs(4), overrides=overrides) as loader:
        for _ in range(4):
            states.append(loader.state_dict())
            for batch in loader:
                batches.append(_numbers_of(batch))
                states.append(loader.state_dict())
            assert states.pop() == loader.state_dict()
        ends = [number for number, state in enumerate(states) if state["position"] == 0] + [len(states)]

        number = 0
        for _ in range(40):
            for other in rng.sample(states, rng.randrange(3)):
                loader.load_state_dict(other)
                loader.start()
            if number == len(states) or rng.random() < 0.3:
                number = rng.randrange(len(states))
            loader.load_state_dict(states[number])
            num_left = next(end for end in ends if end > number) - number
            num = min(num_left, rng.randint(1, 4))
            assert [_numbers_of(batch) for batch in islice(loader, num)] == batches[number : number + num]
            number += num


@pytest.mark.parametrize("executor", ["inline", "thread"])
def test_a_batch_that_ctrl_c_keeps_from_the_loop_comes_again(
    executor: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor has given it, and the loop has not got it."""
    size, batch = rng.randint(20, 40), rng.randint(1, 7)
    pipeline = Pipeline.dataset(Numbers(size)).shuffle("none").read().batch(batch)
    with loaderkit.build(pipeline, overrides={"prefetch.executor": executor}) as loader:
        num_before = rng.randint(0, size // batch - 1)
        batches = iter(loader)
        taken = [number for given in islice(batches, num_before) for number in _numbers_of(given)]
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(loader._sources, "passed", Mock(side_effect=KeyboardInterrupt))
            next(batches)
        loader.load_state_dict(loader.state_dict())
        assert [*taken, *(number for given in loader for number in _numbers_of(given))][:size] == [*range(size)]
