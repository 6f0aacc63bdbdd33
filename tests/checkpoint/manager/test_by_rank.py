"""What each rank has for itself: plain values are one rank's, with a word on every rank, or kept by rank where that is said."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import nested_of
from test_kept_plan import job, kept_messages

import loaderkit
from loaderkit.checkpoint import PerRank
from loaderkit.checkpoint.discovery.description import Format
from loaderkit.checkpoint.restore.stateful import restore_state
from loaderkit.checkpoint.state import resolve
from loaderkit.checkpoint.structure import OWN_KEY, saved_objects, saved_structure
from loaderkit.errors import CheckpointError, StateError


class Cursor:
    """A loader of one rank: plain values, a tensor, and what is there on some ranks only."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def shown(cursor: Cursor) -> dict[str, str]:
    return {name: repr(value) for name, value in cursor.state.items()}


def saved_by_manager(state: dict[str, Any]) -> dict[str, Any]:
    resolved = resolve(state)
    own = saved_structure(resolved.containers) | saved_objects(resolved.objects)
    return nested_of(resolved) | {OWN_KEY: own}


def drawn(rng: random.Random, rank: int) -> dict[str, Any]:
    state = {"file": f"shard-{rank}", "row": rng.randrange(1000) * 4 + rank, "size": 7}
    state["order"] = torch.randint(0, 100, (rng.randrange(2, 5),)) + 1000 * rank
    state["worker"] = rng.choice([None, {"offset": rank}, {}, [{"n": rank}]])
    if rng.random() < 0.5:
        state[f"only-{rank}"] = rank
    return state


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_an_object_is_that_of_one_rank(
    kind: Format, rng: random.Random, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Never a mixture, also where ranks have tables in the place of values, and tensors of other shapes."""
    caplog.set_level(logging.WARNING, "loaderkit")
    num_ranks = rng.randrange(2, 5)
    with job(tmp_path, num_ranks, kind=kind) as ranks:
        for _ in range(3):
            states = [drawn(rng, rank) for rank in range(num_ranks)]
            weight = torch.rand(3)
            saved = [
                saved_by_manager({"w": weight, "loader": Cursor(**one), "lr": 0.1 * rank})
                for rank, one in enumerate(states)
            ]
            assert ranks.save(saved) == [None] * num_ranks
            state: dict[str, Any] = {"w": torch.zeros(3), "loader": Cursor(), "lr": 9.0}
            restore_state(str(ranks.last), state, timeout_s=60.0)
            assert shown(state["loader"]) == shown(Cursor(**states[0]))
            assert state["lr"] == 0.0
            assert torch.equal(state["w"], weight)
    said = [record.getMessage() for record in caplog.records]
    for rank in range(num_ranks):
        assert sum("'loader.file'" in line and f"this is rank {rank}" in line for line in said) == 1


def test_the_plan_is_kept_beside_values_that_differ(tmp_path: Path) -> None:
    """And given up once values come apart that were the same."""
    with job(tmp_path, 2) as ranks:
        for number, (lr, epoch) in enumerate([((1, 2), (0, 0)), ((3, 4), (1, 1)), ((5, 6), (2, 3)), ((7, 8), (4, 4))]):
            states = [{"w": torch.ones(2), "lr": lr[rank], "epoch": epoch[rank]} for rank in range(2)]
            assert ranks.save(states) == [None, None]
            restored = loaderkit.restore(ranks.last)
            assert (restored["lr"], restored["epoch"]) == (lr[0], epoch[0])
            assert (ranks.posted == kept_messages(2)) == (number in (1, 3))


def test_a_table_in_the_place_of_a_value_is_refused(tmp_path: Path) -> None:
    with job(tmp_path, 2) as ranks:
        errors = ranks.save([{"t": {"x": None}}, {"t": {"x": {"a": 1}}}])
    assert any("'t.x' is a value on one rank and a table on another" in str(error) for error in errors)


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_a_tensor_in_the_place_of_a_value_is_refused(kind: Format, rng: random.Random, tmp_path: Path) -> None:
    values = rng.sample([torch.ones(2), rng.random()], 2)
    with job(tmp_path, 2, kind=kind) as ranks:
        errors = ranks.save([{"w": torch.ones(2), "v": value} for value in values])
    said = ["torch.float32 of shape [2]" if isinstance(value, torch.Tensor) else "a plain value" for value in values]
    assert any(f"'v' is {said[0]} on rank 0, and {said[1]} on rank 1, so nothing" in str(error) for error in errors)


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_each_rank_gets_its_own_back(
    kind: Format, rng: random.Random, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "loaderkit")
    num_ranks = rng.randrange(2, 5)
    states = [drawn(rng, rank) for rank in range(num_ranks)]
    with job(tmp_path, num_ranks, kind=kind) as ranks:
        own = [PerRank(Cursor(**state), rank, num_ranks) for rank, state in enumerate(states)]
        assert ranks.save([saved_by_manager({"w": torch.ones(2), "loader": one}) for one in own]) == [None] * num_ranks
        for rank, expected in enumerate(states):
            cursor = Cursor()
            restore_state(str(ranks.last), {"loader": PerRank(cursor, rank, num_ranks)}, timeout_s=60.0)
            assert shown(cursor) == shown(Cursor(**expected))
        weight = torch.zeros(2)
        for size in (num_ranks - 1, num_ranks + 1):
            with pytest.raises(
                CheckpointError, match=rf"'loader' is each rank's own, .* by {num_ranks} ranks; here are {size}"
            ):
                restore_state(str(ranks.last), {"w": weight, "loader": PerRank(Cursor(), 0, size)}, timeout_s=60.0)
        assert not weight.any()
    assert not caplog.records


def test_a_state_of_other_ranks_is_refused() -> None:
    with pytest.raises(StateError, match="here are 3 ranks"):
        PerRank(Cursor(), 0, 3).load_state_dict(PerRank(Cursor(), 0, 1).state_dict())
