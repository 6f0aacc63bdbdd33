"""Which checkpoints are kept: every rule by itself, and what holds for all of them."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from loaderkit.checkpoint.manager.retention import SavedStep, steps_to_keep
from loaderkit.checkpoint.manager.settings import BestArgs, KeepArgs

NOW_S = 1e9


def keep(**rules: Any) -> KeepArgs:
    return KeepArgs.model_validate(rules)


def saved(*steps: int, **metrics: list[float]) -> list[SavedStep]:
    """Steps that were saved a day apart, the last of them now."""
    return [
        SavedStep(step, NOW_S - 86400.0 * (len(steps) - 1 - n), {name: values[n] for name, values in metrics.items()})
        for n, step in enumerate(steps)
    ]


def test_of_none_none_is_kept() -> None:
    assert steps_to_keep([], keep(last=1), NOW_S) == set()


def test_each_rule() -> None:
    steps = saved(100, 200, 300, 400, 500)
    assert steps_to_keep(steps, keep(last=2), NOW_S) == {400, 500}
    assert steps_to_keep(steps, keep(last=9), NOW_S) == {100, 200, 300, 400, 500}
    assert steps_to_keep(steps, keep(every=200), NOW_S) == {200, 400, 500}
    assert steps_to_keep(steps, keep(every=100, **{"for": "60h"}), NOW_S) == {300, 400, 500}


def test_the_best() -> None:
    steps = saved(1, 2, 3, 4, 5, loss=[0.5, 0.2, math.nan, 0.2, 0.9])
    assert steps_to_keep(steps, keep(best={"metric": "loss"}), NOW_S) == {4, 5}  # of equal ones the newer
    assert steps_to_keep(steps, keep(best={"metric": "loss", "num": 3}), NOW_S) == {1, 2, 4, 5}
    assert steps_to_keep(steps, keep(best={"metric": "loss", "mode": "max"}), NOW_S) == {5}
    assert steps_to_keep(steps, keep(best={"metric": "other"}), NOW_S) == {5}


RULES = st.builds(
    lambda last, every, age, best: keep(last=last, every=every, best=best, **({"for": age} if every and age else {})),
    st.integers(1, 4),
    st.none() | st.integers(1, 20),
    st.none() | st.floats(1.0, 1e6),
    st.none()
    | st.builds(BestArgs, metric=st.just("loss"), mode=st.sampled_from(["min", "max"]), num=st.integers(1, 3)),
)
STEPS = st.dictionaries(
    st.integers(0, 100),
    st.tuples(st.floats(0.0, 1e6), st.dictionaries(st.just("loss"), st.floats(-5, 5) | st.just(math.nan))),
    min_size=1,
).map(lambda table: [SavedStep(step, NOW_S - age, metrics) for step, (age, metrics) in table.items()])


@given(STEPS, RULES)
def test_the_newest_is_never_removed_and_rules_add_up(steps: list[SavedStep], rules: KeepArgs) -> None:
    kept = steps_to_keep(steps, rules, NOW_S)
    everything = {item.step for item in steps}
    assert max(everything) in kept
    assert kept <= everything
    assert len(kept) >= min(rules.last, len(everything))
    # What one rule keeps, it keeps whatever the others say.
    for alone in (keep(last=rules.last), keep(every=rules.every), keep(best=rules.best)):
        if alone.every is None or rules.max_age_s is None:
            assert steps_to_keep(steps, alone, NOW_S) <= kept
    # Nothing else is kept: each has its reason.
    newest = sorted(everything)[-rules.last :]
    for item in steps:
        if item.step in kept and item.step not in newest and rules.best is None:
            assert rules.every is not None
            assert item.step % rules.every == 0


@given(STEPS, RULES)
def test_it_settles(steps: list[SavedStep], rules: KeepArgs) -> None:
    """What is kept once is kept when it is asked again."""
    kept = steps_to_keep(steps, rules, NOW_S)
    assert steps_to_keep([item for item in steps if item.step in kept], rules, NOW_S) == kept


@given(STEPS, RULES, st.randoms())
def test_the_order_does_not_matter(steps: list[SavedStep], rules: KeepArgs, random: Any) -> None:
    shuffled = random.sample(steps, len(steps))
    assert steps_to_keep(shuffled, rules, NOW_S) == steps_to_keep(steps, rules, NOW_S)
