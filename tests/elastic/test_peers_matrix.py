"""The matrix that peers are run through: what it says of a loader that is right, and of some that are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiles.peers.elastic import ours
from profiles.peers.elastic.matrix import (
    GLOBAL_BATCH,
    INTERRUPTED_AT,
    NUM_STEPS,
    Asked,
    Given,
    NotOfferedError,
    Step,
    cells,
)
from profiles.peers_elastic import table


def dealt(asked: Asked) -> Given:
    """Samples in order; the state is the number of steps, and `packed` jobs lose a sample, `mixed` ones repeat a step."""
    if asked.scenario == "mixed and packed":
        raise NotOfferedError("packing")
    first = 0 if asked.states is None else asked.state_of(0)
    if asked.states is not None and asked.scenario == "one source" and asked.world_size == 3:
        raise ValueError("another number of ranks\nthe state has 2")
    lost = int(asked.states is not None and asked.scenario == "packed")
    again = int(asked.states is not None and asked.scenario == "mixed")
    steps: list[Step] = [
        [(lost + (step - again) * GLOBAL_BATCH + n,) for n in range(GLOBAL_BATCH)]
        for step in range(first, first + asked.num_steps)
    ]
    return Given(steps, [first + asked.num_steps] * asked.world_size)


def test_what_is_lost_doubled_and_refused_is_counted() -> None:
    later = NUM_STEPS - INTERRUPTED_AT
    scenarios = ["one source", "mixed", "packed", "mixed and packed", "weights changed"]
    found = {
        (cell["scenario"], cell["after"]): cell for cell in cells(dealt, scenarios, [(2, 1), (2, 3)], is_pairwise=False)
    }
    assert found["one source", 1]["is_same"]
    assert found["one source", 3]["error"] == "ValueError: the state has 2"
    assert found["one source", 3]["where"] == "resumed"
    mixed, packed = found["mixed", 1], found["packed", 3]
    assert (mixed["num_missing"], mixed["num_again"], mixed["num_same_steps"]) == (GLOBAL_BATCH, GLOBAL_BATCH, 0)
    assert (packed["num_missing"], packed["num_again"], packed["num_same_steps"]) == (1, 0, 0)
    assert packed["num_wanted"] == later * GLOBAL_BATCH
    assert "not_offered" in found["mixed and packed", 1]
    assert found["weights changed", 1]["share_of_first_source"] == 1
    text = table({"x": {"version": "1", "cells": list(found.values())}})
    assert "| x 1 | one source | resumed: ValueError: the state has 2 | 2-3 |" in text
    assert "| x 1 | mixed | 0 of 6 steps the same, 240 of 1440 missing, 240 again | all 2 |" in text


@pytest.mark.matrix(1)
@pytest.mark.parametrize("scenario", ["one source", "mixed", "packed", "mixed and packed"])
def test_loaderkit_goes_through_it(tmp_path: Path, scenario: str) -> None:
    ours.make(tmp_path)
    for cell in cells(ours.runner(tmp_path), [scenario], [(2, 3)], is_pairwise=False):
        assert cell["is_same"], cell
        assert cell["num_again"] == 0


def test_loaderkit_changes_weights_where_it_was_interrupted(tmp_path: Path) -> None:
    (cell,) = cells(ours.runner(tmp_path), ["weights changed"], [(2, 3)], is_pairwise=False)
    assert cell["num_again"] == 0
    assert cell["share_of_first_source"] == pytest.approx(0.3, abs=0.001)
