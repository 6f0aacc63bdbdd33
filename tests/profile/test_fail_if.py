"""`--fail-if`: what a condition means, and what is said about one that is none."""

from __future__ import annotations

import pytest

from loaderkit.profile.fail_if import FIGURES, parse_condition


@pytest.mark.parametrize(
    ("text", "figure", "comparison", "bound"),
    [
        ("stall>5%", "stall", ">", 5.0),
        (" stall >= 5 ", "stall", ">=", 5.0),
        ("utilisation<90%", "utilisation", "<", 90.0),
        ("step_p99 > 200ms", "step_p99", ">", 0.2),
        ("samples_per_s<=2e3", "samples_per_s", "<=", 2000.0),
    ],
)
def test_a_condition_is_read(text: str, figure: str, comparison: str, bound: float) -> None:
    found = parse_condition(text)
    assert (found.figure, found.comparison) == (figure, comparison)
    assert found.bound == pytest.approx(bound)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no condition"),
        ("stall", "no condition"),
        ("stall=5%", "no condition"),
        ("stahl>5%", "did you mean 'stall'"),
        ("stall>lots", "share of the time"),
        ("stall>500%", "from 0% to 100%"),
        ("stall>nan", "from 0% to 100%"),
        ("step_p50>5%", "a duration"),
        ("samples_per_s<-1", "from 0 on"),
        ("stall>5%; import os", "share of the time"),
    ],
)
def test_what_is_no_condition_says_why(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_condition(text)


def test_every_figure_can_be_asked_for() -> None:
    for name, figure in FIGURES.items():
        value = {"percent": "5%", "seconds": "5ms", "number": "5"}[figure.unit]
        assert parse_condition(f"{name}>{value}").figure == name
