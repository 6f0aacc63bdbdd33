"""A seed gives everyone the same cases."""

from __future__ import annotations

import importlib
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st


def drawn(number: int) -> list[tuple[int, str]]:
    cases: list[tuple[int, str]] = []

    @seed(number)
    @settings(max_examples=200)
    @given(st.integers(), st.text())
    def draw(count: int, text: str) -> None:
        cases.append((count, text))

    draw()
    return cases


def test_what_is_imported_changes_no_case(rng: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = rng.randrange(2**32)
    expected = drawn(number)
    constants = [rng.randrange(10**6, 10**9) for _ in range(500)]
    (tmp_path / "module_of_numbers.py").write_text(
        f"NUMBERS = {constants}\nTEXTS = {[f'text {n}' for n in constants]}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("module_of_numbers")
    assert drawn(number) == expected


CASES: list[int] = []


@given(st.integers())
def test_some_cases(number: int) -> None:
    CASES.append(number)


def test_a_run_draws_what_its_seed_says() -> None:
    expected: list[int] = []

    @seed(int(os.environ["LOADERKIT_SEED"]))
    @given(st.integers())
    def draw(number: int) -> None:
        expected.append(number)

    draw()
    test_some_cases()
    assert CASES[-len(expected) :] == expected
