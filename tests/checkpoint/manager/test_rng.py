"""The states of random number generators come back to the last bit, on the rank that saved them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_states import save_dcp

import loaderkit
from loaderkit.checkpoint import RngState
from loaderkit.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore")


def drawn() -> tuple[Any, ...]:
    """Of every generator a few numbers, normal ones too, of which each keeps every second one."""
    return (
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
        np.random.rand(3).tolist(),
        np.random.randn(3).tolist(),
        random.random(),
        random.gauss(0, 1),
    )


def test_what_is_drawn_next_is_the_same() -> None:
    drawn()
    state = RngState(0).state_dict()
    expected = drawn()
    drawn()
    RngState(0).load_state_dict(state)
    assert drawn() == expected


def test_it_passes_through_a_checkpoint(tmp_path: Path) -> None:
    save_dcp({"rng": RngState(0).state_dict()}, tmp_path / "step-1")
    expected = drawn()
    RngState(0).load_state_dict(loaderkit.restore(tmp_path / "step-1", nested=True)["rng"])
    assert drawn() == expected


def test_every_rank_has_its_own_and_more_ranks_draw_other_numbers() -> None:
    state: dict[str, Any] = {}
    expected = []
    for rank in range(2):
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        state |= RngState(rank).state_dict()
        expected.append(drawn())
    found = []
    for _ in range(2):
        for rank in range(5):
            RngState(rank).load_state_dict(state)
            found.append(drawn())
    assert found[:2] == expected
    assert found[:5] == found[5:]
    for column in zip(*found[:5], strict=True):
        assert len({str(numbers) for numbers in column}) == 5


def test_another_state_is_refused() -> None:
    before = torch.get_rng_state()
    with pytest.raises(StateError, match="no state of random number generators: it has weight"):
        RngState(0).load_state_dict({"weight": torch.ones(2)})
    damaged = RngState(0).state_dict()
    damaged["rank-0"]["numpy"]["key"] = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(StateError, match="damaged"):
        RngState(0).load_state_dict(damaged)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_cuda_in_use_it_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`is_available` loads the driver, which is for runs on a GPU."""
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asked.append("is_available"))
    RngState(0).load_state_dict(RngState(0).state_dict())
    assert asked == []


def test_seeds_that_wait_for_cuda_do_not_replace_what_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before CUDA begins, torch keeps states and seeds for later, and sets the seeds last."""
    waiting: list[str] = ["seed of an earlier manual_seed"]
    found: list[str] = []

    def init() -> None:
        found.extend(waiting)
        waiting.clear()

    def set_rng_state(state: torch.Tensor, number: int) -> None:
        if waiting:
            waiting.insert(0, f"state {number}")
        else:
            found.append(f"state {number}")

    for name, value in {"is_available": lambda: True, "device_count": lambda: 2}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_rng_state)
    state = RngState(0).state_dict()
    state["rank-0"]["cuda"] = {"0": torch.zeros(16, dtype=torch.uint8), "1": torch.zeros(16, dtype=torch.uint8)}
    RngState(0).load_state_dict(state)
    init()  # at the latest with the first tensor on a GPU
    assert found == ["seed of an earlier manual_seed", "state 0", "state 1"]
