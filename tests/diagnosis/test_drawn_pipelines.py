"""Pipelines drawn at random, run for real beside busy programs: the verdict is right, or names the right kind as one of two
that it cannot tell apart; and ten runs of one pipeline agree."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from profiles.drawn import judged, machine, profiled, unstable
from profiles.drawn_cases import Drawn, draw

NUM_DRAWS, NUM_RUNS = 20, 10


def drawn(rng: random.Random, words: str) -> Drawn:
    """The next pipeline whose name has these words."""
    return next(case for case in iter(lambda: draw(rng), None) if words in case.name)


@pytest.mark.prove
@pytest.mark.alone
@pytest.mark.parametrize("beside", ["quiet", "busy", "busier"])
@pytest.mark.parametrize("words", ["giants", "thread_safe", "one batch", "GIL", "BLAS", "lock"])
def test_the_right_kind_is_named(words: str, beside: str, tmp_path: Path, rng: random.Random) -> None:
    with machine(beside):
        rows = [judged(case, profiled(case, tmp_path)) for case in (drawn(rng, words) for _ in range(NUM_DRAWS))]
    wrong = [row for row in rows if not (row["kind_is_right"] and row["stage_is_right"])]
    assert len(wrong) <= NUM_DRAWS / 20, wrong
    assert not [row for row in rows if row["contradictions"]]


@pytest.mark.prove
@pytest.mark.alone
def test_ten_runs_of_a_dozen_pipelines_agree(tmp_path: Path, rng: random.Random) -> None:
    cases = [draw(rng) for _ in range(12)]
    rows = [judged(case, profiled(case, tmp_path)) for case in cases for _ in range(NUM_RUNS)]
    assert not list(unstable(rows, NUM_RUNS))
