"""SIGTERM at a random moment to one of several ranks: all stop at one step, exit with 0 in time, and go on with the very next
batch, with the same losses to the last bit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import noticed_ranks
import pytest
import rank_programs

NUM_STEPS = 16
pytestmark = pytest.mark.filterwarnings("ignore")


def run(
    num_ranks: int,
    folder: Path,
    name: str,
    victim: int = -1,
    call: int = -1,
    within: str = "10min",
    budget_s: float = 600.0,
) -> dict[str, Any]:
    """What all ranks say of it, who say the same."""
    folder.mkdir(exist_ok=True)
    arguments = (folder, name, victim, call, NUM_STEPS, within, budget_s)
    assert rank_programs.run_ranks(noticed_ranks.train, num_ranks, *arguments) == [0] * num_ranks
    found = [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(num_ranks)]
    assert len({(one["stopped"], one["newest"]) for one in found}) == 1
    return {**found[0], "calls": min(one["calls"] for one in found)}


def lines_of(folder: Path, num_ranks: int) -> list[list[str]]:
    return [(folder / f"lines-{rank}.txt").read_text().splitlines() for rank in range(num_ranks)]


def interrupt(num_ranks: int, num_notices: int, folder: Path, rng: random.Random, **times: Any) -> None:
    """A whole run, and one that is interrupted so often. `times`: `within` and `budget_s` of each notice."""
    whole, parts = folder / "whole", folder / "parts"
    num_calls = run(num_ranks, whole, "whole")["calls"]
    for number in range(num_notices):
        # So many calls of the whole run that all notices come before its end.
        victim, call = rng.randrange(num_ranks), 1 + rng.randrange(max(num_calls // (3 * num_notices), 2))
        found = run(num_ranks, parts, str(number), victim, call, **times)
        assert found["stopped"] is not None
        assert found["newest"] == found["stopped"]
        assert found["extent"]["whole"]
    run(num_ranks, parts, "last")
    assert lines_of(parts, num_ranks) == lines_of(whole, num_ranks)


def test_all_stop_at_one_step_and_go_on_there(tmp_path: Path, rng: random.Random) -> None:
    interrupt(2, 2, tmp_path, rng)


@pytest.mark.prove
@pytest.mark.parametrize("number", range(10))
def test_50_moments(number: int, tmp_path: Path, rng: random.Random) -> None:
    """Five each, of 2 to 4 ranks."""
    interrupt(2 + number % 3, 5, tmp_path, rng, within="25s", budget_s=30.0)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_with_too_little_time_weights_and_position_are_saved(
    num_ranks: int, tmp_path: Path, rng: random.Random
) -> None:
    """By the real times: nothing fits into 5 ms, so the least is saved; the next start goes on with the very next batch."""
    num_calls = run(num_ranks, tmp_path / "whole", "whole")["calls"]
    folder = tmp_path / "parts"  # the first steps make most of the calls; one save is over by then
    found = run(num_ranks, folder, "first", rng.randrange(num_ranks), num_calls * 17 // 20, within="5ms")
    stopped = found["stopped"]
    assert found["newest"] == stopped
    assert found["extent"]["whole"] is False
    run(num_ranks, folder, "second")
    for mine, whole in zip(lines_of(folder, num_ranks), lines_of(tmp_path / "whole", num_ranks), strict=True):
        assert mine[:stopped] == whole[:stopped]
        assert [line.split()[2] for line in mine] == [line.split()[2] for line in whole]
        assert mine[stopped].split()[1] == whole[stopped].split()[1]  # the first loss is by the weights alone
